"""Hooks that observe a run: step metrics, layer norms, and plugin hooks."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megads.engine.interface import Shard, TrainEngine
from megads.errors import ConfigError
from megads.model.config import EMBEDDING, FINAL_NORM, HEAD, ModelConfig, is_block
from megads.monitor.accounting import EffectiveTime, StepTime
from megads.runtime.files import read_end
from megads.runtime.heartbeat import SAVING, VALIDATING, Heartbeat, process_started_s
from megads.runtime.hooks import Hook, StepInfo, TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter
from megads.runtime.registry import HOOKS

_END_BYTES = 1 << 20
_NAMED = 4
"""Number of phases listed in a message, the longest ones."""


@dataclass(frozen=True)
class Throughput:
    """Speed of one step.

    Attributes:
        tokens_per_s: tokens per second over all devices.
        tflops_per_device: achieved model TFLOPS per device, counted as in megads.model.model_size.
        mfu: model FLOPS utilization, tflops_per_device over the peak of a device; 0.5 is 50%.
    """

    tokens_per_s: float
    tflops_per_device: float
    mfu: float


def throughput(tokens: int, seconds: float, world_size: int, flops_per_token: float, peak_tflops: float) -> Throughput:
    """Computes throughput and MFU of a step.

    Args:
        tokens: number of tokens, including masked ones, which cost the same.
        seconds: wall time in seconds, above 0.
        world_size: number of devices; on CPU, of ranks.
        flops_per_token: model FLOPs per token of forward and backward pass.
        peak_tflops: peak TFLOPS of one device.
    """
    tokens_per_s = tokens / seconds
    tflops_per_device = tokens_per_s * flops_per_token / world_size / 1e12
    return Throughput(tokens_per_s, tflops_per_device, tflops_per_device / peak_tflops)


class MetricsHook:
    """Writes one line of metrics per step.

    Args:
        metrics: metrics log.
        flops_per_token: model FLOPs per token of forward and backward pass.
        world_size: number of devices.
        peak_tflops: peak TFLOPS of one device.
        restarts: number of earlier starts of the run.
        beats: heartbeat of this rank, which accounts its time by phase; None if the rank sends none.
        events: event log for the times before the first and after the last step; None records neither.
        more: returns additional values for the line.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        flops_per_token: float,
        world_size: int,
        peak_tflops: float,
        restarts: int = 0,
        beats: Heartbeat | None = None,
        events: EventWriter | None = None,
        more: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._metrics = metrics
        self._more = more
        self._flops_per_token = flops_per_token
        self._world_size = world_size
        self._peak_tflops = peak_tflops
        self._restarts = restarts
        self._beats = beats or Heartbeat()
        self._before = dict[str, float]()
        self._effective: EffectiveTime | None = None
        self._events = events
        self._first = FirstStepReport(events, self._beats) if events is not None else None

    def on_start(self, state: TrainState) -> None:
        if self._metrics.enabled:
            self._effective = EffectiveTime(self._metrics.path.parent)
            if self._first is not None:
                self._first.begin(state)

    def times(self) -> dict[str, float]:
        """Returns the seconds spent in validations and saves since the last line."""
        spent = self._beats.spent()
        since = {phase: spent.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in (VALIDATING, SAVING)}
        self._before = spent
        return {"validate_time_s": since[VALIDATING], "save_time_s": since[SAVING]}

    def on_step(self, info: StepInfo) -> None:
        if not self._metrics.enabled:
            return
        now, times = time.time(), self.times()
        effective = self._effective or EffectiveTime(self._metrics.path.parent)
        self._effective = effective
        speed = throughput(
            info.global_batch_size * info.seq_len,
            info.step_time_s,
            self._world_size,
            self._flops_per_token,
            self._peak_tflops,
        )
        self._metrics.write(
            {
                "step": info.step,
                "samples": info.samples,
                "tokens": info.tokens,
                "loss": info.loss,
                "grad_norm": info.grad_norm,
                "lr": info.lr,
                "global_batch_size": info.global_batch_size,
                "seq_len": info.seq_len,
                "step_time_s": info.step_time_s,
                "data_time_s": info.data_time_s,
                "tokens_per_s": speed.tokens_per_s,
                "tflops_per_device": speed.tflops_per_device,
                "mfu": speed.mfu,
                "peak_memory_bytes": peak_memory_bytes(),
                "skipped": info.skipped,
                "batch_hash": info.batch_hash,
                "restarts": self._restarts,
                **(info.experts.summary() if info.experts is not None else {}),
                "time": now,
                **times,
                **self._more(),
                "effective_time": effective.after(
                    StepTime.from_metrics({"time": now, "step_time_s": info.step_time_s, **times})
                ),
            }
        )
        if self._first is not None:
            self._first.after(info)

    def on_end(self, state: TrainState) -> None:
        if self._events is not None:
            self._events.write("after_last_step", level="debug", **self.times())


class FirstStepReport:
    """Records the time to the first step of a start, by phase.

    Args:
        events: event log.
        beats: heartbeat of this rank.
    """

    def __init__(self, events: EventWriter, beats: Heartbeat) -> None:
        self._events, self._beats = events, beats
        self._due, self._resumed = False, False

    def begin(self, state: TrainState) -> None:
        """Arms the report; called when a start begins to train from a state."""
        self._due, self._resumed = True, state.step > 0

    def after(self, info: StepInfo) -> None:
        """Writes the event after the first step."""
        if not self._due:
            return
        self._due, now, started = False, time.time(), process_started_s()
        events = read_end(self._events.path, _END_BYTES)
        launch: Mapping[str, Any] = next((event for event in reversed(events) if event.get("event") == "launch"), {})
        launched = min(float(launch.get("time", started)), started)
        seconds = {"starting the processes": started - launched, "imports": max(0.0, self._beats.made_s - started)}
        seconds |= self._beats.spent()
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:_NAMED]
        self._events.write(
            "first_step",
            level="info" if self._resumed else "debug",
            step=info.step,
            since_launch_s=now - launched,
            since_command_s=now - float(launch.get("command_start", launched)),
            step_time_s=info.step_time_s,
            seconds=seconds,
            message=f"done {now - launched:.1f} s after the start: "
            + ", ".join(f"{phase} {spent_s:.1f}" for phase, spent_s in longest),
        )


def layer_names(model: ModelConfig) -> list[str]:
    """Returns the names of the model's layers in order; a tied head is part of the embedding."""
    names = [EMBEDDING, *(f"blocks.{number}" for number in range(model.num_layers)), FINAL_NORM, HEAD]
    return names[:-1] if model.tie_embeddings else names


class LayerNormsHook:
    """Writes gradient norms and activation RMS per layer: `layers/<layer>/grad_norm` and `/activation_rms`.

    The gradient norm is the 2-norm before clipping; the squares of all layers add up to the square of `grad_norm`. The
    activation RMS is the root mean square over all output elements of the step's micro-batches; the head has none. The
    sums stay on the device until the end of the step, when they are all-reduced and copied to the host once.

    Args:
        engine: training engine.
        layers: layer names of the whole model.
        every_steps: interval in steps.
        metrics: metrics log.
    """

    def __init__(self, engine: TrainEngine, layers: Sequence[str], every_steps: int, metrics: MetricsWriter) -> None:
        self._engine, self._layers, self._every_steps, self._metrics = engine, list(layers), every_steps, metrics
        self._number = {name: number for number, name in enumerate(self._layers)}
        self._sums = self._zeros()

    def _zeros(self) -> Tensor:
        """Returns zeros, fp64 [3, layers], for squared gradients, squared outputs, and numbers of output elements."""
        return torch.zeros(3, len(self._layers), dtype=torch.float64, device=self._engine.device)

    def on_start(self, state: TrainState) -> None:
        self._prepare(state.step + 1)

    def on_step(self, info: StepInfo) -> None:
        if info.step % self._every_steps == 0:
            self._engine.watch_activations(None)
            self._write(info)
        if not info.last:
            self._prepare(info.step + 1)

    def on_end(self, state: TrainState) -> None:
        pass

    def _prepare(self, step: int) -> None:
        if step % self._every_steps == 0:
            self._sums = self._zeros()
            self._engine.watch_gradients(self._note_gradients)
            self._engine.watch_activations(self._note_output)

    def _note_gradients(self, shards: list[Shard]) -> None:
        for shard in shards:
            parts = shard.key.partition("/")[2].split(".")
            name = ".".join(parts[:2]) if is_block(".".join(parts)) else parts[0]
            self._sums[0, self._number[name]] += _square(shard.tensor)

    def _note_output(self, name: str, hidden: Tensor) -> None:
        number = self._number[name]
        self._sums[1, number] += _square(hidden)
        self._sums[2, number] += hidden.numel()

    def _write(self, info: StepInfo) -> None:
        """Reduces and writes the line; collective over all ranks."""
        if self._engine.grid.world_size > 1:
            dist.all_reduce(self._sums)
        gradients, outputs, elements = self._sums.tolist()
        if self._engine.grid.rank:
            return
        line: dict[str, float] = {"step": info.step, "samples": info.samples, "tokens": info.tokens}
        for name, gradient, output, count in zip(self._layers, gradients, outputs, elements, strict=True):
            line[f"layers/{name}/grad_norm"] = gradient**0.5
            if count:
                line[f"layers/{name}/activation_rms"] = (output / count) ** 0.5
        self._metrics.write(line)


def _square(x: Tensor) -> Tensor:
    """Returns the sum of squares as an fp64 scalar on the device, accumulated in at least fp32 without a copy of x."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double().square()


def peak_memory_bytes() -> int:
    """Returns the peak memory of this rank in bytes: allocated on its GPU, or resident set size without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class HookContext:
    """Objects that a plugin hook may use in addition to the `StepInfo` of each step.

    Attributes:
        run_dir: run directory.
        rank: rank of this process; every rank creates and calls every hook.
        world_size: number of ranks.
        engine: training engine, with weights and optimizer state (`named_shards`) and validation (`evaluate`, a
            collective over all ranks).
        events: event log; `write("name", key=value)` adds a line to events.jsonl on rank 0 and does nothing on others.
    """

    run_dir: Path
    rank: int
    world_size: int
    engine: TrainEngine
    events: EventWriter


def plugin_hooks(hooks: Mapping[str, Mapping[str, Any]], context: HookContext) -> list[Hook]:
    """Creates the hooks that a config names, in its order.

    Args:
        hooks: complete settings by hook name.
        context: passed to each hook.

    Raises:
        ConfigError: A hook lacks a method of `Hook`.
    """
    made: list[Hook] = []
    for name, options in hooks.items():
        hook = HOOKS.make(name, options, context)
        missing = [method for method in ("on_start", "on_step", "on_end") if not hasattr(hook, method)]
        if missing:
            raise ConfigError(f"hooks.{name}: {type(hook).__name__} has no {', '.join(missing)}; see megads.Hook")
        made.append(hook)
    return made
