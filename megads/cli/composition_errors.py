"""Converts Hydra's and OmegaConf's composition errors into one message that names the nearest key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from megads.cli.verb import config_dir

_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_QUOTED = re.compile(r"'([^']+)'")
_CHOSEN_TWICE = re.compile(r"Multiple values for ([\w/]+)|^([\w/]+) appears more than once")


def schema_keys(schema: type) -> list[str]:
    """Returns all dotted keys of a config dataclass, sections included, keys of list items excluded."""
    return list(_walk(schema, ""))


def _walk(schema: Any, prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    for item in fields(schema):
        key = f"{prefix}{item.name}"
        yield key
        kind = types[item.name]
        if get_origin(kind) is None and is_dataclass(kind):
            yield from _walk(kind, f"{key}.")


def explain_added_key(content: Any, schema: type) -> str:
    """Returns an error message for the first key that is not in the schema, or an empty string.

    Hydra's `+key=value` adds keys even to a typed config, and they would be dropped silently.

    Args:
        content: the config as plain dicts.
        schema: dataclass of the config.
    """
    key = next(_added_keys(content, schema, ""), None)
    return "" if key is None else _unknown_key(key, schema)


def _added_keys(content: Any, schema: type, prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    for name, value in content.items():
        if name not in types:
            yield f"{prefix}{name}"
        elif isinstance(value, dict) and is_dataclass(types[name]):
            yield from _added_keys(value, types[name], f"{prefix}{name}.")


def explain(error: Exception, schema: type) -> str:
    """Returns an error message for a command line or config file: what is wrong, the value, and the remedy.

    Args:
        error: exception raised by Hydra or OmegaConf during composition.
        schema: dataclass of the config.
    """
    if isinstance(error, MissingConfigException):
        return _explain_choice(error)
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override {error.override!r}: {_first_line(error)} (quote values with brackets or spaces)"
        )
    cause = _innermost(error)
    unknown = _UNKNOWN_KEY.search(str(error))
    if unknown and unknown.group(1) not in schema_keys(schema):
        return _unknown_key(unknown.group(1), schema)
    if isinstance(cause, MissingMandatoryValue):
        key = _full_key(cause)
        return f"{key} has no value: it must be set, for example {key}=<value>"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and _full_key(cause) not in ("", *schema_keys(schema)):
        # An item of a list (data.train[0]) is a separate dataclass, whose keys `schema_keys` does not contain.
        owner: Any = cause.object_type
        in_item = "." not in _full_key(cause) and is_dataclass(owner)
        return _place(error) + _unknown_key(_full_key(cause), owner if in_item else schema)
    if isinstance(cause, OmegaConfBaseException):
        return _place(error) + _wrong_value(cause, schema)
    twice = _CHOSEN_TWICE.search(str(error))
    if twice:
        group = twice.group(1) or twice.group(2)
        return f"{group} is chosen twice: write {group}=<option>, without a leading +"
    if isinstance(error, HydraException | OmegaConfBaseException | YAMLError | ValueError):
        return str(error).strip()
    # Not an error message for users: Hydra crashed on the overrides.
    return f"the overrides do not compose ({type(error).__name__}: {error})"


def _explain_choice(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    options = sorted(error.options or ())
    if not group:
        return str(error).strip()
    if Path("conf", f"{missing}.yaml").is_file():
        return f"{group}={option}: conf/{missing}.yaml is not in the search path: add --config-dir conf"
    return f"{group}={option}: there is no such option{_nearest(option, options)}; {group} has {', '.join(options)}"


def _unknown_key(key: str, schema: type) -> str:
    keys = schema_keys(schema)
    if key not in keys and (config_dir() / key).is_dir():
        return (
            f"the keys of this file are put into a section {key}, which does not exist: "
            "its first line must be `# @package _global_`"
        )
    section, _, leaf = key.rpartition(".")
    siblings = [known for known in keys if section and known.rpartition(".")[0] == section]
    # `lr=1e-4` for `optim.lr=1e-4`: the last part is right, the section is missing.
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    if same_leaf:
        hint = f": did you mean {' or '.join(same_leaf[:3])}?"
    else:
        hint = _nearest(key, siblings or keys)
    if not hint and not siblings:
        hint = _nearest(key.partition(".")[0], [known for known in keys if "." not in known])
    if not hint and siblings:
        hint = f"; {section} has {', '.join(known.rpartition('.')[2] for known in siblings)}"
    return f"unknown key {key}{hint or '; --help lists the main keys, --cfg job all of them'}"


def _nearest(word: str, known: Sequence[str]) -> str:
    """Returns `: did you mean ...?`, or an empty string if no known word is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""


def _wrong_value(cause: OmegaConfBaseException, schema: type) -> str:
    key = _full_key(cause)
    message = _first_line(cause)
    if not key:
        return message
    kind = _type_of(schema, key)
    if is_dataclass(kind):
        return _explain_section(key, kind, message)
    value = _QUOTED.search(message)
    if value and hasattr(kind, "refused") and value.group(1) in kind.refused():
        return f"{key}: {message}; {kind.refused()[value.group(1)]}"
    expected = _in_words(kind)
    return f"{key}: {message}" + (f" (expected {expected})" if expected else "")


def _explain_section(section: str, kind: Any, message: str) -> str:
    """Returns an error message for a section that is given a value or used as a config group."""
    keys = [item.name for item in fields(kind)]
    value = message.rpartition("value: ")[2]
    likely = next((key for key in ("name", "raw") if key in keys), None)
    example = f": did you mean {section}.{likely}={value}?" if likely else ""
    return f"{section}={value}: {section} is a section, not a config group{example}; it has {', '.join(keys)}"


def _type_of(schema: type, key: str) -> Any:
    """Returns the type of a dotted key; None if it is not in the schema."""
    kind: Any = schema
    for part in key.split("."):
        if not is_dataclass(kind) or not isinstance(kind, type):
            return None
        kind = get_type_hints(kind).get(part)
    return kind


def _in_words(kind: Any) -> str:
    """Returns a description of a type, or an empty string for other types than scalars."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    options = [names.get(option, "") for option in (get_args(kind) or (kind,))]
    return " or ".join(options) if all(options) else ""


def _place(error: Exception) -> str:
    """Returns `<file>.yaml: ` if the error is in a config file, not on the command line."""
    found = re.match(r"In '([^']+)'", str(error))
    return f"{found.group(1)}.yaml: " if found else ""


def _innermost(error: BaseException) -> BaseException:
    """Returns the innermost cause; Hydra wraps OmegaConf's errors, sometimes without setting __cause__."""
    while True:
        inner = error.__cause__ or error.__context__
        if inner is None or isinstance(error, OmegaConfBaseException):
            return error
        error = inner


def _full_key(error: BaseException) -> str:
    return str(getattr(error, "full_key", None) or "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
