"""Tables of `megads plan` and of a dry run.

What each rank holds, host memory of local checkpoints, a comparison of pipeline schedules, learning rate and weight
decay of each parameter group, and training phases (train.phases).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from math import prod
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.api import (
    AXES,
    EMBEDDING,
    HEAD,
    TIED_PARAMETER,
    ConfigError,
    GridCoordinate,
    Machine,
    ModelConfig,
    ParallelConfig,
    RootConfig,
    ScheduleName,
    VisibleConsole,
    check_shape,
    gib,
    padded_rows,
    parameter_role,
    phase_config,
    place_of,
    planned_steps,
)
from megads.config.phases import WEIGHTS, parse_phases
from megads.config.root import learning_rate, run_spans
from megads.config.train import LENGTHS
from megads.model.config import is_block
from megads.model.model_size import model_flops_per_token, shapes_of_any_vocabulary
from megads.optim.groups import ParameterRates, parameter_rates
from megads.parallel.config import axis_ranks
from megads.parallel.schedule import V_SHAPED
from megads.tools.plan.collectives import FLAT, Network
from megads.tools.plan.devices import Device
from megads.tools.plan.memory import MemoryPlan
from megads.tools.plan.run_plan import memory_need, plan_of, step_of, step_workload
from megads.tools.plan.step_time import ScheduleForecast, Speed, forecast_schedule
from megads.tools.plan.workload import layer_names


def new_table(title: str, *columns: str, gap_left: bool = False, caption: str | None = None) -> Table:
    """A table without rows. Columns whose names begin with ">" are for numbers: right-justified, and never wrapped."""
    padding = (0, 0, 0, 1) if gap_left else (0, 1, 0, 0)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=padding, caption=caption)
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return table


def text_of(table: Table, width: int) -> str:
    """The table as text, at most `width` characters wide."""
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


def local_checkpoint_memory(config: RootConfig, plan: MemoryPlan) -> tuple[int, str]:
    """Maximum bytes of host memory that local checkpoints take per rank, and a text that says what for."""
    size, copies, keys = 2 * plan.largest.saved, "two copies of the state", "checkpoint.local_every_steps"
    if config.checkpoint.replicate:
        size += 2 * max(stage.saved for stage in plan.stages)
        copies, keys = "two copies of its state and two of another node's rank", f"{keys}, checkpoint.replicate"
    return size, f"of host memory for {copies} in {config.checkpoint.local_folder} ({keys})"


@dataclass(frozen=True)
class RankShardRanges:
    """Shard of the model that one rank holds.

    Attributes:
        rank: global rank.
        place: coordinates in the grid; place.pp is the pipeline rank.
        node: index of the node; None if the number of ranks per node is not known.
        layers: names of the layers that the rank holds a shard of.
        heads: attention heads of each block on the rank; empty without a block.
        vocabulary: vocabulary rows without padding; empty without embedding and head, None if the vocabulary size is
            not known.
    """

    rank: int
    place: GridCoordinate
    node: int | None
    layers: tuple[str, ...]
    heads: range
    vocabulary: range | None


def rank_shard_ranges(
    model: ModelConfig, parallel: ParallelConfig, ranks_per_node: int | None = None, *, cuda: bool = False
) -> list[RankShardRanges]:
    """Returns the place of every rank of a layout, in order of ranks.

    Args:
        model: model config; the vocabulary size may be None until the tokenizer is known.
        parallel: the layout.
        ranks_per_node: number of consecutive ranks on a node; None if not known.
        cuda: whether ranks compute on GPUs, where the rows of the vocabulary are aligned.

    Raises:
        ConfigError: There are more pipeline stages than layers.
    """
    stages = layer_names(model, parallel)
    share, placement = model.num_heads // parallel.tp, parallel.placement
    size, rows = model.vocab_size, padded_rows(model.vocab_size or 1, parallel.tp, parallel.rows_multiple(cuda=cuda))
    found = []
    for rank in range(parallel.world_size):
        place = place_of(rank, parallel)
        layers = tuple(chain.from_iterable(stages[stage] for stage in placement.stages_of(place.pp)))
        has_blocks = any(map(is_block, layers))
        heads = range(place.tp * share, (place.tp + 1) * share) if has_blocks else range(0)
        node = None if ranks_per_node is None else rank // ranks_per_node
        vocabulary: range | None = range(0)
        if EMBEDDING in layers or HEAD in layers:
            vocabulary = None if size is None else range(min(place.tp * rows, size), min((place.tp + 1) * rows, size))
        found.append(RankShardRanges(rank, place, node, layers, heads, vocabulary))
    return found


def replicas(places: list[RankShardRanges]) -> list[list[RankShardRanges]]:
    """Groups ranks that hold the same weights: those that differ only in their cp and dp coordinates."""
    groups: dict[tuple[int, int], list[RankShardRanges]] = {}
    for held in places:
        groups.setdefault((held.place.pp, held.place.tp), []).append(held)
    return [groups[key] for key in sorted(groups)]


def axes_across_nodes(parallel: ParallelConfig, ranks_per_node: int) -> list[str]:
    """Axes with communication between nodes, innermost first."""
    return [
        axis
        for axis in parallel.rank_order
        if any(len({rank // ranks_per_node for rank in line}) > 1 for line in axis_ranks(axis, parallel))
    ]


MOST_ROWS = 32
"""Ranks up to which each has its own row; above, ranks with the same weights share one."""
_MOST_SPANS = 4


def rank_table(config: RootConfig, *, cuda: bool) -> Table:
    """One row per rank or, above MOST_ROWS ranks, per group of ranks with the same weights.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
    """
    per_node = config.cluster.ranks_per_node
    places = rank_shard_ranges(config.model, config.parallel, per_node, cuda=cuda)
    groups = [[place] for place in places] if len(places) <= MOST_ROWS else replicas(places)
    caption = None
    if per_node is not None:
        across = axes_across_nodes(config.parallel, per_node)
        caption = f"{', '.join(across)} across nodes" if across else "no axis across nodes"
    numbers = [f">{header}" for header in ("rank", *(["node"] if per_node else []), *AXES)]
    table = new_table("which rank holds what", *numbers, "layers", "heads", "vocabulary rows", caption=caption)
    for group in groups:
        first = group[0]
        table.add_row(
            spans(held.rank for held in group),
            *([spans(held.node for held in group if held.node is not None)] if per_node else []),
            *(spans(getattr(held.place, axis) for held in group) for axis in AXES),
            layers_text(first.layers),
            _range(first.heads),
            "the tokenizer's" if first.vocabulary is None else _range(first.vocabulary),
        )
    return table


def places_json(config: RootConfig, *, cuda: bool) -> list[dict[str, Any]]:
    """Every rank as JSON-serializable values; ranges are [start, stop), None if not known.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
    """
    return [
        {
            "rank": held.rank,
            "node": held.node,
            **held.place._asdict(),
            "layers": list(held.layers),
            "heads": [held.heads.start, held.heads.stop],
            "vocabulary": None if held.vocabulary is None else [held.vocabulary.start, held.vocabulary.stop],
        }
        for held in rank_shard_ranges(config.model, config.parallel, config.cluster.ranks_per_node, cuda=cuda)
    ]


def spans(numbers: Iterable[int]) -> str:
    """Formats integers as ranges, for example "0-3, 8-11"; many ranges are shortened and the count is added."""
    ordered = sorted(set(numbers))
    starts = [ordered[0], *(right for left, right in pairwise(ordered) if right > left + 1)]
    stops = [*(left for left, right in pairwise(ordered) if right > left + 1), ordered[-1]]
    pieces = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True)]
    if len(pieces) <= _MOST_SPANS:
        return ", ".join(pieces)
    return f"{pieces[0]}, {pieces[1]} .. {pieces[-1]} ({len(ordered)})"


def layers_text(layers: Sequence[str]) -> str:
    """Formats layer names, for example "embedding, blocks 0-3"."""
    blocks = [int(layer.removeprefix("blocks.")) for layer in layers if is_block(layer)]
    together = f"block{'s' if len(blocks) > 1 else ''} {spans(blocks)}" if blocks else ""
    return ", ".join(dict.fromkeys(together if is_block(layer) else layer.replace("_", " ") for layer in layers))


def _range(numbers: range) -> str:
    return f"{numbers.start:,}-{numbers.stop - 1:,}" if numbers else "-"


_INTERLEAVED = (2, 3, 4)
"""Numbers of virtual stages per rank that are compared."""
MAX_COMPARED = 1024
"""Pipeline ranks times micro-batches up to which a dry run compares schedules; more takes seconds."""
_MAX_SIMULATED = 2**20
"""Pipeline ranks times micro-batches up to which the configured schedule is simulated."""
_RELATIVE = Speed(tflops=1.0)


@dataclass(frozen=True)
class Candidate:
    """One pipeline schedule of a comparison.

    Attributes:
        name: name of the schedule.
        virtual_stages: virtual stages per rank.
        chosen: whether it is the config's schedule.
        outlook: predicted timeline and bubble; None if the schedule is not possible with the layout.
        peak: peak bytes of the rank with the most memory in use.
        fits: whether that fits on the machine; None if not known.
        reason: why the schedule is not possible.
    """

    name: str
    virtual_stages: int
    chosen: bool
    outlook: ScheduleForecast | None = None
    peak: int = 0
    fits: bool | None = None
    reason: str = ""


def forecast_of(config: RootConfig, speed: Speed = _RELATIVE) -> ScheduleForecast:
    """Predicts the config's schedule; by default at 1 TFLOPs per rank and with p2p that costs nothing."""
    # cuda does not matter here: pass times are estimated from FLOPs.
    return forecast_schedule(config.model, config.parallel, step_workload(config, cuda=True), speed)


def schedule_line(found: ScheduleForecast) -> str:
    """One-line summary of a predicted schedule."""
    placement = found.schedule.placement
    virtual = placement.num_stages // placement.num_ranks
    stages = f" with {virtual} virtual stages each" if virtual > 1 else ""
    waiting = ", ".join(map(str, found.waiting))
    if len(found.waiting) > 8:
        waiting = f"{', '.join(map(str, found.waiting[:4]))} .. {found.waiting[-1]}"
    return (
        f"{found.schedule.name} on {placement.num_ranks} ranks{stages}: bubble {found.unit_bubble_share:.1%}, "
        f"{found.bubble_share:.1%} by estimated FLOPs; passes waiting {waiting}"
    )


def candidates(config: RootConfig, machine: Machine | None, speed: Speed = _RELATIVE) -> Iterator[Candidate]:
    """Yields every schedule for the config's layout, the interleaved one with several numbers of virtual stages.

    Args:
        config: config of the run; recompute and partition must not be auto.
        machine: memory of the machine; None if not known.
        speed: compute and p2p speed of one rank.
    """
    own = config.parallel
    chosen = own.schedule, own.num_stages // own.pp
    for name in ScheduleName:
        counts = {2} if name in V_SHAPED else {1}
        if name is ScheduleName["interleaved"]:
            counts = {*_INTERLEAVED, *([chosen[1]] if chosen[0] is name else [])}
        for virtual in sorted(counts):
            found = Candidate(name.value, virtual, chosen == (name, virtual))
            contiguous = own.contiguous_micro_batches if found.chosen else None
            parallel = replace(own, schedule=name, virtual_stages=virtual, contiguous_micro_batches=contiguous)
            scheduled = replace(config, parallel=parallel)
            try:
                check_shape(scheduled)
                forecast = forecast_of(scheduled, speed)
                plan = plan_of(scheduled, cuda=machine is None or machine.per_gpu)
            except ConfigError as error:
                yield replace(found, reason=str(error))
                continue
            fits = None if machine is None else memory_need(machine, plan).fits
            yield replace(found, outlook=forecast, peak=plan.largest.peak, fits=fits)


def schedule_table(found: list[Candidate], *, in_seconds: bool = False) -> Table:
    """One row per possible schedule, the configured one in bold."""
    step = [">step"] if in_seconds else []
    headers = (">stages\na rank", ">bubble", ">by FLOPs", ">step over\nideal", *step, ">passes\nwaiting")
    table = new_table("pipeline schedules of this layout", "schedule", *headers, ">fullest\nrank", ">fits")
    for candidate in found:
        predicted = candidate.outlook
        if predicted is None:
            continue
        table.add_row(
            candidate.name,
            str(candidate.virtual_stages),
            f"{predicted.unit_bubble_share:.1%}",
            f"{predicted.bubble_share:.1%}",
            f"{predicted.over_ideal:.3f}",
            *([f"{1e3 * predicted.timeline.step_time:,.1f} ms"] if in_seconds else []),
            str(max(predicted.waiting)),
            gib(candidate.peak),
            {True: "yes", False: "no", None: "?"}[candidate.fits],
            style="bold" if candidate.chosen else "",
        )
    return table


def is_simulation_feasible(config: RootConfig, most: int = _MAX_SIMULATED) -> bool:
    """Whether pipeline ranks times micro-batches is at most `most`, so that simulating a step takes seconds at most."""
    return config.parallel.pp * step_workload(config, cuda=True).micro_batches <= most


def schedules_json(found: list[Candidate]) -> list[dict[str, Any]]:
    """The comparison as JSON-serializable values."""
    rows = []
    for candidate in found:
        row: dict[str, Any] = {"schedule": candidate.name, "virtual_stages": candidate.virtual_stages}
        row |= {"chosen": candidate.chosen, "possible": candidate.outlook is not None}
        if candidate.outlook is None:
            rows.append({**row, "reason": candidate.reason})
        else:
            peak = {"largest_rank_bytes": candidate.peak, "fits": candidate.fits}
            rows.append({**row, **forecast_json(candidate.outlook), **peak})
    return rows


def forecast_json(found: ScheduleForecast) -> dict[str, Any]:
    """The predicted schedule as JSON-serializable values."""
    placement = found.schedule.placement
    return {
        "schedule": found.schedule.name,
        "virtual_stages": placement.num_stages // placement.num_ranks,
        "bubble_share": found.unit_bubble_share,
        "estimated_bubble_share": found.bubble_share,
        "step_over_ideal": found.over_ideal,
        "passes_waiting": list(found.waiting),
    }


def has_groups(config: RootConfig) -> bool:
    """Whether optim.groups or model.mup gives parameters of a run different rates."""
    return bool(config.optim.groups) or config.model.mup.base_width is not None


def parameter_groups(config: RootConfig) -> list[dict[str, Any]]:
    """Parameters that match the same entries of optim.groups and have the same rates, as JSON-serializable values.

    First those that match no entry, then in the order of optim.groups. `elements` is None if it depends on a vocabulary
    size that is not known.
    """
    model, optim, members = config.model, config.optim, dict[tuple[tuple[int, ...], ParameterRates], list[str]]()
    shapes, width_scale = shapes_of_any_vocabulary(model), model.width_scale(muon=optim.is_muon)
    for name in shapes:
        role = parameter_role(name, model.tie_embeddings and name == TIED_PARAMETER, muon=optim.is_muon)
        entries = tuple(place for place, group in enumerate(optim.groups) if fnmatchcase(name, group.pattern))
        members.setdefault((entries, parameter_rates(name, role, optim, width_scale)), []).append(name)
    found = []
    for (entries, rates), names in sorted(members.items(), key=lambda item: item[0][0]):
        # Only the embedding and the head depend on the vocabulary size.
        known = model.vocab_size is not None or not {TIED_PARAMETER, "head.weight"} & set(names)
        found.append(
            {
                "patterns": [optim.groups[place].pattern for place in entries],
                "parameters": names,
                "elements": sum(prod(shapes[name]) for name in names) if known else None,
                "lr_scale": rates.lr_scale,
                "peak_lr": optim.lr * rates.lr_scale,
                "weight_decay": rates.weight_decay,
            }
        )
    return found


def parameter_group_table(config: RootConfig) -> Table:
    """One row per parameter group."""
    rates = (">peak rate", ">lr_scale", ">decay", "first of them")
    table = new_table("parameter groups", ">group", "pattern", ">tensors", ">parameters", *rates, gap_left=True)
    for number, group in enumerate(parameter_groups(config)):
        table.add_row(
            str(number),
            " then ".join(group["patterns"]) or "-",
            f"{len(group['parameters']):,}",
            _shown(group["elements"]),
            *(f"{group[key]:.3g}" for key in ("peak_lr", "lr_scale", "weight_decay")),
            group["parameters"][0],
        )
    return table


def phases_json(
    config: RootConfig, *, cuda: bool, device: Device | None = None, network: Network = FLAT
) -> list[dict[str, Any]]:
    """Training phases as JSON-serializable values; None for values not known, and for rates of a phase not reached.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
        device: device on which steps are timed; None times none.
        network: network between its nodes.
    """
    has_length = any(getattr(config.train, length) is not None for length in LENGTHS)
    last = planned_steps(config) if has_length else None
    changes, rate, found = parse_phases(config.train.phases), learning_rate(config) if last else None, []
    for span in run_spans(config):
        of_phase = phase_config(config, span.place)
        ends = [end for end in (None if span.steps is None else span.first_step + span.steps, last) if end is not None]
        steps = max(0, min(ends) - span.first_step) if ends else None
        tokens = None if steps is None else steps * span.global_batch_size * span.seq_len
        rates = (rate(span.sample_after(1)), rate(span.sample_after(steps))) if rate and steps else (None, None)
        known = config.model.vocab_size is not None
        step = step_of(of_phase, device, network) if device is not None and known else None
        found.append(
            {
                "phase": span.place + 1,
                "first_step": span.first_step,
                "steps": steps,
                "end_step": None if steps is None else span.first_step + steps,
                "tokens": tokens,
                "end_tokens": None if tokens is None else span.first_token + tokens,
                "global_batch_size": span.global_batch_size,
                "micro_batch_size": of_phase.train.micro_batch_size,
                "seq_len": span.seq_len,
                "layout": of_phase.parallel.sizes,
                "flops_per_token": model_flops_per_token(of_phase.model, span.seq_len) if known else None,
                "step_time_s": None if step is None else step.step_time_s,
                "mfu": None if step is None else step.mfu,
                "time_s": None if step is None or steps is None else steps * step.step_time_s,
                "lr_begin": rates[0],
                "lr_end": rates[1],
                "largest_rank_bytes": plan_of(of_phase, cuda=cuda).largest.peak if known else None,
                "weights": changes[span.place].changes.get(WEIGHTS),
            }
        )
    return found


def phase_table(config: RootConfig, *, cuda: bool, device: Device | None = None, network: Network = FLAT) -> Table:
    """One row per training phase; see `phases_json` for the arguments."""
    rows = phases_json(config, cuda=cuda, device=device, network=network)
    mixed, timed = any(row["weights"] for row in rows), any(row["step_time_s"] is not None for row in rows)
    axes = [axis for axis in AXES if len({row["layout"][axis] for row in rows}) > 1]
    headers = ["phase", "until step", "steps", "tokens", "batch", "micro-batch", "seq_len", "tokens a step"]
    headers += ["rate at begin", "at end", "largest rank", *axes, *(["a step", "MFU", "days"] if timed else [])]
    headers += ["weights"] if mixed else []
    table = new_table("training phases", *(f">{name.replace(' ', chr(10), 1)}" for name in headers), gap_left=True)
    for row in rows:
        per_step = row["global_batch_size"] * row["seq_len"]
        counts = [row[key] for key in ("end_step", "steps", "tokens")]
        counts += [row["global_batch_size"], row["micro_batch_size"], row["seq_len"], per_step]
        if row["steps"] == 0:
            counts[:3] = ["not reached", 0, 0]
        rates = ["-" if row[key] is None else f"{row[key]:.3g}" for key in ("lr_begin", "lr_end")]
        size = row["largest_rank_bytes"]
        cells = [_shown(count) for count in counts] + rates + ["-" if size is None else gib(size)]
        cells += [str(row["layout"][axis]) for axis in axes]
        if timed:
            days = "-" if row["time_s"] is None else f"{row['time_s'] / 86400:,.3g}"
            cells += [f"{row['step_time_s']:,.3g} s", f"{row['mfu']:.1%}", days]
        weights = [":".join(f"{weight:g}" for weight in row["weights"] or ())] if mixed else []
        table.add_row(str(row["phase"]), *cells, *weights)
    return table


def _shown(count: int | str | None) -> str:
    if count is None:
        return "-"
    return f"{count:,}" if isinstance(count, int) else count
