"""Settings that a checkpoint holds of its training, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megads.errors import ConfigError

_REQUIRED = object()


class Arguments:
    """Settings by name.

    Args:
        values: as the checkpoint holds them.
        origin: what they are, for messages, such as `args of mp_rank_00_model_states.pt`.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """An integer; the default where the setting is absent or None.

        Raises:
            ConfigError: it is something else, or absent without a default.
        """
        value = self._value(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want an integer")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number; see `integer`."""
        value = self._value(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want a number")
        return value if value is default else float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch; see `integer`."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want true or false")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses a model that megads does not compute.

        Args:
            name: of the setting; absent is as good as any.
            allowed: its values that megads computes.

        Raises:
            ConfigError: it has another one.
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
