"""Asynchronous saves: a rank copies its state while it trains on, and its writer process saves the copy to disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megads.checkpoint.config import EVERYTHING, CheckpointConfig, History, Retention
from megads.checkpoint.image import ImageLayout, StateBuffer, StateCopy
from megads.checkpoint.manifest import RunRecord, software
from megads.checkpoint.read import CheckpointHandle
from megads.checkpoint.store import RanksFailed, hidden_folder, on_first, prepare
from megads.checkpoint.writer import CheckpointWriter, SaveOrder, SaveProgress, SaveState, settled
from megads.engine.interface import Shard, TrainEngine
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import rank_environment
from megads.runtime.hooks import TrainState
from megads.runtime.machine_memory import available_memory
from megads.runtime.metrics import EventWriter, LedgerRecord

_MARGIN = 2
"""Free memory required for the copies, as a multiple of their size, if async_save is null."""
_POLL_S = 0.01


class StateCopies:
    """Memory for copies of a rank's state. These are worth nothing until a writer has saved them to disk.

    `LocalSaves` makes local checkpoints of them.

    Attributes:
        images: one image of the shards that this rank owns, or several of all shards that it holds; empty if there is
            no memory for them yet.
        owned: whether an image has only the shards that this rank owns.
        base: local checkpoint that this start continues from; None if there is none.
    """

    def __init__(self) -> None:
        self.images: list[StateBuffer] = []
        self.owned = True
        self.base: CheckpointHandle | None = None

    def open(self, run_dir: Path, control: ControlPlane, history: History = EVERYTHING) -> None:
        """Called when the ranks are connected; collective."""

    def find(self) -> list[str]:
        """Sets `base`; returns why there is none, or why later ones are not used. Collective, after `open`."""
        return []

    def begin(self, engine: TrainEngine, state: TrainState, events: EventWriter) -> None:
        """Called before the first step; collective."""

    def due(self, step: int, *, finite: bool) -> bool:
        """Whether to copy the state of this step although it is not saved to disk; called after every step."""
        return False

    def wait(self) -> None:
        """Waits until all ranks can begin another copy; collective."""

    def is_ready(self) -> bool:
        """Whether all ranks can begin a copy that is not saved to disk; collective."""
        return False

    def copy(
        self,
        shards: Sequence[Shard],
        run: RunRecord,
        step_on_disk: int,
        read: int | None,
        then: Callable[[int], None],
    ) -> StateCopy:
        """Starts an asynchronous copy of the state.

        Args:
            shards: the shards of the images.
            run: record of the run at this step.
            step_on_disk: step of the newest committed checkpoint; 0: none.
            read: number of the image that a writer on any rank is saving to disk; None: no writer is.
            then: called with the number of the image when the copy is complete.
        """
        return self.images[0].start_copy(shards, lambda: then(0))

    def end(self) -> None:
        """Called when the final state is on disk."""

    def close(self) -> None:
        """Called when the rank ends."""


class AsyncSaves:
    """Copies the state of a rank, and lets its writer process save the copies to disk.

    Args:
        config: whether saves are asynchronous.
        copies: memory for the copies; None: an image in anonymous memory.
        writer: checkpoint writer of this rank; None: all saves are synchronous.
        timeout_s: a writer that takes longer is considered hung.
        overlap: copy the state during the forward and backward passes of the next step. False if user hooks may write
            to it then.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        copies: StateCopies | None = None,
        writer: CheckpointWriter | None = None,
        timeout_s: float = 600.0,
        *,
        overlap: bool = True,
    ) -> None:
        self.copies, self._writer = copies or StateCopies(), writer
        self._config, self._timeout_s, self._overlap = config, timeout_s, overlap
        self.ordered: int | None = None
        """The step that the writers are saving, until all ranks know the outcome."""
        self.waited_s = 0.0
        """How long this rank has waited for the last order, in seconds."""
        self._late = False
        # The number of the image that the writer saves.
        self._image = 0
        # As long as this copy exists, it may send an order to the writer.
        self._copying: StateCopy | None = None

    def begin(self, engine: TrainEngine, state: TrainState, events: EventWriter) -> None:
        """Allocates memory for the copies; decides on all ranks or on none whether saves are asynchronous.

        Args:
            engine: holds the weights and the optimizer state.
            state: the counters of the training loop, updated in place.
            events: where delays and failures are recorded.
        """
        self._engine, self._state, self._events = engine, state, events
        self.copies.begin(engine, state, events)
        control, asked, shards = engine.grid.control, self._config.async_save, engine.named_shards()
        size, reason = sum(shard.tensor.nbytes for shard in shards), ""
        if self._writer is None:
            reason = "there are no writers"
        elif not self._config.copies(max(control.gather(size, int))):
            reason = "there is little to save"
        if not reason and not self.copies.images:
            # If the user asked for asynchronous saves, no margin is required.
            needed = size * (_MARGIN if asked is None else 1)
            if control.any(available_memory() // rank_environment().local_world_size < needed):
                reason = f"a node has no memory for copies of {size / 2**30:.1f} GiB a rank"
        if not reason and self._writer is not None:
            try:
                images = self.copies.images or [StateBuffer.anonymous(ImageLayout.of(shards, shards))]
                if any(shard.tensor.is_cuda for shard in shards):
                    for image in images:
                        image.pin()
                self._writer.attach(images)
                self.copies.images = images
            except (OSError, torch.cuda.CudaError) as error:
                reason = f"no shared memory for a copy of {size / 2**30:.1f} GiB: {error}"
            reason = next(filter(None, control.gather(reason, str)), "")
        if reason:
            self._drop_writer()
            if asked:
                self._events.write("synchronous_saves", level="warning", reason=reason)

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def save(
        self,
        folder: Path,
        run: RunRecord,
        keep: Retention,
        ledger: Callable[[], LedgerRecord | None],
        step_on_disk: int,
    ) -> bool:
        """Copies the state and orders the writers to save it; False on all ranks if that is not possible. Collective.

        Args:
            folder: folder of the committed checkpoint.
            run: record of the run, without its ledger.
            keep: which checkpoints are kept once this one is committed.
            ledger: returns the record of the metrics ledger, on disk.
            step_on_disk: step of the newest committed checkpoint; 0: none.
        """
        writer, start = self._writer, time.perf_counter()
        if writer is None:
            return False

        def begin() -> LedgerRecord | None:
            prepare(hidden_folder(folder, "partial"))
            # Taken now: the checkpoint must not include metrics of later steps.
            return ledger()

        try:
            run = replace(run, ledger=on_first(self._engine.grid.control, begin, LedgerRecord | None))
        except RanksFailed:
            return False
        self.copies.wait()
        keys = sorted({shard.key for shard in self._engine.named_shards(owned=False)})
        order = SaveOrder(0, folder, run, software(), keys, keep)
        self.ordered, self._late, self.waited_s = run.state["step"], False, 0.0
        writer.announce()

        def write(image: int) -> None:
            if self._writer is not None:
                self._image = image
                self._writer.write(replace(order, image=image))

        self._copy(run, step_on_disk, None, write)
        self.waited_s += time.perf_counter() - start
        return True

    def copy(self, run: RunRecord, step_on_disk: int) -> None:
        """Copies the state for a local checkpoint only; collective. Requires that the copies are ready."""
        writer, read = self._writer, None
        # A writer that is stopped may continue later, until it is killed.
        if self.ordered is not None and writer is not None:
            busy = writer.progress().state in (SaveState.writing, SaveState.lost)
            read = self._image if self._engine.grid.control.any(busy) else None
        self._copy(run, step_on_disk, read, lambda _: None)

    def _copy(self, run: RunRecord, step_on_disk: int, read: int | None, then: Callable[[int], None]) -> None:
        shards = self._engine.named_shards(owned=self.copies.owned)
        copying = self._copying = self.copies.copy(shards, run, step_on_disk, read, then)
        if not self._overlap:
            self.end_copy()
            return

        def wait() -> None:
            start = time.perf_counter()
            copying.before_update()
            self.waited_s += time.perf_counter() - start

        self._engine.before_update(wait)

    def end_copy(self) -> None:
        """Waits for the last copy, which is complete once the next optimizer step is."""
        if self._copying is not None:
            self._engine.before_update(None)
            self._copying.wait()
            self._copying = None

    def progress(self) -> SaveProgress:
        """Progress of this rank's writer; on rank 0, done once the checkpoint is committed."""
        if self.ordered is None or self._writer is None:
            return SaveProgress(SaveState.idle)
        return self._writer.progress()

    def settle(self, *, wait: bool) -> SaveProgress:
        """Outcome of the last order on all ranks, see `settled`; idle if there was none. Collective.

        Args:
            wait: wait until no rank is writing.
        """
        writer = self._writer
        if self.ordered is None or writer is None:
            return SaveProgress(SaveState.idle)
        outcome = settled(lambda: writer.progress(self._timeout_s), self._engine.grid.control, wait=wait)
        if outcome.state is SaveState.writing and not self._late:
            self._late = True
            reason = f"the checkpoint of step {self.ordered} is still being written by {outcome.reason}"
            self._events.write("checkpoint_put_off", level="warning", step=self._state.step, reason=reason)
        return outcome

    def give_up(self, outcome: SaveProgress) -> None:
        """Cancels an order that failed on some rank; if a writer is lost, all later saves are synchronous. Collective.

        Args:
            outcome: what `settle` has returned.
        """
        writer, self.ordered, lost = self._writer, None, outcome.state is SaveState.lost
        assert writer is not None
        if not lost:
            writer.cancel()
            while writer.progress().state is SaveState.writing and writer.elapsed_s() < self._timeout_s:
                time.sleep(_POLL_S)
            lost = writer.progress().state in (SaveState.writing, SaveState.lost)
        if self._engine.grid.control.any(lost):
            self._drop_writer()
            self._events.write("synchronous_saves", level="warning", reason=outcome.reason)

    def close(self) -> None:
        """Ends the processes of this rank; unfinished copies do not count as checkpoints."""
        self._drop_writer()
        self.copies.close()
