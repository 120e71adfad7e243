"""Tests that compiled blocks train as eager ones, also in parallel layouts: N3 over five steps, unchanged names; and
that a dense block of one rank is a single graph, whose product accumulates weight gradients in main_grad."""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megads.engine import native_engine
from megads.model.config import MLPKind, NormKind, Position
from megads.ops import compiler
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from tests import parity
from tests.distributed import run_ranks
from tests.engine.test_model_features import MODELS as OPTIONS
from tests.parity import MODEL, Run, Scenario, build_engine, scenario_with, step_batches, train_layout, train_reference

COMPILED = OpsConfig(Implementation.torch, Compile.blocks)
FUSED_COMPILED = OpsConfig(Implementation.fused, Compile.blocks)
pytestmark = pytest.mark.distributed
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {"position": Position.learned, "embedding_norm": False},
    "bloom": {},
    "llama": {
        "position": Position.rope,
        "norm": NormKind.rmsnorm,
        "mlp": MLPKind.swiglu,
        "num_kv_heads": 2,
        "bias": False,
        "tie_embeddings": False,
    },
}
CASES = {
    "single": ({}, ParallelConfig()),
    "rope, parallel block": ({"position": Position.rope, "parallel_block": True}, ParallelConfig()),
    "tp2, shared": ({"hidden_dropout": 0.2}, ParallelConfig(tp=2, sequence_parallel=True, recompute=Recompute.full)),
    "zb_h1": ({}, ParallelConfig(pp=2, schedule=ScheduleName.zb_h1)),
    "cp2, selective": ({"parallel_block": True}, ParallelConfig(cp=2, recompute=Recompute.selective)),
    "zero2": ({}, ParallelConfig(dp=2, zero_stage=2)),
    "layers that differ": (OPTIONS["gemma3"], ParallelConfig(recompute=Recompute.full)),
    "adjacent features rotated": (OPTIONS["gpt-j"], ParallelConfig()),
}
CHECKS = (
    parity.check_initial_weights,
    parity.check_first_step,
    parity.check_curve,
    parity.check_replicas,
    parity.check_validation,
)


def scenario(changes: dict[str, Any], **others: Any) -> Scenario:
    return scenario_with(steps=5, masked=True, model=replace(MODEL, **changes), **others)


@functools.cache
def reference(name: str) -> Run:
    return train_reference(scenario(CASES[name][0]))


@pytest.mark.slow  # as each rank compiles its blocks, here and below
@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_equal_the_reference_in_every_layout(name: str) -> None:
    """Catches a compiled graph that captures the communication, mask or cache of one micro-batch and reuses it for the
    next, a deferred wgrad that is lost, and names with the compiler's prefix (gradients are gathered by name)."""
    changes, parallel = CASES[name]
    run = train_layout(scenario(changes, ops=COMPILED), parallel)
    assert [fault for check in CHECKS for fault in check(run, reference(name))] == []


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_megads_kernels_run_inside_compiled_blocks() -> None:
    """Catches a custom operator that is registered with wrong shapes or gradients."""
    run = train_layout(scenario({}, ops=FUSED_COMPILED), ParallelConfig())
    assert [fault for check in CHECKS for fault in check(run, reference("single"))] == []


def _graphs(scenario: Scenario) -> list[int]:
    """Number of compiled graphs after one step, three steps, and validation."""
    from torch._dynamo.utils import counters

    engine = build_engine(scenario, ParallelConfig())
    made = []
    for steps in (range(1), range(1, 3)):
        for step in steps:
            engine.step(step_batches(scenario, step), scenario.lr)
        made.append(counters["stats"]["unique_graphs"])
    parity.evaluate(engine, scenario)
    return [*made, counters["stats"]["unique_graphs"]]


@pytest.mark.slow
def test_blocks_are_compiled_once_per_shape() -> None:
    """Catches blocks that are not compiled, or are compiled again for each block or micro-batch."""
    few, many = (run_ranks(_graphs, 1, scenario({"num_layers": layers}, ops=COMPILED))[0] for layers in (1, 3))
    first_step, third_step, validated = many
    assert few == many
    assert 0 < first_step == third_step
    assert validated <= 2 * first_step  # once more without gradients, at most


@dataclass(frozen=True)
class Trained:
    """A run of three steps with an evaluation after the second.

    Attributes:
        results: loss and gradient norm of every step, and the validation loss.
        state: digests of weights and optimizer state after the last step.
        graphs: number of graphs after the first step, before and after the evaluation, and at the end.
        breaks: reasons of graph breaks.
        products: weight gradients that the compiled graphs accumulated in main_grad.
    """

    results: list[Any]
    state: dict[Any, str]
    graphs: list[int]
    breaks: list[str]
    products: int


def _trained(scenario: Scenario) -> Trained:
    """Trains with blocks compiled by AOTAutograd, whose graphs call PyTorch's operators, so that no bit differs."""
    from torch._dynamo.utils import counters

    compiler.compiled = lambda function: torch.compile(function, dynamic=False, backend="aot_eager")
    engine = build_engine(scenario, ParallelConfig())
    products, inner = [], native_engine.BucketOptimizer.add
    results, graphs = list[Any](), list[int]()

    def add(self: Any, weight: Any, gradient: Any) -> None:
        if any(
            "aot_eager" in frame.filename or "aot_autograd" in frame.filename for frame in traceback.extract_stack()
        ):
            products.append(weight)
        inner(self, weight, gradient)

    native_engine.BucketOptimizer.add = add
    for step in range(3):
        result = engine.step(step_batches(scenario, step), scenario.lr)
        results.append((result.loss, result.grad_norm))
        graphs.append(counters["stats"]["unique_graphs"])
        if step == 1:
            results.append(parity.evaluate(engine, scenario))
            graphs.append(counters["stats"]["unique_graphs"])
    state = {(shard.key, shard.offset): parity.digest(shard.tensor) for shard in engine.named_shards(owned=False)}
    return Trained(results, state, graphs, list(counters["graph_break"]), len(products))


@pytest.mark.quick("llama")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("kernels")
def test_a_dense_block_is_one_graph_with_the_bits_of_eager_mode(shape: str) -> None:
    """Catches a graph break in a dense block of one rank, a graph compiled again for the second block, a later
    micro-batch, the last one, training after an evaluation; and a weight gradient that is lost or added twice."""
    changes = {**SHAPES[shape], "num_layers": 2}
    scenarios = [
        scenario(
            {**changes}, precision="bfloat16", documents=shape == "llama", ops=OpsConfig(Implementation.fused, compiled)
        )
        for compiled in (Compile.none, Compile.blocks)
    ]
    [eager], [compiled] = (run_ranks(_trained, 1, each) for each in scenarios)
    assert compiled.breaks == [] and compiled.graphs == [1, 1, 2, 2]
    assert compiled.results == eager.results and compiled.state == eager.state
    assert eager.graphs == [0] * 4 and eager.products == 0
    assert compiled.products == 3 * 6 * 2 * 4, "steps, micro-batches, blocks, products"
