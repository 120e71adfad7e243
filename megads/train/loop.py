"""The training process of one rank: builds data, engine and hooks, and runs the training loop."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from operator import methodcaller
from pathlib import Path

import torch

from megads.checkpoint.async_saves import AsyncSaves
from megads.checkpoint.config import newest_before
from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.local import forget
from megads.checkpoint.local_files import node_folder
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.writer import CheckpointWriter
from megads.config.frozen import computation_digest, config_digest
from megads.config.phases import NEXT_PHASE, phase_at
from megads.config.root import (
    RootConfig,
    attention_work,
    batch_size_schedule,
    best_loss_key,
    config_at,
    learning_rate,
    open_run_data,
    planned_steps,
    run_spans,
)
from megads.config.train import Precision
from megads.data.indexed.recorded import read_record, record_data, require_recorded
from megads.data.indexed.stream import StreamMeter
from megads.data.sampling.blend import BlendedSamples, ContinuedOrder
from megads.data.sampling.loader import NO_LOOK_AHEAD, LookAhead, StepBatch, TrainLoader
from megads.data.sampling.packed import PackedSamples
from megads.data.sampling.runs import TrainSource
from megads.engine import build_train_engine
from megads.engine.autotune import autotune_attention, autotune_operators, record_tuning
from megads.engine.interface import EngineSpec, TrainEngine
from megads.engine.operator_trials import OperatorWork
from megads.engine.stragglers import StragglerHook
from megads.engine.timeline import TimelineHook
from megads.errors import Preempted, StopRequested
from megads.model.model_size import model_flops_per_token, parameter_count
from megads.model.peak import device_peak_tflops
from megads.monitor.hooks import HookContext, LayerNormsHook, MetricsHook, layer_names, plugin_hooks
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import Kernels
from megads.ops.resolve import load
from megads.parallel.grid import ParallelGrid, build_grid
from megads.resilience.hooks import NonFiniteHook, numerical_hooks
from megads.runtime.distributed import ControlPlane, world
from megads.runtime.environment import RankEnvironment, available_cores, rank_environment
from megads.runtime.heartbeat import AGREEING, ENGINE_STEP, LOADING_DATA, Heartbeat, heartbeat
from megads.runtime.hooks import Hook, StepInfo, TrainState
from megads.runtime.lease import Fence
from megads.runtime.metrics import EventWriter, MetricsWriter
from megads.runtime.process import (
    GarbageCollectionHook,
    bind_to_own_cores,
    disable_reduced_precision_sums,
    make_deterministic,
)
from megads.runtime.stop import PREEMPTED, TIME_LIMIT, StopSignal, clear_stop
from megads.train.evaluation_hooks import evaluation_hooks, needs_tokens, packing
from megads.train.resume import find_load_source, newest_up_to, resume


def train(config: RootConfig, run_dir: Path) -> int:
    """Trains to the end of the run or of the training phase, or until a stop is requested.

    Args:
        config: config that the launcher has checked and frozen.
        run_dir: the run directory.

    Returns:
        The exit code.

    Raises:
        MegadsError: a failure to report to the user; the rank's process converts it to an exit code.
    """
    environment = rank_environment()
    fence = Fence(run_dir, environment.lease)
    # Forked before this process has threads, connections or a CUDA context.
    background = async_saves(config, run_dir, environment, fence)
    device = rank_device(environment, deterministic=config.train.deterministic)
    with (
        closing(background),
        heartbeat(environment.heartbeats, environment.rank) as beats,
        world(device, config.cluster.timeout_s) as control,
    ):
        control.require_equal("the frozen config", digest := config_digest(config))
        grid, state = build_grid(config.parallel, environment.rank, environment.world_size, control), TrainState()
        beats.enter("verifying a checkpoint")
        origin = find_load_source(config, run_dir, control, background.copies)
        config = config_at(config, origin.samples)  # of the training phase
        beats.enter("opening the data")
        require_data_of_launcher(config, run_dir, environment)
        train_samples, valid_sets = open_run_data(config, read_record(run_dir), origin.samples)
        kernels = load_kernels(config, device, control, beats)
        metrics, events = MetricsWriter(run_dir, grid.rank == 0), EventWriter(run_dir, grid.rank == 0)
        # May measure the peak of the whole CPU, so it runs before this rank is bound to a share of the cores.
        meter = StreamMeter(config.data)
        step_lines = metrics_hook(config, environment, device, metrics, events, control, beats, meter)
        if config.cluster.bind_cores:
            bind_to_own_cores(environment.local_rank, environment.local_world_size)
        kernels, attention = tuned_kernels(config, run_dir, kernels, grid, device, events)
        beats.enter("building the engine")
        engine = build_engine(config, grid, device, kernels, attention, draws=not origin.has_weights)
        beats.enter("loading a checkpoint")
        resume(origin, config, run_dir, engine, state, events, metrics)
        saves = checkpoint_hook(config, digest, run_dir, engine, state, events, fence, metrics, beats, background)
        hooks: list[Hook] = [
            step_lines,
            NonFiniteHook(events, config.train.max_nonfinite_steps, partial(newest_before, run_dir)),
            *numerical_hooks(config.resilience, engine, events, run_dir, len(config.data.skip), newest_up_to),
            saves,
            *watching_hooks(config, run_dir, engine, events, metrics),
            *evaluation_hooks(config, run_dir, engine, valid_sets, metrics, events, beats),
            *plugin_hooks(config.hooks, HookContext(run_dir, grid.rank, grid.world_size, engine, events)),
        ]
        record_start(config, digest, engine, device, kernels, state, events)
        record_samples(config, train_samples, state, events)
        stop = StopSignal(run_dir, control, fence, config.run.kill_switch, saves.is_time)
        with closing(train_loader(config, grid, train_samples, state, environment.local_world_size)) as batches:
            reason = run_loop(config, engine, batches, state, hooks, stop, beats)
        record_end(config, state, reason, events, run_dir, meter)
    return exit_code(reason)


def run_loop(
    config: RootConfig,
    engine: TrainEngine,
    batches: Iterator[StepBatch],
    state: TrainState,
    hooks: Sequence[Hook],
    stop: StopSignal,
    beats: Heartbeat,
) -> str:
    """Runs steps until the end of the run, the end of a training phase or a stop request.

    Returns:
        The reason of the stop request; empty at the end of the run or if there was no request.
    """
    total_steps, end_sample = planned_steps(config), phase_end(config, state.samples)
    rate = learning_rate(config)
    call_hooks(hooks, beats, methodcaller("on_start", state))
    reason = stop.reason()
    while state.step < total_steps and state.samples < end_sample and not reason:
        beats.enter(LOADING_DATA, state.step + 1)
        begin = time.perf_counter()
        batch = next(batches)
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
        )
        call_hooks(hooks, beats, methodcaller("on_step", info))
    call_hooks(hooks, beats, methodcaller("on_end", state))
    return reason if state.step < total_steps else ""


def call_hooks(hooks: Sequence[Hook], beats: Heartbeat, call: Callable[[Hook], None]) -> None:
    """Calls a method of every hook, in order; heartbeats name the hook that runs."""
    for hook in hooks:
        beats.enter(type(hook).__name__)
        call(hook)


def phase_end(config: RootConfig, samples: int) -> float:
    """Returns the sample of the run at which the current training phase ends; infinity for the last phase.

    Args:
        config: config of the run.
        samples: samples consumed so far; selects the phase.
    """
    spans = run_spans(config)
    end = phase_at(spans, samples).end_sample if spans else None
    return math.inf if end is None else end


def end_sample(config: RootConfig, state: TrainState) -> int:
    """Returns the sample of the run at which this start ends: the end of the run or of the training phase."""
    planned = batch_size_schedule(config).samples_after(planned_steps(config))
    return int(min(planned, phase_end(config, state.samples)))


def rank_device(environment: RankEnvironment, *, deterministic: bool) -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none, after setting PyTorch's numerical modes."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", environment.gpu)
        torch.cuda.set_device(device)
    disable_reduced_precision_sums()
    if deterministic:
        make_deterministic(device)
    return device


def weight_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype of weights and activations."""
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


def load_kernels(config: RootConfig, device: torch.device, control: ControlPlane, beats: Heartbeat) -> Kernels:
    """Loads the kernels of the run, which must be the same on all ranks, or replicas would diverge.

    Raises:
        ConfigError: requested kernels are not available, or are available on some ranks only.
    """
    beats.enter("preparing kernels")
    kernels = load(config.ops, print, cuda=device.type == "cuda", optimizer=config.optim.impl)
    control.require_equal(
        "what ops.impl stands for", kernels.text, "install a C++ compiler everywhere, or use ops.impl=torch"
    )
    return kernels


def tuned_kernels(
    config: RootConfig, run_dir: Path, kernels: Kernels, grid: ParallelGrid, device: torch.device, events: EventWriter
) -> tuple[Kernels, AttentionKind]:
    """Returns the implementation of each operator and of attention; on a GPU autotuning selects the fastest."""
    work = attention_work(config, cuda=device.type == "cuda", fused=kernels.loaded)
    attention = autotune_attention(config.model, work, grid, device, run_dir)
    kernels, operators = autotune_operators(kernels, operator_work(config), attention.kind, grid, device, run_dir)
    record_tuning(events, attention, operators)
    return kernels, attention.kind


def operator_work(config: RootConfig) -> OperatorWork:
    """Returns the shapes and dtypes of a rank's operators, for autotuning."""
    return OperatorWork(
        config.model,
        config.parallel,
        seq_len=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size,
        dtype=weight_dtype(config.train.precision),
        loss_chunk=config.ops.loss_chunk,
        deterministic=config.train.deterministic,
    )


def build_engine(
    config: RootConfig,
    grid: ParallelGrid,
    device: torch.device,
    kernels: Kernels,
    attention: AttentionKind,
    *,
    draws: bool = True,
) -> TrainEngine:
    """Builds the engine, with initial weights, or with zeros if the weights will be loaded (`draws=False`)."""
    spec = EngineSpec(
        replace(config.model, attention=attention),
        config.parallel,
        config.optim,
        grid,
        precision=weight_dtype(config.train.precision),
        micro_batch_size=config.train.micro_batch_size,
        seed=config.train.seed,
        draws=draws,
        device=device,
        kernels=kernels,
        engine=config.resolved_engine,
        deepspeed=config.deepspeed,
        z_loss=config.train.z_loss,
    )
    return build_train_engine(spec)


def require_data_of_launcher(config: RootConfig, run_dir: Path, environment: RankEnvironment) -> None:
    """Verifies on one rank of each node that the data visible there is the data that the launcher recorded.

    Raises:
        DataError: the data differs, for example because a node's local disk holds another copy.
    """
    if environment.local_rank == 0:
        require_recorded(run_dir, record_data(config.data))


def train_loader(
    config: RootConfig, grid: ParallelGrid, samples: TrainSource, state: TrainState, local_ranks: int
) -> TrainLoader:
    """Returns the dataloader of this rank, which starts at the samples in `state`.

    Args:
        config: config of the run.
        grid: ranks of the layout.
        samples: training data.
        state: training progress.
        local_ranks: ranks on this node, which share the cache of streamed data.
    """
    stream = config.data.stream
    # Half of the cache is reserved for look-ahead, so that nothing is evicted before it is read.
    share = int(stream.cache_gib * 2**30 / 2 / local_ranks)
    return TrainLoader(
        samples,
        batch_size_schedule(config),
        config.train.micro_batch_size,
        grid.dp.rank,
        grid.dp.size,
        config.model.vocabulary,
        start_sample=state.samples,
        needs_tokens=needs_tokens(config, grid),
        prefetch_steps=config.data.prefetch_steps,
        packing=packing(config),
        end_sample=end_sample(config, state),
        look_ahead=LookAhead(stream.look_ahead_steps, share) if config.data.urls else NO_LOOK_AHEAD,
    )


def metrics_hook(
    config: RootConfig,
    environment: RankEnvironment,
    device: torch.device,
    metrics: MetricsWriter,
    events: EventWriter,
    control: ControlPlane,
    beats: Heartbeat,
    meter: StreamMeter,
) -> MetricsHook:
    """Returns the hook that writes metrics. For the peak of a CPU, rank 0 measures it while the other ranks wait."""
    peak_tflops = 1.0
    if environment.rank == 0:
        dtype, cores = weight_dtype(config.train.precision), available_cores()
        peak_tflops = device_peak_tflops(device, dtype, cores, config.cluster.peak_tflops)
        if device.type == "cpu" and config.cluster.peak_tflops is None:
            peak_tflops /= environment.local_world_size
        elif device.type == "cuda":
            peak_tflops /= config.cluster.ranks_per_gpu
    control.barrier()
    flops = model_flops_per_token(config.model, config.train.seq_len)
    restarts = environment.lease - 1 if environment.lease else 0
    return MetricsHook(metrics, flops, environment.world_size, peak_tflops, restarts, beats, events, meter.since_last)


def async_saves(config: RootConfig, run_dir: Path, environment: RankEnvironment, fence: Fence) -> AsyncSaves:
    """Forks the processes that the config needs for asynchronous saves, whatever the size of the state, which is not
    known yet, and for local checkpoints; without these, those of an earlier start are deleted."""
    checkpoint, timeout_s = config.checkpoint, config.cluster.timeout_s
    writer, copies = None, None
    if checkpoint.copies(sys.maxsize):
        writer = CheckpointWriter(environment.rank, environment.world_size, fence)
    if checkpoint.local_every_steps:
        copies = LocalSaves(checkpoint, environment, computation_digest(config), timeout_s)
    elif environment.rank == 0:
        forget(run_dir)
    if copies is None and environment.local_rank == 0:
        shutil.rmtree(node_folder(Path(checkpoint.local_folder), run_dir), ignore_errors=True)
    return AsyncSaves(checkpoint, copies, writer, timeout_s, overlap=not config.hooks)


def checkpoint_hook(
    config: RootConfig,
    digest: str,
    run_dir: Path,
    engine: TrainEngine,
    state: TrainState,
    events: EventWriter,
    fence: Fence,
    metrics: MetricsWriter,
    beats: Heartbeat,
    background: AsyncSaves,
) -> CheckpointHook:
    """Returns the hook that saves checkpoints."""
    data = read_record(run_dir)
    about = RunRecord(
        state.state_dict(),
        engine.optimizer_steps,
        digest,
        asdict(config.model),
        config.parallel.sizes,
        tokenizer=data.tokenizer if data is not None else None,
        data_digest=data.digest if data is not None else None,
    )
    loss_key = best_loss_key(config)
    checkpoint = config.checkpoint
    return CheckpointHook(
        engine, run_dir, checkpoint, about, state, events, fence, metrics, beats, background, loss_key
    )


def watching_hooks(
    config: RootConfig, run_dir: Path, engine: TrainEngine, events: EventWriter, metrics: MetricsWriter
) -> list[Hook]:
    """Returns the monitoring hooks that the config enables: layer norms, timelines and straggler detection.

    Garbage collection is the last of them and runs on all ranks at the same step.
    """
    hooks: list[Hook] = []
    if (every_steps := config.logging.layer_norms_every_steps) is not None:
        hooks.append(LayerNormsHook(engine, layer_names(config.model), every_steps, metrics))
    if (every_steps := config.logging.timeline_every_steps) is not None:
        hooks.append(TimelineHook(engine.watch_spans, run_dir, every_steps, engine.grid))
    if (every_steps := config.logging.straggler_every_steps) is not None and engine.grid.world_size > 1:
        hooks.append(StragglerHook(engine.watch_spans, run_dir, every_steps, engine.grid, events))
    return [*hooks, GarbageCollectionHook(config.cluster.gc_every_steps)]


def exit_code(stop_reason: str) -> int:
    """Returns 0 at the end of the run or phase, else the documented exit code of the stop reason."""
    if not stop_reason:
        return 0
    return Preempted.exit_code if stop_reason in (PREEMPTED, TIME_LIMIT) else StopRequested.exit_code


def record_start(
    config: RootConfig,
    digest: str,
    engine: TrainEngine,
    device: torch.device,
    kernels: Kernels,
    state: TrainState,
    events: EventWriter,
) -> None:
    """Writes the `start` event: model size, layout, device, operators."""
    events.write(
        "start",
        step=state.step,
        total_steps=planned_steps(config),
        parameters=parameter_count(config.model),
        precision=config.train.precision.value,
        layout=" ".join(f"{axis}{size}" for axis, size in config.parallel.sizes.items()),
        zero_stage=config.parallel.zero_stage,
        engine=config.resolved_engine.value,
        stages=engine.bounds,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        ops=kernels.text.removeprefix("ops.impl: "),
        threads_per_rank=torch.get_num_threads(),
        checkpoints=config.checkpoint.when,
        config_digest=digest,
    )


def record_samples(config: RootConfig, samples: TrainSource, state: TrainState, events: EventWriter) -> None:
    """Writes the events about packed documents, blended datasets, skipped samples and a training phase that begins."""
    _record_phase(config, samples, state, events)
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


def _record_phase(config: RootConfig, samples: TrainSource, state: TrainState, events: EventWriter) -> None:
    """Writes the `training_phase` event if a phase begins, with the tokens skipped between it and the one before."""
    spans = run_spans(config)
    span = phase_at(spans, state.samples) if spans else None
    if span is None or span.first_sample != state.samples:
        return
    left_out = [0]
    if isinstance(samples, BlendedSamples) and isinstance(samples.order, ContinuedOrder):
        left_out = samples.order.left_out_tokens.tolist()
    events.write(
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


def record_end(
    config: RootConfig, state: TrainState, reason: str, events: EventWriter, run_dir: Path, meter: StreamMeter
) -> None:
    """Writes the `end` event of this start, with the next training phase if there is one, and clears a stop request."""
    spans, more = run_spans(config), {}
    if spans and not reason and state.step < planned_steps(config):
        more = {NEXT_PHASE: phase_at(spans, state.samples).place + 1}
    if config.data.urls:
        events.write("streamed", level="debug", step=state.step, datasets=config.data.urls, **meter.total())
    events.write("end", step=state.step, stopped=reason, **more)
    if reason and events.enabled:
        clear_stop(run_dir)
