"""The operators that ops.impl=auto benchmarks, compared with those that a run calls; with CPU kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megads.engine import build_train_engine
from megads.engine.interface import EngineSpec
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.moe_config import MoEConfig
from megads.ops.config import OPTIMIZER_OPS, Float8, Float8Recipe, Implementation, KernelOp, Kernels, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.tools.autotune.benchmark import compare
from megads.tools.autotune.operator_trials import CANDIDATES, OURS, OperatorWork, operator_cases
from megads.tools.verify.layout import build_engine
from megads.tools.verify.scenario import Scenario, step_batches
from tests.distributed import run_ranks

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")],
)
AUTO = Kernels(Implementation.auto, Implementation.auto)
BLOOM = ModelConfig(num_layers=3, hidden_size=48, num_heads=6, vocab_size=509, max_seq_len=64, embedding_norm=True)
LLAMA = replace(
    BLOOM, num_kv_heads=2, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, position=Position.rope, hidden_dropout=0.1,
    tie_embeddings=False, bias=False,
)  # fmt: skip
# Every token chooses both experts, so that the load is even.
EXPERTS = replace(LLAMA, moe=MoEConfig(2, expert_ffn_size=24))
TENSORWISE, ROWWISE = Float8(Float8Recipe.tensorwise), Float8(Float8Recipe.rowwise)
ALWAYS = {KernelOp.norm, KernelOp.add_norm, KernelOp.cross_entropy}
OPS = {"bloom": ALWAYS | {KernelOp.gelu}, "llama": ALWAYS | {KernelOp.swiglu, KernelOp.rotary, KernelOp.dropout}}
NOT_TRIED = {"attention"}
"""Attention is tuned separately."""

Called = set[tuple[Any, ...]]


class Calls(TorchDispatchMode):
    """Records which of megads' operators are called, with the shapes, strides and dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Called = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megads":
            name, tensors = func.__name__.split(".")[0], [x for x in args if isinstance(x, Tensor)]
            if name.startswith("cross_entropy"):  # one pass on a CPU with the whole vocabulary, unlike on a GPU
                name, tensors = "cross_entropy", tensors[:1]
            shapes = tuple((tuple(x.shape), x.stride(), x.dtype) for x in tensors)
            pieces = tuple(map(tuple, tensors[1].tolist())) if name == "square_sums" else ()
            self.found.add((name, shapes, pieces))
        return func(*args, **(kwargs or {}))


def work_of(scenario: Scenario, parallel: ParallelConfig) -> OperatorWork:
    return OperatorWork(
        scenario.model, parallel, scenario.seq_len, scenario.micro_batch_size, scenario.dtype,
        scenario.ops.loss_chunk, float8=scenario.float8,
    )  # fmt: skip


def calls_of_a_run(scenario: Scenario, parallel: ParallelConfig) -> tuple[Called, Called]:
    """Returns the calls of a run's second step on this rank, and those of its trials."""
    engine = build_engine(scenario, parallel)
    engine.step(step_batches(scenario, 0, engine.grid.dp.rank, engine.grid.dp.size), scenario.lr)
    batches = step_batches(scenario, 1, engine.grid.dp.rank, engine.grid.dp.size)
    with Calls() as run:
        engine.step(batches, scenario.lr)
    with Calls() as tried:
        for case in operator_cases(work_of(scenario, parallel), AUTO):
            if case.op is KernelOp.grouped_linear:  # its load is uneven; on a CPU it is a loop
                continue
            forward, backward = case.make(torch.device("cpu")).step(CANDIDATES[OURS])
            backward(forward())
    return run.found, tried.found


@pytest.mark.quick("tp2sp")
@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("model", "layout", "float8"),
    [
        (LLAMA, {"tp": 2, "sequence_parallel": True}, Float8()),
        (BLOOM, {"pp": 2, "bucket_elements": 9000}, Float8()),
        (BLOOM, {"dp": 2}, Float8()),
        (EXPERTS, {"dp": 2, "ep": 2}, Float8()),
        (LLAMA, {"tp": 2}, TENSORWISE),
        (LLAMA, {"tp": 2, "sequence_parallel": True}, ROWWISE),
        (BLOOM, {}, ROWWISE),
    ],
    ids=["tp2sp", "pp2", "dp2", "ep2", "tp2 FP8", "tp2sp FP8 rows", "FP8 rows"],
)
def test_trials_are_of_the_runs_own_shapes(model: ModelConfig, layout: dict[str, Any], float8: Float8) -> None:
    """Catches an operator that is benchmarked with shapes, dtypes or strides that the run does not have, and one that
    the run calls and no trial covers, which would always use PyTorch's implementation."""
    ops = OpsConfig(Implementation.fused, loss_chunk=12)
    scenario = Scenario(model, precision="bfloat16", ops=ops, float8=float8)
    # Trials are of runs on GPUs, which align the rows of the vocabulary.
    parallel = ParallelConfig(**layout, vocab_multiple=128)
    run, tried = run_ranks(calls_of_a_run, parallel.world_size, scenario, parallel)[0]
    if parallel.pp > 1:  # the loss is computed on another rank
        tried = {call for call in tried if call[0] != "cross_entropy"}
    assert not tried - run
    names = {call[0] for call in run if not any(part in call[0] for part in NOT_TRIED)}
    assert names == {call[0] for call in tried}


def calls_with(model: ModelConfig, taken: frozenset[KernelOp]) -> set[str]:
    """Returns the names of megads' operators that a step calls if auto has chosen these."""
    scenario = Scenario(model, precision="bfloat16")
    parallel = ParallelConfig()
    spec = EngineSpec(
        model, parallel, scenario.optim, build_grid(parallel, 0, 1), precision=torch.bfloat16, micro_batch_size=2,
        seed=0, device=torch.device("cpu"), kernels=replace(AUTO, tuned=taken, loss_chunk=12),
    )  # fmt: skip
    engine = build_train_engine(spec)
    with Calls() as calls:
        engine.step(step_batches(scenario, 0), scenario.lr)
    return {call[0] for call in calls.found}


def calls_of_each(model: ModelConfig) -> dict[KernelOp, set[str]]:
    load(OpsConfig(Implementation.fused), print, cuda=False)
    return {op: calls_with(model, frozenset({op})) for op in OPS["llama"] | OPTIMIZER_OPS} | {
        KernelOp.linear: calls_with(model, frozenset())
    }


@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
def test_exactly_the_chosen_operators_are_called() -> None:
    """Catches a chosen operator that still uses PyTorch's implementation, and one that is used without being chosen."""
    backward = {
        KernelOp.norm: {"norm_forward", "norm_backward"},
        KernelOp.add_norm: {"add_norm_forward", "norm_backward"},
    }
    backward |= {
        KernelOp.swiglu: {"swiglu_forward", "swiglu_backward"},
        KernelOp.adamw: {"adamw_step"},
        KernelOp.linear: set(),
    }
    for op, called in run_ranks(calls_of_each, 1, LLAMA)[0].items():
        assert called == backward.get(op, {op.value}), op


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("name", "model"), [("bloom", BLOOM), ("llama", LLAMA), ("experts", EXPERTS)])
def test_correct_kernels_pass_their_trials(name: str, model: ModelConfig, dtype: torch.dtype, device: str) -> None:
    """Catches a trial that no kernel can pass, for example because its reference computes something else, and one that
    times PyTorch's operator twice."""
    load(OpsConfig(Implementation.fused), print, cuda=device == "cuda")
    float8 = {"bloom": TENSORWISE, "llama": ROWWISE}.get(name, Float8())
    work = OperatorWork(model, ParallelConfig(), 33, 2, dtype, loss_chunk=17, float8=float8)
    tried = set()
    for case in operator_cases(work, AUTO):
        trial = case.make(torch.device(device))
        with Calls() as calls:
            outcomes = compare(CANDIDATES, trial, rounds=1)
        assert all(found.time_ms and found.repeats for found in outcomes.values()), (case, outcomes)
        assert calls.found or (device, case.op) == ("cuda", KernelOp.linear)  # there the kernel is cuBLAS'
        tried.add(case.op)
    experts = {KernelOp.grouped_linear} if model.moe.enabled else set()
    half = {KernelOp.linear} | experts if dtype.itemsize == 2 else set()
    half |= {KernelOp.quantize} if float8.blocks(model.num_layers) else set()
    assert tried == OPS["bloom" if name == "bloom" else "llama"] | OPTIMIZER_OPS | half


@pytest.mark.parametrize(
    ("kernels", "stage", "tried"),
    [
        (Kernels(Implementation.auto, Implementation.torch), 1, OPS["bloom"] | {KernelOp.linear}),
        (AUTO, 2, OPS["bloom"]),
        (Kernels(Implementation.fused, Implementation.fused), 1, set()),
    ],
)
def test_requested_operators_are_not_tried(kernels: Kernels, stage: int, tried: set[KernelOp]) -> None:
    """Catches a trial that overrides optim.impl, or of the optimizer or main_grad although DeepSpeed brings its own."""
    work = OperatorWork(BLOOM, ParallelConfig(zero_stage=stage), 32, 2, torch.bfloat16)
    assert {case.op for case in operator_cases(work, kernels)} == tried
