"""A pipeline's step on the clock, with the costs that a model and a layout are estimated to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megads.model.config import ModelConfig
from megads.model.gpt import HEAD, is_block, stage_specs
from megads.parallel.config import ParallelConfig, Partition, Recompute
from megads.parallel.partition import stage_bounds
from megads.parallel.pipeline_actions import Schedule
from megads.parallel.recompute import block_modes
from megads.parallel.schedule_simulation import ScheduleCosts, Timeline, bubble_share, peak_waiting, run_clock
from megads.plan.flops import LayerFlops, block_flops, head_flops, recompute_flops
from megads.plan.memory import Workload, one_pass


@dataclass(frozen=True)
class Speed:
    """Of a rank and of what connects it.

    Attributes:
        tflops: TFLOPs that a rank achieves.
        gigabytes_per_s: of one direction between two ranks; None for infinitely many.
        latency_us: of a message.
    """

    tflops: float
    gigabytes_per_s: float | None = None
    latency_us: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """What a schedule promises for a step.

    Attributes:
        schedule: of the step.
        unit_bubble_share: share of all ranks' time in which they wait, where a forward pass and each part of a backward
            pass of a virtual stage take 1 and messages nothing.
        timeline: with the estimated costs, in seconds.
        waiting: most passes between forward and the end of backward, of each rank.
    """

    schedule: Schedule
    unit_bubble_share: float
    timeline: Timeline
    waiting: tuple[int, ...]

    @property
    def bubble_share(self) -> float:
        """With the estimated costs; what stages are slower than others counts too."""
        return self.timeline.bubble_share

    @property
    def over_ideal(self) -> float:
        """Time of the step over that of ranks that share the same work evenly and never wait."""
        return 1 / (1 - self.bubble_share)


def outlook(model: ModelConfig, parallel: ParallelConfig, workload: Workload, speed: Speed) -> Outlook:
    """Runs the layout's schedule on the clock; neither parallel.recompute nor parallel.partition is auto any more."""
    schedule = parallel.schedule_of(workload.micro_batches)
    timeline = run_clock(schedule, estimated_costs(model, parallel, workload, speed))
    return Outlook(schedule, bubble_share(schedule), timeline, tuple(peak_waiting(schedule)))


def estimated_costs(model: ModelConfig, parallel: ParallelConfig, workload: Workload, speed: Speed) -> ScheduleCosts:
    """Seconds of each virtual stage's passes on a rank by their FLOPs, and of a message by its bytes.

    Norms, activations, the embedding and the messages inside of tensor and context parallelism are left out.
    """
    names = [spec.name for spec in stage_specs(model, seed=0)]
    bounds = stage_bounds([spec.weight for spec in stage_specs(model, seed=0)], parallel)
    layers = [names[start:end] for start, end in pairwise(bounds)]
    modes = _modes(layers, parallel)
    block, head, again = (
        block_flops(model, workload.seq_len),
        head_flops(model),
        recompute_flops(model, workload.seq_len),
    )
    if one_pass(model, parallel, workload).in_chunks:
        head = LayerFlops(head.total, 0, 0)
    tokens = workload.micro_batch_size * workload.seq_len / parallel.cp
    scale = tokens / parallel.tp / (speed.tflops * 1e12)
    forward, backward_input, backward_weight = [], [], []
    for stage in layers:
        blocks = [modes[name] for name in stage if is_block(name)]
        heads = int(HEAD in stage)
        forward.append(scale * (len(blocks) * block.forward + heads * head.forward))
        recomputed = sum(again[mode] for mode in blocks)
        backward_input.append(scale * (len(blocks) * block.backward_input + recomputed + heads * head.backward_input))
        backward_weight.append(scale * (len(blocks) * block.backward_weight + heads * head.backward_weight))
    shards = parallel.tp if parallel.sequence_parallel else 1
    size = tokens * model.hidden_size * workload.weight_bytes / shards
    transfer = size / (speed.gigabytes_per_s * 1e9) if speed.gigabytes_per_s else 0.0
    return ScheduleCosts(forward, backward_input, backward_weight, speed.latency_us * 1e-6, transfer)


def _modes(layers: Sequence[Sequence[str]], parallel: ParallelConfig) -> dict[str, Recompute]:
    """What each block recomputes, by name."""
    found: dict[str, Recompute] = {}
    for rank in range(parallel.pp):
        stages = parallel.placement.stages_of(rank)
        blocks = [name for stage in stages for name in layers[stage] if is_block(name)]
        found |= zip(blocks, block_modes(parallel, rank, len(blocks)), strict=True)
    return found


def with_estimated_partition(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> ParallelConfig:
    """Replaces parallel.partition=auto by the layers' costs in FLOPs; the layout as it is where it is not auto.

    Blocks that are all recomputed count what they do again; single ones that are count as the others.

    Args:
        model: the model's shape.
        parallel: the layout; `recompute` may still be auto.
        seq_len: tokens a sample.
    """
    if parallel.partition is not Partition.auto:
        return parallel
    everywhere = parallel.recompute_interval == 1 and parallel.recompute_blocks is None
    mode = parallel.recompute if everywhere and parallel.recompute is not Recompute.auto else Recompute.none
    block = block_flops(model, seq_len).total + recompute_flops(model, seq_len)[mode]
    costs = [0.0, 1.0, round(head_flops(model).total / block, 4)]
    return replace(parallel, partition=Partition.weighted, layer_costs=costs)
