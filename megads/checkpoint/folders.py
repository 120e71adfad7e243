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


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Folders with a checkpoint's name by step, ascending; whether they are usable is for read.py to say."""
    folder = checkpoints_folder(run_dir)
    matches = ((_STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir()) if folder.is_dir() else ()
    return dict(sorted((int(match[1]), path) for match, path in matches if match))
