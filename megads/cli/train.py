"""`megads train`: checks the config, freezes it into the run directory and starts the ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from megads.cli.verb import Invocation, Verb
from megads.config import RootConfig
from megads.launch.preflight import ResolvedRun
from megads.launch.start import StartRequest, start_run
from megads.runtime.environment import rehearsal_folder
from megads.tools.sweep.config import SweepConfig


@dataclass
class TrainCommandConfig(RootConfig):
    """The config of a run, and with -m of a sweep over runs."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """The sweep."""


def run(command: TrainCommandConfig, invocation: Invocation) -> int:
    """Starts or continues the run that the config describes and returns its exit code."""
    # How a run was swept over is no part of it: neither its name nor its frozen config.
    config = RootConfig(**{item.name: getattr(command, item.name) for item in dataclasses.fields(RootConfig)})
    if command.sweep != SweepConfig():
        print("the settings of sweep and hparams_search count with -m only", file=sys.stderr, flush=True)
    rehearsal = rehearsal_folder()
    if rehearsal is not None and not config.run.dry_run:
        from megads.tools.rehearse.start import rehearsed

        config = rehearsed(config, invocation.choices, rehearsal)
    return start_run(config, StartRequest(invocation.choices, invocation.claimed_dirs, _describe))


def _describe(resolved: ResolvedRun) -> str:
    """What a dry run shows."""
    # It pulls in torch, for which the tab key must not wait.
    from megads.tools.plan.dry_run import describe_run

    return describe_run(resolved)


def _sweep(arguments: Sequence[str]) -> int:
    """What -m does."""
    from megads.cli.sweep import run_sweep

    return run_sweep(VERB, arguments)


VERB = Verb("train", TrainCommandConfig, run, text_keys=("sweep.sbatch_options",), sweep=_sweep)
