"""The optimizers of plugins: one update of a flat run of elements, whatever parameters they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megads.optim.config import OptimConfig
from megads.runtime.registry import OPTIMIZERS


@dataclass(frozen=True)
class Update:
    """One step of one flat run of elements, to be made in place.

    A run holds parts of several parameters, cut by ZeRO and tensor parallelism: an update may look at nothing but an
    element and its own gradient and state, or it depends on the layout.

    Attributes:
        master: fp32 weights [e], to be changed; the working weights are rounded from them afterwards.
        grad: fp32 gradient [e], averaged over the tokens of the global batch and clipped.
        state: the tensors that the optimizer registered, fp32 [e], zeros before the first step; to be changed.
        lr: learning rate of the step.
        weight_decay: of these elements; 0 for biases and norms.
        step: number of the step, from 1; skipped steps are not counted.
    """

    master: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    lr: float
    weight_decay: float
    step: int


class ElementwiseOptimizer:
    """Drives a plugin's update; see `megads.optim.adamw.FusedAdamW` for what it offers.

    Args:
        groups: each with its `params`, the `weights` that they are rounded to, and its `weight_decay`.
        optim: names the optimizer and holds its settings.

    Raises:
        ConfigError: no plugin registered it.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], optim: OptimConfig) -> None:
        part = OPTIMIZERS.find(optim.name, "optim.name")
        self._update, self._options = part.make, OPTIMIZERS.options_of(part, optim.options)
        self.param_groups = [{"lr": optim.lr, **group} for group in groups]
        self.steps = 0
        masters = [master for group in groups for master in group["params"]]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            master: {kind: torch.zeros_like(master) for kind in part.traits["state"]} for master in masters
        }

    @torch.no_grad()
    def step(self, clip: Tensor) -> None:
        """Updates every master from its `grad` and rounds it to its weights; the host waits for the factor.

        Args:
            clip: fp32 scalar, factor of all gradients. Where it is not finite everything stays as it was.
        """
        self.steps += 1
        factor = clip.item()
        if not math.isfinite(factor):
            return
        for group in self.param_groups:
            for master, weights in zip(group["params"], group["weights"], strict=True):
                gradient = master.grad if factor == 1.0 else master.grad.mul_(factor)
                how = (group["lr"], group["weight_decay"], self.steps)
                self._update(self._options, Update(master.detach(), gradient, self.state[master], *how))
                weights.copy_(master)

    def was_skipped(self) -> None:
        """The last step's `clip` was not finite; before the next one."""
        self.steps -= 1

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, a checkpoint's."""
        self.steps = steps
