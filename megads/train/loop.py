"""The training process of one rank: builds data, engine and hooks, and runs the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path

from megads.checkpoint.config import newest_before
from megads.config.frozen import config_digest
from megads.config.root import (
    RootConfig,
    config_at,
    learning_rate,
    open_run_data,
    planned_steps,
)
from megads.data.indexed.recorded import read_record
from megads.data.indexed.stream import stream_meter
from megads.data.sampling.loader import StepBatch
from megads.data.sampling.runs import TrainSource
from megads.engine.interface import TrainEngine
from megads.errors import Preempted, StopRequested
from megads.monitor.hooks import HookContext, plugin_hooks
from megads.parallel.grid import build_grid
from megads.resilience.hooks import NonFiniteHook, numerical_hooks
from megads.runtime.distributed import world
from megads.runtime.environment import rank_environment
from megads.runtime.heartbeat import AGREEING, ENGINE_STEP, LOADING_DATA, Heartbeat, heartbeat
from megads.runtime.hooks import Hook, StepInfo, TrainState
from megads.runtime.lease import Fence
from megads.runtime.metrics import EventWriter, MetricsWriter
from megads.runtime.process import (
    bind_to_own_cores,
)
from megads.runtime.stop import PREEMPTED, TIME_LIMIT, ProfileRequests, StopSignal
from megads.train.evaluation_hooks import evaluation_hooks
from megads.train.events import record_end, record_samples, record_start
from megads.train.resume import find_load_source, newest_up_to, resume
from megads.train.setup import (
    StepProfiles,
    async_saves,
    build_engine,
    checkpoint_hook,
    explained_failures,
    graphs_hooks,
    load_kernels,
    memory_history,
    metrics_hook,
    phase_end,
    rank_device,
    require_data_of_launcher,
    train_loader,
    tuned_kernels,
    watching_hooks,
)


@dataclass
class StepPlace:
    """Where a rank is, to explain an unhandled exception.

    Attributes:
        config: config of the run, or of its training phase.
        run_dir: the run directory.
        state: counters of the training loop.
        engine: training engine; None until it is built.
        samples: training data; None until it is opened.
        batch: the last batch; None before the first step.
    """

    config: RootConfig
    run_dir: Path
    state: TrainState = field(default_factory=TrainState)
    engine: TrainEngine | None = None
    samples: TrainSource | None = None
    batch: StepBatch | None = None


class _BetweenSteps:
    """Hook that calls a function before the first and after every step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_start(self, state: TrainState) -> None:
        self._call()

    def on_step(self, info: StepInfo) -> None:
        self._call()

    def on_end(self, state: TrainState) -> None:
        pass


def train(config: RootConfig, run_dir: Path, between_steps: Callable[[], None] | None = None) -> int:
    """Trains to the end of the run or of the training phase, or until a stop is requested.

    Args:
        config: config that the launcher has checked and frozen.
        run_dir: the run directory.
        between_steps: called before the first and after every step, if the launcher is in this process.

    Returns:
        The exit code.

    Raises:
        MegadsError: a failure to report to the user; the rank's process converts it to an exit code.
    """
    environment = rank_environment()
    fence = Fence(run_dir, environment.lease)
    # Forked before this process has threads, connections or a CUDA context.
    background = async_saves(config, run_dir, environment)
    device = rank_device(environment, deterministic=config.train.deterministic)
    here = StepPlace(config, run_dir)
    with (
        explained_failures(here),
        closing(background),
        memory_history(config, run_dir, environment),
        heartbeat(environment.heartbeats, environment.rank) as beats,
        world(device, config.cluster.collective_timeout_s) as control,
    ):
        control.require_equal("the frozen config", digest := config_digest(config))
        beats.enter("verifying a checkpoint")
        origin = find_load_source(config, run_dir, control, background.local)
        config = config_at(config, origin.samples)  # of the training phase
        grid, state = build_grid(config.parallel, environment.rank, environment.world_size, control), here.state
        beats.enter("opening the data")
        require_data_of_launcher(config, run_dir, environment)
        train_samples, valid_sets = open_run_data(config, read_record(run_dir), origin.samples)
        here.samples = train_samples
        kernels = load_kernels(config, device, control, beats)
        metrics, events = MetricsWriter(run_dir, grid.rank == 0), EventWriter(run_dir, grid.rank == 0)
        # May measure the peak of the whole CPU, so it runs before this rank is bound to a share of the cores.
        meter = stream_meter(config.data)
        step_lines = metrics_hook(config, environment, device, metrics, events, control, beats, meter)
        if config.cluster.bind_cores:
            bind_to_own_cores(environment.local_rank, environment.local_world_size)
        kernels, attention = tuned_kernels(config, run_dir, kernels, grid, device, events)
        beats.enter("building the engine")
        engine = build_engine(config, grid, device, kernels, attention, draws=not origin.has_weights)
        here.engine = engine
        beats.enter("loading a checkpoint")
        resume(origin, config, run_dir, engine, state, events, metrics)
        saves = checkpoint_hook(config, digest, run_dir, engine, state, events, fence, metrics, beats, background)
        profiles = StepProfiles(config, run_dir, engine, events, beats)
        hooks: list[Hook] = [
            step_lines,
            # Before evaluation, whose micro-batches would take the place of the step's.
            *graphs_hooks(config, engine, kernels, events),
            NonFiniteHook(events, config.train.max_nonfinite_steps, partial(newest_before, run_dir)),
            *numerical_hooks(config.resilience, engine, events, run_dir, len(config.data.skip), newest_up_to),
            saves,
            *watching_hooks(config, run_dir, engine, events, metrics),
            *evaluation_hooks(config, run_dir, engine, valid_sets, metrics, events, beats),
            *plugin_hooks(config.hooks, HookContext(run_dir, grid.rank, grid.world_size, engine, events)),
            # Last, so that a profile begins with its first step.
            *profiles.hooks(state),
            *([_BetweenSteps(between_steps)] if between_steps is not None else []),
        ]
        record_start(config, digest, engine, device, kernels, state, events)
        record_samples(config, train_samples, state, events)
        asked = ProfileRequests(run_dir)
        stop = StopSignal(run_dir, control, fence, config.run.kill_switch, saves.is_time, asked.take)
        with closing(train_loader(config, grid, train_samples, state, environment.local_world_size)) as batches:
            reason = run_loop(config, engine, batches, here, hooks, stop, beats, profiles)
        record_end(config, state, reason, events, run_dir, meter)
    return exit_code(reason)


def run_loop(
    config: RootConfig,
    engine: TrainEngine,
    batches: Iterator[StepBatch],
    here: StepPlace,
    hooks: list[Hook],
    stop: StopSignal,
    beats: Heartbeat,
    profiles: StepProfiles,
) -> str:
    """Runs steps until the end of the run, the end of a training phase or a stop request.

    Returns:
        The reason of the stop request; empty at the end of the run or if there was no request.
    """
    state = here.state
    total_steps, end_sample = planned_steps(config), phase_end(config, state.samples)
    rate = learning_rate(config)
    call_hooks(hooks, beats, methodcaller("on_start", state))
    reason = stop.reason()
    if stop.profile is not None:
        hooks += profiles.on_request(stop.profile, state.step)
    while state.step < total_steps and state.samples < end_sample and not reason:
        beats.enter(LOADING_DATA, state.step + 1)
        begin = time.perf_counter()
        batch = here.batch = next(batches)
        loaded = time.perf_counter()
        beats.enter(ENGINE_STEP)
        lr = rate(state.samples + batch.samples)
        result = engine.step(batch.micro_batches, lr)
        state.step += 1
        state.samples += batch.samples
        state.tokens += result.tokens
        end = time.perf_counter()
        beats.enter(AGREEING)
        reason = stop.reason()
        ends_phase = state.samples >= end_sample and state.step < total_steps
        info = StepInfo(
            step=state.step,
            samples=state.samples,
            tokens=state.tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            global_batch_size=batch.samples,
            seq_len=config.train.seq_len,
            step_time_s=end - begin,
            data_time_s=loaded - begin,
            skipped=result.skipped,
            culprit=str(result.culprit or ""),
            batch_hash=batch.batch_hash,
            last=state.step == total_steps or ends_phase or bool(reason),
            stop_reason=reason if state.step < total_steps else "",
            ends_phase=ends_phase,
            save_due=stop.save_due,
            experts=result.experts,
        )
        call_hooks(hooks, beats, methodcaller("on_step", info))
        if stop.profile is not None and not info.last:
            hooks += profiles.on_request(stop.profile, state.step)
    call_hooks(hooks, beats, methodcaller("on_end", state))
    return reason if state.step < total_steps else ""


def call_hooks(hooks: Sequence[Hook], beats: Heartbeat, call: Callable[[Hook], None]) -> None:
    """Calls a method of every hook, in order; heartbeats name the hook that runs."""
    for hook in hooks:
        beats.enter(type(hook).__name__)
        call(hook)


def exit_code(stop_reason: str) -> int:
    """Returns 0 at the end of the run or phase, else the documented exit code of the stop reason."""
    if not stop_reason:
        return 0
    return Preempted.exit_code if stop_reason in (PREEMPTED, TIME_LIMIT) else StopRequested.exit_code
