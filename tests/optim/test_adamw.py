"""AdamW without torch.optim's base class."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from megads.optim.adamw import FusedAdamW


def test_bits_are_those_of_torch() -> None:
    """Catches an argument in the wrong place, and a learning rate or a decay that is not the group's."""
    torch.manual_seed(0)
    starts = [torch.randn(1000), torch.randn(7)]
    ours, theirs = ([Parameter(start.clone()) for start in starts] for _ in range(2))

    def groups(parameters: list[Parameter]) -> list[dict]:
        return [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, (0.1, 0.0), strict=True)]

    mine = FusedAdamW(groups(ours), 1e-3, (0.9, 0.95), 1e-6)
    stock = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, fused=True)
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in (mine, stock):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (step + 1)
            optimizer.step()
    for a, b, start in zip(ours, theirs, starts, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, start)
        assert all(torch.equal(mine.state[a][kind], stock.state[b][kind]) for kind in ("step", "exp_avg", "exp_avg_sq"))
