"""Non-finite steps: each one is an event, too many in a row end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megads.errors import NumericalError
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter


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
