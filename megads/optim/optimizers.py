"""Optimizers of flat fp32 masters under ZeRO-0 and 1: AdamW with its kernels, LAMB, a wrapper of other update rules.

All are a `MasterOptimizer`. None inherits from torch.optim, which imports torch's compiler (torch._dynamo): 800 modules
and 0.8 s at the start of each rank, and on a shared file system that many files per rank.

LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2) is AdamW with layer-wise trust ratios. MegaScale
(Jiang et al. 2024, https://arxiv.org/abs/2402.15627, section 3.1) uses it with four times the batch size. With Adam's
bias-corrected moments m and v of a whole parameter w:

    u = m / (sqrt(v) + eps) + weight_decay w;  w = w - lr (||w|| / ||u||) u

Both norms are over the whole parameter (of experts, over the matrix of each), summed over the ranks that hold it, so
that the result does not depend on the layout. The ratio is 1 for biases and norms, as in the authors' code, and if
either norm is 0.

Shape suffixes: e = elements of a flat master, p = runs of parameters in some masters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from megads.ops.adamw import APEX_CHUNK, AdamWStep, Pieces, adamw, square_sums
from megads.ops.apex import AMP, INT32_ELEMENTS, extension
from megads.ops.config import TORCH, KernelOp, Kernels
from megads.optim.config import LambOptions, OptimConfig, OptimizerName
from megads.optim.groups import Role, optimizer_state_kinds
from megads.optim.masters import ElementwiseRule, MasterLayout, MasterUpdate, UpdateRule, by_group
from megads.optim.muon import FusedRows, MuonRule


class LambRule:
    """See UpdateRule.

    Args:
        optim: the optimizer's settings.
        kernels: kernel implementation of sums of squares.
    """

    def __init__(self, optim: OptimConfig, kernels: Kernels = TORCH) -> None:
        self._options: LambOptions = optim.typed_options
        self._betas, self._eps, self._kernels = optim.betas, optim.eps, kernels
        self._pieces: dict[int, Pieces] = {}

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """See UpdateRule."""
        for update in updates:
            self._turn_into_direction(update)
        adapted = [update for update in updates if self._options.adapt_all or update.parameters.role.decays]
        for update in updates:
            if all(update is not other for other in adapted):
                update.master.sub_(update.grad, alpha=update.lr)
        for together in by_group(adapted):
            ratios = iter(self._ratios(together))
            for update in together:
                for run in update.parameters.runs:
                    run.view_in(update.master).addcmul_(run.view_in(update.grad), next(ratios), value=-update.lr)

    def _turn_into_direction(self, update: MasterUpdate) -> None:
        """Overwrites the gradient with u."""
        beta1, beta2 = self._betas
        mean_e, variance_e, u_e = update.state["exp_avg"], update.state["exp_avg_sq"], update.grad
        mean_e.lerp_(u_e, 1.0 - beta1)
        variance_e.mul_(beta2).addcmul_(u_e, u_e, value=1.0 - beta2)
        root_e = variance_e.div(1.0 - beta2**update.step).sqrt_().add_(self._eps)
        torch.div(mean_e, root_e, out=u_e).div_(1.0 - beta1**update.step)
        if update.weight_decay:
            u_e.add_(update.master, alpha=update.weight_decay)

    def _ratios(self, updates: Sequence[MasterUpdate]) -> Tensor:
        """Trust ratio ||w|| / ||u|| of the whole parameter of every run, fp32 [p] on the device.

        Args:
            updates: updates of masters of one group.
        """
        own = [
            torch.stack([square_sums(flat_e, self._of(update.parameters, flat_e), self._kernels) for flat_e in both_e])
            for update, both_e in ((update, (update.master, update.grad)) for update in updates)
        ]
        runs = [run for update in updates for run in update.parameters.runs]
        counted_p = torch.tensor([run.counted for run in runs], device=own[0].device)
        norms_p = updates[0].parameters.group.total(torch.cat(own, dim=1) * counted_p).sqrt()
        ratios_p = norms_p[0] / norms_p[1]
        ratios_p = torch.where((norms_p > 0).all(dim=0), ratios_p, 1.0)
        most = self._options.max_ratio
        return (ratios_p if most is None else ratios_p.clamp(max=most)).float()

    def _of(self, layout: MasterLayout, flat_e: Tensor) -> Pieces:
        known = self._pieces.get(id(layout))
        if known is None:
            bounds = ((run.start, run.start + run.length) for run in layout.runs)
            known = self._pieces[id(layout)] = Pieces(bounds, flat_e.device)
        return known


APEX_ADAMW_MODE = 1
"""Selects decoupled weight decay; 0 selects Adam with an L2 penalty."""


class MasterOptimizer(Protocol):
    """Interface of an optimizer for the engine.

    Attributes:
        param_groups: groups with `params` (masters), `weights` (model weights rounded from them), `lr` and
            `weight_decay`. Before a step the caller sets `lr` to the run's learning rate times its `lr_scale`.
        state: fp32 state tensors of each master, allocated before the first step, so that checkpoints of all steps have
            the same tensors.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @property
    def steps(self) -> int:
        """Number of steps, counted on the host."""

    def step(self, clip: Tensor) -> None:
        """Updates every master from its `grad` and rounds it to its weights; `grad` is undefined afterwards.

        Args:
            clip: factor of all gradients, fp32 scalar on the masters' device. If it is not finite, the step is skipped
                on the device, and the caller must call `undo_step_count`.
        """

    def undo_step_count(self) -> None:
        """Corrects `steps` after a step whose `clip` was not finite; call before the next step."""

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, from a checkpoint."""


class FusedAdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) with gradient clipping before and rounding to model weights after it.

    megads' kernel does all three in one pass. PyTorch's, bitwise equal to torch.optim.AdamW(fused=True), and apex's
    need two further passes. The state is the same for all.

    Attributes:
        param_groups: groups with `params` (masters), `weights`, `lr` and `weight_decay`; the caller sets `lr` before a
            step.
        state: fp32 moments `exp_avg` and `exp_avg_sq` of each master, allocated before the first step, so that
            checkpoints of all steps have the same tensors; and `step`, number of steps, which megads' kernel does not
            use and does not count.
        steps: number of steps, counted on the host to avoid a synchronization.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        kernels: Kernels = TORCH,
    ) -> None:
        """Allocates the state.

        Args:
            groups: groups with `params` (flat fp32 masters), `weights` (flat model weights of the same length) and
                `weight_decay`.
            lr: initial learning rate.
            betas: decay rates of the moments.
            eps: added to the square root of the second moment.
            kernels: kernel implementation; NVIDIA apex on GPUs only.
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
        """See MasterOptimizer; synchronizes with the device only for apex."""
        self.steps += 1
        by_torch: dict[tuple[float, float], list[dict[str, Any]]] = {}
        for group in self.param_groups:
            masters = group["params"]
            if all(self._kernels.takes(KernelOp.adamw, master) for master in masters):
                self._step_by_kernel(group, clip)
            elif self._kernels.apex(KernelOp.adamw) and all(m.is_cuda and m.numel() < INT32_ELEMENTS for m in masters):
                self._step_by_apex(group, clip)
            else:
                by_torch.setdefault((group["lr"], group["weight_decay"]), []).append(group)
        if by_torch:
            self._step_by_torch(by_torch, clip)

    def undo_step_count(self) -> None:
        """See MasterOptimizer."""
        self.steps -= 1

    def set_steps(self, steps: int) -> None:
        """See MasterOptimizer."""
        self.steps = steps
        for state in self.state.values():
            state["step"].fill_(float(steps))

    def _step_by_kernel(self, group: dict[str, Any], clip: Tensor) -> None:
        how = AdamWStep(group["lr"], group["weight_decay"], self._betas, self._eps, self.steps)
        for master, weights in zip(group["params"], group["weights"], strict=True):
            state = self.state[master]
            adamw(master, state["exp_avg"], state["exp_avg_sq"], weights, master.grad, clip, how)

    def _step_by_apex(self, group: dict[str, Any], clip: Tensor) -> None:
        """Synchronizes with the device, as apex does not support skipping a step on the device."""
        factor = clip.item()
        if not math.isfinite(factor):
            return
        amp = extension(AMP)
        masters = group["params"]
        gradients = [master.grad for master in masters]
        non_finite = torch.zeros(1, dtype=torch.int32, device=masters[0].device)  # required argument, not read
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

    def _step_by_torch(self, by_rates: dict[tuple[float, float], list[dict[str, Any]]], clip: Tensor) -> None:
        """Steps groups of the same learning rate and weight decay together, which saves launches."""
        together = [group for groups in by_rates.values() for group in groups]
        # A factor of 1 changes nothing, but reading it from a GPU would synchronize.
        if clip.device.type != "cpu" or clip.item() != 1.0:
            torch._foreach_mul_([master.grad for group in together for master in group["params"]], clip)
        skipped = clip.isfinite().logical_not().float()
        for (lr, weight_decay), groups in by_rates.items():
            masters = [master for group in groups for master in group["params"]]
            states = [self.state[master] for master in masters]
            torch_adamw(
                masters,
                [master.grad for master in masters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=skipped,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=lr,
                weight_decay=weight_decay,
                eps=self._eps,
                maximize=False,
            )
        masters = [master.detach() for group in together for master in group["params"]]
        torch._foreach_copy_([weights for group in together for weights in group["weights"]], masters)


class RuleOptimizer:
    """A `MasterOptimizer` that applies an update rule.

    Args:
        groups: groups with `params` (masters), `weights`, `weight_decay`, `kinds` (names of state tensors) and
            `layouts` of the masters (None if the rule does not need them).
        rule: the update rule.
        lr: initial learning rate.
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
        """See MasterOptimizer; synchronizes with the device to read `clip`."""
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

    def undo_step_count(self) -> None:
        """See MasterOptimizer."""
        self.steps -= 1

    def set_steps(self, steps: int) -> None:
        """See MasterOptimizer."""
        self.steps = steps


class SeveralOptimizers:
    """A `MasterOptimizer` that combines optimizers of different masters.

    Args:
        parts: the optimizers in the order in which they step, the same on all ranks.
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

    def undo_step_count(self) -> None:
        """See MasterOptimizer."""
        for part in self._parts:
            part.undo_step_count()

    def set_steps(self, steps: int) -> None:
        """See MasterOptimizer."""
        for part in self._parts:
            part.set_steps(steps)


def make_rule(
    optim: OptimConfig,
    kernels: Kernels = TORCH,
    fused: FusedRows | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> UpdateRule:
    """Update rule of any optimizer except AdamW.

    Args:
        optim: the optimizer's settings.
        kernels: kernel implementation.
        fused: fused parameters that consist of several matrices.
        weights_dtype: dtype of the model weights.

    Raises:
        ConfigError: no plugin registered the optimizer.
    """
    if optim.is_muon:
        return MuonRule(optim, fused or {}, weights_dtype, kernels)
    if optim.name == OptimizerName.lamb:
        return LambRule(optim, kernels)
    return ElementwiseRule(optim)


def make_optimizer(
    groups: Sequence[dict[str, Any]],
    optim: OptimConfig,
    kernels: Kernels = TORCH,
    fused: FusedRows | None = None,
    adamw_rule: UpdateRule | None = None,
) -> MasterOptimizer:
    """Builds the optimizer of a rank under ZeRO-0 and 1.

    Args:
        groups: groups with `params` (masters), `weights`, `weight_decay`, `role`, and `layouts` of the masters.
        optim: the optimizer's settings.
        kernels: kernel implementation.
        fused: fused parameters that consist of several matrices.
        adamw_rule: update rule that replaces AdamW; None: `FusedAdamW`.

    Raises:
        ConfigError: no plugin registered the optimizer.
    """
    ruled = [group for group in groups if not optim.is_adamw and (not optim.is_muon or group["role"] is Role.hidden)]
    others = [group for group in groups if all(group is not other for other in ruled)]
    parts: list[MasterOptimizer] = []
    if ruled:
        with_kinds = [group | {"kinds": optimizer_state_kinds(optim, group["role"])} for group in ruled]
        dtype = ruled[0]["weights"][0].dtype
        parts.append(RuleOptimizer(with_kinds, make_rule(optim, kernels, fused, dtype), optim.lr))
    if others and adamw_rule is not None:
        with_kinds = [group | {"kinds": optimizer_state_kinds(optim, group["role"])} for group in others]
        parts.append(RuleOptimizer(with_kinds, adamw_rule, optim.lr))
    elif others:
        beta1, beta2 = optim.betas
        parts.append(FusedAdamW(others, optim.lr, (beta1, beta2), optim.eps, kernels))
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)
