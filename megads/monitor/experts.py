"""Hook that observes the experts of a model: load and router entropy by layer, and experts that get no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megads.model.moe_config import MoEConfig
from megads.runtime.hooks import ExpertStatistics, StepInfo, TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines

IDLE_STEPS = 100
"""Steps without any token after which an expert is reported."""
EXPERTS_IDLE, EXPERTS_ACTIVE = "experts_idle", "experts_active"
_NAMED = 16


class ExpertsHook:
    """Writes `layers/<layer>/max_load`, `dead_experts` and `router_entropy`, and reports idle experts.

    An expert is reported once (event experts_idle), and again only after it has got a token (event experts_active).
    What was reported is read from events.jsonl when the run is resumed; the count of steps restarts at 0. Skipped steps
    do not count. Rank 0 does the work; statistics are the same on every rank.

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

    def on_start(self, state: TrainState) -> None:
        if self._events.enabled:
            self._idle, self._reported = {}, _reported(self._events)

    def on_step(self, info: StepInfo) -> None:
        if info.experts is None or not self._events.enabled:
            return
        if self._every_steps is not None and info.step % self._every_steps == 0:
            self._write(info, info.experts)
        if not info.skipped:
            self._observe(info.step, info.experts)

    def on_end(self, state: TrainState) -> None:
        pass

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


def _reported(events: EventWriter) -> set[tuple[int, int]]:
    """The experts, as layer and number, whose last event in the log is experts_idle."""
    found: set[tuple[int, int]] = set()
    for event in read_json_lines(events.path):
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
