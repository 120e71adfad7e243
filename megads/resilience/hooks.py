"""Watches the steps of a run for numerical faults: non-finite steps and loss spikes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megads.engine.interface import StepResult, TrainEngine
from megads.errors import NumericalError, RollBack
from megads.resilience.compute import ComputeHook
from megads.resilience.config import ResilienceConfig, SpikeAction, SpikeConfig
from megads.resilience.replicas import ReplicaHook
from megads.resilience.rollbacks import ROLL_BACK, RollbackRecord, recorded_rollbacks
from megads.resilience.spikes import Spike, SpikeDetector, StepLoss
from megads.runtime.distributed import ControlPlane
from megads.runtime.hooks import Hook, StepInfo, TrainState
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import METRICS_FILE


class NonFiniteHook:
    """Records every skipped step with its culprit.

    Args:
        events: where skips are recorded.
        most_in_a_row: skipped steps in a row that the run survives; one more raises NumericalError on every rank.
        saved_before: the newest checkpoint from before a step; None: there is none.
    """

    def __init__(
        self, events: EventWriter, most_in_a_row: int, saved_before: Callable[[int], Path | None] = lambda _step: None
    ) -> None:
        self._events, self._saved_before = events, saved_before
        self._most = most_in_a_row
        self._in_a_row = 0

    def on_start(self, state: TrainState) -> None:
        self._in_a_row = 0

    def on_step(self, info: StepInfo) -> None:
        if not info.skipped:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._events.write(
            "step_skipped", level="warning", step=info.step, cause="non-finite gradient", culprit=info.culprit
        )
        if self._in_a_row > self._most:
            raise NumericalError(
                f"{self._in_a_row} non-finite steps in a row, up to step {info.step} "
                f"(train.max_nonfinite_steps = {self._most}); first culprit: {info.culprit}. Lower optim.lr, look at "
                f"the data of that step, or {self._healthy(info.step - self._in_a_row)}"
            )

    def _healthy(self, last_finite: int) -> str:
        """Names a checkpoint after which a step was finite."""
        path = self._saved_before(last_finite)
        return f"continue from an earlier checkpoint with checkpoint.load={path or '<path> (this run has none yet)'}"

    def on_end(self, state: TrainState) -> None:
        pass


class RerunHook:
    """Computes every non-finite step once more, and records whether the fault was transient or persistent.

    Args:
        engine: that computes.
        events: where that is recorded.
    """

    def __init__(self, engine: TrainEngine, events: EventWriter) -> None:
        self._engine, self._events = engine, events
        self._step = 0

    def on_start(self, state: TrainState) -> None:
        self._step = state.step
        self._engine.rerun_nonfinite(self._note)

    def on_step(self, info: StepInfo) -> None:
        self._step = info.step

    def on_end(self, state: TrainState) -> None:
        pass

    def _note(self, first: StepResult, second: StepResult) -> None:
        self._events.write(
            "step_rerun",
            level="warning",
            step=self._step + 1,
            fault="persistent" if second.skipped else "transient",
            rank=first.culprit.rank if first.culprit is not None else None,
            culprit=str(first.culprit or ""),
            culprit_of_rerun=str(second.culprit or ""),
        )


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that a run can go back to.

    Attributes:
        step: of it.
        name: of its folder.
        digest: of its manifest.
    """

    step: int
    name: str
    digest: str


class SpikeHook:
    """Finds loss spikes, and rolls the run back where that is asked for.

    All ranks see the same losses, those before a restart included, and so find the same. Rank 0 decides and records the
    decision (event roll_back); then all ranks end by RollBack, and the launcher starts them again as the event says. A
    run that is killed in between comes to the same decision again, or finds the event.

    Args:
        run_dir: the run's folder.
        config: when a rise of the loss is a spike, and what follows.
        events: where spikes and decisions are recorded.
        control: of all ranks.
        num_skips: entries of data.skip in force.
        saved_up_to: the newest checkpoint of at most a step; None: there is none.
    """

    def __init__(
        self,
        run_dir: Path,
        config: SpikeConfig,
        events: EventWriter,
        control: ControlPlane,
        num_skips: int,
        saved_up_to: Callable[[int], SavedState | None],
    ) -> None:
        self._run_dir, self._config, self._events = run_dir, config, events
        self._control, self._num_skips, self._saved_up_to = control, num_skips, saved_up_to
        self._detector = SpikeDetector(config)

    def on_start(self, state: TrainState) -> None:
        past = self._control.first_decides(lambda: self._last_steps(state.step), list[tuple[int, int, float, float]])
        self._detector = SpikeDetector(self._config)
        found = self._detector.replay(StepLoss(*step) for step in past)
        # A run that was asked to stop at the very step saved first.
        if found is not None and found.step == state.step and self._config.action is SpikeAction.roll_back:
            self._roll_back(found)

    def _last_steps(self, last: int) -> list[tuple[int, int, float, float]]:
        """Of the ledger, as many as the detector remembers."""
        found: deque[tuple[int, int, float, float]] = deque(maxlen=self._detector.memory_steps)
        for line in read_json_lines(self._run_dir / METRICS_FILE):
            # Lines of validations have none of these, and those of skipped steps no finite gradient norm.
            values = [line.get(key) for key in ("step", "samples", "loss", "grad_norm")]
            numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
            if len(numbers) == len(values) and numbers[0] <= last:
                found.append((int(numbers[0]), int(numbers[1]), float(numbers[2]), float(numbers[3])))
        return list(found)

    def on_step(self, info: StepInfo) -> None:
        if info.skipped:
            return
        found = self._detector.observe(StepLoss(info.step, info.samples, info.loss, info.grad_norm))
        if found is None:
            return
        self._events.write("loss_spike", level="warning", message=str(found), **asdict(found))
        if self._config.action is SpikeAction.roll_back and not info.last:
            self._roll_back(found)

    def on_end(self, state: TrainState) -> None:
        pass

    def suspects(self, step: int, loss: float, grad_norm: float) -> bool:
        """Whether a step would count towards a spike, or its gradient norm is far above its median."""
        return self._detector.suspects(StepLoss(step, 0, loss, grad_norm))

    def _roll_back(self, spike: Spike) -> None:
        """Raises RollBack, or NumericalError where there were too many; returns where there is no checkpoint before."""
        decided = self._control.first_decides(lambda: self._decide(spike), str)
        if decided:
            raise RollBack(decided)

    def _decide(self, spike: Spike) -> str:
        """Records what rank 0 decides and returns it in words; empty for going on."""
        most, rollbacks = self._config.max_rollbacks, recorded_rollbacks(self._run_dir)
        if len(rollbacks) >= most:
            raise NumericalError(
                f"{spike}: the run has been rolled back {len(rollbacks)} times (resilience.spikes.max_rollbacks = "
                f"{most}). Lower optim.lr or look at the data; to go on all the same, raise max_rollbacks, or set "
                "resilience.spikes.action=warn"
            )
        saved = self._saved_up_to(spike.begin)
        if saved is None:
            reason = f"there is no checkpoint of step {spike.begin} or before: the run goes on"
            self._events.write("roll_back_impossible", level="error", step=spike.step, reason=reason)
            return ""
        # Where the run came no further than its last rollback, the bad data is longer than what was left out.
        again = sum(record.checkpoint_step >= saved.step for record in rollbacks)
        end = spike.samples + (2**again - 1) * (spike.samples - spike.begin_samples)
        record = RollbackRecord(saved.step, saved.digest, (spike.begin_samples, end), self._num_skips)
        said = f"{spike}: going back to {saved.name}, leaving out samples {spike.begin_samples} to {end}"
        self._events.write(
            ROLL_BACK, level="warning", message=said, **asdict(spike), checkpoint=saved.name, **asdict(record)
        )
        return said


def numerical_hooks(
    config: ResilienceConfig,
    engine: TrainEngine,
    events: EventWriter,
    run_dir: Path,
    num_skips: int,
    saved_up_to: Callable[[Path, int], SavedState | None],
) -> list[Hook]:
    """Makes the hooks that the config asks for: reruns, loss spikes, repeated computations, and flipped bits.

    Args:
        config: what is asked for.
        engine: that computes.
        events: where faults are recorded.
        run_dir: the run's folder.
        num_skips: entries of data.skip in force.
        saved_up_to: the newest checkpoint of a run of at most a step; None: there is none.
    """
    found: list[Hook] = []
    suspects = None
    if config.rerun_nonfinite:
        found.append(RerunHook(engine, events))
    if config.spikes.action is not SpikeAction.off:
        saved = partial(saved_up_to, run_dir)
        spikes = SpikeHook(run_dir, config.spikes, events, engine.grid.control, num_skips, saved)
        found.append(spikes)
        suspects = spikes.suspects if config.check_suspicious_steps else None
    if config.checks_compute:
        found.append(ComputeHook(engine, events, config.check_compute_every_steps, suspects))
    if config.check_replicas_every_steps:
        found.append(ReplicaHook(engine, events, config.check_replicas_every_steps))
    return found
