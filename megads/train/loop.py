"""The training process of one rank: builds data, engine and hooks, runs the training loop, and records its start and
end in the event log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from operator import methodcaller
from pathlib import Path

import torch

from megads.checkpoint.config import newest_before
from megads.config.frozen import config_digest
from megads.config.phases import NEXT_PHASE, phase_at
from megads.config.root import RootConfig, config_at, learning_rate, open_run_data, planned_steps, run_spans
from megads.data.indexed.recorded import read_record
from megads.data.indexed.stream import StreamMeter, stream_meter
from megads.data.sampling.blend import BlendedSamples, ContinuedOrder
from megads.data.sampling.loader import StepBatch
from megads.data.sampling.packed import PackedSamples
from megads.data.sampling.runs import TrainSource
from megads.engine.interface import TrainEngine
from megads.errors import Preempted, StopRequested
from megads.model.model_size import parameter_count
from megads.monitor.hooks import HookContext, plugin_hooks
from megads.ops.config import Float8Recipe, Kernels
from megads.parallel.grid import build_grid
from megads.resilience.hooks import NonFiniteHook, numerical_hooks
from megads.runtime.distributed import world
from megads.runtime.environment import rank_environment
from megads.runtime.heartbeat import AGREEING, ENGINE_STEP, LOADING_DATA, Heartbeat, heartbeat
from megads.runtime.hooks import Hook, StepInfo, TrainState
from megads.runtime.lease import Fence
from megads.runtime.metrics import EventWriter, MetricsWriter
from megads.runtime.process import bind_to_own_cores
from megads.runtime.stop import PREEMPTED, TIME_LIMIT, ProfileRequests, StopSignal, clear_stop
from megads.train.evaluation_hooks import evaluation_hooks
from megads.train.resume import find_load_source, newest_up_to, resume
from megads.train.run_context import RunContext, StepPlace
from megads.train.setup import (
    StepProfiles,
    async_saves,
    build_engine,
    checkpoint_hook,
    end_sample,
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
        run = RunContext(config, run_dir, digest, environment, device, grid, beats, metrics, events)
        # May measure the peak of the whole CPU, so it runs before this rank is bound to a share of the cores.
        meter = stream_meter(config.data)
        step_lines = metrics_hook(run, meter)
        if config.cluster.bind_cores:
            bind_to_own_cores(environment.local_rank, environment.local_world_size)
        kernels, attention = tuned_kernels(run, kernels)
        beats.enter("building the engine")
        engine = here.engine = build_engine(run, kernels, attention, draws=not origin.has_weights)
        beats.enter("loading a checkpoint")
        resume(origin, run, engine, state)
        saves = checkpoint_hook(run, engine, state, fence, background)
        profiles = StepProfiles(run, engine)
        hooks: list[Hook] = [
            step_lines,
            # Before evaluation, whose micro-batches would take the place of the step's.
            *graphs_hooks(run, engine, kernels),
            NonFiniteHook(events, config.train.max_nonfinite_steps, partial(newest_before, run_dir)),
            *numerical_hooks(config.resilience, engine, events, run_dir, len(config.data.skip), newest_up_to),
            saves,
            *watching_hooks(run, engine),
            *evaluation_hooks(run, engine, valid_sets),
            *plugin_hooks(config.hooks, HookContext(run_dir, grid.rank, grid.world_size, engine, events)),
            # Last, so that a profile begins with its first step.
            *profiles.hooks(state),
            *([_BetweenSteps(between_steps)] if between_steps is not None else []),
        ]
        record_start(run, engine, kernels, state)
        record_samples(run, train_samples, state)
        asked = ProfileRequests(run_dir)
        stop = StopSignal(run_dir, control, fence, config.run.kill_switch, saves.is_time, asked.take)
        with closing(train_loader(run, train_samples, state)) as batches:
            reason = run_loop(run, engine, batches, here, hooks, stop, profiles)
        record_end(run, state, reason, meter)
    return exit_code(reason)


def run_loop(
    run: RunContext,
    engine: TrainEngine,
    batches: Iterator[StepBatch],
    here: StepPlace,
    hooks: list[Hook],
    stop: StopSignal,
    profiles: StepProfiles,
) -> str:
    """Runs steps until the end of the run, the end of a training phase or a stop request.

    Returns:
        The reason of the stop request; empty at the end of the run or if there was no request.
    """
    config, beats, state = run.config, run.beats, here.state
    total_steps, end_of_phase = planned_steps(config), phase_end(config, state.samples)
    rate = learning_rate(config)
    call_hooks(hooks, beats, methodcaller("on_start", state))
    reason = stop.reason()
    if stop.profile is not None:
        hooks += profiles.on_request(stop.profile, state.step)
    while state.step < total_steps and state.samples < end_of_phase and not reason:
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
        ends_phase = state.samples >= end_of_phase and state.step < total_steps
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


def record_start(run: RunContext, engine: TrainEngine, kernels: Kernels, state: TrainState) -> None:
    """Writes the `start` event: model size, layout, device, operators."""
    config, device = run.config, run.device
    run.events.write(
        "start",
        step=state.step,
        total_steps=planned_steps(config),
        parameters=parameter_count(config.model),
        precision=config.train.precision.value,
        **({} if config.train.fp8 is Float8Recipe.none else {"fp8": config.train.fp8.value}),
        layout=" ".join(f"{axis}{size}" for axis, size in config.parallel.sizes.items()),
        zero_stage=config.parallel.zero_stage,
        engine=config.resolved_engine.value,
        stages=engine.bounds,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        ops=kernels.text.removeprefix("ops.impl: "),
        threads_per_rank=torch.get_num_threads(),
        checkpoints=config.checkpoint.when,
        config_digest=run.digest,
    )


def record_samples(run: RunContext, samples: TrainSource, state: TrainState) -> None:
    """Writes the events about packed documents, blended datasets, skipped samples and a training phase that begins."""
    config, events = run.config, run.events
    _record_phase(run, samples, state)
    for part in samples.parts if isinstance(samples, BlendedSamples) else [samples]:
        if isinstance(part, PackedSamples):
            events.write("packed", dataset=part.dataset.name, **asdict(part.counts))
    if not isinstance(samples, BlendedSamples):
        return
    taken = samples.counts_by_dataset(end_sample(config, state))
    events.write(
        "blend",
        step=state.step,
        datasets=[part.dataset.name for part in samples.parts],
        samples_per_epoch=[part.samples_per_epoch for part in samples.parts],
        planned_samples=taken.tolist(),
        order=config.data.order.value,
        mixes=[asdict(mix) for mix in config.data.history],
    )
    if config.data.skip:
        ranges = samples.skips.left_out()
        events.write("skip", step=state.step, left_out=ranges, samples=sum(end - first for first, end in ranges))


def _record_phase(run: RunContext, samples: TrainSource, state: TrainState) -> None:
    """Writes the `training_phase` event if a phase begins, with the tokens skipped between it and the one before."""
    spans = run_spans(run.config)
    span = phase_at(spans, state.samples) if spans else None
    if span is None or span.first_sample != state.samples:
        return
    left_out = [0]
    if isinstance(samples, BlendedSamples) and isinstance(samples.order, ContinuedOrder):
        left_out = samples.order.left_out_tokens.tolist()
    run.events.write(
        "training_phase",
        step=state.step,
        samples=state.samples,
        phase=span.place + 1,
        phases=len(spans),
        global_batch_size=span.global_batch_size,
        seq_len=span.seq_len,
        left_out_tokens=sum(left_out),
        message=f"{span.place + 1} of {len(spans)} begins after step "
        f"{state.step:,}: {span.global_batch_size:,} samples of {span.seq_len:,} tokens a step",
    )


def record_end(run: RunContext, state: TrainState, reason: str, meter: StreamMeter) -> None:
    """Writes the `end` event of this start, with the next training phase if there is one, and clears a stop request."""
    config, events = run.config, run.events
    spans, more = run_spans(config), {}
    if spans and not reason and state.step < planned_steps(config):
        more = {NEXT_PHASE: phase_at(spans, state.samples).place + 1}
    if config.data.urls:
        events.write("streamed", level="debug", step=state.step, datasets=config.data.urls, **meter.total())
    events.write("end", step=state.step, stopped=reason, **more)
    if reason and events.enabled:
        clear_stop(run.run_dir)
