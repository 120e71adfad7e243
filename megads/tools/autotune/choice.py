"""Autotuning before training: rank 0 measures the fastest kernels on its GPU, and all ranks use its result.

Attention: see `attention_trials`. For the other operators, under ops.impl=auto, megads' kernel is used if it
is accurate, bitwise reproducible and faster than PyTorch's operator on the run's shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from megads.api import (
    EVENTS_FILE,
    AttentionKind,
    AttentionWork,
    EventWriter,
    Implementation,
    Kernels,
    ModelConfig,
    ParallelGrid,
    RootConfig,
    read_json_lines,
)
from megads.config.root import attention_work
from megads.ops.config import KernelOp
from megads.parallel.context import context_positions
from megads.tools.autotune.attention_trials import TunedAttention, tune_attention
from megads.tools.autotune.benchmark import (
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
from megads.tools.autotune.graphs import kept_graphs
from megads.tools.autotune.operator_trials import CANDIDATES, OURS, TORCHS, OperatorCase, OperatorWork, operator_cases
from megads.train.setup import weight_dtype

ATTENTION_EVENT, OPERATORS_EVENT = "attention", "operators"
FOLDER = "operators"
"""Subfolder of the user's cache."""
KEPT_RATIO = 1.05
"""Maximum memory that a kernel saves for backward, as a multiple of PyTorch's, on which memory plans are based."""


@dataclass(frozen=True)
class TunedOperator:
    """Tuning result of one operator on one shape.

    Attributes:
        op: the operator.
        shape: the shape, for display.
        ours: result of megads' kernel.
        torch: result of PyTorch's operator.
    """

    op: KernelOp
    shape: str
    ours: TuningResult
    torch: TuningResult

    @property
    def why_torch(self) -> str:
        """Reason for using PyTorch's operator; empty if megads' kernel is used."""
        ours, theirs = self.ours, self.torch
        if ours.reason or ours.time_ms is None:
            return ours.reason or "not timed"
        if theirs.time_ms is None:
            return f"torch's operator not timed: {theirs.reason}"
        if not ours.repeats:
            return "not bitwise reproducible"
        kept, planned = ours.kept_bytes or 0, theirs.kept_bytes or 0
        if kept > KEPT_RATIO * planned:
            return f"keeps {kept:,} bytes, torch {planned:,}, by which memory is planned"
        return "" if ours.time_ms < theirs.time_ms else "slower"

    @property
    def row(self) -> tuple[str, ...]:
        """Row of the table: operator, shape, microseconds of both, error, chosen implementation."""
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
    """The operators of a run that use megads' kernels.

    Attributes:
        taken: operators for which megads' kernel is used.
        source: origin of the choice, for display.
        key: cache key of everything that the choice depends on.
        operators: measurements of each operator.
    """

    taken: frozenset[KernelOp]
    source: str
    key: str
    operators: tuple[TunedOperator, ...]

    @property
    def text(self) -> str:
        """Table of the results; times are forward plus backward, the error is megads' as a multiple of PyTorch's."""
        rows = [HEADER, *(found.row for found in self.operators)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows]
        lines = ["  ".join([*cells, row[-1]]) for cells, row in zip(padded, rows, strict=True)]
        return "\n  ".join([f"ops.impl=auto takes {len(self.taken)} of megads' kernels ({self.source})", *lines])

    def to_dict(self) -> dict[str, Any]:
        """Converts to a dict for an event."""
        operators = [asdict(found) for found in self.operators]
        return {"taken": sorted(self.taken), "source": self.source, "key": self.key, "operators": operators}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TunedOperators:
        """Reads what `to_dict` returned; raises ValueError, KeyError or TypeError on anything else."""
        operators = tuple(map(TunedOperator.from_dict, content["operators"]))
        return cls(frozenset(map(KernelOp, content["taken"])), str(content["source"]), str(content["key"]), operators)


def tuned_kernels(
    config: RootConfig, run_dir: Path, kernels: Kernels, grid: ParallelGrid, device: torch.device, events: EventWriter
) -> tuple[Kernels, list[AttentionKind]]:
    """Returns the fastest implementation of each operator, and of attention in each kind of layers; see
    `autotune_attention` and `autotune_operators`; CUDA graphs as an earlier start decided, see `graphs`."""
    attention = []
    for kind, _ in config.model.layer_kinds():
        work = attention_work(config, kind, cuda=device.type == "cuda", fused=kernels.loaded)
        tuned = autotune_attention(kind, work, grid, device, run_dir)
        record_tuning(events, tuned, None)
        attention.append(tuned.kind)
    kernels, operators = autotune_operators(kernels, operator_work(config), attention, grid, device, run_dir)
    record_tuning(events, None, operators)
    return kept_graphs(config, run_dir, kernels, grid, device, events), attention


def operator_work(config: RootConfig) -> OperatorWork:
    """Returns the shapes and dtypes of a rank's operators, for autotuning."""
    return OperatorWork(
        config.model,
        config.parallel,
        seq_len=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size,
        dtype=weight_dtype(config.train.precision),
        loss_chunk=config.ops.loss_chunk,
        deterministic=config.train.deterministic,
        float8=config.train.float8,
    )


def autotune_attention(
    model: ModelConfig, work: AttentionWork, grid: ParallelGrid, device: torch.device, run_dir: Path
) -> TunedAttention:
    """Chooses the run's attention kind, see `tune_attention`; collective over the world.

    Args:
        model: model config.
        work: attention of one rank.
        grid: the ranks.
        device: device of this rank.
        run_dir: the run directory, whose events hold the choice of an earlier start.

    Raises:
        ConfigError: the requested kind does not run, or no kind does; raised on every rank.
    """

    def choose() -> TunedAttention:
        places_s = None
        if work.context > 1 and work.seq_len is not None:
            places_s = context_positions(work.seq_len, grid.cp_outer.rank, grid.cp_outer.size, device)
        return tune_attention(
            model, work, device, places_s=places_s, earlier=lambda key: recorded_attention(run_dir, key)
        )

    return grid.control.first_decides(choose, TunedAttention)


def autotune_operators(
    kernels: Kernels,
    work: OperatorWork,
    attention: Sequence[AttentionKind],
    grid: ParallelGrid,
    device: torch.device,
    run_dir: Path,
) -> tuple[Kernels, TunedOperators | None]:
    """Chooses between megads' and PyTorch's kernels under ops.impl=auto on GPUs; collective over the world if it
    measures.

    Args:
        kernels: kernels loaded by `megads.ops.resolve.load`.
        work: operators of one rank.
        attention: attention kinds of the run's layers.
        grid: the ranks.
        device: device of this rank.
        run_dir: the run directory, whose events hold the result of an earlier start.

    Returns:
        The kernels with every implementation decided, and the measurements; None if nothing was measured.

    Raises:
        ConfigError: a kernel left the device unusable; raised on every rank.
    """
    if Implementation.auto not in (kernels.model, kernels.optimizer):
        return kernels, None
    cases = operator_cases(work, kernels)
    tuned = grid.control.first_decides(
        lambda: tune(cases, work, device, earlier=lambda key: recorded_operators(run_dir, key)),
        TunedOperators,
    )
    # The fused softmax was measured as a part of attention.
    own = {KernelOp.attention} if AttentionKind.fused_softmax in attention else set[KernelOp]()
    return replace(kernels, tuned=tuned.taken | own), tuned


def tune(
    cases: Sequence[OperatorCase],
    work: OperatorWork,
    device: torch.device,
    *,
    earlier: Callable[[str], TunedOperators | None] = lambda _key: None,
    rounds: int = ROUNDS,
) -> TunedOperators:
    """Measures operators that are not in the cache, and chooses the fastest accurate implementation of each.

    Args:
        cases: operators and shapes to measure.
        work: operators of the rank, which the cases are part of.
        device: device to measure on.
        earlier: returns the result of an earlier start of the run with the same key. It is reused, as other kernels
            would make the run numerically different from an uninterrupted one.
        rounds: number of timed steps of each candidate.

    Raises:
        DeviceBroken: a kernel left the device unusable. This is recorded in the cache, so that the next start uses
            PyTorch's operator.
    """
    keys = [
        cache_key(device, {"op": case.op, "shape": case.shape, "deterministic": work.deterministic}) for case in cases
    ]
    key = cache_key(device, {"cases": keys})
    known = earlier(key)
    if known is not None:
        return replace(known, source="as in the run's earlier start")
    found, measured = list[TunedOperator](), False
    for case, case_key in zip(cases, keys, strict=True):
        file = cache_file(FOLDER, case_key)
        operator = _read(file)
        if operator is None:
            operator, measured = _measure(case, device, file, rounds), True
            if operator.torch.time_ms is not None:  # else PyTorch's operator could not run, for example out of memory
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
            raise DeviceBroken(f"{broken}; or start again, which uses torch for this operator", OURS) from None
        raise
    except (RuntimeError, NotImplementedError) as failure:  # for example no memory for the inputs
        reason = f"trial failed: {type(failure).__name__}: {first_line(failure)}"
        return TunedOperator(case.op, case.shape, TuningResult(reason), TuningResult(reason))
    return TunedOperator(case.op, case.shape, outcomes[OURS], outcomes[TORCHS])


def _read(file: Path) -> TunedOperator | None:
    try:
        return TunedOperator.from_dict(read_cached(file))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def record_tuning(events: EventWriter, attention: TunedAttention | None, operators: TunedOperators | None) -> None:
    """Writes the tuning results to the run's events, if anything was measured."""
    if attention is not None and attention.outcomes:
        events.write(ATTENTION_EVENT, message=attention.text, **attention.to_dict())
    if operators is not None:
        events.write(OPERATORS_EVENT, message=operators.text, **operators.to_dict())


def recorded_attention(run_dir: Path, key: str) -> TunedAttention | None:
    """Returns the attention that the run's last start with this key used; None if there was none."""
    found = _last(run_dir, ATTENTION_EVENT, key)
    return None if found is None else TunedAttention.from_dict(found)


def recorded_operators(run_dir: Path, key: str) -> TunedOperators | None:
    """Returns the operators that the run's last start with this key used; None if there was none."""
    found = _last(run_dir, OPERATORS_EVENT, key)
    return None if found is None else TunedOperators.from_dict(found)


def _last(run_dir: Path, name: str, key: str) -> Mapping[str, Any] | None:
    same = [e for e in read_json_lines(run_dir / EVENTS_FILE) if e.get("event") == name and e.get("key") == key]
    return same[-1] if same else None
