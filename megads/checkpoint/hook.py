"""Saves checkpoints while a run goes on."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from megads.checkpoint.config import CheckpointConfig, list_checkpoints
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import SaveError, on_first, remove_old, save_checkpoint
from megads.engine.interface import TrainEngine
from megads.errors import CheckpointError
from megads.runtime.heartbeat import SAVING, Heartbeat
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.lease import Fence
from megads.runtime.metrics import EventWriter, MetricsWriter


class CheckpointHook:
    """Saves every checkpoint.every_steps steps and after the last one, planned or not.

    A save that fails in mid-run, on a full disk for instance, is an event and not the end of the run, as long as an
    earlier checkpoint is there to fall back on. The last save of a run must succeed.

    Steps skipped for non-finite gradients are never saved: what made them so may be in the weights. A checkpoint that
    is due waits for the next finite step; a run that ends meanwhile saves the state after its last finite one, which
    skipped steps did not change but for the counters. And the checkpoint before the newest stays until a step after
    the newest was finite.

    Args:
        engine: holds the weights and the optimizer's state.
        run_dir: where to save.
        config: when.
        about: what every checkpoint says of the run, its counters apart.
        state: the loop's counters, live.
        events: where saves and failures are recorded.
        fence: of the start that this rank belongs to: an orphan must not save.
        metrics: the ledger, which every checkpoint knows the state of; None: there is none.
        beats: of this rank; None: it sends none.
    """

    def __init__(
        self,
        engine: TrainEngine,
        run_dir: Path,
        config: CheckpointConfig,
        about: RunRecord,
        state: TrainState,
        events: EventWriter,
        fence: Fence | None = None,
        metrics: MetricsWriter | None = None,
        beats: Heartbeat | None = None,
    ) -> None:
        self._engine = engine
        self._run_dir = run_dir
        self._config = config
        self._about = about
        self._state = state
        self._events = events
        self._fence = fence
        self._beats = beats or Heartbeat()
        self._ledger = metrics.record if metrics is not None else lambda: None
        # The one before the newest stays until the newest is proven.
        self._kept = max(config.keep, 2) if config.keep else 0
        self._saved_step, self._finite = state.step, state.state_dict()
        self._due = self._unproven = False
        self._failed_saves = 0

    def on_start(self, state: TrainState) -> None:
        # The state a run starts from is on disk already, or is a fresh one.
        self._saved_step, self._finite = state.step, state.state_dict()
        self._look_for_room()

    def _look_for_room(self) -> None:
        """Says before the first step that checkpoints will not fit; refuses where not even the first one would."""
        control = self._engine.grid.control
        size = sum(control.gather(sum(shard.tensor.nbytes for shard in self._engine.named_shards()), int))

        def look() -> str:
            free = shutil.disk_usage(self._run_dir).free
            more = max(1, self._kept + 1 - len(list_checkpoints(self._run_dir)))
            if free >= more * size:
                return ""
            text = (
                f"the disk of {self._run_dir} has {free / 2**30:.2f} GiB free, a checkpoint takes {size / 2**30:.2f}; "
                f"{more} more have to fit (checkpoint.keep = {self._config.keep})"
            )
            if free < size and not list_checkpoints(self._run_dir):
                raise CheckpointError(f"{text}: free some space, or choose another folder with run.dir=<path>")
            return text

        wrong = on_first(control, look, str)
        if wrong:
            self._events.write("disk_space", level="warning", message=wrong)

    def on_step(self, info: StepInfo) -> None:
        assert info.step == self._state.step, "the loop counts before it calls its hooks"
        every = self._config.every_steps
        due = bool(every) and info.step % every == 0
        if info.skipped:
            if due and not self._due and not info.last:
                self._events.write("checkpoint_put_off", step=info.step, reason="the step was not finite")
            self._due |= due
            if info.last:
                self._save(last=True)
            return
        self._finite = self._state.state_dict()
        if self._unproven:
            self._unproven = False
            remove_old(self._run_dir, self._saved_step, self._config.keep)
        if info.last or due or self._due:
            self._save(last=info.last)

    def on_end(self, state: TrainState) -> None:
        self._save(last=True)

    def _save(self, last: bool) -> None:
        self._due, step = False, self._finite["step"]
        if step == self._saved_step:
            return
        self._beats.enter(SAVING)
        run = replace(self._about, state=self._finite, optimizer_steps=self._engine.optimizer_steps)
        start = time.perf_counter()
        try:
            folder = self._write(run)
        except SaveError as error:
            self._failed_saves += 1
            self._events.write(
                "checkpoint_failed", level="warning", step=step, reason=str(error), previous=error.previous
            )
            if last or error.previous is None:
                raise
            if self._failed_saves > self._config.max_failed_saves:
                raise SaveError(
                    f"{self._failed_saves} saves in a row failed (checkpoint.max_failed_saves = "
                    f"{self._config.max_failed_saves}); {error}",
                    error.previous,
                    error.disk_full,
                ) from error
            return
        self._saved_step, self._unproven = step, self._config.keep == 1 and self._engine.grid.rank == 0
        self._failed_saves = 0
        self._events.write("checkpoint_saved", step=step, folder=folder.name, save_s=time.perf_counter() - start)

    def _write(self, run: RunRecord) -> Path:
        """Saves; on a full disk again without the oldest checkpoint, until only the newest is left.

        Raises:
            SaveError: on every rank.
        """
        control, step = self._engine.grid.control, run.state["step"]
        keys = {shard.key for shard in self._engine.named_shards(owned=False)}

        def save() -> Path:
            shards = self._engine.named_shards()
            return save_checkpoint(self._run_dir, shards, run, self._kept, keys, self._fence, control, self._ledger)

        def remove_oldest() -> list[str]:
            # A step after the newest was finite, or nothing would be saved now: it is enough.
            there = sum(at <= step for at in list_checkpoints(self._run_dir))
            return remove_old(self._run_dir, step, max(1, there - 1))

        while True:
            try:
                return save()
            except SaveError as error:
                gone = on_first(control, remove_oldest, list[str]) if error.disk_full and self._kept else []
                if not gone:
                    raise
                self._events.write("checkpoint_removed", level="warning", step=step, folders=gone, reason=str(error))
