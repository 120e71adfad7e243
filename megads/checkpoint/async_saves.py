"""Asynchronous saves: a rank copies its state while it trains on, and its writer process saves the copy to disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.image import ImageLayout, StateBuffer, StateCopy
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import RanksFailed, Save, agreed
from megads.checkpoint.writer import CheckpointWriter, SaveProgress, SaveState
from megads.engine.interface import TrainEngine
from megads.runtime.environment import rank_environment
from megads.runtime.hooks import TrainState
from megads.runtime.machine_memory import available_memory
from megads.runtime.metrics import EventWriter

_MARGIN = 2
"""Free memory required for the copies, as a multiple of their size, if async_save is null."""
_POLL_S, _NAMED = 0.01, 3


class AsyncSaves:
    """Copies the state of a rank, for a checkpoint that its writer process saves to disk, or for a local checkpoint.

    Args:
        config: whether saves are asynchronous.
        local: local checkpoints, made of every copy; None: there are none.
        writer: checkpoint writer of this rank; None: all saves are synchronous.
        timeout_s: a writer that takes longer is considered hung.
        overlap: copy the state during the forward and backward passes of the next step. False if user hooks may write
            to it then.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        local: LocalSaves | None = None,
        writer: CheckpointWriter | None = None,
        timeout_s: float = 600.0,
        *,
        overlap: bool = True,
    ) -> None:
        self.local, self._writer = local, writer
        self._config, self._timeout_s, self._overlap = config, timeout_s, overlap
        self.ordered: int | None = None
        """The step that the writers are saving, until all ranks know the outcome."""
        self.waited_s = 0.0
        """How long this rank has waited for the last order, in seconds."""
        self._late = False
        # Those of the local checkpoints, or one image of the shards that this rank owns.
        self._images: list[StateBuffer] = []
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
        if self.local is not None:
            self._images = self.local.begin(engine, state, events)
        self._owned = not self._images
        control, asked = engine.grid.control, self._config.async_save
        size, reason = sum(shard.tensor.nbytes for shard in engine.named_shards()), ""
        # If the user asked for asynchronous saves, no margin is required.
        needed = size * (_MARGIN if asked is None else 1)
        if self._writer is None:
            reason = "there are no writers"
        elif not self._config.copies(max(control.gather(size, int))):
            reason = "there is little to save"
        elif not self._images and control.any(available_memory() // rank_environment().local_world_size < needed):
            reason = f"a node has no memory for copies of {size / 2**30:.1f} GiB a rank"
        else:
            try:
                agreed(control, self._share_images)
            except RanksFailed as error:
                reason = f"no shared memory for a copy of {size / 2**30:.1f} GiB: {error}"
        if reason:
            self._drop_writer()
            if asked:
                self._events.write("synchronous_saves", level="warning", reason=reason)

    def _share_images(self) -> None:
        """Allocates an image unless local checkpoints have some, and shares it with the writer."""
        shards = self._engine.named_shards()
        images = self._images or [StateBuffer.anonymous(ImageLayout.of(shards, shards))]
        if any(shard.tensor.is_cuda for shard in shards):
            for image in images:
                image.pin()
        assert self._writer is not None
        self._writer.attach(images)
        self._images = images

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def save(self, save: Save, step_on_disk: int) -> bool:
        """Copies the state and orders the writers to save it; False on all ranks if there are none. Collective.

        Args:
            save: the checkpoint.
            step_on_disk: step of the newest committed checkpoint; 0: none.
        """
        writer, start = self._writer, time.perf_counter()
        if writer is None:
            return False
        if self.local is not None:
            self.local.wait()
        self.ordered, self._late, self.waited_s = save.run.state["step"], False, 0.0
        writer.announce()

        def write(image: int) -> None:
            if self._writer is not None:
                self._image = image
                self._writer.write(save, image)

        self._copy(save.run, step_on_disk, None, write)
        self.waited_s += time.perf_counter() - start
        return True

    def save_local(self, run: RunRecord, step_on_disk: int) -> None:
        """Copies the state for a local checkpoint only; collective. Requires that `LocalSaves.is_ready`."""
        writer, read = self._writer, None
        # A writer that is stopped may continue later, until it is killed.
        if self.ordered is not None and writer is not None:
            busy = writer.progress().state in (SaveState.writing, SaveState.lost)
            read = self._image if self._engine.grid.control.any(busy) else None
        self._copy(run, step_on_disk, read, lambda _: None)

    def _copy(self, run: RunRecord, step_on_disk: int, read: int | None, then: Callable[[int], None]) -> None:
        shards = self._engine.named_shards(owned=self._owned)
        if self.local is not None and self.local.is_on:
            copying = self.local.copy(shards, run, step_on_disk, read, then)
        else:
            copying = self._images[0].start_copy(shards, lambda: then(0))
        self._copying = copying
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
            self._copying.copied.result()
            self._copying = None

    def progress(self) -> SaveProgress:
        """Progress of this rank's writer; on rank 0, done once the checkpoint is committed."""
        if self.ordered is None or self._writer is None:
            return SaveProgress(SaveState.idle)
        return self._writer.progress()

    def settle(self, *, wait: bool) -> SaveProgress:
        """Outcome of the last order on all ranks: failed, lost, writing or done, in this order of priority. Collective.

        Args:
            wait: wait until no rank is writing, or one has failed.

        Returns:
            Idle if there was no order. The reason names the first few ranks that failed or are lost, or those that are
            writing; the time is rank 0's.
        """
        writer = self._writer
        if self.ordered is None or writer is None:
            return SaveProgress(SaveState.idle)
        control = self._engine.grid.control
        while True:
            own = writer.progress(self._timeout_s)
            found = control.gather((own.state.value, own.reason, own.seconds), tuple[str, str, float])
            states = [SaveState(state) for state, *_ in found]
            wrong = [state for state in (SaveState.failed, SaveState.lost) if state in states]
            if wrong:
                named = [f"rank {at}: {reason}" for at, (_, reason, _) in enumerate(found) if states[at] in wrong]
                return SaveProgress(wrong[0], "; ".join(named[:_NAMED]))
            busy = [rank for rank, state in enumerate(states) if state is SaveState.writing]
            if not busy:
                return SaveProgress(SaveState.done, seconds=found[0][2])
            if not wait:
                break
            time.sleep(_POLL_S)
        named_ranks = f"rank {busy[0]}" + (f" and {len(busy) - 1} more" if busy[1:] else "")
        if not self._late:
            self._late = True
            reason = f"the checkpoint of step {self.ordered} is still being written by {named_ranks}"
            self._events.write("checkpoint_put_off", level="warning", step=self._state.step, reason=reason)
        return SaveProgress(SaveState.writing, named_ranks)

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
        if self.local is not None:
            self.local.close()
