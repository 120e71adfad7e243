"""Which parameters train with which learning rate and decay: what `megads plan` and a dry run print of optim.groups."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config import RootConfig
from megads.model.stage_names import TIED_PARAMETER
from megads.optim.groups import Rates, parameter_rates, parameter_role
from megads.plan.model_size import shapes_of_any_vocabulary
from megads.runtime.visible_console import VisibleConsole


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of which the same entries of optim.groups hold, with the same rates.

    Attributes:
        patterns: of the entries that match, in their order; none: what optim.lr and optim.weight_decay say.
        rates: factor of the learning rate, and weight decay.
        names: of the parameters.
        elements: of all of them together; None where the size of the vocabulary is not known.
    """

    patterns: tuple[str, ...]
    rates: Rates
    names: tuple[str, ...]
    elements: int | None


def parameter_group_list(config: RootConfig) -> list[ParameterGroup]:
    """Every group of a run, those of optim.groups in its order and what none of them holds first."""
    model, optim, members = config.model, config.optim, dict[tuple[tuple[int, ...], Rates], list[str]]()
    shapes, width_scale = shapes_of_any_vocabulary(model), model.width_scale(muon=optim.is_muon)
    for name in shapes:
        role = parameter_role(name, model.tie_embeddings and name == TIED_PARAMETER, muon=optim.is_muon)
        entries = tuple(place for place, group in enumerate(optim.groups) if fnmatchcase(name, group.pattern))
        members.setdefault((entries, parameter_rates(name, role, optim, width_scale)), []).append(name)
    found = []
    for (entries, rates), names in sorted(members.items(), key=lambda item: item[0][0]):
        # Only the vocabulary's own matrices have its size.
        known = model.vocab_size is not None or not {TIED_PARAMETER, "head.weight"} & set(names)
        elements = sum(prod(shapes[name]) for name in names) if known else None
        patterns = tuple(optim.groups[place].pattern for place in entries)
        found.append(ParameterGroup(patterns, rates, tuple(names), elements))
    return found


def has_groups(config: RootConfig) -> bool:
    """Whether parameters of a run train at different rates, by optim.groups or model.mup."""
    return bool(config.optim.groups) or config.model.mup.base_width is not None


def parameter_groups_json(config: RootConfig) -> list[dict[str, Any]]:
    """Returns a plain dict for each group."""
    return [
        {
            "patterns": list(group.patterns),
            "parameters": list(group.names),
            "elements": group.elements,
            "lr_scale": group.rates.lr_scale,
            "peak_lr": config.optim.lr * group.rates.lr_scale,
            "weight_decay": group.rates.weight_decay,
        }
        for group in parameter_group_list(config)
    ]


def parameter_group_table(config: RootConfig) -> Table:
    """One row a group."""
    table = Table(title="parameter groups", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for header in ("group", "pattern", "tensors", "parameters", "peak rate", "lr_scale", "decay", "first of them"):
        right = header not in ("pattern", "first of them")
        table.add_column(header, justify="right" if right else "left", no_wrap=right)
    for number, group in enumerate(parameter_group_list(config)):
        rates = group.rates
        table.add_row(
            str(number),
            " then ".join(group.patterns) or "-",
            f"{len(group.names):,}",
            "-" if group.elements is None else f"{group.elements:,}",
            f"{config.optim.lr * rates.lr_scale:.3g}",
            f"{rates.lr_scale:.3g}",
            f"{rates.weight_decay:.3g}",
            group.names[0],
        )
    return table


def parameter_group_text(config: RootConfig, width: int) -> list[str]:
    """The table as text for a dry run; nothing where all parameters train with the run's own rates.

    Args:
        config: of the run.
        width: of the lines, in characters.
    """
    if not has_groups(config):
        return []
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(parameter_group_table(config))
    return [captured.get().rstrip("\n")]
