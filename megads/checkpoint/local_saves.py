"""Writes local checkpoints during training: copies the state, and a writer process completes the copy (`local`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megads.checkpoint.async_saves import StateCopies
from megads.checkpoint.config import EVERYTHING, CheckpointConfig, History
from megads.checkpoint.image import StateCopy
from megads.checkpoint.local import LocalCheckpoint, LocalFolder, SealOrder, first_reason, forget
from megads.checkpoint.local_files import Saved
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.replication import ReplicaProgress, Replication, replication
from megads.checkpoint.store import RanksFailed, failure_of
from megads.checkpoint.writer import CheckpointWriter, SaveProgress, SaveState, Worker, settled
from megads.engine.interface import Shard, TrainEngine
from megads.runtime.distributed import ControlPlane
from megads.runtime.environment import RankEnvironment
from megads.runtime.hooks import TrainState
from megads.runtime.machine_memory import available_memory
from megads.runtime.metrics import EventWriter


class LocalSaves(StateCopies):
    """Local checkpoints of a rank, made of every copy of its state. `train` creates it first: it forks processes.

    If they are turned off, the run continues without them.

    Args:
        config: interval, folder and replication.
        environment: environment of this rank.
        computation: digest of everything that affects the run's results, and of its layout.
        timeout_s: a writer that takes longer is considered hung.
    """

    def __init__(
        self, config: CheckpointConfig, environment: RankEnvironment, computation: str, timeout_s: float
    ) -> None:
        super().__init__()
        self._writer: CheckpointWriter | None = CheckpointWriter(environment.rank, environment.world_size)
        self._replicas = replication(config, environment, timeout_s)
        self._replicated: int | None = None
        self.replica_refusal = ""
        self._config, self._environment = config, environment
        self._computation, self._timeout_s = computation, timeout_s
        self._folder: LocalFolder | None = None
        self._refusal = "their folder was never opened"
        self._due, self._step = False, -1
        self._order: SealOrder | None = None
        self._own_progress = SaveProgress(SaveState.idle)
        self.base: LocalCheckpoint | None = None
        self._late = False

    def open(self, run_dir: Path, control: ControlPlane, history: History = EVERYTHING) -> None:
        """Locks this rank's folder; if that fails, `allocate` returns the reason. Collective.

        Args:
            run_dir: the run's folder.
            control: control plane of all ranks.
            history: the checkpoints on disk that count.
        """
        self._control, self._run_dir = control, run_dir
        root, start = Path(self._config.local_folder), self._environment.lease or 0
        folder = LocalFolder(root, run_dir, control, start, self._computation, history)
        self._refusal = folder.open()
        self._folder = None if self._refusal else folder
        if self._folder is not None:
            self._do_without_replicas(self._replicas.open(folder.node, control))

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
        if self._folder is None:
            return []
        self.base, skipped = self._folder.find(self._replicas)
        return skipped

    def begin(self, engine: TrainEngine, state: TrainState, events: EventWriter) -> None:
        self._state, self._events = state, events
        held, owned = engine.named_shards(owned=False), engine.named_shards()
        reason = self.allocate(held, owned, available_memory() // self._environment.local_world_size)
        self.owned = bool(reason)
        if reason:
            self.images = []
            self._turn_off(reason)
        elif self.replica_refusal:
            self._warn("replicas_off", self.replica_refusal)

    def _turn_off(self, reason: str) -> None:
        self.end()
        self._warn("local_checkpoints_off", reason)

    def _warn(self, event: str, reason: str) -> None:
        self._events.write(event, level="warning", step=self._state.step, reason=reason)

    def allocate(self, held: Sequence[Shard], owned: Sequence[Shard], free_bytes: int) -> str:
        """Allocates the images; collective.

        Args:
            held: all shards that this rank holds.
            owned: those of them that the rank saves in a checkpoint on disk.
            free_bytes: this rank's share of the node's free memory.

        Returns:
            Why local checkpoints are not possible on some rank; empty if they are possible on all.
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
        if not reason:
            self._do_without_replicas(self._replicas.allocate(self.images[0].layout.size, max(0, free_bytes - size)))
            if self.base is not None:
                # The node that held its replica may be lost, so it is sent again.
                self._send(self.base.folder, self.base.saved)
        return reason

    def _send(self, image: Path, saved: Saved) -> None:
        base = self.base.saved if self.base is not None else None
        self._replicas.send(image, saved, self._environment.lease or 0, base)

    def wait(self) -> None:
        self._last_is_complete(wait=True)

    def is_ready(self) -> bool:
        return self._last_is_complete(wait=False) and self._replicas_are_sent()

    def _last_is_complete(self, *, wait: bool) -> bool:
        """Whether all ranks have completed the last local checkpoint; False if they are off. Collective."""
        if self._folder is None:
            return False
        progress = self.settle(wait=wait)
        if progress.state is SaveState.lost:
            self._warn("synchronous_local_checkpoints", progress.reason)
            progress = self.do_without_writers()
        if progress.state is SaveState.failed:
            self._turn_off(progress.reason)
        return progress.state is SaveState.done

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
        """Replication of the last local checkpoint; collective if replication is on."""
        if self._folder is None:
            return ReplicaProgress()
        progress = self._replicas.progress()
        if progress.complete:
            self._replicated = self._folder.last_image
        elif progress.failed:
            self._replicated = None
        return progress

    def due(self, step: int, *, finite: bool) -> bool:
        """Whether to copy the state of this step; after a non-finite step, the next finite one is due instead."""
        if self._folder is None:
            return False
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
        """Starts an asynchronous copy of the state, after which the writer completes the image.

        Must only be called when `settle` has returned done.
        """
        if self._folder is None:
            return super().copy(shards, run, step_on_disk, read, then)
        # The image with complete replicas is kept until a later one has them: a node may be lost meanwhile.
        order = self._order = self._folder.next_order(run, step_on_disk, self._replicated if read is None else read)
        self._due, self._step = False, run.state["step"]

        def complete() -> None:
            if self._writer is not None:
                self._writer.write(order)
            else:
                self._complete(order)
            self._send(order.folder, (order.start, run.state["step"]))
            then(order.image)

        if self._writer is not None:
            self._writer.announce()
        return self.images[order.image].start_copy(shards, complete)

    def settle(self, *, wait: bool) -> SaveProgress:
        """Progress of the writers over all ranks: failed, lost, writing or done, in this order of priority; collective.

        Args:
            wait: wait until no writer is writing.
        """
        writer = self._writer
        here = (lambda: self._own_progress) if writer is None else (lambda: writer.progress(self._timeout_s))
        return settled(here, self._control, wait=wait)

    def do_without_writers(self) -> SaveProgress:
        """Ends the writers; from now on ranks complete images themselves, starting with the last one; collective."""
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
        """Frees the memory, once the state is on disk or local checkpoints are turned off."""
        if self._environment.rank == 0:
            forget(self._run_dir)
        self._replicas.remove()
        self._replicas = Replication()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self.close()

    def close(self) -> None:
        """Ends the processes; complete local checkpoints are kept for the next start."""
        self._replicas.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._folder is not None:
            self._folder.close()
