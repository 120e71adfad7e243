"""Grouping of parameters for the optimizer: by role and rates, and into flat gradient buckets.

A role is determined by the parameter's name: a test of shapes once put BLOOM's embedding norm in the decay group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from megads.errors import ConfigError
from megads.optim.config import OptimConfig, OptimizerName
from megads.runtime.registry import OPTIMIZERS

if TYPE_CHECKING:
    from torch.nn import Parameter

_MATRIX = re.compile(
    r"embedding\.(word|position)\.weight"
    r"|blocks\.\d+\.(attention\.(qkv|dense)|mlp\.((shared\.|experts\.)?(up|gate_up|down)|router|shared_gate))"
    r"\.weight"
    r"|head\.weight"
)
_VECTOR = re.compile(
    r"blocks\.\d+\.(attention\.(qkv|dense)|mlp\.(up|gate_up|down))\.bias"
    r"|blocks\.\d+\.(input_norm|post_attention_norm|(attention|mlp)_output_norm|attention\.(query|key)_norm)"
    r"\.(weight|bias)"
    r"|blocks\.\d+\.(attention\.sinks\.weight|mlp\.router\.bias)"
    r"|(embedding\.norm|final_norm)\.(weight|bias)|head\.bias"
)


_HIDDEN = re.compile(r"blocks\.\d+\.(attention\.(qkv|dense)|mlp\.(shared\.|experts\.)?(up|gate_up|down))\.weight")
_CUSTOM = re.compile(r"blocks\.\d+\.custom\.(?P<module>.*?)\.?(?P<leaf>\w+)")
ALIGNMENT = 64
"""Alignment in elements (128 bytes in bf16) of every parameter and every rank's slice, so that kernels and NCCL access
whole cache lines."""

BUCKET_ELEMENTS = 50_000_000
"""Elements per gradient reduction and per prefetch of ZeRO-3 weights: 200 MB in fp32."""
_BUCKETS = 4
"""Approximate number of buckets of a small model: with fewer, the copy of a bucket takes the memory that ZeRO saves."""


class Role(StrEnum):
    """How the optimizer treats a parameter."""

    decay = "decay"
    """A matrix: weight decay applies."""
    tied = "tied"
    """The tied embedding: weight decay applies. Its separate group has the same length and the same sharding on the
    first and the last stage, so that both copies are updated bitwise identically."""
    no_decay = "no_decay"
    """A bias or a norm."""
    hidden = "hidden"
    """A block's matrix that Muon orthogonalizes: weight decay applies. `decay` with other optimizers."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self is not Role.no_decay


def parameter_role(name: str, tied: bool = False, *, muon: bool = False) -> Role:
    """Role of a parameter.

    In a plugin's block, only parameters named `weight` decay, unless the name of their module contains "norm".

    Args:
        name: full name, such as `blocks.3.mlp.up.weight`.
        tied: whether embedding and head share this parameter.
        muon: whether the optimizer is Muon, which gives matrices of blocks the role `hidden`.

    Raises:
        AssertionError: the name is not in the tables; a new parameter must be added to one.
    """
    if muon and _HIDDEN.fullmatch(name):
        return Role.hidden
    if _MATRIX.fullmatch(name):
        return Role.tied if tied else Role.decay
    if _VECTOR.fullmatch(name) and not tied:
        return Role.no_decay
    custom = _CUSTOM.fullmatch(name)
    if custom:
        norm = "norm" in custom["module"].rpartition(".")[2].lower()
        return Role.decay if custom["leaf"] == "weight" and custom["module"] and not norm else Role.no_decay
    raise AssertionError(f"no role for parameter {name!r} (tied: {tied}): enter it in {__name__}")


LrScale = Callable[[str], float]
"""Function from a parameter's name to the learning-rate factor of its width (muP), applied on top of optim.groups."""


@dataclass(frozen=True)
class ParameterRates:
    """Learning-rate factor and weight decay, the same for all parameters of a flat master.

    Attributes:
        lr_scale: factor of the learning rate.
        weight_decay: decoupled weight decay; a step decays by this times the scaled learning rate.
    """

    lr_scale: float = 1.0
    weight_decay: float = 0.0


def unit_lr_scale(_name: str) -> float:
    """The LrScale of a model whose learning rates do not depend on its width."""
    return 1.0


def parameter_rates(name: str, role: Role, optim: OptimConfig, width_scale: LrScale = unit_lr_scale) -> ParameterRates:
    """Learning rate and decay of a parameter.

    Args:
        name: full name, such as `blocks.3.mlp.up.weight`.
        role: role of the parameter, which determines whether optim.weight_decay applies.
        optim: the optimizer's settings; entries of `groups` apply in order, later ones override earlier ones.
        width_scale: muP's factor of the learning rate. It scales updates by gradients, but not the weight decay per
            step.
    """
    lr_scale, decay = 1.0, optim.weight_decay if role.decays else 0.0
    for group in optim.groups:
        if fnmatchcase(name, group.pattern):
            lr_scale = lr_scale if group.lr_scale is None else group.lr_scale
            decay = decay if group.weight_decay is None else group.weight_decay
    of_width = width_scale(name)
    return ParameterRates(lr_scale * of_width, decay / of_width)


def require_matches(optim: OptimConfig, names: Collection[str]) -> None:
    """Checks that every entry of optim.groups matches a parameter.

    Args:
        optim: the optimizer's settings.
        names: names of all parameters of the model.

    Raises:
        ConfigError: an entry matches no parameter.
    """
    for place, group in enumerate(optim.groups):
        if not any(fnmatchcase(name, group.pattern) for name in names):
            known = dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.<number>.", name) for name in names)
            raise ConfigError(
                f"optim.groups[{place}].pattern = {group.pattern!r} matches no parameter. Parameters are "
                f"{', '.join(known)}"
            )


_STATE = {
    OptimizerName.adamw: ("exp_avg", "exp_avg_sq"),
    OptimizerName.lamb: ("exp_avg", "exp_avg_sq"),
    OptimizerName.lion: ("exp_avg",),
    OptimizerName.muon: ("exp_avg", "exp_avg_sq"),
}


def optimizer_state_kinds(optim: OptimConfig, role: Role) -> tuple[str, ...]:
    """Names of the optimizer's fp32 state tensors for parameters of a role, without master weights.

    Raises:
        ConfigError: no plugin registered the optimizer.
    """
    if not optim.is_built_in:
        kinds: tuple[str, ...] = OPTIMIZERS.find(optim.name, "optim.name").traits["state"]
        return kinds
    return ("momentum_buffer",) if role is Role.hidden else _STATE[OptimizerName(optim.name)]


AVERAGE = "average"
"""Name of the EMA of the weights, which a run may keep in addition to masters and optimizer state."""


def stored_tensor_kinds(optim: OptimConfig, role: Role) -> tuple[str, ...]:
    """Names of all fp32 tensors kept for parameters of a role, without master weights: optimizer state and EMA.

    Raises:
        ConfigError: no plugin registered the optimizer.
    """
    return (*optimizer_state_kinds(optim, role), *([] if optim.ema_decay is None else [AVERAGE]))


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    tied_name: str | None,
    optim: OptimConfig,
    width_scale: LrScale = unit_lr_scale,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, each {params, lr_scale, weight_decay, role}.

    Args:
        named_parameters: this rank's parameters with their full names; the order within a group is kept.
        tied_name: name of the parameter that embedding and head share, None if they are not tied.
        optim: the optimizer's settings.
        width_scale: see `parameter_rates`.

    Returns:
        The non-empty groups, in the order decay, tied, no_decay, hidden; within a role by first appearance.
    """
    members: dict[Role, dict[ParameterRates, list[Parameter]]] = {role: {} for role in Role}
    for name, parameter in named_parameters:
        role = parameter_role(name, tied=name == tied_name, muon=optim.is_muon)
        rates = parameter_rates(name, role, optim, width_scale)
        members[role].setdefault(rates, []).append(parameter)
    return [
        {"params": parameters, "lr_scale": rates.lr_scale, "weight_decay": rates.weight_decay, "role": role.value}
        for role, by_rates in members.items()
        for rates, parameters in by_rates.items()
    ]


@dataclass(frozen=True)
class Member:
    """A parameter on a rank.

    Attributes:
        name: name in the whole model.
        numel: number of local elements, including vocabulary padding.
        role: role in the optimizer.
        partial: whether the gradient on a rank covers only that rank's share, see `ParameterPlacement.partial`.
        rates: learning-rate factor and weight decay.
        expert: whether it belongs to experts, whose gradients are reduced over other ranks.
    """

    name: str
    numel: int
    role: Role
    partial: bool = False
    rates: ParameterRates = ParameterRates()
    expert: bool = False


@dataclass(frozen=True)
class Slot:
    """A parameter's elements [start, start + member.numel) of a bucket."""

    member: Member
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.member.numel


@dataclass(frozen=True)
class BucketLayout:
    """Parameters with the same role and rates, whose gradients are reduced in one collective.

    Attributes:
        slots: slots of the parameters in the order of the backward pass; gaps between them are zero.
        begins: index of the first one among all of the rank's parameters in that order.
        numel: length of the flat buffer, a multiple of the number of ranks that shard it.
    """

    slots: tuple[Slot, ...]
    begins: int
    numel: int

    @property
    def role(self) -> Role:
        return self.slots[0].member.role

    @property
    def partial(self) -> bool:
        return self.slots[0].member.partial

    @property
    def expert(self) -> bool:
        return self.slots[0].member.expert

    @property
    def rates(self) -> ParameterRates:
        return self.slots[0].member.rates

    def slice_of(self, rank: int, ranks: int) -> range:
        """Range of elements that belong to one of the ranks that shard the bucket."""
        size = self.numel // ranks
        return range(rank * size, (rank + 1) * size)


def bucket_layouts(
    members: Sequence[Member], ranks: int, bucket_elements: int, expert_ranks: int = 1
) -> list[BucketLayout]:
    """Assigns a rank's parameters to buckets.

    A bucket is closed once it holds `bucket_elements`. Parameters are never split, so a large one has a bucket of its
    own or shares it with those just before it. A bucket does not mix roles or rates, as a master is updated as a whole,
    nor partial with complete gradients, nor experts with other parameters. The tied embedding thus has its own
    bucket, which is the same on both stages.

    Args:
        members: parameters in the order of the forward pass.
        ranks: number of ranks that shard every bucket.
        bucket_elements: number of elements at which a bucket is closed.
        expert_ranks: number of ranks that shard buckets of experts.

    Returns:
        Buckets in the order in which a backward pass completes them.
    """
    open_buckets: dict[tuple[Role, bool, ParameterRates, bool], list[int]] = {}
    closed: list[list[int]] = []
    backward = list(reversed(members))
    for place, member in enumerate(backward):
        kind = (member.role, member.partial, member.rates, member.expert)
        filling = open_buckets.setdefault(kind, [])
        filling.append(place)
        if sum(backward[p].numel for p in filling) >= bucket_elements:
            closed.append(open_buckets.pop(kind))
    closed += open_buckets.values()
    return [
        _lay_out(backward, places, expert_ranks if backward[places[0]].expert else ranks)
        for places in sorted(closed, key=lambda places: places[-1])
    ]


def _lay_out(backward: Sequence[Member], places: Sequence[int], ranks: int) -> BucketLayout:
    slots, end = [], 0
    for place in places:
        slots.append(Slot(backward[place], end))
        end = _align(end + backward[place].numel, ALIGNMENT)
    return BucketLayout(tuple(slots), places[0], _align(end, ALIGNMENT * ranks))


def _align(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def bucket_elements(sizes: Collection[int]) -> int:
    """Number of elements at which a bucket is closed, at least the size of the largest parameter.

    Args:
        sizes: number of elements of every parameter of a rank.
    """
    return max(*sizes, min(BUCKET_ELEMENTS, sum(sizes) // _BUCKETS))
