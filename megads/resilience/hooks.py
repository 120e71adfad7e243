"""Hooks that handle non-finite steps and loss spikes, and the list of all hooks against numerical faults."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megads.engine.interface import TrainEngine
from megads.errors import NumericalError, RollBack
from megads.resilience.config import ResilienceConfig, SpikeAction, SpikeConfig
from megads.resilience.rollbacks import ROLL_BACK, RollbackRecord, recorded_rollbacks
from megads.resilience.spikes import Spike, SpikeDetector, StepLoss
from megads.runtime.distributed import ControlPlane
from megads.runtime.hooks import Hook, StepInfo, TrainState
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.optional_tools import require_tool
from megads.runtime.run_dir import METRICS_FILE


class NonFiniteHook:
    """Records every skipped step with its culprit.

    Args:
        events: event log for skipped steps.
        most_in_a_row: largest number of consecutive skipped steps; one more raises NumericalError on every rank.
        saved_before: returns the newest checkpoint from before a step, or None.
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
        """Returns advice that names a checkpoint from before the non-finite steps."""
        path = self._saved_before(last_finite)
        return f"continue from an earlier checkpoint with checkpoint.load={path or '<path> (this run has none yet)'}"

    def on_end(self, state: TrainState) -> None:
        pass


@dataclass(frozen=True)
class SavedState:
    """A checkpoint to which a run can roll back.

    Attributes:
        step: step of the checkpoint.
        name: folder name.
        digest: digest of the manifest.
    """

    step: int
    name: str
    digest: str


class SpikeHook:
    """Detects loss spikes, and rolls the run back if the config says so.

    All ranks see the same losses, including those before a restart, and therefore detect the same spikes. Rank 0
    decides and records the decision (event roll_back). Then all ranks exit with RollBack, and the launcher restarts
    them as the event says. If the run is killed in between, its next start reaches the same decision again or finds
    the event.

    Args:
        run_dir: run directory.
        config: detection of loss spikes, and the action on one.
        events: event log for spikes and decisions.
        control: control plane of all ranks.
        num_skips: number of active entries in data.skip.
        newest_up_to: returns the newest checkpoint of at most a given step, or None.
    """

    def __init__(
        self,
        run_dir: Path,
        config: SpikeConfig,
        events: EventWriter,
        control: ControlPlane,
        num_skips: int,
        newest_up_to: Callable[[int], SavedState | None],
    ) -> None:
        self._run_dir, self._config, self._events = run_dir, config, events
        self._control, self._num_skips, self._newest_up_to = control, num_skips, newest_up_to
        self._detector = SpikeDetector(config)

    def on_start(self, state: TrainState) -> None:
        past = self._control.first_decides(lambda: self._last_steps(state.step), list[tuple[int, int, float, float]])
        self._detector = SpikeDetector(self._config)
        found = self._detector.replay(StepLoss(*step) for step in past)
        # A run that was asked to stop at the step of the spike saved a checkpoint of that step.
        if found is not None and found.step == state.step and self._config.action is SpikeAction.roll_back:
            self._roll_back(found)

    def _last_steps(self, last: int) -> list[tuple[int, int, float, float]]:
        """Reads as many finite steps from metrics.jsonl as the detector remembers."""
        found: deque[tuple[int, int, float, float]] = deque(maxlen=self._detector.memory_steps)
        for line in read_json_lines(self._run_dir / METRICS_FILE):
            # Validation lines lack these keys, and skipped steps have no finite gradient norm.
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
        """Raises RollBack, or NumericalError after too many rollbacks; returns if no checkpoint precedes the spike."""
        decided = self._control.first_decides(lambda: self._decide(spike), str)
        if decided:
            raise RollBack(decided)

    def _decide(self, spike: Spike) -> str:
        """Decides and records a rollback on rank 0; returns its message, or an empty string if training continues."""
        most, rollbacks = self._config.max_rollbacks, recorded_rollbacks(self._run_dir)
        if len(rollbacks) >= most:
            raise NumericalError(
                f"{spike}: the run has been rolled back {len(rollbacks)} times (resilience.spikes.max_rollbacks = "
                f"{most}). Lower optim.lr or look at the data; to continue anyway, raise max_rollbacks, or set "
                "resilience.spikes.action=warn"
            )
        saved = self._newest_up_to(spike.begin)
        if saved is None:
            reason = f"there is no checkpoint of step {spike.begin} or before: training continues"
            self._events.write("roll_back_impossible", level="error", step=spike.step, reason=reason)
            return ""
        # If the run spikes again without a newer checkpoint, the bad data is longer than the skipped range: skip more.
        again = sum(record.checkpoint_step >= saved.step for record in rollbacks)
        end = spike.samples + (2**again - 1) * (spike.samples - spike.begin_samples)
        record = RollbackRecord(saved.step, saved.digest, (spike.begin_samples, end), self._num_skips)
        said = f"{spike}: rolling back to {saved.name}, skipping samples {spike.begin_samples} to {end}"
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
    newest_up_to: Callable[[Path, int], SavedState | None],
) -> list[Hook]:
    """Creates the hooks that the config enables: for loss spikes, and those of `megads.tools.rerun`.

    Args:
        config: enabled checks.
        engine: training engine.
        events: event log for faults.
        run_dir: run directory.
        num_skips: number of active entries in data.skip.
        newest_up_to: returns the newest checkpoint of a run directory of at most a given step, or None.

    Raises:
        ConfigError: the tool is needed and not installed.
    """
    found: list[Hook] = []
    suspects = None
    if config.spikes.action is not SpikeAction.off:
        saved = partial(newest_up_to, run_dir)
        spikes = SpikeHook(run_dir, config.spikes, events, engine.grid.control, num_skips, saved)
        found.append(spikes)
        suspects = spikes.suspects if config.check_suspicious_steps else None
    if asking := config.corruption_checks:
        tool = require_tool("rerun.silent_corruption", f"resilience.{asking[0]}")
        found += tool.corruption_hooks(config, engine, events, suspects)
    return found
