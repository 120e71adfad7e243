"""Flat fp32 master weights: layout of the parameters in them, ranks that shard them, and elementwise update rules.

An optimizer is an `UpdateRule`: it takes masters with their gradients and state and updates them in place. It does not
depend on how masters are sharded (megads' buckets under ZeRO-0 and 1, DeepSpeed under ZeRO-2 and 3). A rule that is not
elementwise communicates over the `MasterGroup` of each master, whose ranks all call the rule with masters of the same
parameters in the same order.

Shape suffixes: e = elements of a flat master, p = runs of parameters in some masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from megads.optim.config import LionOptions, OptimConfig
from megads.optim.groups import Role
from megads.parallel.grid import Axis, ParallelGrid
from megads.runtime.registry import OPTIMIZERS

CLIP_EPSILON = 1e-6
"""Added to the norm in the denominator of the clipping factor, as in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True)
class ParameterRun:
    """The contiguous range of a parameter's elements in one rank's master; at most one per parameter.

    Each expert in a stacked weight counts as a parameter of its own, since a rule that is not elementwise treats its
    matrices by themselves.

    Attributes:
        name: name of the parameter in the whole model; the same for all experts of a stacked weight.
        local_shape: shape of this tensor-parallel rank's shard.
        dim: dim that tensor parallelism shards; None: replicated.
        counted: whether this is the first of the tensor-parallel ranks that hold the same elements.
        first: index in the flattened local parameter at which the range starts.
        start: index in the master at which the range starts.
        length: number of elements; 0 if the rank has none of the parameter.
        rows_by_rank: rows of the unsharded parameter that the tensor-parallel ranks hold, in the order of the ranks;
            empty if that is the order of the rows.
    """

    name: str
    local_shape: tuple[int, ...]
    dim: int | None
    counted: bool
    first: int
    start: int
    length: int
    rows_by_rank: tuple[range, ...] = ()

    @property
    def local_elements(self) -> int:
        """Number of elements of the local parameter."""
        return math.prod(self.local_shape)

    def view_in(self, flat_e: Tensor) -> Tensor:
        """View of this range in a tensor that is as long as the master."""
        return flat_e.narrow(0, self.start, self.length)


@dataclass(frozen=True)
class MasterGroup:
    """The ranks over which the parameters of a master are sharded.

    Attributes:
        data: ranks with the same tensor-parallel shard of every parameter.
        sharded: whether masters are sharded over `data` (ZeRO) or replicated (ZeRO-0).
        tp: tensor-parallel ranks, over which parameters are sharded.
    """

    data: Axis
    sharded: bool
    tp: Axis

    @classmethod
    def of_zero1(cls, grid: ParallelGrid, *, sharded: bool) -> MasterGroup:
        """The group under ZeRO-0 and ZeRO-1."""
        return cls(grid.data, sharded, grid.tp)

    @classmethod
    def of_experts(cls, grid: ParallelGrid, *, sharded: bool, expert_tp: bool) -> MasterGroup:
        """The group of masters of experts under ZeRO-0 and ZeRO-1; other ranks hold other experts.

        Args:
            grid: the ranks.
            sharded: whether masters are sharded.
            expert_tp: parallel.expert_tp.
        """
        return cls(grid.expert_data, sharded, grid.tp if expert_tp else Axis(0, (grid.rank,), None))

    @classmethod
    def of_zero3(cls, grid: ParallelGrid) -> MasterGroup:
        """The group under ZeRO-2 and ZeRO-3; with hierarchical sharding, a subgroup is independent of the others."""
        return cls(grid.shard, True, grid.tp)

    def total(self, own: Tensor) -> Tensor:
        """The sum of a tensor over the ranks that hold different elements, bitwise identical on every rank.

        An all-reduce adds in an order that depends on the position in its buffer, so that the two copies of a tied
        embedding, at different positions on the first and the last stage, would diverge. Therefore all-gathers the
        addends and adds them in the same order on every rank.
        """
        for axis in (self.data if self.sharded else None, self.tp):
            if axis is None or axis.size == 1:
                continue
            gathered = own.new_empty(axis.size * own.numel())
            dist.all_gather_into_tensor(gathered, own.flatten(), group=axis.group)
            parts = gathered.view(axis.size, *own.shape)
            own = parts[0].clone()
            for part in parts[1:]:
                own += part
        return own


@dataclass(frozen=True)
class MasterLayout:
    """Parameters of one master.

    Attributes:
        role: role of all parameters.
        runs: one range for every parameter that is in some rank's master, in the same order on all ranks.
        group: the ranks over which the parameters are sharded.
    """

    role: Role
    runs: tuple[ParameterRun, ...]
    group: MasterGroup


@dataclass(frozen=True)
class Update:
    """One optimizer step of a flat range of elements, to be applied in place.

    The range holds parts of several parameters, sharded by ZeRO and tensor parallelism. An update must therefore be
    elementwise in weight, gradient and state; otherwise it depends on the layout.

    Attributes:
        master: fp32 weights [e], updated in place; the model weights are rounded from them afterwards.
        grad: fp32 gradient [e], averaged over the tokens of the global batch and clipped.
        state: tensors that the optimizer registered, fp32 [e], zeros before the first step; updated in place.
        lr: learning rate of the step.
        weight_decay: weight decay of these elements; 0 for biases and norms.
        step: number of the step, from 1; skipped steps are not counted.
    """

    master: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    lr: float
    weight_decay: float
    step: int


@dataclass(frozen=True)
class MasterUpdate(Update):
    """One optimizer step of one master; `grad` is undefined afterwards.

    Attributes:
        layout: layout of the master; None if the rule does not need it.
    """

    layout: MasterLayout | None = None

    @property
    def parameters(self) -> MasterLayout:
        """The layout, which must not be None."""
        assert self.layout is not None
        return self.layout


class UpdateRule(Protocol):
    """Update rule of an optimizer."""

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """Updates masters and state in place.

        Args:
            updates: updates of several masters, with the same layouts in the same order on all ranks of a group.
        """


def by_group(updates: Sequence[MasterUpdate]) -> list[list[MasterUpdate]]:
    """Splits updates by the group of their masters, in the order of each group's first."""
    groups: dict[MasterGroup, list[MasterUpdate]] = {}
    for update in updates:
        groups.setdefault(update.parameters.group, []).append(update)
    return list(groups.values())


class ElementwiseRule:
    """An elementwise update rule: Lion, or a plugin's.

    Args:
        optim: the optimizer's settings.

    Raises:
        ConfigError: no plugin registered it.
    """

    def __init__(self, optim: OptimConfig) -> None:
        self._update: Callable[[Any, Update], None]
        if optim.is_built_in:
            self._update, self._options = lion, optim.typed_options
        else:
            part = OPTIMIZERS.find(optim.name, "optim.name")
            self._update, self._options = part.make, OPTIMIZERS.options_of(part, optim.options)

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """See UpdateRule."""
        for update in updates:
            self._update(self._options, update)


def lion(options: LionOptions, update: Update) -> None:
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

    c = beta1 m + (1 - beta1) g; w = w - lr (sign(c) + weight_decay w); m = beta2 m + (1 - beta2) g.
    """
    momentum_e = update.state["exp_avg"]
    sign_e = momentum_e.lerp(update.grad, 1.0 - options.beta1).sign_()
    update.master.mul_(1.0 - update.lr * update.weight_decay).add_(sign_e, alpha=-update.lr)
    momentum_e.lerp_(update.grad, 1.0 - options.beta2)


def update_average(average_e: Tensor, master_e: Tensor, decay: float, taken: Tensor | None = None) -> None:
    """Updates an exponential moving average of weights in place: average = decay average + (1 - decay) master.

    Args:
        average_e: fp32 average, equal to the weights before the first step.
        master_e: fp32 weights after the step.
        decay: decay rate between 0 and 1.
        taken: bool scalar on the tensors' device; False if the step was skipped, which leaves the average unchanged.
            None: not skipped.
    """
    share = 1.0 - decay
    if taken is None:
        average_e.lerp_(master_e, share)
    else:
        average_e.lerp_(master_e, taken.to(average_e.dtype) * share)


class AdamWRule:
    """PyTorch's AdamW, for masters that another optimizer leaves to AdamW.

    Args:
        optim: the optimizer's settings; uses betas and eps.
    """

    def __init__(self, optim: OptimConfig) -> None:
        self._betas, self._eps = optim.betas, optim.eps

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """See UpdateRule."""
        for update in updates:
            torch_adamw(
                [update.master],
                [update.grad],
                [update.state["exp_avg"]],
                [update.state["exp_avg_sq"]],
                [],
                [torch.tensor(update.step - 1.0, device=update.master.device)],
                fused=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=update.lr,
                weight_decay=update.weight_decay,
                eps=self._eps,
                maximize=False,
            )


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """Returns the factor that clips gradients to a norm of `largest`, fp32 scalar on the device of `norm`.

    Args:
        norm: norm of the gradients, fp64 scalar. If it is not finite, the factor is NaN.
        largest: maximum norm; 0 disables clipping.
    """
    factor = (largest / (norm + CLIP_EPSILON)).clamp(max=1.0) if largest else torch.ones_like(norm)
    return factor.masked_fill(norm.isfinite().logical_not(), math.nan).float()
