"""Costs of a pass other than GEMMs and attention, fitted to the spans of small models in training.

The time of a pass is that of its GEMMs and attention, which are measured separately, plus a constant and linear terms
in the number of blocks (Python, autograd, kernel launches), bytes of elementwise kernels and logits of the loss.
The four coefficients are fitted for forward and for backward passes over all models, by non-negative least squares of
relative errors. On a GPU the cost per block is that of kernel launches, which a busy GPU hides: it is fitted to
launch-bound models, and the other coefficients to the other models.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megads.api import (
    ActionKind,
    BatchInfo,
    EngineKind,
    EngineSpec,
    MicroBatch,
    MLPKind,
    ModelConfig,
    NormKind,
    OptimConfig,
    ParallelConfig,
    ParallelGrid,
    Position,
    Recompute,
    ScheduleName,
    Span,
    build_grid,
    build_train_engine,
    parameter_count,
    resolve_engine,
)
from megads.tools.plan.calibrate.operators import Bench
from megads.tools.plan.devices import Device, LayoutCosts, non_negative
from megads.tools.plan.operators import BACKWARD_TRAFFIC, RankOperators
from megads.tools.plan.step_estimate import StepModel
from megads.tools.plan.workload import Workload

_WARM_UP = 2
_FEWEST, _MOST = 3, 12
"""Least and most timed steps of a trial in one round."""
_STEPS_SECONDS = 15.0
"""Time limit of the timed steps, as a multiple of `Bench.seconds`: a step is as much work as many operators."""
_UNIT_US, _UNIT_NS = 100.0, 1.0
_LR = 1e-4
_PASSES = {"forward": ("forward",), "backward": ("backward_input", "backward_weight")}
_TRAFFIC = {"forward": 1.0, "backward": BACKWARD_TRAFFIC}


@dataclass(frozen=True)
class Trial:
    """A model and a batch shape that are trained for a few steps.

    Attributes:
        like: architecture: bloom, llama or gpt (bloom with learned positions and no embedding norm).
        layers, hidden, vocabulary: number of layers, hidden size and vocabulary size.
        seq_len, samples: sequence length and samples per micro-batch.
        micro_batches: micro-batches per step.
        head_dim: features per head.
    """

    like: str
    layers: int
    hidden: int
    vocabulary: int
    seq_len: int
    samples: int
    micro_batches: int = 3
    head_dim: int = 64

    @property
    def model(self) -> ModelConfig:
        common: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_heads": max(2, self.hidden // self.head_dim),
            "vocab_size": self.vocabulary,
            "max_seq_len": self.seq_len,
        }
        if self.like == "bloom":
            return ModelConfig(**common)
        if self.like == "gpt":
            return ModelConfig(**common, position=Position.learned, embedding_norm=False)
        kinds: dict[str, Any] = {"position": Position.rope, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu}
        return ModelConfig(**common, **kinds, ffn_size=3 * self.hidden, embedding_norm=False, tie_embeddings=False)

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_len

    def workload(self, width: int) -> Workload:
        """The training step, with `width` bytes per element."""
        return Workload(self.seq_len, self.samples, self.micro_batches, width)


TRIALS = (
    Trial("bloom", 1, 64, 256, 64, 1),
    Trial("bloom", 8, 64, 256, 64, 1),
    Trial("llama", 8, 64, 256, 64, 1),
    Trial("bloom", 3, 384, 1024, 384, 2),
    Trial("llama", 3, 384, 1024, 384, 2),
    Trial("bloom", 4, 192, 1024, 256, 8),
    Trial("llama", 4, 192, 1024, 256, 8),
    Trial("bloom", 1, 256, 24576, 512, 1),
    Trial("llama", 2, 768, 1024, 256, 4, 2),
)
GPU_TRIALS = (
    Trial("bloom", 4, 2048, 8192, 2048, 4, head_dim=128),
    Trial("bloom", 2, 4096, 8192, 2048, 2, head_dim=128),
    Trial("llama", 4, 2048, 8192, 2048, 4, head_dim=128),
    Trial("llama", 2, 4096, 8192, 2048, 2, head_dim=128),
    Trial("gpt", 6, 1024, 8192, 2048, 8, head_dim=128),
    Trial("llama", 2, 2048, 50304, 2048, 4, head_dim=128),
    Trial("gpt", 1, 1024, 250880, 2048, 1, head_dim=128),
)
"""Models that keep a GPU busy. They have few enough logits for an unchunked loss: a chunked loss runs its backward pass
in the forward pass (`megads.parallel.loss`)."""
LAUNCH_TRIALS = (
    Trial("gpt", 1, 256, 256, 128, 1, head_dim=128),
    Trial("llama", 9, 256, 256, 128, 1, head_dim=128),
    Trial("gpt", 9, 256, 256, 128, 1, head_dim=128),
)
"""Models whose passes are launch-bound on a GPU; the last one is also trained with activation recomputation."""
IN_LAYOUTS = (
    Trial("bloom", 6, 64, 256, 64, 1),
    Trial("llama", 3, 384, 1024, 384, 2, 2),
    Trial("bloom", 2, 256, 1024, 1024, 1, 2),
    Trial("bloom", 2, 640, 1024, 128, 2, 2),
)
"""Models that are trained in all `layouts`."""
PLAIN = "plain"
"""Name of the layout with plain data parallelism."""
_ROUNDS = 2
"""Rounds in which each trial is trained, as other activity of the machine may slow down one of them."""
_PAIR = 2
"""Number of ranks over which the trials' layers, heads and tokens can be divided."""


def replicas(ranks: int, recompute: Recompute = Recompute.none) -> ParallelConfig:
    """Plain data parallelism, without ZeRO."""
    return ParallelConfig(dp=ranks, zero_stage=0, recompute=recompute)


def layouts(ranks: int) -> dict[str, ParallelConfig]:
    """`PLAIN` and the layouts named in `LayoutCosts` that are possible for the trials on `ranks` ranks."""
    data_parallel = {PLAIN: replicas(ranks)}
    data_parallel |= {f"recompute_{mode}": replicas(ranks, mode) for mode in (Recompute.selective, Recompute.full)}
    if ranks != _PAIR:
        return data_parallel
    return data_parallel | {
        "zero_2": ParallelConfig(dp=ranks, zero_stage=2),
        "zero_3": ParallelConfig(dp=ranks, zero_stage=3),
        "tp": ParallelConfig(tp=ranks),
        "sp": ParallelConfig(tp=ranks, sequence_parallel=True),
        "sp_chunks": ParallelConfig(tp=ranks, sequence_parallel=True, tp_chunks=2),
        "cp": ParallelConfig(cp=ranks),
        "pp": ParallelConfig(pp=ranks),
        "split": ParallelConfig(pp=ranks, schedule=ScheduleName.zb_h1),
    }


@dataclass(frozen=True)
class TrialTimes:
    """Measured times of a trial; medians in seconds.

    Attributes:
        trial: the trained model and batch shape.
        forward, backward: time of one forward or backward pass.
        optimizer: time of the optimizer step.
        rest: step time outside of all spans.
        step: step time.
        parameters: number of parameters of the model.
    """

    trial: Trial
    forward: float
    backward: float
    optimizer: float
    rest: float
    step: float
    parameters: int


def time_trials(
    trials: Sequence[Trial], bench: Bench, parallel: Mapping[str, ParallelConfig], rounds: int = _ROUNDS
) -> dict[str, list[TrialTimes]]:
    """Trains every model in every layout in several rounds and keeps the round with the fastest step; collective."""
    found: dict[str, list[TrialTimes]] = {}
    # Process groups keep threads and buffers until the process ends, so each layout builds its groups only once.
    grids = {name: build_grid(layout, dist.get_rank(), dist.get_world_size()) for name, layout in parallel.items()}
    for trial in trials:
        taken = [
            {name: _trained(trial, bench, layout, grids[name]) for name, layout in parallel.items()}
            for _ in range(rounds)
        ]
        for name in parallel:
            found.setdefault(name, []).append(min((once[name] for once in taken), key=lambda once: once.step))
    return found


def _trained(trial: Trial, bench: Bench, parallel: ParallelConfig, grid: ParallelGrid) -> TrialTimes:
    """Trains a model for a few steps, with the same tokens on every rank; collective."""
    model = trial.model
    # The previous engine is held by reference cycles.
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    spec = EngineSpec(
        replace(model, attention=bench.attention_kind_of(model)),
        parallel,
        OptimConfig(lr=_LR),
        grid,
        precision=bench.dtype,
        micro_batch_size=trial.samples,
        seed=1,
        device=bench.device,
        value=partial(_drawn, bench.device, model.weight_std) if bench.device.type == "cuda" else None,
        kernels=bench.kernels,
        engine=resolve_engine(EngineKind.auto, parallel.zero_stage),
    )
    engine = build_train_engine(spec)
    batches = []
    for _ in range(trial.micro_batches):
        tokens_bs = torch.randint(trial.vocabulary, (trial.samples, trial.seq_len))
        info = BatchInfo(torch.arange(trial.samples), seq_len=trial.seq_len)
        batches.append(MicroBatch(info, tokens_bs, tokens_bs.roll(-1, 1), torch.ones(tokens_bs.shape)))
    found: list[dict[str, float]] = []
    gc.collect()
    gc.disable()
    steps = torch.tensor([_WARM_UP], device=bench.device)
    while len(found) < steps.item():
        spans: list[Span] = []
        engine.watch_spans(spans.extend)
        dist.barrier()
        begin = time.perf_counter()
        engine.step(batches, _LR)
        if bench.device.type != "cuda":  # on a GPU, step() has synchronized already
            dist.barrier()
        found.append(_by_kind(spans, time.perf_counter() - begin))
        if len(found) == _WARM_UP:
            timed = _STEPS_SECONDS * bench.seconds / found[-1]["step"]
            steps += min(_MOST, max(_FEWEST, int(timed)))
            dist.broadcast(steps, 0)
    gc.enable()
    middle = {name: median(step[name] for step in found[_WARM_UP:]) for name in found[0]}
    return TrialTimes(trial, **middle, parameters=parameter_count(model))


def _drawn(device: torch.device, std: float, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Initial weights drawn on the device, which is faster than on the CPU."""
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, device=device)
    return torch.empty(shape, device=device).normal_(0.0, std)


def _by_kind(spans: Sequence[Span], step_s: float) -> dict[str, float]:
    def median_of(kind: str) -> float:
        times = [span.end_s - span.start_s for span in spans if span.kind == kind]
        return median(times) if times else 0.0

    in_spans_s = sum(span.end_s - span.start_s for span in spans)
    return {
        "forward": median_of(ActionKind.forward),
        "backward": median_of(ActionKind.backward),
        "optimizer": median_of("optimizer_step"),
        "rest": max(0.0, step_s - in_spans_s),
        "step": step_s,
    }


def pass_costs(
    trials: Sequence[TrialTimes], device: Device, width: int, launches: Sequence[TrialTimes] = ()
) -> dict[str, Any]:
    """Fits device attributes: costs of forward and backward passes, of the optimizer, and of a step.

    Args:
        trials: measured trials.
        device: device with measured GEMMs and attention, without other costs.
        width: bytes per element.
        launches: on a GPU, launch-bound trials, which give the launch time of a block; a busy GPU hides it.
    """
    costs: dict[str, Any] = {}
    for name, passes in _PASSES.items():
        rows, left = [], []
        for found in trials:
            trial = found.trial
            operators = RankOperators(trial.model, ParallelConfig(), trial.workload(width), device)
            block, head = operators.block(Recompute.none), operators.head()
            known = sum(
                count * getattr(layer, part).get(kind, 0.0)
                for part in passes
                for layer, count in ((block, trial.layers), (head, 1))
                for kind in ("matmul", "attention")
            )
            moved = (trial.layers * operators.elementwise_bytes) * _TRAFFIC[name]
            rows.append([0 if launches else trial.layers, moved, trial.tokens * trial.vocabulary, 1.0])
            left.append((getattr(found, name), known))
        measured, known_s = np.array(left).T
        each, byte, logit, once = non_negative(np.array(rows), measured - known_s, measured)
        if launches:
            times = np.array([getattr(found, name) for found in launches])
            each, _ = non_negative(np.array([[found.trial.layers, 1.0] for found in launches]), times, times)
        costs[f"{name}_costs"] = {
            "block_us": round(1e6 * each, 2),
            "pass_us": round(1e6 * once, 2),
            "gigabytes_per_s": round(1e-9 / max(byte, 1e-13), 3),
            "logit_ns": round(1e9 * logit, 7),
        }
    updated = [*trials, *launches]
    times = np.array([found.optimizer for found in updated])
    each, once = non_negative(np.array([[found.parameters, 1.0] for found in updated]), times, times)
    costs["update_ns"] = round(max(1e9 * each, 1e-6), 6)
    costs["step_us"] = round(1e6 * (once + median(found.rest for found in trials)), 2)
    return costs


def launches_again(plain: TrialTimes, recomputing: Mapping[Recompute, TrialTimes]) -> list[list[Any]]:
    """Attribute `layout_costs` of a GPU: extra host time per block with activation recomputation.

    Args:
        plain: launch-bound trial without recomputation.
        recomputing: the same trial with its blocks recomputed, by mode.
    """
    found: list[list[Any]] = []
    for mode, one in recomputing.items():
        again = one.backward - plain.backward - (plain.forward if mode is Recompute.full else 0.0)
        found.append([f"recompute_{mode}", round(1e6 * max(0.0, again) / plain.trial.layers, 2), 0.0])
    return found


def layout_costs(trials: Mapping[str, Sequence[TrialTimes]], device: Device, width: int) -> list[list[Any]]:
    """Attribute `layout_costs` of a device: layout name, microseconds per block and nanoseconds per element.

    The ratio of measured to planned time in the plain layout is not attributed to a layout: plans of the same trial in
    other layouts are scaled by it before their costs are fitted.

    Args:
        trials: measured trials by layout name, see `layouts`.
        device: device with all other attributes.
        width: bytes per element.
    """
    found: list[list[Any]] = []
    parallel = layouts(device.ranks_per_node)
    off = [
        one.step / _planned_s(one.trial, parallel[PLAIN], device, width, device.layout_costs) for one in trials[PLAIN]
    ]
    for name in (name for name in parallel if name != PLAIN):
        rows, left, measured = [], [], []
        known = tuple(LayoutCosts(*costs) for costs in found)  # those of pp also apply to split backward passes
        for one, ratio in zip(trials[name], off, strict=True):
            plan = partial(_planned_s, one.trial, parallel[name], device, width)
            free_s, planned_s = plan(()), plan(known)
            per_block_s = plan((*known, LayoutCosts(name, _UNIT_US, 0.0)))
            per_element_s = plan((*known, LayoutCosts(name, 0.0, _UNIT_NS)))
            # Increase of the step time per unit of each cost: its number of occurrences, minus what is overlapped.
            rows.append([per_block_s - planned_s, per_element_s - planned_s])
            left.append(one.step - ratio * free_s - (planned_s - free_s))
            measured.append(one.step)
        block, element = non_negative(np.array(rows), np.array(left), np.array(measured))
        found.append([name, round(_UNIT_US * block, 2), round(_UNIT_NS * element, 5)])
    return found


def _planned_s(
    trial: Trial, parallel: ParallelConfig, device: Device, width: int, costs: tuple[LayoutCosts, ...] = ()
) -> float:
    """Planned step time in seconds on a device with these layout costs."""
    measured = replace(device, layout_costs=costs)
    return StepModel(trial.model, parallel, trial.workload(width), measured).estimate().step_time_s
