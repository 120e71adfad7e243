"""Step time estimate of a layout on a device, by component; pure arithmetic, without torch.

The time of a pass is the sum of its operators (`operators`); the time of the pipeline comes from `simulate_schedule`.
Added to it are the exposed gradient reduction after the last backward pass, the optimizer's memory traffic,
the all-gather of updated weights, and the mean cost of checkpoints per step. Data loading is free: the dataloader
prefetches several steps.

FLOP convention: model FLOPs, 6 per matmul weight and token, the head's included, and causal attention counted in full,
12 * L * H * S per token; activation recomputation is not counted (`megads.model.model_size`).

Not modelled: network congestion caused by other jobs, validation, and communication of optimizers (Muon).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log, sqrt

from megads.api import (
    EMBEDDING,
    GRADIENT_STAGES,
    HEAD,
    ActionKind,
    ModelConfig,
    ParallelConfig,
    Recompute,
    padded_rows,
    simulate_schedule,
)
from megads.model.model_size import model_flops_per_token
from megads.parallel.schedule_simulation import ScheduleCosts, Timeline
from megads.tools.plan.collectives import (
    FLAT,
    CommunicationGroup,
    Network,
    all_gather,
    all_reduce,
    communication_group,
    expert_groups,
    overlapped_seconds,
    p2p,
    reduce_scatter,
)
from megads.tools.plan.devices import Device
from megads.tools.plan.execution import MEGADS, Execution
from megads.tools.plan.host_copies import BlockCopy, copies_of_stage, exposed
from megads.tools.plan.memory import one_pass
from megads.tools.plan.operators import (
    FP32,
    LayerSeconds,
    Parts,
    RankOperators,
    add_up,
    total,
)
from megads.tools.plan.workload import (
    StageLayers,
    Workload,
    block_indices,
    block_kinds,
    leaving_blocks,
    shortened,
    stage_layers,
    steady_period,
)

JITTER = 0.004
"""Relative standard deviation of a rank's step time. A step ends with the slowest of n ranks, on average sqrt(2 ln n)
standard deviations after the mean. Calibrated (docs/notes/step-time.md)."""
PHASES = {
    "forward passes": "forward compute and exposed tp and cp communication",
    "backward passes": "backward compute, recomputation, exposed tp and cp communication",
    "pipeline bubble and p2p": "bubble, p2p communication, uneven stages",
    "gradient reduction": "exposed part after the last backward pass",
    "optimizer step": "gradient norm, update, all-gather of weights",
    "other": "data, hooks, checkpoints, stragglers",
}
"""Phases of a step in a measured timeline, on the rank with the most compute."""
_STEADY_ROUNDS = 2
"""Micro-batches per virtual stage after which the schedule is in its steady state."""
_SAVED_BYTES = 12
"""Checkpoint bytes per parameter: the fp32 master weight and AdamW's two moments."""
_UPDATE_BYTES = 34
"""Memory traffic of AdamW per parameter: gradient read for the norm; gradient, master weight and two moments read, the
latter three written; the updated weight written in bf16."""


PUBLISHED_SPREAD = (0.93, 1.44)
"""10th and 90th percentile of measured over planned step times of published runs on GPUs that were in no constant's
choice, each source with the same weight: the blind and held_out rows of `tests.tools.plan.published_steps`."""
CALIBRATED_SPREAD = (0.88, 1.10)
"""Likewise on a calibrated machine: the judge rows of `scripts.bench.plan_measured`."""
EXPERTS_SPREAD = (0.68, 1.84)
"""Lowest and highest ratio of published steps of mixtures of experts: the experts rows, too few for percentiles."""


@dataclass(frozen=True)
class StepEstimate:
    """Estimated step time and throughput.

    Attributes:
        parts: seconds by component on the pipeline rank with the most compute; their sum is the step time.
        tokens: tokens per step.
        flops_per_token: model FLOPs per token.
        ranks: number of devices.
        peak_tflops: peak TFLOPs per device.
        spread: lowest and highest ratio of measured to planned time that is likely.
    """

    parts: dict[str, float]
    tokens: int
    flops_per_token: int
    ranks: int
    peak_tflops: float
    spread: tuple[float, float]

    @property
    def step_time_s(self) -> float:
        return sum(self.parts.values())

    @property
    def likely_range_s(self) -> tuple[float, float]:
        """Step times in seconds between which 80% of steps lay that were planned without having been fitted to; with
        experts, all of them."""
        low, high = self.spread
        return low * self.step_time_s, high * self.step_time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens / self.step_time_s / self.ranks

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOPs per second and device."""
        return self.tokens_per_s_per_device * self.flops_per_token / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: achieved model TFLOPs over the peak."""
        return self.tflops_per_device / self.peak_tflops


def block_parameters(model: ModelConfig) -> int:
    """Number of matrix elements of a block without experts, over all tensor-parallel ranks."""
    moe, mlp = model.moe, model.mlp_rows + model.ffn_width
    if moe.enabled:
        mlp = (2 + model.mlp.gated) * moe.shared_ffn_size + moe.num_experts
    return model.hidden_size * (model.qkv_width + model.attention_width + mlp)


def expert_parameters(model: ModelConfig) -> int:
    """Number of matrix elements of all experts of a block."""
    return model.moe.num_experts * (2 + model.mlp.gated) * model.expert_width * model.hidden_size


BlockKind = tuple[int, Recompute, bool]


@dataclass(frozen=True)
class StepModel:
    """Step time model of a layout; pass times of its virtual stages are computed once.

    Raises ConfigError on first use if the layout is invalid.

    Attributes:
        model: model config.
        parallel: the layout; no setting may be auto.
        workload: the training step.
        device: device of each rank.
        network: network between nodes.
        execution: execution strategy of the trainer.
    """

    model: ModelConfig
    parallel: ParallelConfig
    workload: Workload
    device: Device
    network: Network = FLAT
    execution: Execution = MEGADS

    @cached_property
    def operators(self) -> RankOperators:
        chunked = one_pass(self.model, self.parallel, self.workload).mlp_parts > 1
        return RankOperators(
            *(self.model, self.parallel, self.workload, self.device, self.network, self.execution), chunked_mlp=chunked
        )

    @cached_property
    def layers(self) -> list[StageLayers]:
        """Layers of every virtual stage."""
        return stage_layers(self.model, self.parallel)

    @cached_property
    def stages(self) -> list[tuple[Parts, Parts, Parts]]:
        """Seconds by component of every virtual stage's forward pass and of the two parts of its backward pass."""
        return [self._stage(stage, self._block_seconds) for stage in range(len(self.layers))]

    @cached_property
    def _block_seconds(self) -> dict[BlockKind, LayerSeconds]:
        """Time of a block by its kind."""
        kinds = {found for layers in self.layers for found in self._blocks(layers)}
        return {
            (kind, mode, fp8): replace(self.operators, model=self.model.of_kind(kind), fp8=fp8).block(mode)
            for kind, mode, fp8 in kinds
        }

    def _copies(self, stage: int, blocks: Mapping[BlockKind, LayerSeconds]) -> list[BlockCopy]:
        """Copies of the offloaded blocks of a stage, given the seconds of a block by its kind."""
        placement, layers = self.parallel.placement, self.layers
        rank = placement.rank_of(stage)
        held = [name for other in placement.stages_of(rank) for name in layers[other]]
        leaving = leaving_blocks(self.model, self.parallel, held)
        if not leaving:
            return []
        sizes = one_pass(self.model, self.parallel, self.workload)
        seconds = [blocks[kind] for kind in self._blocks(layers[stage])]
        return copies_of_stage(sizes, layers[stage], leaving, self.device, seconds)

    def copies(self) -> list[BlockCopy]:
        """Copies of the offloaded blocks of the rank that moves most, for a micro-batch."""
        ranks = (self.parallel.placement.stages_of(rank) for rank in range(self.parallel.pp))
        by_rank = [[copy for stage in stages for copy in self._copies(stage, self._block_seconds)] for stages in ranks]
        return max(by_rank, key=lambda copies: sum(copy.size for copy in copies))

    def _blocks(self, layers: StageLayers) -> list[BlockKind]:
        """Kind, recomputation mode, and whether it multiplies in FP8, of each block of a stage."""
        in_fp8 = self.workload.float8.blocks(self.model.num_layers)
        kinds = zip(block_kinds(self.model, layers), block_indices(layers), strict=True)
        return [(*kind, index in in_fp8) for kind, index in kinds]

    def _stage(self, stage: int, blocks: Mapping[BlockKind, LayerSeconds]) -> tuple[Parts, Parts, Parts]:
        """One of `stages`, given the seconds of a block by its kind."""
        counts = Counter(self._blocks(self.layers[stage]))
        layers = [(blocks[found], count) for found, count in counts.items()]
        layers += [(self.operators.embedding(), 1)] if EMBEDDING in self.layers[stage] else []
        layers += [(self.operators.head(), 1)] if HEAD in self.layers[stage] else []
        p2p_costs = 0.0
        if self.parallel.pp > 1:  # measured overhead per rank, which its stages share, in both passes
            placement = self.parallel.placement
            held = len(placement.stages_of(placement.rank_of(stage)))
            p2p_costs = self.device.layout_seconds("pp", self.operators.tokens * self.model.hidden_size) / held / 2
        waits, waits_back = exposed(self._copies(stage, blocks))
        costs = (self.device.forward_costs, self.device.backward_costs)
        forward, backward = ({"host": p2p_costs + (0.0 if cost is None else cost.pass_us * 1e-6)} for cost in costs)
        return (
            add_up([(layer.forward, count) for layer, count in layers] + [(forward, 1), (waits, 1)]),
            add_up([(layer.backward_input, count) for layer, count in layers] + [(backward, 1), (waits_back, 1)]),
            add_up([(layer.backward_weight, count) for layer, count in layers]),
        )

    def costs(self) -> ScheduleCosts:
        """Costs of every virtual stage's passes and of a p2p transfer, in seconds."""
        waits = transfer = latency = 0.0
        if self.parallel.pp > 1:
            size = float(self.operators.tokens * self.model.hidden_size * self.workload.weight_bytes)
            size /= self.parallel.tp if self.parallel.sequence_parallel or self.execution.scatter_gather_p2p else 1
            transfer, latency = self._p2p(size, self.workload.weight_bytes)
        if not self.execution.overlap_p2p:
            # Without overlap, a rank waits for one send and one receive per pass.
            waits, transfer, latency = 2 * (transfer + latency), 0.0, 0.0
        return ScheduleCosts(
            [total(forward) + waits for forward, _, _ in self.stages],
            [total(of_input) + waits for _, of_input, _ in self.stages],
            [total(of_weight) for _, _, of_weight in self.stages],
            latency,
            transfer,
        )

    def parameters(self, stage: int) -> float:
        """Number of matrix elements of a virtual stage per rank, without experts."""
        layers = self.layers[stage]
        vocabulary = self._vocabulary_rows * self.model.hidden_size * ((EMBEDDING in layers) + (HEAD in layers))
        if EMBEDDING in layers and HEAD in layers and self.model.tie_embeddings:
            vocabulary //= 2
        return sum(map(block_parameters, self._kinds(stage))) / self.parallel.tp + vocabulary

    def _kinds(self, stage: int) -> list[ModelConfig]:
        """Config of each block of a virtual stage."""
        return [self.model.of_kind(kind) for kind, _ in block_kinds(self.model, self.layers[stage])]

    def _rank_experts(self, rank: int) -> float:
        """Number of matrix elements of experts on a pipeline rank."""
        stages = self.parallel.placement.stages_of(rank)
        experts = sum(expert_parameters(kind) for stage in stages for kind in self._kinds(stage))
        return experts / self.parallel.expert_shards

    def _updated(self, rank: int) -> float:
        """Number of matrix elements that one rank of a pipeline stage updates."""
        own, experts = self._rank_elements(rank), self._rank_experts(rank)
        if not self.parallel.zero_stage:
            return own + experts
        return own / self.parallel.data_size + experts / self.parallel.expert_data_size

    def _p2p(self, size: float, width: int) -> tuple[float, float]:
        """Transfer time and latency of a p2p transfer of `size` bytes between pipeline ranks, in seconds."""
        pipeline = self._group("pp")
        return p2p(self.device, size, between_nodes=pipeline.nodes > 1, width=width)

    def _group(self, *axes: str) -> CommunicationGroup:
        return communication_group(self.parallel, axes, self.device.ranks_per_node, self.network)

    @property
    def _vocabulary_rows(self) -> int:
        """Rows of the vocabulary on each tensor-parallel rank, including padding."""
        multiple = self.parallel.rows_multiple(cuda=not self.device.on_cpu)
        return padded_rows(self.model.vocabulary, self.parallel.tp, multiple)

    def _busy(self, rank: int) -> dict[str, float]:
        """Seconds by component of one micro-batch on all virtual stages of a pipeline rank."""
        stages = self.parallel.placement.stages_of(rank)
        return add_up((parts, 1) for stage in stages for parts in self.stages[stage])

    def _simulate(self) -> tuple[Timeline, float]:
        """Simulated step with enough micro-batches to reach the steady state, and seconds of the omitted ones."""
        all_of_them, period = self.workload.micro_batches, steady_period(self.parallel)
        # One period more than what is filled, so that there is one to measure.
        some = min(all_of_them, period + shortened(self.parallel, all_of_them, _STEADY_ROUNDS))
        timeline = simulate_schedule(self.parallel.schedule_of(some), self.costs())
        if some == all_of_them:
            return timeline, 0.0
        shorter = simulate_schedule(self.parallel.schedule_of(some - period), self.costs())
        return timeline, (all_of_them - some) / period * (timeline.step_time - shorter.step_time)

    def estimate(self) -> StepEstimate:
        """Estimates the step time."""
        parallel, workload = self.parallel, self.workload
        timeline, left_out = self._simulate()
        busy = [self._busy(rank) for rank in range(parallel.pp)]
        slowest = max(range(parallel.pp), key=lambda rank: total(busy[rank]))
        parts = {name: workload.micro_batches * seconds for name, seconds in busy[slowest].items()}
        whole = timeline.step_time + left_out
        parts["pipeline"] = whole - sum(parts.values())
        parts["grad_reduce"] = self._reduction(timeline)
        if parallel.zero_stage in GRADIENT_STAGES:
            parts["zero3_gather"] = self._zero3_waits(busy[slowest])
        heaviest = max(range(parallel.pp), key=lambda rank: self._rank_elements(rank) + self._rank_experts(rank))
        share = self._updated(heaviest)
        update = _UPDATE_BYTES / self.device.memory_bytes_per_s
        if self.device.update_ns is not None:
            update = self.device.update_ns * 1e-9
        parts["optimizer"] = share * update
        parts["host"] = parts.get("host", 0.0) + self.device.step_us * 1e-6
        if parallel.zero_stage == 1 and not self.execution.overlap_param_gather:
            parts["param_gather"] = self._param_gather(heaviest)
        if workload.save_every_steps:
            copy_s = share * _SAVED_BYTES / (self.device.host_gigabytes_per_s * 1e9)
            parts["checkpoint"] = copy_s / workload.save_every_steps
        parts["stragglers"] = sum(parts.values()) * JITTER * sqrt(2 * log(parallel.world_size))
        tokens = workload.seq_len * workload.micro_batch_size * workload.micro_batches * parallel.dp
        flops = model_flops_per_token(self.model, workload.seq_len)
        parts = {name: seconds for name, seconds in parts.items() if seconds > 1e-9}
        return StepEstimate(parts, tokens, flops, parallel.world_size, self.device.peak_tflops, self._spread)

    @property
    def _spread(self) -> tuple[float, float]:
        if self.model.moe.enabled:
            return EXPERTS_SPREAD
        return CALIBRATED_SPREAD if self.device.on_cpu or self.device.collectives else PUBLISHED_SPREAD

    def phases(self) -> dict[str, float]:
        """Seconds by phase of a timeline (`PHASES`); their sum is the step time.

        Under ZeRO-2 and ZeRO-3 the communication of gradients and weights is part of the passes.
        """
        parts, parallel = self.estimate().parts, self.parallel
        busiest = max(range(parallel.pp), key=lambda rank: total(self._busy(rank)))
        held = [self.stages[stage] for stage in parallel.placement.stages_of(busiest)]
        forward, of_input, of_weight = (sum(total(stage[part]) for stage in held) for part in range(3))
        reduction, weights = (parts.get(name, 0.0) for name in ("grad_reduce", "zero3_gather"))
        inside = parallel.zero_stage in GRADIENT_STAGES
        return {
            "forward passes": self.workload.micro_batches * forward,
            "backward passes": self.workload.micro_batches * (of_input + of_weight) + inside * (reduction + weights),
            "pipeline bubble and p2p": parts.get("pipeline", 0.0),
            "gradient reduction": 0.0 if inside else reduction,
            "optimizer step": parts.get("optimizer", 0.0) + parts.get("param_gather", 0.0),
            "other": parts.get("checkpoint", 0.0) + parts.get("stragglers", 0.0) + self.device.step_us * 1e-6,
        }

    def _rank_elements(self, rank: int) -> float:
        """Number of matrix elements on a pipeline rank."""
        return sum(self.parameters(stage) for stage in self.parallel.placement.stages_of(rank))

    @cached_property
    def _expert_group(self) -> CommunicationGroup:
        """The ranks that hold the same experts."""
        return expert_groups(self.parallel, self.device.ranks_per_node, self.network)[1]

    def _shard_group(self) -> CommunicationGroup:
        """The ranks over which ZeRO shards."""
        group, size = self._group("cp", "dp"), self.parallel.shard_size
        return CommunicationGroup(size, min(group.per_node, size), group.slowdown)

    def _param_gather(self, rank: int) -> float:
        """Exposed seconds of ZeRO-1's all-gather of the updated weights of a pipeline rank."""
        width, whole, buckets = self.workload.weight_bytes, 0.0, 0
        for elements, group in (
            (self._rank_elements(rank), self._shard_group()),
            (self._rank_experts(rank), self._expert_group),
        ):
            count = self._buckets(elements)
            whole += count * all_gather(self.device, group, elements * width / count, width)
            buckets += count if elements else 0
        if not self.parallel.overlap_param_gather:
            return whole
        # The first layer waits for its weights. Those of each other layer arrive while the layer before it computes
        # with the first micro-batch; but with one hardware queue only the last bucket of a layer does, as kernels that
        # are launched after the all-gathers do not start before it.
        layers = max(1.0, self.model.num_layers / self.parallel.pp)
        hidden = whole * (1 - 1 / max(1.0, min(layers, buckets))) / max(1.0, buckets / layers)
        forward = sum(total(self.stages[stage][0]) for stage in self.parallel.placement.stages_of(rank))
        return whole - hidden + overlapped_seconds(self.device, hidden, forward)

    def _reduction(self, timeline: Timeline) -> float:
        """Seconds from the end of the last pass on any rank to the end of the last gradient reduction."""
        group = self._group("cp", "dp")
        if group.size == self._expert_group.size == 1:
            return self._tied_reduction(group)
        if self.parallel.zero_stage in GRADIENT_STAGES:
            return self._zero_reduction(group)
        latest = 0.0
        for rank, row in enumerate(timeline.spans):
            elements, experts = self._rank_elements(rank), self._rank_experts(rank)
            seconds = self._reduction_seconds(elements, group)
            seconds += self._reduction_seconds(experts, self._expert_group) if experts else 0.0
            buckets = self._buckets(elements) + (self._buckets(experts) if experts else 0)
            hidden = 0.0
            if self.execution.overlap_grad_reduce:
                # From the start of the last backward passes: the earliest among the final passes of the rank's stages.
                backwards = (ActionKind.backward, ActionKind.backward_weight)
                begins = {span.action.stage: span.start for span in row if span.action.kind in backwards}
                hidden = (row[-1].end - min(begins.values())) * (1 - 1 / buckets)
            waits = overlapped_seconds(self.device, seconds, hidden) if hidden else seconds
            latest = max(latest, row[-1].end + max(waits, seconds / buckets))
        return max(0.0, latest - timeline.step_time) + self._tied_reduction(group)

    def _reduction_seconds(self, elements: float, group: CommunicationGroup) -> float:
        # Shards of fewer ranks have replicas, whose gradients are also summed.
        shards_all = self.parallel.zero_stage and self.parallel.shard_size == self.parallel.data_size
        reduce = reduce_scatter if shards_all else all_reduce
        width, buckets = self.execution.gradient_bytes, self._buckets(elements)
        return buckets * reduce(self.device, group, elements * width / buckets, width)

    def _buckets(self, elements: float) -> int:
        """Number of collectives for the gradients or weights of a rank, each of which has its own latency."""
        return max(1, ceil(elements / self.parallel.bucket_elements))

    def _zero_reduction(self, group: CommunicationGroup) -> float:
        """Exposed seconds of the reductions of ZeRO-2 and ZeRO-3, which DeepSpeed starts after every micro-batch.

        These stages have no pipeline, so all ranks have the same elements.
        """
        elements, layers = self._rank_elements(0), self.model.num_layers
        waits = self._reduction_seconds(elements, group)
        if self.execution.overlap_zero:
            backward = total(self.stages[0][1]) + total(self.stages[0][2])
            waits = overlapped_seconds(self.device, waits, backward) + waits / (layers + 1)
        # Measured overhead, communication excluded.
        overhead = layers * self.device.layout_seconds(f"zero_{self.parallel.zero_stage}", elements / layers)
        return (waits + overhead) * self.workload.micro_batches

    def _tied_reduction(self, data_group: CommunicationGroup) -> float:
        """Seconds of the all-reduce of a tied embedding's gradient between the first and the last pipeline stage."""
        if not self.model.tie_embeddings or len(set(self.parallel.placement.ends)) == 1:
            return 0.0
        elements = self._vocabulary_rows * self.model.hidden_size / data_group.size
        return sum(self._p2p(2 * FP32 * elements, FP32))

    def _zero3_waits(self, busy: Parts) -> float:
        """Exposed seconds of ZeRO-3's weight all-gathers, prefetched by one layer, twice per micro-batch."""
        if self.parallel.zero_stage != 3:
            return 0.0
        width = self.workload.weight_bytes
        once = all_gather(self.device, self._shard_group(), self._rank_elements(0) * width, width)
        forward = total(self.stages[0][0])
        passes = (forward, total(busy) - forward)
        waits = once / (self.model.num_layers + 1)
        waits += sum(overlapped_seconds(self.device, once, passed) for passed in passes)
        return self.workload.micro_batches * waits
