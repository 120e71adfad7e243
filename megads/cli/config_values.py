"""What values a composed config may hold, beyond what OmegaConf asks of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megads.errors import ConfigError

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
