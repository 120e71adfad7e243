"""Which layers go to which pipeline stage: pure arithmetic, no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Partition


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
            f"the pipeline has {num_stages} stages but only {len(weighted)} layers carry weight: "
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
    return partition_around(costs, parallel.num_stages, parallel.first_stage_blocks, parallel.last_stage_blocks)


def partition_around(weights: Sequence[float], num_stages: int, first: int | None, last: int | None) -> list[int]:
    """`partition` with a first and a last stage that may be given.

    Args:
        weights: cost of each layer; the first one is the embedding's and the last one the head's.
        num_stages: stages to fill.
        first: weighted layers that the first stage holds beside the embedding; None leaves it to the weights.
        last: weighted layers that the last stage holds beside the head; None leaves it to the weights.

    Raises:
        ConfigError: too few weighted layers are left for the other stages.
    """
    blocks = [layer for layer in range(1, len(weights) - 1) if weights[layer] > 0]
    inner = num_stages - (first is not None) - (last is not None)
    left = len(blocks) - (first or 0) - (last or 0)
    if (first is not None or last is not None) and (left < inner or (left and not inner)):
        raise ConfigError(
            f"parallel.first_stage_blocks = {_shown(first)} and parallel.last_stage_blocks = {_shown(last)} of "
            f"{len(blocks)} blocks leave {left} for {inner} other stages"
            f"{', of which each needs one' if inner else ''}: change the numbers"
        )
    begin = 0 if first is None else blocks[first - 1] + 1 if first else 1
    end = len(weights) if last is None else blocks[-last] if last else blocks[-1] + 1
    middle = [begin + bound for bound in partition(weights[begin:end], inner)] if inner else [begin]
    return [*([0] if begin else []), *middle, *([len(weights)] if end < len(weights) else [])]


def _shown(value: int | None) -> str:
    return "null" if value is None else str(value)


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
