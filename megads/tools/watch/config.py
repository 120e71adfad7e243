"""What `megads watch` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megads.errors import ConfigError
from megads.tools.report.config import MOST_RUNS, require_matplotlib

MOST_PORT = 65535


@dataclass
class WatchConfig:
    """What to show and where to serve it."""

    run: Any = None
    """Run directory, or the id of a run in runs/; a list of them; a folder of runs shows the newest 8 in it, and those
    that begin meanwhile. Unless given, runs/."""
    port: int = 0
    """Port on 127.0.0.1; 0 takes a free one."""
    refresh_s: float = 5.0
    """Seconds after which the page asks again for what is new."""

    @property
    def names(self) -> list[str]:
        """The runs, or folders of runs, as a list of names."""
        given = self.run if isinstance(self.run, list) else [self.run]
        return ["runs"] if self.run is None else [str(name) for name in given]

    def check(self) -> None:
        """Raises ConfigError unless there are names, each once, and a port and an interval that can be."""
        names = self.names
        if not names or "" in names:
            raise ConfigError(f"run = {self.run}: give a run directory, for example run=runs/<run id>")
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"run names {', '.join(sorted(twice))} twice: give every run once")
        if len(names) > MOST_RUNS:
            raise ConfigError(f"run names {len(names)} runs: at most {MOST_RUNS} can be told apart in one picture")
        if not 0 <= self.port <= MOST_PORT:
            raise ConfigError(f"port = {self.port}: must be between 0 (a free one) and {MOST_PORT}")
        if not 1.0 <= self.refresh_s <= 3600.0:
            raise ConfigError(f"refresh_s = {self.refresh_s:g}: must be between 1 and 3600 seconds")


def require_packages() -> None:
    """Raises ConfigError where pictures cannot be drawn or nothing can be served."""
    require_matplotlib()
    try:
        import waitress  # noqa: F401
    except ImportError as error:
        raise ConfigError("waitress is not installed: pip install 'megads[watch]'") from error
