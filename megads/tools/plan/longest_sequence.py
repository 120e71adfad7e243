"""The longest sequence that fits into the memory of a device, for `megads plan longest_sequence=true`.

The number of ranks stays the same: a larger context-parallel size takes ranks of the data axis, so that ZeRO shards the
masters over as many ranks as before. Every combination with a recomputation mode is planned as a run would be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm
from typing import Any

from rich.table import Table

from megads.api import (
    ConfigError,
    ContextParallelKind,
    Machine,
    ParallelConfig,
    Position,
    Recompute,
    RootConfig,
    check_attention,
    check_shape,
    gib,
)
from megads.tools.plan.run_plan import MemoryNeed, memory_need, parts, plan_of
from megads.tools.plan.tables import new_table

GRANULE = 512
"""Sequence lengths are multiples of this many tokens a rank."""
MOST = 1 << 24
"""Largest sequence length that is tried, in tokens."""


@dataclass(frozen=True)
class LongestSequence:
    """Longest sequence that fits with one layout.

    Attributes:
        parallel: the layout.
        tokens: length of the sequence; 0 if not even the shortest one fits.
        need: memory at that length; at the shortest length if tokens is 0.
        part: name of the largest part of the memory that grows with the sequence; of the whole memory if tokens is 0.
        part_bytes: bytes of that part on the rank with the highest peak.
        moment: part of a step in which that rank's memory peaks.
    """

    parallel: ParallelConfig
    tokens: int
    need: MemoryNeed
    part: str
    part_bytes: int
    moment: str


def longest_sequence(config: RootConfig, machine: Machine) -> LongestSequence:
    """Finds the longest sequence that fits, by bisection; memory grows with the length.

    Args:
        config: config of a run or of a training phase, whose layout has no auto values. Its train.seq_len is ignored.
        machine: memory of a device or machine.
    """
    parallel, unit = config.parallel, _unit(config.parallel)
    fits, fails = 0, 1
    while fails * unit <= MOST and _need(config, machine, fails * unit).fits:
        fits, fails = fails, 2 * fails
    while fails - fits > 1 and fails * unit <= MOST:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _need(config, machine, middle * unit).fits else (fits, middle)
    config_at, least = (_with_length(config, tokens) for tokens in (max(1, fits) * unit, unit))
    plan, smallest = (plan_of(one, cuda=machine.per_gpu) for one in (config_at, least))
    held, before = parts(plan.fullest_device), parts(smallest.fullest_device)
    growing = {name: size for name, size in held.items() if size > before.get(name, 0)} or held
    part = max(growing, key=lambda name: growing[name])
    return LongestSequence(
        parallel=parallel,
        tokens=fits * unit,
        need=memory_need(machine, plan),
        part=part,
        part_bytes=growing[part],
        moment=plan.fullest_device.fullest.name,
    )


def longest_sequences(config: RootConfig, machine: Machine) -> list[LongestSequence]:
    """Returns the longest sequence for each recomputation mode, context-parallel size and kind, with as many ranks.

    Layouts that the model or the config does not allow are left out.
    """
    return [longest_sequence(one, machine) for one in _candidates(config)]


def _candidates(config: RootConfig) -> Iterator[RootConfig]:
    """Configs with the same number of ranks: context-parallel sizes in powers of two times the config's."""
    parallel, factor = config.parallel, 1
    while parallel.dp % factor == 0:
        cp, dp = parallel.cp * factor, parallel.dp // factor
        modes = (Recompute.none, Recompute.selective, Recompute.full)
        kinds = tuple(ContextParallelKind) if cp > 1 else (parallel.cp_kind,)
        for kind, mode in product(kinds, modes):
            layout = dataclasses.replace(
                parallel, cp=cp, cp_kind=kind, dp=dp, recompute=mode, recompute_blocks=None, recompute_interval=1
            )
            candidate = dataclasses.replace(config, parallel=layout)
            try:
                check_shape(_with_length(candidate, _unit(layout)))
                check_attention(candidate)
            except ConfigError:
                continue
            yield candidate
        factor *= 2


def _unit(parallel: ParallelConfig) -> int:
    """Shortest length that is tried; every layout can divide its multiples."""
    return lcm(GRANULE * parallel.cp, 2 * parallel.cp * (parallel.tp if parallel.sequence_parallel else 1))


def _with_length(config: RootConfig, tokens: int) -> RootConfig:
    model = config.model
    if model.position is Position.learned:
        model = dataclasses.replace(model, max_seq_len=max(model.max_seq_len, tokens))
    return dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, seq_len=tokens))


def _need(config: RootConfig, machine: Machine, tokens: int) -> MemoryNeed:
    return memory_need(machine, plan_of(_with_length(config, tokens), cuda=machine.per_gpu))


def longest_table(found: Sequence[LongestSequence]) -> Table:
    """Table of `longest_sequences`: a row for each layout."""
    table = new_table(
        "longest sequence that fits, with as many ranks: a larger cp takes ranks of dp",
        *(
            ">cp",
            "kind",
            ">dp",
            "recompute",
            ">tokens",
            ">of them\na rank",
            "memory",
            "largest part that grows",
            "peak at",
        ),
    )
    for one in found:
        parallel = one.parallel
        lengths = (f"{one.tokens:,}", f"{one.tokens // parallel.cp:,}") if one.tokens else ("none", "")
        table.add_row(
            *(str(parallel.cp), parallel.cp_kind.value if parallel.cp > 1 else ""),
            *(str(parallel.dp), parallel.recompute.value, *lengths),
            *(f"{gib(one.need.needed)} of {gib(one.need.available)}", f"{one.part}, {gib(one.part_bytes)}", one.moment),
        )
    return table


def longest_json(found: Sequence[LongestSequence]) -> list[dict[str, Any]]:
    """The same as JSON-serializable values; sizes in bytes, tokens null if nothing fits."""
    return [
        {
            **{name: getattr(one.parallel, name) for name in ("tp", "cp", "pp", "dp")},
            "cp_kind": one.parallel.cp_kind.value,
            "recompute": one.parallel.recompute.value,
            "tokens": one.tokens or None,
            "needed_bytes": one.need.needed,
            "available_bytes": one.need.available,
            "largest_growing_part": one.part,
            "largest_growing_part_bytes": one.part_bytes,
            "peak_at": one.moment,
        }
        for one in found
    ]
