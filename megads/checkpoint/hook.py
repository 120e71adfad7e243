"""The training hook that saves checkpoints."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megads.checkpoint.async_saves import AsyncSaves
from megads.checkpoint.config import KEEP_ALL, CheckpointConfig, Retention, list_checkpoints, step_folder
from megads.checkpoint.fresh_start import own_history
from megads.checkpoint.local import newest_step
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import (
    Save,
    SaveError,
    hidden_folder,
    make_room,
    on_first,
    prepare,
    remove_old,
    save_checkpoint,
)
from megads.checkpoint.writer import SaveState
from megads.engine.interface import TrainEngine
from megads.errors import CheckpointError
from megads.runtime.heartbeat import SAVING, Heartbeat
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.lease import Fence
from megads.runtime.metrics import EventWriter, LedgerRecord, MetricHistory, MetricsWriter

_SAVING_LAST = f"{SAVING}, at the end"


class CheckpointHook:
    """Saves every checkpoint.every_steps steps, by time, and after the last step, also if the run ends early.

    A save that fails during the run, for example on a full disk, is recorded as an event and does not end the run, as
    long as an earlier checkpoint exists to fall back on. The last save of a run must succeed.

    Steps skipped for non-finite gradients are never saved, since the weights may be the cause. A checkpoint that is due
    then is saved after the next finite step. If the run ends first, it saves the state after its last finite step;
    skipped steps have changed only the counters. At the end of a training phase the counters of the skipped step are
    saved. The checkpoint before the newest is kept until a step after the newest was finite.

    Args:
        engine: holds the weights and the optimizer state.
        run_dir: folder of the run.
        config: when to save and what to keep.
        about: the run's record for every checkpoint, except for its counters.
        state: the counters of the training loop, updated in place.
        events: where saves and failures are recorded.
        fence: fence of this rank's start, which keeps an orphaned rank from saving; None: no other start can write.
        metrics: the metrics ledger, whose state every checkpoint records; None: there is none.
        beats: heartbeat of this rank; None: it sends none.
        background: asynchronous saves and local checkpoints; None: all saves are synchronous, to disk.
        loss_key: metric that checkpoint.keep_best compares; None: keep_best is off.
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
        background: AsyncSaves | None = None,
        loss_key: str | None = None,
    ) -> None:
        self._engine, self._run_dir, self._config, self._about = engine, run_dir, config, about
        self._state, self._events, self._fence, self._metrics = state, events, fence, metrics
        self._beats = beats or Heartbeat()
        self._losses = MetricHistory(run_dir, loss_key) if loss_key is not None else None
        self._checkpoint_bytes = 0
        self._saved_step, self._finite = state.step, state.state_dict()
        self._due = self._unproven = False
        self._last_save, self._held_up_s = time.monotonic(), 0.0
        self._failed_saves = 0
        self._background = background or AsyncSaves(config)

    def on_start(self, state: TrainState) -> None:
        self._last_save = time.monotonic()
        self._saved_step, self._finite = state.step, state.state_dict()
        local = self._background.local
        if local is not None and local.base is not None:
            # Every other initial state is already on disk, or is fresh.
            self._saved_step = on_first(self._engine.grid.control, self._newest_on_disk, int)
        self._look_for_room()
        self._background.begin(self._engine, self._state, self._events)

    def is_time(self) -> bool:
        """Whether checkpoint.every_minutes have passed since the last save; for rank 0, which tells the others."""
        # An asynchronous save also holds up the next step, whose update waits for the copy.
        held_up_s = max(self._held_up_s, self._background.waited_s)
        return time.monotonic() - self._last_save >= self._config.interval_s(held_up_s)

    def _newest_on_disk(self) -> int:
        history = own_history(self._config.load, self._run_dir)
        return newest_step(self._run_dir, history) if history is not None else 0

    def _look_for_room(self) -> None:
        """Warns before the first step if the disk is too small for the checkpoints.

        Raises:
            CheckpointError: there is no checkpoint yet, and not even the first one fits.
        """
        control = self._engine.grid.control
        size = sum(control.gather(sum(shard.tensor.nbytes for shard in self._engine.named_shards()), int))
        self._checkpoint_bytes, config = size, self._config
        # How many keep_every adds depends on the length of the run; `megads plan` takes that into account.
        kept = config.retention({}, newest_is_proven=False).recent + config.keep_best

        def look() -> str:
            free = shutil.disk_usage(self._run_dir).free
            more = max(1, kept + 1 - len(list_checkpoints(self._run_dir)))
            if free >= more * size:
                return ""
            best = f", keep_best = {config.keep_best}" if config.keep_best else ""
            text = f"{self._space(free)}; {more} more have to fit (checkpoint.keep = {config.keep}{best})"
            if free < size and not list_checkpoints(self._run_dir):
                raise CheckpointError(f"{text}: free some space, or choose another folder with run.dir=<path>")
            return text

        wrong = on_first(control, look, str)
        if wrong:
            self._events.write("disk_space", level="warning", message=wrong)

    def _space(self, free: int) -> str:
        return (
            f"the disk of {self._run_dir} has {free / 2**30:.2f} GiB free, a checkpoint takes "
            f"{self._checkpoint_bytes / 2**30:.2f}"
        )

    def on_step(self, info: StepInfo) -> None:
        assert info.step == self._state.step, "the loop counts before it calls its hooks"
        self._background.end_copy()
        local, every = self._background.local, self._config.every_steps
        due = info.save_due or (bool(every) and info.step % every == 0)
        if info.skipped:
            if local is not None:
                local.due(info.step, finite=False)
            if due and not self._due and not info.last:
                self._events.write("checkpoint_put_off", step=info.step, reason="the step was not finite")
            self._due |= due
            if info.ends_phase:
                # The next phase must not repeat this step: it would be skipped again.
                self._finite = self._state.state_dict()
            if info.last:
                self._save(last=True)
            return
        self._finite = self._state.state_dict()
        self._report_commit()
        if self._unproven and info.step > self._saved_step:
            self._unproven = False
            remove_old(self._run_dir, self._saved_step, self._retention(newest_is_proven=True))
        if info.last or due or self._due:
            begin = time.monotonic()
            self._save(last=info.last)
            self._last_save = time.monotonic()
            self._held_up_s = self._last_save - begin
        if local is not None and not info.last and local.due(info.step, finite=True):
            self._beats.enter(SAVING)
            if local.is_ready():
                self._save_local()

    def on_end(self, state: TrainState) -> None:
        self._background.end_copy()
        self._save(last=True)
        if self._background.local is not None:
            self._background.local.end()

    def _save(self, last: bool) -> None:
        self._due, step = False, self._finite["step"]
        self._beats.enter(_SAVING_LAST if last else SAVING)
        before = self._settle(wait=last or self._config.cannot_be_put_off(step))
        if before is SaveState.writing:
            # A writer is still busy with the previous checkpoint: retry after the next step.
            self._due = True
            return
        if step == self._saved_step:
            return
        run = self._record()
        self._make_room(step)
        # After a writer has failed, the ranks save synchronously.
        self._save_to_disk(run, last=last, wait=last or before in (SaveState.failed, SaveState.lost))

    def _save_local(self) -> None:
        """Copies the state for a local checkpoint only, not for disk."""
        run = self._record()
        with suppress(OSError):
            # A local checkpoint survives the processes, not the node, so the ledger need not be synced to disk.
            run = replace(run, ledger=self._ledger(wait=False))
        self._background.save_local(run, self._saved_step)

    def _record(self) -> RunRecord:
        """The run's record of the last finite step, whose weights are the current ones: skipped steps change none."""
        return replace(self._about, state=self._finite, optimizer_steps=self._engine.optimizer_steps)

    def _ledger(self, *, wait: bool = True) -> LedgerRecord | None:
        return self._metrics.record(wait=wait) if self._metrics is not None else None

    def _report_commit(self) -> None:
        """On rank 0, records the commit of the checkpoint that the writers save; other ranks learn of it later, at the
        next save."""
        step = self._background.ordered
        if step is None or self._engine.grid.rank or self._saved_step == step:
            return
        progress = self._background.progress()
        if progress.state is SaveState.done:
            self._committed(step, self._background.waited_s, write_s=progress.seconds)

    def _committed(self, step: int, waited_s: float, **more: float) -> None:
        self._saved_step, self._unproven = step, self._config.keep == 1 and self._engine.grid.rank == 0
        self._failed_saves = 0
        folder = step_folder(self._run_dir, step)
        self._events.write("checkpoint_saved", step=step, folder=folder.name, save_s=waited_s, **more)

    def _settle(self, wait: bool) -> SaveState:
        """Records the outcome of the last asynchronous save on all ranks, see `AsyncSaves.settle`; collective."""
        saves = self._background
        outcome, step = saves.settle(wait=wait), saves.ordered
        if outcome.state is SaveState.done and step is not None:
            if self._saved_step != step:
                self._committed(step, saves.waited_s, write_s=outcome.seconds)
            saves.ordered = None
        elif outcome.state in (SaveState.failed, SaveState.lost):
            there = [folder.name for at, folder in list_checkpoints(self._run_dir).items() if at <= self._saved_step]
            previous = there[-1] if there else None
            reason = outcome.reason
            self._events.write("checkpoint_failed", level="warning", step=step, reason=reason, previous=previous)
            saves.give_up(outcome)
        return outcome.state

    def _save_to_disk(self, run: RunRecord, *, last: bool, wait: bool) -> None:
        """Saves to disk. On a full disk, deletes an older checkpoint and retries, until only the newest is left.

        Args:
            run: record of the run, without its ledger.
            last: whether it is the last save of the run, which must succeed.
            wait: whether training waits until the checkpoint is on disk; otherwise it does if there are no writers.

        Raises:
            SaveError: on every rank.
        """
        control, step, start = self._engine.grid.control, run.state["step"], time.perf_counter()
        keys = {shard.key for shard in self._engine.named_shards(owned=False)}

        def in_background(save: Save) -> bool:
            if not wait and self._background.save(save, self._saved_step):
                return True
            self._beats.enter(_SAVING_LAST if last else f"{SAVING}, training waits")
            return False

        def delete_one() -> str:
            return make_room(self._run_dir, step, self._retention(), all_reasons=True)

        while True:
            shards, keep = self._engine.named_shards(), self._retention()
            try:
                save_checkpoint(
                    self._run_dir, shards, run, keep, keys, self._fence, control, self._ledger, in_background
                )
                break
            except SaveError as error:
                gone = on_first(control, delete_one, str) if error.disk_full and self._config.keep else ""
                if not gone:
                    self._failed(step, error, last)
                    return
                self._events.write("checkpoint_removed", level="warning", step=step, folders=[gone], reason=str(error))
        if self._background.ordered is None:
            self._committed(step, time.perf_counter() - start)

    def _failed(self, step: int, error: SaveError, last: bool) -> None:
        """Records a failed save; raises SaveError if the run cannot continue without it."""
        self._failed_saves += 1
        self._events.write("checkpoint_failed", level="warning", step=step, reason=str(error), previous=error.previous)
        if last or error.previous is None:
            raise error
        if self._failed_saves > self._config.max_failed_saves:
            raise SaveError(
                f"{self._failed_saves} saves in a row failed (checkpoint.max_failed_saves = "
                f"{self._config.max_failed_saves}); {error}",
                error.previous,
                error.disk_full,
            ) from error

    def _make_room(self, step: int) -> None:
        """On rank 0, deletes recent checkpoints before a save if the disk has too little space for it.

        Checkpoints kept for their step or their loss are deleted only after a save has failed, since the free space
        that a disk reports is not always correct. The newest is kept. It suffices: a step after it was finite, or
        nothing would be saved now.
        """
        if not self._config.keep or self._engine.grid.rank:
            return

        def free() -> int:
            return shutil.disk_usage(self._run_dir).free

        # The save itself reports errors of the disk.
        with suppress(OSError):
            if free() >= self._checkpoint_bytes or (self._fence is not None and self._fence.reason()):
                return
            # Leftovers of a killed start take space, too.
            prepare(hidden_folder(step_folder(self._run_dir, step), "partial"))
            while (room := free()) < self._checkpoint_bytes:
                gone = make_room(self._run_dir, step, self._retention(), all_reasons=False)
                if not gone:
                    return
                reason = self._space(room)
                self._events.write("checkpoint_removed", level="warning", step=step, folders=[gone], reason=reason)

    def _retention(self, *, newest_is_proven: bool = False) -> Retention:
        """Which checkpoints are kept; valid on rank 0 only, the other ranks remove none."""
        losses: dict[int, float] = {}
        if self._losses is not None and self._engine.grid.rank == 0:
            try:
                losses = self._losses.values()
            except OSError:
                # The best checkpoints are unknown.
                return KEEP_ALL
        return self._config.retention(losses, newest_is_proven=newest_is_proven)
