"""The optimizer that DeepSpeed's ZeRO-2 and ZeRO-3 drive: torch's AdamW, or any other update rule on their masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megads.engine.deepspeed_adam import deepspeed_adamw
from megads.engine.deepspeed_adapter import ZeroPiece, ZeroState, local_shape
from megads.engine.interface import EngineSpec
from megads.engine.stage_pipeline import placement_of
from megads.model.config import fused_rows
from megads.optim.config import OptimConfig
from megads.optim.groups import AVERAGE, parameter_role, state_kinds
from megads.optim.masters import MasterLayout, MasterLine, MasterUpdate, ParameterRun, UpdateRule, update_average
from megads.optim.optimizers import make_rule
from megads.parallel.grid import ParallelGrid


class RuleDrivenByZero(Optimizer):
    """Applies a rule to the masters that DeepSpeed puts in the place of the parameters: some at a time.

    DeepSpeed has clipped their gradients and calls no step that is not finite.

    Attributes:
        layouts: of the masters, known once DeepSpeed has made them.
    """

    def __init__(self, groups: list[dict[str, Any]], rule: UpdateRule, lr: float) -> None:
        """Keeps the groups.

        Args:
            groups: each with its `params`, `lr_scale` and `weight_decay`.
            rule: what a step does.
            lr: learning rate until the caller sets another.
        """
        super().__init__(groups, {"lr": lr})
        self._rule, self.layouts = rule, dict[Tensor, MasterLayout]()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the masters that are among the groups' parameters."""
        assert closure is None
        updates = []
        for group in self.param_groups:
            for master in group["params"]:
                state = {kind: tensor for kind, tensor in self.state[master].items() if kind != "step"}
                taken = self.state[master]["step"].add_(1.0)
                how = (group["lr"], group["weight_decay"], int(taken.item()))
                updates.append(MasterUpdate(master.detach(), master.grad, state, *how, self.layouts[master]))
        self._rule(updates)


def make_zero_optimizer(groups: list[dict[str, Any]], spec: EngineSpec) -> Optimizer:
    """The optimizer that a run asks for.

    Args:
        groups: of `megads.optim.groups.parameter_groups`.
        spec: what the engine is built from.
    """
    optim = spec.optim
    if rule := deepspeed_adamw(optim, spec.device):
        return RuleDrivenByZero(groups, rule, optim.lr)
    if optim.is_adamw:
        beta1, beta2 = optim.betas
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)
    line, fused = MasterLine.of_zero3(spec.grid), fused_rows(spec.model)
    return RuleDrivenByZero(groups, make_rule(optim, line, spec.kernels, fused, spec.precision), optim.lr)


def master_layouts(state: ZeroState, grid: ParallelGrid, tied_key: str | None, *, muon: bool) -> list[MasterLayout]:
    """Where the parameters lie in each of a rank's masters.

    Args:
        state: of the sharding optimizer.
        grid: the ranks.
        tied_key: name of the parameter that embedding and head share.
        muon: see `parameter_role`.
    """
    held = {(piece.master, piece.parameter): (piece.first, piece.start, piece.length) for piece in state.pieces()}
    layouts = []
    for master, parameters in enumerate(state.parameters):
        runs = []
        for parameter in parameters:
            place = placement_of(parameter)
            counted = place.dim is not None or grid.tp.is_first
            where = held.get((master, parameter), (0, 0, 0))
            runs.append(ParameterRun(place.key, local_shape(parameter), place.dim, counted, *where))
        role = parameter_role(runs[0].name, tied=runs[0].name == tied_key, muon=muon)
        layouts.append(MasterLayout(role, tuple(runs)))
    return layouts


class ZeroMasterState:
    """What the optimizer keeps beside the masters, and how many steps it took.

    Args:
        optimizer: that ZeRO drives.
        masters: its flat tensors.
        layouts: of each of them.
        optim: the optimizer's config.
    """

    def __init__(
        self, optimizer: Optimizer, masters: list[Tensor], layouts: list[MasterLayout], optim: OptimConfig
    ) -> None:
        self._optimizer, self._masters, self._ema_decay = optimizer, masters, optim.ema_decay
        self._averages = [] if optim.ema_decay is None else [master.detach().clone() for master in masters]
        if isinstance(optimizer, RuleDrivenByZero):
            optimizer.layouts = dict(zip(masters, layouts, strict=True))
        # A rule asks for the number on the host.
        counts_on = torch.device("cpu") if isinstance(optimizer, RuleDrivenByZero) else masters[0].device
        # Before the first step, so that a checkpoint of step 0 has the shape of any other.
        for master, layout in zip(masters, layouts, strict=True):
            kinds = state_kinds(optim, layout.role)
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=counts_on),
                **{kind: torch.zeros_like(master, requires_grad=False) for kind in kinds},
            }

    def of(self, piece: ZeroPiece) -> dict[str, Tensor]:
        """Views of the master weight, the state and the average of one piece, flat, by kind."""
        master = self._masters[piece.master]
        state = {kind: tensor for kind, tensor in self._optimizer.state[master].items() if kind != "step"}
        averages = {AVERAGE: self._averages[piece.master]} if self._averages else {}
        tensors = {"weight": master.data, **state, **averages}
        return {kind: tensor.narrow(0, piece.start, piece.length) for kind, tensor in tensors.items()}

    @torch.no_grad()
    def update_averages(self) -> None:
        """Takes a step into the running averages, if any; it was not skipped."""
        for average, master in zip(self._averages, self._masters, strict=False):
            assert self._ema_decay is not None
            update_average(average, master.data, self._ema_decay)

    @torch.no_grad()
    def swap_averages(self) -> None:
        """Exchanges masters and averages; a copy of one master is in memory at a time."""
        for average, master in zip(self._averages, self._masters, strict=True):
            held = master.data.clone()
            master.data.copy_(average)
            average.copy_(held)

    @property
    def steps(self) -> int:
        """Steps the optimizer has taken, skipped ones not counted."""
        return int(self._optimizer.state[self._masters[0]]["step"].item())

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, by which moments are corrected."""
        for master in self._masters:
            self._optimizer.state[master]["step"].fill_(float(steps))
