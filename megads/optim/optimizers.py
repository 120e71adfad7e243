"""Optimizers over flat fp32 masters: AdamW, and the driver of a plugin's elementwise update.

Neither has torch.optim's base class, which loads the compiler, torch._dynamo: 800 modules and 0.8 s of each rank's
start, and on a shared file system that many files times the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from megads.ops.adamw import APEX_CHUNK, AdamWStep, adamw
from megads.ops.apex import AMP, INT32_ELEMENTS, extension
from megads.ops.config import TORCH, KernelOp, Kernels
from megads.optim.config import OptimConfig
from megads.runtime.registry import OPTIMIZERS

APEX_ADAMW_MODE = 1
"""Decoupled weight decay; 0 is Adam with an L2 penalty."""


class FusedAdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) with clipping before it and the rounding to working weights after it.

    Our kernel does all three in one pass; torch's, bit for bit torch.optim.AdamW(fused=True), stands between two more.
    So does apex'. The state is the same for all.

    Attributes:
        param_groups: `params` (masters), `weights`, `lr` and `weight_decay` of each; the caller sets the learning rate
            before a step.
        state: of each master its fp32 moments `exp_avg` and `exp_avg_sq` and the number of steps, `step`; all there
            before the first step, so that a checkpoint of step 0 has the shape of any other.
        steps: the same number as the host knows it, which does not wait for the device to tell.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        kernels: Kernels = TORCH,
    ) -> None:
        """Makes the state.

        Args:
            groups: each with its `params`, flat and fp32, the `weights` that each of them is rounded to, flat and of
                the same length, and its `weight_decay`.
            lr: learning rate until the caller sets another.
            betas: decay rates of the moments.
            eps: added to the root of the second moment.
            kernels: whose kernel computes; NVIDIA apex' on GPUs.
        """
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self._betas, self._eps, self._kernels = betas, eps, kernels
        self.steps = 0
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for group in groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, clip: Tensor) -> None:
        """Updates every master from its `grad` and rounds it to its weights; the host waits for nothing.

        Args:
            clip: fp32 scalar on the masters' device, factor of all gradients; what it leaves in `grad` is undefined.
                Where it is not finite everything stays as it was, but `steps` has to be told by `was_skipped`.
        """
        self.steps += 1
        skipped = clip.isfinite().logical_not().float()
        for group in self.param_groups:
            masters = group["params"]
            if all(self._kernels.takes(KernelOp.adamw, master) for master in masters):
                self._step_by_kernel(group, clip, skipped)
            elif self._kernels.apex(KernelOp.adamw) and all(m.is_cuda and m.numel() < INT32_ELEMENTS for m in masters):
                self._step_by_apex(group, clip)
            else:
                self._step_by_torch(group, clip, skipped)

    def was_skipped(self) -> None:
        """The last step's `clip` was not finite; before the next one."""
        self.steps -= 1

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, a checkpoint's."""
        self.steps = steps
        for state in self.state.values():
            state["step"].fill_(float(steps))

    def _step_by_kernel(self, group: dict[str, Any], clip: Tensor, skipped: Tensor) -> None:
        how = AdamWStep(group["lr"], group["weight_decay"], self._betas, self._eps, self.steps)
        for master, weights in zip(group["params"], group["weights"], strict=True):
            state = self.state[master]
            state["step"].add_(1.0 - skipped)
            adamw(master, state["exp_avg"], state["exp_avg_sq"], weights, master.grad, clip, how)

    def _step_by_apex(self, group: dict[str, Any], clip: Tensor) -> None:
        """Apex knows no step that is none, so here the host waits for the factor."""
        factor = clip.item()
        if not math.isfinite(factor):
            return
        amp = extension(AMP)
        masters = group["params"]
        gradients = [master.grad for master in masters]
        non_finite = torch.zeros(1, dtype=torch.int32, device=masters[0].device)  # wanted; the norm was finite
        if factor != 1.0:
            amp.multi_tensor_scale(APEX_CHUNK, non_finite, [gradients, gradients], factor)
        states = [self.state[master] for master in masters]
        for state in states:
            state["step"] += 1
        lists = [gradients, masters, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]]
        bias_correction = 1
        amp.multi_tensor_adam(
            APEX_CHUNK, non_finite, lists, group["lr"], *self._betas, self._eps, self.steps, APEX_ADAMW_MODE,
            bias_correction, group["weight_decay"],
        )  # fmt: skip
        for master, weights in zip(masters, group["weights"], strict=True):
            weights.copy_(master)

    def _step_by_torch(self, group: dict[str, Any], clip: Tensor, skipped: Tensor) -> None:
        gradients = [master.grad for master in group["params"]]
        # A factor of 1 changes no bit. To ask a GPU whether it is one would be to wait for it.
        if clip.device.type != "cpu" or clip.item() != 1.0:
            torch._foreach_mul_(gradients, clip)
        states = [self.state[master] for master in group["params"]]
        torch_adamw(
            group["params"],
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=skipped,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._eps,
            maximize=False,
        )
        for master, weights in zip(group["params"], group["weights"], strict=True):
            weights.copy_(master)


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
    """Drives a plugin's update; see `megads.optim.optimizers.FusedAdamW` for what it offers.

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
