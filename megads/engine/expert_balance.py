"""Balance of experts at the end of a step: the counts of the global batch, and the state of routers derived from them.

Every micro-batch's backward pass adds its counts to its routers' statistics. They are summed once a step over all ranks
that hold other tokens, so that the state of a router depends on the global batch only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megads.engine.interface import EngineSpec
from megads.engine.stage_pipeline import StagePipeline, placement_of
from megads.model.moe import SUMMARY, Router


class ExpertBalance:
    """The routers of a rank's stages.

    Args:
        module: this rank's stages.
        spec: specification of the engine.
    """

    def __init__(self, module: StagePipeline, spec: EngineSpec) -> None:
        routers = [router for router in module.modules() if isinstance(router, Router)]
        self.routers = {placement_of(router.weight).key.removesuffix(".weight"): router for router in routers}
        self._moe, grid = spec.model.moe, spec.grid
        over = (grid.data, grid.tp if spec.parallel.sequence_parallel else None)
        self._axes = [axis for axis in over if axis is not None and axis.size > 1]
        shape = (len(routers), self._moe.num_experts + SUMMARY)
        self._statistics = torch.zeros(shape, dtype=torch.float64, device=spec.device)
        for router, statistics in zip(routers, self._statistics, strict=True):
            router.statistics = statistics

    def begin(self) -> None:
        """Resets the statistics; call before the first micro-batch of a step."""
        self._statistics.zero_()

    @torch.no_grad()
    def update(self, norm: Tensor) -> None:
        """Sums the statistics over the ranks and updates the routers; nothing changes if the gradient norm is not
        finite.

        Collective over the ranks of a stage; does not synchronize with the device.

        Args:
            norm: gradient norm of the step, scalar on the device.
        """
        for axis in self._axes:
            dist.all_reduce(self._statistics, group=axis.group)
        taken = norm.isfinite()
        for router, statistics in zip(self.routers.values(), self._statistics, strict=True):
            counts_e = statistics[: self._moe.num_experts]
            mean = counts_e.mean()
            if router.expert_load is not None:
                load_e = (counts_e / mean).to(router.expert_load.dtype)
                router.expert_load.copy_(torch.where(taken, load_e, router.expert_load))
            if router.expert_bias is not None:
                moved_e = router.expert_bias + self._moe.bias_rate * torch.sign(mean - counts_e).float()
                router.expert_bias.copy_(torch.where(taken, moved_e, router.expert_bias))
