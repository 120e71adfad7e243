"""Where a run keeps its checkpoints and what they are called; needs no torch, for those who only look."""

from __future__ import annotations

import re
from pathlib import Path

LATEST_FILE = "latest"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


def checkpoints_folder(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def step_folder(run_dir: Path, step: int) -> Path:
    """Final place of the checkpoint of a step."""
    return checkpoints_folder(run_dir) / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name says; None where it has another name, as a copy may."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Folders with a checkpoint's name by step, ascending; whether they are usable is for read.py to say."""
    folder = checkpoints_folder(run_dir)
    found = ((step_of(path), path) for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    return dict(sorted((step, path) for step, path in found if step is not None))


def newest_before(run_dir: Path, step: int) -> Path | None:
    """The checkpoint of the latest step before this one; None where there is none."""
    return next((folder for at, folder in reversed(list_checkpoints(run_dir).items()) if at < step), None)
