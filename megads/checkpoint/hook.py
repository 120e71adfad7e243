"""The training hook that saves checkpoints."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megads.checkpoint.config import KEEP_ALL, CheckpointConfig, Retention, list_checkpoints, step_folder
from megads.checkpoint.fresh_start import own_history
from megads.checkpoint.image import ImageLayout, StateCopy, StateImage
from megads.checkpoint.local import forget, newest_step
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import RunRecord, software
from megads.checkpoint.store import (
    RanksFailed,
    SaveError,
    hidden_folder,
    make_room,
    on_first,
    prepare,
    remove_old,
    save_checkpoint,
)
from megads.checkpoint.writer import CheckpointWriter, SaveOrder, Stage, gather_progress
from megads.engine.interface import TrainEngine
from megads.errors import CheckpointError
from megads.runtime.environment import rank_environment
from megads.runtime.heartbeat import SAVING, Heartbeat
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.lease import Fence
from megads.runtime.machine_memory import available_memory
from megads.runtime.metrics import EventWriter, LedgerRecord, MetricHistory, MetricsWriter

_MARGIN = 2
"""Free memory required for the copies, as a multiple of their size, if async_save is null."""
_POLL_S = 0.01
_NAMED = 3
_SAVING_LAST = f"{SAVING}, at the end"


class CheckpointHook:
    """Saves every checkpoint.every_steps steps, by time, and after the last step, also if the run ends early.

    A save that fails during the run, for example on a full disk, is recorded as an event and does not end the run, as
    long as an earlier checkpoint exists to fall back on. The last save of a run must succeed.

    Steps skipped for non-finite gradients are never saved, since the weights may be the cause. A checkpoint that is due
    then is saved after the next finite step. If the run ends first, it saves the state after its last finite step;
    skipped steps have changed only the counters. At the end of a training stage the counters of the skipped step are
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
        writer: checkpoint writer of this rank for asynchronous saves; None: all saves are synchronous.
        timeout_s: a writer that takes longer is considered hung.
        loss_key: metric that checkpoint.keep_best compares; None: keep_best is off.
        local: local checkpoints of this rank; None: they are off.
        overlap: copy the state during the forward and backward passes of the next step. False if user hooks may write
            to it then.
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
        writer: CheckpointWriter | None = None,
        timeout_s: float = 600.0,
        loss_key: str | None = None,
        local: LocalSaves | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self._engine = engine
        self._run_dir = run_dir
        self._config = config
        self._about = about
        self._state = state
        self._events = events
        self._fence = fence
        self._beats = beats or Heartbeat()
        self._metrics = metrics
        self._losses = MetricHistory(run_dir, loss_key) if loss_key is not None else None
        self._checkpoint_bytes = 0
        self._saved_step, self._finite = state.step, state.state_dict()
        self._due = self._unproven = False
        self._last_save, self._held_up_s = time.monotonic(), 0.0
        self._failed_saves = 0
        self._writer, self._timeout_s, self._local = writer, timeout_s, local
        self._replicas_failed, self._replicas_lacking, self._late_replicas = "", False, False
        # One image of the shards that this rank owns, or the images of the local checkpoints, which hold more; and the
        # number of the image that was copied last.
        self._images, self._image, self._copies_all = list[StateImage](), 0, False
        # The step that the writers are saving, until all ranks know the outcome.
        self._ordered: int | None = None
        self._late, self._waited_s = False, 0.0
        self._overlap = overlap
        # As long as this copy exists, it may send orders to the writers.
        self._copying: StateCopy | None = None

    def on_start(self, state: TrainState) -> None:
        self._last_save = time.monotonic()
        self._saved_step, self._finite = state.step, state.state_dict()
        if self._local is not None and self._local.base is not None:
            # Every other initial state is already on disk, or is fresh.
            self._saved_step = on_first(self._engine.grid.control, self._newest_on_disk, int)
        self._look_for_room()
        self._begin_local_checkpoints()
        self._decide_on_writers()

    def is_time(self) -> bool:
        """Whether checkpoint.every_minutes have passed since the last save; for rank 0, which tells the others."""
        # An asynchronous save also holds up the next step, whose update waits for the copy.
        held_up_s = max(self._held_up_s, self._waited_s)
        return time.monotonic() - self._last_save >= self._config.interval_s(held_up_s)

    def _newest_on_disk(self) -> int:
        history = own_history(self._config.load, self._run_dir)
        return newest_step(self._run_dir, history) if history is not None else 0

    def _begin_local_checkpoints(self) -> None:
        local = self._local
        if local is None:
            return
        held, owned = self._engine.named_shards(owned=False), self._engine.named_shards()
        reason = local.allocate(held, owned, available_memory() // rank_environment().local_world_size)
        if reason:
            self._end_local_checkpoints(reason)
        else:
            self._images, self._copies_all = local.images, True
            if local.replica_refusal:
                self._events.write("replicas_off", level="warning", step=self._state.step, reason=local.replica_refusal)

    def _end_local_checkpoints(self, reason: str) -> None:
        """Turns local checkpoints off; the run continues without them."""
        assert self._local is not None
        self._local.end()
        self._local = None
        if self._engine.grid.rank == 0:
            forget(self._run_dir)
        self._events.write("local_checkpoints_off", level="warning", step=self._state.step, reason=reason)

    def _decide_on_writers(self) -> None:
        """Enables asynchronous saves and allocates memory for the copies, on all ranks or on none."""
        control, asked = self._engine.grid.control, self._config.async_save
        shards = self._engine.named_shards()
        size = sum(shard.tensor.nbytes for shard in shards)
        reason = ""
        if self._writer is None:
            reason = "there are no writers"
        elif not self._config.copies(max(control.gather(size, int))):
            reason = "there is little to save"
        if not reason and not self._images:
            # If the user asked for asynchronous saves, no margin is required.
            needed = size * (_MARGIN if asked is None else 1)
            if control.any(available_memory() // rank_environment().local_world_size < needed):
                reason = f"a node has no memory for copies of {size / 2**30:.1f} GiB a rank"
        if not reason and self._writer is not None:
            try:
                self._images = self._images or [StateImage.anonymous(ImageLayout.of(shards, shards))]
                if any(shard.tensor.is_cuda for shard in shards):
                    for image in self._images:
                        image.pin()
                self._writer.attach(self._images)
            except (OSError, torch.cuda.CudaError) as error:
                reason = f"no shared memory for a copy of {size / 2**30:.1f} GiB: {error}"
            reason = next(filter(None, control.gather(reason, str)), "")
        if reason:
            self._drop_writers()
            if asked:
                self._events.write("synchronous_saves", level="warning", reason=reason)

    def _drop_writers(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

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
        self._end_copy()
        every = self._config.every_steps
        due = info.save_due or (bool(every) and info.step % every == 0)
        if info.skipped:
            if self._local is not None:
                self._local.due(info.step, finite=False)
            if due and not self._due and not info.last:
                self._events.write("checkpoint_put_off", step=info.step, reason="the step was not finite")
            self._due |= due
            if info.ends_stage:
                # The next stage must not repeat this step: it would be skipped again.
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
        if self._local is not None and not info.last and self._local.due(info.step, finite=True):
            self._save_local()

    def on_end(self, state: TrainState) -> None:
        self._end_copy()
        self._save(last=True)
        if self._local is not None:
            # The state is on disk now, so the local checkpoints are obsolete.
            if self._engine.grid.rank == 0:
                forget(self._run_dir)
            self._local.end()

    def _save(self, last: bool) -> None:
        self._due, step = False, self._finite["step"]
        self._beats.enter(_SAVING_LAST if last else SAVING)
        settled = self._settle(wait=last or self._config.cannot_be_put_off(step))
        if settled is Stage.writing:
            # A writer is still busy with the previous checkpoint: retry after the next step.
            self._due = True
            return
        if step == self._saved_step:
            return
        # A copy holds the current weights; skipped steps do not change them, so they are those of the last finite step.
        run = replace(self._about, state=self._finite, optimizer_steps=self._engine.optimizer_steps)
        self._make_room(step)
        # After a writer has failed, the ranks save synchronously, which can delete checkpoints on a full disk.
        if last or settled is Stage.failed or not self._order(run):
            self._save_now(run, last)

    def _save_local(self) -> None:
        """Copies the state for a local checkpoint only, not for disk."""
        self._beats.enter(SAVING)
        if not self._local_writers_are_done(wait=False) or not self._copies_are_sent():
            return
        control, writer = self._engine.grid.control, self._writer
        run = replace(self._about, state=self._finite, optimizer_steps=self._engine.optimizer_steps)
        # A writer that is stopped may continue later, until it is killed.
        busy = self._ordered is not None and writer is not None
        reads = busy and control.any(writer is not None and writer.progress().stage in (Stage.writing, Stage.lost))
        self._start_copy(run, None, self._image if reads else None)

    def _local_writers_are_done(self, *, wait: bool) -> bool:
        """Whether local checkpoints are on and all ranks have completed the last one, so that another can begin."""
        local = self._local
        if local is None:
            return False
        progress = local.settle(wait=wait)
        if progress.stage is Stage.lost:
            self._events.write("synchronous_local_checkpoints", level="warning", reason=progress.reason)
            progress = local.do_without_writers()
        if progress.stage is Stage.failed:
            self._end_local_checkpoints(progress.reason)
        return progress.stage is Stage.done

    def _copies_are_sent(self) -> bool:
        """Whether every rank has sent its last local checkpoint to another node, so that another can begin."""
        if self._local is None:
            return False
        progress = self._local.replication()
        if progress.restarted:
            self._replicas_lacking = True
            self._events.write("replica_restarted", level="warning", step=self._state.step, reason=progress.restarted)
        if progress.failed and progress.failed != self._replicas_failed:
            self._replicas_lacking = True
            self._events.write("replica_failed", level="warning", step=self._state.step, reason=progress.failed)
        self._replicas_failed = progress.failed
        if progress.complete and self._replicas_lacking:
            self._replicas_lacking = False
            self._events.write("replicas_complete_again", step=self._state.step)
        if progress.busy and not self._late_replicas:
            self._late_replicas = True
            reason = "the last one is still being sent to another node; this event is not repeated"
            self._events.write("local_checkpoint_put_off", level="warning", step=self._state.step, reason=reason)
        return not progress.busy

    def _start_copy(self, run: RunRecord, order: SaveOrder | None, read: int | None = None) -> None:
        """Copies the state into an image, which becomes a local checkpoint if these are on.

        Args:
            run: the run's record in the local checkpoint.
            order: order to the writer to save the image to disk once it is copied; None: the image is not saved.
            read: number of the image that a writer on any rank is saving to disk; None: no writer is.
        """
        shards, local = self._engine.named_shards(owned=not self._copies_all), self._local

        def write(image: int) -> None:
            if order is not None and self._writer is not None:
                self._image = image
                self._writer.write(replace(order, image=image))

        if local is None:
            copying = self._images[0].start_copy(shards, partial(write, 0))
        else:
            with suppress(OSError):
                # A local checkpoint survives the processes, not the node, so the ledger need not be synced to disk.
                run = replace(run, ledger=self._ledger(wait=False))
            copying = local.copy(shards, run, self._saved_step, read, write)
        self._copying = copying
        if not self._overlap:
            self._end_copy()
            return

        def wait() -> None:
            start = time.perf_counter()
            copying.before_update()
            self._waited_s += time.perf_counter() - start

        self._engine.before_update(wait)

    def _end_copy(self) -> None:
        """Waits for the last copy, which is complete once the next optimizer step is."""
        if self._copying is not None:
            self._engine.before_update(None)
            self._copying.wait()
            self._copying = None

    def _ledger(self, *, wait: bool = True) -> LedgerRecord | None:
        return self._metrics.record(wait=wait) if self._metrics is not None else None

    def _order(self, run: RunRecord) -> bool:
        """Copies the state and orders the writers to save it; False on all ranks if that is not possible."""
        writer, final = self._writer, step_folder(self._run_dir, run.state["step"])
        if writer is None:
            return False
        start = time.perf_counter()

        def begin() -> LedgerRecord | None:
            prepare(hidden_folder(final, "partial"))
            # Taken now: the checkpoint must not include metrics of later steps.
            return self._ledger()

        try:
            ledger = on_first(self._engine.grid.control, begin, LedgerRecord | None)
        except RanksFailed:
            return False
        self._local_writers_are_done(wait=True)
        keys = sorted({shard.key for shard in self._engine.named_shards(owned=False)})
        order = SaveOrder(0, final, replace(run, ledger=ledger), software(), keys, self._retention())
        self._ordered, self._late, self._waited_s = run.state["step"], False, 0.0
        writer.announce()
        self._start_copy(run, order)
        self._waited_s += time.perf_counter() - start
        return True

    def _report_commit(self) -> None:
        """On rank 0, records the commit of the checkpoint that the writers save; other ranks learn of it later, at the
        next save."""
        if self._ordered is None or self._writer is None or self._engine.grid.rank or self._saved_step == self._ordered:
            return
        progress = self._writer.progress()
        if progress.stage is Stage.done:
            self._committed(self._ordered, self._waited_s, write_s=progress.seconds)

    def _committed(self, step: int, waited_s: float, **more: float) -> None:
        self._saved_step, self._unproven = step, self._config.keep == 1 and self._engine.grid.rank == 0
        self._failed_saves = 0
        folder = step_folder(self._run_dir, step)
        self._events.write("checkpoint_saved", step=step, folder=folder.name, save_s=waited_s, **more)

    def _settle(self, wait: bool) -> Stage:
        """Outcome of the last order on all ranks: done, failed or still writing; idle if there was none. Collective.

        Args:
            wait: wait until no rank is writing.
        """
        writer, control = self._writer, self._engine.grid.control
        if self._ordered is None or writer is None:
            return Stage.idle
        while True:
            found = gather_progress(writer.progress(self._timeout_s), control)
            wrong = [(at, it.reason) for at, it in enumerate(found) if it.stage in (Stage.failed, Stage.lost)]
            busy = [rank for rank, progress in enumerate(found) if progress.stage is Stage.writing]
            if wrong:
                self._give_up_order(wrong, lost=any(progress.stage is Stage.lost for progress in found))
                return Stage.failed
            if not busy:
                break
            if not wait:
                if not self._late:
                    self._late = True
                    which = f"rank {busy[0]}" + (f" and {len(busy) - 1} more" if busy[1:] else "")
                    reason = f"the checkpoint of step {self._ordered} is still being written by {which}"
                    self._events.write("checkpoint_put_off", level="warning", step=self._state.step, reason=reason)
                return Stage.writing
            time.sleep(_POLL_S)
        if self._saved_step != self._ordered:
            self._committed(self._ordered, self._waited_s, write_s=found[0].seconds)
        self._ordered = None
        return Stage.done

    def _give_up_order(self, wrong: list[tuple[int, str]], lost: bool) -> None:
        """Handles a failed writer: the ranks make this save synchronously, and every later one if a writer is lost."""
        writer, control = self._writer, self._engine.grid.control
        assert writer is not None
        named = "; ".join(f"rank {rank}: {why}" for rank, why in wrong[:_NAMED])
        step, self._ordered = self._ordered, None
        there = [folder.name for at, folder in list_checkpoints(self._run_dir).items() if at <= self._saved_step]
        previous = there[-1] if there else None
        self._events.write("checkpoint_failed", level="warning", step=step, reason=named, previous=previous)
        if not lost:
            writer.cancel()
            while writer.progress().stage is Stage.writing and writer.elapsed_s() < self._timeout_s:
                time.sleep(_POLL_S)
            lost = writer.progress().stage in (Stage.writing, Stage.lost)
        if control.any(lost):
            self._drop_writers()
            self._events.write("synchronous_saves", level="warning", reason=named)

    def _save_now(self, run: RunRecord, last: bool) -> None:
        """Saves synchronously."""
        step = run.state["step"]
        self._beats.enter(_SAVING_LAST if last else f"{SAVING}, training waits")
        start = time.perf_counter()
        try:
            self._write(run)
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
        self._committed(step, time.perf_counter() - start)

    def _write(self, run: RunRecord) -> Path:
        """Saves synchronously. On a full disk, deletes an older checkpoint and retries, until only the newest is left.

        Raises:
            SaveError: on every rank.
        """
        control, step = self._engine.grid.control, run.state["step"]
        keys = {shard.key for shard in self._engine.named_shards(owned=False)}

        def save() -> Path:
            shards, keep = self._engine.named_shards(), self._retention()
            return save_checkpoint(self._run_dir, shards, run, keep, keys, self._fence, control, self._ledger)

        def delete_one() -> str:
            return make_room(self._run_dir, step, self._retention(), all_reasons=True)

        while True:
            try:
                return save()
            except SaveError as error:
                gone = on_first(control, delete_one, str) if error.disk_full and self._config.keep else ""
                if not gone:
                    raise
                self._events.write("checkpoint_removed", level="warning", step=step, folders=[gone], reason=str(error))

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
