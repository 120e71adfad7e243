"""Learning rate and weight decay of each parameter group, as `megads plan` and a dry run print them."""

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
    """Parameters that match the same entries of optim.groups and have the same rates.

    Attributes:
        patterns: patterns of the matching entries, in order; empty if only optim.lr and optim.weight_decay apply.
        rates: learning rate factor and weight decay.
        names: parameter names.
        elements: total number of elements; None if it depends on a vocabulary size that is not known.
    """

    patterns: tuple[str, ...]
    rates: Rates
    names: tuple[str, ...]
    elements: int | None


def parameter_group_list(config: RootConfig) -> list[ParameterGroup]:
    """All parameter groups of a run: first parameters that match no entry, then in the order of optim.groups."""
    model, optim, members = config.model, config.optim, dict[tuple[tuple[int, ...], Rates], list[str]]()
    shapes, width_scale = shapes_of_any_vocabulary(model), model.width_scale(muon=optim.is_muon)
    for name in shapes:
        role = parameter_role(name, model.tie_embeddings and name == TIED_PARAMETER, muon=optim.is_muon)
        entries = tuple(place for place, group in enumerate(optim.groups) if fnmatchcase(name, group.pattern))
        members.setdefault((entries, parameter_rates(name, role, optim, width_scale)), []).append(name)
    found = []
    for (entries, rates), names in sorted(members.items(), key=lambda item: item[0][0]):
        # Only the embedding and the head depend on the vocabulary size.
        known = model.vocab_size is not None or not {TIED_PARAMETER, "head.weight"} & set(names)
        elements = sum(prod(shapes[name]) for name in names) if known else None
        patterns = tuple(optim.groups[place].pattern for place in entries)
        found.append(ParameterGroup(patterns, rates, tuple(names), elements))
    return found


def has_groups(config: RootConfig) -> bool:
    """Whether optim.groups or model.mup gives parameters of a run different rates."""
    return bool(config.optim.groups) or config.model.mup.base_width is not None


def parameter_groups_json(config: RootConfig) -> list[dict[str, Any]]:
    """The parameter groups as JSON-serializable values."""
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
    """One row per parameter group."""
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
    """The table as text for a dry run; empty if all parameters have the same rates.

    Args:
        config: config of the run.
        width: maximum width of a line, in characters.
    """
    if not has_groups(config):
        return []
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(parameter_group_table(config))
    return [captured.get().rstrip("\n")]
