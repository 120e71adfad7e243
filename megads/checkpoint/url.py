"""Where a machine keeps what it fetches of checkpoints at a URL. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path


def fetched_folder(url: str, run_dir: Path) -> Path:
    """Where a run keeps what it fetches of a URL; always the same for a URL."""
    return run_dir / "downloads" / _name_of(url)


def described_folder(url: str, cache: Path) -> Path:
    """Where a user's cache keeps what a run at a URL says of itself, without its tensors."""
    return cache / "init_from" / _name_of(url)


def _name_of(url: str) -> str:
    return hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
