"""Partitioning of layers into pipeline stages and tensor-parallel sharding of parameters. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import TypeVar

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Partition, Recompute, padded_rows
from megads.parallel.pipeline_actions import StagePlacement

T = TypeVar("T")


def partition(weights: Sequence[float], num_stages: int) -> list[int]:
    """Partitions layers into contiguous stages so that the maximum weight of a stage is minimal.

    Ties are broken by the least sum of squared stage weights, then by lighter earlier stages: under 1F1B an earlier
    stage holds the activations of more micro-batches. Layers of weight zero join the stage of the next weighted layer,
    those at the end the last stage.

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
            f"parallel.pp = {num_stages} stages but only {len(weighted)} layers with a cost above 0: "
            "every stage needs one; use fewer stages or a deeper model"
        )
    prefix = [0, *accumulate(_as_integers([weights[layer] for layer in weighted]))]
    cuts = _cut(prefix, num_stages)
    return [0, *(weighted[cut - 1] + 1 for cut in cuts), len(weights)]


def stage_bounds(weights: Sequence[float], parallel: ParallelConfig) -> list[int]:
    """Partitions a model into the virtual stages of a pipeline, according to a layout.

    Args:
        weights: weights of the model's layers in order: the embedding, the blocks, and last the head, before which
            there may be layers of weight 0. They are multiplied by `parallel.layer_costs`, of which there are three or
            one for each layer.
        parallel: the layout; `partition` must be resolved, i.e. not auto.

    Returns:
        num_stages + 1 bounds: virtual stage i holds layers bounds[i] to bounds[i + 1] - 1.

    Raises:
        ConfigError: fewer weighted layers than stages, or another number of layer costs.
    """
    assert parallel.partition is not Partition.auto, "the launcher replaces auto by costs"
    embedding, *of_blocks, head = parallel.layer_costs or (1.0, 1.0, 1.0)
    if parallel.partition is Partition.uniform:
        embedding = head = 0.0
    blocks = [layer for layer in range(1, len(weights) - 1) if weights[layer] > 0]
    if len(of_blocks) not in (1, len(blocks)):
        raise ConfigError(
            f"parallel.layer_costs has {len(of_blocks) + 2} numbers: want 3, or one for each of {len(blocks) + 2} "
            "layers, embedding and head included"
        )
    costs = [weights[0] * embedding, *weights[1:-1], weights[-1] * head]
    for layer, cost in zip(blocks, of_blocks if len(of_blocks) > 1 else of_blocks * len(blocks), strict=True):
        costs[layer] *= cost
    given = parallel.first_stage_blocks, parallel.last_stage_blocks
    _check_given(given, len(blocks), parallel.num_stages)
    if parallel.num_stages == parallel.pp:
        return _partition_around(costs, blocks, parallel.pp, given)
    counts = _counts_over_ranks(costs, blocks, parallel.placement, given)
    ends = [blocks[total - 1] + 1 if total else 1 for total in accumulate(counts)]
    return [0, *ends[:-1], len(weights)]


_Given = tuple[int | None, int | None]
"""Configured number of blocks of the first and the last stage; None: determined by the weights."""


def _check_given(given: _Given, blocks: int, num_stages: int) -> None:
    """Raises ConfigError if the given numbers of blocks leave too few for the other stages, or blocks without one."""
    inner = num_stages - sum(number is not None for number in given)
    left = blocks - sum(number or 0 for number in given)
    if given != (None, None) and (left < inner or (left and not inner)):
        first, last = ("null" if number is None else number for number in given)
        raise ConfigError(
            f"parallel.first_stage_blocks = {first} and parallel.last_stage_blocks = {last} of {blocks} blocks leave "
            f"{left} for {inner} other stages{', of which each needs one' if inner else ''}: change the numbers"
        )


def _partition_around(costs: Sequence[float], blocks: Sequence[int], num_stages: int, given: _Given) -> list[int]:
    """`partition` with optionally fixed first and last stages, for one stage per rank.

    Args:
        costs: cost of each layer, from the embedding to the head.
        blocks: indices of the blocks in `costs`.
        num_stages: number of stages.
        given: fixed numbers of blocks of the first and last stage.
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
    """Number of blocks of each virtual stage, minimizing the load of the busiest rank, then of its largest stage.

    A rank's load is the sum over its stages, so these sums are balanced. If all blocks cost the same, each is assigned
    to the rank with the least load, and there to the stage with the least load. Ties go to the last stage, whose
    activations are held for the shortest time. Else this is done with the mean cost, and then bounds between stages are
    moved by one block as long as this lowers the load of the busiest rank, which need not find the optimum.

    Raises:
        ConfigError: fewer blocks than stages that need one.
    """
    last = placement.num_stages - 1
    of_blocks = [Fraction(costs[layer]) for layer in blocks]
    size = sum(of_blocks) / len(blocks) if blocks else Fraction(1)
    ends = {0: Fraction(costs[0]), last: Fraction(costs[-1])}
    fixed = {stage: number for stage, number in zip((0, last), given, strict=True) if number is not None}
    # Embedding and head can form a stage without blocks if they cost at least as much as a block.
    fewest = [fixed.get(stage, 0 if ends.get(stage, 0) >= size else 1) for stage in range(last + 1)]
    counts = list(fewest)
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
    if len(set(of_blocks)) <= 1:
        return counts

    def busiest(counts: Sequence[int]) -> tuple[Fraction, Fraction]:
        """Load of the busiest rank, then the sum of squares."""
        bounds, load = [0, *accumulate(counts)], [Fraction(0)] * placement.num_ranks
        for stage, (first, end) in enumerate(pairwise(bounds)):
            load[placement.rank_of(stage)] += ends.get(stage, 0) + sum(of_blocks[first:end])
        return max(load), sum((each**2 for each in load), Fraction(0))

    while True:
        moved = []
        for giver, taker in chain(pairwise(range(last + 1)), pairwise(range(last, -1, -1))):
            if giver in free and taker in free and counts[giver] > fewest[giver]:
                moved.append(list(counts))
                moved[-1][giver] -= 1
                moved[-1][taker] += 1
        best = min(moved, key=busiest, default=counts)
        if busiest(best) >= busiest(counts):
            return counts
        counts = best


def _as_integers(weights: Sequence[float]) -> list[int]:
    """Scales weights to integers without rounding, so that equal sums compare equal."""
    fractions = [Fraction(weight) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def _lightest_maximum(prefix: Sequence[int], num_stages: int) -> int:
    """Minimum over partitions of the maximum stage weight, by bisection over a greedy fill."""
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
    """The num_stages - 1 inner bounds of layers 0..n-1, given prefix sums [n + 1] of their positive weights.

    Dynamic programming over suffixes: cost[j][i] is the least sum of squares of layers i..n-1 on j stages, none heavier
    than the minimal maximum. The square of a sum is convex, so the best first bound is monotonic in i, and divide and
    conquer finds a whole row in O(n log n).
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
        # The earliest of the optimal bounds makes this stage the lightest.
        furthest = bisect_right(prefix, prefix[start] + heaviest) - 1
        start = next(
            end
            for end in range(start + 1, furthest + 1)
            if end in rest and (prefix[end] - prefix[start]) ** 2 + rest[end] == costs[stages][start]
        )
        cuts.append(start)
    return cuts


def _cost_row(prefix: Sequence[int], heaviest: int, rest: dict[int, int], starts: range) -> dict[int, int]:
    """Least sum of squares by first layer, for one stage more than `rest`."""
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
    """Recomputation mode of each block of a pipeline stage: none, selective or full.

    A number of blocks counts from a stage's first, and an interval starts with its first. The backward pass reaches
    the first block last, when the activations of later blocks are freed, so its recomputed activations fit into that
    memory.

    Args:
        parallel: the layout; `recompute` must be resolved, i.e. not auto.
        stage: index of the stage.
        num_blocks: number of blocks of the stage.

    Raises:
        ConfigError: more blocks to recompute than the stage has.
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


class ParallelStyle(StrEnum):
    """How tensor parallelism shards a module's parameters.

    column: output features (dim 0 of weight and bias); the module enters a parallel region.
    row: input features (dim 1 of the weight, bias replicated); the module leaves the region with an all-reduce.
    columns: no parameters; the module is called with a tensor and the column modules that read it, and enters their
        region once for all of them.
    rows: no parameters; the module is called with tensors and the row modules that read them, and leaves their region
        with one all-reduce of the sum of all.
    vocab: rows of an embedding table; the lookup ends with an all-reduce.
    vocab_head: rows of the output projection; the module enters a region that the loss leaves.
    vector: the only dim of a weight per feature or head inside a region; other modules compute with it.
    norms: no parameters; the module is called with tensors [b, s, heads, head dim] whose heads are sharded and the norm
        of each, and computes statistics over all ranks.
    inside: replicated; the module computes inside a region on this rank's features only, so the gradients of its
        parameters are all-reduced over ranks.
    sequence: replicated; the module looks up positions [..., s], with sequence parallelism only those of this rank's
        share of the sequence.
    experts: stacked rows of experts, of which ranks hold some, and possibly a share of each (`ExpertShard`).

    With sequence parallelism, entering a region is an all-gather along the sequence, and leaving one a reduce-scatter.
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
    experts = "experts"


Cut = ParallelStyle
"""Former name, for plugins."""


@dataclass(frozen=True)
class FeatureGroups:
    """Output features of a column module that consist of groups, part of each needed by several ranks: GQA's KV heads.

    The weight's rows are ordered [group, (divided, shared)]. With no more ranks than groups, ranks hold whole groups.
    With more, the ranks of a group divide its features among themselves, and all-gather the shared ones.

    Attributes:
        divided: features of a group of which every rank computes with its own only: queries.
        shared: features that every rank of the group computes with: a key and a value.
    """

    divided: int
    shared: int

    def are_divided(self, features: int, size: int) -> bool:
        """Whether there are more ranks than groups.

        Args:
            features: output features of the unsharded module.
            size: number of tensor-parallel ranks.
        """
        return size > features // (self.divided + self.shared)

    def held(self, features: int, rank: int, size: int) -> tuple[range, range]:
        """Divided and shared rows that a rank holds if groups are divided; the same numbers on all ranks.

        Args:
            features: output features of the unsharded module.
            rank: tensor-parallel rank.
            size: number of tensor-parallel ranks, a multiple of the number of groups.
        """
        width = self.divided + self.shared
        sharers = size // (features // width)
        assert sharers and not self.divided % sharers and not self.shared % sharers, (self, features, size)
        group, place = divmod(rank, sharers)
        divided, shared = self.divided // sharers, self.shared // sharers
        first = group * width + place * divided
        second = group * width + self.divided + place * shared
        return range(first, first + divided), range(second, second + shared)


@dataclass(frozen=True)
class ExpertShard:
    """The part of a layer's experts on a rank: some experts, and an equal part of the rows of each.

    Attributes:
        num_experts: experts of the layer.
        rank, ranks: this rank's share of the experts, and the number of shares.
        part, parts: this rank's share of each expert's rows, and the number of shares.
    """

    num_experts: int
    rank: int = 0
    ranks: int = 1
    part: int = 0
    parts: int = 1

    @property
    def experts(self) -> range:
        """The experts of which this rank holds rows."""
        share = self.num_experts // self.ranks
        return range(share * self.rank, share * (self.rank + 1))

    def held(self, rows: int) -> tuple[range, ...]:
        """Ranges of the rows of a stacked weight that the rank holds, in order; adjacent ranges are joined.

        Args:
            rows: rows of all experts.
        """
        size = rows // self.num_experts
        if self.parts == 1:
            return (range(self.experts.start * size, self.experts.stop * size),)
        share = size // self.parts
        starts = (expert * size + self.part * share for expert in self.experts)
        return tuple(range(start, start + share) for start in starts)


@dataclass(frozen=True)
class ShardingTable:
    """How tensor parallelism shards a model; patterns match full module paths, the first match wins.

    Attributes:
        parameters: pattern -> style. Modules that match no pattern, such as norms of hidden states, are replicated;
            with sequence parallelism they see this rank's share of the sequence only, so that their gradients are
            all-reduced. A column module enters the region
            that the next row module of the same branch leaves; a vocab_head enters the one that the loss leaves.
            Modules of columns and rows do the same for several branches at once.
        dropouts: patterns of dropout modules outside regions, whose masks depend on the positions of tokens. With
            sequence parallelism their attribute `shard`, (rank, size), is set to this rank's share of dim 1.
        attention_cores: patterns of modules whose `narrow(rank, size)` keeps a contiguous share of the heads, and which
            take the queries of some tokens with the keys and values of all.
        feature_groups: pattern -> groups of the output features of column modules. A module without an entry is cut
            into contiguous shares.
        experts: patterns of modules with experts, see `megads.model.moe.Experts`; the style of their projections is
            `experts`.
        routers: patterns of their routers.
        num_experts: experts of each such module.
    """

    parameters: Mapping[str, ParallelStyle]
    dropouts: tuple[str, ...] = ()
    attention_cores: tuple[str, ...] = ()
    feature_groups: Mapping[str, FeatureGroups] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    num_experts: int = 0


def first_match(patterns: Mapping[str, T], path: str) -> T | None:
    """Value of the first pattern that matches a full module path."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(path, pattern)), None)


def sharded_dim(style: ParallelStyle | None, num_dims: int) -> int | None:
    """The dim along which a parameter is sharded; None: it is replicated.

    Args:
        style: parallel style of the module; None if it matches no pattern of the table.
        num_dims: number of dims of the parameter.
    """
    if style is None or style in (ParallelStyle.inside, ParallelStyle.sequence):
        return None
    dim = 1 if style is ParallelStyle.row else 0
    return dim if dim < num_dims else None  # the bias of a row-parallel layer is replicated


def local_shape(
    key: str,
    shape: tuple[int, ...],
    table: ShardingTable,
    size: int,
    vocab_multiple: int = 1,
    expert_shards: int | None = None,
) -> tuple[int, ...]:
    """Shape of one rank's shard of a parameter, including vocabulary padding.

    Args:
        key: name of the parameter in the whole model.
        shape: unsharded shape.
        table: sharding table of the model.
        size: number of tensor-parallel ranks.
        vocab_multiple: number that divides the rows of the vocabulary on each rank.
        expert_shards: number of ranks over which experts are divided, see `ParallelConfig.expert_shards`; None: `size`.
    """
    style = first_match(table.parameters, key.rpartition(".")[0])
    if style is ParallelStyle.experts:
        size = size if expert_shards is None else expert_shards
    dim, multiple = sharded_dim(style, len(shape)), rows_multiple(style, vocab_multiple)
    return tuple(padded_rows(rows, size, multiple) if d == dim else rows for d, rows in enumerate(shape))


def rows_multiple(style: ParallelStyle | None, vocab_multiple: int) -> int:
    """Number that divides the rows of a rank's shard: `vocab_multiple` if they are rows of the vocabulary, else 1."""
    return vocab_multiple if style in (ParallelStyle.vocab, ParallelStyle.vocab_head) else 1
