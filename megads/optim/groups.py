"""Which parameters decay, decided by name: a shape test once put BLOOM's embedding norm in the decay group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from torch.nn import Parameter

_MATRIX = re.compile(
    r"embedding\.(word|position)\.weight"
    r"|blocks\.\d+\.(attention\.(qkv|dense)|mlp\.(up|gate_up|down))\.weight"
    r"|head\.weight"
)
_VECTOR = re.compile(
    r"blocks\.\d+\.(attention\.(qkv|dense)|mlp\.(up|gate_up|down))\.bias"
    r"|(embedding\.norm|blocks\.\d+\.(input_norm|post_attention_norm)|final_norm)\.(weight|bias)"
)


_CUSTOM = re.compile(r"blocks\.\d+\.custom\.(?P<module>.*?)\.?(?P<leaf>\w+)")


class Role(StrEnum):
    """How the optimizer treats a parameter."""

    decay = "decay"
    """A matrix: weight decay applies."""
    tied = "tied"
    """The embedding that is also the head: decays, in a group of its own, which therefore has the same length and
    the same partition on the first and the last stage, so that both copies are updated with the same bits."""
    no_decay = "no_decay"
    """A bias or a norm."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self is not Role.no_decay


def parameter_role(name: str, tied: bool = False) -> Role:
    """Role of a parameter.

    Of a plugin's block, what is called `weight` decays unless the name of its module says that it is a norm; nothing
    else does.

    Args:
        name: full name, such as `blocks.3.mlp.up.weight`.
        tied: whether embedding and head share this parameter.

    Raises:
        AssertionError: a name that is not in the tables; a new parameter must be put into one.
    """
    if _MATRIX.fullmatch(name):
        return Role.tied if tied else Role.decay
    if _VECTOR.fullmatch(name) and not tied:
        return Role.no_decay
    custom = _CUSTOM.fullmatch(name)
    if custom:
        norm = "norm" in custom["module"].rpartition(".")[2].lower()
        return Role.decay if custom["leaf"] == "weight" and custom["module"] and not norm else Role.no_decay
    raise AssertionError(f"no role for parameter {name!r} (tied: {tied}): enter it in {__name__}")


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]], tied_name: str | None, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, each {params, weight_decay, role}, in the order decay, tied, no_decay.

    Args:
        named_parameters: this rank's parameters under their full names; the order within a group is kept.
        tied_name: name of the parameter that embedding and head share, None when they do not.
        weight_decay: decay of the decay and tied groups.

    Returns:
        The groups that are not empty.
    """
    members: dict[Role, list[Parameter]] = {role: [] for role in Role}
    for name, parameter in named_parameters:
        members[parameter_role(name, tied=name == tied_name)].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if role.decays else 0.0, "role": role.value}
        for role, parameters in members.items()
        if parameters
    ]
