"""`megads train`: checks the config, freezes it into the run directory and starts the ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.cli.train_data import describe_data, locate_data, prepare_data, require_data
from megads.cli.verb import Invocation, Verb
from megads.config import (
    RootConfig,
    batch_size_schedule,
    check_config,
    config_dict,
    config_digest,
    derive_run_id,
    freeze,
    load_frozen,
    planned_steps,
)
from megads.errors import EXIT_OK, ConfigError
from megads.ops.choice import Choice, choose, prepare
from megads.plan.parameters import parameter_count
from megads.runtime.console import Console
from megads.runtime.console_choice import open_console
from megads.runtime.environment import share_of_cores
from megads.runtime.launcher import LaunchSpec, launch
from megads.runtime.run_dir import CONFIG_FILE, claimed
from megads.runtime.trackers import wanted_trackers

if TYPE_CHECKING:
    from megads.cli.memory_check import Machine
    from megads.data.prepare import Preparation


_TABLE_WIDTH = 120
"""Characters of the dry run's table of ranks."""


def run(config: RootConfig, invocation: Invocation) -> int:
    """Starts or continues the run that the config describes and returns its exit code."""
    # It pulls in torch, for which the tab key must not wait.
    from megads.cli.memory_check import choose_recompute, this_machine

    check_config(config)
    _refuse_shared_place(config, invocation)
    config, preparation = locate_data(config)
    config = place(config, invocation.choices)
    known, data = describe_data(config, preparation)
    # Looked at once: what was chosen to fit must not be refused for what another process took a moment later.
    machine = this_machine()
    known, choice = choose_recompute(known, machine)
    if config.run.dry_run:
        print(describe(known, data, choice, machine))
        return EXIT_OK
    # Named before, by what the user asked for: what fits may differ when the same command is given again.
    config = dataclasses.replace(config, parallel=known.parallel)
    refuse_early(config, known, preparation, machine)
    run_dir = Path(str(config.run.dir))
    with (
        claimed(run_dir),
        open_console(run_dir, sys.stdout, config.logging, str(config.run.id), planned_steps(config)) as console,
    ):
        console.say(f"run {config.run.id} in {run_dir}, {config.parallel.world_size} ranks")
        if choice:
            console.say(choice)
        say_ops(prepare(config.ops, console.say, cuda=machine.per_gpu), console)
        config = prepare_data(config, preparation, run_dir, console)
        for change in _changes(run_dir, config):
            console.say(f"changed since the last start: {change}", "warning")
        freeze(config, run_dir / CONFIG_FILE)
        return launch(launch_spec(config), console)


def say_ops(choice: Choice, console: Console) -> None:
    """Says which kernels will compute; a missing compiler is worth a warning, as it costs speed."""
    console.say(choice.text, "warning" if choice.reason else "info")


def refuse_early(config: RootConfig, known: RootConfig, preparation: Preparation | None, machine: Machine) -> None:
    """Refuses what cannot run before text is prepared, a run directory made or a rank started.

    Args:
        config: as `locate_data` returned it.
        known: the same with its vocabulary, which counts, and is known before the text is prepared.
        preparation: what to prepare.
        machine: where the ranks would run.

    Raises:
        ConfigError: a tracker is not installed, kernels were asked for and cannot be had, or the run does not fit this
            machine's memory.
        DataError: the dataset is missing, damaged or too little.
    """
    from megads.cli.memory_check import refuse_unfit

    wanted_trackers(config.logging)
    choose(config.ops, cuda=machine.per_gpu)
    refuse_unfit(known, machine)
    if preparation is None:
        require_data(config)


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


def describe(config: RootConfig, data: str, choice: str, machine: Machine) -> str:
    """Returns what a run would do, for run.dry_run.

    Args:
        config: with its place.
        data: a line about the data.
        choice: what was chosen of its layout and why; empty for nothing.
        machine: where the ranks would run.
    """
    from megads.cli.memory_check import memory_line
    from megads.cli.rank_table import rank_text

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
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, "
        f"{model.position}; {vocabulary}",
        "batch": f"{train.global_batch_size} samples{ramp} = {micro_batches} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas; {train.global_batch_size * train.seq_len:,} tokens a step",
        "memory": memory,
        **({"chosen": choice} if choice else {}),
        "length": f"{steps:,} steps, {samples:,} samples, {samples * train.seq_len:,} tokens",
        "precision": str(train.precision),
        "kernels": choose(config.ops, cuda=machine.per_gpu).text,
        "data": data,
        "config": f"sha256 {config_digest(config)[:8]}",
    }
    lines = ["dry run: nothing was started", *(f"  {name:<10} {value}" for name, value in rows.items())]
    return "\n".join([*lines, rank_text(config, _TABLE_WIDTH)] if parallel.world_size > 1 else lines)


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


def _changes(run_dir: Path, config: RootConfig) -> list[str]:
    """Lists the keys outside `run` whose values differ from the last start of the same run."""
    try:
        before = dict(_flat(config_dict(load_frozen(run_dir / CONFIG_FILE))))
    except ConfigError:
        return []
    return [
        f"{key} {before.get(key)} -> {value}"
        for key, value in _flat(config_dict(config))
        if before.get(key) != value and not key.startswith("run.")
    ]


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


VERB = Verb("train", RootConfig, run)
