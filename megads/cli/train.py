"""`megads train`: checks the config, freezes it into the run directory and starts the ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.cli.attempts import Attempts, Ended
from megads.cli.placement import Placement, find_placement
from megads.cli.run_state import is_finished, refuse_while_stopped
from megads.cli.train_data import (
    build_index_maps,
    data_fault,
    describe_data,
    guard_data,
    locate_data,
    prepare_data,
    require_data,
)
from megads.cli.verb import Invocation, Verb
from megads.config import RootConfig, batch_size_schedule, check_attention, check_config, planned_steps
from megads.errors import EXIT_OK, ConfigError, MegadsError
from megads.frozen_config import config_dict, config_digest, derive_run_id, load_frozen, record_config
from megads.launch.launcher import LaunchSpec
from megads.model.config import ModelConfig
from megads.monitor.console import Console
from megads.monitor.live_console import open_console
from megads.monitor.trackers import wanted_trackers
from megads.ops.choice import Kernels, choose, prepare
from megads.parallel.config import Partition
from megads.plan.parameters import parameter_count
from megads.runtime.environment import rehearsal_folder, share_of_cores
from megads.runtime.lease import Lease, claimed
from megads.runtime.metrics import EventWriter
from megads.runtime.run_dir import CONFIG_FILE
from megads.sweep.config import SweepConfig

if TYPE_CHECKING:
    from megads.cli.memory_check import Machine
    from megads.data.prepare import Preparation


_TABLE_WIDTH = 120
"""Characters of the dry run's table of ranks."""


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
        from megads.cli.rehearsed_start import rehearsed

        config = rehearsed(config, invocation.choices, rehearsal)
    check_config(config)
    placement = None if config.run.prepare_only else find_placement(config)
    try:
        return _run(config, invocation, placement).exit_code
    except MegadsError as error:
        _hand_over(placement, config, Ended(error.exit_code))
        raise


def _run(config: RootConfig, invocation: Invocation, placement: Placement | None) -> Ended:
    """Prepares and starts the run; returns how it ended."""
    # It pulls in torch, for which the tab key must not wait.
    from megads.cli.memory_check import settle_auto, this_machine
    from megads.resume import continue_data

    _refuse_shared_place(config, invocation)
    config, preparation = locate_data(config)
    config = place(config, invocation.choices)
    config = continue_data(config, Path(str(config.run.dir)))
    known, data = describe_data(config, preparation)
    # Looked at once: what was chosen to fit must not be refused for what another process took a moment later.
    machine = this_machine(len(placement.nodes) if placement else 1)
    known, choices = settle_auto(known, machine)
    if config.run.dry_run:
        print(describe(known, data, choices, machine))
        return Ended(EXIT_OK)
    # Named before, by what the user asked for: what fits may differ when the same command is given again.
    config = dataclasses.replace(config, parallel=known.parallel)
    if not config.run.prepare_only:
        refuse_early(config, known, preparation, machine)
    run_dir = Path(str(config.run.dir))
    job = placement.allocation.job if placement else None
    with (
        claimed(run_dir, job) as lease,
        open_console(run_dir, sys.stdout, config.logging, str(config.run.id), planned_steps(config)) as console,
    ):
        console.say(f"run {config.run.id} in {run_dir}, {config.parallel.world_size} ranks")
        for choice in choices:
            console.say(choice)
        say_ops(prepare(config.ops, console.say, cuda=machine.per_gpu, optimizer=config.optim.impl), console)
        config = prepare_data(config, preparation, run_dir, console)
        if placement and is_finished(config):
            console.say(f"finished before, at step {planned_steps(config)}: nothing to do")
            ended = Ended(EXIT_OK)
        else:
            ended = _continue(config, preparation, placement, lease, console)
    # The run directory is free again for whoever comes next.
    _hand_over(placement, config, ended)
    return ended


def _continue(
    config: RootConfig, preparation: Preparation | None, placement: Placement | None, lease: Lease, console: Console
) -> Ended:
    """Checks the data against what the run saw of it, then starts the ranks, or prepares for them only."""
    run_dir = Path(str(config.run.dir))
    changes = _changes(run_dir, config)
    for change in changes:
        console.say(f"changed since the last start: {_told(change)}", "warning")
    guard_data(config, preparation, run_dir)
    if config.run.prepare_only:
        build_index_maps(config, console)
        return Ended(EXIT_OK)
    if changes:
        with closing(EventWriter(run_dir)) as events:
            told = "; ".join(map(_told, changes))
            events.write("config_changed", level="warning", message=told, changes=changes)
    return _start(config, placement, lease, console)


def _hand_over(placement: Placement | None, config: RootConfig, ended: Ended) -> None:
    """Sees to what follows a SLURM job, and says it."""
    if placement is None or config.run.dry_run:
        return
    said = placement.hand_over(config, ended.exit_code, ended.excluded)
    if said:
        print(said, flush=True)


def _start(config: RootConfig, placement: Placement | None, lease: Lease, console: Console) -> Ended:
    """Freezes the config and starts the ranks; returns how they ended."""
    record_config(config, Path(str(config.run.dir)))
    spec = dataclasses.replace(launch_spec(config), lease=lease.number)
    return Attempts(config, spec, placement, lease).run(console)


def say_ops(kernels: Kernels, console: Console) -> None:
    """Says which kernels will compute; a missing compiler is worth a warning, as it costs speed."""
    console.say(kernels.text, "warning" if kernels.reason else "info")


def refuse_early(config: RootConfig, known: RootConfig, preparation: Preparation | None, machine: Machine) -> None:
    """Refuses what cannot run before text is prepared, a run directory made or a rank started.

    Args:
        config: as `locate_data` returned it.
        known: the same with its vocabulary, which counts, and is known before the text is prepared.
        preparation: what to prepare.
        machine: where the ranks would run.

    Raises:
        StopRequested: somebody stopped the run.
        ConfigError: a tracker is not installed, kernels were asked for and cannot be had, or the run does not fit this
            machine's memory.
        DataError: the dataset is missing, damaged or too little.
    """
    from megads.cli.memory_check import refuse_unfit

    refuse_while_stopped(config)
    wanted_trackers(config.logging)
    chosen_kernels(config, machine)
    refuse_unfit(known, machine)
    if preparation is None:
        require_data(config)


def chosen_kernels(config: RootConfig, machine: Machine) -> Kernels:
    """Returns which implementation of the operators would run.

    Args:
        config: of the run.
        machine: where the ranks would run.

    Raises:
        ConfigError: kernels, or a kind of attention, were asked for and cannot be had there.
    """
    check_attention(config, cuda=machine.per_gpu)
    return choose(config.ops, cuda=machine.per_gpu, optimizer=config.optim.impl)


def launch_spec(config: RootConfig) -> LaunchSpec:
    """Returns what to start for a config that has its place and its data."""
    run_dir = str(config.run.dir)
    tracked = bool(wanted_trackers(config.logging))
    return LaunchSpec(
        run_dir=Path(run_dir),
        num_ranks=config.parallel.world_size,
        command=("-m", "megads.cli.rank", run_dir, "--digest", config_digest(config)),
        threads_per_rank=config.cluster.threads_per_rank,
        side_command=("-m", "megads.cli.tracker", run_dir, "--follow") if tracked else (),
        flush_s=config.logging.flush_s,
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        cause_of_bus_error=lambda: data_fault(config),
        # More ranks than this machine has GPUs, if any.
        cpu=rehearsal_folder() is not None,
    )


def place(config: RootConfig, choices: Mapping[str, str | None]) -> RootConfig:
    """Returns the config with run.id and run.dir filled in.

    Args:
        config: as composed.
        choices: option taken in each config group; the experiment, else the model, names the run.
    """
    name = config.run.name or choices.get("experiment") or choices.get("model") or "run"
    run_id = config.run.id or derive_run_id(config, name.replace("/", "-"))
    run_dir = config.run.dir or f"runs/{run_id}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, id=run_id, dir=run_dir))


def describe(config: RootConfig, data: str, choices: Sequence[str], machine: Machine) -> str:
    """Returns what a run would do, for run.dry_run.

    Args:
        config: with its place.
        data: a line about the data.
        choices: what was chosen of its layout and why.
        machine: where the ranks would run.
    """
    from megads.cli.memory_check import memory_line
    from megads.cli.rank_table import rank_text
    from megads.cli.schedule_table import schedule_text

    train, parallel, model = config.train, config.parallel, config.model
    steps = planned_steps(config)
    batches = batch_size_schedule(config)
    samples = batches.samples_after(steps)
    micro_batches = train.global_batch_size // (train.micro_batch_size * parallel.dp)
    threads = config.cluster.threads_per_rank or share_of_cores(parallel.world_size)
    ramp = f", growing from {train.batch_ramp.start}" if train.batch_ramp.start else ""
    vocabulary, memory = "vocabulary and parameters not known before the data is there", "not known either"
    if model.vocab_size is not None:
        vocabulary = f"vocabulary {model.vocab_size:,}, {parameter_count(model):,} parameters"
        memory = memory_line(config, machine)
    rows = {
        "run": config.run.id,
        "writes to": config.run.dir,
        "ranks": f"{parallel.world_size} = {parallel.product}, threads of each {threads}",
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {_heads(model)}, {model.position}; "
        f"{vocabulary}",
        "batch": f"{train.global_batch_size} samples{ramp} = {micro_batches} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas; {train.global_batch_size * train.seq_len:,} tokens a step",
        "memory": memory,
        **_pipeline_rows(config),
        **({"chosen": "; ".join(choices)} if choices else {}),
        "length": f"{steps:,} steps, {samples:,} samples, {samples * train.seq_len:,} tokens",
        "precision": str(train.precision),
        "kernels": chosen_kernels(config, machine).text,
        "data": data,
        "config": f"sha256 {config_digest(config)[:8]}",
    }
    lines = ["dry run: nothing was started", *(f"  {name:<10} {value}" for name, value in rows.items())]
    if parallel.partition is Partition.auto:
        lines.append("which rank holds what is not known before the vocabulary is: parallel.partition=auto goes by it")
    elif parallel.world_size > 1:
        lines += [*schedule_text(config, machine, _TABLE_WIDTH), rank_text(config, _TABLE_WIDTH)]
    return "\n".join(lines)


def _heads(model: ModelConfig) -> str:
    """As in 8 heads, or 8 heads on 2 of keys."""
    shared = f" on {model.kv_heads} of keys" if model.queries_per_kv > 1 else ""
    return f"{model.num_heads} heads{shared}"


def _pipeline_rows(config: RootConfig) -> dict[str, str]:
    """What the pipeline's schedule promises, as a row of the dry run; none without a pipeline."""
    from megads.cli.schedule_table import can_be_simulated, outlook_of, schedule_line

    if config.parallel.pp == 1 or config.model.vocab_size is None:
        return {}
    if not can_be_simulated(config):
        return {"pipeline": f"{config.parallel.schedule}; a step of so many micro-batches is not simulated"}
    return {"pipeline": schedule_line(outlook_of(config))}


def _refuse_shared_place(config: RootConfig, invocation: Invocation) -> None:
    """Two points of a sweep with one run.id would be one run, the second continuing the first."""
    given = config.run.dir or config.run.id
    if given is None:
        return
    if given in invocation.claimed_dirs:
        raise ConfigError(
            f"run.id or run.dir = {given} is shared by several points of the sweep: leave it out, so that every point "
            "gets its own, or sweep over it too"
        )
    invocation.claimed_dirs.add(given)


def _changes(run_dir: Path, config: RootConfig) -> list[dict[str, Any]]:
    """Lists the keys outside `run` whose values differ from the last start of the same run, with both values."""
    try:
        before = dict(_flat(config_dict(load_frozen(run_dir / CONFIG_FILE))))
    except ConfigError:
        return []
    return [
        {"key": key, "before": before.get(key), "after": value}
        for key, value in _flat(config_dict(config))
        if before.get(key) != value and not key.startswith("run.")
    ]


def _told(change: Mapping[str, Any]) -> str:
    return f"{change['key']} {change['before']} -> {change['after']}"


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sweep(arguments: Sequence[str]) -> int:
    """What -m does."""
    from megads.cli.sweep import run_sweep

    return run_sweep(VERB, arguments)


VERB = Verb("train", TrainCommandConfig, run, text_keys=("sweep.sbatch_options",), sweep=_sweep)
