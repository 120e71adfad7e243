"""Settings of `megads watch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megads.api import ConfigError
from megads.tools.report.config import check_names, names_of, require_matplotlib

MOST_PORT = 65535


@dataclass
class WatchConfig:
    """`megads watch`: the runs to show and the port to serve them on."""

    run: Any = None
    """Run directory, id of a run in runs/, or a list of them; for a folder of runs, its 8 newest runs are shown,
    including runs that start later. null: runs/."""
    port: int = 0
    """Port on 127.0.0.1; 0 uses a free one."""
    refresh_s: float = 5.0
    """Refresh interval of the page, in seconds."""

    @property
    def names(self) -> list[str]:
        """run as a list of run and folder names."""
        return ["runs"] if self.run is None else names_of(self.run)

    def check(self) -> None:
        """Raises ConfigError if a name is empty or repeated, if there are too many, or if a value is out of range."""
        if self.run is not None:
            check_names(self.run)
        if not 0 <= self.port <= MOST_PORT:
            raise ConfigError(f"port = {self.port}: must be between 0 (a free one) and {MOST_PORT}")
        if not 1.0 <= self.refresh_s <= 3600.0:
            raise ConfigError(f"refresh_s = {self.refresh_s:g}: must be between 1 and 3600 seconds")


def require_packages() -> None:
    """Raises ConfigError if matplotlib or waitress is not installed."""
    require_matplotlib()
    try:
        import waitress  # noqa: F401
    except ImportError as error:
        raise ConfigError("waitress is not installed: pip install 'megads[watch]'") from error
