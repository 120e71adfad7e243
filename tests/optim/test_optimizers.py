"""Tests AdamW without torch.optim's base class, and the optimizer that runs all other update rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.nn import Parameter

from megads.ops.config import FUSED, TORCH, Implementation, Kernels
from megads.optim.config import OptimConfig
from megads.optim.groups import Role
from megads.optim.masters import Update
from megads.optim.optimizers import FusedAdamW, MasterOptimizer, make_optimizer
from megads.runtime.registry import OPTIMIZERS, Part
from tests.ops.test_apex import without_apex

APEX = Kernels(Implementation.apex, Implementation.apex)


def test_adamw_bits_are_those_of_torch() -> None:
    """Catches an argument in the wrong position, and a learning rate or weight decay that is not the group's."""
    torch.manual_seed(0)
    starts = [torch.randn(1000), torch.randn(7)]
    ours, theirs = ([Parameter(start.clone()) for start in starts] for _ in range(2))

    def groups(parameters: list[Parameter]) -> list[dict]:
        return [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, (0.1, 0.0), strict=True)]

    working = [torch.empty_like(start, dtype=torch.bfloat16) for start in starts]
    with_weights = [group | {"weights": [weights]} for group, weights in zip(groups(ours), working, strict=True)]
    mine = FusedAdamW(with_weights, 1e-3, (0.9, 0.95), 1e-6)
    stock = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, fused=True)
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in (mine, stock):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (step + 1)
        mine.step(torch.ones(()))
        stock.step()
    for a, b, start, weights in zip(ours, theirs, starts, working, strict=True):
        assert torch.equal(weights, a.bfloat16())
        assert torch.equal(a, b) and not torch.equal(a, start)
        assert all(torch.equal(mine.state[a][kind], stock.state[b][kind]) for kind in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_the_fused_kernel_takes_the_same_steps(clip: float) -> None:
    """Catches a kernel whose step count differs from the checkpoint's, and another group's decay or learning rate."""
    start, runs = torch.randn(1000, generator=torch.Generator().manual_seed(0)), []
    for kernels in (TORCH, FUSED):
        masters, weights = [start.clone(), start.clone()], [torch.empty(1000, dtype=torch.bfloat16) for _ in range(2)]
        groups = [
            {"params": [master], "weights": [working], "weight_decay": decay, "lr": lr}
            for master, working, decay, lr in zip(masters, weights, (0.1, 0.0), (1e-2, 1e-3), strict=True)
        ]
        optimizer = FusedAdamW(groups, 1.0, (0.9, 0.95), 1e-8, kernels)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for master in masters:
                master.grad = torch.randn(1000, generator=generator)
            optimizer.step(torch.tensor(clip))
        assert optimizer.steps == 4
        runs.append(masters)
    for by_torch, by_kernel in zip(*runs, strict=True):
        torch.testing.assert_close(by_kernel, by_torch, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("taken", [TORCH, FUSED], ids=["torch", "fused"])
def test_a_skipped_step_leaves_no_trace(taken: Kernels) -> None:
    """Catches a skipped step that counts, on the host or in the saved state, which would bias every later step."""
    start, ends = torch.linspace(-1, 1, 1000), []
    for steps in ((0.5, float("nan"), 0.25), (0.5, 0.25)):
        master, weights = start.clone(), torch.empty(1000, dtype=torch.bfloat16)
        optimizer = FusedAdamW(
            [{"params": [master], "weights": [weights], "weight_decay": 0.1}], 1e-2, (0.9, 0.95), 1e-8, taken
        )
        for clip in steps:
            master.grad = torch.cos(start) if math.isfinite(clip) else torch.full((1000,), clip)
            optimizer.step(torch.tensor(clip))
            if not math.isfinite(clip):
                optimizer.undo_step_count()
        assert optimizer.steps == 2
        ends.append([master, weights, *optimizer.state[master].values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert taken is FUSED or ends[0][2].item() == 2.0, "megads' kernel takes the number of steps from the host"


@pytest.mark.gpu
@without_apex
@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_apex_takes_the_same_steps(clip: float) -> None:
    """Catches L2 instead of decoupled weight decay, a missing bias correction, eps inside the root, arguments in the
    wrong order, another group's rates, gradients that are not clipped, and weights that are not updated."""
    start, runs = torch.randn(70_001, generator=torch.Generator().manual_seed(0)), []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        masters = [start.to(device, dtype, copy=True) for _ in range(2)]
        weights = [master.to(torch.bfloat16) for master in masters]
        groups = [
            {"params": [master], "weights": [working], "weight_decay": decay, "lr": lr}
            for master, working, decay, lr in zip(masters, weights, (0.1, 0.0), (1e-2, 1e-3), strict=True)
        ]
        optimizer = FusedAdamW(groups, 1.0, (0.9, 0.95), 1e-3, APEX if device == "cuda" else TORCH)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for master in masters:
                master.grad = torch.randn(len(start), generator=generator).to(master)
            optimizer.step(torch.tensor(clip, dtype=torch.float32, device=device))
        assert [optimizer.state[master]["step"].item() for master in masters] == [4.0, 4.0]
        for master, working in zip(masters, weights, strict=True):
            assert torch.equal(working, master.to(torch.bfloat16))
        runs.append(
            [*masters, *(optimizer.state[master][kind] for master in masters for kind in ("exp_avg", "exp_avg_sq"))]
        )
    for exact, found in zip(*runs, strict=True):
        torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("taken", [TORCH, FUSED, APEX], ids=["torch", "fused", "apex"])
def test_the_state_does_not_depend_on_who_computes(taken: Kernels) -> None:
    """Catches state that depends on optim.impl: a run could not resume with another one."""
    masters = [torch.zeros(7), torch.zeros(3)]
    groups = [{"params": [m], "weights": [torch.empty_like(m)], "weight_decay": 0.0} for m in masters]
    state = FusedAdamW(groups, 1e-3, (0.9, 0.95), 1e-8, taken).state
    for master in masters:
        shapes = {kind: (tensor.shape, tensor.dtype) for kind, tensor in state[master].items()}
        flat = (master.shape, torch.float32)
        assert shapes == {"step": (torch.Size([]), torch.float32), "exp_avg": flat, "exp_avg_sq": flat}


@dataclass
class Options:
    beta: float = 0.5


def momentum(options: Options, update: Update) -> None:
    """SGD with momentum, plus the step number."""
    update.state["velocity"].mul_(options.beta).add_(update.grad)
    update.master.mul_(1 - update.lr * update.weight_decay)
    update.master.sub_(update.lr * update.state["velocity"]).add_(update.step)


@pytest.fixture
def optim(monkeypatch: pytest.MonkeyPatch) -> Iterator[OptimConfig]:
    part = Part("momentum", momentum, Options, {"state": ("velocity",)})
    monkeypatch.setitem(OPTIMIZERS._parts, "momentum", part)
    return OptimConfig(name="momentum", options={"beta": 0.25}, lr=0.5)


def optimizer_of(masters: list[torch.Tensor], weights: list[torch.Tensor], optim: OptimConfig) -> MasterOptimizer:
    """An optimizer of master weights with a weight decay of 0.5."""
    group = {"params": masters, "weights": weights, "weight_decay": 0.5, "role": Role.decay}
    return make_optimizer([group | {"layouts": [None] * len(masters)}], optim)


def test_updates_clip_decay_and_round_as_defined(optim: OptimConfig) -> None:
    """Catches a gradient that is not clipped, weights not rounded from the master weights, and a wrong step."""
    master, weights = torch.ones(3), torch.zeros(3, dtype=torch.bfloat16)
    optimizer = optimizer_of([master], [weights], optim)
    master.grad = torch.full((3,), 4.0)
    optimizer.step(torch.tensor(0.5))
    assert master.tolist() == [1 * 0.75 - 0.5 * 2 + 1] * 3
    assert torch.equal(weights, master.bfloat16())
    assert optimizer.state[master]["velocity"].tolist() == [2.0] * 3 and optimizer.steps == 1


def test_a_step_that_is_not_finite_changes_nothing(optim: OptimConfig) -> None:
    """Catches a NaN that reaches master weights or state, and a skipped step that counts."""
    master, weights = torch.ones(3), torch.ones(3)
    optimizer = optimizer_of([master], [weights], optim)
    master.grad = torch.full((3,), float("nan"))
    optimizer.step(torch.tensor(float("nan")))
    optimizer.undo_step_count()
    assert master.tolist() == weights.tolist() == [1.0] * 3 and optimizer.steps == 0
    assert not optimizer.state[master]["velocity"].any()
