"""What `megads report` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from megads.errors import ConfigError

MOST_RUNS = 8
"""Runs of one comparison; more curves than this cannot be told apart."""


@dataclass
class ReportConfig:
    """What to draw and where to write."""

    run: Any = MISSING
    """Run directory, or the id of a run in runs/; a list of them draws a comparison."""
    output: str | None = None
    """Folder for report.html and report/*.png; null is the run's own. A comparison must name one."""

    @property
    def runs(self) -> list[str]:
        """The runs as a list of names."""
        given = self.run if isinstance(self.run, list) else [self.run]
        return [str(name) for name in given if name is not None]

    def check(self) -> None:
        """Raises ConfigError unless there are runs, each named once, and a place for what several make."""
        runs = self.runs
        if not runs or "" in runs:
            raise ConfigError(f"run = {self.run}: give a run directory, for example run=runs/<run id>")
        twice = {name for name in runs if runs.count(name) > 1}
        if twice:
            raise ConfigError(f"run names {', '.join(sorted(twice))} twice: give every run once")
        if len(runs) > MOST_RUNS:
            raise ConfigError(f"run names {len(runs)} runs: at most {MOST_RUNS} can be told apart in one picture")
        if len(runs) > 1 and self.output is None:
            raise ConfigError(
                "a comparison of several runs belongs to none of them: say where it goes, for example "
                "output=runs/comparison"
            )


def require_matplotlib() -> None:
    """Raises ConfigError where pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reports are drawn with matplotlib, and {error.name} is not installed: pip install 'megads[report]', or "
            "in a checkout pip install -e '.[report]' -c constraints.txt"
        ) from error
