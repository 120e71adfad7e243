"""The time of a step of any layout on any device, part by part; pure arithmetic, no torch.

Passes take what their operators take (`megads.plan.operators`), the pipeline what its schedule takes on the clock
(`run_clock`), and around it stand the reduction of gradients as far as the last backward pass does not hide it, the
optimizer's traffic, the gather of new weights, and what saves take of a step on average. Reading data costs nothing:
the loader is steps ahead.

FLOP convention: model FLOPs, 6 per matmul weight and token, the head's included, and causal attention counted in full,
12 * L * H * S a token; what is recomputed is not counted (`megads.plan.model_size`).

Not modelled: congestion of a network that others use, a host that cannot launch kernels as quickly as the device runs
them, validation, and the optimizers' own communication (Muon's).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log, sqrt

from megads.model.config import ModelConfig
from megads.parallel.config import GRADIENT_STAGES, ParallelConfig, Recompute
from megads.parallel.partition import block_modes, stage_bounds
from megads.parallel.pipeline_actions import ActionKind
from megads.parallel.schedule_simulation import ScheduleCosts, TimedAction, Timeline, run_clock
from megads.plan.collectives import (
    FLAT,
    CommunicationGroup,
    Network,
    all_gather,
    all_reduce,
    crosses_nodes,
    group_of,
    message,
    reduce_scatter,
)
from megads.plan.devices import Device
from megads.plan.model_size import model_flops_per_token
from megads.plan.operators import (
    FP32,
    MEGADS,
    Execution,
    LayerSeconds,
    Parts,
    RankOperators,
    add_up,
    total,
    waits_beside,
)

JITTER = 0.004
"""Standard deviation of a rank's time of a step, relative: a step ends with the slowest of n ranks, sqrt(2 ln n) of
these later on average. Calibrated (docs/planning.md)."""
PHASES = {
    "forward passes": "what the rank computes forward, and waits for inside of it (tp, cp)",
    "backward passes": "likewise backward, with what is recomputed",
    "waits of the pipeline": "bubble, messages, uneven stages",
    "gradient reduction": "what is left of it after the last backward pass",
    "optimizer step": "norm, update, and the gather of new weights",
    "everything else": "data, hooks, saves, the slowest rank",
}
"""Parts of a step that a timeline tells apart, of the rank that computes most."""
_STEADY_ROUNDS = 2
"""Micro-batches for every virtual stage, after which a step repeats itself."""
_SAVED_BYTES = 12
"""Of a parameter: the fp32 master and AdamW's two moments."""
_UPDATE_BYTES = 34
"""Traffic of AdamW for a parameter: gradient read for the norm; gradient, master and two moments read, the latter three
written; the new weight written in bf16."""


@dataclass(frozen=True)
class StepShape:
    """What a step computes.

    Attributes:
        seq_len: tokens a sample.
        micro_batch_size: samples of a pass.
        micro_batches: of one data-parallel rank.
        width: bytes of an element of weights and activations.
        save_every_steps: steps between asynchronous saves; None: none.
    """

    seq_len: int
    micro_batch_size: int
    micro_batches: int
    width: int = 2
    save_every_steps: int | None = None


@dataclass(frozen=True)
class StepEstimate:
    """A step's time.

    Attributes:
        parts: seconds of the busiest pipeline rank by what takes them; their sum is the step's time.
        tokens: of the step.
        flops_per_token: model FLOPs.
        ranks: devices.
        peak_tflops: of a device.
    """

    parts: dict[str, float]
    tokens: int
    flops_per_token: int
    ranks: int
    peak_tflops: float

    @property
    def step_time_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens / self.step_time_s / self.ranks

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOPs."""
        return self.tokens_per_s_per_device * self.flops_per_token / 1e12

    @property
    def mfu(self) -> float:
        """Share of the peak."""
        return self.tflops_per_device / self.peak_tflops


@dataclass(frozen=True)
class StageContent:
    """What a virtual stage holds.

    Attributes:
        blocks: what each of its blocks recomputes.
        embedding: whether it has the embedding.
        head: whether it has the head.
    """

    blocks: tuple[Recompute, ...]
    embedding: bool
    head: bool


def stage_contents(model: ModelConfig, parallel: ParallelConfig) -> list[StageContent]:
    """The virtual stages in order; neither recompute nor partition is auto any more.

    Raises:
        ConfigError: more stages than layers.
    """
    # The embedding, the blocks, the final norm, which weighs nothing, and the head: as megads.model.gpt.stage_specs.
    bounds = stage_bounds([1.0, *(1.0 for _ in range(model.num_layers)), 0.0, 1.0], parallel)
    last = model.num_layers + 2
    counts = [max(0, min(end, model.num_layers + 1) - max(start, 1)) for start, end in pairwise(bounds)]
    modes: dict[int, tuple[Recompute, ...]] = {}
    for rank in range(parallel.pp):
        stages = parallel.placement.stages_of(rank)
        of_rank = block_modes(parallel, rank, sum(counts[stage] for stage in stages))
        for stage in stages:
            modes[stage], of_rank = tuple(of_rank[: counts[stage]]), of_rank[counts[stage] :]
    return [StageContent(modes[stage], start == 0, end > last) for stage, (start, end) in enumerate(pairwise(bounds))]


class StepModel:
    """The step of a layout; costs of its layers are computed once."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        shape: StepShape,
        device: Device,
        network: Network = FLAT,
        execution: Execution = MEGADS,
    ) -> None:
        """Computes the passes of every virtual stage.

        Args:
            model: the model's shape.
            parallel: the layout, nothing in it auto.
            shape: of the step.
            device: of a rank.
            network: between nodes.
            execution: how the trainer runs it.

        Raises:
            ConfigError: there is no such layout.
        """
        self.model, self.parallel, self.shape, self.device = model, parallel, shape, device
        self.network, self.execution = network, execution
        tokens = shape.micro_batch_size * shape.seq_len // parallel.cp
        self.operators = RankOperators(model, parallel, tokens, shape.seq_len, shape.width, device, network, execution)
        self.contents = stage_contents(model, parallel)
        self._blocks: dict[Recompute, LayerSeconds] = {}
        self.stages = [self._stage(stage) for stage in range(len(self.contents))]

    def _block(self, mode: Recompute) -> LayerSeconds:
        if mode not in self._blocks:
            self._blocks[mode] = self.operators.block(mode)
        return self._blocks[mode]

    def _stage(self, stage: int) -> tuple[Parts, Parts, Parts]:
        """Seconds of a virtual stage's forward pass and of the two parts of its backward pass, by parts."""
        content = self.contents[stage]
        layers: list[tuple[LayerSeconds, int]] = [
            (self._block(mode), count) for mode, count in Counter(content.blocks).items()
        ]
        layers += [(self.operators.embedding(), 1)] if content.embedding else []
        layers += [(self.operators.head(), 1)] if content.head else []
        costs = (self.device.forward_costs, self.device.backward_costs)
        messages = self._message_costs(stage) / 2
        forward, backward = ({"host": messages + (0.0 if cost is None else cost.pass_us * 1e-6)} for cost in costs)
        return (
            add_up([(layer.forward, count) for layer, count in layers] + [(forward, 1)]),
            add_up([(layer.backward_input, count) for layer, count in layers] + [(backward, 1)]),
            add_up([(layer.backward_weight, count) for layer, count in layers]),
        )

    def _message_costs(self, stage: int) -> float:
        """Seconds that a stage takes beside its messages to other ranks, where that was measured; of both passes."""
        if self.parallel.pp == 1:
            return 0.0
        placement = self.parallel.placement
        held = len(placement.stages_of(placement.rank_of(stage)))
        return self.device.layout_seconds("pp", self.operators.tokens * self.model.hidden_size) / held

    def _message(self) -> tuple[float, float]:
        """Seconds that a pipeline message occupies its way, and its latency."""
        parallel, device = self.parallel, self.device
        size: float = self.operators.tokens * self.model.hidden_size * self.shape.width
        size /= parallel.tp if parallel.sequence_parallel or self.execution.scatter_messages else 1
        pipeline = group_of(parallel, ("pp",), device.ranks_per_node, self.network)
        return message(device, size, between_nodes=crosses_nodes(pipeline), width=self.shape.width)

    def costs(self) -> ScheduleCosts:
        """Of every virtual stage's passes and of a message, in seconds."""
        transfer, latency = self._message() if self.parallel.pp > 1 else (0.0, 0.0)
        waits = 0.0
        if not self.execution.overlap_messages:
            # A rank sends and receives between passes and waits for both.
            waits, transfer, latency = 2 * (transfer + latency), 0.0, 0.0
        return ScheduleCosts(
            [total(forward) + waits for forward, _, _ in self.stages],
            [total(of_input) + waits for _, of_input, _ in self.stages],
            [total(of_weight) for _, _, of_weight in self.stages],
            latency,
            transfer,
        )

    def parameters(self, stage: int) -> float:
        """Elements of the matrices of a virtual stage that a rank holds."""
        model, content = self.model, self.contents[stage]
        block = model.hidden_size * (model.qkv_width + model.attention_width + model.mlp_rows + model.ffn_width)
        vocabulary = model.vocabulary * model.hidden_size * (content.embedding + content.head)
        if content.embedding and content.head and model.tie_embeddings:
            vocabulary //= 2
        return (len(content.blocks) * block + vocabulary) / self.parallel.tp

    def _busy(self, rank: int) -> dict[str, float]:
        """Seconds of one micro-batch on all virtual stages of a pipeline rank, by parts."""
        stages = self.parallel.placement.stages_of(rank)
        return add_up((parts, 1) for stage in stages for parts in self.stages[stage])

    def _clock(self) -> tuple[Timeline, float]:
        """A step of as many micro-batches as it takes to repeat itself, and seconds of those that are left out."""
        pp, all_of_them = self.parallel.pp, self.shape.micro_batches
        steady = _STEADY_ROUNDS * self.parallel.num_stages + pp
        beyond = max(0, all_of_them - steady) // pp * pp
        timeline = run_clock(self.parallel.schedule_of(all_of_them - beyond), self.costs())
        if not beyond:
            return timeline, 0.0
        shorter = run_clock(self.parallel.schedule_of(all_of_them - beyond - pp), self.costs())
        return timeline, beyond / pp * (timeline.step_time - shorter.step_time)

    def estimate(self) -> StepEstimate:
        """The step."""
        parallel, shape = self.parallel, self.shape
        timeline, left_out = self._clock()
        busy = [self._busy(rank) for rank in range(parallel.pp)]
        slowest = max(range(parallel.pp), key=lambda rank: total(busy[rank]))
        parts = {name: shape.micro_batches * seconds for name, seconds in busy[slowest].items()}
        whole = timeline.step_time + left_out
        parts["pipeline"] = whole - sum(parts.values())
        parts["reduction"] = self._reduction(timeline)
        if parallel.zero_stage in GRADIENT_STAGES:
            parts["weights"] = self._sharded_waits(busy[slowest])
        heaviest = max(range(parallel.pp), key=self._held)
        share = self._held(heaviest) / (parallel.data_size if parallel.zero_stage else 1)
        update = _UPDATE_BYTES / self.device.memory_bytes_per_s
        if self.device.update_ns is not None:
            update = self.device.update_ns * 1e-9
        parts["optimizer"] = share * update
        parts["host"] = parts.get("host", 0.0) + self.device.step_us * 1e-6
        parts["new weights"] = self._new_weights(self._held(heaviest))
        if shape.save_every_steps:
            parts["saves"] = share * _SAVED_BYTES / (self.device.host_gigabytes_per_s * 1e9) / shape.save_every_steps
        parts["stragglers"] = sum(parts.values()) * JITTER * sqrt(2 * log(parallel.world_size))
        tokens = shape.seq_len * shape.micro_batch_size * shape.micro_batches * parallel.dp
        flops = model_flops_per_token(self.model, shape.seq_len)
        parts = {name: seconds for name, seconds in parts.items() if seconds > 1e-9}
        return StepEstimate(parts, tokens, flops, parallel.world_size, self.device.peak_tflops)

    def phases(self) -> dict[str, float]:
        """Seconds of the step as a timeline tells them apart (`PHASES`); their sum is the step's time.

        Under ZeRO-2 and ZeRO-3 gradients and weights travel inside of the passes.
        """
        parts, parallel = self.estimate().parts, self.parallel
        busiest = max(range(parallel.pp), key=lambda rank: total(self._busy(rank)))
        held = [self.stages[stage] for stage in parallel.placement.stages_of(busiest)]
        forward, of_input, of_weight = (sum(total(stage[part]) for stage in held) for part in range(3))
        reduction, weights = (parts.get(name, 0.0) for name in ("reduction", "weights"))
        inside = parallel.zero_stage in GRADIENT_STAGES
        return {
            "forward passes": self.shape.micro_batches * forward,
            "backward passes": self.shape.micro_batches * (of_input + of_weight) + inside * (reduction + weights),
            "waits of the pipeline": parts.get("pipeline", 0.0),
            "gradient reduction": 0.0 if inside else reduction,
            "optimizer step": parts.get("optimizer", 0.0) + parts.get("new weights", 0.0),
            "everything else": parts.get("saves", 0.0) + parts.get("stragglers", 0.0) + self.device.step_us * 1e-6,
        }

    def _held(self, rank: int) -> float:
        """Elements of a pipeline rank."""
        return sum(self.parameters(stage) for stage in self.parallel.placement.stages_of(rank))

    def _data(self) -> CommunicationGroup:
        return group_of(self.parallel, ("cp", "dp"), self.device.ranks_per_node, self.network)

    def _reduction(self, timeline: Timeline) -> float:
        """Seconds from the end of the last pass of all to the end of the last reduction."""
        parallel, device, group = self.parallel, self.device, self._data()
        if group.size == 1:
            return 0.0
        whole, latest, layers = timeline.step_time, 0.0, len(self.contents[0].blocks) + 1
        reduce = reduce_scatter if parallel.zero_stage else all_reduce
        for rank, row in enumerate(timeline.spans):
            elements = self._held(rank)
            seconds = reduce(device, group, elements * self.execution.gradient_bytes, self.execution.gradient_bytes)
            if parallel.zero_stage in GRADIENT_STAGES:
                # DeepSpeed's ZeRO reduces those of every micro-batch.
                backward = total(self.stages[0][1]) + total(self.stages[0][2])
                waits = (
                    waits_beside(device, seconds, backward) + seconds / layers
                    if self.execution.overlap_zero
                    else seconds
                )
                return (waits + self._sharding(elements)) * self.shape.micro_batches
            buckets = max(1, ceil(elements / parallel.bucket_elements))
            hidden = (
                (row[-1].end - _last_backward(row)) * (1 - 1 / buckets) if self.execution.overlap_reduction else 0.0
            )
            waits = waits_beside(device, seconds, hidden) if hidden else seconds
            latest = max(latest, row[-1].end + max(waits, seconds / buckets))
        tied = 0.0
        if self.model.tie_embeddings and parallel.pp > 1:
            rows = self.model.vocabulary * self.model.hidden_size / parallel.tp / group.size
            tied = sum(message(device, 2 * FP32 * rows, between_nodes=True))
        return max(0.0, latest - whole) + tied

    def _sharding(self, elements: float) -> float:
        """Seconds of a micro-batch that ZeRO-2 and ZeRO-3 take beside their messages, where that was measured."""
        layers = self.model.num_layers
        return layers * self.device.layout_seconds(f"zero_{self.parallel.zero_stage}", elements / layers)

    def _sharded_waits(self, busy: Parts) -> float:
        """Seconds that passes wait for weights under ZeRO-3, gathered one layer ahead, twice a micro-batch."""
        parallel = self.parallel
        if parallel.zero_stage != 3:
            return 0.0
        group = self._data()
        size = parallel.shard_size
        group = CommunicationGroup(size, min(group.per_node, size), group.slowdown)
        held = self._held(0)
        once = all_gather(self.device, group, held * self.shape.width, self.shape.width)
        layers = len(self.contents[0].blocks) + 1
        forward = total(self.stages[0][0])
        backward = total(busy) - forward
        waits = once / layers + sum(waits_beside(self.device, once, passed) for passed in (forward, backward))
        return self.shape.micro_batches * waits

    def _new_weights(self, elements: float) -> float:
        """Seconds to gather the new weights after the optimizer's step."""
        if self.parallel.zero_stage != 1 or self.execution.overlap_gather:
            return 0.0
        return all_gather(self.device, self._data(), elements * self.shape.width, self.shape.width)


def _last_backward(row: Sequence[TimedAction]) -> float:
    """When the last backward passes of a rank begin: the first of the last passes of its virtual stages."""
    begins = {
        span.action.stage: span.start
        for span in row
        if span.action.kind in (ActionKind.backward, ActionKind.backward_weight)
    }
    return min(begins.values())


def estimate_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    shape: StepShape,
    device: Device,
    network: Network = FLAT,
    execution: Execution = MEGADS,
) -> StepEstimate:
    """The time of a step; arguments as of `StepModel`."""
    return StepModel(model, parallel, shape, device, network, execution).estimate()
