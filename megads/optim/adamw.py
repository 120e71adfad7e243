"""AdamW over flat masters with torch's fused kernel, and without torch.optim's base class.

The base class loads the compiler, torch._dynamo: 800 modules and 0.8 s of each rank's start, for nothing here, and on a
shared file system that many files times the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class FusedAdamW:
    """AdamW (https://arxiv.org/abs/1711.05101), bit for bit torch.optim.AdamW(fused=True).

    Attributes:
        param_groups: `params`, `lr` and `weight_decay` of each; the caller sets the learning rate before a step.
        state: of each parameter its fp32 moments `exp_avg` and `exp_avg_sq` and the number of steps, `step`; all there
            before the first step, so that a checkpoint of step 0 has the shape of any other.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        """Makes the state.

        Args:
            groups: each with its `params` and its `weight_decay`.
            lr: learning rate until the caller sets another.
            betas: decay rates of the moments.
            eps: added to the root of the second moment.
        """
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self._betas, self._eps = betas, eps
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for group in groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter from its `grad`."""
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"]]
            adamw(
                group["params"],
                [parameter.grad for parameter in group["params"]],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self._eps,
                maximize=False,
            )
