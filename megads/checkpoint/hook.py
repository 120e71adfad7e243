"""Saves checkpoints while a run goes on."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megads.checkpoint.config import CheckpointConfig, list_checkpoints, step_folder
from megads.checkpoint.fresh_start import own_history
from megads.checkpoint.image import ImageLayout, StateCopy, StateImage
from megads.checkpoint.local import forget, newest_step
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import RunRecord, software
from megads.checkpoint.retention import KEEP_ALL, Retention
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
"""Free memory over that of the copies, where nobody asked for them."""
_POLL_S = 0.01
_NAMED = 3
_SAVING_LAST = f"{SAVING}, at the end"


class CheckpointHook:
    """Saves every checkpoint.every_steps steps and after the last one, planned or not.

    A save that fails in mid-run, on a full disk for instance, is an event and not the end of the run, as long as an
    earlier checkpoint is there to fall back on. The last save of a run must succeed.

    Steps skipped for non-finite gradients are never saved: what made them so may be in the weights. A checkpoint that
    is due waits for the next finite step; a run that ends meanwhile saves the state after its last finite one, which
    skipped steps did not change but for the counters. At the
    end of a training stage it is saved with the counters of the skipped step. And the checkpoint before the newest
    stays until a step after the newest was finite.

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
        writer: of this rank, for saves that training does not wait for; None: it waits for all of them.
        timeout_s: a writer that takes longer has hung.
        loss_key: of the metric by which checkpoint.keep_best compares checkpoints; None: it keeps none.
        local: keeps local checkpoints of this rank; None: it has none.
        overlap: copies the state while the next step runs its forward and backward passes. False where others may write
            to it then: hooks of the user.
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
        self._failed_saves = 0
        self._writer, self._timeout_s, self._local = writer, timeout_s, local
        self._replicas_failed, self._replicas_lacking, self._late_replicas = "", False, False
        # One image of what this rank owns, or those of the local checkpoints, which hold more; and the last one copied.
        self._images, self._image, self._copies_all = list[StateImage](), 0, False
        # The step that the writers were ordered to save, until all ranks know what became of it.
        self._ordered: int | None = None
        self._late, self._waited_s = False, 0.0
        self._overlap = overlap
        # While there is one, it may give orders to the writers.
        self._copying: StateCopy | None = None

    def on_start(self, state: TrainState) -> None:
        self._saved_step, self._finite = state.step, state.state_dict()
        if self._local is not None and self._local.base is not None:
            # Any other state that a run starts from is on disk already, or is a fresh one.
            self._saved_step = on_first(self._engine.grid.control, self._newest_on_disk, int)
        self._look_for_room()
        self._begin_local_checkpoints()
        self._decide_on_writers()

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
        """The run goes on without."""
        assert self._local is not None
        self._local.end()
        self._local = None
        if self._engine.grid.rank == 0:
            forget(self._run_dir)
        self._events.write("local_checkpoints_off", level="warning", step=self._state.step, reason=reason)

    def _decide_on_writers(self) -> None:
        """Lets the writers take memory for a copy of the state, on all ranks or on none."""
        control, asked = self._engine.grid.control, self._config.async_save
        shards = self._engine.named_shards()
        size = sum(shard.tensor.nbytes for shard in shards)
        reason = ""
        if self._writer is None:
            reason = "there are no writers"
        elif not self._config.copies(max(control.gather(size, int))):
            reason = "there is little to save"
        if not reason and not self._images:
            # Where it was asked for, it need not leave room for anything else.
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
        """Says before the first step that checkpoints will not fit; refuses where not even the first one would."""
        control = self._engine.grid.control
        size = sum(control.gather(sum(shard.tensor.nbytes for shard in self._engine.named_shards()), int))
        self._checkpoint_bytes, config = size, self._config
        # How many keep_every adds depends on the length, which `megads plan` counts with.
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
        due = bool(every) and info.step % every == 0
        if info.skipped:
            if self._local is not None:
                self._local.due(info.step, finite=False)
            if due and not self._due and not info.last:
                self._events.write("checkpoint_put_off", step=info.step, reason="the step was not finite")
            self._due |= due
            if info.ends_stage:
                # The next stage must not train this step again: it would be skipped again.
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
            self._save(last=info.last)
        if self._local is not None and not info.last and self._local.due(info.step, finite=True):
            self._save_local()

    def on_end(self, state: TrainState) -> None:
        self._end_copy()
        self._save(last=True)
        if self._local is not None:
            # The state is on disk.
            if self._engine.grid.rank == 0:
                forget(self._run_dir)
            self._local.end()

    def _save(self, last: bool) -> None:
        self._due, step = False, self._finite["step"]
        self._beats.enter(_SAVING_LAST if last else SAVING)
        settled = self._settle(wait=last)
        if settled is Stage.writing:
            # A writer is busy with the last checkpoint: this one is made after the next step.
            self._due = True
            return
        if step == self._saved_step:
            return
        # A copy holds the weights of now, which after skipped steps are those of the last finite one.
        run = replace(self._about, state=self._finite, optimizer_steps=self._engine.optimizer_steps)
        self._make_room(step)
        # Where a writer failed, the ranks look what can be done, on a full disk for instance.
        if last or settled is Stage.failed or not self._order(run):
            self._save_now(run, last)

    def _save_local(self) -> None:
        """Copies the state for a local checkpoint alone."""
        self._beats.enter(SAVING)
        if not self._local_writers_are_done(wait=False) or not self._copies_are_sent():
            return
        control, writer = self._engine.grid.control, self._writer
        run = replace(self._about, state=self._finite, optimizer_steps=self._engine.optimizer_steps)
        # A writer that is stopped may go on later, until it is killed.
        busy = self._ordered is not None and writer is not None
        reads = busy and control.any(writer is not None and writer.progress().stage in (Stage.writing, Stage.lost))
        self._start_copy(run, None, self._image if reads else None)

    def _local_writers_are_done(self, *, wait: bool) -> bool:
        """Whether local checkpoints go on and all ranks have completed the last one, so that another can be made."""
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
        """Whether no rank sends the last local checkpoint to another node any more: another one can be made."""
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
        """Copies the state into an image, which becomes a local checkpoint where there are any.

        Args:
            run: what a local checkpoint says of the run.
            order: of the writer for the disk, once the image that it names is known and copied.
            read: image that a writer brings to disk, on any rank.
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
                # Processes may end, and the file stays what it is: it need not be on disk.
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
        """Waits for the last copy; after an optimizer step it is complete."""
        if self._copying is not None:
            self._engine.before_update(None)
            self._copying.wait()
            self._copying = None

    def _ledger(self, *, wait: bool = True) -> LedgerRecord | None:
        return self._metrics.record(wait=wait) if self._metrics is not None else None

    def _order(self, run: RunRecord) -> bool:
        """Copies the state and lets the writers save it; False where that cannot be, on all ranks."""
        writer, final = self._writer, step_folder(self._run_dir, run.state["step"])
        if writer is None:
            return False
        start = time.perf_counter()

        def begin() -> LedgerRecord | None:
            prepare(hidden_folder(final, "partial"))
            # As it is now: what comes after this step is not in the checkpoint.
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
        """Rank 0 notes the commit of the checkpoint that it ordered; the others learn of it at the next save."""
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
        """Finds out on all ranks what became of the last order: done, failed or still writing; idle without one.

        Args:
            wait: until it is not.
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
        """After a failure of a writer: this save, and after the loss of a writer every save, is made by the ranks."""
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
        """Saves while training waits."""
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
        """Saves; on a full disk again without one of the older checkpoints, until only the newest is left.

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
        """Where a disk has no room for a checkpoint, rank 0 deletes recent ones before it is written.

        Those that stay for their step or their loss give way to a failure only: what a disk says of its free space is
        not always true. The newest stays. A step after it was finite, or nothing would be saved now: it is enough.
        """
        if not self._config.keep or self._engine.grid.rank:
            return

        def free() -> int:
            return shutil.disk_usage(self._run_dir).free

        # The save itself fails of what is wrong with the disk.
        with suppress(OSError):
            if free() >= self._checkpoint_bytes or (self._fence is not None and self._fence.reason()):
                return
            # What a killed start left behind takes room, too.
            prepare(hidden_folder(step_folder(self._run_dir, step), "partial"))
            while (room := free()) < self._checkpoint_bytes:
                gone = make_room(self._run_dir, step, self._retention(), all_reasons=False)
                if not gone:
                    return
                reason = self._space(room)
                self._events.write("checkpoint_removed", level="warning", step=step, folders=[gone], reason=reason)

    def _retention(self, *, newest_is_proven: bool = False) -> Retention:
        """Which checkpoints stay, as rank 0 knows: the others remove none."""
        losses: dict[int, float] = {}
        if self._losses is not None and self._engine.grid.rank == 0:
            try:
                losses = self._losses.values()
            except OSError:
                # Nobody knows which the best ones are.
                return KEEP_ALL
        return self._config.retention(losses, newest_is_proven=newest_is_proven)
