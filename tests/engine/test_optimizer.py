"""Tests the optimizer against stock DeepSpeed and on its own: bytes sent, overlap, reductions over other groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn import Parameter

import megads.engine.stage_pipeline
import megads.parallel.embedding
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.store import save_checkpoint
from megads.engine import build_train_engine
from megads.engine.bucket import Bucket
from megads.engine.interface import EngineSpec, TrainEngine
from megads.engine.optimizer import BucketOptimizer, NamedParameter
from megads.ops.config import Implementation, Kernels, OpsConfig
from megads.ops.resolve import load
from megads.optim.config import OptimConfig
from megads.optim.masters import CLIP_EPSILON, clip_factor
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.parallel.sharding import ParameterPlacement
from tests import parity
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, MODEL, SMALL_BUCKET, Collective, build_engine, recorded_collectives, scenario_with
from tests.stock_deepspeed import build_stock

pytestmark = pytest.mark.distributed

UNTIED = scenario_with(model=replace(MODEL, tie_embeddings=False), precision="bfloat16")


def _bytes_and_overlap(dp: int) -> dict[str, Any]:
    engine = build_engine(UNTIED, ParallelConfig(dp=dp, bucket_elements=SMALL_BUCKET))
    optimizer, inner = engine.optimizer, Bucket.launch
    owed: list[int] = []

    def launch(bucket: Bucket) -> None:
        owed.append(sum(other.missing for other in optimizer.buckets))
        inner(bucket)

    Bucket.launch = launch
    ours: list[Collective] = []
    with recorded_collectives(ours):
        engine.step(parity.step_batches(UNTIED, 0, engine.grid.dp.rank, dp), UNTIED.lr)
    stock, theirs = build_stock(UNTIED, ParallelConfig(dp=dp)), []
    with recorded_collectives(theirs, deepspeed.runtime.engine):
        stock.train(parity.step_batches(UNTIED, 0, engine.grid.dp.rank, dp))
    return {"ours": ours, "theirs": theirs, "owed": owed, "parameters": sum(p.numel() for p in optimizer.parameters)}


@pytest.mark.quick("2")
@pytest.mark.parametrize("dp", [2, 3])
def test_gradients_are_reduce_scattered_during_the_backward_pass(dp: int) -> None:
    """Catches an all-reduce where a reduce-scatter is enough, as in stock DeepSpeed, a reduction in bf16, gradients
    reduced once per micro-batch, and reductions that wait for the end of the backward pass."""
    for found in run_ranks(_bytes_and_overlap, dp, dp):
        ours = [c for c in found["ours"] if c.name != "all_gather_into_tensor" and c.numel > 1]
        theirs = [c for c in found["theirs"] if c.name == "all_reduce" and c.numel > 1]
        assert {(c.name, c.dtype, c.ranks) for c in ours} == {("reduce_scatter_tensor", "torch.float32", dp)}
        assert {(c.name, c.dtype, c.ranks) for c in theirs} == {("all_reduce", "torch.float32", dp)}
        per_parameter = [sum(c.received_bytes for c in some) / found["parameters"] for some in (ours, theirs)]
        print(f"dp {dp}: {per_parameter[0]:.3f} bytes a parameter, stock DeepSpeed {per_parameter[1]:.3f}")
        assert per_parameter[0] == pytest.approx(4 * (dp - 1) / dp, rel=0.01)
        assert per_parameter[1] == pytest.approx(8 * (dp - 1) / dp, rel=0.01)
        assert len(found["owed"]) == len(ours) > 8
        # The last bucket of matrices and that of biases and norms are complete only when the backward pass is.
        assert all(owed > 0 for owed in found["owed"][:-2])


def embedding_as_on_a_gpu() -> None:
    """Makes autograd compute the gradient of the embedding."""
    megads.parallel.embedding.lookup = lambda rows, weight, gradients, foreign: F.embedding(rows, weight)


def separate_parameters_removed() -> None:
    embedding_as_on_a_gpu()
    megads.engine.stage_pipeline.alias_of = lambda parameter: parameter


@pytest.mark.quick("None")
@pytest.mark.parametrize("change", [None, embedding_as_on_a_gpu, separate_parameters_removed])
def test_a_tied_gradient_is_the_same_on_one_stage_and_on_two(change: Callable[[], None] | None) -> None:
    """Catches autograd adding the embedding's and the head's gradient in bf16 where one stage holds both; with that
    defect put back, the difference is at least a hundred times the bound."""
    scenario = scenario_with(precision="bfloat16")
    one = parity.train_layout(scenario, LAYOUTS["single"], change).gradients
    two = parity.train_layout(scenario, LAYOUTS["pp2"], embedding_as_on_a_gpu if change else None).gradients
    off = {name: parity.relative(one[name], values) for name, values in two.items()}
    tied = off.pop("embedding.word.weight")
    print(f"{change.__name__ if change else 'healthy'}: off by {tied:.1e}")
    assert max(off.values()) <= 1e-6
    assert tied >= 1e-4 if change is separate_parameters_removed else tied <= 1e-6


def _partial_gradients(zero_stage: int) -> dict[str, Any]:
    """Takes one step with given gradients of two parameters over tp 2 x dp 2; returns the reduced gradients, their norm
    and digests of the weights after it."""
    parallel = ParallelConfig(tp=2, dp=2, zero_stage=zero_stage)
    rank = torch.distributed.get_rank()
    grid = build_grid(parallel, rank, 4)
    weights = {"blocks.0.input_norm.weight": (True, 96), "blocks.0.mlp.up.weight": (False, 200)}
    named = []
    for name, (partial, numel) in weights.items():
        parameter = Parameter(torch.linspace(-1, 1, numel).bfloat16())
        parameter.gradient_partial = partial
        parameter.placement = ParameterPlacement(name, (numel,))
        named.append(NamedParameter(name, parameter, owned=not partial or grid.tp.is_first))
    optimizer = BucketOptimizer(named, OptimConfig(clip_grad=0.0), parallel, grid)
    gradients = {}

    def watch() -> None:
        for part in optimizer.state_ranges():
            name = next(n.name for n in named if n.parameter is part.parameter)
            gradients[name, part.first] = part.view_in(part.bucket.gradient).numpy().copy()

    optimizer.watch = watch
    for micro_batch in range(3):
        optimizer.last_backward = micro_batch == 2
        for index, entry in enumerate(named):
            weight = 2.0 ** -(rank + 4 * micro_batch)
            (entry.parameter.float() * weight * (torch.arange(entry.parameter.numel()) % 7 + index)).sum().backward()
            assert entry.parameter.grad is None, "gradients must not outlive their addition"
    optimizer.reduce()
    optimizer.step(1e-3)
    optimizer.record_norm(optimizer.norm.item())
    after = {entry.name: parity.digest(entry.parameter) for entry in named}
    return {"gradients": gradients, "norm": optimizer.grad_norm, "tp": grid.tp.rank, "after": after}


@pytest.mark.quick("1")
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_partial_gradients_are_summed_over_tensor_parallel_ranks(zero_stage: int) -> None:
    """Catches a replicated parameter that gets the gradient of one sequence shard only or is reduced twice, a norm that
    counts it on every rank or before the reduction, and a sharded one that is reduced with another rank's rows."""
    results = run_ranks(_partial_gradients, 4, zero_stage)
    micro_batches = sum(2.0 ** (-4 * m) for m in range(3))
    shares = [micro_batches * 2.0**-rank for rank in range(4)]
    factors = {
        ("blocks.0.input_norm.weight", 0): sum(shares),
        ("blocks.0.input_norm.weight", 1): sum(shares),
        ("blocks.0.mlp.up.weight", 0): shares[0] + shares[2],
        ("blocks.0.mlp.up.weight", 1): shares[1] + shares[3],
    }
    pattern = {"blocks.0.input_norm.weight": np.arange(96) % 7, "blocks.0.mlp.up.weight": np.arange(200) % 7 + 1}
    for result in results:
        for (name, first), values in result["gradients"].items():
            wanted = factors[name, result["tp"]] * pattern[name][first : first + len(values)]
            np.testing.assert_allclose(values, wanted, rtol=1e-6)
    squares = [(factors[name, tp] * pattern[name]) ** 2 for name, tp in list(factors) if (name, tp) != list(factors)[1]]
    assert results[0]["norm"] == pytest.approx(np.sqrt(sum(square.sum() for square in squares)), rel=1e-6)
    assert {result["norm"] for result in results} == {results[0]["norm"]}
    assert len({result["after"]["blocks.0.input_norm.weight"] for result in results}) == 1


def test_the_clip_factor_never_scales_up() -> None:
    """Catches gradients that are scaled up, an infinite norm that becomes a factor of 0 (a step that must be skipped
    would decay the moments), and rounding that differs from the host's, with which older runs clipped."""
    for norm in (0.0, 0.3, 0.7, 1.5, 3.3e3, 1e30):
        wanted = torch.tensor(min(1.0, 0.7 / (norm + CLIP_EPSILON))).float()
        assert torch.equal(clip_factor(torch.tensor(norm, dtype=torch.float64), 0.7), wanted)
        assert clip_factor(torch.tensor(norm, dtype=torch.float64), 0.0) == 1.0
    for norm in (float("inf"), float("nan")):
        for largest in (0.7, 0.0):
            assert clip_factor(torch.tensor(norm, dtype=torch.float64), largest).isnan()


def _engine_by(impl: Implementation) -> TrainEngine:
    parallel = ParallelConfig()
    spec = EngineSpec(
        UNTIED.model, parallel, UNTIED.optim, build_grid(parallel, 0, 1), precision=UNTIED.dtype,
        micro_batch_size=UNTIED.micro_batch_size, seed=UNTIED.seed, device=torch.device("cpu"),
        value=parity.initial_weights(UNTIED), kernels=Kernels(Implementation.torch, impl),
    )  # fmt: skip
    return build_train_engine(spec)


def _goes_on_with_another(run_dir: Path, first: Implementation, second: Implementation) -> dict[str, Any]:
    """Takes two steps and saves a checkpoint with the first; the second loads it and, where it can run here, takes the
    third."""
    batches = [parity.step_batches(UNTIED, step) for step in range(3)]
    engine, other = _engine_by(first), _engine_by(second)
    for batch in batches[:2]:
        engine.step(batch, UNTIED.lr)
    record = RunRecord({"step": 2, "samples": 24, "tokens": 0}, engine.optimizer_steps, "digest", {}, {})
    save_checkpoint(run_dir, engine.named_shards(), record)
    handle = find_checkpoint(run_dir, "auto")
    assert handle is not None
    other.load_shards(lambda shards: read_into(handle, shards), handle.optimizer_steps)
    shards = [engine.named_shards(), other.named_shards()]
    layouts = [[(s.key, s.global_shape, s.offset, s.tensor.shape, s.tensor.dtype) for s in each] for each in shards]
    found: dict[str, Any] = {
        "same layout": layouts[0] == layouts[1],
        "same state": all(torch.equal(a.tensor, b.tensor) for a, b in zip(*shards, strict=True)),
        "steps": [engine.optimizer_steps, other.optimizer_steps],
    }
    if second is not Implementation.apex:
        results = [each.step(batches[2], UNTIED.lr) for each in (engine, other)]
        found["third"] = [(result.loss, result.grad_norm) for result in results]
        found["after"] = [parity.pieces(each.named_shards()) for each in (engine, other)]
    return found


def _every_pair(folder: Path, pairs: list[tuple[Implementation, Implementation]]) -> list[dict[str, Any]]:
    load(OpsConfig(Implementation.fused), print, cuda=False)
    return [_goes_on_with_another(folder / f"{first}-{second}", first, second) for first, second in pairs]


@pytest.mark.usefixtures("kernels")
def test_a_run_may_continue_with_another_optim_impl(tmp_path: Path) -> None:
    """Catches a state that another optim.impl does not find, counts differently or stores in another shape, and an
    implementation that computes something else. Apex is compared where there is a GPU
    (tests/optim/test_optimizers.py)."""
    torch_, fused, apex = Implementation.torch, Implementation.fused, Implementation.apex
    pairs = [(torch_, fused), (fused, torch_), (fused, apex)]
    for found in run_ranks(_every_pair, 1, tmp_path, pairs)[0]:
        assert found["same layout"] and found["same state"] and found["steps"] == [2, 2]
        if "third" in found:
            assert found["third"][1] == pytest.approx(found["third"][0], rel=1e-6)
            for (key, *_, ours), (_, *_, theirs) in zip(*found["after"], strict=True):
                np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-8, err_msg=key)
