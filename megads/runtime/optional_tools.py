"""Tools that the core can do without, found by name: nothing outside of megads.tools imports one of its modules."""

from __future__ import annotations

import importlib
from types import ModuleType

from megads.errors import ConfigError

_PACKAGE = "megads.tools"


def find_tool(name: str) -> ModuleType | None:
    """Imports a module of megads.tools.

    Args:
        name: its name below megads.tools, such as `plan.run_plan`.

    Returns:
        The module; None if the tool is not installed.
    """
    full = f"{_PACKAGE}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{full}.".startswith(f"{error.name}."):
            raise  # the tool is there, but a package that it needs is not
        return None


def require_tool(name: str, what: str) -> ModuleType:
    """Imports a module of megads.tools without which something that the user asked for cannot be done.

    Args:
        name: its name below megads.tools.
        what: what needs it, for the message, such as `run.dry_run=true`.

    Raises:
        ConfigError: the tool is not installed.
    """
    found = find_tool(name)
    if found is None:
        raise ConfigError(
            f"{what} needs {_PACKAGE}.{name.partition('.')[0]}, which is not installed: install all of megads"
        )
    return found
