"""Compares a timed step of a run with the plan of the same step, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from matplotlib.figure import Figure

from megads.api import CONFIG_FILE, ActionKind, ConfigError, load_frozen, resolve_auto
from megads.tools.plan.run_plan import connected_device, step_model_of, with_graphs
from megads.tools.plan.step_estimate import PHASES
from megads.tools.plan.step_time import RankTrace
from megads.tools.report.history import RunHistory
from megads.tools.report.style import BLUE, INK, ORANGE, close_panel, open_panel

_BACKWARD = (ActionKind.backward, ActionKind.backward_input, ActionKind.backward_weight)
_AFTER = {"reduce_gradients": "gradient reduction", "optimizer_step": "optimizer step"}
"""Spans after the pipeline schedule, with their names in `PHASES`."""
_AS_PLANNED = 0.1
"""Relative difference up to which a step counts as planned."""


@dataclass(frozen=True)
class StepComparison:
    """A timed step and its plan.

    Attributes:
        step: timed step with the median step time.
        measured_s: seconds by the names of `PHASES`, of the rank with the most compute; the sum is the step time.
        planned_s: planned seconds by the names of `PHASES`; None if there is no plan.
        why_not: why there is no plan, with a remedy.
    """

    step: int
    measured_s: Mapping[str, float]
    planned_s: Mapping[str, float] | None
    unsupported_reason: str = ""

    @property
    def sentence(self) -> str:
        """Says whether the step is slower or faster than planned, and which part differs most."""
        if self.planned_s is None:
            return self.unsupported_reason
        measured, planned = sum(self.measured_s.values()), sum(self.planned_s.values())
        share = measured / planned - 1
        took = f"step {self.step:,} took {measured:.3g} s, {planned:.3g} s were planned"
        longer = {name: seconds - self.planned_s[name] for name, seconds in self.measured_s.items()}
        name = max(longer, key=lambda part: longer[part] if share > 0 else -longer[part])
        of = f"{name}, {self.measured_s[name]:.3g} s instead of {self.planned_s[name]:.3g} s"
        if abs(share) <= _AS_PLANNED:
            return f"{took}: as planned ({share:+.0%}); the part that differs most is {of}"
        return f"{took}: {abs(share):.0%} {'slower' if share > 0 else 'faster'}, mostly due to {of}"


def compare_step(history: RunHistory, device: str | None) -> StepComparison | None:
    """Compares the timed step with the median step time to its plan; None if no step was timed.

    Args:
        history: history of the run.
        device: name or file of the device to plan on; if None, the comparison says how to get one.
    """
    times = dict(zip(map(int, history.step), history.columns["step_time_s"], strict=True))
    timed = {step: traces for step, traces in history.timed_steps.items() if times.get(step, 0.0) > 0}
    if not timed:
        return None
    settled = sorted(timed)[1:] or sorted(timed)  # the first timed step may include warmup of caches
    middle = median_low([times[step] for step in settled])
    step = next(step for step in settled if times[step] == middle)
    traces = timed[step]
    measured = measured_phases(traces, float(times[step]))
    if device is None:
        how = (
            f"no plan: measure this run's machine with megads calibrate out=device.yaml ranks={len(traces)}, and give "
            "device=device.yaml, or the name of a GPU, to megads report"
        )
        return StepComparison(step, measured, None, how)
    numbers = [bar.micro_batch for trace in traces for bar in trace.bars if bar.micro_batch is not None]
    try:
        config, _ = resolve_auto(load_frozen(history.run_dir / CONFIG_FILE, complete=False), None)
        if config.ops.graphs_undecided and history.last_event("cuda_graphs").get("captured"):
            config = with_graphs(config)
        model = step_model_of(config, connected_device(device, config))
        # The step may have fewer micro-batches than in the config, during a batch size ramp.
        workload = replace(model.workload, micro_batches=1 + max(numbers, default=0))
        return StepComparison(step, measured, replace(model, workload=workload).phases())
    except ConfigError as error:
        return StepComparison(step, measured, None, f"no plan: {error}")


def measured_phases(traces: Sequence[RankTrace], step_time_s: float) -> dict[str, float]:
    """Seconds of a timed step by the names of `PHASES`, of the rank with the most compute.

    Args:
        traces: traces of all ranks.
        step_time_s: step time from the metrics, in seconds.
    """
    busiest = max(traces, key=lambda trace: sum(_passes(trace)))
    forward_s, backward_s = _passes(busiest)
    after = dict.fromkeys(_AFTER.values(), 0.0)
    end_s = 0.0
    for bar in busiest.bars:
        if bar.kind in _AFTER:
            after[_AFTER[bar.kind]] += bar.end_s - bar.start_s
        else:
            end_s = max(end_s, bar.end_s)
    waits_s = max(0.0, end_s - forward_s - backward_s)
    found = {"forward passes": forward_s, "backward passes": backward_s, "pipeline bubble and p2p": waits_s, **after}
    found["other"] = max(0.0, step_time_s - sum(found.values()))
    return {name: found[name] for name in PHASES}


def _passes(trace: RankTrace) -> tuple[float, float]:
    """Seconds of all forward passes and of all backward passes."""
    forward = sum(bar.end_s - bar.start_s for bar in trace.bars if bar.kind == ActionKind.forward)
    return forward, sum(bar.end_s - bar.start_s for bar in trace.bars if bar.kind in _BACKWARD)


def draw_comparison(compared: StepComparison | None, wide: bool = False) -> Figure | None:
    """Draws planned and measured seconds of each part as bars; None without a plan."""
    if compared is None or compared.planned_s is None:
        return None
    figure, axes = open_panel(f"Step {compared.step:,} compared with its plan", wide)
    names = list(PHASES)
    sides = ((-0.2, BLUE, "planned", compared.planned_s), (0.2, ORANGE, "measured", compared.measured_s))
    for offset, color, label, seconds in sides:
        rows = [row + offset for row in range(len(names))]
        axes.barh(rows, [seconds[name] for name in names], 0.38, color=color, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(visible=False, axis="y")
    close_panel(axes, "seconds", "")
    return figure
