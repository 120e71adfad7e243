"""Disk space that a run needs for checkpoints and prepared data, compared with the free space before it starts."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megads.api import (
    CheckpointConfig,
    RootConfig,
    gib,
    list_checkpoints,
    parameter_role,
    parameter_shapes,
    planned_steps,
    token_dtype,
)
from megads.launch.preflight import ResolvedRun
from megads.optim.groups import stored_tensor_kinds

_FP32 = 4
_TENSOR_RECORD_BYTES = 365
"""Size of one tensor's entries in the manifest and in its file's header."""
_TEXT_BYTES_PER_TOKEN = 3.5
"""For English text and code, with a vocabulary of a few thousand tokens."""


@dataclass(frozen=True)
class DiskNeed:
    """Disk space that a run needs, and the space that is free; sizes in bytes.

    Attributes:
        checkpoint: size of one checkpoint.
        most: maximum number of checkpoints on disk at the same time, including the one being written.
        present: number of these that already exist.
        kept: description of the retention policy.
        data: description of the prepared data; empty if the user supplied the dataset.
        data_to_make: estimated size of data that is not prepared yet, including its temporary parts.
        free: free space on the disk of the run directory.
        data_free: free space on the disk of the prepared data; None if it is the same disk.
        run_dir: the run directory.
    """

    checkpoint: int
    most: int
    present: int
    kept: str
    data: str
    data_to_make: int
    free: int
    data_free: int | None
    run_dir: Path

    @property
    def to_write(self) -> int:
        """Bytes still to be written to the disk of the run directory."""
        data = self.data_to_make if self.data_free is None else 0
        return self.checkpoint * max(0, self.most - self.present) + data

    def __str__(self) -> str:
        checkpoints = f"a checkpoint {gib(self.checkpoint)}"
        if self.most > 1:
            total = gib(self.most * self.checkpoint)
            checkpoints += f", {self.most} at the same time {total} ({self.kept})"
        return "; ".join(filter(None, [checkpoints, self.data, f"{gib(self.free)} free"]))

    @property
    def warning(self) -> str:
        """What does not fit, with the remedy; empty if everything fits."""
        if self.data_free is not None and self.data_to_make > self.data_free:
            return (
                f"the disk of the prepared data has {gib(self.data_free)} free, and {self.data}: free some space, or "
                "choose another folder with data.cache_dir=<path>"
            )
        if self.to_write <= self.free:
            return ""
        return (
            f"the disk of {self.run_dir} has {gib(self.free)} free, and the run has to write {gib(self.to_write)} "
            f"({self.most} checkpoints at the same time, {self.present} of them there already; {self.kept}): free some "
            "space, keep fewer with checkpoint.keep, or choose another disk with run.dir=<path>"
        )


def disk_need(resolved: ResolvedRun) -> DiskNeed | None:
    """Returns the disk space that a run needs; None if the vocabulary size, and so the model size, is unknown."""
    config, run_dir, preparation = resolved.planned, resolved.run_dir, resolved.data.preparation
    if config.model.vocab_size is None:
        return None
    data, to_make, data_free = "", 0, None
    if preparation is not None:
        data_folder = _existing(preparation.folder)
        if _existing(run_dir).stat().st_dev != data_folder.stat().st_dev:
            data_free = shutil.disk_usage(data_folder).free
        if resolved.data.made:
            size = sum(path.stat().st_size for path in preparation.folder.iterdir() if path.is_file())
            data = f"prepared data {gib(size)}, there already"
        else:
            size = int(preparation.text_bytes / _TEXT_BYTES_PER_TOKEN) * token_dtype(preparation.vocab_size).itemsize
            # The parts stay on disk until they are joined.
            data, to_make = f"prepared data about {gib(size)}, twice that while it is made", 2 * size
    there = list_checkpoints(run_dir)
    return DiskNeed(
        checkpoint=checkpoint_bytes(config),
        most=_max_on_disk(config, there),
        present=len(there),
        kept=_retention_text(config.checkpoint),
        data=data,
        data_to_make=to_make,
        free=shutil.disk_usage(_existing(run_dir)).free,
        data_free=data_free,
        run_dir=run_dir,
    )


def checkpoint_bytes(config: RootConfig) -> int:
    """Returns the size of one checkpoint: fp32 master weights, optimizer state and metadata.

    Args:
        config: config of the run, with the vocabulary size set.
    """
    optim, tensors, elements = config.optim, 0, 0
    for name, shape in parameter_shapes(config.model).items():
        kinds = 1 + len(stored_tensor_kinds(optim, parameter_role(name, muon=optim.is_muon)))
        tensors += kinds
        elements += kinds * prod(shape)
    return _FP32 * elements + tensors * config.parallel.tp * _TENSOR_RECORD_BYTES


def _max_on_disk(config: RootConfig, there: dict[int, Path]) -> int:
    """The oldest checkpoint is removed after the newest is written; an unknown run length is taken to reach that."""
    checkpoint, every, begin = config.checkpoint, config.checkpoint.every_steps, max(there, default=0)
    recent = checkpoint.retention({}, newest_is_proven=False).recent
    by_time = math.isfinite(checkpoint.interval_s())
    # Existing and planned checkpoints, except for the last one, which is on disk while it is written.
    planned, saves = range(0), 0
    if not config.train.length_is_known:
        saves = recent + checkpoint.keep_best + 1 if recent and (every or by_time) else 1
    elif (last := planned_steps(config)) > begin:
        planned = range(begin // every * every + every, last, every) if every else range(0)
        saves = len(planned) + 1
        if by_time:  # how many is unknown
            saves = max(saves, min(last - begin, recent + 1))
    if not recent:
        return len(there) + saves
    older = max(0, len(there) + saves - recent - 1)
    steps = sorted(there)[:older]
    multiples = 0
    if checkpoint.keep_every:
        multiples = sum(step % checkpoint.keep_every == 0 for step in (*steps, *planned[: older - len(steps)]))
    return len(there) + saves - older + multiples + min(checkpoint.keep_best, older - multiples)


def _retention_text(checkpoint: CheckpointConfig) -> str:
    if checkpoint.keep == 0:
        return "checkpoint.keep = 0 keeps all"
    # CheckpointHook keeps the previous checkpoint until a step after the newest one was finite.
    unproven = ", the previous one until a step after the newest is finite" if checkpoint.keep == 1 else ""
    best = f", checkpoint.keep_best = {checkpoint.keep_best}" if checkpoint.keep_best else ""
    every = f", checkpoint.keep_every = {checkpoint.keep_every} for good" if checkpoint.keep_every else ""
    return f"checkpoint.keep = {checkpoint.keep}{unproven}{best}{every}, and the one being written"


def _existing(path: Path) -> Path:
    """The folder, or its nearest existing parent."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
