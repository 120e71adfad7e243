"""The driver of a plugin's optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from megads.optim.config import OptimConfig
from megads.optim.elementwise import ElementwiseOptimizer, Update
from megads.runtime.registry import OPTIMIZERS, Part


@dataclass
class Options:
    beta: float = 0.5


def momentum(options: Options, update: Update) -> None:
    """SGD with momentum, and the step's number on top."""
    update.state["velocity"].mul_(options.beta).add_(update.grad)
    update.master.mul_(1 - update.lr * update.weight_decay)
    update.master.sub_(update.lr * update.state["velocity"]).add_(update.step)


@pytest.fixture
def optim(monkeypatch: pytest.MonkeyPatch) -> Iterator[OptimConfig]:
    part = Part("momentum", momentum, Options, {"state": ("velocity",)})
    monkeypatch.setitem(OPTIMIZERS._parts, "momentum", part)
    return OptimConfig(name="momentum", options={"beta": 0.25}, lr=0.5)


def test_update_clip_decay_and_rounding(optim: OptimConfig) -> None:
    """Catches a gradient that is not clipped, weights that are not rounded from the masters, and a wrong step."""
    master, weights = torch.ones(3), torch.zeros(3, dtype=torch.bfloat16)
    optimizer = ElementwiseOptimizer([{"params": [master], "weights": [weights], "weight_decay": 0.5}], optim)
    master.grad = torch.full((3,), 4.0)
    optimizer.step(torch.tensor(0.5))
    assert master.tolist() == [1 * 0.75 - 0.5 * 2 + 1] * 3
    assert torch.equal(weights, master.bfloat16())
    assert optimizer.state[master]["velocity"].tolist() == [2.0] * 3 and optimizer.steps == 1


def test_a_step_that_is_not_finite_changes_nothing(optim: OptimConfig) -> None:
    """Catches a NaN that reaches masters or state, and a skipped step that counts."""
    master, weights = torch.ones(3), torch.ones(3)
    optimizer = ElementwiseOptimizer([{"params": [master], "weights": [weights], "weight_decay": 0.5}], optim)
    master.grad = torch.full((3,), float("nan"))
    optimizer.step(torch.tensor(float("nan")))
    optimizer.was_skipped()
    assert master.tolist() == weights.tolist() == [1.0] * 3 and optimizer.steps == 0
    assert not optimizer.state[master]["velocity"].any()
