"""Tables of `megads plan` and of a dry run.

What each rank holds, host memory of local checkpoints, a comparison of pipeline schedules, learning rate and weight
decay of each parameter group, and training phases (train.phases).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from math import prod
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config.phases import WEIGHTS, PhaseSpan, parse_phases
from megads.config.root import RootConfig, check_shape, learning_rate, phase_config, planned_steps, run_spans
from megads.config.train import LENGTHS
from megads.errors import ConfigError
from megads.launch.layout import Machine
from megads.model.config import EMBEDDING, HEAD, TIED_PARAMETER, ModelConfig, layer_costs
from megads.model.model_size import shapes_of_any_vocabulary
from megads.optim.groups import ParameterRates, parameter_rates, parameter_role
from megads.parallel.config import AXES, GridCoordinate, ParallelConfig, axis_ranks, padded_rows, place_of
from megads.parallel.partition import stage_bounds
from megads.parallel.schedule import V_SHAPED, ScheduleName
from megads.runtime.machine_memory import gib
from megads.runtime.rich_console import VisibleConsole
from megads.tools.plan.memory import MemoryPlan
from megads.tools.plan.run_plan import memory_need, plan_of, step_workload
from megads.tools.plan.step_time import ScheduleForecast, Speed, forecast_schedule


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
    costs = layer_costs(model)
    names, bounds = list(costs), stage_bounds(list(costs.values()), parallel)
    stages = [tuple(names[start:end]) for start, end in pairwise(bounds)]
    share, placement = model.num_heads // parallel.tp, parallel.placement
    size, rows = model.vocab_size, padded_rows(model.vocab_size or 1, parallel.tp, parallel.rows_multiple(cuda=cuda))
    found = []
    for rank in range(parallel.world_size):
        place = place_of(rank, parallel)
        layers = tuple(chain.from_iterable(stages[stage] for stage in placement.stages_of(place.pp)))
        has_blocks = any(layer.startswith("blocks.") for layer in layers)
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
    places = _places(config, cuda=cuda)
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


def rank_text(config: RootConfig, width: int, *, cuda: bool) -> str:
    """The table as text, at most `width` characters wide; other arguments as in `rank_table`."""
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(rank_table(config, cuda=cuda))
    return captured.get().rstrip("\n")


def places_json(config: RootConfig, *, cuda: bool) -> list[dict[str, Any]]:
    """Every rank as JSON-serializable values; ranges are [start, stop), None if not known.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
    """
    found = []
    for held in _places(config, cuda=cuda):
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
    """Formats integers as ranges, for example "0-3, 8-11"; many ranges are shortened and the count is added."""
    ordered = sorted(set(numbers))
    starts = [ordered[0], *(right for left, right in pairwise(ordered) if right > left + 1)]
    stops = [*(left for left, right in pairwise(ordered) if right > left + 1), ordered[-1]]
    pieces = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True)]
    if len(pieces) <= _MOST_SPANS:
        return ", ".join(pieces)
    return f"{pieces[0]}, {pieces[1]} .. {pieces[-1]} ({len(ordered)})"


def layer_names(layers: tuple[str, ...]) -> str:
    """Formats layer names, for example "embedding, blocks 0-3"."""
    blocks = [int(layer.removeprefix("blocks.")) for layer in layers if layer.startswith("blocks.")]
    names: list[str] = []
    for layer in layers:
        name = layer.replace("_", " ")
        if layer.startswith("blocks."):
            name = f"block{'s' if len(blocks) > 1 else ''} {spans(blocks)}"
        if name not in names:
            names.append(name)
    return ", ".join(names)


def _places(config: RootConfig, *, cuda: bool) -> list[RankShardRanges]:
    return rank_shard_ranges(config.model, config.parallel, config.cluster.ranks_per_node, cuda=cuda)


def _range(numbers: range) -> str:
    return f"{numbers.start:,}-{numbers.stop - 1:,}" if numbers else "-"


def _across(config: RootConfig) -> str | None:
    """Caption that lists the axes across nodes; None if ranks per node are not known."""
    per_node = config.cluster.ranks_per_node
    if per_node is None:
        return None
    across = axes_across_nodes(config.parallel, per_node)
    return f"{', '.join(across)} across nodes" if across else "no axis across nodes"


_INTERLEAVED = (2, 3, 4)
"""Numbers of virtual stages per rank that are compared."""
_MAX_COMPARED = 1024
"""Pipeline ranks times micro-batches up to which a dry run compares schedules; more takes seconds."""
_MAX_SIMULATED = 2**20
"""Pipeline ranks times micro-batches up to which the configured schedule is simulated."""
_RELATIVE = Speed(tflops=1.0)


@dataclasses.dataclass(frozen=True)
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
            is_chosen = chosen == (name, virtual)
            contiguous = own.contiguous_micro_batches if is_chosen else None
            parallel = dataclasses.replace(
                own, schedule=name, virtual_stages=virtual, contiguous_micro_batches=contiguous
            )
            candidate = Candidate(name.value, virtual, is_chosen)
            yield _examined(candidate, dataclasses.replace(config, parallel=parallel), machine, speed)


def _examined(candidate: Candidate, config: RootConfig, machine: Machine | None, speed: Speed) -> Candidate:
    try:
        check_shape(config)
        found = forecast_of(config, speed)
        plan = plan_of(config, cuda=machine is None or machine.per_gpu)
    except ConfigError as error:
        return dataclasses.replace(candidate, reason=str(error))
    fits = None if machine is None else memory_need(machine, plan).fits
    return dataclasses.replace(candidate, outlook=found, peak=plan.largest.peak, fits=fits)


def schedule_table(found: list[Candidate], *, in_seconds: bool = False) -> Table:
    """One row per possible schedule, the configured one in bold."""
    table = Table(
        title="pipeline schedules of this layout", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    headers = ("stages\na rank", "bubble", "by FLOPs", "step over\nideal", "passes\nwaiting", "fullest\nrank", "fits")
    table.add_column("schedule", no_wrap=True)
    for header in (*headers[:4], *(["step"] if in_seconds else []), *headers[4:]):
        table.add_column(header, justify="right", no_wrap=True)
    for candidate in found:
        predicted = candidate.outlook
        if predicted is None:
            continue
        step = [f"{1e3 * predicted.timeline.step_time:,.1f} ms"] if in_seconds else []
        table.add_row(
            candidate.name,
            str(candidate.virtual_stages),
            f"{predicted.unit_bubble_share:.1%}",
            f"{predicted.bubble_share:.1%}",
            f"{predicted.over_ideal:.3f}",
            *step,
            str(max(predicted.waiting)),
            gib(candidate.peak),
            {True: "yes", False: "no", None: "?"}[candidate.fits],
            style="bold" if candidate.chosen else "",
        )
    return table


def refusals(found: list[Candidate]) -> list[str]:
    """One line per schedule that is not possible, with the reason."""
    return [f"{c.name} with {c.virtual_stages} stages a rank: {c.reason}" for c in found if c.outlook is None]


def is_simulation_feasible(config: RootConfig, most: int = _MAX_SIMULATED) -> bool:
    """Whether pipeline ranks times micro-batches is at most `most`, so that simulating a step takes seconds at most."""
    return config.parallel.pp * step_workload(config, cuda=True).micro_batches <= most


def schedule_text(config: RootConfig, machine: Machine, width: int) -> list[str]:
    """The table as text for the dry run; empty without a pipeline, or if the comparison would take too long."""
    if config.parallel.pp == 1 or config.model.vocab_size is None or not is_simulation_feasible(config, _MAX_COMPARED):
        return []
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(schedule_table([c for c in candidates(config, machine) if c.outlook is not None]))
    return [captured.get().rstrip("\n")]


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
    rates: ParameterRates
    names: tuple[str, ...]
    elements: int | None


def parameter_group_list(config: RootConfig) -> list[ParameterGroup]:
    """All parameter groups of a run: first parameters that match no entry, then in the order of optim.groups."""
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


def phases_json(config: RootConfig, *, cuda: bool) -> list[dict[str, Any]]:
    """Training phases as JSON-serializable values; None for values not known, and for rates of a phase not reached.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
    """
    has_length = any(getattr(config.train, length) is not None for length in LENGTHS)
    last = planned_steps(config) if has_length else None
    return [_phase_json(config, span, last, cuda=cuda) for span in run_spans(config)]


def _phase_json(config: RootConfig, span: PhaseSpan, last: int | None, *, cuda: bool) -> dict[str, Any]:
    train = phase_config(config, span.place).train
    ends = [step for step in (None if span.steps is None else span.first_step + span.steps, last) if step is not None]
    steps = max(0, min(ends) - span.first_step) if ends else None
    end_sample = None if steps is None else span.sample_after(steps)
    rates: tuple[float, float] | None = None
    if last is not None and steps and end_sample is not None:
        rate = learning_rate(config)
        rates = (rate(span.sample_after(1)), rate(end_sample))
    size = None
    if config.model.vocab_size is not None:
        size = plan_of(phase_config(config, span.place), cuda=cuda).largest.peak
    return {
        "phase": span.place + 1,
        "first_step": span.first_step,
        "steps": steps,
        "end_step": None if steps is None else span.first_step + steps,
        "tokens": None if steps is None else steps * span.global_batch_size * span.seq_len,
        "end_tokens": None if steps is None else span.first_token + steps * span.global_batch_size * span.seq_len,
        "global_batch_size": span.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "seq_len": span.seq_len,
        "lr_begin": rates[0] if rates else None,
        "lr_end": rates[1] if rates else None,
        "largest_rank_bytes": size,
        "weights": parse_phases(config.train.phases)[span.place].changes.get(WEIGHTS),
    }


def phase_table(config: RootConfig, *, cuda: bool) -> Table:
    """One row per training phase.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
    """
    table = Table(title="training phases", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    rows = phases_json(config, cuda=cuda)
    mixed = any(row["weights"] for row in rows)
    headers = ["phase", "until step", "steps", "tokens", "batch", "micro-batch", "seq_len", "tokens a step"]
    headers += ["rate at begin", "at end", "largest rank", *(["weights"] if mixed else [])]
    for header in headers:
        table.add_column(header.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in rows:
        per_step = row["global_batch_size"] * row["seq_len"]
        counts = [row[key] for key in ("end_step", "steps", "tokens")]
        counts += [row["global_batch_size"], row["micro_batch_size"], row["seq_len"], per_step]
        if row["steps"] == 0:
            counts[:3] = ["not reached", 0, 0]
        rates = ["-" if row[key] is None else f"{row[key]:.3g}" for key in ("lr_begin", "lr_end")]
        size = row["largest_rank_bytes"]
        cells = [_shown(count) for count in counts] + rates + ["-" if size is None else gib(size)]
        weights = [":".join(f"{weight:g}" for weight in row["weights"] or ())] if mixed else []
        table.add_row(str(row["phase"]), *cells, *weights)
    return table


def _shown(count: int | str | None) -> str:
    if count is None:
        return "-"
    return f"{count:,}" if isinstance(count, int) else count


def phase_text(config: RootConfig, width: int, *, cuda: bool) -> list[str]:
    """The table as text for the dry run; empty for a run without phases.

    Args:
        config: config of the run.
        width: maximum width of a line, in characters.
        cuda: whether ranks compute on GPUs.
    """
    if not config.train.phases:
        return []
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(phase_table(config, cuda=cuda))
    return [captured.get().rstrip("\n")]
