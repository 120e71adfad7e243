"""Typed access to the training settings that are stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megads.errors import ConfigError

_REQUIRED = object()


class Arguments:
    """Settings by name.

    Args:
        values: settings as stored in the checkpoint.
        origin: description for messages, such as `args of mp_rank_00_model_states.pt`.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns an integer setting, or the default if the setting is absent or None.

        Raises:
            ConfigError: the value has another type, or is absent and has no default.
        """
        value = self._value(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want an integer")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a numeric setting as a float; see `integer`."""
        value = self._value(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want a number")
        return value if value is default else float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a Boolean setting; see `integer`."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want true or false")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Raises if a setting has a value that megads does not support.

        Args:
            name: name of the setting; an absent setting is accepted.
            allowed: supported values.

        Raises:
            ConfigError: the setting has another value.
        """
        value = self.values.get(name)
        if value is not None and value not in allowed:
            computed = " or ".join(repr(item) for item in allowed)
            told = f"megads computes {computed} only" if computed else "megads computes no model with it"
            raise ConfigError(f"{self.origin}: {name} = {value!r}: {told}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.origin}: {name} is missing")
            return default
        return value
