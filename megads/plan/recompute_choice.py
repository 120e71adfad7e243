"""recompute=auto: as few recomputed blocks as fit the memory. Pure arithmetic on the memory plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig, Recompute
from megads.plan.memory import Workload, memory_plan


def with_blocks(parallel: ParallelConfig, blocks: Sequence[int]) -> ParallelConfig:
    """The layout with numbers of recomputed blocks in place of auto; none where they are all 0."""
    chosen = list(blocks) if any(blocks) else None
    return replace(parallel, recompute=Recompute.full if chosen else Recompute.none, recompute_blocks=chosen)


def peaks_by_blocks(model: ModelConfig, parallel: ParallelConfig, workload: Workload) -> list[list[int]]:
    """[stage][blocks]: bytes of a rank of each stage at its fullest, by how many of its blocks are recomputed.

    On a GPU with what CUDA and communicators take of it.
    """
    stages = memory_plan(model, with_blocks(parallel, [0]), workload).stages
    counts = [len(stage.recomputation) for stage in stages]
    plans = [
        memory_plan(model, with_blocks(parallel, [min(blocks, count) for count in counts]), workload)
        for blocks in range(max(counts) + 1)
    ]
    return [
        [plans[blocks].stages[stage].device_peak for blocks in range(count + 1)] for stage, count in enumerate(counts)
    ]


def fewest_for_each(peaks: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Fewest recomputed blocks of each stage with which its ranks fit a device each.

    The first stages of 1F1B hold the most micro-batches and get the most.

    Args:
        peaks: [stage][blocks] bytes of a rank.
        limit: bytes of a device.

    Returns:
        A number for each stage; where none fits, the one that needs least.
    """
    return [next((blocks for blocks, peak in enumerate(row) if peak <= limit), row.index(min(row))) for row in peaks]


def fewest_together(peaks: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Few recomputed blocks with which one rank of every stage fit into a memory that they share.

    One block after the other is taken from the stage where it saves the most: where most micro-batches wait.

    Args:
        peaks: [stage][blocks] bytes of a rank.
        limit: bytes of the shared memory.

    Returns:
        A number for each stage; where nothing fits, those beyond which no block saves any more.
    """
    blocks = [0] * len(peaks)
    while sum(row[count] for row, count in zip(peaks, blocks, strict=True)) > limit:
        savings = [
            row[count] - row[count + 1] if count + 1 < len(row) else 0 for row, count in zip(peaks, blocks, strict=True)
        ]
        best = savings.index(max(savings))
        if savings[best] <= 0:
            break
        blocks[best] += 1
    return blocks
