"""Before training, rank 0 measures how a run computes fastest on its GPU, and all ranks do as it found.

Attention: `megads.engine.attention_trials`. The other operators, under ops.impl=auto: each of megads' kernels is taken
if it is exact, gives the same bits on every run and is faster than torch's operator, on the run's own shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from megads.engine.attention_trials import TunedAttention, tune_attention
from megads.engine.operator_trials import CANDIDATES, OURS, TORCHS, OperatorCase, OperatorWork, operator_cases
from megads.model.config import ModelConfig
from megads.ops.attention_kinds import AttentionKind, AttentionWork
from megads.ops.autotune import (
    ROUNDS,
    DeviceBroken,
    TuningResult,
    cache_file,
    cache_key,
    compare,
    device_name,
    first_line,
    read_cached,
    write_cached,
)
from megads.ops.config import Implementation, KernelOp, Kernels
from megads.parallel.context import held_places
from megads.parallel.grid import ParallelGrid
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE

ATTENTION_EVENT, OPERATORS_EVENT = "attention", "operators"
FOLDER = "operators"
"""Of the user's cache."""
KEPT_RATIO = 1.05
"""Largest memory of a kernel between forward and backward, as a multiple of torch's, by which a run is planned."""


@dataclass(frozen=True)
class TunedOperator:
    """One operator on one shape.

    Attributes:
        op: the operator.
        shape: for people.
        ours: outcome of megads' kernel.
        torch: outcome of torch's operator.
    """

    op: KernelOp
    shape: str
    ours: TuningResult
    torch: TuningResult

    @property
    def why_torch(self) -> str:
        """Why torch's operator is taken; empty where megads' kernel is."""
        ours, theirs = self.ours, self.torch
        if ours.reason or ours.time_ms is None:
            return ours.reason or "not timed"
        if theirs.time_ms is None:
            return f"nothing to compare with: {theirs.reason}"
        if not ours.repeats:
            return "other bits on every run"
        kept, planned = ours.kept_bytes or 0, theirs.kept_bytes or 0
        if kept > KEPT_RATIO * planned:
            return f"keeps {kept:,} bytes, torch {planned:,}, by which the run is planned"
        return "" if ours.time_ms < theirs.time_ms else "slower"

    @property
    def row(self) -> tuple[str, ...]:
        """Of the table: operator, shape, microseconds of both, error, what is taken."""
        times = ("-" if found.time_ms is None else f"{1e3 * found.time_ms:.1f}" for found in (self.ours, self.torch))
        error = "-" if self.ours.error is None else f"{self.ours.error:.2f}"
        why = self.why_torch
        return self.op, self.shape, *times, error, f"torch: {shorten(why, 80)}" if why else "megads"

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TunedOperator:
        """Reads what `asdict` returned; raises ValueError, KeyError or TypeError on anything else."""
        outcomes = (TuningResult(**content[side]) for side in ("ours", "torch"))
        return cls(KernelOp(content["op"]), str(content["shape"]), *outcomes)


HEADER = ("operator", "shape", "megads us", "torch us", "error", "taken")


@dataclass(frozen=True)
class TunedOperators:
    """Which of a run's operators megads' kernels compute.

    Attributes:
        taken: those.
        source: where this comes from, for people.
        key: of all that it depends on.
        operators: what was measured of each.
    """

    taken: frozenset[KernelOp]
    source: str
    key: str
    operators: tuple[TunedOperator, ...]

    @property
    def text(self) -> str:
        """A table. Times are those of forward and backward; the error is megads' as a multiple of torch's."""
        rows = [HEADER, *(found.row for found in self.operators)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows]
        lines = ["  ".join([*cells, row[-1]]) for cells, row in zip(padded, rows, strict=True)]
        return "\n  ".join([f"ops.impl=auto takes {len(self.taken)} of megads' kernels ({self.source})", *lines])

    def to_dict(self) -> dict[str, Any]:
        """For an event."""
        operators = [asdict(found) for found in self.operators]
        return {"taken": sorted(self.taken), "source": self.source, "key": self.key, "operators": operators}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TunedOperators:
        """Reads what `to_dict` returned; raises ValueError, KeyError or TypeError on anything else."""
        operators = tuple(map(TunedOperator.from_dict, content["operators"]))
        return cls(frozenset(map(KernelOp, content["taken"])), str(content["source"]), str(content["key"]), operators)


def autotune_attention(
    model: ModelConfig, work: AttentionWork, grid: ParallelGrid, device: torch.device, run_dir: Path
) -> TunedAttention:
    """How this run computes attention, see `tune_attention`; collective over the world.

    Args:
        model: the model.
        work: what a rank computes of it.
        grid: the ranks.
        device: this rank's.
        run_dir: the run's folder, where a choice of an earlier start is.

    Raises:
        ConfigError: on every rank: what was asked for does not run, or nothing does.
    """

    def choose() -> TunedAttention:
        places_s = None
        if grid.cp.size > 1 and work.seq_len is not None:
            places_s = held_places(work.seq_len, grid.cp.rank, grid.cp.size, device)
        return tune_attention(
            model, work, device, places_s=places_s, earlier=lambda key: earlier_attention(run_dir, key)
        )

    return grid.control.first_decides(choose, TunedAttention)


def autotune_operators(
    kernels: Kernels,
    work: OperatorWork,
    attention: AttentionKind,
    grid: ParallelGrid,
    device: torch.device,
    run_dir: Path,
) -> tuple[Kernels, TunedOperators | None]:
    """Which of megads' kernels this run takes under ops.impl=auto on GPUs; collective over the world where it measures.

    Args:
        kernels: as `megads.ops.resolve.load` has made them ready.
        work: what a rank computes.
        attention: the kind that the run takes.
        grid: the ranks.
        device: this rank's.
        run_dir: the run's folder, where the result of an earlier start is.

    Returns:
        The kernels with everything decided, and what was measured; None where nothing was.

    Raises:
        ConfigError: on every rank: a kernel left the device unusable.
    """
    if Implementation.auto not in (kernels.model, kernels.optimizer):
        return kernels, None
    cases = operator_cases(work, kernels)
    tuned = grid.control.first_decides(
        lambda: tune(cases, work, device, earlier=lambda key: earlier_operators(run_dir, key)),
        TunedOperators,
    )
    # It was measured with attention, as a whole.
    own = {KernelOp.attention} if attention is AttentionKind.fused_softmax else set[KernelOp]()
    return replace(kernels, tuned=tuned.taken | own), tuned


def tune(
    cases: Sequence[OperatorCase],
    work: OperatorWork,
    device: torch.device,
    *,
    earlier: Callable[[str], TunedOperators | None] = lambda _key: None,
    rounds: int = ROUNDS,
) -> TunedOperators:
    """Measures what the cache does not know and takes of each operator the faster implementation that is exact.

    Args:
        cases: what is to be tried.
        work: they are part of.
        device: where.
        earlier: what the run took at an earlier start, if that was measured under the same key: it goes on with that,
            or its numbers would not be those of a run that never stopped.
        rounds: timed steps of each candidate.

    Raises:
        DeviceBroken: a kernel left the device in a state in which nothing else can run. The cache knows of it: the next
            start leaves that operator to torch.
    """
    keys = [
        cache_key(device, {"op": case.op, "shape": case.shape, "deterministic": work.deterministic}) for case in cases
    ]
    key = cache_key(device, {"cases": keys})
    known = earlier(key)
    if known is not None:
        return replace(known, source="as at the run's earlier start")
    found, measured = list[TunedOperator](), False
    for case, case_key in zip(cases, keys, strict=True):
        file = cache_file(FOLDER, case_key)
        operator = _read(file)
        if operator is None:
            operator, measured = _measure(case, device, file, rounds), True
            if operator.torch.time_ms is not None:  # else there was nothing to compare with, such as for want of memory
                write_cached(file, asdict(operator))
        found.append(operator)
    source = f"{'measured' if measured else 'measured before'} on {device_name(device)}"
    return TunedOperators(frozenset(each.op for each in found if not each.why_torch), source, key, tuple(found))


def _measure(case: OperatorCase, device: torch.device, file: Path, rounds: int) -> TunedOperator:
    try:
        outcomes = compare(CANDIDATES, case.make(device), rounds)
    except DeviceBroken as broken:
        if broken.candidate == OURS:
            left_out = TuningResult(f"it left the device unusable when it was tried; remove {file} to try it again")
            write_cached(file, asdict(TunedOperator(case.op, case.shape, left_out, TuningResult())))
            raise DeviceBroken(f"{broken}; or start again, which leaves this operator to torch", OURS) from None
        raise
    except (RuntimeError, NotImplementedError) as failure:  # such as no memory for the inputs
        reason = f"cannot be tried: {type(failure).__name__}: {first_line(failure)}"
        return TunedOperator(case.op, case.shape, TuningResult(reason), TuningResult(reason))
    return TunedOperator(case.op, case.shape, outcomes[OURS], outcomes[TORCHS])


def _read(file: Path) -> TunedOperator | None:
    try:
        return TunedOperator.from_dict(read_cached(file))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def record_tuning(events: EventWriter, attention: TunedAttention, operators: TunedOperators | None) -> None:
    """Writes what was chosen into the run's events, if there was a choice."""
    if attention.outcomes:
        events.write(ATTENTION_EVENT, message=attention.text, **attention.to_dict())
    if operators is not None:
        events.write(OPERATORS_EVENT, message=operators.text, **operators.to_dict())


def earlier_attention(run_dir: Path, key: str) -> TunedAttention | None:
    """What the last start of a run that chose attention under this key has taken; None: there was none."""
    found = _last(run_dir, ATTENTION_EVENT, key)
    return None if found is None else TunedAttention.from_dict(found)


def earlier_operators(run_dir: Path, key: str) -> TunedOperators | None:
    """What the last start of a run that measured operators under this key has taken; None: there was none."""
    found = _last(run_dir, OPERATORS_EVENT, key)
    return None if found is None else TunedOperators.from_dict(found)


def _last(run_dir: Path, name: str, key: str) -> Mapping[str, Any] | None:
    same = [e for e in read_json_lines(run_dir / EVENTS_FILE) if e.get("event") == name and e.get("key") == key]
    return same[-1] if same else None
