"""The run directory: its files' names, and the lock that keeps a second launcher out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megads.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.yaml"


def rank_log_path(run_dir: Path, rank: int) -> Path:
    """Returns the file that holds everything a rank prints."""
    return run_dir / "logs" / f"rank_{rank:05d}.log"


def tracker_log_path(run_dir: Path) -> Path:
    """Returns the file that holds everything the tracker process prints."""
    return run_dir / "logs" / "tracker.log"


def failure_path(run_dir: Path, rank: int) -> Path:
    """Returns the file in which a rank says why it failed."""
    return run_dir / "logs" / f"failure_{rank:05d}.json"


def exit_path(run_dir: Path, rank: int) -> Path:
    """Returns the file in which a rank that ended by itself leaves its exit code."""
    return run_dir / "logs" / f"exit_{rank:05d}.json"


def _create(run_dir: Path) -> None:
    """Creates a run directory, or finds that it can be written to.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    probe = run_dir / "logs" / f".writable.{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run directory {run_dir} cannot be written to ({error.strerror}): "
            "choose another with run.dir=<path>, or make it writable"
        ) from error


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Creates a run directory and holds it; the kernel lets go of it when the process dies, however it dies.

    Raises:
        ConfigError: it cannot be written to, or a live launcher holds it.
    """
    _create(run_dir)
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"the run directory {run_dir} is in use by process {holder}: wait for it, stop it "
                f"(kill {holder}), or start another run with run.id=<name>"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def in_use(run_dir: Path) -> bool:
    """Tells whether a live launcher on this machine holds a run directory."""
    try:
        descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
