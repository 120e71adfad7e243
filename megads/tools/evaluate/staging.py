"""A checkpoint's weights in the memory of a node, read and verified by one process and mapped by all workers.

/dev/shm/megads-evaluate-<user>-<hash of the evaluation's folder and the node>/
  alive                       locked, shared, by every worker of the node
  <digest>-<dtype>.lock       locked by the process that reads a checkpoint
  <digest>-<dtype>.weights    a file of safetensors; locked, shared, by every worker that maps it

All locks are flocks, which the kernel lets go of when a process dies, however it dies. What nobody holds may go: a
file when another checkpoint needs the room, a folder when the next worker starts on the node.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megads.checkpoint.image import ImageLayout, StateImage, allocate
from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.read import CheckpointHandle, load_unsharded, model_config_of, open_checkpoint, read_into
from megads.engine.interface import Shard
from megads.errors import ConfigError
from megads.model.gpt import GPT
from megads.runtime.environment import node_name

_PREFIX = "megads-evaluate-"
_ALIGNMENT = 64
"""Of weights in bytes, as torch allocates them: a product of misaligned ones may be summed in another order."""


def staged_name(digest: str, dtype: torch.dtype) -> str:
    """Name of a checkpoint among those in a node's memory.

    Args:
        digest: of its manifest.
        dtype: of the weights.
    """
    return f"{digest[:32]}-{str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class StagedModel:
    """A model and how it came here.

    Attributes:
        model: in evaluation mode.
        read: this process read the checkpoint; False where another one had.
        staged: it is in the node's memory; False where there was no room.
    """

    model: GPT
    read: bool
    staged: bool


class Staging:
    """The checkpoints in this node's memory, for one worker.

    Args:
        root: a folder in memory, /dev/shm for instance.
        evaluation: folder of the evaluation, which names the one in memory.
        most_bytes: that all checkpoints in memory may take; None is half of what is free and theirs.

    Raises:
        ConfigError: the root is no folder that can be written to.
    """

    def __init__(self, root: Path, evaluation: Path, most_bytes: int | None = None) -> None:
        remove_left_over(root)
        # Nodes of a private SLURM share one memory.
        name = hashlib.sha256(f"{evaluation.absolute()}\n{node_name()}".encode()).hexdigest()[:16]
        self.folder = root / f"{_PREFIX}{os.getuid()}-{name}"
        self._most_bytes = most_bytes
        self._alive = self._join()
        self._mapped: int | None = None

    def _join(self) -> int:
        """Locks `alive`; another worker that leaves may remove the folder meanwhile."""
        while True:
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"staging_folder = {self.folder.parent}: {error.strerror}; give a folder in memory that every node "
                    "has, such as /dev/shm"
                ) from error
            with suppress(FileNotFoundError):
                descriptor = os.open(self.folder / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if _is_at(descriptor, self.folder / "alive"):
                    return descriptor
                os.close(descriptor)

    def staged(self) -> set[str]:
        """Names of the checkpoints that are in memory."""
        return {path.stem for path in self.folder.glob("*.weights")}

    def load(self, checkpoint: Path, name: str, device: torch.device, dtype: torch.dtype) -> StagedModel:
        """A checkpoint's model; on a CPU its weights are those in memory, shared by all workers.

        Args:
            checkpoint: its folder.
            name: see `staged_name`.
            device: where the model computes.
            dtype: of the weights.

        Raises:
            CheckpointError: it is damaged.
        """
        self.let_go()
        path, handle = self.folder / f"{name}.weights", None
        with self._locked(name):
            if not path.exists():
                handle = open_checkpoint(checkpoint)
                if not self._stage(handle, path, dtype):
                    return StagedModel(load_unsharded(handle, device, dtype), read=True, staged=False)
            try:
                self._mapped = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                fcntl.flock(self._mapped, fcntl.LOCK_SH)
                os.utime(path)
            except FileNotFoundError:
                # Another worker made room between two of these lines.
                self.let_go()
                return StagedModel(load_unsharded(open_checkpoint(checkpoint), device, dtype), read=True, staged=False)
        model = _mapped_model(self._mapped, checkpoint, device, dtype)
        return StagedModel(model, read=handle is not None, staged=True)

    def let_go(self) -> None:
        """Lets others remove the checkpoint that was loaded last."""
        if self._mapped is not None:
            os.close(self._mapped)
            self._mapped = None

    def close(self) -> None:
        """Leaves; the last worker of the node removes what is in memory."""
        self.let_go()
        with suppress(OSError):
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._alive)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _stage(self, handle: CheckpointHandle, path: Path, dtype: torch.dtype) -> bool:
        """Reads a checkpoint into memory; False where there is no room for it."""
        empty = GPT.empty(model_config_of(handle), torch.device("meta"), dtype)
        shards = _shards(empty)
        layout = ImageLayout.of(shards, [])
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with self._locked("room"):
                if not self._make_room(layout.size):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                allocate(descriptor, layout.size)
            image = StateImage(layout, descriptor)
            with torch.no_grad():
                read_into(handle, image.shards)
            image.seal()
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            return False
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def _make_room(self, size: int) -> bool:
        """Removes checkpoints that nobody maps, the one that was loaded longest ago first, until another one fits."""

        def order(path: Path) -> float:
            return path.stat().st_mtime

        held = sorted(self.folder.glob("*.weights"), key=order)
        taken = sum(path.stat().st_size for path in (*held, *self.folder.glob("*.partial")))
        free = shutil.disk_usage(self.folder).free
        most = self._most_bytes if self._most_bytes is not None else (free + taken) // 2
        for path in held:
            if taken + size <= most:
                break
            bytes_there = path.stat().st_size
            if _remove_unheld(path):
                taken -= bytes_there
        return taken + size <= most


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of a path."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _remove_unheld(path: Path) -> bool:
    """Removes a file that no process has locked; whether it did."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_left_over(root: Path) -> None:
    """Removes what evaluations of this user left in a node's memory whose workers were all killed."""
    for folder in root.glob(f"{_PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            descriptor = os.open(folder / "alive", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _shards(model: GPT) -> list[Shard]:
    return [
        Shard(f"weight/{name}", tuple(weight.shape), (0,) * weight.dim(), weight.detach())
        for name, weight in model.parameters_by_name().items()
    ]


def _mapped_model(descriptor: int, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> GPT:
    """A model with the weights of a file in memory; on a CPU they are the file's own pages."""
    config = model_config_of(CheckpointHandle(checkpoint, read_manifest(checkpoint)))
    model = GPT.empty(config, device, dtype)
    weights = model.parameters_by_name()
    image = StateImage(ImageLayout.of(_shards(GPT.empty(config, torch.device("meta"), dtype)), []), descriptor)
    with torch.no_grad():
        for shard in image.shards:
            weight = weights[shard.key.partition("/")[2]]
            if device.type == "cpu" and shard.tensor.data_ptr() % _ALIGNMENT == 0:
                weight.data = shard.tensor
            else:
                weight.copy_(shard.tensor)
    return model.eval().requires_grad_(False)
