"""How a model is cut: its layers into pipeline stages, its parameters by tensor parallelism. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import TypeVar

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Partition, Recompute
from megads.parallel.pipeline_actions import StagePlacement
from megads.parallel.rank_order import padded_rows

T = TypeVar("T")


def partition(weights: Sequence[float], num_stages: int) -> list[int]:
    """Cuts a row of layers into contiguous stages whose heaviest one is as light as possible.

    Ties are broken by the least sum of squared stage weights, then by lighter earlier stages: under 1F1B an earlier
    stage holds the activations of more micro-batches. Layers of weight zero travel with the next weighted layer,
    those at the end with the last one.

    Args:
        weights: cost of each layer in any unit, none negative.
        num_stages: stages to fill; each gets at least one weighted layer.

    Returns:
        num_stages + 1 bounds: stage i holds layers bounds[i] to bounds[i + 1] - 1.

    Raises:
        ConfigError: fewer weighted layers than stages.
    """
    assert num_stages >= 1 and all(weight >= 0 for weight in weights), (num_stages, weights)
    weighted = [layer for layer, weight in enumerate(weights) if weight > 0]
    if len(weighted) < num_stages:
        raise ConfigError(
            f"parallel.pp = {num_stages} stages but only {len(weighted)} layers carry weight: "
            "every stage needs one; use fewer stages or a deeper model"
        )
    prefix = [0, *accumulate(_as_integers([weights[layer] for layer in weighted]))]
    cuts = _cut(prefix, num_stages)
    return [0, *(weighted[cut - 1] + 1 for cut in cuts), len(weights)]


def stage_bounds(weights: Sequence[float], parallel: ParallelConfig) -> list[int]:
    """Cuts a model into the stages of a pipeline, virtual ones counted each, as a layout says.

    Args:
        weights: of the model's layers in order: the embedding, the blocks, and last the head, before which there may
            be layers of weight 0. Given costs multiply them.
        parallel: the layout; `partition` is not auto any more.

    Returns:
        num_stages + 1 bounds: virtual stage i holds layers bounds[i] to bounds[i + 1] - 1.

    Raises:
        ConfigError: fewer weighted layers than stages.
    """
    assert parallel.partition is not Partition.auto, "the launcher replaces auto by costs"
    embedding, block, head = parallel.layer_costs or (1.0, 1.0, 1.0)
    if parallel.partition is Partition.uniform:
        embedding = head = 0.0
    costs = [weights[0] * embedding, *(weight * block for weight in weights[1:-1]), weights[-1] * head]
    given = parallel.first_stage_blocks, parallel.last_stage_blocks
    blocks = [layer for layer in range(1, len(costs) - 1) if costs[layer] > 0]
    _check_given(given, len(blocks), parallel.num_stages)
    if parallel.num_stages == parallel.pp:
        return _partition_around(costs, blocks, parallel.pp, given)
    counts = _counts_over_ranks(costs, blocks, parallel.placement, given)
    ends = [blocks[total - 1] + 1 if total else 1 for total in accumulate(counts)]
    return [0, *ends[:-1], len(weights)]


_Given = tuple[int | None, int | None]
"""Blocks that the first and the last stage shall have; None leaves it to the weights."""


def _check_given(given: _Given, blocks: int, num_stages: int) -> None:
    """Raises ConfigError where given numbers of blocks leave too few for the other stages, or too many."""
    inner = num_stages - sum(number is not None for number in given)
    left = blocks - sum(number or 0 for number in given)
    if given != (None, None) and (left < inner or (left and not inner)):
        first, last = ("null" if number is None else number for number in given)
        raise ConfigError(
            f"parallel.first_stage_blocks = {first} and parallel.last_stage_blocks = {last} of {blocks} blocks leave "
            f"{left} for {inner} other stages{', of which each needs one' if inner else ''}: change the numbers"
        )


def _partition_around(costs: Sequence[float], blocks: Sequence[int], num_stages: int, given: _Given) -> list[int]:
    """`partition` between a first and a last stage that may be given, for one stage a rank.

    Args:
        costs: of each layer; the first one is the embedding's and the last one the head's.
        blocks: places of the blocks among them.
        num_stages: stages to fill.
        given: numbers of blocks.
    """
    first, last = given
    inner = num_stages - (first is not None) - (last is not None)
    begin = 0 if first is None else blocks[first - 1] + 1 if first else 1
    end = len(costs) if last is None else blocks[-last] if last else blocks[-1] + 1
    middle = [begin + bound for bound in partition(costs[begin:end], inner)] if inner else [begin]
    return [*([0] if begin else []), *middle, *([len(costs)] if end < len(costs) else [])]


def _counts_over_ranks(
    costs: Sequence[float], blocks: Sequence[int], placement: StagePlacement, given: _Given
) -> list[int]:
    """Blocks of each virtual stage, so that the heaviest rank is as light as possible, then its heaviest stage.

    What a rank computes in a step is the sum over its stages, so their sums are to be even. Blocks are alike: each one
    goes to the rank that has least, and there to the stage that has least; of equals to the last, whose activations
    wait for the shortest time.

    Raises:
        ConfigError: fewer blocks than stages that need one.
    """
    last = placement.num_stages - 1
    size = Fraction(costs[blocks[0]]) if blocks else Fraction(1)
    ends = {0: Fraction(costs[0]), last: Fraction(costs[-1])}
    fixed = {stage: number for stage, number in zip((0, last), given, strict=True) if number is not None}
    # Embedding and head make a stage of their own where they weigh as much as one.
    counts = [fixed.get(stage, 0 if ends.get(stage, 0) >= size else 1) for stage in range(last + 1)]
    if sum(counts) > len(blocks):
        virtual = placement.num_stages // placement.num_ranks
        raise ConfigError(
            f"parallel.pp * virtual_stages = {placement.num_ranks} * {virtual} stages but only {len(blocks)} blocks: "
            "every stage needs one; use fewer stages or a deeper model"
        )
    loads = [ends.get(stage, 0) + number * size for stage, number in enumerate(counts)]
    of_ranks = [sum(loads[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    free = [stage for stage in range(last + 1) if stage not in fixed]
    for _ in range(len(blocks) - sum(counts)):
        stage = min(free, key=lambda stage: (of_ranks[placement.rank_of(stage)], loads[stage], -stage))
        counts[stage] += 1
        loads[stage] += size
        of_ranks[placement.rank_of(stage)] += size
    return counts


def _as_integers(weights: Sequence[float]) -> list[int]:
    """Scales weights to integers without rounding, so that equal sums compare as equal."""
    fractions = [Fraction(weight) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def _lightest_maximum(prefix: Sequence[int], num_stages: int) -> int:
    """The least possible weight of the heaviest stage, by bisection over a greedy fill."""
    low = max(right - left for left, right in pairwise(prefix))
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        end = 0
        for _ in range(num_stages):
            end = bisect_right(prefix, prefix[end] + middle) - 1
        if end == len(prefix) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def _cut(prefix: Sequence[int], num_stages: int) -> list[int]:
    """Inner cuts (num_stages - 1 of them) of layers 0..n-1, given prefix sums [n + 1] of their positive weights.

    Dynamic programming over suffixes: cost[j][i] is the least sum of squares of layers i..n-1 on j stages, none heavier
    than the lightest possible maximum. The square of a sum is convex, so the best first cut moves right with i and
    divide and conquer finds a whole row in O(n log n).
    """
    last = len(prefix) - 1
    heaviest = _lightest_maximum(prefix, num_stages)
    costs: list[dict[int, int]] = [{last: 0}]
    first = last
    for stages in range(1, num_stages + 1):
        # The leftmost layer from which `stages` stages still reach the end.
        first = bisect_left(prefix, prefix[first] - heaviest)
        starts = range(first, last - stages + 1)
        costs.append(_cost_row(prefix, heaviest, costs[-1], starts))
    cuts = []
    start = 0
    for stages in range(num_stages, 1, -1):
        rest = costs[stages - 1]
        # The earliest cut that is as good as the best leaves this stage the lightest.
        furthest = bisect_right(prefix, prefix[start] + heaviest) - 1
        start = next(
            end
            for end in range(start + 1, furthest + 1)
            if end in rest and (prefix[end] - prefix[start]) ** 2 + rest[end] == costs[stages][start]
        )
        cuts.append(start)
    return cuts


def _cost_row(prefix: Sequence[int], heaviest: int, rest: dict[int, int], starts: range) -> dict[int, int]:
    """Least sum of squares from each start, where `rest` is that of one stage fewer by its first layer."""
    row: dict[int, int] = {}
    open_ranges = [(starts.start, starts.stop - 1, min(rest), max(rest))]
    while open_ranges:
        low, high, first_end, last_end = open_ranges.pop()
        if low > high:
            continue
        start = (low + high) // 2
        furthest = min(last_end, bisect_right(prefix, prefix[start] + heaviest) - 1)
        row[start], end = min(
            ((prefix[end] - prefix[start]) ** 2 + rest[end], end)
            for end in range(max(first_end, start + 1), furthest + 1)
        )
        open_ranges += [(low, start - 1, first_end, end), (start + 1, high, end, last_end)]
    return row


def block_modes(parallel: ParallelConfig, stage: int, num_blocks: int) -> list[Recompute]:
    """What each block of a pipeline stage recomputes: none, selective or full.

    Numbers of blocks mean a stage's first ones, and an interval starts with its first: backward reaches the first
    block last, when nothing is kept of those behind it, so what it makes again takes the room that they left.

    Args:
        parallel: the layout; `recompute` is not auto any more.
        stage: number of the stage.
        num_blocks: its blocks.

    Raises:
        ConfigError: more blocks to recompute than there are.
    """
    assert parallel.recompute is not Recompute.auto, "the launcher replaces auto by numbers of blocks"
    if parallel.recompute_blocks is None:
        chosen = [index % parallel.recompute_interval == 0 for index in range(num_blocks)]
    else:
        wanted = parallel.recompute_blocks[stage]
        if wanted > num_blocks:
            raise ConfigError(
                f"parallel.recompute_blocks = {parallel.recompute_blocks} asks for {wanted} blocks of stage {stage}, "
                f"whose number of blocks is {num_blocks}: lower it to that or less"
            )
        chosen = [index < wanted for index in range(num_blocks)]
    return [parallel.recompute if there else Recompute.none for there in chosen]


class Cut(StrEnum):
    """How tensor parallelism cuts a module's parameters.

    column: output features (dim 0 of weight and bias); the module enters a parallel region.
    row: input features (dim 1 of the weight, bias whole); the module leaves the region with a sum over ranks.
    columns: nothing; the module is called with a tensor and the column modules that read it, and enters their region
        once for all of them.
    rows: nothing; the module is called with tensors and the row modules that read them, and leaves their region once,
        with the sum of all.
    vocab: rows of an embedding table; the lookup ends with a sum over ranks.
    vocab_head: rows of the output projection; the module enters a region that ends in the loss.
    vector: the one dim of a weight of features or heads inside of a region; other modules compute with it.
    norms: nothing; the module is called with tensors [b, s, heads, head dim] whose heads are cut and the norm of each,
        whose statistics are those of all ranks.
    inside: nothing; the module computes inside of a region, on the features of this rank alone, so that the gradients
        of its parameters are to be summed over ranks.
    sequence: nothing; the module looks up whole positions [..., s], and with sequence parallelism a rank looks up only
        those of its share of the sequence.

    With sequence parallelism entering a region gathers the sequence, leaving one scatters it.
    """

    column = "column"
    row = "row"
    columns = "columns"
    rows = "rows"
    vocab = "vocab"
    vocab_head = "vocab_head"
    vector = "vector"
    norms = "norms"
    inside = "inside"
    sequence = "sequence"


@dataclass(frozen=True)
class ShardingTable:
    """What tensor parallelism must know of a model; keys are patterns of full module paths, first match wins.

    Attributes:
        parameters: pattern -> cut. What is not named is replicated. A column module opens the activation
            region that the next row module of the same branch closes; a vocab_head opens the one the loss closes.
            Modules of columns and rows do both for several branches together.
        dropouts: patterns of modules outside of the regions whose masks follow from the tokens' places. With sequence
            parallelism a rank's tokens are a share of dim 1, which `shard`, (rank, size), tells them.
        attention_cores: patterns of modules whose `narrow(rank, size)` keeps a contiguous share of the heads, and which
            take queries of some tokens with keys and values of all.
    """

    parameters: Mapping[str, Cut]
    dropouts: tuple[str, ...] = ()
    attention_cores: tuple[str, ...] = ()


def first_match(patterns: Mapping[str, T], path: str) -> T | None:
    """Value of the first pattern that matches a full module path."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(path, pattern)), None)


def cut_dim(cut: Cut | None, num_dims: int) -> int | None:
    """The dim along which a module's cut divides a parameter; None: each rank holds all of it.

    Args:
        cut: of the module; None where the table does not name it.
        num_dims: of the parameter.
    """
    if cut is None or cut in (Cut.inside, Cut.sequence):
        return None
    dim = 1 if cut is Cut.row else 0
    return dim if dim < num_dims else None  # the bias of a row-parallel layer is whole


def local_shape(key: str, shape: tuple[int, ...], table: ShardingTable, size: int) -> tuple[int, ...]:
    """Shape of one rank's tensor of a parameter, vocabulary padding included; nothing is built.

    Args:
        key: the parameter's name in the whole model.
        shape: its unsharded shape.
        table: how it may be cut.
        size: tensor-parallel ranks.
    """
    dim = cut_dim(first_match(table.parameters, key.rpartition(".")[0]), len(shape))
    return tuple(padded_rows(rows, size) if d == dim else rows for d, rows in enumerate(shape))
