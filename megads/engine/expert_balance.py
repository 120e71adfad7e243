"""Balance of experts at the end of a step: the counts of the global batch, and the state of routers derived from them.

Every micro-batch's backward pass adds its counts to its routers' statistics. They are summed once a step over all ranks
that hold other tokens, so that the state of a router depends on the global batch only.

Where experts have a capacity, backward passes also note overflows. A step with one on any rank is discarded, unless its
rows are to be dropped: its norm is infinite on all ranks, which changes nothing, and the host finds out why when it
reads the results of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megads.engine.interface import EngineSpec
from megads.engine.stage_pipeline import StagePipeline
from megads.model.moe import SUMMARY, Experts, Router
from megads.parallel.sharding import placement_of
from megads.runtime.hooks import CAPACITY_SUMMARY, ExpertStatistics


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
        self._experts = [experts for experts in module.modules() if isinstance(experts, Experts)]
        self._has_capacity = self._moe.capacity_factor is not None
        self._dropless = False
        shape = (len(routers), 1 + self._moe.num_experts)
        self._overflow = torch.zeros(shape, dtype=torch.float64, device=spec.device)
        if self._has_capacity:
            for experts, overflow in zip(self._experts, self._overflow, strict=True):
                experts.overflow = overflow

    @property
    def is_dropless(self) -> bool:
        """Whether passes compute exactly the rows that there are."""
        return self._dropless or not self._has_capacity

    @contextmanager
    def without_capacity(self) -> Iterator[None]:
        """Context in which passes are dropless, unless rows beyond a capacity are to be dropped."""
        self._dropless = not self._moe.drops
        try:
            yield
        finally:
            self._dropless = False

    def begin(self) -> None:
        """Resets the statistics; call before the first micro-batch of a step."""
        self._statistics.zero_()
        self._overflow.zero_()
        for experts in self._experts:
            experts.padded = not self.is_dropless

    def discarded(self) -> Tensor | None:
        """Infinity if this rank's passes lacked rows that must not be dropped, else 0; fp64 scalar on the device, or
        None if no rows can lack."""
        if self.is_dropless or self._moe.drops:
            return None
        dropped = self._overflow[:, 0].sum()
        return torch.zeros_like(dropped).masked_fill_(dropped > 0.0, math.inf)

    def must_repeat(self, statistics: ExpertStatistics | None) -> bool:
        """Whether a step was discarded as rows were missing; the same on all ranks."""
        return not self._moe.drops and statistics is not None and sum(statistics.dropped) > 0

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
            if self._has_capacity:
                dropped, filled = self._overflow[:, 0].contiguous(), self._overflow[:, 1:].contiguous()
                dist.all_reduce(dropped, group=axis.group)
                dist.all_reduce(filled, dist.ReduceOp.MAX, group=axis.group)
                self._overflow.copy_(torch.cat((dropped[:, None], filled), 1))
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
        rank, with CAPACITY_SUMMARY more numbers if experts have a capacity; collective over the pipeline, after
        `update`. Does not synchronize with the device."""
        own = self._statistics
        if self._has_capacity:
            needed, fullest = self._overflow[:, 1:].max(1)
            own = torch.cat((own, torch.stack((self._overflow[:, 0], needed, fullest.double()), 1)), 1)
        statistics = own.new_zeros(len(self._layers), own.shape[1])
        for row, of_row in zip(self._own, own, strict=True):
            statistics[row] = of_row
        if self._pp.size > 1:
            dist.all_reduce(statistics, group=self._pp.group)
        return statistics

    def read(self, statistics: Sequence[float]) -> ExpertStatistics:
        """Converts the result of `all_layers`, flattened and on the host."""
        width = self._statistics.shape[1] + CAPACITY_SUMMARY * self._has_capacity
        rows = [statistics[start : start + width] for start in range(0, len(statistics), width)]
        return ExpertStatistics.from_sums(self._layers, self._moe.top_k, rows, capacity=self._has_capacity)
