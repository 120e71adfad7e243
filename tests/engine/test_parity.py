"""Every layout trains the same model: N1, N3, N7, N8, N9 and N10 against the unsharded reference, on hot weights."""

from __future__ import annotations

import functools

import pytest

from tests import parity
from tests.parity import LAYOUT_CASES, LAYOUTS, Run, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

# Clipping is active at every step: hot gradients have a norm of about 2. Masks leave 1 to all tokens of a sample.
SCENARIO = scenario_with(steps=50, masked=True)


@functools.cache
def reference() -> Run:
    return train_reference(SCENARIO)


@pytest.fixture(scope="module", params=LAYOUT_CASES)
def run(request: pytest.FixtureRequest) -> Run:
    return train_layout(SCENARIO, LAYOUTS[request.param])


def test_clipping_is_active_at_every_step() -> None:
    """Without clipping, a wrong gradient norm would not show in the curve."""
    assert min(reference().norms) > SCENARIO.clip_grad


def test_initial_weights_are_bitwise_equal(run: Run) -> None:
    """Catches weights drawn per rank or per stage (N1)."""
    assert parity.check_initial_weights(run, reference()) == []


def test_first_step(run: Run) -> None:
    """Catches every wrong gradient: collectives, biases, slopes, padding, token weights (N3, N9)."""
    assert parity.check_first_step(run, reference()) == []


def test_curve_and_final_weights(run: Run) -> None:
    """Catches wrong norms, clipping, decay groups, moments and drift (N3)."""
    assert parity.check_curve(run, reference()) == []


def test_replicas_stay_bitwise_equal(run: Run) -> None:
    """Catches replicated parameters and tied embeddings that drift apart, stock DeepSpeed's among them (N8)."""
    assert parity.check_replicas(run, reference()) == []


def test_gradients_reduce_in_fp32(run: Run) -> None:
    """Catches DeepSpeed's default, which curves cannot show (N7)."""
    assert parity.check_reduction_dtype(run, reference()) == []


def test_validation_is_the_token_mean(run: Run) -> None:
    """Catches a mean of batch means and a lost incomplete batch (N10)."""
    assert parity.check_validation(run, reference()) == []
