"""LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2): AdamW with layer-wise trust ratios.

MegaScale (Jiang et al. 2024, https://arxiv.org/abs/2402.15627, section 3.1) uses it with four times the batch size.
With Adam's bias-corrected moments m and v of a whole parameter w:

    u = m / (sqrt(v) + eps) + weight_decay w;  w = w - lr (||w|| / ||u||) u

Both norms are over the whole parameter, summed over the ranks that hold it, so that the result does not depend on the
layout. The ratio is 1 for biases and norms, as in the authors' code, and if either norm is 0.

Shape suffixes: e = elements of a flat master, p = runs of parameters in some masters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megads.ops.adamw import Pieces, square_sums
from megads.ops.config import TORCH, Kernels
from megads.optim.config import LambOptions, OptimConfig
from megads.optim.masters import MasterLayout, MasterLine, MasterUpdate


class LambRule:
    """See UpdateRule.

    Args:
        optim: the optimizer's settings.
        line: ranks over which the parameters are sharded.
        kernels: kernel implementation of sums of squares.
    """

    def __init__(self, optim: OptimConfig, line: MasterLine, kernels: Kernels = TORCH) -> None:
        self._options: LambOptions = optim.typed_options
        self._betas, self._eps, self._line, self._kernels = optim.betas, optim.eps, line, kernels
        self._pieces: dict[int, Pieces] = {}

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """See UpdateRule."""
        for update in updates:
            self._turn_into_direction(update)
        adapted = [update for update in updates if self._options.adapt_all or update.parameters.role.decays]
        for update in updates:
            if all(update is not other for other in adapted):
                update.master.sub_(update.grad, alpha=update.lr)
        if not adapted:
            return
        ratios = iter(self._ratios(adapted))
        for update in adapted:
            for run in update.parameters.runs:
                run.of(update.master).addcmul_(run.of(update.grad), next(ratios), value=-update.lr)

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
        """Trust ratio ||w|| / ||u|| of the whole parameter of every run, fp32 [p] on the device."""
        own = [
            torch.stack([square_sums(flat_e, self._of(update.parameters, flat_e), self._kernels) for flat_e in both_e])
            for update, both_e in ((update, (update.master, update.grad)) for update in updates)
        ]
        runs = [run for update in updates for run in update.parameters.runs]
        counted_p = torch.tensor([run.counted for run in runs], device=own[0].device)
        norms_p = self._line.total(torch.cat(own, dim=1) * counted_p).sqrt()
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
