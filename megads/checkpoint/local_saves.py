"""Makes local checkpoints during training of every copy of the state (`local`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import NoneType

from megads.checkpoint.config import EVERYTHING, CheckpointConfig, History
from megads.checkpoint.image import ImageLayout, StateBuffer, StateCopy
from megads.checkpoint.local import LocalCheckpoint, LocalStart, find_local, first_reason, forget
from megads.checkpoint.local_files import (
    IMAGES,
    LocalCommit,
    Saved,
    commit_image,
    held_folders,
    invalidate_image,
    lock_folder,
    node_folder,
    open_folder,
    open_image,
    own_folder,
)
from megads.checkpoint.manifest import Manifest, RunRecord, TensorRecord, software
from megads.checkpoint.rank_file import file_name
from megads.checkpoint.replication import ReplicaProgress, Replication, replication
from megads.checkpoint.store import RanksFailed, agreed, failure_of, on_first
from megads.engine.interface import Shard, TrainEngine
from megads.errors import CheckpointError
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import RankEnvironment
from megads.runtime.hooks import TrainState
from megads.runtime.machine_memory import available_memory
from megads.runtime.metrics import EventWriter


class LocalSaves:
    """Local checkpoints of a rank. `train` creates it first, since replication may fork a process.

    If they are turned off, the run continues without them.

    Args:
        config: interval, folder and replication.
        environment: environment of this rank.
        computation: digest of everything that affects the run's results, and of its layout.
        timeout_s: a process that takes longer is considered hung.

    Attributes:
        images: two images of all shards that this rank holds; empty before they are allocated.
        base: local checkpoint that this start continues from; None if there is none.
        refusal: why local checkpoints are off; empty while they are on.
        replica_refusal: why replication is off although it was asked for.
    """

    def __init__(
        self, config: CheckpointConfig, environment: RankEnvironment, computation: str, timeout_s: float
    ) -> None:
        self._config, self._environment, self._computation = config, environment, computation
        self._replicas = replication(config, environment, timeout_s)
        # The number of the newest image, and of the newest one with complete replicas.
        self._newest = 0
        self._replicated: int | None = None
        self.refusal, self.replica_refusal = "their folder was never opened", ""
        self.images: list[StateBuffer] = []
        self.base: LocalCheckpoint | None = None
        self._lock: int | None = None
        self._due, self._step = False, -1
        # The last copy, and why it could not be completed.
        self._copy: StateCopy | None = None
        self._failure = ""
        self._late = False

    @property
    def is_on(self) -> bool:
        """Whether copies become local checkpoints."""
        return not self.refusal

    def open(self, run_dir: Path, control: ControlPlane, history: History = EVERYTHING) -> None:
        """Locks this rank's folder in its node's memory; if a rank cannot, local checkpoints are off. Collective.

        Args:
            run_dir: the run's folder.
            control: control plane of all ranks.
            history: the checkpoints on disk that count.
        """
        self._control, self._run_dir = control, run_dir
        self._node = node_folder(Path(self._config.local_folder), run_dir)
        self.folder = own_folder(self._node, control.rank)
        number = self._environment.lease or 0
        self._start = LocalStart(run_dir, number, control.world_size, self._computation, software(), history)
        try:
            self._lock = agreed(control, partial(open_folder, self.folder))
        except RanksFailed as error:
            self.refusal = str(error)
            return
        self.refusal = ""
        self._do_without_replicas(self._replicas.open(self._node, control))

    def _do_without_replicas(self, reason: str) -> None:
        """Turns replication off if there is a reason; does nothing if it is empty."""
        if reason:
            self.replica_refusal = reason
            self._replicas.remove()
            self._replicas = Replication()

    def find(self) -> list[str]:
        """Finds the local checkpoint that this start continues from and sets `base`; collective, after `open`.

        Returns:
            Why there is none, or why later ones are not used.
        """
        if self.refusal:
            return []
        self.base, skipped = find_local(self.folder, self._start, self._replicas, self._control)
        return skipped

    def begin(self, engine: TrainEngine, state: TrainState, events: EventWriter) -> list[StateBuffer]:
        """Allocates the images, before the first step; none if local checkpoints are not possible. Collective."""
        self._state, self._events = state, events
        held, owned = engine.named_shards(owned=False), engine.named_shards()
        reason = self.allocate(held, owned, available_memory() // self._environment.local_world_size)
        if reason:
            self.images = []
            self._turn_off(reason)
        elif self.replica_refusal:
            self._warn("replicas_off", self.replica_refusal)
        return self.images

    def _turn_off(self, reason: str) -> None:
        self.end()
        self.refusal = reason
        self._warn("local_checkpoints_off", reason)

    def _warn(self, event: str, reason: str) -> None:
        self._events.write(event, level="warning", step=self._state.step, reason=reason)

    def allocate(self, held: Sequence[Shard], owned: Sequence[Shard], free_bytes: int) -> str:
        """Allocates the images, with all pages resident, and reuses memory of an earlier start; collective.

        Args:
            held: all shards that this rank holds.
            owned: those of them that the rank saves in a checkpoint on disk.
            free_bytes: this rank's share of the node's free memory.

        Returns:
            Why local checkpoints are not possible on some rank; empty if they are possible on all.
        """
        if self.refusal:
            return self.refusal
        if self._environment.local_rank == 0:
            self._sweep()
        size = self.missing_bytes(held)
        copies = f"two copies of the state take {size / 2**30:.1f} GiB a rank"

        def allocate_images() -> list[StateBuffer]:
            if size > free_bytes:
                raise CheckpointError(f"{copies}, {free_bytes / 2**30:.1f} are free")
            layout = ImageLayout.of(held, owned)
            if self.base is not None:
                found = (self.base.folder / file_name(self._control.rank)).stat().st_size if layout.places else 0
                assert found == layout.size, "the same config gives the same shards"
            try:
                return [self._image(number, layout) for number in range(len(IMAGES))]
            except OSError as error:
                raise CheckpointError(f"{copies}: {failure_of(error)[0]}") from error

        try:
            self.images = agreed(self._control, allocate_images)
            on_first(self._control, lambda: self._start.record(self.base), NoneType)
        except RanksFailed as error:
            return str(error)
        self._do_without_replicas(self._replicas.allocate(self.images[0].layout.size, max(0, free_bytes - size)))
        if self.base is not None:
            # The node that held its replica may be lost, so it is sent again.
            self._send(self.base.folder, self.base.saved)
        return ""

    def _sweep(self) -> None:
        """Frees the memory of ranks that are no longer on this node; called by one rank per node, after all have called
        `open`."""
        for folder in held_folders(self._node):
            with suppress(OSError):
                os.close(lock_folder(folder, wait=False))
                shutil.rmtree(folder, ignore_errors=True)

    def missing_bytes(self, held: Sequence[Shard]) -> int:
        """Bytes that `allocate` takes in addition to the files of an earlier start."""
        size, there = sum(shard.tensor.nbytes for shard in held), 0
        for name in IMAGES:
            with suppress(OSError):
                there += min(size, (self.folder / name / file_name(self._control.rank)).stat().st_size)
        return len(IMAGES) * size - there

    def _image(self, number: int, layout: ImageLayout) -> StateBuffer:
        """Allocates an image; the one that this start continues from is kept until another one is complete."""
        folder = self.folder / IMAGES[number]
        if self.base is not None and self.base.folder == folder:
            self._newest = number
        else:
            invalidate_image(folder)
        return StateBuffer.allocated(layout, open_image(folder, self._control.rank, layout.size))

    def due(self, step: int, *, finite: bool) -> bool:
        """Whether to copy the state of this step although it is not saved to disk; called after every step.

        After a non-finite step, the next finite one is due instead.
        """
        if self.refusal:
            return False
        self._due = self._step != step and (self._due or step % self._config.local_every_steps == 0)
        return finite and self._due

    def wait(self) -> None:
        """Waits until all ranks can begin another copy; collective."""
        if self._copy is not None:
            self._copy.sealed.result()
        self._last_is_complete()

    def is_ready(self) -> bool:
        """Whether all ranks can begin a copy that is not saved to disk; collective."""
        return self._last_is_complete() and self._replicas_are_sent()

    def _last_is_complete(self) -> bool:
        """Whether all ranks have completed the last local checkpoint; False if they are off. Collective."""
        if self.refusal:
            return False
        busy = self._copy is not None and not self._copy.sealed.done()
        if not busy and self._copy is not None:
            self._copy.sealed.result()
        found = self._control.gather((busy, self._failure), tuple[bool, str])
        reason = first_reason(failure for _, failure in found)
        if reason:
            self._turn_off(reason)
            return False
        return not any(busy for busy, _ in found)

    def _replicas_are_sent(self) -> bool:
        """Whether every rank has sent its last local checkpoint to another node; collective."""
        progress = self.replication()
        self._replicas.report(progress, self._events, self._state.step)
        if progress.busy and not self._late:
            self._late = True
            reason = "the last one is still being sent to another node; this event is not repeated"
            self._warn("local_checkpoint_put_off", reason)
        return not progress.busy

    def replication(self) -> ReplicaProgress:
        """Replication of the last local checkpoint, which is complete; collective if replication is on."""
        progress = self._replicas.progress()
        if progress.complete:
            self._replicated = self._newest
        elif progress.failed:
            self._replicated = None
        return progress

    def copy(
        self,
        shards: Sequence[Shard],
        run: RunRecord,
        step_on_disk: int,
        read: int | None,
        then: Callable[[int], None],
    ) -> StateCopy:
        """Starts an asynchronous copy of the state into the older image, which then becomes a local checkpoint.

        Must only be called if all ranks have completed the last one.

        Args:
            shards: all shards that this rank holds.
            run: record of the run at this step.
            step_on_disk: step of the newest committed checkpoint; 0: none.
            read: number of the image that a writer on any rank is saving to disk; None: no writer is.
            then: called with the number of the image when the copy is complete.
        """
        # The image with complete replicas is kept until a later one has them: a node may be lost meanwhile.
        if (self._replicated if read is None else read) != 1 - self._newest:
            self._newest = 1 - self._newest
        number = self._newest
        invalidate_image(self.folder / IMAGES[number])
        self._due, self._step = False, run.state["step"]

        def complete() -> None:
            try:
                self._complete(number, run, step_on_disk)
            except OSError as error:
                self._failure = f"rank {self._control.rank}: {failure_of(error)[0]}"

        self._copy = self.images[number].start_copy(shards, lambda: then(number), complete)
        return self._copy

    def _complete(self, number: int, run: RunRecord, step_on_disk: int) -> None:
        """Turns a copied image into a local checkpoint: writes its header with the checksums, then commits it."""
        image, folder, rank, start = self.images[number], self.folder / IMAGES[number], self._control.rank, self._start
        record = image.seal()
        files = {file_name(rank): record} if image.shards else {}
        tensors = {shard.key: TensorRecord(tuple(shard.global_shape), (rank,)) for shard in image.shards}
        text = Manifest(run, start.software, 0, files, tensors).encode().decode()
        commit_image(folder, LocalCommit(start.number, start.world_size, start.computation, step_on_disk, text))
        self._send(folder, (start.number, run.state["step"]))

    def _send(self, image: Path, saved: Saved) -> None:
        """Sends a complete image to another node."""
        self._replicas.send(image, saved, self._start.number, self.base.saved if self.base is not None else None)

    def end(self) -> None:
        """Frees the memory, once the state is on disk or local checkpoints are turned off."""
        if self._copy is not None:
            self._copy.sealed.result()
        if self._environment.rank == 0:
            forget(self._run_dir)
        self._replicas.remove()
        self._replicas = Replication()
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):
                self._node.rmdir()
        self.close()
        self.refusal = "the run has ended"

    def close(self) -> None:
        """Ends the processes; complete local checkpoints are kept for the next start."""
        self._replicas.close()
        # A copy that is not complete still writes to the folder: the end of this process releases the lock.
        if self._lock is not None and (self._copy is None or self._copy.sealed.done()):
            os.close(self._lock)
            self._lock = None
