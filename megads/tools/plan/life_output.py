"""Output of `megads plan life=true`: failures and their cost by cause, optimal checkpoint intervals, sensitivities."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.api import ConfigError, VisibleConsole, check_shape, output_width
from megads.tools.plan.config import PlanConfig
from megads.tools.plan.life import (
    HOUR_S,
    TABLES,
    FailureCosts,
    Life,
    LifeResult,
    Optimum,
    SaveTier,
    daly_first_order,
    daly_interval,
    expected_share,
    formula_interval,
    optimal_interval,
    sensitivity,
    simulate,
    young_interval,
)

_HANG_STEPS, _LEAST_HANG_S, _HANG_NOTICED_S, _HANG_S = 15, 20.0, 1.0, 60.0
"""megads' hang limit in steps and its minimum (docs/reliability.md, "A rank hangs"), the delay from the limit to
detection, and the detection time assumed if the step time is not known."""
_WIDTH = 130
_MOST_FAILURES = 20_000
"""Failures per run above which the simulation is refused; up to here it takes about a minute."""


@dataclass(frozen=True)
class LifePlan:
    """Results of a simulation, as printed.

    Attributes:
        life: simulated cluster and run.
        result: result of the simulation.
        optimum: optimal interval of checkpoints on disk.
        gains: gain in effective training time (as a share) from halving each parameter.
    """

    life: Life
    result: LifeResult
    optimum: Optimum
    gains: list[tuple[str, float]]


def show_life(asked: PlanConfig) -> None:
    """Simulates the run on the cluster and prints the results.

    Raises:
        ConfigError: The cluster cannot be simulated.
    """
    asked.lifetime.check()
    asked = with_planned_step(asked)
    life, runs, seed = life_of(asked), asked.lifetime.runs, asked.lifetime.seed
    failures = life.horizon_s / life.mean_time_between_s
    if failures > _MOST_FAILURES:
        raise ConfigError(
            f"{failures:,.0f} failures in lifetime.days = {life.days:g} are too many to simulate (at most "
            f"{_MOST_FAILURES:,}): plan fewer days; the effective share stays the same"
        )
    found = LifePlan(
        life, simulate(life, runs, seed), optimal_interval(life, runs, seed), sensitivity(life, runs, seed)
    )
    if asked.json:
        print(json.dumps(life_json(asked, found), indent=2))
        return
    console = VisibleConsole(highlight=False)
    console.width = output_width(_WIDTH)
    _print_share(console, asked, found)
    console.print(_cause_table(found))
    console.print(_interval_table(found))
    console.print(_gain_table(found))


def with_planned_step(asked: PlanConfig) -> PlanConfig:
    """Fills in the planned step time and throughput if they are not given and a device is named."""
    given = asked.lifetime
    whole = asked.gpus is None or asked.gpus == asked.parallel.world_size
    if given.step_time_s is not None or not asked.names_device or not whole:
        return asked
    # Imported late: the other parts of this plan do not need the step model.
    from megads.tools.plan.step import planned_step

    check_shape(asked)
    step = planned_step(asked)
    assert step is not None
    tokens_per_s = given.tokens_per_s or step.tokens / step.step_time_s
    return replace(asked, lifetime=replace(given, step_time_s=step.step_time_s, tokens_per_s=tokens_per_s))


def life_of(asked: PlanConfig) -> Life:
    """Returns the cluster and run that the config describes.

    Raises:
        ConfigError: The checkpoint interval is shorter than the time to write a checkpoint.
    """
    given, step_s = asked.lifetime, asked.lifetime.step_time_s
    hang_s = _HANG_S if step_s is None else max(_HANG_STEPS * step_s, _LEAST_HANG_S) + _HANG_NOTICED_S
    save_every_s, memory_every_s = given.save_every_s, given.memory_every_s
    if step_s is not None:
        save_every_s = save_every_s or asked.checkpoint.every_steps * step_s or None
        memory_every_s = memory_every_s or asked.checkpoint.local_every_steps * step_s or None
    if save_every_s is not None and save_every_s < given.save_write_s:
        raise ConfigError(
            f"lifetime.save_every_s = {save_every_s:g} is shorter than lifetime.save_write_s = {given.save_write_s:g}: "
            "checkpoints are written one at a time; save less often, or correct the write time"
        )
    memory = None
    if memory_every_s is not None:
        memory = SaveTier(memory_every_s, given.memory_stall_s, given.memory_write_s, given.memory_load_s)
    life = Life(
        table=TABLES[given.failures.value],
        gpus=asked.gpus or asked.parallel.world_size,
        days=given.days,
        disk=SaveTier(save_every_s or 1.0, given.save_stall_s, given.save_write_s, given.load_s),
        memory=memory,
        copies=asked.checkpoint.replicate if given.memory_copies is None else given.memory_copies,
        crash_s=given.crash_s,
        hang_s=hang_s if given.hang_s is None else given.hang_s,
        silent_s=given.silent_s,
        restart_s=given.restart_s,
        spares=given.spares,
        replace_s=given.replace_s,
        repair_s=given.repair_hours * HOUR_S,
    )
    if save_every_s is not None:
        return life
    return replace(life, disk=replace(life.disk, every_s=formula_interval(life)))


def expected(life: Life) -> float | None:
    """Effective training time by formula, as a share; None with local checkpoints, which the formula does not cover.

    The time to restart is the mean over failures; losses of nodes wait for the scheduler unless there are spare nodes.
    """
    if life.memory is not None:
        return None
    rates = [(life.table.per_second(cause, life.gpus), cause) for cause in life.table.causes]
    waits = life.replace_s if not life.spares else 0.0
    mean = sum(rate * (life.detection_s(cause) + cause.loses_node * waits) for rate, cause in rates)
    restart_s = mean / sum(rate for rate, _ in rates) + life.restart_s + life.disk.load_s
    disk = life.disk
    return expected_share(disk.every_s, disk.stall_s, disk.write_s, restart_s, life.mean_time_between_s)


def intervals(life: Life, *, memory: bool) -> dict[str, float]:
    """Checkpoint interval of each formula for a tier, in seconds; empty if no failure needs the tier."""
    tier = life.memory if memory else life.disk
    mean = life.needs(memory=memory)
    if tier is None or math.isinf(mean):
        return {}
    restart_s = life.restart_s + tier.load_s
    return {
        "young": young_interval(tier.stall_s, mean),
        "daly_first_order": daly_first_order(tier.stall_s, mean, restart_s),
        "daly": daly_interval(tier.stall_s, mean),
    }


def life_json(asked: PlanConfig, found: LifePlan) -> dict[str, Any]:
    """The plan as JSON-serializable values; names give the units of times."""
    life, result = found.life, found.result
    causes = [
        {
            "cause": cause.name,
            "sign": cause.sign.value,
            "loses": cause.loss.value,
            "expected_failures": life.expected_failures(cause),
            "simulated_failures": float(result.failures[index]),
            "hours": {part.name: float(result.seconds[part, index]) / HOUR_S for part in FailureCosts},
        }
        for index, cause in enumerate(life.table.causes)
    ]
    tokens_per_s = asked.lifetime.tokens_per_s
    return {
        "source": life.table.title,
        "remark": life.table.remark or None,
        "gpus": life.gpus,
        "days": life.days,
        "step_time_s": asked.lifetime.step_time_s,
        "mean_time_between_failures_s": life.mean_time_between_s,
        "expected_failures": life.horizon_s / life.mean_time_between_s,
        "effective_share": result.share,
        "effective_share_confidence": result.confidence,
        "effective_share_of_95_percent_of_runs": list(result.range),
        "effective_share_by_formula": expected(life),
        "stall_hours": result.stall_s / HOUR_S,
        "gpu_hours_lost": (1 - result.share) * life.gpus * life.days * 24,
        "tokens": None if tokens_per_s is None else tokens_per_s * result.share * life.horizon_s,
        "causes": causes,
        "disk": {**vars(life.disk), "formulas_s": intervals(life, memory=False), "optimum": vars(found.optimum)},
        "memory": None if life.memory is None else {**vars(life.memory), "formulas_s": intervals(life, memory=True)},
        "gains_by_halving": dict(found.gains),
    }


def _print_share(console: VisibleConsole, asked: PlanConfig, found: LifePlan) -> None:
    life, result = found.life, found.result
    low, high = result.range
    console.print(
        f"{life.gpus:,} GPUs for {life.days:g} days: {life.horizon_s / life.mean_time_between_s:,.1f} failures "
        f"expected, one in {_duration(life.mean_time_between_s)}"
    )
    console.print(f"rates: {life.table.title}{'; ' + life.table.remark if life.table.remark else ''}")
    if life.gpus > 2 * life.table.gpus:
        console.print(f"measured on jobs of about {life.table.gpus:,} GPUs: rates are extrapolated to {life.gpus:,}")
    console.print(
        f"effective training time {result.share:.2%} +- {result.confidence:.2%} (mean of {len(result.shares)} "
        f"simulated runs and its 95% confidence interval); 95% of single runs between {low:.2%} and {high:.2%}"
    )
    if asked.lifetime.step_time_s is not None:
        console.print(f"a step takes {_duration(asked.lifetime.step_time_s)}")
    lost = (1 - result.share) * life.gpus * life.days * 24
    console.print(
        f"{lost:,.0f} GPU hours are lost, {result.stall_s * life.gpus / HOUR_S:,.0f} of them blocked on checkpoints"
    )
    if asked.lifetime.tokens_per_s is not None:
        tokens = asked.lifetime.tokens_per_s * result.share * life.horizon_s
        console.print(f"{tokens:.4g} tokens at {asked.lifetime.tokens_per_s:,.0f} tokens/s while it trains")


def _cause_table(found: LifePlan) -> Table:
    """One row per cause, the most expensive first, and the total."""
    life, result = found.life, found.result
    table = Table(box=SIMPLE_HEAD, title="Failures by cause, hours of the run", title_justify="left")
    for name in ("cause", "shows as", "loses"):
        table.add_column(name)
    for name in ("failures", "detect", "wait for node", "restart", "load", "lost work", "all", "share"):
        table.add_column(name, justify="right")
    hours = result.seconds / HOUR_S
    total = life.horizon_s / HOUR_S
    for index in sorted(range(len(life.table.causes)), key=lambda index: -hours[:, index].sum()):
        cause, row = life.table.causes[index], hours[:, index]
        cells = [f"{value:.2f}" for value in (*row, row.sum())]
        expected_count = f"{life.expected_failures(cause):.1f}"
        table.add_row(
            cause.name, cause.sign.value, cause.loss.value, expected_count, *cells, f"{row.sum() / total:.2%}"
        )
    whole = hours.sum(axis=1)
    cells = [f"{value:.2f}" for value in (*whole, whole.sum())]
    failures = f"{life.horizon_s / life.mean_time_between_s:.1f}"
    table.add_row("all", "", "", failures, *cells, f"{whole.sum() / total:.2%}", end_section=True)
    return table


def _interval_table(found: LifePlan) -> Table:
    """Checkpoint interval in use, those of the formulas and, for disk, the simulated optimum."""
    life, best = found.life, found.optimum
    table = Table(box=SIMPLE_HEAD, title="Checkpoint interval", title_justify="left")
    for name in ("checkpoints", "in use", "Young 1974", "Daly 2006, first order", "higher order", "best simulated"):
        table.add_column(name, justify="right")
    for name, tier, memory in (("on disk", life.disk, False), ("in memory", life.memory, True)):
        if tier is None:
            continue
        found_s = intervals(life, memory=memory)
        cells = [_duration(value) for value in found_s.values()] or ["not needed by any failure", "", ""]
        simulated = f"{_duration(best.every_s)} ({best.share:.2%})"
        # The optimum is flat: the range within 0.1% shows which intervals need no change.
        simulated += f"; {_duration(best.low_s)} to {_duration(best.high_s)} within 0.1%"
        table.add_row(name, _duration(tier.every_s), *cells, "" if memory else simulated)
    formula = expected(life)
    if formula is not None:
        table.caption = f"effective training time by formula at the interval in use: {formula:.2%}"
    return table


def _gain_table(found: LifePlan) -> Table:
    """One row per parameter: gain in effective training time if it is halved."""
    table = Table(box=SIMPLE_HEAD, title="Sensitivity: each parameter halved, same failures", title_justify="left")
    table.add_column("halved")
    table.add_column("effective training time", justify="right")
    table.add_column("GPU hours", justify="right")
    gpu_hours = found.life.gpus * found.life.days * 24
    for name, gain in found.gains:
        table.add_row(name, f"{100 * gain:+.2f} points", f"{gain * gpu_hours:+,.0f}")
    return table


def _duration(seconds: float) -> str:
    """Formats a duration, for example 42 s, 3.1 min, 2.1 h or 3.2 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
