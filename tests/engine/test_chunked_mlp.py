"""MLPs in chunks of the sequence train the same model as one process: N1, N3, N8 and N10 on large weights; weight
gradients are complete after the last chunk, and no tensor has the MLP's features of all tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megads.config.layout_checks import check_operators
from megads.errors import ConfigError
from megads.model.config import BlockConfig, MLPKind, ModelConfig
from megads.model.mlp import MLP
from megads.model.moe_config import MoEConfig
from megads.ops.config import TORCH, Compile, Float8, Float8Recipe, Implementation, OpsConfig
from megads.parallel import chunked_mlp
from megads.parallel.config import ContextParallelKind, Offload, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.parallel.weight_gradients import WeightGradients
from tests import parity
from tests.distributed import run_ranks
from tests.engine.test_bf16_parity import FIRST_LOSS_BOUND
from tests.engine.test_model_features import bf16, faults, first_loss_in_bf16, reference
from tests.engine.test_model_features import scenario as features
from tests.engine.test_moe import scenario as expert_scenario
from tests.parity import MODEL, Scenario, build_engine, scenario_with, step_batches, train_layout

pytestmark = pytest.mark.distributed

CHUNKED = OpsConfig(Implementation.torch, mlp_chunk=9)
"""Samples have 24 tokens, micro-batches two of them: chunks of unequal lengths."""
FUSED = replace(CHUNKED, impl=Implementation.fused)
LAYOUTS = {
    "single": ParallelConfig(),
    "recomputed, offloaded": ParallelConfig(recompute=Recompute.full, offload=Offload.activations),
    "dp2, small buckets": ParallelConfig(dp=2, bucket_elements=parity.SMALL_BUCKET),
    "tp2": ParallelConfig(tp=2),
    "tp2sp, in parts": ParallelConfig(tp=2, sequence_parallel=True, tp_chunks=2),
    "pp2 zb_h1": ParallelConfig(pp=2, schedule=ScheduleName.zb_h1),
    "tp2pp2sp zb_v": ParallelConfig(tp=2, pp=2, sequence_parallel=True, schedule=ScheduleName.zb_v),
    "cp2": ParallelConfig(cp=2),
    "cp2 ulysses": ParallelConfig(cp=2, cp_kind=ContextParallelKind.ulysses, recompute=Recompute.selective),
    "zero2dp2": ParallelConfig(dp=2, zero_stage=2),
    "zero3tp2dp2": ParallelConfig(tp=2, dp=2, zero_stage=3),
    "zero3dp2, recomputed": ParallelConfig(dp=2, zero_stage=3, recompute=Recompute.full),
}


def bloom(**changes: Any) -> Scenario:
    return scenario_with(**{"steps": 2, "masked": True, "model": MODEL} | changes)


@pytest.mark.quick("tp2sp, in parts-kernels", "pp2 zb_h1-kernels", "zero3tp2dp2-torch")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("ops", [CHUNKED, FUSED], ids=["torch", "kernels"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_train_the_reference_model(layout: str, ops: OpsConfig) -> None:
    """Catches a gradient of one chunk only, a gradient reduced before its last chunk, chunks of another rank's tokens
    (N1, N3, N8, N10)."""
    run = train_layout(bloom(ops=ops), LAYOUTS[layout])
    assert faults(run, parity.reference_of(bloom())) == []


@pytest.mark.quick("llama-tp2")
@pytest.mark.parametrize(("model", "layout"), [("llama", "tp2"), ("gemma3", "cp2"), ("smollm3", "pp2 zb_h1")])
def test_chunks_of_other_mlps_train_the_reference_model(model: str, layout: str) -> None:
    """Catches gates of other tokens than what they gate, and a missing bias."""
    run = train_layout(features(model, ops=CHUNKED), LAYOUTS[layout])
    assert faults(run, reference(model)) == []


@pytest.mark.slow
def test_a_shared_expert_is_computed_in_chunks() -> None:
    """Catches chunks of routed rows, and a shared expert that is left out."""
    whole = expert_scenario("deepseek")
    run = train_layout(replace(whole, ops=CHUNKED), ParallelConfig(dp=2, ep=2))
    assert faults(run, parity.reference_of(whole)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
@pytest.mark.parametrize("layout", ["tp2sp, in parts", "zero2dp2"])
def test_the_first_loss_in_bf16_is_within_n4(layout: str, impl: Implementation) -> None:
    """N4. Catches a conversion between chunks."""
    run = train_layout(bf16("llama", ops=replace(CHUNKED, impl=impl)), LAYOUTS[layout])
    assert abs(run.losses[0] / first_loss_in_bf16("llama") - 1) <= FIRST_LOSS_BOUND


@pytest.mark.slow
def test_chunks_work_in_compiled_blocks() -> None:
    """Catches an MLP that torch.compile traces, whose backward pass would compute no chunk again."""
    run = train_layout(bloom(ops=replace(CHUNKED, compile=Compile.blocks)), ParallelConfig())
    assert faults(run, parity.reference_of(bloom())) == []


def gradients_that_are_complete_after_each_chunk() -> None:
    inner = WeightGradients.give

    def give(self: WeightGradients, weight: Any, gradient: Any) -> Any:
        found = inner(self, weight, gradient)
        if self._aliases is not None and self.main_grads is not None:
            self.main_grads.done(self._aliases[weight])
        return found

    WeightGradients.give = give


def a_chunk_that_is_left_out() -> None:
    inner = chunked_mlp._InChunks.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.parts = ctx.parts[:-1]
        return inner(ctx, grad)

    chunked_mlp._InChunks.backward = staticmethod(backward)


@pytest.mark.quick("a_chunk_that_is_left_out")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("defect", [gradients_that_are_complete_after_each_chunk, a_chunk_that_is_left_out])
def test_defects_are_seen(defect: Callable[[], None]) -> None:
    """Catches parity that gradients of some chunks would pass."""
    run = train_layout(bloom(ops=FUSED), LAYOUTS["dp2, small buckets"], defect)
    assert faults(run, parity.reference_of(bloom()))


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that operators return, parameters' shapes excluded."""

    def __init__(self, leaving_out: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.elements, self._leaving_out = 0, leaving_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and tuple(x.shape) not in self._leaving_out:
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("kind", [MLPKind.gelu, MLPKind.swiglu, MLPKind.relu2])
def test_no_tensor_has_the_features_of_all_tokens(kind: MLPKind) -> None:
    """Catches intermediate features that are whole in the forward or the backward pass, and gradients in the weights'
    dtype that are added up there."""
    config = ModelConfig(hidden_size=16, num_heads=2, vocab_size=64, mlp=kind, ffn_size=512, init_std=0.2)
    torch.manual_seed(0)
    mlp = MLP(config).to(torch.float64)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x_bth = torch.randn(2, 96, 16, dtype=torch.float64)
    results = []
    for chunk in (None, 20):
        mlp.kernels = replace(TORCH, mlp_chunk=chunk)
        mlp.zero_grad(set_to_none=True)
        own_bth = x_bth.clone().requires_grad_()
        weights = {tuple(p.shape) for p in mlp.parameters()} | {
            tuple(p.T.shape) for p in mlp.parameters() if p.ndim == 2
        }
        with Largest(weights) as largest:
            out_bth = mlp(own_bth)
            out_bth.square().sum().backward()
        results.append((largest.elements, [out_bth, own_bth.grad, *(p.grad for p in mlp.parameters())]))
        with torch.no_grad():
            assert torch.allclose(mlp(x_bth), out_bth)
    (whole, expected), (in_chunks, found) = results
    opened = mlp.first.out_features
    assert whole == 2 * 96 * opened
    assert in_chunks == max(20 * opened, 2 * 96 * 16)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(expected, found, strict=True))


def test_bf16_gradients_of_chunks_are_added_in_fp32() -> None:
    """Catches gradients that are rounded once for each chunk."""
    config = ModelConfig(hidden_size=16, num_heads=2, vocab_size=64)
    torch.manual_seed(0)
    mlp = MLP(config)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    mlp, x_bth = mlp.to(torch.bfloat16), torch.randn(1, 4096, 16).to(torch.bfloat16)
    errors = []
    exact = MLP(config).double()
    exact.load_state_dict(mlp.state_dict())
    exact(x_bth.double()).sum().backward()
    for chunk in (None, 4):
        mlp.kernels = replace(TORCH, mlp_chunk=chunk)
        mlp.zero_grad(set_to_none=True)
        mlp(x_bth).sum().backward()
        pairs = zip(mlp.parameters(), exact.parameters(), strict=True)
        errors.append(max(float((p.grad.double() - q.grad).norm() / q.grad.norm()) for p, q in pairs))
    assert errors[1] <= 2 * errors[0]


@contextmanager
def counted_passes() -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    original: Any = MLP._whole

    def counting(self: Any, hidden_bsh: Tensor) -> Tensor:
        calls["with gradients" if torch.is_grad_enabled() else "without"] += 1
        return original(self, hidden_bsh)

    MLP._whole = counting  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        MLP._whole = original  # type: ignore[method-assign]


def calls_of_a_step(parallel: ParallelConfig) -> tuple[Counter[str], int]:
    scenario = bloom(ops=CHUNKED)
    with counted_passes() as calls:
        engine = build_engine(scenario, parallel)
        batches = step_batches(scenario, 0)
        engine.step(batches, scenario.lr)
    return calls, len(batches) * scenario.model.num_layers


@pytest.mark.parametrize("mode", [Recompute.none, Recompute.full])
def test_each_chunk_is_computed_again_once(mode: Recompute) -> None:
    """Catches chunks that are computed with gradients in the forward pass, where they would be saved."""
    (calls, blocks), *_ = run_ranks(calls_of_a_step, 1, ParallelConfig(recompute=mode))
    chunks = -(-2 * 24 // 9)
    forward = 2 if mode is Recompute.full else 1
    assert calls == {"with gradients": chunks * blocks, "without": forward * chunks * blocks}


REFUSED = {
    "parallel_block": ({"parallel_block": True}, {}, r"model\.parallel_block = true"),
    "plugin": ({"block": BlockConfig("mine")}, {}, r"model\.block\.name = mine"),
    "experts": (
        {"moe": MoEConfig(num_experts=4, expert_ffn_size=8)}, {}, r"model\.moe\.num_experts = 4.*neither a shared"
    ),
    "FP8": ({}, {"recipe": Float8Recipe.tensorwise}, r"train\.fp8 = tensorwise"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_without_divisible_mlps_are_refused(case: str) -> None:
    """Catches an option that does nothing, or changes what is computed."""
    changes, fp8, message = REFUSED[case]
    model = ModelConfig(vocab_size=64, num_layers=4, **changes)
    with pytest.raises(
        ConfigError, match=rf"ops\.mlp_chunk = 9 is not supported with {message}.*remove ops\.mlp_chunk"
    ):
        check_operators(CHUNKED, Float8(**fp8), model, ParallelConfig())
    with pytest.raises(ConfigError, match=r"ops\.mlp_chunk = 0: must be at least 1"):
        OpsConfig(mlp_chunk=0).check()
