"""What `megads report` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megads.errors import ConfigError
from megads.plan.devices import find_device

MOST_RUNS = 8
"""Runs of one comparison; more curves than this cannot be told apart."""


@dataclass
class ReportConfig:
    """What to draw and where to write."""

    run: Any = None
    """Run directory, or the id of a run in runs/; a list of them draws a comparison. Needed unless site is given."""
    output: str | None = None
    """Folder for report.html and report/*.png; null is the run's own. A comparison must name one. Of a site it is
    site-report unless given."""
    device: str | None = None
    """Plan a step of the run on this device, a name or the file that megads calibrate wrote on the run's machine, and
    show it beside the timed steps (logging.timeline_every_steps)."""
    site: str | None = None
    """Instead of a run: what sacct --parsable2 printed, a file, or the command, as site="sacct --starttime=2026-01-01"
    (docs/site.md)."""
    site_gpus: int | None = None
    """GPUs of the site, for its utilization."""
    json: bool = False
    """Print the numbers of a site as JSON instead of drawing them."""

    @property
    def runs(self) -> list[str]:
        """The runs as a list of names."""
        given = self.run if isinstance(self.run, list) else [self.run]
        return [str(name) for name in given if name is not None]

    def check(self) -> None:
        """Raises ConfigError unless there are runs, each named once, and a place for what several make."""
        if self.site is not None:
            self._check_site()
            return
        for name in ("site_gpus", "json"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} = {getattr(self, name)} belongs to the report of a site: give site=<sacct dump>"
                )
        runs = self.runs
        if self.run is None:
            raise ConfigError(
                "run has no value: it must be set, for example run=<value>: give a run directory, or site=<sacct dump>"
            )
        if not runs or "" in runs:
            raise ConfigError(f"run = {self.run}: give a run directory, for example run=runs/<run id>")
        twice = {name for name in runs if runs.count(name) > 1}
        if twice:
            raise ConfigError(f"run names {', '.join(sorted(twice))} twice: give every run once")
        if len(runs) > MOST_RUNS:
            raise ConfigError(f"run names {len(runs)} runs: at most {MOST_RUNS} can be told apart in one picture")
        if self.device is not None:
            find_device(self.device)
            if len(runs) > 1:
                raise ConfigError(f"device = {self.device} plans a step of one run: give one run")
        if len(runs) > 1 and self.output is None:
            raise ConfigError(
                "a comparison of several runs belongs to none of them: say where it goes, for example "
                "output=runs/comparison"
            )

    def _check_site(self) -> None:
        """Raises ConfigError on a run beside the site, on no site, and on a site without GPUs."""
        if self.runs:
            raise ConfigError(
                f"run = {self.run} and site = {self.site}: a report is of a run or of a site, give one of them"
            )
        if self.device is not None:
            raise ConfigError(f"device = {self.device} plans a step of a run: it does not apply to site")
        if not str(self.site).strip():
            raise ConfigError("site is empty: give what sacct --parsable2 printed, or the command")
        if self.site_gpus is not None and self.site_gpus < 1:
            raise ConfigError(f"site_gpus = {self.site_gpus}: must be at least 1")


def require_matplotlib() -> None:
    """Raises ConfigError where pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reports are drawn with matplotlib, and {error.name} is not installed: pip install 'megads[report]', or "
            "in a checkout pip install -e '.[report]' -c constraints.txt"
        ) from error
