"""The table of which rank holds what, for `megads plan ranks=true` and the dry run of `megads train`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config import RootConfig
from megads.parallel.config import AXES
from megads.plan.places import RankPlace, axes_across_nodes, rank_places, replicas
from megads.runtime.terminal import VisibleConsole

MOST_ROWS = 32
"""Ranks up to which each has a row of its own; of more, those with the same weights share one."""
_MOST_SPANS = 4


def rank_table(config: RootConfig) -> Table:
    """One row a rank, or one for all ranks that hold the same weights where there are many."""
    places = _places(config)
    groups = [[place] for place in places] if len(places) <= MOST_ROWS else replicas(places)
    nodes = places[0].node is not None
    table = Table(
        title="which rank holds what",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=_across(config),
    )
    for header in ("rank", *(["node"] if nodes else []), *AXES):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("layers", "heads", "vocabulary rows"):
        table.add_column(header)
    for group in groups:
        first = group[0]
        table.add_row(
            spans(held.rank for held in group),
            *([spans(held.node for held in group if held.node is not None)] if nodes else []),
            *(spans(getattr(held.place, axis) for held in group) for axis in AXES),
            layer_names(first.layers),
            _range(first.heads),
            "the tokenizer's" if first.vocabulary is None else _range(first.vocabulary),
        )
    return table


def rank_text(config: RootConfig, width: int) -> str:
    """The table as lines of text, at most so many characters wide."""
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(rank_table(config))
    return captured.get().rstrip("\n")


def places_json(config: RootConfig) -> list[dict[str, Any]]:
    """Every rank as plain dicts and lists; ranges as [first, one after the last], null where not known."""
    found = []
    for held in _places(config):
        vocabulary = held.vocabulary
        found.append(
            {
                "rank": held.rank,
                "node": held.node,
                **held.place._asdict(),
                "layers": list(held.layers),
                "heads": [held.heads.start, held.heads.stop],
                "vocabulary": None if vocabulary is None else [vocabulary.start, vocabulary.stop],
            }
        )
    return found


def spans(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 0-3, 8-11; of many pieces the first, the second and the last, with their count."""
    ordered = sorted(set(numbers))
    starts = [ordered[0], *(right for left, right in pairwise(ordered) if right > left + 1)]
    stops = [*(left for left, right in pairwise(ordered) if right > left + 1), ordered[-1]]
    pieces = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True)]
    if len(pieces) <= _MOST_SPANS:
        return ", ".join(pieces)
    return f"{pieces[0]}, {pieces[1]} .. {pieces[-1]} ({len(ordered)})"


def layer_names(layers: tuple[str, ...]) -> str:
    """embedding, blocks 0-3: the blocks of a stage are neighbours."""
    blocks = [int(layer.removeprefix("blocks.")) for layer in layers if layer.startswith("blocks.")]
    names: list[str] = []
    for layer in layers:
        name = layer.replace("_", " ")
        if layer.startswith("blocks."):
            name = f"block{'s' if len(blocks) > 1 else ''} {spans(blocks)}"
        if name not in names:
            names.append(name)
    return ", ".join(names)


def _places(config: RootConfig) -> list[RankPlace]:
    return rank_places(config.model, config.parallel, config.cluster.ranks_per_node)


def _range(numbers: range) -> str:
    return f"{numbers.start:,}-{numbers.stop - 1:,}" if numbers else "-"


def _across(config: RootConfig) -> str | None:
    """Which axes leave a node, as far as that is known."""
    per_node = config.cluster.ranks_per_node
    if per_node is None:
        return None
    across = axes_across_nodes(config.parallel, per_node)
    return f"{', '.join(across)} across nodes" if across else "no axis leaves a node"
