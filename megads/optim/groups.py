"""How the optimizer groups parameters: by role, which decides on weight decay, and in flat gradient buckets.

A role follows from the parameter's name: a test of shapes once put BLOOM's embedding norm in the decay group.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from megads.optim.config import OptimConfig, OptimizerName
from megads.runtime.registry import OPTIMIZERS

if TYPE_CHECKING:
    from torch.nn import Parameter

_MATRIX = re.compile(
    r"embedding\.(word|position)\.weight"
    r"|blocks\.\d+\.(attention\.(qkv|dense)|mlp\.(up|gate_up|down))\.weight"
    r"|head\.weight"
)
_VECTOR = re.compile(
    r"blocks\.\d+\.(attention\.(qkv|dense)|mlp\.(up|gate_up|down))\.bias"
    r"|blocks\.\d+\.(input_norm|post_attention_norm|(attention|mlp)_output_norm|attention\.(query|key)_norm)"
    r"\.(weight|bias)"
    r"|blocks\.\d+\.attention\.sinks\.weight"
    r"|(embedding\.norm|final_norm)\.(weight|bias)"
)


_HIDDEN = re.compile(r"blocks\.\d+\.(attention\.(qkv|dense)|mlp\.(up|gate_up|down))\.weight")
_CUSTOM = re.compile(r"blocks\.\d+\.custom\.(?P<module>.*?)\.?(?P<leaf>\w+)")
ALIGNMENT = 64
"""Elements: every parameter and every rank's slice starts at a multiple, 128 bytes in bf16, so that kernels and NCCL
read whole cache lines."""

BUCKET_ELEMENTS = 50_000_000
"""Gradients are reduced, and ZeRO-3's weights gathered ahead, by this many elements: 200 MB in fp32."""
_BUCKETS = 4
"""A small model is cut into about so many buckets, for otherwise copies of a whole one are all that ZeRO saves."""


class Role(StrEnum):
    """How the optimizer treats a parameter."""

    decay = "decay"
    """A matrix: weight decay applies."""
    tied = "tied"
    """The embedding that is also the head: decays, in a group of its own, which therefore has the same length and
    the same partition on the first and the last stage, so that both copies are updated with the same bits."""
    no_decay = "no_decay"
    """A bias or a norm."""
    hidden = "hidden"
    """A matrix between hidden states that Muon orthogonalises; decays. With any other optimizer it is `decay`."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self is not Role.no_decay


def parameter_role(name: str, tied: bool = False, *, muon: bool = False) -> Role:
    """Role of a parameter.

    Of a plugin's block, what is called `weight` decays unless the name of its module says that it is a norm; nothing
    else does.

    Args:
        name: full name, such as `blocks.3.mlp.up.weight`.
        tied: whether embedding and head share this parameter.
        muon: the optimizer treats matrices of blocks otherwise than embedding and head.

    Raises:
        AssertionError: a name that is not in the tables; a new parameter must be put into one.
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


_STATE = {
    OptimizerName.adamw: ("exp_avg", "exp_avg_sq"),
    OptimizerName.lamb: ("exp_avg", "exp_avg_sq"),
    OptimizerName.lion: ("exp_avg",),
    OptimizerName.muon: ("exp_avg", "exp_avg_sq"),
}


def state_kinds(optim: OptimConfig, role: Role) -> tuple[str, ...]:
    """Names of the fp32 tensors that the optimizer keeps of every parameter of a role, beside the master weight.

    Raises:
        ConfigError: no plugin registered the optimizer.
    """
    if not optim.is_built_in:
        kinds: tuple[str, ...] = OPTIMIZERS.find(optim.name, "optim.name").traits["state"]
        return kinds
    return ("momentum_buffer",) if role is Role.hidden else _STATE[OptimizerName(optim.name)]


AVERAGE = "average"
"""Kind of the running average of the weights, which a run may keep beside masters and the optimizer's state."""


def held_kinds(optim: OptimConfig, role: Role) -> tuple[str, ...]:
    """Names of all fp32 tensors that a run keeps of every parameter of a role, beside the master weight.

    Raises:
        ConfigError: no plugin registered the optimizer.
    """
    return (*state_kinds(optim, role), *([] if optim.ema_decay is None else [AVERAGE]))


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    tied_name: str | None,
    weight_decay: float,
    *,
    muon: bool = False,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, each {params, weight_decay, role}, in the order decay, tied, no_decay, hidden.

    Args:
        named_parameters: this rank's parameters under their full names; the order within a group is kept.
        tied_name: name of the parameter that embedding and head share, None when they do not.
        weight_decay: decay of all groups but no_decay.
        muon: see `parameter_role`.

    Returns:
        The groups that are not empty.
    """
    members: dict[Role, list[Parameter]] = {role: [] for role in Role}
    for name, parameter in named_parameters:
        members[parameter_role(name, tied=name == tied_name, muon=muon)].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if role.decays else 0.0, "role": role.value}
        for role, parameters in members.items()
        if parameters
    ]


@dataclass(frozen=True)
class Member:
    """A parameter as a rank holds it.

    Attributes:
        name: in the whole model.
        numel: local elements, vocabulary padding included.
        role: how the optimizer treats it.
        partial: its gradient on a rank covers that rank's sequence shard only.
    """

    name: str
    numel: int
    role: Role
    partial: bool = False


@dataclass(frozen=True)
class Slot:
    """Elements [start, start + member.numel) of a bucket."""

    member: Member
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.member.numel


@dataclass(frozen=True)
class BucketLayout:
    """Parameters of one role whose gradients are reduced in one collective.

    Attributes:
        slots: in the order of the backward pass; gaps between them are zero.
        begins: place of the first one among all of the rank's parameters in that order.
        numel: length of the flat buffer, a multiple of the ranks that share it.
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

    def slice_of(self, rank: int, ranks: int) -> range:
        """Elements that belong to one of the ranks that share the bucket."""
        size = self.numel // ranks
        return range(rank * size, (rank + 1) * size)


def bucket_layouts(members: Sequence[Member], ranks: int, bucket_elements: int) -> list[BucketLayout]:
    """Cuts a rank's parameters into buckets.

    A bucket is closed once it holds `bucket_elements`; a parameter is never cut, so a large one has a bucket of its own
    or with what came just before it. Roles do not mix, as they decay differently, and neither do partial gradients with
    whole ones. The tied embedding is therefore alone, and its bucket alike on both stages that hold it.

    Args:
        members: in the order of the forward pass.
        ranks: ranks that share every bucket.
        bucket_elements: size at which a bucket is closed.

    Returns:
        Buckets in the order in which a backward pass completes them.
    """
    open_buckets: dict[tuple[Role, bool], list[int]] = {}
    closed: list[list[int]] = []
    backward = list(reversed(members))
    for place, member in enumerate(backward):
        kind = (member.role, member.partial)
        filling = open_buckets.setdefault(kind, [])
        filling.append(place)
        if sum(backward[p].numel for p in filling) >= bucket_elements:
            closed.append(open_buckets.pop(kind))
    closed += open_buckets.values()
    return [_lay_out(backward, places, ranks) for places in sorted(closed, key=lambda places: places[-1])]


def _lay_out(backward: Sequence[Member], places: Sequence[int], ranks: int) -> BucketLayout:
    slots, end = [], 0
    for place in places:
        slots.append(Slot(backward[place], end))
        end = _align(end + backward[place].numel, ALIGNMENT)
    return BucketLayout(tuple(slots), places[0], _align(end, ALIGNMENT * ranks))


def _align(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def bucket_elements(sizes: Collection[int]) -> int:
    """Elements of a bucket: at least the largest parameter, whatever its size.

    Args:
        sizes: elements of every parameter of a rank.
    """
    return max(*sizes, min(BUCKET_ELEMENTS, sum(sizes) // _BUCKETS))
