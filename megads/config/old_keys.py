"""Config keys under their former names. They still work: the value goes to the current key, with a note.

Overrides, config files and frozen configs of earlier versions pass through here before anything else reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megads.errors import ConfigError

RENAMED: Mapping[str, str] = {"train.stages": "train.phases", "verify.stage": "verify.phase"}
"""Current name of a key, by its former name."""


def rename_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replaces former keys in the overrides of a command line.

    Args:
        overrides: arguments such as key=value, ++key=value or ~key.

    Returns:
        The overrides, other arguments unchanged, and the former keys among them.

    Raises:
        ConfigError: a key is given under both names.
    """
    given = {_key_of(argument) for argument in overrides}
    found = [key for key in RENAMED if key in given]
    for key in found:
        _require_one_name(key, given, "the command line")
    keys = [_key_of(argument) for argument in overrides]
    renamed = [arg.replace(key, RENAMED.get(key, key), 1) for arg, key in zip(overrides, keys, strict=True)]
    return renamed, found


def _key_of(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~")


def rename_keys(content: dict[Any, Any], where: str, package: str = "") -> list[str]:
    """Renames former keys in a config, in place.

    Args:
        content: the config as nested dicts.
        where: origin of the config, for messages.
        package: section that the content belongs to; empty for the root.

    Returns:
        The former keys that had a value.

    Raises:
        ConfigError: a key is given under both names.
    """
    found = []
    for former, current in RENAMED.items():
        section, _, name = former.rpartition(".")
        values = content if package == section else content.get(section) if not package else None
        if not isinstance(values, dict) or name not in values:
            continue
        new_name = current.rpartition(".")[2]
        _require_one_name(former, {former, *([current] if new_name in values else ())}, where)
        value = values[name]
        # Keeps the order of the keys, as Hydra merges them in it.
        items = [(new_name if key == name else key, item) for key, item in values.items()]
        values.clear()
        values.update(items)
        if value not in (None, []):
            found.append(former)
    return found


def _require_one_name(former: str, given: set[str], where: str) -> None:
    if RENAMED[former] in given:
        raise ConfigError(f"{where} gives both {former} and {RENAMED[former]}, its current name: remove {former}")
