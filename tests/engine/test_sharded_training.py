"""ZeRO-2, ZeRO-3 and hierarchical sharding: what the parity tests of all layouts do not cover."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import deepspeed
import deepspeed.runtime.zero.stage3
import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor

import megads.engine.stage_pipeline
from megads.engine.interface import Shard
from megads.tools.verify.layout import RecordedReductions
from tests import parity
from tests.distributed import run_ranks
from tests.engine.test_training import broken_step, check_skipped
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with, step_batches

pytestmark = pytest.mark.distributed

SHARDED = ("zero2dp2", "zero3dp2")


@pytest.mark.quick("hierarchical")
@pytest.mark.parametrize("layout", ["zero3tp2dp2", "hierarchical"])
def test_sharded_training_equals_the_reference_for_three_steps(layout: str) -> None:
    """Catches what the 50 steps of tests/engine/test_parity.py catch in the slow tier: wrong gradients, norms,
    replicas, initial weights or validation with ZeRO-3 and tensor parallelism or subgroups (N1, N3, N7 to N10)."""
    scenario = scenario_with(steps=3, masked=True)
    assert parity.faults_of(parity.train_layout(scenario, LAYOUTS[layout]), scenario) == []


def _partial_gradients(layout: str) -> dict[str, float]:
    """Gradient norms of replicated parameters, without and with `gradient_partial` on the input norms."""
    parallel = LAYOUTS[layout]
    norms = {}
    for partial in (False, True):
        materialise = megads.engine.stage_pipeline.materialise

        def marked(*args: Any, partial: bool = partial, materialise: Callable[..., Any] = materialise) -> Any:
            stage = materialise(*args)
            for name, parameter in stage.named_parameters():
                parameter.gradient_partial = partial and name.endswith("input_norm.weight")
            return stage

        megads.engine.stage_pipeline.materialise = marked
        engine = build_engine(scenario_with(), parallel)
        megads.engine.stage_pipeline.materialise = materialise
        seen: list[Shard] = []
        engine.watch_gradients(seen.extend)
        engine.step(step_batches(scenario_with(), 0, engine.grid.dp.rank, parallel.dp), 0.0)
        for shard in seen:
            if shard.key.startswith("gradient/blocks.1.") and "norm.weight" in shard.key:
                norms[f"{shard.key} {partial}"] = float(shard.tensor.norm())
    return norms


@pytest.mark.quick("zero2tp2dp2")
@pytest.mark.parametrize("layout", ["zero2tp2dp2", "zero3tp2dp2"])
def test_partial_gradients_are_summed_over_tensor_parallelism(layout: str) -> None:
    """Catches an all-reduce over tensor parallelism that runs after ZeRO took the gradient, or includes other
    parameters. Without sequence parallelism both ranks have the full gradient, so the all-reduce doubles it."""
    found = run_ranks(_partial_gradients, 4, layout)
    assert sum(len(norms) for norms in found) >= 4, (
        "tensor-parallel rank 0 owns both norms, in shards over its data axis"
    )
    for norms in found:
        for name, factor in (("input_norm", 2.0), ("post_attention_norm", 1.0)):
            key = f"gradient/blocks.1.{name}.weight"
            if f"{key} True" in norms:
                assert norms[f"{key} True"] == pytest.approx(factor * norms[f"{key} False"], rel=1e-5)


def _gathered_bytes(scenario: Scenario, layout: str) -> tuple[int, int, int]:
    """Bytes of weights that this rank received in one step of two micro-batches, in total and from other subgroups, and
    the bytes of all weights."""
    parallel = LAYOUTS[layout]
    scenario = parity.fitted(scenario, parallel)
    engine = build_engine(scenario, parallel)
    batches = step_batches(scenario, 0, engine.grid.dp.rank, parallel.dp)[:2]
    engine.step(batches, 0.0)  # the first step records the order of the layers
    comm, seen, crossing = deepspeed.comm.comm.cdb, 0, 0
    mine = set(range(2)) if engine.grid.rank < 2 else {2, 3}
    inner = comm.all_gather_function

    def spy(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, **kwargs: Any) -> Any:
        nonlocal seen, crossing
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != engine.grid.rank]
        seen += len(others) * input_tensor.numel() * input_tensor.element_size()
        crossing += sum(rank not in mine for rank in others) * input_tensor.numel() * input_tensor.element_size()
        return inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **kwargs)

    comm.all_gather_function = spy
    engine.step(batches, 0.0)
    comm.all_gather_function = inner
    weights = sum(prod(p.ds_shape) for p in engine.module.parameters()) * scenario.dtype.itemsize
    return seen, crossing, weights


@pytest.mark.slow
def test_hierarchical_sharding_gathers_inside_its_subgroup() -> None:
    """Catches weights all-gathered more than twice per micro-batch (forward and backward), and all-gathers that leave a
    subgroup, over the slow links."""
    scenario = scenario_with(precision="bfloat16", global_batch_size=16)
    found = {name: run_ranks(_gathered_bytes, 4, scenario, name) for name in ("zero3dp4", "hierarchical")}
    for (seen, crossing, weights), (hier_seen, hier_crossing, _) in zip(*found.values(), strict=True):
        passes = seen / (weights * 3 / 4) / 2
        print(
            f"{seen:,} bytes, {crossing:,} from the other half; in subgroups {hier_seen:,}; {passes:.2f} a micro-batch"
        )
        assert hier_crossing == 0 and crossing == pytest.approx(seen * 2 / 3)
        # Layers near the end of the forward pass are kept for their backward pass; the rest are all-gathered twice.
        assert 1.0 <= passes <= 2.0
        assert hier_seen == pytest.approx(seen * (1 / 2) / (3 / 4), rel=0.02)


SCALARS = 2
"""Elements of the largest collective that carries counts, losses or norms, not gradients."""


def _accumulated(scenario: Scenario, layout: str) -> dict[str, Any]:
    """Gradients of a step of four micro-batches against the sum of four steps of one, and their dtypes."""
    parallel = LAYOUTS[layout]
    engine = build_engine(scenario, parallel)
    batches = step_batches(scenario, 0, engine.grid.dp.rank, parallel.dp)
    assert len(batches) == 4
    seen: list[dict[Any, np.ndarray]] = []
    dtypes: set[str] = set()

    def watch(shards: list[Shard]) -> None:
        dtypes.update(str(shard.tensor.dtype) for shard in shards)
        seen.append({(s.key, s.offset): s.tensor.double().numpy() for s in shards})

    for group in (batches, *([batch] for batch in batches)):
        engine.watch_gradients(watch)
        engine.step(group, 0.0)
    reductions: set[tuple[str, int]] = set()
    with RecordedReductions(engine.grid, reductions):
        engine.step(batches, 0.0)
    together, *alone = seen
    # All have the same number of tokens, so a step of one weighs its micro-batch four times as much: no rounding.
    off = max(parity.relative(together[place], sum(one[place] for one in alone) / 4) for place in together)
    return {"off": off, "dtypes": dtypes, "reductions": {dtype for dtype, numel in reductions if numel > SCALARS}}


@pytest.mark.quick("zero3dp2")
@pytest.mark.parametrize("layout", SHARDED)
def test_bf16_gradients_accumulate_and_reduce_in_fp32(layout: str) -> None:
    """Catches micro-batches accumulated in bf16, which is off by 3e-3 and more, or reduced in bf16 (N7)."""
    scenario = scenario_with(precision="bfloat16", global_batch_size=16)
    for found in run_ranks(_accumulated, 2, scenario, layout):
        assert found["off"] < 1e-6
        assert found["dtypes"] == found["reductions"] == {"torch.float32"}


def _unchecked_step() -> dict[str, Any]:
    deepspeed.runtime.zero.stage3.is_invalid_grad_norm = lambda norm: False  # as before DeepSpeed 0.19.8
    return broken_step("weights", "zero3dp2")


def test_zero3_does_not_leave_the_check_to_deepspeed() -> None:
    """Catches a non-finite step that ZeRO-3 applies: DeepSpeed before 0.19.8 checks gradients in fp16 only."""
    check_skipped(run_ranks(_unchecked_step, 2), "weights", None, "blocks.2.mlp.down.bias")
