"""Checkpoint configuration and paths: when a run saves, where, which checkpoints it keeps, and what it loads.

Does not import torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megads.errors import ConfigError
from megads.runtime.files import read_regular
from megads.runtime.url import check_url, is_url

_INTERVAL_S = 120.0
_SAVE_SHARE = 0.01
"""Default interval between saves by time, and the share of the training time that they may take."""


class Reason(StrEnum):
    """Why a checkpoint is kept."""

    recent = "recent"
    best = "best"
    every = "every"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the most recent ones, those with the lowest validation loss, and one every N steps.

    Checkpoints are given as sequence numbers by step (see Manifest); 0 is a checkpoint that is not usable. Such a
    checkpoint may be kept as recent, but never for its step or its loss.

    Attributes:
        recent: number of most recent checkpoints to keep; 0: all are kept.
        every_steps: checkpoints whose step is a multiple of this are kept; 0: none.
        best: number of checkpoints with the lowest loss to keep.
        losses: validation loss by step; a checkpoint without one is not among the best.
    """

    recent: int = 0
    every_steps: int = 0
    best: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)

    def reasons(self, sequences: Mapping[int, int]) -> dict[int, tuple[Reason, ...]]:
        """Why each checkpoint is kept, by step, oldest first; without a reason it may be removed."""
        by_age = sorted(sequences, key=lambda step: (sequences[step], step))
        validated = [step for step in by_age if sequences[step] and step in self.losses]
        members = {
            Reason.recent: set(by_age[-self.recent :]),
            Reason.best: set(sorted(validated, key=lambda step: (self.losses[step], step))[: self.best]),
            Reason.every: {step for step in by_age if sequences[step] and self._is_multiple(step)},
        }
        return {step: tuple(reason for reason in Reason if step in members[reason]) for step in by_age}

    def surplus(self, sequences: Mapping[int, int]) -> list[int]:
        """Steps of the checkpoints that are not kept, oldest first."""
        return [step for step, reasons in self.reasons(sequences).items() if not reasons]

    def expendable(self, sequences: Mapping[int, int], *, all_reasons: bool) -> list[int]:
        """Steps of the checkpoints that may be deleted if a disk has no space for another one, in order of deletion.

        The newest is never deleted, and if all are kept (recent = 0), none is. Checkpoints that are only recent come
        before those kept for their step or their loss; each oldest first.

        Args:
            sequences: sequences of the checkpoints, by step.
            all_reasons: include checkpoints that are kept for their step or their loss.
        """
        older = list(self.reasons(sequences).items())[:-1] if self.recent else []
        for_good = [step for step, reasons in older if set(reasons) - {Reason.recent}]
        return [step for step, _ in older if step not in for_good] + (for_good if all_reasons else [])

    def _is_multiple(self, step: int) -> bool:
        return self.every_steps > 0 and step % self.every_steps == 0


KEEP_ALL = Retention()
"""Removes nothing."""


LATEST_FILE = "latest"
SMALLEST_COPY_BYTES = 64 * 2**20
"""State per rank from which an asynchronous save pays off: less is written to disk about as fast as it is copied."""
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


class CheckpointRead(StrEnum):
    """Which data-parallel replicas read the state that they share when a start loads a checkpoint.

    all: every replica reads it. one: each part is read by one replica, which broadcasts it. auto: one if the ranks are
    on several nodes, else all, since the page cache serves replicas on the same node.
    """

    auto = "auto"
    all = "all"
    one = "one"


@dataclass
class CheckpointConfig:
    """Checkpoint settings of a run. Checkpoints are in <run.dir>/checkpoints/step_XXXXXXXX."""

    every_steps: int = 0
    """Steps between checkpoints; 0 saves by time and at the end."""
    every_minutes: float | None = None
    """Minutes of training between checkpoints; 0: none by time. null: if every_steps is 0, 2 minutes, or longer where
    saves would hold up training for more than 1% of the time."""
    keep: int = 2
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """In addition to the newest, checkpoints whose step is a multiple of this are kept permanently; 0: none."""
    keep_best: int = 0
    """In addition to the newest, number of checkpoints with the lowest validation loss to keep. Only checkpoints of
    steps that were validated count (evaluation.every_steps)."""
    best_by: str | None = None
    """Name of the validation set whose loss keep_best compares (valid/<name>/loss); null: the first one."""
    max_failed_saves: int = 3
    """Consecutive saves that may fail, for example on a full disk; one more ends the run (exit 4)."""
    async_save: bool | None = None
    """Asynchronous saves: a step waits only until the state is copied in memory, and one process per rank writes the
    copy to disk while training continues. null: if a rank has 64 MiB or more to save and the node has memory for the
    copies. The last save of a run waits until it is on disk."""
    local_every_steps: int = 0
    """Steps between local checkpoints: copies of the state in the memory of each node, which survive the end of the
    processes. After a crash the same command continues from the newest one in seconds, or from disk if a node is lost.
    Takes twice the memory of the state that each rank holds. 0: none."""
    local_folder: str = "/dev/shm"
    """Folder in memory (tmpfs) on each node, for local checkpoints."""
    replicate: bool = False
    """Each local checkpoint is also sent to the memory of another node while training continues. If a node is lost, the
    next start continues from there. Needs two nodes with the same number of ranks, and as much memory again as the
    local checkpoints."""
    load: str = "auto"
    """auto: the newest usable checkpoint of this run, else start fresh. none: start fresh; restarts and requeues of
    that start continue from what it saved itself. Path of a checkpoint or run: the first start continues from it, with
    its step, optimizer state and position in schedule and data; the same command again continues from what was saved
    since."""
    read: CheckpointRead = CheckpointRead.auto
    """Which data-parallel replicas read the state that they share: all of them, or one, which broadcasts it; auto: one
    if the ranks are on several nodes. With ZeRO nothing is shared: each rank reads its own shard."""
    upload: str | None = None
    """URL of a second location for checkpoints, for example s3://bucket/prefix: a separate process copies each one to
    <upload>/<run.id>/checkpoints, and a start whose run directory is gone continues from there (docs/checkpoints.md).
    s3:// needs megads[s3]; file:///folder needs no extra package."""
    upload_keep: int | None = None
    """Number of newest checkpoints to keep at checkpoint.upload, at least 2, in addition to those of keep_every and
    keep_best; 0 keeps all; null: as many as checkpoint.keep."""
    upload_wait_s: float = 600.0
    """Longest wait, in seconds, at the end of a run for the upload of its last checkpoint."""
    init_from: str | None = None
    """Folder of a run (its newest usable checkpoint is taken) or of a checkpoint, or the URL of either: a new run
    starts from its weights, and everything else is fresh (docs/finetune.md). Ignored once the run has a checkpoint of
    its own."""

    def interval_s(self, save_s: float = 0.0) -> float:
        """Returns the seconds of training between checkpoints; infinity: none by time.

        Args:
            save_s: time for which the last save held up the training.
        """
        if self.every_minutes is not None:
            return 60.0 * self.every_minutes or math.inf
        return math.inf if self.every_steps else max(_INTERVAL_S, save_s / _SAVE_SHARE)

    @property
    def when(self) -> str:
        """When checkpoints are saved, in words."""
        steps = [f"every {self.every_steps} steps"] if self.every_steps else []
        minutes = [f"every {self.interval_s() / 60:g} minutes"] if math.isfinite(self.interval_s()) else []
        return ", ".join([*steps, *minutes, "at the end"])

    def check(self) -> None:
        """Raises ConfigError on negative numbers, settings that have no effect, and two checkpoints to start from."""
        for name in ("every_steps", "keep", "keep_every", "keep_best", "max_failed_saves", "local_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"checkpoint.{name} = {getattr(self, name)}: must not be negative")
        if self.every_minutes is not None and not 0 <= self.every_minutes < math.inf:
            raise ConfigError(
                f"checkpoint.every_minutes = {self.every_minutes}: want a number of minutes; 0: none by time"
            )
        self._check_kept()
        if self.replicate and not self.local_every_steps:
            raise ConfigError(
                "checkpoint.replicate = true only applies with local checkpoints, of which it keeps copies on other "
                "nodes: set checkpoint.local_every_steps, or remove replicate"
            )
        if self.local_every_steps and not Path(self.local_folder).is_absolute():
            raise ConfigError(
                f"checkpoint.local_folder = {self.local_folder!r} is not an absolute path: give a folder in memory "
                "that each node has, /dev/shm for example"
            )
        self._check_urls()
        if self.init_from == "":
            raise ConfigError("checkpoint.init_from is empty: give a run's or a checkpoint's folder, or null for none")
        if self.init_from is not None and self.load_path is not None:
            raise ConfigError(
                f"checkpoint.load = {self.load} and checkpoint.init_from = {self.init_from} are both set: load "
                "continues that run, with its step, optimizer state and place in schedule and data; init_from takes "
                "its weights alone. Leave one of them out"
            )

    def _check_urls(self) -> None:
        if self.upload is not None:
            check_url(self.upload, "checkpoint.upload")
        if is_url(self.load):
            check_url(self.load, "checkpoint.load")
        if self.init_from is not None and is_url(self.init_from):
            check_url(self.init_from, "checkpoint.init_from")
        if self.upload_keep is not None and (self.upload_keep < 0 or self.upload is None):
            told = "must not be negative" if self.upload_keep < 0 else "only applies with checkpoint.upload"
            raise ConfigError(f"checkpoint.upload_keep = {self.upload_keep}: {told}")
        if not 0 <= self.upload_wait_s < math.inf:
            raise ConfigError(f"checkpoint.upload_wait_s = {self.upload_wait_s}: want a number of seconds")

    def _check_kept(self) -> None:
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) and not self.keep:
                raise ConfigError(
                    f"checkpoint.{name} = {getattr(self, name)} has no effect: checkpoint.keep = 0 keeps all "
                    f"checkpoints; set checkpoint.keep to the number of newest ones, or checkpoint.{name}=0"
                )
        every = self.every_steps
        if every and self.keep_every % every:
            raise ConfigError(
                f"checkpoint.keep_every = {self.keep_every} is not a multiple of checkpoint.every_steps = {every}: few "
                f"checkpoints or none have such a step; use {-(-self.keep_every // every) * every}, for example"
            )
        if self.best_by is not None and not self.keep_best:
            raise ConfigError(
                f"checkpoint.best_by = {self.best_by} only applies with checkpoint.keep_best, which is 0: set that to "
                "the number of best checkpoints to keep, or remove best_by"
            )

    def cannot_be_put_off(self, step: int) -> bool:
        """Whether the checkpoint of this step waits for the previous one's writer: a later step would not replace it,
        since keep_every names this one, or keep_best compares checkpoints of steps that were validated."""
        by_step = bool(self.every_steps) and step % self.every_steps == 0
        return (self.keep_every > 0 and step % self.keep_every == 0) or (self.keep_best > 0 and by_step)

    def retention(self, losses: Mapping[int, float], *, newest_is_proven: bool) -> Retention:
        """Which checkpoints are kept in the run directory.

        Args:
            losses: validation loss by step, on the validation set that best_by names.
            newest_is_proven: whether a step after the newest checkpoint was finite; until then the checkpoint before it
                is kept, too.
        """
        recent = self.keep if newest_is_proven or not self.keep else max(self.keep, 2)
        return Retention(recent, self.keep_every, self.keep_best, losses)

    def upload_retention(self, losses: Mapping[int, float]) -> Retention:
        """Which checkpoints are kept at checkpoint.upload.

        Args:
            losses: as in `retention`.
        """
        keep = self.keep if self.upload_keep is None else self.upload_keep
        # At least two: if the newest is damaged, the one before it is still there.
        return Retention(max(keep, 2) if keep else 0, self.keep_every, self.keep_best, losses)

    def upload_url(self, run_id: str | None) -> str:
        """URL to which the checkpoints of a run are uploaded; checkpoint.upload must be set."""
        assert self.upload is not None
        return f"{self.upload.rstrip('/')}/{run_id}"

    def copies(self, rank_bytes: int) -> bool:
        """Whether saves are asynchronous, memory permitting, if no rank saves more than `rank_bytes`.

        The last save of a run is synchronous in any case, so a run that only saves at its end makes no copies.
        """
        wanted = rank_bytes >= SMALLEST_COPY_BYTES if self.async_save is None else self.async_save
        return wanted and self.every_steps > 0

    @property
    def load_path(self) -> str | None:
        """The path in checkpoint.load; None if it is auto or none."""
        return None if self.load in ("auto", "none") else self.load


def checkpoints_folder(run_dir: Path) -> Path:
    """Folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def step_folder(run_dir: Path, step: int) -> Path:
    """Folder of the committed checkpoint of a step."""
    return checkpoints_folder(run_dir) / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint folder; None if it has another name, as a copy may."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def named_by_latest(folder: Path) -> str:
    """The name in the file `latest` of a run's checkpoints; empty if there is no such file."""
    try:
        return read_regular(folder / LATEST_FILE).decode(errors="replace").strip()
    except OSError:
        return ""


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Folders named like checkpoints by step, ascending; `read` decides whether they are usable."""
    folder = checkpoints_folder(run_dir)
    found = ((step_of(path), path) for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    return dict(sorted((step, path) for step, path in found if step is not None))


@dataclass(frozen=True)
class History:
    """Which checkpoints of a run directory a start may continue from.

    Attributes:
        after: a checkpoint counts if its sequence is greater than this, see `Manifest`.
        without: names of checkpoints with a damaged manifest, and so without a sequence, that do not count.
    """

    after: int = -1
    without: tuple[str, ...] = ()

    def has(self, folder: Path, sequence: int | None) -> bool:
        """Whether a start may continue from a checkpoint.

        Args:
            folder: the checkpoint.
            sequence: its sequence; None if its manifest is damaged.
        """
        return folder.name not in self.without if sequence is None else sequence > self.after


EVERYTHING = History()


def newest_before(run_dir: Path, step: int) -> Path | None:
    """The checkpoint of the latest step before `step`; None if there is none."""
    return next((folder for at, folder in reversed(list_checkpoints(run_dir).items()) if at < step), None)


def fetched_folder(url: str, run_dir: Path) -> Path:
    """Folder for what a run downloads from a URL; depends on the URL alone."""
    return run_dir / "downloads" / _folder_name_of(url)


def described_folder(url: str, cache: Path) -> Path:
    """Folder in the user's cache for the metadata of a run at a URL, without its tensors."""
    return cache / "init_from" / _folder_name_of(url)


def _folder_name_of(url: str) -> str:
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
