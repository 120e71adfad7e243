"""Optimizer state that DeepSpeed partitions, as megads' checkpoints and checks see it; for all engines of DeepSpeed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megads.engine.deepspeed_adam import deepspeed_adamw
from megads.engine.deepspeed_adapter import ZeroPiece, ZeroState, prepare_deepspeed
from megads.engine.interface import EngineSpec, Replica
from megads.engine.stage_pipeline import local_shape
from megads.engine.train_engine import BaseTrainEngine, StateTensors, not_finite, replica_groups, same_bits
from megads.model.sharding import fused_rows
from megads.optim.config import OptimConfig
from megads.optim.groups import AVERAGE, optimizer_state_kinds, parameter_role
from megads.optim.masters import MasterGroup, MasterLayout, MasterUpdate, ParameterRun, UpdateRule, update_average
from megads.optim.optimizers import make_rule
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.sharding import placement_of
from megads.parallel.weight_gradients import SplitLayer, TiedGradient


class ZeroUpdateRule(Optimizer):
    """Applies an update rule to the fp32 masters that DeepSpeed substitutes for the parameters, some at a time.

    DeepSpeed clips the gradients before and skips non-finite steps.

    Attributes:
        layouts: layouts of the masters, set once DeepSpeed has created them.
    """

    def __init__(self, groups: list[dict[str, Any]], rule: UpdateRule, lr: float) -> None:
        """Initializes the parameter groups.

        Args:
            groups: parameter groups with `params`, `lr_scale` and `weight_decay`.
            rule: the update rule.
            lr: initial learning rate.
        """
        super().__init__(groups, {"lr": lr})
        self._rule, self.layouts = rule, dict[Tensor, MasterLayout]()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the masters that are currently in the parameter groups."""
        assert closure is None
        updates = []
        for group in self.param_groups:
            for master in group["params"]:
                state = {kind: tensor for kind, tensor in self.state[master].items() if kind != "step"}
                taken = self.state[master]["step"].add_(1.0)
                how = (group["lr"], group["weight_decay"], int(taken.item()))
                updates.append(MasterUpdate(master.detach(), master.grad, state, *how, self.layouts[master]))
        self._rule(updates)


def make_optimizer(groups: list[dict[str, Any]], spec: EngineSpec) -> Optimizer:
    """Builds the configured optimizer.

    Args:
        groups: parameter groups from `megads.optim.groups.parameter_groups`.
        spec: specification of the engine.
    """
    optim = spec.optim
    if rule := deepspeed_adamw(optim, spec.device):
        return ZeroUpdateRule(groups, rule, optim.lr)
    if optim.is_adamw:
        beta1, beta2 = optim.betas
        return torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)
    rule = make_rule(optim, spec.kernels, fused_rows(spec.model), spec.precision)
    return ZeroUpdateRule(groups, rule, optim.lr)


def master_layouts(state: ZeroState, grid: ParallelGrid, tied_key: str | None, *, muon: bool) -> list[MasterLayout]:
    """Returns the positions of the parameters in each of a rank's masters.

    Args:
        state: state of the ZeRO optimizer.
        grid: the ranks.
        tied_key: name of the tied embedding parameter; None if there is none.
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
            runs.append(
                ParameterRun(place.key, local_shape(parameter), place.dim, counted, *where, place.held_by_ranks)
            )
        role = parameter_role(runs[0].name, tied=runs[0].name == tied_key, muon=muon)
        layouts.append(MasterLayout(role, tuple(runs), MasterGroup.of_zero3(grid)))
    return layouts


class ZeroMasterState:
    """Optimizer state and running averages of the masters, and the step count.

    Args:
        optimizer: base optimizer of ZeRO.
        masters: flat fp32 master tensors.
        layouts: layout of each master.
        optim: config of the optimizer.
    """

    def __init__(
        self, optimizer: Optimizer, masters: list[Tensor], layouts: list[MasterLayout], optim: OptimConfig
    ) -> None:
        self._optimizer, self._masters, self._ema_decay = optimizer, masters, optim.ema_decay
        self._averages = [] if optim.ema_decay is None else [master.detach().clone() for master in masters]
        if isinstance(optimizer, ZeroUpdateRule):
            optimizer.layouts = dict(zip(masters, layouts, strict=True))
        # An update rule reads the step count on the host.
        counts_on = torch.device("cpu") if isinstance(optimizer, ZeroUpdateRule) else masters[0].device
        # Created before the first step, so that a checkpoint of step 0 has the same tensors as any other.
        for master, layout in zip(masters, layouts, strict=True):
            kinds = optimizer_state_kinds(optim, layout.role)
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=counts_on),
                **{kind: torch.zeros_like(master, requires_grad=False) for kind in kinds},
            }

    def views_of(self, piece: ZeroPiece) -> dict[str, Tensor]:
        """Flat views of the master weight, optimizer state and running average of one piece, by kind."""
        master = self._masters[piece.master]
        state = {kind: tensor for kind, tensor in self._optimizer.state[master].items() if kind != "step"}
        averages = {AVERAGE: self._averages[piece.master]} if self._averages else {}
        tensors = {"weight": master.data, **state, **averages}
        return {kind: tensor.view(-1).narrow(0, piece.start, piece.length) for kind, tensor in tensors.items()}

    @torch.no_grad()
    def update_averages(self) -> None:
        """Updates the running averages, if any, after a step that was not skipped."""
        for average, master in zip(self._averages, self._masters, strict=False):
            assert self._ema_decay is not None
            update_average(average, master.data, self._ema_decay)

    @torch.no_grad()
    def swap_averages(self) -> None:
        """Swaps masters and averages; needs memory for a copy of one master."""
        for average, master in zip(self._averages, self._masters, strict=True):
            held = master.data.clone()
            master.data.copy_(average)
            average.copy_(held)

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken, skipped steps excluded."""
        return int(self._optimizer.state[self._masters[0]]["step"].item())

    def set_steps(self, steps: int) -> None:
        """Sets the step count used for bias correction."""
        for master in self._masters:
            self._optimizer.state[master]["step"].fill_(float(steps))


def tie_weights(embedding: SplitLayer, head: SplitLayer, shape: tuple[int, ...]) -> None:
    """Ties the output projection to the embedding's weight; their two gradients are added in fp32.

    Args:
        embedding: the embedding; ZeRO-3 may have partitioned its weight already.
        head: output projection with the same vocabulary.
        shape: shape of the weight before partitioning.
    """
    head.weight = embedding.weight
    head.weight_gradients = embedding.weight_gradients = TiedGradient(shape)


class PartitionedEngine(BaseTrainEngine):
    """Base class of the engines whose optimizer is DeepSpeed's: its state as rectangles, replicas and averages.

    Attributes:
        partitions: DeepSpeed's partition of master weights and gradients.
        masters: optimizer state and running averages of the master weights.
    """

    partitions: ZeroState
    masters: ZeroMasterState

    def __init__(self, spec: EngineSpec) -> None:
        prepare_deepspeed()
        super().__init__(spec)
        self._forward_finite = torch.ones((), dtype=torch.bool, device=spec.device)

    @abstractmethod
    def _parameters(self) -> Iterator[Parameter]:
        """All parameters of this rank; under ZeRO-3 without elements."""

    @abstractmethod
    def _owns(self, piece: ZeroPiece) -> bool:
        """Whether this rank owns a piece of the state: each element of the model is owned by one rank."""

    @abstractmethod
    def _copies(self, parameter: Parameter, *, working: bool) -> dict[str, Axis]:
        """Groups of ranks that hold the same copy of a parameter, besides tensor-parallel ranks, by name.

        Args:
            parameter: the parameter.
            working: whether of the working weight; else of the pieces of master weight and optimizer state.
        """

    @property
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""
        return self.masters.steps

    @torch.no_grad()
    def _reduced_norm(self) -> Tensor:
        """See BaseTrainEngine. May differ in the last digits from the norm that DeepSpeed computes."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for piece, gradient in zip(self.partitions.pieces(), self.partitions.gradients(), strict=True):
            if self._owns(piece):
                square += gradient.double().square().sum()
        if self.grid.world_size > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def _state(self) -> Iterator[StateTensors]:
        for piece in self.partitions.pieces():
            yield StateTensors(piece.parameter, piece.first, self._owns(piece), self.masters.views_of(piece))

    def _gradients(self) -> Iterator[StateTensors]:
        for piece, gradient in zip(self.partitions.pieces(), self.partitions.gradients(), strict=True):
            yield StateTensors(piece.parameter, piece.first, self._owns(piece), {"gradient": gradient})

    def replicas(self) -> list[Replica]:
        """See TrainEngine.replicas."""
        found = list[Replica]()
        for parameter in self._parameters():
            if parameter.numel():
                lines = replica_groups(parameter, self.grid, self._copies(parameter, working=True))
                found.append(Replica(f"working_weight/{placement_of(parameter).key}", parameter.data.view(-1), lines))
        for piece in self.partitions.pieces():
            lines = replica_groups(piece.parameter, self.grid, self._copies(piece.parameter, working=False))
            name = placement_of(piece.parameter).key
            found += [Replica(f"{kind}/{name}", flat, lines) for kind, flat in self.masters.views_of(piece).items()]
        return found

    def stale_weights(self) -> list[str]:
        """See TrainEngine.stale_weights."""
        pieces = [piece for piece in self.partitions.pieces() if piece.parameter.numel()]
        whole = []
        for piece in pieces:
            own = piece.parameter.data.view(-1).narrow(0, piece.first, piece.length)
            whole.append(same_bits(own, self.masters.views_of(piece)["weight"].to(own.dtype)))
        return [placement_of(piece.parameter).key for piece in compress(pieces, not_finite(whole))]

    def _set_optimizer_steps(self, steps: int) -> None:
        self.masters.set_steps(steps)

    def _refresh_weights(self) -> None:
        self.partitions.refresh_weights()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See TrainEngine.averaged_weights."""
        if self._update_wait is not None:
            self._update_wait()
        self.masters.swap_averages()
        self._refresh_weights()
        yield
        self.masters.swap_averages()
        self._refresh_weights()
