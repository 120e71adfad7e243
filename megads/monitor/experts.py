"""Hook that observes the experts of a model: load and router entropy by layer, idle experts, and overflows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megads.model.moe_config import MoEConfig
from megads.runtime.hooks import ExpertStatistics, StepInfo, TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines

IDLE_STEPS = 100
"""Steps without any token after which an expert is reported."""
EXPERTS_IDLE, EXPERTS_ACTIVE = "experts_idle", "experts_active"
EXPERTS_IDLE_STEPS = "experts_idle_steps"
"""Event with the number of consecutive steps without a token of experts, from which a resumed run counts on."""
EXPERTS_OVERFLOW = "experts_overflow"
_RAISED = 1.1
"""An overflow is reported again if it needs this much more capacity than the last one that was reported."""
_NAMED = 16


class ExpertsHook:
    """Writes `layers/<layer>/max_load`, `dead_experts` and `router_entropy`, and reports idle experts.

    An expert is reported once (event experts_idle), and again only after it has got a token (event experts_active).
    Skipped steps do not count. What was reported, and how long experts have been idle, is read from events.jsonl when
    the run is resumed: counts are recorded at the end and every tenth of idle_steps, if they have reached that many; a
    run that is resumed from another step counts anew. An overflow of a capacity is reported if it is clearly larger
    than the last one (event experts_overflow). Rank 0 does the work; statistics are the same on every rank.

    Args:
        moe: experts of the model; names the remedies.
        metrics: metrics log.
        events: event log.
        every_steps: interval of the lines by layer in steps; None: none are written.
        idle_steps: steps without any token after which an expert is reported.
    """

    def __init__(
        self,
        moe: MoEConfig,
        metrics: MetricsWriter,
        events: EventWriter,
        every_steps: int | None,
        idle_steps: int = IDLE_STEPS,
    ) -> None:
        self._moe, self._metrics, self._events = moe, metrics, events
        self._every_steps, self._idle_steps = every_steps, idle_steps
        self._idle: dict[tuple[int, int], int] = {}
        """Consecutive steps without a token, of the experts of a layer that got none in the last one."""
        self._reported: set[tuple[int, int]] = set()
        self._needed = 0.0
        self._recorded_steps = max(1, idle_steps // 10)

    def on_start(self, state: TrainState) -> None:
        if self._events.enabled:
            found = list(read_json_lines(self._events.path))
            self._reported, self._idle = _reported(found), _idle_steps(found, state.step)
            needed = [event["capacity_needed"] for event in found if event.get("event") == EXPERTS_OVERFLOW]
            self._needed = needed[-1] if needed else 0.0

    def on_step(self, info: StepInfo) -> None:
        if info.experts is None or not self._events.enabled:
            return
        if self._every_steps is not None and info.step % self._every_steps == 0:
            self._write(info, info.experts)
        if not info.skipped:
            self._observe(info.step, info.experts)
        if info.step % self._recorded_steps == 0:
            self._record_idle(info.step)
        self._report_overflow(info.step, info.experts)

    def on_end(self, state: TrainState) -> None:
        if self._events.enabled and state.step % self._recorded_steps:
            self._record_idle(state.step)

    def _record_idle(self, step: int) -> None:
        idle = [[*expert, steps] for expert, steps in sorted(self._idle.items()) if steps >= self._recorded_steps]
        if idle:
            self._events.write(EXPERTS_IDLE_STEPS, level="debug", step=step, idle=idle)

    def _report_overflow(self, step: int, experts: ExpertStatistics) -> None:
        dropped, given = sum(experts.dropped), self._moe.capacity_factor
        if not (dropped or experts.recomputed) or max(experts.capacity_needed) <= self._needed * _RAISED:
            return
        self._needed = needed = max(experts.capacity_needed)
        place = experts.capacity_needed.index(needed)
        layer, expert = experts.layers[place], experts.fullest[place]
        whose = "a sample" if self._moe.drops else "a micro-batch"
        what = f"{dropped:,.0f} rows were dropped" if dropped else "the step was computed again without a capacity"
        self._events.write(
            EXPERTS_OVERFLOW, level="warning", step=step, layer=layer, expert=expert, capacity_needed=needed,
            message=f"layer blocks.{layer}: expert {expert} got {needed:.2f} times the mean rows of {whose} in step "
            f"{step}, above model.moe.capacity_factor = {given:g}: {what}. {needed:.2f} would have held all rows",
        )  # fmt: skip

    def _write(self, info: StepInfo, experts: ExpertStatistics) -> None:
        line: dict[str, float] = {"step": info.step, "samples": info.samples, "tokens": info.tokens}
        for layer, load, dead, entropy in zip(
            experts.layers, experts.max_loads, experts.dead, experts.entropy, strict=True
        ):
            line[f"layers/blocks.{layer}/max_load"] = load
            line[f"layers/blocks.{layer}/dead_experts"] = len(dead)
            line[f"layers/blocks.{layer}/router_entropy"] = entropy
        self._metrics.write(line)

    def _observe(self, step: int, experts: ExpertStatistics) -> None:
        dead = {
            (layer, expert) for layer, of_layer in zip(experts.layers, experts.dead, strict=True) for expert in of_layer
        }
        active = self._reported - dead
        self._reported &= dead
        self._idle = {expert: self._idle.get(expert, 0) + 1 for expert in dead}
        idle = {expert for expert, steps in self._idle.items() if steps >= self._idle_steps} - self._reported
        self._reported |= idle
        for layer, numbers in _by_layer(active).items():
            self._events.write(EXPERTS_ACTIVE, step=step, layer=layer, experts=numbers, message=_active(layer, numbers))
        for layer, numbers in _by_layer(idle).items():
            self._events.write(
                EXPERTS_IDLE, level="warning", step=step, layer=layer, experts=numbers, steps=self._idle_steps,
                message=f"layer blocks.{layer}: {_names(numbers)} got no token in {self._idle_steps} steps, up to step "
                f"{step}. {_remedy(self._moe)}",
            )  # fmt: skip


def _idle_steps(events: Sequence[Mapping[str, Any]], step: int) -> dict[tuple[int, int], int]:
    """The numbers of steps without a token that the last record of a step has; empty if there is none."""
    for event in reversed(events):
        if event.get("event") == EXPERTS_IDLE_STEPS and event.get("step") == step:
            return {(layer, expert): steps for layer, expert, steps in event["idle"]}
    return {}


def _reported(events: Sequence[Mapping[str, Any]]) -> set[tuple[int, int]]:
    """The experts, as layer and number, whose last event in the log is experts_idle."""
    found: set[tuple[int, int]] = set()
    for event in events:
        if event.get("event") == EXPERTS_IDLE:
            found |= _named_in(event)
        elif event.get("event") == EXPERTS_ACTIVE:
            found -= _named_in(event)
    return found


def _named_in(event: Mapping[str, Any]) -> set[tuple[int, int]]:
    return {(event["layer"], expert) for expert in event["experts"]}


def _by_layer(experts: set[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, expert in sorted(experts):
        found.setdefault(layer, []).append(expert)
    return found


def _names(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"expert{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_NAMED]))}{more}"


def _active(layer: int, numbers: Sequence[int]) -> str:
    return f"layer blocks.{layer}: {_names(numbers)} got tokens again"


def _remedy(moe: MoEConfig) -> str:
    """What to do about idle experts: more of the balance that the model has."""
    weights = {"bias_rate": moe.bias_rate, "global_loss": moe.global_loss, "sequence_loss": moe.sequence_loss}
    used = [f"model.moe.{name} ({value:g})" for name, value in weights.items() if value]
    if not used:
        return "The model has no balance: set model.moe.global_loss, for example 0.01, or bias_rate, for example 0.001"
    return f"Raise {' or '.join(used)}, or lower optim.lr; docs/moe.md"
