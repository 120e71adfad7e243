"""Config of `megads report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megads.api import ConfigError
from megads.tools.plan.devices import find_device

MOST_RUNS = 8
"""Maximum number of runs in a comparison; more curves cannot be told apart."""


@dataclass
class ReportConfig:
    """Runs or site to report on, and where to write the report."""

    run: Any = None
    """Run directory, or id of a run in runs/; a list gives a comparison. Required unless site is set."""
    output: str | None = None
    """Folder for report.html and report/*.png; null is the run directory, or site-report for a site. Required for a
    comparison."""
    device: str | None = None
    """Plan a step of the run on this device, a name or a device file written by megads calibrate on the run's machine,
    and compare it with the timed steps (logging.timeline_every_steps)."""
    site: str | None = None
    """Instead of a run: a file with the output of sacct --parsable2, or the command, for example
    site="sacct --starttime=2026-01-01" (docs/report.md)."""
    site_gpus: int | None = None
    """Number of GPUs of the site, to compute its utilization."""
    json: bool = False
    """Print the numbers of a site as JSON instead of writing a report."""

    @property
    def runs(self) -> list[str]:
        """The runs as a list of names, also if only one is given."""
        return names_of(self.run)

    def check(self) -> None:
        """Raises ConfigError on missing or duplicate runs, a comparison without `output`, or conflicting options."""
        if self.site is not None:
            self._check_site()
            return
        for name in ("site_gpus", "json"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} = {getattr(self, name)} belongs to the report of a site: give site=<sacct dump>"
                )
        if self.run is None:
            raise ConfigError(
                "run has no value: it must be set, for example run=<value>: give a run directory, or site=<sacct dump>"
            )
        check_names(self.run)
        several = len(self.runs) > 1
        if self.device is not None:
            find_device(self.device)
            if several:
                raise ConfigError(f"device = {self.device} plans a step of one run: give one run")
        if several and self.output is None:
            raise ConfigError(
                "a comparison of several runs needs an output folder of its own: set it, for example "
                "output=runs/comparison"
            )

    def _check_site(self) -> None:
        """Raises ConfigError on options of a run, an empty `site`, or an invalid `site_gpus`."""
        if self.runs:
            raise ConfigError(
                f"run = {self.run} and site = {self.site}: a report is of a run or of a site, give one of them"
            )
        if self.device is not None:
            raise ConfigError(f"device = {self.device} plans a step of a run: it does not apply to site")
        if not str(self.site).strip():
            raise ConfigError("site is empty: give a file with the output of sacct --parsable2, or the command")
        if self.site_gpus is not None and self.site_gpus < 1:
            raise ConfigError(f"site_gpus = {self.site_gpus}: must be at least 1")


def names_of(run: Any) -> list[str]:
    """The names of a key that takes one run or a list."""
    return [str(name) for name in (run if isinstance(run, list) else [run]) if name is not None]


def check_names(run: Any) -> None:
    """Raises ConfigError if a name of a key that takes runs is empty or repeated, or if there are too many."""
    names = names_of(run)
    if not names or "" in names:
        raise ConfigError(f"run = {run}: give a run directory, for example run=runs/<run id>")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"run names {', '.join(sorted(twice))} twice: give every run once")
    if len(names) > MOST_RUNS:
        raise ConfigError(f"run names {len(names)} runs: at most {MOST_RUNS} can be told apart in one picture")


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reports are drawn with matplotlib, and {error.name} is not installed: pip install 'megads[report]', or "
            "in a checkout pip install -e '.[report]' -c constraints.txt"
        ) from error
