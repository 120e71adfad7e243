"""Timing start of a run whose length is given in minutes: the ranks take a few steps to measure how long one takes.

`time_steps` is the entry of its ranks, in place of megads.train.loop.train. The steps are those of the run: its layout,
model, optimizer, batches and data; with a batch-size ramp, first of its first and then of its final size. The weights
are discarded; the run starts afterwards, from its own initial weights, in new processes. So its first step depends on
nothing but the number of steps that the launcher fixes in between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from megads.config.frozen import config_digest
from megads.config.root import RootConfig, batch_size_schedule, open_run_data
from megads.config.train import BatchRampConfig
from megads.data.indexed.recorded import read_record
from megads.data.sampling.loader import num_validation_batches
from megads.data.sampling.runs import TrainSource, ValidationSource
from megads.engine.interface import TrainEngine
from megads.launch.run_length import STEPS_TIMED
from megads.parallel.grid import build_grid
from megads.runtime.distributed import world
from megads.runtime.environment import rank_environment
from megads.runtime.heartbeat import heartbeat
from megads.runtime.hooks import TrainState
from megads.runtime.lease import Fence
from megads.runtime.metrics import EventWriter, MetricsWriter
from megads.runtime.process import bind_to_own_cores
from megads.runtime.stop import StopSignal, clear_stop
from megads.train.evaluation_hooks import validated, validation_micro_batches
from megads.train.loop import exit_code
from megads.train.run_context import RunContext
from megads.train.setup import (
    build_engine,
    graphs_hooks,
    load_kernels,
    rank_device,
    require_data_of_launcher,
    train_loader,
    tuned_kernels,
)

DROPPED_STEPS = 2
"""First steps of each batch size, which are slow: allocation, compilation, page faults of the data."""
_LEAST_TIMED, _MOST_TIMED = 3, 30
_SHARE = 0.02
"""Share of train.minutes after which no further step is timed."""
_LR_SCALE = 1e-3
"""Factor on optim.lr: the steps must stay finite, as a non-finite one is skipped and therefore faster."""


def enough_steps_timed(times_s: list[float], minutes: float) -> bool:
    """Returns whether enough steps have been timed.

    Args:
        times_s: times of all steps so far, the dropped ones included.
        minutes: value of train.minutes.
    """
    timed = times_s[DROPPED_STEPS:]
    return len(timed) >= _MOST_TIMED or (len(timed) >= _LEAST_TIMED and sum(timed) >= _SHARE * 60 * minutes)


def time_steps(config: RootConfig, run_dir: Path) -> int:
    """Times steps and a validation, and records both in events.jsonl.

    Args:
        config: frozen config with train.minutes.
        run_dir: the run directory.

    Returns:
        The exit code: 0, or that of a stop request.
    """
    environment, minutes = rank_environment(), config.train.minutes
    assert minutes is not None
    fence = Fence(run_dir, environment.lease)
    device = rank_device(environment, deterministic=config.train.deterministic)
    with (
        heartbeat(environment.heartbeats, environment.rank) as beats,
        world(device, config.cluster.collective_timeout_s) as control,
    ):
        control.require_equal("the frozen config", config_digest(config))
        sizes = sorted({batch_size_schedule(config).at(0), config.train.global_batch_size})
        config = _with_batch_size(config, sizes[-1])
        grid = build_grid(config.parallel, environment.rank, environment.world_size, control)
        beats.enter("opening the data")
        require_data_of_launcher(config, run_dir, environment)
        train_samples, valid_sets = open_run_data(config, read_record(run_dir))
        kernels = load_kernels(config, device, control, beats)
        if config.cluster.bind_cores:
            bind_to_own_cores(environment.local_rank, environment.local_world_size)
        metrics, events = MetricsWriter(run_dir, enabled=False), EventWriter(run_dir, grid.rank == 0)
        run = RunContext(config, run_dir, config_digest(config), environment, device, grid, beats, metrics, events)
        kernels, attention = tuned_kernels(run, kernels)
        beats.enter("building the engine")
        engine = build_engine(run, kernels, attention)
        stop = StopSignal(run_dir, control, fence, config.run.kill_switch)
        choices = graphs_hooks(run, engine, kernels)
        timed, reason = list[dict[str, Any]](), ""
        for size in sizes:
            of_size = replace(run, config=_with_batch_size(config, size))
            times, reason = _timed(of_size, engine, train_samples, choices, stop, minutes / len(sizes))
            timed.append(times)
            if reason:
                break
        if not reason:
            validation_s = _validation_s(run, engine, valid_sets)
            events.write(
                STEPS_TIMED,
                level="debug",
                minutes=minutes,
                **timed[-1],
                ramp_start=timed[0] if len(timed) > 1 else None,
                validation_time_s=validation_s,
                config_digest=run.digest,
            )
        elif events.enabled:
            events.write("end", step=0, stopped=reason)
            clear_stop(run_dir)
    return exit_code(reason)


def _with_batch_size(config: RootConfig, size: int) -> RootConfig:
    """Returns the config of a run of one batch size, which is long enough to time it."""
    steps = DROPPED_STEPS + _MOST_TIMED
    train = replace(config.train, global_batch_size=size, batch_ramp=BatchRampConfig(), steps=steps, minutes=None)
    return replace(config, train=train)


def _timed(
    run: RunContext,
    engine: TrainEngine,
    samples: TrainSource,
    choices: Sequence[Any],
    stop: StopSignal,
    minutes: float,
) -> tuple[dict[str, Any], str]:
    """Takes steps until rank 0 has enough of them; returns their batch size and times, as fields of the event, and the
    reason of a stop request.

    `choices` are called between steps: what they measure is not a part of any step.
    """
    times_s, size, lr = list[float](), 0, _LR_SCALE * run.config.optim.lr
    with closing(train_loader(run, samples, TrainState())) as batches:
        while not (reason := stop.reason()):
            # Not a step's phases: the limits of hang detection are learned from the steps of training.
            run.beats.enter("timing the first steps")
            begin = time.perf_counter()
            batch = next(batches)
            engine.step(batch.micro_batches, lr)
            times_s.append(time.perf_counter() - begin)
            size = batch.samples
            for choice in choices:
                choice.after_step()
            if run.grid.control.broadcast_number(int(enough_steps_timed(times_s, minutes))):
                break
    dropped, timed = times_s[:DROPPED_STEPS], times_s[DROPPED_STEPS:]
    return {"batch_size": size, "step_times_s": timed, "first_step_times_s": dropped}, reason


def _validation_s(run: RunContext, engine: TrainEngine, valid_sets: Mapping[str, ValidationSource]) -> float:
    """Predicts the time of one validation of all sets from that of one call; collective."""
    config, grid = run.config, run.grid
    evaluation, size = config.evaluation, config.train.micro_batch_size
    if not valid_sets or not (evaluation.every_steps or evaluation.at_end):
        return 0.0
    run.beats.enter("timing a validation")
    shown = [validated(config, valid) for valid in valid_sets.values()]
    micro_batches = next(validation_micro_batches(run, shown[0]))
    begin = time.perf_counter()
    engine.evaluate(micro_batches)
    call_s = time.perf_counter() - begin
    num_micro_batches = sum(num_validation_batches(len(valid), size, grid.dp.size, 1) for valid in shown)
    passes = 2 if evaluation.average else 1
    return passes * call_s * num_micro_batches / len(micro_batches)
