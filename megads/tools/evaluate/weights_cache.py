"""Cache of checkpoint weights in node memory: one process reads and verifies them, all workers map them.

/dev/shm/megads-evaluate-<user>-<hash of the evaluation's folder and the node>/
  alive                       shared lock of every worker of the node
  <digest>-<dtype>.lock       exclusive lock of the process that reads a checkpoint
  <digest>-<dtype>.weights    a safetensors file; shared lock of every worker that maps it

All locks are flocks, which the kernel releases when a process dies for any reason. Unlocked data may be removed: a file
when another checkpoint needs the space, a folder when the next worker starts on the node.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from megads.api import (
    GPT,
    CheckpointHandle,
    ConfigError,
    ModelConfig,
    Shard,
    allocate,
    load_unsharded,
    make_own,
    model_config_of,
    node_name,
    open_checkpoint,
    own_path,
    read_into,
    read_manifest,
)
from megads.checkpoint.image import ImageLayout, StateBuffer
from megads.runtime.own_folder import is_users_folder

_KIND = "evaluate"
_ALIGNMENT = 64
"""Alignment of weights in bytes, as in PyTorch: a GEMM of misaligned weights may sum in another order."""


def cached_name(digest: str, dtype: torch.dtype) -> str:
    """Name of a cached checkpoint.

    Args:
        digest: digest of its manifest.
        dtype: dtype of the weights.
    """
    return f"{digest[:32]}-{str(dtype).removeprefix('torch.')}"


class NodeWeightsCache:
    """A worker's access to the checkpoints cached in the memory of its node.

    Args:
        root: in-memory folder, for example /dev/shm.
        evaluation: folder of the evaluation; determines the name of the cache folder.
        most_bytes: maximum size of all cached checkpoints; None is half of the space that is free or used by them.

    Raises:
        ConfigError: `root` is not a writable folder.
    """

    def __init__(self, root: Path, evaluation: Path, most_bytes: int | None = None) -> None:
        remove_stale_caches(root)
        # The nodes of a private SLURM on one machine share its memory.
        name = hashlib.sha256(f"{evaluation.absolute()}\n{node_name()}".encode()).hexdigest()[:16]
        self.folder = own_path(_KIND, name, root)
        self._most_bytes = most_bytes
        self._alive = self._join()
        self._mapped: int | None = None

    def _join(self) -> int:
        """Locks `alive`; retries if another worker that leaves removes the folder at the same time."""
        while True:
            try:
                make_own(self.folder)
            except OSError as error:
                raise ConfigError(
                    f"staging_folder = {self.folder.parent}: {error.strerror}; give a folder in memory that every node "
                    "has, such as /dev/shm"
                ) from error
            with suppress(FileNotFoundError):
                descriptor = os.open(self.folder / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
                os.close(descriptor)

    def cached(self) -> set[str]:
        """Names of the cached checkpoints."""
        return {path.stem for path in self.folder.glob("*.weights")}

    def load(self, checkpoint: Path, name: str, device: torch.device, dtype: torch.dtype) -> tuple[GPT, bool]:
        """Loads the model of a checkpoint; on a CPU, all workers share the cached weights.

        Args:
            checkpoint: checkpoint folder.
            name: name of the cached checkpoint, see `cached_name`.
            device: device of the model.
            dtype: dtype of the weights.

        Returns:
            The model in evaluation mode, and whether this process read the checkpoint: another one may have cached it.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        self.release_last()
        path, handle = self.folder / f"{name}.weights", None
        with self._locked(name):
            if not path.exists():
                handle = open_checkpoint(checkpoint)
                if not self._fill(handle, path, dtype):
                    return load_unsharded(handle, device, dtype), True
            try:
                self._mapped = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                fcntl.flock(self._mapped, fcntl.LOCK_SH)
                os.utime(path)
            except FileNotFoundError:
                # Another worker removed the file to free space in the meantime.
                self.release_last()
                return load_unsharded(open_checkpoint(checkpoint), device, dtype), True
        config = model_config_of(CheckpointHandle(checkpoint, read_manifest(checkpoint)))
        model = GPT.empty(config, device, dtype)
        weights = model.parameters_by_name()
        # On a CPU, the weights are the mapped pages of the file.
        image = StateBuffer(ImageLayout.of(_shards(config, dtype), []), self._mapped)
        with torch.no_grad():
            for shard in image.shards:
                weight = weights[shard.key.partition("/")[2]]
                if device.type == "cpu" and shard.tensor.data_ptr() % _ALIGNMENT == 0:
                    weight.data = shard.tensor
                else:
                    weight.copy_(shard.tensor)
        return model.eval().requires_grad_(False), handle is not None

    def release_last(self) -> None:
        """Releases the checkpoint that was loaded last, so that others may remove it."""
        if self._mapped is not None:
            os.close(self._mapped)
            self._mapped = None

    def close(self) -> None:
        """Releases all locks; the last worker of the node removes the folder."""
        self.release_last()
        _remove_unused(self.folder, self._alive)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _fill(self, handle: CheckpointHandle, path: Path, dtype: torch.dtype) -> bool:
        """Reads a checkpoint into memory; returns False if there is not enough space."""
        layout = ImageLayout.of(_shards(model_config_of(handle), dtype), [])
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with self._locked("room"):
                if not self._make_room(layout.size):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                allocate(descriptor, layout.size)
            image = StateBuffer(layout, descriptor)
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
        """Evicts unmapped checkpoints, least recently loaded first, until `size` bytes fit; returns whether they do."""
        held = sorted(self.folder.glob("*.weights"), key=lambda path: path.stat().st_mtime)
        taken = sum(path.stat().st_size for path in (*held, *self.folder.glob("*.partial")))
        free = shutil.disk_usage(self.folder).free
        most = self._most_bytes if self._most_bytes is not None else (free + taken) // 2
        for path in held:
            if taken + size <= most:
                break
            bytes_there = path.stat().st_size
            if _remove_unused(path, os.open(path, os.O_RDWR | os.O_CLOEXEC)):
                taken -= bytes_there
        return taken + size <= most


def _remove_unused(path: Path, lock: int) -> bool:
    """Removes a file or folder unless another process holds its lock; closes the lock's descriptor.

    Returns:
        Whether it was removed.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def remove_stale_caches(root: Path) -> None:
    """Removes cache folders of this user's evaluations whose workers were all killed."""
    for folder in root.glob(own_path(_KIND, "*").name):
        if is_users_folder(folder):
            with suppress(OSError):
                _remove_unused(folder, os.open(folder / "alive", os.O_RDWR | os.O_CLOEXEC))


def _shards(config: ModelConfig, dtype: torch.dtype) -> list[Shard]:
    return [
        Shard(f"weight/{name}", tuple(weight.shape), (0,) * weight.dim(), weight.detach())
        for name, weight in GPT.empty(config, torch.device("meta"), dtype).parameters_by_name().items()
    ]
