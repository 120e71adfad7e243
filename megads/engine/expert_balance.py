"""Balance of experts at the end of a step: the counts of the global batch, and the state of routers derived from them.

Every micro-batch's backward pass adds its counts to its routers' statistics. They are summed once a step over all ranks
that hold other tokens, so that the state of a router depends on the global batch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megads.engine.interface import EngineSpec
from megads.engine.stage_pipeline import StagePipeline, placement_of
from megads.model.moe import SUMMARY, Router
from megads.runtime.hooks import ExpertStatistics


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
        self._layers = [layer for layer in range(spec.model.num_layers) if self._moe.holds(layer)]
        self._own = [self._layers.index(int(key.split(".")[1])) for key in self.routers]
        self._pp = grid.pp
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

    @torch.no_grad()
    def all_layers(self) -> Tensor:
        """The statistics of the step for all layers with experts of the model, fp64 [layers, e + SUMMARY] on every
        rank; collective over the pipeline, after `update`. Does not synchronize with the device."""
        shape = (len(self._layers), self._statistics.shape[1])
        statistics = torch.zeros(shape, dtype=torch.float64, device=self._statistics.device)
        for row, own in zip(self._own, self._statistics, strict=True):
            statistics[row] = own
        if self._pp.size > 1:
            dist.all_reduce(statistics, group=self._pp.group)
        return statistics

    def read(self, statistics: Sequence[float]) -> ExpertStatistics:
        """Converts the result of `all_layers`, flattened and on the host."""
        width = self._statistics.shape[1]
        rows = [statistics[start : start + width] for start in range(0, len(statistics), width)]
        return ExpertStatistics.from_sums(self._layers, self._moe.top_k, rows)
