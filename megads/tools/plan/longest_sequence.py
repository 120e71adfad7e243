"""The longest sequence that fits into the memory of a device, for `megads plan longest_sequence=true`.

The number of ranks stays the same: a larger context-parallel size takes ranks of the data axis, so that ZeRO shards the
masters over as many ranks as before. Every combination with a way to save memory (recomputation, offloading, MLPs in
chunks) is planned as a run would be.
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
    context_kinds,
    gib,
)
from megads.parallel.config import Offload
from megads.tools.plan.devices import Device
from megads.tools.plan.host_copies import BlockCopy, copies_json
from megads.tools.plan.run_plan import MemoryNeed, memory_need, parts, plan_of, step_model_of
from megads.tools.plan.tables import new_table

GRANULE = 512
"""Sequence lengths are multiples of this many tokens a rank."""
MOST = 1 << 24
"""Largest sequence length that is tried, in tokens."""
MLP_CHUNK = 8192
"""Tokens of a chunk of the MLP, unless the config sets ops.mlp_chunk."""
WAYS = (
    *((mode, Offload.none, False) for mode in (Recompute.none, Recompute.selective, Recompute.full)),
    *((mode, Offload.activations, False) for mode in (Recompute.none, Recompute.full)),
    *((Recompute.full, offload, True) for offload in Offload),
)
"""Recomputation, what is offloaded, and whether MLPs are computed in chunks."""


@dataclass(frozen=True)
class LongestSequence:
    """Longest sequence that fits with one layout.

    Attributes:
        parallel: the layout.
        mlp_chunk: tokens of a chunk of the MLP; None: MLPs are not divided.
        tokens: length of the sequence; 0 if not even the shortest one fits.
        need: memory at that length; at the shortest length if tokens is 0.
        part: name of the largest part of the memory that grows with the sequence; of the whole memory if tokens is 0.
        part_bytes: bytes of that part on the rank with the highest peak.
        moment: part of a step in which that rank's memory peaks.
        host_bytes: most bytes of offloaded activations of a rank.
        copies: their copies at that length, on a device of known speed.
    """

    parallel: ParallelConfig
    mlp_chunk: int | None
    tokens: int
    need: MemoryNeed
    part: str
    part_bytes: int
    moment: str
    host_bytes: int = 0
    copies: tuple[BlockCopy, ...] = ()


def longest_sequence(config: RootConfig, machine: Machine, device: Device | None = None) -> LongestSequence:
    """Finds the longest sequence that fits, by bisection; memory grows with the length.

    Args:
        config: config of a run or of a training phase, whose layout has no auto values. Its train.seq_len is ignored.
        machine: memory of a device or machine.
        device: device of known speed, for the time of copies; None: it is not known.
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
        mlp_chunk=config.ops.mlp_chunk,
        tokens=fits * unit,
        need=memory_need(machine, plan),
        part=part,
        part_bytes=growing[part],
        moment=plan.fullest_device.fullest.name,
        host_bytes=max(stage.host_activations for stage in plan.stages),
        copies=() if device is None else tuple(step_model_of(config_at, device).copies()),
    )


def longest_sequences(config: RootConfig, machine: Machine, device: Device | None = None) -> list[LongestSequence]:
    """Returns the longest sequence for each of `WAYS`, context-parallel size and kind, with as many ranks.

    Layouts that the model or the config does not allow are left out. Arguments as in `longest_sequence`.
    """
    return [longest_sequence(one, machine, device) for one in _candidates(config)]


def _candidates(config: RootConfig) -> Iterator[RootConfig]:
    """Configs with the same number of ranks: context-parallel sizes in powers of two times the config's."""
    parallel, factor = config.parallel, 1
    while parallel.dp % factor == 0:
        cp, dp = parallel.cp * factor, parallel.dp // factor
        kinds = context_kinds(config.model, parallel.tp, cp)
        for kind, (mode, offload, chunked) in product(kinds, WAYS):
            layout = dataclasses.replace(parallel, cp=cp, cp_kind=kind, dp=dp, recompute=mode, offload=offload)
            if kind is ContextParallelKind.ulysses or cp == 1:
                layout = dataclasses.replace(layout, cp_ulysses=1)
            layout = dataclasses.replace(layout, recompute_blocks=None, recompute_interval=1)
            chunk = (config.ops.mlp_chunk or MLP_CHUNK) if chunked else None
            candidate = dataclasses.replace(
                config, parallel=layout, ops=dataclasses.replace(config.ops, mlp_chunk=chunk)
            )
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
            "offload",
            "mlp\nchunk",
            ">tokens",
            ">of them\na rank",
            "memory",
            "largest part that grows",
            "peak at",
            "on the host\na rank",
        ),
    )
    for one in found:
        parallel = one.parallel
        lengths = (f"{one.tokens:,}", f"{one.tokens // parallel.cp:,}") if one.tokens else ("none", "")
        table.add_row(
            *(str(parallel.cp), parallel.context_text if parallel.cp > 1 else ""),
            *(str(parallel.dp), parallel.recompute.value, parallel.offload.value),
            *(str(one.mlp_chunk or ""), *lengths),
            *(f"{gib(one.need.needed)} of {gib(one.need.available)}", f"{one.part}, {gib(one.part_bytes)}", one.moment),
            _host_text(one),
        )
    return table


def _host_text(found: LongestSequence) -> str:
    """What is on the host, and whether its copies are hidden."""
    if not found.host_bytes:
        return ""
    if not found.copies:
        return gib(found.host_bytes)
    hidden = all(copy.is_hidden for copy in found.copies)
    return f"{gib(found.host_bytes)}, copies {'hidden' if hidden else 'exposed'}"


def longest_json(found: Sequence[LongestSequence]) -> list[dict[str, Any]]:
    """The same as JSON-serializable values; sizes in bytes, tokens null if nothing fits."""
    return [
        {
            **{name: getattr(one.parallel, name) for name in ("tp", "cp", "pp", "dp")},
            "cp_kind": one.parallel.cp_kind.value,
            "cp_ulysses": one.parallel.cp_ulysses,
            "recompute": one.parallel.recompute.value,
            "offload": one.parallel.offload.value,
            "mlp_chunk": one.mlp_chunk,
            "tokens": one.tokens or None,
            "needed_bytes": one.need.needed,
            "available_bytes": one.need.available,
            "largest_growing_part": one.part,
            "largest_growing_part_bytes": one.part_bytes,
            "peak_at": one.moment,
            "host_bytes": one.host_bytes,
            "copies": copies_json(one.copies) if one.copies else None,
        }
        for one in found
    ]
