"""`megads train`: checks the config, saves it in the run directory and starts the ranks."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence

from megads.cli.verb import Invocation, Verb
from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.launch.preflight import ResolvedRun
from megads.launch.start import StartRequest, start_run
from megads.runtime.config import ClusterKind
from megads.runtime.environment import rehearsal_folder
from megads.runtime.optional_tools import find_tool, require_tool
from megads.runtime.platform import find_platform_rank


def run(command: RootConfig, invocation: Invocation) -> int:
    """Starts or continues the run that the config describes and returns its exit code."""
    # The sweep is not part of a run: neither of its derived name nor of its frozen config.
    settings = {item.name: getattr(command, item.name) for item in dataclasses.fields(RootConfig)}
    config = RootConfig(**settings)
    if command != _SCHEMA(**settings):
        print("sweep and hparams_search only have an effect with -m", file=sys.stderr, flush=True)
    rehearsal = rehearsal_folder()
    if rehearsal is not None and not config.run.dry_run:
        config = require_tool("rehearse.start", "a rehearsal").rehearsed(config, invocation.choices, rehearsal)
    request = StartRequest(invocation.choices, invocation.claimed_dirs, _describe, invocation.on_run_dir)
    return start_run(config, request)


def _describe(resolved: ResolvedRun) -> str:
    """Returns the output of a dry run."""
    return str(require_tool("plan.dry_run", "run.dry_run=true").describe_run(resolved))


def _sweep(arguments: Sequence[str]) -> int:
    """Runs a sweep.

    Raises:
        ConfigError: a platform has started this process as one of several ranks, each of which would run the sweep.
    """
    require_tool("sweep", "-m")
    ranks = find_platform_rank(ClusterKind.auto)
    if ranks is not None:
        raise ConfigError(
            f"-m: {ranks.source} started {ranks.world_size} processes, each of which would run the whole sweep: start "
            "it once, or start its points one by one"
        )
    return int(importlib.import_module("megads.cli.sweep").run_sweep(VERB, arguments))


def _end_refused_chain(arguments: Sequence[str]) -> None:
    """Ends the chain of this job (submit.sh --chain) if its command line does not compose: no job of it could start."""
    if "cluster.chain=true" in arguments:
        from megads.launch.scheduler import cancel_job_chain

        print(cancel_job_chain(ConfigError.exit_code), flush=True)


_sweeps = find_tool("sweep.config")
_SCHEMA: type[RootConfig] = RootConfig if _sweeps is None else _sweeps.TrainCommandConfig
VERB = Verb("train", _SCHEMA, run, text_keys=("sweep.sbatch_options",), sweep=_sweep, refused=_end_refused_chain)
