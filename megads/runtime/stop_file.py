"""The file by which somebody asks a run to stop after the current step: <run_dir>/stop.

The launcher writes it on a signal; the loop reads it on rank 0. A file that was made by hand, empty or not JSON, counts
as a request too (`touch runs/<id>/stop`) and stays until it is removed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from megads.runtime.files import parse_json, read_regular

INTERRUPTED = "interrupted"
PREEMPTED = "preempted"
REQUESTED = "requested"
TIME_LIMIT = "time limit"
KILL_SWITCH = "kill switch"
_LINK = "reason:"
_OF_ONE_START = (INTERRUPTED, PREEMPTED, TIME_LIMIT)


def stop_path(run_dir: Path) -> Path:
    """Returns the path of a run's stop file."""
    return run_dir / "stop"


def request_stop(run_dir: Path, reason: str) -> None:
    """Asks the run to save and end after its current step; the file appears whole or not at all.

    On a full disk it is a link to the reason: that needs no room but its name.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = stop_path(run_dir)
    if path.is_dir():
        return  # made by hand: a request already, in whose place no file can be put
    partial = path.with_name(f"stop.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps({"reason": reason}) + "\n")
    except OSError:
        partial.unlink(missing_ok=True)
        partial.symlink_to(_LINK + reason)
    partial.replace(path)


def read_stop(run_dir: Path) -> str | None:
    """Returns why the run was asked to stop, or None when nobody asked."""
    try:
        text = read_regular(stop_path(run_dir)).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return _linked_reason(stop_path(run_dir))
    except OSError:
        # Whatever has the name was made by somebody who wants the run to stop.
        return _linked_reason(stop_path(run_dir)) or REQUESTED
    try:
        content = parse_json(text)
    except ValueError:
        return REQUESTED
    return str(content.get("reason", REQUESTED)) if isinstance(content, dict) else REQUESTED


def _linked_reason(path: Path) -> str | None:
    try:
        target = str(path.readlink())
    except OSError:
        return None
    return target.removeprefix(_LINK) if target.startswith(_LINK) else REQUESTED


def clear_stop(run_dir: Path) -> None:
    """Forgets the launcher's own request of an earlier start; one made by hand stays."""
    if read_stop(run_dir) in _OF_ONE_START:
        stop_path(run_dir).unlink(missing_ok=True)
