"""ops.cuda_graphs=auto: a run measures after its first steps whether it captures micro-batches as CUDA graphs.

Graphs change no bit, so that only time counts. The decision is an event of the run, and its later starts keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megads.api import (
    EVENTS_FILE,
    LEAST_GRAPHS_SAVING,
    EventWriter,
    Kernels,
    ParallelGrid,
    PassTimes,
    RootConfig,
    StepInfo,
    TrainEngine,
    TrainState,
    read_json_lines,
)
from megads.tools.autotune.benchmark import cache_key

GRAPHS_EVENT = "cuda_graphs"


@dataclass(frozen=True)
class GraphsDecision:
    """Whether a run captures micro-batches, and the times that this follows from.

    Attributes:
        captured: whether micro-batches are captured.
        reason: why, for display.
        times: the longest times of any rank.
        source: origin of the decision, for display.
        key: hash of everything that the times depend on.
    """

    captured: bool
    reason: str
    times: PassTimes
    source: str = "measured"
    key: str = ""

    @property
    def text(self) -> str:
        """One line for display."""
        times, mode = self.times, "CUDA graphs" if self.captured else "eager mode"
        kernels = "" if times.device_ms is None else f", their kernels {times.device_ms:.3g} ms"
        return (
            f"ops.cuda_graphs=auto takes {mode} ({self.source}): launching the passes of a micro-batch takes "
            f"{times.host_ms:.3g} ms{kernels}; {self.reason}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts to a dict for an event."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> GraphsDecision:
        """Reads what `to_dict` returned; raises KeyError or TypeError on anything else."""
        values = {name: content[name] for name in ("captured", "reason", "source", "key")}
        return cls(times=PassTimes(**content["times"]), **values)


def decide(ranks: Sequence[PassTimes]) -> GraphsDecision:
    """Decides for all ranks by the estimated time of a step's passes; the slowest rank counts.

    In eager mode a micro-batch takes the longer of its launches and its kernels. Replayed it takes its kernels, but
    gradients are reduced after the last backward pass; that eager mode hides all of the reduction favors eager mode.

    Args:
        ranks: times of every rank.
    """
    devices_ms = [times.device_ms for times in ranks if times.device_ms is not None]
    longest = PassTimes(
        max(times.micro_batches for times in ranks),
        max(times.host_ms for times in ranks),
        max(devices_ms) if len(devices_ms) == len(ranks) else None,
        max(times.reduce_ms for times in ranks),
        next((times.failure for times in ranks if times.failure), ""),
    )
    host_ms, device_ms, reduce_ms = longest.host_ms, longest.device_ms, longest.reduce_ms
    if device_ms is None:
        return GraphsDecision(False, f"graphs do not work: {longest.failure}", longest)
    if host_ms <= device_ms:
        return GraphsDecision(False, "the GPU does not wait for the host", longest)
    eager_ms = longest.micro_batches * host_ms
    saved_ms = eager_ms - longest.micro_batches * device_ms - reduce_ms
    if saved_ms < LEAST_GRAPHS_SAVING * eager_ms:
        shown = f", as the reduction of gradients, {reduce_ms:.3g} ms, would not be overlapped" if reduce_ms else ""
        return GraphsDecision(False, f"graphs would save less than {LEAST_GRAPHS_SAVING:.0%}{shown}", longest)
    return GraphsDecision(True, "the GPU waits for the host", longest)


def graphs_key(config: RootConfig, kernels: Kernels, device: torch.device) -> str:
    """Hash of everything that the times of a run's passes depend on: device, software, model, layout and operators."""
    train = config.train
    shape = (train.seq_len, train.micro_batch_size, train.precision, train.deterministic, config.data.document_mask)
    operators = replace(kernels, tuned=None), sorted(kernels.tuned or ())
    return cache_key(device, {"model": config.model, "layout": config.parallel, "shape": shape, "ops": operators})


def recorded_graphs(run_dir: Path, key: str) -> GraphsDecision | None:
    """Returns the decision that the run's last start with this key took; None if there was none."""
    events = read_json_lines(run_dir / EVENTS_FILE)
    found = [event for event in events if event.get("event") == GRAPHS_EVENT and event.get("key") == key]
    return GraphsDecision.from_dict(found[-1]) if found else None


def kept_graphs(
    config: RootConfig, run_dir: Path, kernels: Kernels, grid: ParallelGrid, device: torch.device, events: EventWriter
) -> Kernels:
    """Returns the kernels with the decision of an earlier start, if CUDA graphs are undecided; collective then."""
    if kernels.cuda_graphs is not None:
        return kernels
    key = graphs_key(config, kernels, device)
    known = grid.control.first_decides(lambda: recorded_graphs(run_dir, key), GraphsDecision | None)
    if known is None:
        return kernels
    known = replace(known, source="as in the run's earlier start")
    events.write(GRAPHS_EVENT, message=known.text, **known.to_dict())
    return replace(kernels, cuda_graphs=known.captured)


class GraphsHook:
    """Hook that decides about CUDA graphs after the first steps of a start.

    Args:
        engine: engine whose CUDA graphs are undecided.
        key: see `graphs_key`.
        events: event log.
    """

    def __init__(self, engine: TrainEngine, key: str, events: EventWriter) -> None:
        self._engine, self._key, self._events = engine, key, events

    def on_start(self, state: TrainState) -> None:
        """Does nothing."""

    def on_step(self, info: StepInfo) -> None:
        """See `after_step`."""
        self.after_step()

    def on_end(self, state: TrainState) -> None:
        """Does nothing."""

    def after_step(self) -> None:
        """Lets the engine measure once it has taken enough steps; call after every step, on all ranks."""
        self._engine.choose_cuda_graphs(self._choose)

    def _choose(self, own: PassTimes) -> bool:
        decision = replace(decide(self._engine.grid.control.gather(own, PassTimes)), key=self._key)
        self._events.write(GRAPHS_EVENT, message=decision.text, **decision.to_dict())
        return decision.captured
