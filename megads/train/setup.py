"""The parts of a training process, built from the config: device, kernels, engine, dataloader and hooks."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megads.checkpoint.async_saves import AsyncSaves
from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.local import forget
from megads.checkpoint.local_files import node_folder
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.writer import CheckpointWriter
from megads.config.frozen import computation_digest
from megads.config.phases import phase_at
from megads.config.root import RootConfig, batch_size_schedule, best_loss_key, planned_steps, run_spans
from megads.config.train import Precision
from megads.data.indexed.recorded import read_record, record_data, require_recorded
from megads.data.indexed.stream import StreamMeter
from megads.data.sampling.loader import NO_LOOK_AHEAD, LookAhead, TrainLoader
from megads.data.sampling.runs import TrainSource
from megads.engine import build_train_engine
from megads.engine.interface import EngineSpec, TrainEngine
from megads.errors import MegadsError
from megads.model.model_size import model_flops_per_token
from megads.model.peak import device_peak_tflops
from megads.monitor.experts import ExpertsHook
from megads.monitor.hooks import LayerNormsHook, MetricsHook, layer_names
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import Compile, Kernels
from megads.ops.resolve import load
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import RankEnvironment, available_cores
from megads.runtime.heartbeat import Heartbeat
from megads.runtime.hooks import Hook, TrainState
from megads.runtime.lease import Fence
from megads.runtime.optional_tools import find_tool, require_tool
from megads.runtime.process import GarbageCollectionHook, disable_reduced_precision_sums, make_deterministic
from megads.runtime.stop import ProfileRequest
from megads.train.evaluation_hooks import loader_share
from megads.train.run_context import RunContext


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


def tuned_kernels(run: RunContext, kernels: Kernels) -> tuple[Kernels, list[AttentionKind]]:
    """Returns the implementation of each operator, and of attention in each kind of layers.

    On a GPU `megads.tools.autotune` measures the fastest. Without it, what is `auto` is PyTorch's, in eager mode. CUDA
    graphs are decided here only if an earlier start has measured, see `graphs_hooks`.
    """
    attention = [kind.attention for kind, _ in run.config.model.layer_kinds()]
    if run.device.type != "cuda":
        return kernels, attention
    tool = find_tool("autotune.choice")
    if tool is None:
        return replace(kernels, tuned=frozenset(), cuda_graphs=kernels.cuda_graphs is True), attention
    where = (run.grid, run.device, run.events)
    tuned: tuple[Kernels, list[AttentionKind]] = tool.tuned_kernels(run.config, run.run_dir, kernels, *where)
    return tuned


def graphs_hooks(run: RunContext, engine: TrainEngine, kernels: Kernels) -> list[Any]:
    """Returns the hook that decides about CUDA graphs after the first steps, see `megads.tools.autotune.graphs`; empty
    if they are decided."""
    if kernels.cuda_graphs is not None:
        return []
    tool = require_tool("autotune.graphs", "ops.cuda_graphs=auto")
    return [tool.GraphsHook(engine, tool.graphs_key(run.config, kernels, engine.device), run.events)]


def build_engine(
    run: RunContext, kernels: Kernels, attention: Sequence[AttentionKind], *, draws: bool = True
) -> TrainEngine:
    """Builds the engine, with initial weights, or with zeros if the weights will be loaded (`draws=False`)."""
    config = run.config
    spec = EngineSpec(
        config.model.with_attention(attention),
        config.parallel,
        config.optim,
        run.grid,
        precision=weight_dtype(config.train.precision),
        micro_batch_size=config.train.micro_batch_size,
        seed=config.train.seed,
        draws=draws,
        device=run.device,
        kernels=kernels,
        engine=config.resolved_engine,
        deepspeed=config.deepspeed,
        z_loss=config.train.z_loss,
        float8=config.train.float8,
    )
    return build_train_engine(spec)


def require_data_of_launcher(config: RootConfig, run_dir: Path, environment: RankEnvironment) -> None:
    """Verifies on one rank of each node that the data visible there is the data that the launcher recorded.

    Raises:
        DataError: the data differs, for example because a node's local disk holds another copy.
    """
    if environment.local_rank == 0:
        require_recorded(run_dir, record_data(config.data))


def train_loader(run: RunContext, samples: TrainSource, state: TrainState) -> TrainLoader:
    """Returns the dataloader of this rank, which starts at the samples in `state`."""
    config, stream = run.config, run.config.data.stream
    # Half of the cache, which the node's ranks share, is reserved for look-ahead: nothing is evicted before it is read.
    share = int(stream.cache_gib * 2**30 / 2 / run.environment.local_world_size)
    return TrainLoader(
        samples,
        batch_size_schedule(config),
        loader_share(config, run.grid),
        start_sample=state.samples,
        prefetch_steps=config.data.prefetch_steps,
        end_sample=end_sample(config, state),
        look_ahead=LookAhead(stream.look_ahead_steps, share) if config.data.urls else NO_LOOK_AHEAD,
    )


def metrics_hook(run: RunContext, meter: StreamMeter) -> MetricsHook:
    """Returns the hook that writes metrics. For the peak of a CPU, rank 0 measures it while the other ranks wait."""
    config, environment, device = run.config, run.environment, run.device
    peak_tflops = 1.0
    if environment.rank == 0:
        dtype, cores = weight_dtype(config.train.precision), available_cores()
        peak_tflops = device_peak_tflops(device, dtype, cores, config.cluster.peak_tflops)
        if device.type == "cpu" and config.cluster.peak_tflops is None:
            peak_tflops /= environment.local_world_size
        elif device.type == "cuda":
            peak_tflops /= config.cluster.ranks_per_gpu
    run.grid.control.barrier()
    flops = model_flops_per_token(config.model, config.train.seq_len)
    restarts = environment.lease - 1 if environment.lease else 0
    sizes = (flops, environment.world_size, peak_tflops)
    return MetricsHook(run.metrics, *sizes, restarts, run.beats, run.events, meter.since_last)


def async_saves(config: RootConfig, run_dir: Path, environment: RankEnvironment) -> AsyncSaves:
    """Forks the processes that the config needs for asynchronous saves, whatever the size of the state, which is not
    known yet, and for replicas of local checkpoints; without these, those of an earlier start are deleted."""
    checkpoint, timeout_s = config.checkpoint, config.cluster.collective_timeout_s
    writer, local = None, None
    # The process of the command has threads, and cannot be forked.
    if checkpoint.copies(sys.maxsize) and not config.cluster.in_process:
        writer = CheckpointWriter(environment.rank, environment.world_size)
    if checkpoint.local_every_steps:
        local = LocalSaves(checkpoint, environment, computation_digest(config), timeout_s)
    else:
        if environment.rank == 0:
            forget(run_dir)
        if environment.local_rank == 0:
            shutil.rmtree(node_folder(Path(checkpoint.local_folder), run_dir), ignore_errors=True)
    return AsyncSaves(checkpoint, local, writer, timeout_s, overlap=not config.hooks)


def checkpoint_hook(
    run: RunContext, engine: TrainEngine, state: TrainState, fence: Fence, background: AsyncSaves
) -> CheckpointHook:
    """Returns the hook that saves checkpoints."""
    config, data = run.config, read_record(run.run_dir)
    about = RunRecord(
        state.state_dict(),
        engine.optimizer_steps,
        run.digest,
        asdict(config.model),
        config.parallel.sizes,
        tokenizer=data.tokenizer if data is not None else None,
        data_digest=data.digest if data is not None else None,
    )
    outlets = (run.events, fence, run.metrics, run.beats)
    return CheckpointHook(
        engine, run.run_dir, config.checkpoint, about, state, *outlets, background, best_loss_key(config)
    )


def watching_hooks(run: RunContext, engine: TrainEngine) -> list[Hook]:
    """Returns the monitoring hooks that the config enables: experts, layer norms, timelines and straggler detection.

    Timelines need `megads.tools.profile`, and without it no straggler is detected. Garbage collection is the last hook
    and runs on all ranks at the same step.
    """
    config, hooks = run.config, list[Hook]()
    if config.model.moe.enabled:
        hooks.append(ExpertsHook(config.model.moe, run.metrics, run.events, config.logging.experts_every_steps))
    if (every_steps := config.logging.layer_norms_every_steps) is not None:
        hooks.append(LayerNormsHook(engine, layer_names(config.model), every_steps, run.metrics))
    if (every_steps := config.logging.timeline_every_steps) is not None:
        timeline = require_tool("profile.timeline", f"logging.timeline_every_steps={every_steps}")
        hooks.append(timeline.TimelineHook(engine.watch_spans, run.run_dir, every_steps, run.grid))
    every_steps = config.logging.straggler_every_steps
    stragglers = find_tool("profile.stragglers") if every_steps and run.grid.world_size > 1 else None
    if stragglers is not None:
        hooks.append(stragglers.StragglerHook(engine.watch_spans, run.run_dir, every_steps, run.grid, run.events))
    return [*hooks, GarbageCollectionHook(config.cluster.gc_every_steps)]


@contextmanager
def explained_failures(at: object) -> Iterator[None]:
    """Adds to unhandled exceptions where they were raised: step, samples, module (`megads.tools.debug.failing_step`).

    Args:
        at: the `megads.train.run_context.StepPlace` of this rank.
    """
    try:
        yield
    except MegadsError:
        raise  # says itself what is wrong
    except Exception as error:
        if (tool := find_tool("debug.failing_step")) is not None:
            tool.explain(error, at)
        raise


def memory_history(config: RootConfig, run_dir: Path, environment: RankEnvironment) -> AbstractContextManager[None]:
    """Records the allocations of GPU memory inside the block, if the config asks for it (logging.memory_snapshot)."""
    if not config.logging.memory_snapshot:
        return nullcontext()
    tool = require_tool("profile.memory_snapshot", "logging.memory_snapshot=true")
    history: AbstractContextManager[None] = tool.recorded(tool.oom_path(run_dir, environment.lease, environment.rank))
    return history


class StepProfiles:
    """Profiles of steps; nothing of the profiler is loaded before the first request.

    Args:
        run: the run.
        engine: training engine.
    """

    def __init__(self, run: RunContext, engine: TrainEngine) -> None:
        self._run, self._engine = run, engine
        self._hook: Any = None

    def hooks(self, state: TrainState) -> list[Hook]:
        """Returns the hook that profiles logging.profile_steps; none if they are past."""
        steps = self._run.config.logging.profile_steps
        if steps is None or state.step >= steps[1]:
            return []
        tool = require_tool("profile.torch_profiler", f"logging.profile_steps={steps}")
        return [self._make(tool, tool.ProfiledSteps(*steps))]

    def on_request(self, request: ProfileRequest, step: int) -> list[Hook]:
        """Profiles the steps after `step`; returns the hook if it is new."""
        tool = find_tool("profile.torch_profiler")
        if tool is None:
            self._run.events.write("profile_refused", level="warning", message="megads.tools.profile is not installed")
            return []
        known = self._hook is not None
        hook = self._hook if known else self._make(tool, None)
        hook.ask(tool.ProfiledSteps(step + 1, step + request.steps, request.memory))
        return [] if known else [hook]

    def _make(self, tool: ModuleType, steps: Any) -> Any:
        run, config = self._run, self._run.config
        # Inside of compiled blocks no part is called.
        inner, snapshot = config.ops.compile is Compile.none, config.logging.memory_snapshot
        parts = (self._engine, run.run_dir, run.events, run.beats, steps)
        self._hook = tool.ProfileHook(*parts, inner=inner, snapshot=snapshot)
        return self._hook
