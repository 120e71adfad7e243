"""Optimizers over flat fp32 masters under ZeRO-0 and 1: AdamW with its kernels, and the driver of any other rule.

All are a `MasterOptimizer`. None has the base class of torch.optim, which loads the compiler, torch._dynamo: 800
modules and 0.8 s of each rank's start, and on a shared file system that many files times the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from megads.ops.adamw import APEX_CHUNK, AdamWStep, adamw
from megads.ops.apex import AMP, INT32_ELEMENTS, extension
from megads.ops.config import TORCH, KernelOp, Kernels
from megads.optim.config import OptimConfig, OptimizerName
from megads.optim.groups import Role, state_kinds
from megads.optim.lamb import LambRule
from megads.optim.masters import ElementwiseRule, MasterLine, MasterUpdate, UpdateRule
from megads.optim.muon import FusedRows, MuonRule

APEX_ADAMW_MODE = 1
"""Decoupled weight decay; 0 is Adam with an L2 penalty."""


class MasterOptimizer(Protocol):
    """What the engine sees of an optimizer.

    Attributes:
        param_groups: each with its `params` (masters), the `weights` that they are rounded to, `lr` and `weight_decay`;
            the caller sets the learning rate before a step, that of the run times the `lr_scale` that it gave.
        state: of each master its fp32 tensors, all there before the first step, so that a checkpoint of step 0 has the
            shape of any other.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @property
    def steps(self) -> int:
        """Steps taken as the host knows it."""

    def step(self, clip: Tensor) -> None:
        """Updates every master from its `grad` and rounds it to its weights.

        Args:
            clip: fp32 scalar on the masters' device, factor of all gradients; what it leaves in `grad` is undefined.
                Where it is not finite everything stays as it was, but `steps` has to be told by `was_skipped`.
        """

    def was_skipped(self) -> None:
        """The last step's `clip` was not finite; before the next one."""

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, a checkpoint's."""


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


class RuleOptimizer:
    """Drives an update rule; a `MasterOptimizer`.

    Args:
        groups: each with its `params`, the `weights` that they are rounded to, its `weight_decay`, the `kinds` of state
            that it has, and the `layouts` of its masters (None where the rule asks for none).
        rule: what a step does.
        lr: learning rate until the caller sets another.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], rule: UpdateRule, lr: float) -> None:
        self._rule = rule
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self.steps = 0
        self.state: dict[Tensor, dict[str, Tensor]] = {
            master: {kind: torch.zeros_like(master) for kind in group["kinds"]}
            for group in groups
            for master in group["params"]
        }

    @torch.no_grad()
    def step(self, clip: Tensor) -> None:
        """See MasterOptimizer; the host waits for the factor."""
        self.steps += 1
        factor = clip.item()
        if not math.isfinite(factor):
            return
        updates = []
        for group in self.param_groups:
            for master, layout in zip(group["params"], group["layouts"], strict=True):
                gradient = master.grad if factor == 1.0 else master.grad.mul_(factor)
                how = (group["lr"], group["weight_decay"], self.steps)
                updates.append(MasterUpdate(master.detach(), gradient, self.state[master], *how, layout))
        self._rule(updates)
        for group in self.param_groups:
            for master, weights in zip(group["params"], group["weights"], strict=True):
                weights.copy_(master)

    def was_skipped(self) -> None:
        """See MasterOptimizer."""
        self.steps -= 1

    def set_steps(self, steps: int) -> None:
        """See MasterOptimizer."""
        self.steps = steps


class SeveralOptimizers:
    """Optimizers of different masters as one; a `MasterOptimizer`.

    Args:
        parts: in the order in which they step, on all ranks.
    """

    def __init__(self, parts: Sequence[MasterOptimizer]) -> None:
        self._parts = tuple(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = {master: state for part in parts for master, state in part.state.items()}

    @property
    def steps(self) -> int:
        """See MasterOptimizer."""
        return self._parts[0].steps

    def step(self, clip: Tensor) -> None:
        """See MasterOptimizer."""
        for part in self._parts:
            part.step(clip)

    def was_skipped(self) -> None:
        """See MasterOptimizer."""
        for part in self._parts:
            part.was_skipped()

    def set_steps(self, steps: int) -> None:
        """See MasterOptimizer."""
        for part in self._parts:
            part.set_steps(steps)


def make_rule(
    optim: OptimConfig,
    line: MasterLine,
    kernels: Kernels = TORCH,
    fused: FusedRows | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> UpdateRule:
    """The rule of any optimizer but AdamW.

    Args:
        optim: names it and holds its settings.
        line: the ranks that hold the parameters together.
        kernels: whose kernels compute sums of squares.
        fused: parameters that are several matrices.
        weights_dtype: of the working weights.

    Raises:
        ConfigError: no plugin registered it.
    """
    if optim.is_muon:
        return MuonRule(optim, line, fused or {}, weights_dtype, kernels)
    if optim.name == OptimizerName.lamb:
        return LambRule(optim, line, kernels)
    return ElementwiseRule(optim)


def make_optimizer(
    groups: Sequence[dict[str, Any]],
    optim: OptimConfig,
    line: MasterLine,
    kernels: Kernels = TORCH,
    fused: FusedRows | None = None,
    adamw_rule: UpdateRule | None = None,
) -> MasterOptimizer:
    """The optimizer of a rank under ZeRO-0 and 1.

    Args:
        groups: each with its `params`, the `weights` that they are rounded to, its `weight_decay`, its `role`, and the
            `layouts` of its masters.
        optim: names it and holds its settings.
        line: the ranks that hold the parameters together.
        kernels: whose kernels compute.
        fused: parameters that are several matrices.
        adamw_rule: updates what AdamW updates; None: the kernels' AdamW.

    Raises:
        ConfigError: no plugin registered it.
    """
    ruled = [group for group in groups if not optim.is_adamw and (not optim.is_muon or group["role"] is Role.hidden)]
    others = [group for group in groups if all(group is not other for other in ruled)]
    parts: list[MasterOptimizer] = []
    if ruled:
        with_kinds = [group | {"kinds": state_kinds(optim, group["role"])} for group in ruled]
        dtype = ruled[0]["weights"][0].dtype
        parts.append(RuleOptimizer(with_kinds, make_rule(optim, line, kernels, fused, dtype), optim.lr))
    if others and adamw_rule is not None:
        with_kinds = [group | {"kinds": state_kinds(optim, group["role"])} for group in others]
        parts.append(RuleOptimizer(with_kinds, adamw_rule, optim.lr))
    elif others:
        beta1, beta2 = optim.betas
        parts.append(FusedAdamW(others, optim.lr, (beta1, beta2), optim.eps, kernels))
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)
