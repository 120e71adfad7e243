"""Operators that a training step launches on a GPU, counted on a fake one: GPT-2 of 124M parameters, and its blocks as
compiled graphs.

A small model takes as long as the host needs to launch its kernels, so the counts are exact: a change that adds a
launch to a step has to say so here and in docs/notes/performance.md.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from megads.engine.interface import EngineSpec
from megads.engine.native_engine import NativeEngine
from megads.model.config import ModelConfig, Position
from megads.ops import compiler
from megads.ops.attention_kinds import AttentionKind
from megads.ops.build import build
from megads.ops.config import Compile, Implementation, Kernels
from megads.ops.resolve import load_library
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from tests.engine.fake_cuda import FakeGpu, FakeGpus
from tests.engine.test_compiled_blocks import SHAPES
from tests.parity import MODEL, Scenario, scenario_with, step_batches

GPT2 = ModelConfig(
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    vocab_size=50304,
    max_seq_len=1024,
    position=Position.learned,
    embedding_norm=False,
    attention=AttentionKind.flex,
)


@pytest.fixture(scope="module")
def gpus() -> Iterator[FakeGpus]:
    """A process that forks ranks with fake GPUs."""
    with FakeGpus() as started:
        yield started


def build_engine(gpu: FakeGpu, scenario: Scenario, kernels: Kernels) -> NativeEngine:
    if kernels.loaded:
        load_library(build(print))
    parallel = ParallelConfig()
    return NativeEngine(
        EngineSpec(
            scenario.model,
            parallel,
            scenario.optim,
            build_grid(parallel, 0, 1),
            precision=scenario.dtype,
            micro_batch_size=scenario.micro_batch_size,
            seed=scenario.seed,
            device=gpu.device,
            value=lambda _name, shape: torch.zeros(shape),
            kernels=kernels,
        )
    )


def launches(gpu: FakeGpu, impl: Implementation) -> list[Counter[str]]:
    """Operators of a rank's steps of one and of two micro-batches, by name, after a first step."""
    scenario = scenario_with(model=GPT2, precision="bfloat16", global_batch_size=2, micro_batch_size=1, seq_len=1024)
    engine, batches, found = build_engine(gpu, scenario, Kernels(impl, impl)), step_batches(scenario, 0), []
    for micro_batches in (1, 1, 2):
        gpu.launched = Counter()
        engine.launch_step(batches[:micro_batches], scenario.lr)
        found.append(gpu.launched)
    return found[1:]


LAUNCHES = {Implementation.fused: (356, 32), Implementation.torch: (450, 56)}
"""Launches of a micro-batch, and of a step in addition to those of its micro-batches."""


@pytest.mark.parametrize("impl", LAUNCHES)
@pytest.mark.usefixtures("kernels")
def test_a_step_of_gpt2_launches_as_many_kernels_as_recorded(gpus: FakeGpus, impl: Implementation) -> None:
    """Catches a cast, a copy or a loop over parameters that is added to every micro-batch or every step."""
    one, two = gpus.run(launches, 0, 1, impl, timeout_s=600.0)
    each = two - one
    counted = each.total(), one.total() - each.total()
    assert counted == LAUNCHES[impl], f"of a micro-batch: {each.most_common()}; of a step of one: {one.most_common()}"


def graphs_of_blocks(gpu: FakeGpu, scenario: Scenario, impl: Implementation) -> tuple[int, list[str], Counter[str]]:
    """Number of graphs of a step's compiled blocks, reasons of breaks, and operators of the step."""
    from torch._dynamo import optimize
    from torch._dynamo.utils import counters

    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)

        def run(*args: Any) -> Any:
            with gpu:
                return graph.forward(*args)

        return run

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        traced = optimize(backend, dynamic=False)(function)

        def call(*args: Any) -> Any:
            with _disable_current_modes():  # torch.compile traces nothing while the fake GPU watches
                return traced(*args)

        return call

    compiler.compiled = compiled
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda, name, lambda *_: None)
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    engine = build_engine(gpu, scenario, Kernels(impl, impl, compiled=Compile.blocks))
    engine.step(step_batches(scenario, 0), scenario.lr)
    return len(graphs), list(counters["graph_break"]), gpu.launched


@pytest.mark.parametrize(
    ("shape", "kind", "impl"),
    [
        ("gpt", AttentionKind.flex, Implementation.fused),
        ("bloom", AttentionKind.flex, Implementation.fused),
        ("llama", AttentionKind.cudnn, Implementation.torch),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_a_dense_block_is_one_graph_on_a_gpu(
    gpus: FakeGpus, shape: str, kind: AttentionKind, impl: Implementation
) -> None:
    """Catches a graph break at the attention of a GPU, or at the product that accumulates a weight gradient."""
    model = replace(MODEL, **SHAPES[shape], attention=kind, num_layers=2)
    scenario = scenario_with(model=model, precision="bfloat16", global_batch_size=4, micro_batch_size=2)
    graphs, breaks, launched = gpus.run(graphs_of_blocks, 0, 1, scenario, impl)
    assert (graphs, breaks) == (1, [])
    products = 2 * 2 * 4  # micro-batches, blocks, products
    assert launched["linear_backward"] == (products if impl is Implementation.fused else 0)
