"""Flat fp32 masters: where the parameters lie in them, which ranks hold the rest, and what an optimizer does to them.

An optimizer is an `UpdateRule`: it gets some masters with their gradients and state and changes them in place. Who cut
the masters (megads' buckets under ZeRO-0 and 1, DeepSpeed under ZeRO-2 and 3) makes no difference to it. One that needs
more than an element and its own gradient has a `MasterLine`, whose ranks all call the rule with masters of the same
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


@dataclass(frozen=True)
class ParameterRun:
    """The run of a parameter's elements that lies in one rank's master: of every parameter there is one at most.

    Attributes:
        name: of the parameter in the whole model.
        local_shape: of this tensor-parallel rank's share of it.
        dim: dim that tensor parallelism cuts; None: every rank has all of it.
        counted: of the ranks that hold the same elements by tensor parallelism this is the first.
        first: index in the flattened local parameter at which the run starts.
        start: element of the master at which it starts.
        length: elements; 0 where the rank has none of the parameter.
    """

    name: str
    local_shape: tuple[int, ...]
    dim: int | None
    counted: bool
    first: int
    start: int
    length: int

    @property
    def local_elements(self) -> int:
        """Elements of the local parameter."""
        return math.prod(self.local_shape)

    def of(self, flat_e: Tensor) -> Tensor:
        """This run of a tensor that is as long as the master; a view."""
        return flat_e.narrow(0, self.start, self.length)


@dataclass(frozen=True)
class MasterLayout:
    """What lies in one master.

    Attributes:
        role: of all its parameters.
        runs: one for every parameter of which some rank's master has a part, in one order on all ranks.
    """

    role: Role
    runs: tuple[ParameterRun, ...]


@dataclass(frozen=True)
class MasterLine:
    """The ranks that hold the parameters of a rank's masters together.

    Attributes:
        data: those with the same share of every parameter.
        cut: each of them has a part of every master (ZeRO); else all have the whole (ZeRO-0).
        tp: those that cut the parameters.
    """

    data: Axis
    cut: bool
    tp: Axis

    @classmethod
    def of_zero1(cls, grid: ParallelGrid, *, sharded: bool) -> MasterLine:
        """Of ZeRO-0 and ZeRO-1."""
        return cls(grid.data, sharded, grid.tp)

    @classmethod
    def of_zero3(cls, grid: ParallelGrid) -> MasterLine:
        """Of ZeRO-2 and ZeRO-3: a subgroup of a hierarchical layout knows nothing of the others."""
        return cls(grid.shard, True, grid.tp)

    def total(self, own: Tensor) -> Tensor:
        """The sum of a tensor over the ranks that hold different elements, with the same bits on every rank.

        A reduction adds in an order that depends on the place in its buffer, so that the two copies of a tied
        embedding, at different places on the first and the last stage, would drift apart: every rank adds in one order.
        """
        for axis in (self.data if self.cut else None, self.tp):
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


@dataclass(frozen=True)
class MasterUpdate(Update):
    """One step of one master; what it leaves in `grad` is undefined.

    Attributes:
        layout: of the master; None where nobody asks for it.
    """

    layout: MasterLayout | None = None

    @property
    def parameters(self) -> MasterLayout:
        """The layout, of an optimizer that needs one."""
        assert self.layout is not None
        return self.layout


class UpdateRule(Protocol):
    """What an optimizer does in a step."""

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """Changes masters and state in place.

        Args:
            updates: of several masters; on all ranks of a line with the same layouts, in one order.
        """


class ElementwiseRule:
    """An update that looks at nothing but an element: Lion, or a plugin's.

    Args:
        optim: names the optimizer and holds its settings.

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
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2): the sign of a momentum.

    c = beta1 m + (1 - beta1) g; w = w - lr (sign(c) + weight_decay w); m = beta2 m + (1 - beta2) g.
    """
    momentum_e = update.state["exp_avg"]
    sign_e = momentum_e.lerp(update.grad, 1.0 - options.beta1).sign_()
    update.master.mul_(1.0 - update.lr * update.weight_decay).add_(sign_e, alpha=-update.lr)
    momentum_e.lerp_(update.grad, 1.0 - options.beta2)


def update_average(average_e: Tensor, master_e: Tensor, decay: float, taken: Tensor | None = None) -> None:
    """One step of a running average of weights: average = decay average + (1 - decay) master, in place.

    Args:
        average_e: fp32, the weights themselves before the first step.
        master_e: fp32 weights after the step.
        decay: between 0 and 1.
        taken: bool scalar on their device; where it is False the step was none and the average stays. None: it was one.
    """
    share = 1.0 - decay
    if taken is None:
        average_e.lerp_(master_e, share)
    else:
        average_e.lerp_(master_e, taken.to(average_e.dtype) * share)


class AdamWRule:
    """torch's AdamW, for masters beside those that another rule updates.

    Args:
        optim: its decay rates and eps.
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
