"""Tests of FP8: the emulation trains the same curve in every layout as the reference on one process (N11)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megads.engine.interface import Shard
from megads.model.config import MLPKind, NormKind, Position
from megads.ops.config import Float8, Float8Recipe, Implementation, KernelOp, Kernels, OpsConfig
from megads.parallel import float8_linear, region_linear
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from megads.parallel.float8_linear import Float8Linear
from megads.tools.verify.checks import check_float8
from tests import float8_defects, parity
from tests.command import StartCommand, events_of, small_model, steps_of
from tests.distributed import run_ranks
from tests.engine.test_compiled_blocks import COMPILED
from tests.parity import (
    MODEL,
    Collective,
    Run,
    Scenario,
    recorded_collectives,
    scenario_with,
    step_batches,
    train_layout,
    train_reference,
)

pytestmark = pytest.mark.distributed

BLOOM = replace(MODEL, num_layers=4, hidden_size=24)
LLAMA: dict[str, Any] = {
    "norm": NormKind.rmsnorm,
    "mlp": MLPKind.swiglu,
    "bias": False,
    "position": Position.rope,
    "num_kv_heads": 2,
}
MODELS = {
    "bloom": BLOOM,
    "llama": replace(BLOOM, **LLAMA),
    "one KV head": replace(BLOOM, **LLAMA | {"num_kv_heads": 1}),
    "parallel block": replace(BLOOM, parallel_block=True),
    "two norms": replace(BLOOM, parallel_block=True, parallel_norms=2),
}
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp=2),
    "dp2, ZeRO-0": ParallelConfig(dp=2, zero_stage=0),
    "cp2": ParallelConfig(cp=2),
    "tp2cp2": ParallelConfig(tp=2, cp=2),
    "tp2sp cp2": ParallelConfig(tp=2, cp=2, sequence_parallel=True),
    "recompute": ParallelConfig(recompute=Recompute.full),
    "tp2 recompute": ParallelConfig(tp=2, recompute=Recompute.full),
    "pp2 zb_v": ParallelConfig(pp=2, schedule=ScheduleName.zb_v),
    "tp2sp pp2 zb_h1": ParallelConfig(tp=2, pp=2, sequence_parallel=True, schedule=ScheduleName.zb_h1),
}
RECIPES = (Float8Recipe.tensorwise, Float8Recipe.rowwise)
CASES = [
    *((model, layout) for model in ("bloom", "llama") for layout in LAYOUTS),
    *((model, layout) for model in ("one KV head", "parallel block") for layout in ("tp2", "tp2sp")),
    ("two norms", "tp2sp cp2"),
]


def scenario(model: str, recipe: Float8Recipe, **changes: Any) -> Scenario:
    """In fp64: in fp32, a value whose last bits differ between layouts may be rounded to another FP8 number."""
    settings = {"steps": 3, "masked": True, "precision": "float64", "global_batch_size": 4, "seq_len": 16, "seed": 9}
    float8 = {"model": MODELS[model], "float8": Float8(recipe), "spread": 12}
    return scenario_with(**settings | float8 | changes)


@functools.cache
def reference(model: str, recipe: Float8Recipe) -> Run:
    return train_reference(scenario(model, recipe))


def faults(run: Run, expected: Run) -> list[str]:
    return [fault for check in (check_float8, *parity.EVERY_CHECK) for fault in check(run, expected)]


@pytest.mark.quick("llama-tp2sp-tensorwise", "bloom-tp2cp2-tensorwise", "llama-tp2-rowwise", "bloom-pp2 zb_v-rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_fp8_trains_in_every_layout_as_on_one_process(model: str, layout: str, recipe: Float8Recipe) -> None:
    """Catches scales of a rank's part of a tensor, of a micro-batch or of an earlier one, weights that are not
    quantized again after a step, gradients in the format of activations, and validation in FP8."""
    run = train_layout(scenario(model, recipe), LAYOUTS[layout])
    assert faults(run, reference(model, recipe)) == []


@pytest.mark.quick("1-rowwise", "4-tensorwise")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 4])
def test_the_size_of_a_micro_batch_changes_no_scale(size: int, recipe: Float8Recipe) -> None:
    """Catches a scale that the samples of a micro-batch share."""
    run = train_layout(scenario("bloom", recipe, micro_batch_size=size), LAYOUTS["single"])
    assert faults(run, reference("bloom", recipe)) == []


@pytest.mark.slow  # compiles the blocks
@pytest.mark.parametrize("model", ["bloom", "parallel block"])
def test_fp8_trains_in_compiled_blocks(model: str) -> None:
    """Catches a graph with the quantized weights, or a scale, of the step in which it was traced."""
    run = train_layout(scenario(model, Float8Recipe.tensorwise, ops=COMPILED), LAYOUTS["single"])
    assert faults(run, reference(model, Float8Recipe.tensorwise)) == []


def count_quantizations() -> list[int]:
    """Trains a step of three micro-batches; returns how often each weight was quantized, and the collectives of it."""
    counts: dict[str, int] = {}
    inner = Float8Linear.quantize_weight

    def quantize_weight(self: Float8Linear, bits: Any) -> None:
        counts[self.name] = counts.get(self.name, 0) + 1
        inner(self, bits)

    Float8Linear.quantize_weight = quantize_weight
    settings = scenario("bloom", Float8Recipe.tensorwise, micro_batch_size=1, global_batch_size=3)
    engine = parity.build_engine(settings, ParallelConfig(recompute=Recompute.full))
    engine.step(step_batches(settings, 0), settings.lr)
    assert set(counts) == {f"blocks.{index}.{path}" for index in (1, 2) for path in LINEARS}
    return list(counts.values())


def curve(layout: str, recipe: Float8Recipe, fused: bool) -> list[tuple[float, float]]:
    """Losses and gradient norms of steps in bf16, with megads' kernels; `fused`: also those of quantization."""
    if not fused:
        inner = Kernels.fused
        Kernels.fused = lambda self, op: op is not KernelOp.quantize and inner(self, op)
    settings = scenario("llama", recipe, precision="bfloat16", ops=OpsConfig(Implementation.fused), micro_batch_size=2)
    with FusedQuantizations() as calls:
        found = losses_and_norms(settings, layout)
    assert bool(calls.count) is fused
    return found


def losses_and_norms(settings: Scenario, layout: str) -> list[tuple[float, float]]:
    engine = parity.build_engine(settings, LAYOUTS[layout])
    results = [engine.step(step_batches(settings, step), settings.lr) for step in range(settings.steps)]
    return [(result.loss, result.grad_norm) for result in results]


class FusedQuantizations(TorchDispatchMode):
    """Counts the calls of megads' operators of quantization."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "megads" and func.__name__.startswith("float8")
        return func(*args, **(kwargs or {}))


@pytest.mark.quick("tp2sp-rowwise")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["single", "tp2sp", "cp2"])
def test_kernels_train_the_curve_of_torchs_operators(layout: str, recipe: Float8Recipe) -> None:
    """Catches magnitudes that ranks agree on and the kernels do not read, and values or scales of another group."""
    ranks = LAYOUTS[layout].world_size
    ours, torchs = (run_ranks(curve, ranks, layout, recipe, fused) for fused in (True, False))
    assert ours == torchs


def received_in_gathers(recipe: Float8Recipe, change: Callable[[], None] | None = None) -> Counter[str]:
    """Bytes that a rank receives in the all-gathers of a step of two micro-batches, by dtype."""
    if change is not None:
        change()
    settings = scenario("bloom", recipe, micro_batch_size=2, precision="bfloat16")
    engine, seen, found = parity.build_engine(settings, LAYOUTS["tp2sp"]), list[Collective](), Counter[str]()
    with recorded_collectives(seen, region_linear):
        engine.step(step_batches(settings, 0), settings.lr)
    for one in seen:
        if one.name == "all_gather_into_tensor":
            found[one.dtype] += one.received_bytes
    return found


@pytest.mark.quick("tensorwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_sequence_parallel_ranks_gather_fp8(recipe: Float8Recipe) -> None:
    """Catches inputs of column-parallel layers that are gathered unquantized in the forward pass, twice the bytes, and
    gathers of scales that all ranks have."""
    plain, fp8 = (run_ranks(received_in_gathers, 2, of)[0] for of in (Float8Recipe.none, recipe))
    # Micro-batches, blocks in FP8, and layers that enter a region; samples of a micro-batch, and their length.
    inputs, tokens = 2 * 2 * 2, 2 * 16
    assert fp8["torch.uint8"] == inputs * tokens * BLOOM.hidden_size // 2
    assert plain["torch.bfloat16"] - fp8["torch.bfloat16"] == 2 * fp8["torch.uint8"]
    assert fp8["torch.float32"] == (inputs * tokens * 4 // 2 if recipe is Float8Recipe.rowwise else 0)
    assert run_ranks(received_in_gathers, 2, recipe, float8_defects.inputs_gathered_unquantized)[0] == plain


PURPOSES = {
    ("all_reduce", "torch.int32"): "scales", ("all_gather_into_tensor", "torch.bfloat16"): "gather",
    ("reduce_scatter_tensor", "torch.bfloat16"): "sum", ("all_gather_into_tensor", "torch.uint8"): "gather in FP8",
}  # fmt: skip


def order_of_collectives(recipe: Float8Recipe) -> str:
    """Collectives of tensor parallelism in a step of one micro-batch, in order."""
    settings = scenario("bloom", recipe, micro_batch_size=4, precision="bfloat16")
    engine, seen = parity.build_engine(settings, LAYOUTS["tp2sp"]), list[Collective]()
    with recorded_collectives(seen, region_linear), recorded_collectives(seen, float8_linear):
        engine.step(step_batches(settings, 0), settings.lr)
    return ", ".join(PURPOSES.get((one.name, one.dtype), "") for one in seen)


@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_are_gathered_after_the_agreement_on_scales(recipe: Float8Recipe) -> None:
    """Catches an all-reduce of magnitudes that waits for the gather before it, and with it the GEMM that hides the
    gather: collectives of a communicator run one after the other."""
    order = run_ranks(order_of_collectives, 2, recipe)[0]
    assert order.count("scales, gather, sum") == 2 * 2, (
        f"{order}: of the two column-parallel layers of two blocks in FP8"
    )


def curve_in_bf16(
    model: str, layout: str, recipe: Float8Recipe, change: Callable[[], None] | None
) -> list[tuple[float, float]]:
    if change is not None:
        change()
    return losses_and_norms(scenario(model, recipe, precision="bfloat16", micro_batch_size=2), layout)


@pytest.mark.quick("tp2sp-tensorwise", "tp2sp-rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["tp2sp", "tp2sp cp2"])
def test_gathered_fp8_has_the_bits_of_gathered_inputs_that_are_quantized(layout: str, recipe: Float8Recipe) -> None:
    """Catches scales of a share of a sequence, and values or scales in another order than that of the ranks."""
    ranks = LAYOUTS[layout].world_size
    changes = (None, float8_defects.inputs_gathered_unquantized)
    fp8, unquantized = (run_ranks(curve_in_bf16, ranks, "llama", layout, recipe, change) for change in changes)
    assert fp8 == unquantized


@pytest.mark.quick("parallel block-tp2sp-tensorwise", "two norms-tp2sp-rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["single", "tp2", "tp2sp", "tp2sp cp2", "tp2 recompute", "tp2sp pp2 zb_h1"])
@pytest.mark.parametrize("model", ["parallel block", "two norms"])
def test_branches_that_share_a_quantization_have_the_bits_of_their_own(
    model: str, layout: str, recipe: Float8Recipe
) -> None:
    """Catches scales that attention and MLP share although their tensors differ, the gradient of one branch that is
    lost, and a sum that is rounded in another order."""
    changes = (None, float8_defects.branches_that_share_nothing)
    sharing, apart = (run_ranks(curve_in_bf16, LAYOUTS[layout].world_size, model, layout, recipe, of) for of in changes)
    assert sharing == apart


def shared_work(model: str, recipe: Float8Recipe, change: Callable[[], None] | None) -> Counter[str]:
    """Collectives of tensor parallelism, and quantizations of activations and gradients, of a block in FP8 in a step of
    one micro-batch."""
    if change is not None:
        change()
    seen, counted, inner = list[Collective](), list[Counter[str]](), Float8Linear._quantize
    quantized = Counter[str]()

    def quantize(self: Float8Linear, tensors: Any, dtype: torch.dtype, *, divided: bool) -> Any:
        quantized["quantized"] += len(tensors)
        return inner(self, tensors, dtype, divided=divided)

    Float8Linear._quantize = quantize
    for layers in (3, 4):
        settings = scenario(model, recipe, micro_batch_size=4, precision="bfloat16")
        settings = replace(settings, model=replace(settings.model, num_layers=layers))
        engine = parity.build_engine(settings, LAYOUTS["tp2sp"])
        seen.clear()
        quantized.clear()
        with recorded_collectives(seen, region_linear), recorded_collectives(seen, float8_linear):
            engine.step(step_batches(settings, 0), settings.lr)
        counted.append(quantized + Counter(f"{one.name}, {one.dtype.removeprefix('torch.')}" for one in seen))
    return counted[1] - counted[0]


GATHERED, BF16, SCALES = (f"all_gather_into_tensor, {dtype}" for dtype in ("uint8", "bfloat16", "float32"))
MAGNITUDES = "all_reduce, int32"
WORK = {
    # With sequence parallelism, scales of a sample are agreed on, those of a token gathered.
    ("parallel block", "tensorwise"): {"quantized": 6, GATHERED: 1, BF16: 2, MAGNITUDES: 3},
    ("parallel block", "rowwise"): {"quantized": 6, GATHERED: 1, BF16: 2, MAGNITUDES: 2, SCALES: 1},
    ("two norms", "tensorwise"): {"quantized": 7, GATHERED: 2, BF16: 3, MAGNITUDES: 5},
    ("two norms", "rowwise"): {"quantized": 7, GATHERED: 2, BF16: 3, MAGNITUDES: 3, SCALES: 2},
}
APART = {
    "tensorwise": {"quantized": 8, GATHERED: 2, BF16: 4, MAGNITUDES: 6},
    "rowwise": {"quantized": 8, GATHERED: 2, BF16: 4, MAGNITUDES: 4, SCALES: 2},
}
SUMS = {"reduce_scatter_tensor, bfloat16": 4}


@pytest.mark.quick("parallel block-tensorwise", "two norms-rowwise")
@pytest.mark.parametrize(("model", "recipe"), WORK)
def test_branches_share_quantizations_and_collectives(model: str, recipe: str) -> None:
    """Catches an input or a gradient that attention and MLP quantize or gather each, and magnitudes that are agreed on
    one after the other."""
    changes = (None, float8_defects.branches_that_share_nothing)
    sharing, apart = (run_ranks(shared_work, 2, model, Float8Recipe(recipe), change)[0] for change in changes)
    assert sharing == WORK[model, recipe] | SUMS
    assert apart == APART[recipe] | SUMS


LINEARS = ("attention.qkv", "attention.dense", "mlp.up", "mlp.down")


def test_weights_are_quantized_once_in_a_step() -> None:
    """Catches a quantization in each micro-batch or recomputation, of the first or last block, or of the head."""
    assert set(run_ranks(count_quantizations, 1)[0]) == {1}


def skip_a_step(
    name: str, value: float, recipe: Float8Recipe = Float8Recipe.tensorwise, layout: str = "single"
) -> tuple[bool, str, bool]:
    """Trains a step with a bad weight on the last rank."""
    settings = scenario("bloom", recipe)
    engine = parity.build_engine(settings, LAYOUTS[layout])
    weight = next(p for p in engine.module.parameters() if p.placement.key == name)
    if engine.grid.tp.is_last:
        weight.data.view(-1)[3] = value
    before = {shard.key: shard.tensor.clone() for shard in engine.named_shards()}
    result = engine.step(step_batches(settings, 0), settings.lr)
    unchanged = all(torch.equal(before[shard.key], shard.tensor) for shard in engine.named_shards())
    return result.skipped, str(result.culprit), unchanged


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["blocks.1.mlp.up.weight", "blocks.2.input_norm.weight"])
def test_a_weight_or_activation_that_is_not_finite_skips_the_step(name: str, value: float) -> None:
    """Catches an infinity that becomes the largest FP8 number, with which training would go on."""
    skipped, culprit, unchanged = run_ranks(skip_a_step, 1, name, value)[0]
    assert skipped and unchanged
    assert "in its forward" in culprit


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_infinity_in_a_share_of_a_sequence_skips_the_step(recipe: Float8Recipe) -> None:
    """Catches a gather that loses it: a cast to E4M3 makes an infinity 448, unless its scale is NaN on all ranks."""
    name = "blocks.2.input_norm.weight"
    for skipped, culprit, unchanged in run_ranks(skip_a_step, 2, name, float("inf"), recipe, "tp2sp"):
        assert skipped and unchanged
        assert "in its forward" in culprit


def test_a_run_in_fp8_resumes_and_says_so(corpus: Path, megads: StartCommand) -> None:
    """N5. Catches quantized weights of before a resume, and a start whose line only has bf16, so that nobody sees which
    runs were in FP8."""
    own = {"train__precision": "bf16", "model__num_layers": 3, "train__fp8": "tensorwise", "checkpoint__every_steps": 2}
    for run, lengths in (("whole", (4,)), ("parts", (2, 4))):
        for steps in lengths:
            overrides = small_model(corpus, **own, train__steps=steps, schedule__name="constant")
            ended = megads("train", *overrides, f"run.dir={megads.folder / run}").end()
            assert ended.code == 0, ended.out + ended.err
    whole, parts = (megads.folder / run for run in ("whole", "parts"))
    assert {event["fp8"] for event in events_of(parts, "start")} == {"tensorwise"}
    assert steps_of(whole) == steps_of(parts) and len(steps_of(parts)) == 4


def load_into_the_other(model: str, layout: str) -> None:
    settings = scenario(model, Float8Recipe.tensorwise, precision="bfloat16", micro_batch_size=2)
    plain, fp8 = (
        parity.build_engine(replace(settings, float8=float8), LAYOUTS[layout]) for float8 in (Float8(), settings.float8)
    )
    fp8.step(step_batches(settings, 0), settings.lr)
    saved = {shard.key: shard.tensor.clone() for shard in fp8.named_shards(owned=False)}
    assert saved.keys() == {shard.key for shard in plain.named_shards(owned=False)}

    def fill(shards: list[Shard]) -> None:
        for shard in shards:
            shard.tensor.copy_(saved[shard.key])

    plain.load_shards(fill, fp8.optimizer_steps)
    assert plain.evaluate(step_batches(settings, 1)) == fp8.evaluate(step_batches(settings, 1))
    losses = [engine.step(step_batches(settings, 1), settings.lr).loss for engine in (plain, fp8)]
    assert losses[0] != losses[1], "FP8 is on in training"


@pytest.mark.parametrize(("model", "layout"), [("llama", "single"), ("parallel block", "tp2")])
def test_checkpoints_and_validation_do_not_know_fp8(model: str, layout: str) -> None:
    """Catches quantized weights in a checkpoint, validation in FP8, and one that adds in the order of training in FP8:
    a run may switch FP8 on or off."""
    run_ranks(load_into_the_other, LAYOUTS[layout].world_size, model, layout)
