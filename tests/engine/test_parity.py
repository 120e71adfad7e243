"""Every layout trains the same model: N1, N3, N7, N8, N9 and N10 against the unsharded reference, with hot weights."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megads.model.config import Position
from megads.ops.config import Implementation, OpsConfig
from tests import parity
from tests.parity import LAYOUT_CASES, LAYOUTS, MODEL, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

# Clipping is active at every step: gradients have a norm of about 2. The masks leave 1 to all tokens of a sample.
SCENARIO = scenario_with(steps=50, masked=True)
FEW_STEPS = 8
"""Enough for errors that show at once; the layouts that train all 50 steps show drift."""
IN_FEW_STEPS = {f"{layout}, few steps": layout for layout in ("single", "tp2pp2dp2", "tp2dp2sp", "cp2")}
# ZeRO-2 and 3 have shorter runs in test_sharded_training.py; the other layouts are parts of these.
every_feature = pytest.mark.quick("pp2dp3", *IN_FEW_STEPS)


@functools.cache
def reference(steps: int = SCENARIO.steps) -> Run:
    return train_reference(replace(SCENARIO, steps=steps))


@pytest.fixture(scope="module", params=[*LAYOUT_CASES, *IN_FEW_STEPS])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def expected(name: str) -> Run:
    return reference(FEW_STEPS) if name in IN_FEW_STEPS else reference()


@pytest.fixture(scope="module")
def run(name: str) -> Run:
    if name in IN_FEW_STEPS:
        return train_layout(replace(SCENARIO, steps=FEW_STEPS), LAYOUTS[IN_FEW_STEPS[name]])
    return train_layout(SCENARIO, LAYOUTS[name])


def test_clipping_is_active_at_every_step() -> None:
    """Catches a reference without active clipping: a wrong gradient norm would not show in the loss curve."""
    assert min(reference().norms) > SCENARIO.clip_grad


@every_feature
def test_initial_weights_are_bitwise_equal(run: Run, expected: Run) -> None:
    """Catches weights drawn per rank or per stage (N1)."""
    assert parity.check_initial_weights(run, expected) == []


@every_feature
def test_first_step_equals_the_reference(run: Run, expected: Run) -> None:
    """Catches every wrong gradient: collectives, biases, ALiBi slopes, padding, token weights (N3, N9)."""
    assert parity.check_first_step(run, expected) == []


@every_feature
def test_curve_and_final_weights_equal_the_reference(run: Run, expected: Run) -> None:
    """Catches wrong gradient norms, clipping, weight-decay groups, moments and drift (N3)."""
    assert parity.check_curve(run, expected) == []


@every_feature
def test_replicas_stay_bitwise_equal(run: Run, expected: Run) -> None:
    """Catches replicated parameters and tied embeddings that drift apart, as some do in stock DeepSpeed (N8)."""
    assert parity.check_replicas(run, expected) == []


@every_feature
def test_gradients_reduce_in_fp32(run: Run, expected: Run) -> None:
    """Catches gradient reduction in a dtype below fp32, DeepSpeed's default, which loss curves cannot show (N7)."""
    assert parity.check_reduction_dtype(run, expected) == []


@every_feature
def test_validation_is_the_token_mean(run: Run, expected: Run) -> None:
    """Catches a mean of batch means and a lost incomplete batch (N10)."""
    assert parity.check_validation(run, expected) == []


DROPOUT = scenario_with(
    masked=True, documents=True, steps=2, model=replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)
)
DOCUMENTS = {
    position.value: scenario_with(masked=True, documents=True, model=replace(MODEL, position=position))
    for position in Position
}


def faults_of_first_step(scenario: Scenario, expected: Run, layout: str) -> list[str]:
    run = train_layout(scenario, LAYOUTS[layout])
    return parity.check_first_step(run, expected) + parity.check_validation(run, expected)


@pytest.mark.quick("alibi-tp2", "learned-pp2", "rope-cp2", "alibi-cp2")
@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "cp2"])
@pytest.mark.parametrize("position", DOCUMENTS)
def test_packed_documents_equal_the_reference_in_every_layout(position: str, layout: str) -> None:
    """Catches document masks or restarted positions that a layout loses, shards wrongly or makes of local positions."""
    assert faults_of_first_step(DOCUMENTS[position], parity.reference_of(DOCUMENTS[position]), layout) == []


@pytest.mark.quick("tp2cp2-fused")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("layout", "impl"), [("tp2dp2sp", "torch"), ("tp2cp2", "fused"), ("cp3", "torch")])
def test_dropout_equals_the_reference_in_every_layout(layout: str, impl: str) -> None:
    """Catches dropout masks that depend on a rank's part of the sample or of the heads, on the micro-batch, or on the
    implementation: both dropouts equal the unsharded model's for two steps."""
    scenario, expected = replace(DROPOUT, ops=OpsConfig(Implementation(impl))), parity.reference_of(DROPOUT)
    run = train_layout(scenario, LAYOUTS[layout])
    checks = (parity.check_first_step, parity.check_curve, parity.check_validation)
    assert [fault for check in checks for fault in check(run, expected)] == []


def test_a_context_rank_may_have_no_unmasked_token() -> None:
    """Catches a loss averaged over each rank's own tokens, and a division by 0: rank 1 holds chunks 1 and 2 of four."""
    scenario = scenario_with(counted=6)
    assert faults_of_first_step(scenario, train_reference(scenario), "cp2") == []


# 509 tokens and a multiple of 128: 3 padding rows, or a third rank without any token.
ALIGNED = {
    "single": LAYOUTS["single"],
    "tp3": LAYOUTS["tp3"],
    "tp2pp2sp": LAYOUTS["tp2pp2sp"],
    "zero3tp2dp2": LAYOUTS["zero3tp2dp2"],
}


@pytest.mark.quick("tp3-True")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ALIGNED)
def test_aligned_vocabulary_rows_change_nothing(layout: str, fused: bool) -> None:
    """Catches alignment rows that get probability, a gradient or a place in a checkpoint, a tied copy with other rows,
    and tokens counted from the unaligned rows of a rank: N1, N3, N8, N10."""
    ops = OpsConfig(Implementation.fused if fused else Implementation.torch, loss_chunk=9 if fused else None)
    scenario = replace(SCENARIO, steps=FEW_STEPS, ops=ops, z_loss=0.1)
    run = train_layout(scenario, replace(ALIGNED[layout], vocab_multiple=128))
    assert parity.faults_of(run, scenario) == []
