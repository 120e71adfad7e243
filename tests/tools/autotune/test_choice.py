"""Rank 0 measures for all ranks, a resume keeps the run's choice, and only faster exact kernels are chosen."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.monitor.console import render_event
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import FUSED, TORCH, Implementation, KernelOp, Kernels, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.tools.autotune.attention_trials import TunedAttention, attention_key
from megads.tools.autotune.benchmark import DeviceBroken, TuningResult
from megads.tools.autotune.choice import (
    ATTENTION_EVENT,
    FOLDER,
    TunedOperator,
    TunedOperators,
    autotune_attention,
    autotune_operators,
    record_tuning,
    recorded_attention,
    recorded_operators,
    tune,
)
from megads.tools.autotune.operator_trials import OperatorCase, OperatorTrial, OperatorWork
from tests.distributed import run_ranks

CPU = torch.device("cpu")
AUTO = Kernels(Implementation.auto, Implementation.auto)
MODEL = ModelConfig(hidden_size=64, num_heads=4)
WORK = replace(
    MODEL.attention_work(), bf16=True, cuda=True, impl=Implementation.torch, seq_len=32, micro_batch_size=1, context=2
)


def settled(run_dir: Path) -> tuple[TunedAttention, TunedOperators, str]:
    """A rank's choices, and the error for a kernel that cannot run; each rank has its own cache."""
    load(OpsConfig(Implementation.fused), print, cuda=False)
    rank = dist.get_rank()
    os.environ["XDG_CACHE_HOME"] = str(run_dir / f"cache_{rank}")
    parallel = ParallelConfig(cp=2)
    grid = build_grid(parallel, rank, 2)
    choice = autotune_attention(MODEL, WORK, grid, CPU, run_dir)
    work = OperatorWork(MODEL, parallel, 32, 1, torch.bfloat16, loss_chunk=8)
    kernels, operators = autotune_operators(AUTO, work, [AttentionKind.fused_softmax], grid, CPU, run_dir)
    assert operators is not None and kernels.tuned == operators.taken | {KernelOp.attention}
    with pytest.raises(ConfigError) as raised:
        autotune_attention(replace(MODEL, attention=AttentionKind.cudnn), WORK, grid, CPU, run_dir)
    return choice, operators, str(raised.value)


@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
def test_rank_0_chooses_kernels_for_all_ranks(tmp_path: Path) -> None:
    """Catches ranks that each measure for themselves, so that their replicas would diverge, and a rank that hangs
    because another one failed."""
    (first, operators, error), (other, others, told) = run_ranks(settled, 2, tmp_path)
    assert operators == others and operators.source == "measured on cpu" and len(operators.operators) == 7
    assert first == other and first.source == "measured" and first.kind is AttentionKind.sdpa
    assert error == told and "cudnn does not run" in error
    assert (tmp_path / "cache_0").exists() and not (tmp_path / "cache_1").exists()


def test_a_start_reuses_the_choice_recorded_for_its_shape_and_device(tmp_path: Path) -> None:
    """Catches an event that cannot be read back, one for another shape or device that is used for this one, and an
    event where nothing was chosen."""
    key = attention_key(WORK, CPU)
    outcomes = {
        "flash": TuningResult(error=0.7, repeats=True, time_ms=1.25, kept_bytes=7),
        "flex": TuningResult("too old"),
    }
    choice = TunedAttention(AttentionKind.flash, "measured", key, outcomes)
    events = EventWriter(tmp_path)
    record_tuning(events, TunedAttention(AttentionKind.auto, "nothing is measured"), None)
    assert not (tmp_path / "events.jsonl").read_text() and recorded_attention(tmp_path, key) is None
    record_tuning(events, replace(choice, kind=AttentionKind.sdpa), None)
    record_tuning(events, choice, None)
    record_tuning(events, replace(choice, key="another", kind=AttentionKind.sdpa), None)
    assert recorded_attention(tmp_path, key) == choice
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (
        lines[1]["event"] == ATTENTION_EVENT and lines[1]["message"] == "flash (measured); flash 1.25 ms; flex: too old"
    )


Body = Callable[[bool, Tensor], Tensor]


def slowly(kernels: Kernels, x: Tensor) -> Tensor:
    if kernels is not FUSED:
        time.sleep(5e-3)
    return 2 * x


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2.01 * grad


def _raising(kernels: Kernels, x: Tensor) -> Tensor:
    if kernels is FUSED:
        raise RuntimeError("no kernel image is available\nmore of it")
    return 2 * x


SHIFTS = itertools.cycle((torch.zeros(99), F.one_hot(torch.tensor(0), 99) * 1.2e-7))
BODIES: dict[KernelOp, tuple[Body, str]] = {
    KernelOp.norm: (slowly, ""),
    KernelOp.gelu: (lambda kernels, x: slowly(TORCH if kernels is FUSED else FUSED, x), "slower"),
    KernelOp.swiglu: (
        lambda kernels, x: slowly(kernels, x) * (1.01 if kernels is FUSED else 1.0),
        "times that of plain torch",
    ),
    KernelOp.rotary: (
        lambda kernels, x: _WrongGradient.apply(x) if kernels is FUSED else slowly(kernels, x),
        "times that of plain torch",
    ),
    KernelOp.dropout: (_raising, "RuntimeError: no kernel image is available"),
    KernelOp.add_norm: (
        lambda kernels, x: 2 * x + next(SHIFTS) if kernels is FUSED else slowly(kernels, x),
        "not bitwise reproducible",
    ),
}
CALLED: list[KernelOp] = []


def case_of(op: KernelOp, body: Body, shape: str = "9") -> OperatorCase:
    """A case for an operator whose kernels are `body`, on inputs x for which 2 x / 3 is inexact in fp32."""

    def outputs(kernels: Kernels, x: Tensor) -> tuple[Tensor]:
        CALLED.append(op)
        return (body(kernels, x) / 3,)

    def make(device: torch.device) -> OperatorTrial:
        # SHIFTS change the first element, which must be small: otherwise a third of it may round to the same value.
        return OperatorTrial(op, outputs, [torch.linspace(0.1, 0.9, 99)], [torch.linspace(0.2, 1.0, 99)])

    return OperatorCase(op, shape, make)


CASES = [case_of(op, body) for op, (body, _) in BODIES.items()]
WORK_OF_OPERATORS = OperatorWork(MODEL, ParallelConfig(), 32, 1, torch.float32)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megads" / FOLDER


@pytest.mark.always
def test_only_an_exact_reproducible_and_faster_kernel_is_chosen(own_cache: Path) -> None:
    """Catches the choice of a kernel that is wrong in its output or gradient, slow, not reproducible or unable to run;
    a failing kernel that ends the run instead of being left out; a reason that is not reported; trials that are
    repeated at every start; and a truncated cache, or one for another shape, that is used."""
    tuned = tune(CASES, WORK_OF_OPERATORS, CPU, rounds=3)
    assert tuned.taken == {KernelOp.norm} and tuned.source == "measured on cpu"
    for found in tuned.operators:
        assert BODIES[found.op][1] in found.why_torch and bool(found.why_torch) == (found.op is not KernelOp.norm)
    head, columns, *rows = tuned.text.splitlines()
    assert head == "ops.impl=auto takes 1 of megads' kernels (measured on cpu)" and len(rows) == len(CASES)
    assert columns.split() == ["operator", "shape", "megads", "us", "torch", "us", "error", "taken"]
    assert rows[0].split()[0] == "norm" and rows[0].endswith("megads") and "torch: RuntimeError: no ker" in tuned.text
    CALLED.clear()
    again = tune(CASES, WORK_OF_OPERATORS, CPU)
    assert again == replace(tuned, source="measured before on cpu") and not CALLED
    files = sorted(own_cache.iterdir())
    files[0].write_text(files[0].read_text()[:-20])
    assert tune(CASES, WORK_OF_OPERATORS, CPU, rounds=1).source == "measured on cpu" and len(set(CALLED)) == 1
    CALLED.clear()
    other = [*CASES[1:], case_of(KernelOp.norm, slowly, "10")]
    assert tune(other, WORK_OF_OPERATORS, CPU, rounds=1).key != tuned.key and set(CALLED) == {KernelOp.norm}


def test_a_trial_that_ran_out_of_memory_is_repeated(own_cache: Path) -> None:
    """Catches a kernel left out permanently because another program held the GPU's memory during its only trial."""
    full = [True]

    def make(device: torch.device) -> OperatorTrial:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return CASES[0].make(device)

    case = replace(CASES[0], make=make)
    assert "out of memory" in tune([case], WORK_OF_OPERATORS, CPU, rounds=3).operators[0].why_torch
    full.clear()
    assert tune([case], WORK_OF_OPERATORS, CPU, rounds=3).taken == {KernelOp.norm}


def test_a_resumed_run_keeps_its_kernels(tmp_path: Path, own_cache: Path) -> None:
    """Catches a resume that uses other kernels than the run had, because the cache was removed or measured again."""
    tuned = tune(CASES, WORK_OF_OPERATORS, CPU, rounds=1)
    before = replace(tuned, taken=frozenset({KernelOp.gelu}))
    untuned = TunedAttention(AttentionKind.auto, "nothing is measured")
    record_tuning(EventWriter(tmp_path), untuned, replace(before, key="another"))
    record_tuning(EventWriter(tmp_path), untuned, before)
    shutil.rmtree(own_cache)
    CALLED.clear()
    found = tune(CASES, WORK_OF_OPERATORS, CPU, earlier=lambda key: recorded_operators(tmp_path, key))
    assert found == replace(before, source="as in the run's earlier start") and not CALLED
    assert "operators: ops.impl=auto takes" in render_event(next(iter(read_json_lines(tmp_path / "events.jsonl"))))


def test_a_kernel_that_broke_the_device_is_not_tried_again(own_cache: Path) -> None:
    """Catches a kernel with an illegal memory access that ends every start of a run in the same way."""

    def make(device: torch.device) -> OperatorTrial:
        def break_it(kernels: Kernels, x: Tensor) -> tuple[Tensor]:
            if kernels is FUSED:
                trial.device = torch.device("meta")  # nothing can be read from it, as from a GPU after such an access
                raise RuntimeError("an illegal memory access was encountered")
            return (x,)

        trial = OperatorTrial(KernelOp.gelu, break_it, [torch.rand(99)], [torch.rand(99)])
        return trial

    cases = [OperatorCase(KernelOp.gelu, "9", make), CASES[0]]
    with pytest.raises(DeviceBroken, match=r"auto, gelu, = megads left .*illegal memory.*ops\.impl=torch.*start again"):
        tune(cases, WORK_OF_OPERATORS, CPU, rounds=1)
    again = tune(cases, WORK_OF_OPERATORS, CPU, rounds=3)
    assert again.taken == {KernelOp.norm} and "left the device unusable" in again.operators[0].why_torch


def test_a_kernel_that_exceeds_planned_memory_is_not_chosen() -> None:
    """Catches a faster kernel that saves more memory than torch's operator, on which the run's memory plan is based."""
    ours = TuningResult(error=1.0, repeats=True, time_ms=1.0, kept_bytes=1000)
    theirs = replace(ours, time_ms=2.0)
    assert not TunedOperator(KernelOp.norm, "9", ours, theirs).why_torch
    assert "keeps 1,100 bytes" in TunedOperator(KernelOp.norm, "9", replace(ours, kept_bytes=1100), theirs).why_torch
    assert "torch's operator not timed" in TunedOperator(KernelOp.norm, "9", ours, TuningResult("no memory")).why_torch
