"""What values a composed config may hold, beyond what OmegaConf asks of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megads.errors import ConfigError
from megads.runtime.files import read_regular, require_bounded_yaml

_MOST_CHARACTERS = 1 << 18
_MOST_VALUES = 10_000
"""Of one file with its aliases put in; the largest config of a run has some 200."""


class BoundedFileSource(FileConfigSource):
    """Hydra's source of files, with a bound on what one of them may hold."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a file; raises ConfigLoadError where it is missing or no config, or grows too large by its aliases."""
        path = Path(self.path) / self._normalize_file_name(config_path)
        if path.is_file():
            _require_bounded(path)
        try:
            return super().load_config(config_path)
        except RecursionError:
            raise ConfigLoadError(f"{path}: is nested too deeply") from None
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ConfigLoadError(f"{path}: cannot be read as a config: {said}") from error


def bound_config_files() -> None:
    """Lets Hydra read files through BoundedFileSource; it must have loaded its plugins."""
    # `register` keeps the first source of a scheme, which is Hydra's own.
    SourcesRegistry.instance().types["file"] = BoundedFileSource


def _require_bounded(path: Path) -> None:
    try:
        text = read_regular(path).decode()
        require_bounded_yaml(text, _MOST_CHARACTERS)
    except (OSError, ValueError) as error:
        raise ConfigLoadError(f"{path}: cannot be read as a config: {error}") from error
    # Most files have no alias, and are not parsed twice.
    if "&" not in text or "*" not in text:
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = 0 if root is None else _values(root, {})
    except RecursionError:
        raise ConfigLoadError(f"{path}: is nested too deeply, or an alias contains itself") from None
    except YAMLError:
        # Reading it says what is wrong.
        return
    if values > _MOST_VALUES:
        raise ConfigLoadError(
            f"{path}: its aliases stand for more than {_MOST_VALUES:,} values: write out those that are meant"
        )


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Counts the values below a node, those of an alias at each of its places."""
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        else:
            children = node.value if isinstance(node, yaml.SequenceNode) else []
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]


# Counts reach torch, NumPy and files as signed integers of 64 bits.
_INTEGER_BITS = 63


def require_values(config: Any, where: str = "") -> None:
    """Refuses what OmegaConf lets through: ${...} that puts a section where a list or another section belongs, whole
    dicts as elements of lists, numbers that are none, and integers that no counter holds.

    Args:
        config: an instance of a config dataclass.
        where: dotted key of the section, with a dot at its end; empty for the root.

    Raises:
        ConfigError: names the key, the value and what is wanted.
    """
    for name, hint in get_type_hints(type(config)).items():
        _require(f"{where}{name}", getattr(config, name), hint)


def _require(key: str, value: Any, hint: Any) -> None:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in options:
        return
    _require_number(key, value)
    for option in options:
        origin = get_origin(option) or option
        if origin is list:
            if not isinstance(value, list):
                raise ConfigError(f"{key}: {value!r} is no list, and one is wanted: {key}=[a,b]")
            _require_items(key, value, get_args(option)[0])
        elif origin is dict:
            if not isinstance(value, dict):
                raise ConfigError(f"{key}: {value!r} is no map, and one is wanted: {key}={{a: 1}}")
        elif isinstance(origin, type) and is_dataclass(origin):
            if not isinstance(value, origin):
                raise ConfigError(f"{key}: {value!r} is no section of the kind that is wanted; leave it out")
            require_values(value, f"{key}.")
        elif origin is Any:
            for number in _numbers(value):
                _require_number(key, number)


def _require_items(key: str, values: list[Any], hint: Any) -> None:
    for place, item in enumerate(values):
        if hint is str:
            if not isinstance(item, str):
                name = key.rpartition(".")[2]
                raise ConfigError(f"{key}: {item!r} is no text, and a list of texts is wanted: {name}=[a,b]")
        elif hint in (int, float) and (isinstance(item, bool) or not isinstance(item, int | hint)):
            raise ConfigError(f"{key}[{place}]: {item!r} is no number, and a list of numbers is wanted: {key}=[1,2]")
        else:
            _require(f"{key}[{place}]", item, hint)


def _require_number(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {value}: must be a finite number")
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        shown = str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
        raise ConfigError(f"{key} = {shown}: must fit in a signed integer of 64 bits, that is up to {2**63 - 1}")


def _numbers(value: Any) -> Iterator[Any]:
    """Yields what is in nested lists and dicts."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    else:
        yield value
