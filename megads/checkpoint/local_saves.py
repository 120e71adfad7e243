"""Makes local checkpoints during training of every copy of the state (`local`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megads.checkpoint.config import EVERYTHING, CheckpointConfig, History
from megads.checkpoint.image import StateBuffer, StateCopy
from megads.checkpoint.local import LocalCheckpoint, LocalFolder, first_reason, forget
from megads.checkpoint.local_files import Saved
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.replication import ReplicaProgress, Replication, replication
from megads.checkpoint.store import RanksFailed, agreed, failure_of
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
    """

    def __init__(
        self, config: CheckpointConfig, environment: RankEnvironment, computation: str, timeout_s: float
    ) -> None:
        self._config, self._environment, self._computation = config, environment, computation
        self._replicas = replication(config, environment, timeout_s)
        # The number of the newest image with complete replicas.
        self._replicated: int | None = None
        self.replica_refusal = ""
        self.images: list[StateBuffer] = []
        self.base: LocalCheckpoint | None = None
        self._folder: LocalFolder | None = None
        self._refusal = "their folder was never opened"
        self._due, self._step = False, -1
        # The last copy, and why it could not be completed.
        self._copy: StateCopy | None = None
        self._failure = ""
        self._late = False

    @property
    def is_on(self) -> bool:
        """Whether copies become local checkpoints."""
        return self._folder is not None

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
        if not self._refusal:
            self._folder = folder
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
        folder = self._folder
        if folder is None:
            return self._refusal
        if self._environment.local_rank == 0:
            folder.sweep()
        size = folder.missing_bytes(held)
        copies = f"two copies of the state take {size / 2**30:.1f} GiB a rank"

        def allocate() -> list[StateBuffer]:
            if size > free_bytes:
                raise CheckpointError(f"{copies}, {free_bytes / 2**30:.1f} are free")
            try:
                return folder.allocate(held, owned, self.base)
            except OSError as error:
                raise CheckpointError(f"{copies}: {failure_of(error)[0]}") from error

        try:
            self.images = agreed(self._control, allocate)
            folder.begin(self.base)
        except RanksFailed as error:
            return str(error)
        self._do_without_replicas(self._replicas.allocate(self.images[0].layout.size, max(0, free_bytes - size)))
        if self.base is not None:
            # The node that held its replica may be lost, so it is sent again.
            self._send(self.base.folder, self.base.saved)
        return ""

    def _send(self, image: Path, saved: Saved) -> None:
        base = self.base.saved if self.base is not None else None
        self._replicas.send(image, saved, self._environment.lease or 0, base)

    def due(self, step: int, *, finite: bool) -> bool:
        """Whether to copy the state of this step although it is not saved to disk; called after every step.

        After a non-finite step, the next finite one is due instead.
        """
        if self._folder is None:
            return False
        self._due = self._step != step and (self._due or step % self._config.local_every_steps == 0)
        return finite and self._due

    def wait(self) -> None:
        """Waits until all ranks can begin another copy; collective."""
        if self._copy is not None:
            self._copy.wait()
        self._last_is_complete()

    def is_ready(self) -> bool:
        """Whether all ranks can begin a copy that is not saved to disk; collective."""
        return self._last_is_complete() and self._replicas_are_sent()

    def _last_is_complete(self) -> bool:
        """Whether all ranks have completed the last local checkpoint; False if they are off. Collective."""
        if self._folder is None:
            return False
        busy = self._copy is not None and self._copy.is_running
        if not busy and self._copy is not None:
            self._copy.wait()
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
        if self._folder is None:
            return ReplicaProgress()
        progress = self._replicas.progress()
        if progress.complete:
            self._replicated = self._folder.last_image
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
        """Starts an asynchronous copy of the state, which then becomes a local checkpoint.

        Must only be called if all ranks have completed the last one.

        Args:
            shards: all shards that this rank holds.
            run: record of the run at this step.
            step_on_disk: step of the newest committed checkpoint; 0: none.
            read: number of the image that a writer on any rank is saving to disk; None: no writer is.
            then: called with the number of the image when the copy is complete.
        """
        folder = self._folder
        assert folder is not None
        # The image with complete replicas is kept until a later one has them: a node may be lost meanwhile.
        number = folder.next_image(self._replicated if read is None else read)
        self._due, self._step = False, run.state["step"]
        image = self.images[number]

        def complete() -> None:
            try:
                self._send(
                    folder.complete(number, image, run, step_on_disk),
                    (self._environment.lease or 0, run.state["step"]),
                )
            except OSError as error:
                self._failure = f"rank {self._control.rank}: {failure_of(error)[0]}"

        self._copy = image.start_copy(shards, lambda: then(number), complete)
        return self._copy

    def end(self) -> None:
        """Frees the memory, once the state is on disk or local checkpoints are turned off."""
        if self._copy is not None:
            self._copy.wait()
        if self._environment.rank == 0:
            forget(self._run_dir)
        self._replicas.remove()
        self._replicas = Replication()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def close(self) -> None:
        """Ends the processes; complete local checkpoints are kept for the next start."""
        self._replicas.close()
        # Else this process still completes one: its end releases the lock.
        if self._folder is not None and (self._copy is None or not self._copy.is_running):
            self._folder.close()
