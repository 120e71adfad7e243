"""Makes local checkpoints while a run trains: copies, and a process that completes them (`local`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megads.checkpoint.config import EVERYTHING, CheckpointConfig, History
from megads.checkpoint.image import StateCopy, StateImage
from megads.checkpoint.local import LocalCheckpoint, LocalFolder, SealOrder, first_reason
from megads.checkpoint.local_files import Saved
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.replicas import ReplicaProgress, Replicas
from megads.checkpoint.store import RanksFailed, failure_of
from megads.checkpoint.writer import CheckpointWriter, SaveProgress, Stage, Worker, gather_progress
from megads.engine.interface import Shard
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import RankEnvironment

_POLL_S = 0.01
_NAMED = 3


class LocalSaves:
    """Keeps a rank's local checkpoints while it trains. Made by `train` before everything else: it forks a process.

    Args:
        config: says when and where.
        environment: of this rank.
        computation: digest of what the run computes, and in which layout.
        timeout_s: a writer that takes longer has hung.
    """

    def __init__(
        self, config: CheckpointConfig, environment: RankEnvironment, computation: str, timeout_s: float
    ) -> None:
        self._writer: CheckpointWriter | None = CheckpointWriter(environment.rank, environment.world_size)
        self._replicas = Replicas(environment, timeout_s) if config.replicate else None
        self._replicated: int | None = None
        self.replica_refusal = ""
        self._config, self._environment = config, environment
        self._computation, self._timeout_s = computation, timeout_s
        self._folder: LocalFolder | None = None
        self._refusal = "their folder was never opened"
        self._due, self._step = False, -1
        self._order: SealOrder | None = None
        self._own_progress = SaveProgress(Stage.idle)
        self.base: LocalCheckpoint | None = None
        self.images: list[StateImage] = []

    def open(self, run_dir: Path, control: ControlPlane, history: History = EVERYTHING) -> None:
        """Takes this rank's folder; where that cannot be had, `allocate` says why. Collective.

        Args:
            run_dir: the run's folder.
            control: of all ranks.
            history: the checkpoints on disk that count.
        """
        self._control = control
        root, start = Path(self._config.local_folder), self._environment.lease or 0
        folder = LocalFolder(root, run_dir, control, start, self._computation, history)
        self._refusal = folder.open()
        self._folder = None if self._refusal else folder
        if self._replicas is not None and self._folder is not None:
            self._do_without_replicas(self._replicas.open(folder.node, control))

    def _do_without_replicas(self, reason: str) -> None:
        """Ends copies on other nodes for a reason; goes on with them where that is empty."""
        if reason and self._replicas is not None:
            self.replica_refusal = reason
            self._replicas.remove()
            self._replicas = None

    def find(self) -> list[str]:
        """Finds the local checkpoint that this start continues from, which is `base`; collective, after `open`.

        Returns:
            Why there is none, or no later one.
        """
        if self._folder is None:
            return []
        local = self._environment.local_rank, self._environment.local_world_size
        self.base, passed_by = self._folder.find(self._replicas, local)
        return passed_by

    def allocate(self, held: Sequence[Shard], owned: Sequence[Shard], free_bytes: int) -> str:
        """Takes the memory, on all ranks or on none; collective.

        Args:
            held: everything that this rank holds.
            owned: what of it the rank speaks for in a checkpoint on disk.
            free_bytes: of the node's memory, this rank's share.

        Returns:
            Why there cannot be local checkpoints; empty where there can.
        """
        if self._folder is None:
            return self._refusal
        if self._environment.local_rank == 0:
            self._folder.sweep()
        size, reason = self._folder.missing_bytes(held), ""
        if size > free_bytes:
            reason = f"two copies of the state take {size / 2**30:.1f} GiB a rank, {free_bytes / 2**30:.1f} are free"
        else:
            try:
                self.images = self._folder.allocate(held, owned, self.base)
                if self._writer is not None:
                    self._writer.attach(self.images)
            except OSError as error:
                reason = f"two copies of the state, {size / 2**30:.1f} GiB a rank: {failure_of(error)[0]}"
        reason = first_reason(self._control.gather(reason, str))
        if not reason:
            try:
                self._folder.begin(self.base)
            except RanksFailed as error:
                reason = str(error)
        if not reason and self._replicas is not None:
            self._do_without_replicas(self._replicas.allocate(self.images[0].layout.size, max(0, free_bytes - size)))
            if self.base is not None:
                # Whatever kept a copy of it may be gone.
                self._send(self.base.folder, self.base.saved)
        return reason

    def _send(self, image: Path, saved: Saved) -> None:
        if self._replicas is not None:
            base = self.base.saved if self.base is not None else None
            self._replicas.send(image, saved, self._environment.lease or 0, base)

    def replication(self) -> ReplicaProgress:
        """Where the copies of the last local checkpoint on other nodes are; collective where there are any."""
        if self._replicas is None or self._folder is None:
            return ReplicaProgress()
        progress = self._replicas.progress()
        if progress.complete:
            self._replicated = self._folder.last_image
        elif progress.failed:
            self._replicated = None
        return progress

    def due(self, step: int, *, finite: bool) -> bool:
        """Whether this step's state is to be copied; a step that is not finite leaves it to the next that is."""
        self._due = self._step != step and (self._due or step % self._config.local_every_steps == 0)
        return finite and self._due

    def copy(
        self,
        shards: Sequence[Shard],
        run: RunRecord,
        step_on_disk: int,
        read: int | None,
        then: Callable[[int], None],
    ) -> StateCopy:
        """Starts to copy the state, after which the writer completes the image; only when `settle` has found all done.

        Args:
            shards: everything that this rank holds.
            run: what the manifest says of the run.
            step_on_disk: of the newest committed checkpoint; 0: none.
            read: image that a writer brings to disk, on any rank.
            then: is called with the number of the image when all is in it.
        """
        assert self._folder is not None
        # What other nodes hold of all ranks stays until they hold a later one: a node may be lost meanwhile.
        image = self._folder.next_image(read if read is not None else self._replicated)
        self._folder.invalidate(image)
        order = self._order = self._folder.order(image, run, step_on_disk)
        self._due, self._step = False, run.state["step"]

        def complete() -> None:
            if self._writer is not None:
                self._writer.write(order)
            else:
                self._complete(order)
            self._send(order.folder, (order.start, run.state["step"]))
            then(image)

        if self._writer is not None:
            self._writer.announce()
        return self.images[image].start_copy(shards, complete)

    def settle(self, *, wait: bool) -> SaveProgress:
        """Where the writers of all ranks are, of which the worst counts; collective.

        Args:
            wait: until none is writing.
        """
        while True:
            own = self._own_progress if self._writer is None else self._writer.progress(self._timeout_s)
            found = gather_progress(own, self._control)
            for stage in (Stage.failed, Stage.lost):
                wrong = [f"rank {rank}: {at.reason}" for rank, at in enumerate(found) if at.stage is stage]
                if wrong:
                    return SaveProgress(stage, "; ".join(wrong[:_NAMED]))
            busy = any(progress.stage is Stage.writing for progress in found)
            if not busy or not wait:
                return SaveProgress(Stage.writing if busy else Stage.done)
            time.sleep(_POLL_S)

    def do_without_writers(self) -> SaveProgress:
        """From now on all ranks complete images themselves, beginning with the last one; collective."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._order is not None:
            self._complete(self._order)
        return self.settle(wait=True)

    def _complete(self, order: SealOrder) -> None:
        worker = Worker(self._control.rank, self._control.world_size, None, lambda: False)
        self._own_progress = order.carry_out(self.images[order.image], worker)

    def end(self) -> None:
        """Frees the memory: the state is on disk, or there will be no more local checkpoints."""
        if self._replicas is not None:
            self._replicas.remove()
            self._replicas = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self.close()

    def close(self) -> None:
        """Ends the processes; what is complete stays for the next start."""
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._folder is not None:
            self._folder.close()
