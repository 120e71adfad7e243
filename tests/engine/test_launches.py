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
from megads.ops.config import Compile, Float8, Float8Recipe, Implementation, KernelOp, Kernels
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


ONE_RANK = ParallelConfig()


@pytest.fixture(scope="module")
def gpus() -> Iterator[FakeGpus]:
    """A process that forks ranks with fake GPUs."""
    with FakeGpus() as started:
        yield started


def build_engine(
    gpu: FakeGpu, scenario: Scenario, kernels: Kernels, parallel: ParallelConfig = ONE_RANK
) -> NativeEngine:
    if kernels.loaded:
        load_library(build(print))
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
            float8=scenario.float8,
        )
    )


COUNTED_LAYERS = (1, 2)
"""GPT-2 of so many layers is counted; each of the others launches what the second one does. Two layers are in five
buckets, as twelve are."""


def launches(gpu: FakeGpu, impl: Implementation, layers: int) -> list[Counter[str]]:
    """Operators of a rank's steps of one and of two micro-batches, by name, after a first step."""
    model = replace(GPT2, num_layers=layers)
    scenario = scenario_with(model=model, precision="bfloat16", global_batch_size=2, micro_batch_size=1, seq_len=1024)
    in_buckets = ParallelConfig(bucket_elements=ONE_RANK.bucket_elements * layers // GPT2.num_layers)
    engine = build_engine(gpu, scenario, Kernels(impl, impl), in_buckets)
    batches, found = step_batches(scenario, 0), []
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
    counted, said = [], []
    for layers in COUNTED_LAYERS:
        one, two = gpus.run(launches, 0, 1, impl, layers)
        each = two - one
        counted.append((each.total(), one.total() - each.total()))
        said.append(f"{layers} layers: micro-batch {each.most_common()}; step of one {one.most_common()}")
    (first, _), (second, of_step) = counted
    assert (first + (GPT2.num_layers - 1) * (second - first), of_step) == LAUNCHES[impl], "; ".join(said)


WIDE = replace(MODEL, num_layers=3, hidden_size=64, num_heads=4)
FP8_LAYERS = 4
"""Linear layers of its block in FP8."""


def quantizing_launches(gpu: FakeGpu, recipe: Float8Recipe, fused: bool) -> list[Counter[str]]:
    """Operators of a micro-batch, and of a step in addition to its micro-batches. The host must not wait in them."""
    scenario = scenario_with(
        model=WIDE, precision="bfloat16", global_batch_size=2, micro_batch_size=1, float8=Float8(recipe)
    )
    tuned = frozenset(op for op in KernelOp if fused or op is not KernelOp.quantize)
    kernels = Kernels(Implementation.auto, Implementation.auto, tuned=tuned)
    engine, batches, found = build_engine(gpu, scenario, kernels), step_batches(scenario, 0), list[Counter[str]]()
    engine.launch_step(batches[:1], scenario.lr)
    with gpu.no_waits():
        for micro_batches in (1, 2):
            gpu.launched = Counter()
            engine.launch_step(batches[:micro_batches], scenario.lr)
            found.append(gpu.launched)
    each = found[1] - found[0]
    return [each, found[0] - each]


QUANTIZED = {
    Float8Recipe.tensorwise: (
        {"float8_magnitudes": 2, "float8_quantize": 2},
        {"float8_magnitudes": 1, "float8_quantize_both": 1},
    ),
    Float8Recipe.rowwise: (
        {"float8_quantize_rows": 2},
        {"float8_magnitudes": 1, "float8_column_magnitudes": 1, "float8_quantize_both": 1},
    ),
}
"""Operators that quantize a linear layer's input and gradient in a micro-batch, and its weight in a step."""


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.usefixtures("kernels")
def test_kernels_quantize_with_one_or_two_operators(gpus: FakeGpus, recipe: Float8Recipe) -> None:
    """Catches a cast, a copy or a transposition beside the kernels of quantization, and a host that waits for a scale.
    PyTorch needs 15 operators for a tensor, and one more to transpose a weight."""
    with_kernels, without = (gpus.run(quantizing_launches, 0, 1, recipe, fused) for fused in (True, False))
    counted = tuple({op: n / FP8_LAYERS for op, n in of.items() if op.startswith("float8")} for of in with_kernels)
    assert counted == QUANTIZED[recipe]
    of_each, of_step = (sum(of.values()) for of in QUANTIZED[recipe])
    assert without[0].total() - with_kernels[0].total() == FP8_LAYERS * (2 * 15 - of_each), without[0].most_common()
    weights = {Float8Recipe.tensorwise: 16, Float8Recipe.rowwise: 31}[recipe]
    assert without[1].total() - with_kernels[1].total() == FP8_LAYERS * (weights - of_step), without[1].most_common()


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
