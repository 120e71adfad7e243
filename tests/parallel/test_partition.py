"""Stage bounds against published values and exhaustive search."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Partition
from megads.parallel.partition import partition, stage_bounds
from megads.parallel.schedule import ScheduleName


def loads(weights: list[float], bounds: list[int]) -> list[float]:
    return [sum(weights[low:high]) for low, high in pairwise(bounds)]


def best_by_search(weights: list[float], num_stages: int) -> list[int]:
    """Tries every cut in front of a weighted layer's run of zeros."""
    weighted = [i for i, weight in enumerate(weights) if weight > 0]
    starts = [previous + 1 for previous in weighted[:-1]]
    choices = ([0, *cuts, len(weights)] for cuts in combinations(starts, num_stages - 1))

    def rank(bounds: list[int]) -> tuple[float, float, list[float]]:
        stage_loads = loads(weights, bounds)
        return max(stage_loads), sum(load**2 for load in stage_loads), stage_loads

    return min(choices, key=rank)


def test_blooms_bounds_are_the_published_ones() -> None:
    """Catches bounds that differ from BLOOM's published ones (zero-weight layers on the wrong side of a cut)."""
    weights = [0, 1, 0, *[1] * 70, 0, 0, 1, 0]
    assert partition(weights, 12) == [0, 8, 14, 20, 26, 32, 38, 44, 50, 56, 62, 68, 77]


def test_the_final_norm_stays_with_its_head() -> None:
    """Catches a final norm separated from its head (a last stage with only the tied head crashes)."""
    assert partition([1, *[1] * 70, 0, 1], 12) == [*range(0, 67, 6), 73]


def test_partition_equals_exhaustive_search() -> None:
    """Catches a wrong optimum or tie break, zero-weight layers and fractional weights included."""
    draw = random.Random(1)
    for _ in range(400):
        weights = [draw.choice([0, 0.0, 1, 1, 2, 2.5, 7]) for _ in range(draw.randint(1, 11))]
        weighted = sum(weight > 0 for weight in weights)
        if weighted:
            num_stages = draw.randint(1, weighted)
            assert partition(weights, num_stages) == best_by_search(weights, num_stages), (weights, num_stages)


def test_ties_are_broken_despite_rounding() -> None:
    """Catches sums of tenths that differ by rounding and so break a tie at random."""
    assert partition([0.1] * 9, 4) == [0, 2, 4, 6, 9]


def test_earlier_stages_are_lighter() -> None:
    """Catches the extra layer on an early stage, which already holds the most activations."""
    assert partition([1] * 7, 3) == [0, 2, 4, 7]


def test_large_partitions_are_found_in_time() -> None:
    """Catches a cubic search: a thousand layers over 128 stages are planned at every start."""
    draw = random.Random(2)
    for weights in ([draw.random() for _ in range(1000)], [1000.0, *[1.0] * 999], [1.0] * 1000):
        start = time.process_time()
        bounds = partition(weights, 128)
        assert time.process_time() - start < 10
        assert len(bounds) == 129 and min(loads(weights, bounds)) > 0


def test_more_stages_than_layers_are_refused() -> None:
    """Catches a stage without a weighted layer."""
    with pytest.raises(ConfigError, match=r"parallel\.pp = 3 .* only 2 layers"):
        partition([0, 1, 0, 1, 0], 3)


def layer_weights(blocks: int) -> list[float]:
    """Embedding, blocks, final norm, head."""
    return [1.0] * (blocks + 1) + [0.0, 1.0]


def counts_of(blocks: int, parallel: ParallelConfig) -> list[int]:
    """Blocks of each virtual stage."""
    bounds = stage_bounds(layer_weights(blocks), parallel)
    assert bounds[0] == 0 and bounds[-1] == blocks + 3
    return [sum(1 <= layer <= blocks for layer in range(low, high)) for low, high in pairwise(bounds)]


def test_one_stage_per_rank_is_partitioned_as_before() -> None:
    """Catches a default that differs from `partition`, and layer costs that are ignored."""
    for blocks, pp in ((6, 4), (12, 4), (70, 12), (5, 5)):
        assert stage_bounds(layer_weights(blocks), ParallelConfig(pp=pp)) == partition(layer_weights(blocks), pp)
    heavy_head = ParallelConfig(pp=4, layer_costs=[0.0, 1.0, 3.0])
    assert counts_of(13, heavy_head) == [4, 4, 4, 1]
    assert counts_of(13, ParallelConfig(pp=4, partition=Partition.uniform)) == [3, 3, 3, 4]


def heaviest_rank(counts: Sequence[int], parallel: ParallelConfig, embedding: float, head: float) -> float:
    loads = [embedding + counts[0], *counts[1:-1], counts[-1] + head]
    return max(
        sum(loads[stage] for stage in parallel.placement.stages_of(rank))
        for rank in range(parallel.placement.num_ranks)
    )


@pytest.mark.parametrize("name", ["interleaved", "zb_v"])
@pytest.mark.parametrize("costs", [(1.0, 1.0), (0.0, 0.6), (0.0, 2.5)])
def test_virtual_stages_are_balanced_per_rank(name: str, costs: tuple[float, float]) -> None:
    """Catches a rank that gets the larger share in each of its stages; against every possible partition."""
    embedding, head = costs
    for blocks in (5, 6, 8, 9):
        parallel = ParallelConfig(
            pp=2, schedule=ScheduleName[name], virtual_stages=2, layer_costs=[embedding, 1.0, head]
        )
        found = counts_of(blocks, parallel)
        everything = (
            counts
            for counts in product(range(blocks + 1), repeat=4)
            if sum(counts) == blocks and min(counts[1:3]) and counts[0] + embedding >= 1 and counts[3] + head >= 1
        )
        best = min(heaviest_rank(counts, parallel, embedding, head) for counts in everything)
        assert heaviest_rank(found, parallel, embedding, head) == pytest.approx(best)


@pytest.mark.parametrize("name", ["interleaved", "zb_v"])
def test_virtual_stages_of_blocks_that_differ(name: str) -> None:
    """Catches costs of blocks that are ignored where a rank holds several stages; within 10% of the best partition."""
    of_blocks = [1.0, 3.0, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0, 1.0]
    parallel = ParallelConfig(pp=2, schedule=ScheduleName[name], virtual_stages=2, layer_costs=[0.0, *of_blocks, 2.0])

    def busiest(counts: Sequence[int]) -> float:
        ends = [sum(counts[: stage + 1]) for stage in range(4)]
        load = [sum(of_blocks[end - n : end]) for n, end in zip(counts, ends, strict=True)]
        load[-1] += 2.0
        return max(sum(load[stage] for stage in parallel.placement.stages_of(rank)) for rank in range(2))

    every = [counts for counts in product(range(1, 10), repeat=4) if sum(counts) == len(of_blocks)]
    found = counts_of(len(of_blocks), parallel)
    assert busiest(found) <= 1.1 * min(map(busiest, every)) < busiest(counts_of(9, replace(parallel, layer_costs=None)))


def test_costs_of_every_layer() -> None:
    """Catches costs of blocks in another order, and a list for another model."""
    costs = ParallelConfig(pp=2, layer_costs=[0.0, 1.0, 1.0, 1.0, 3.0, 0.0])
    assert counts_of(4, costs) == [3, 1]
    assert counts_of(4, ParallelConfig(pp=2, layer_costs=[0.0, 3.0, 1.0, 1.0, 1.0, 0.0])) == [1, 3]
    with pytest.raises(ConfigError, match=r"layer_costs has 6 numbers: want 3, or one for each of 7 layers"):
        counts_of(5, costs)


def test_given_sizes_of_first_and_last_stages_are_followed() -> None:
    """Catches numbers of blocks that are ignored, and a stage of only the embedding that gets a block."""
    own = ParallelConfig(pp=4, first_stage_blocks=0, last_stage_blocks=0)
    assert counts_of(12, own) == [0, 6, 6, 0]
    assert stage_bounds(layer_weights(12), own)[-2] == 13, "the final norm stays with the head"
    assert counts_of(12, ParallelConfig(pp=4, first_stage_blocks=2)) == [2, 3, 4, 3]
    assert counts_of(12, ParallelConfig(pp=2, first_stage_blocks=11, last_stage_blocks=1)) == [11, 1]
    v_shaped = ParallelConfig(pp=2, schedule=ScheduleName["zb_v"], first_stage_blocks=0, last_stage_blocks=1)
    assert counts_of(7, v_shaped) == [0, 3, 3, 1]


@pytest.mark.parametrize(
    ("parallel", "blocks", "message"),
    [
        (ParallelConfig(pp=2, first_stage_blocks=3, last_stage_blocks=2), 4, r"leave -1 for 0 other stages: change"),
        (ParallelConfig(pp=2, first_stage_blocks=1, last_stage_blocks=2), 4, r"leave 1 for 0 other stages: change"),
        (ParallelConfig(pp=4, last_stage_blocks=3), 5, r"= null and .* = 3 of 5 blocks leave 2 for 3 other stages, of"),
        (
            ParallelConfig(pp=3, schedule=ScheduleName["interleaved"], virtual_stages=3),
            5,
            r"virtual_stages = 3 \* 3 stages but only 5 blocks",
        ),
    ],
)
def test_stages_without_a_block_are_refused(parallel: ParallelConfig, blocks: int, message: str) -> None:
    """Catches blocks that are lost or held twice because the given numbers do not add up."""
    with pytest.raises(ConfigError, match=message):
        stage_bounds(layer_weights(blocks), parallel)
