"""What pipeline schedules promise: a line for the chosen one, a table of all that a layout can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config import RootConfig, check_shape
from megads.errors import ConfigError
from megads.launch.preflight_memory import Machine, gib, plan_of, workload_of
from megads.parallel.schedule import ScheduleName
from megads.plan.step_time import Outlook, Speed, outlook
from megads.runtime.visible_console import VisibleConsole

_INTERLEAVED = (2, 3, 4)
"""Virtual stages a rank that are compared."""
_QUICK = 1024
"""Ranks times micro-batches up to which the dry run of `megads train` compares schedules; more takes seconds."""
_SIMULATED = 2**20
"""The same, up to which the one that was chosen is simulated."""
_RELATIVE = Speed(tflops=1.0)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One schedule of a comparison.

    Attributes:
        name: of the schedule.
        virtual_stages: a rank.
        chosen: whether the config has it.
        outlook: what it promises; None where the layout cannot have it.
        peak: bytes of the fullest rank.
        fits: whether the machine has them; None where that is not known.
        reason: why the layout cannot have it.
    """

    name: str
    virtual_stages: int
    chosen: bool
    outlook: Outlook | None = None
    peak: int = 0
    fits: bool | None = None
    reason: str = ""


def outlook_of(config: RootConfig, speed: Speed = _RELATIVE) -> Outlook:
    """The outlook of a config's schedule; of a machine of 1 TFLOP with free messages unless given."""
    # Where ranks compute does not matter: the clock counts FLOPs.
    return outlook(config.model, config.parallel, workload_of(config, cuda=True), speed)


def schedule_line(found: Outlook) -> str:
    """One line about a schedule, for people."""
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
    """Every schedule, as the config's layout would have it, the interleaved one with several virtual stages.

    Args:
        config: the run; neither recompute nor partition is auto any more.
        machine: where it runs; None where that is not known.
        speed: of ranks and messages.
    """
    own = config.parallel
    chosen = own.schedule, own.num_stages // own.pp
    for name in ScheduleName:
        counts = {2} if name in (ScheduleName["dualpipe_v"], ScheduleName["zb_v"]) else {1}
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
        found = outlook_of(config, speed)
        plan = plan_of(config, cuda=machine is None or machine.per_gpu)
    except ConfigError as error:
        return dataclasses.replace(candidate, reason=str(error))
    fits = None if machine is None else machine.room(plan).fits
    return dataclasses.replace(candidate, outlook=found, peak=plan.largest.peak, fits=fits)


def schedule_table(found: list[Candidate], *, in_seconds: bool = False) -> Table:
    """One row a schedule that can be, the chosen one bold."""
    table = Table(
        title="pipeline schedules of this layout", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    headers = ("stages\na rank", "bubble", "by FLOPs", "step over\nideal", "passes\nwaiting", "fullest\nrank", "fits")
    table.add_column("schedule", no_wrap=True)
    for header in (*headers[:4], *(["step"] if in_seconds else []), *headers[4:]):
        table.add_column(header, justify="right", no_wrap=True)
    for candidate in found:
        promised = candidate.outlook
        if promised is None:
            continue
        step = [f"{1e3 * promised.timeline.step_time:,.1f} ms"] if in_seconds else []
        table.add_row(
            candidate.name,
            str(candidate.virtual_stages),
            f"{promised.unit_bubble_share:.1%}",
            f"{promised.bubble_share:.1%}",
            f"{promised.over_ideal:.3f}",
            *step,
            str(max(promised.waiting)),
            gib(candidate.peak),
            {True: "yes", False: "no", None: "?"}[candidate.fits],
            style="bold" if candidate.chosen else "",
        )
    return table


def refusals(found: list[Candidate]) -> list[str]:
    """Why the others cannot be, a line each."""
    return [f"{c.name} with {c.virtual_stages} stages a rank: {c.reason}" for c in found if c.outlook is None]


def can_be_simulated(config: RootConfig, most: int = _SIMULATED) -> bool:
    """Whether ranks times micro-batches are at most `most`, so that simulating a step takes seconds."""
    return config.parallel.pp * workload_of(config, cuda=True).micro_batches <= most


def schedule_text(config: RootConfig, machine: Machine, width: int) -> list[str]:
    """The table as text for the dry run; nothing where there is no pipeline, or too much to compare in passing."""
    if config.parallel.pp == 1 or config.model.vocab_size is None or not can_be_simulated(config, _QUICK):
        return []
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(schedule_table([c for c in candidates(config, machine) if c.outlook is not None]))
    return [captured.get().rstrip("\n")]


def schedules_json(found: list[Candidate]) -> list[dict[str, Any]]:
    """The comparison as plain dicts."""
    rows = []
    for candidate in found:
        row: dict[str, Any] = {"schedule": candidate.name, "virtual_stages": candidate.virtual_stages}
        row |= {"chosen": candidate.chosen, "possible": candidate.outlook is not None}
        if candidate.outlook is None:
            rows.append({**row, "reason": candidate.reason})
        else:
            peak = {"largest_rank_bytes": candidate.peak, "fits": candidate.fits}
            rows.append({**row, **outlook_json(candidate.outlook), **peak})
    return rows


def outlook_json(found: Outlook) -> dict[str, Any]:
    """What a schedule promises, as a plain dict."""
    placement = found.schedule.placement
    return {
        "schedule": found.schedule.name,
        "virtual_stages": placement.num_stages // placement.num_ranks,
        "bubble_share": found.unit_bubble_share,
        "estimated_bubble_share": found.bubble_share,
        "step_over_ideal": found.over_ideal,
        "passes_waiting": list(found.waiting),
    }
