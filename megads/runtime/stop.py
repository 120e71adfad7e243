"""What rank 0 tells all ranks after a step: requests to stop (the file <run_dir>/stop), to profile the next steps (the
file <run_dir>/profile), and to save by time.

The launcher writes the file on a signal; rank 0 reads it between steps and broadcasts it. A file created by hand, empty
or not JSON, is a request too (`touch runs/<id>/stop`) and stays until it is removed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megads.errors import Fenced
from megads.runtime.files import parse_json, read_regular
from megads.runtime.lease import Fence

if TYPE_CHECKING:
    from megads.runtime.distributed import ControlPlane

INTERRUPTED = "interrupted"
PREEMPTED = "preempted"
REQUESTED = "requested"
TIME_LIMIT = "time limit"
KILL_SWITCH = "kill switch"
_LINK = "reason:"
_OF_ONE_START = (INTERRUPTED, PREEMPTED, TIME_LIMIT)
_FENCED = "fenced"
_REASONS = ("", INTERRUPTED, PREEMPTED, REQUESTED, TIME_LIMIT, KILL_SWITCH, _FENCED)


def stop_path(run_dir: Path) -> Path:
    """Returns the path of a run's stop file."""
    return run_dir / "stop"


def request_stop(run_dir: Path, reason: str) -> None:
    """Requests that the run saves and ends after its current step; the file is written atomically.

    On a full disk a symlink is created whose target is the reason, as it needs no data block.

    Raises:
        OSError: the folder is not writable.
    """
    path = stop_path(run_dir)
    if path.is_dir():
        return  # a folder created by hand is a request already, and a file cannot replace it
    partial = path.with_name(f"stop.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps({"reason": reason}) + "\n")
    except OSError:
        partial.unlink(missing_ok=True)
        partial.symlink_to(_LINK + reason)
    partial.replace(path)


def read_stop(run_dir: Path) -> str | None:
    """Returns the reason of a stop request, or None if there is none."""
    try:
        text = read_regular(stop_path(run_dir)).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return _linked_reason(stop_path(run_dir))
    except OSError:
        # Anything with this name is a request of a user.
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
    """Removes a request that the launcher wrote in an earlier start; one made by hand stays."""
    if read_stop(run_dir) in _OF_ONE_START:
        stop_path(run_dir).unlink(missing_ok=True)


_PROFILED_STEPS, _MOST_PROFILED_STEPS = 3, 100
_PROFILE_POLL_S = 1.0
"""Interval at which rank 0 looks for a request to profile, so that short steps do not wait for a shared disk."""
_MEMORY, _DIGITS = "memory", 10


@dataclass(frozen=True)
class ProfileRequest:
    """A request to profile the next steps of a running job.

    Attributes:
        steps: number of steps.
        memory: whether to record the allocations of GPU memory meanwhile.
    """

    steps: int = _PROFILED_STEPS
    memory: bool = False


def profile_path(run_dir: Path) -> Path:
    """Returns the path of a run's request to profile. It holds the number of steps (3 if it is empty, at most 100), the
    word memory, both or neither: `echo 5 memory > <run_dir>/profile`."""
    return run_dir / "profile"


class ProfileRequests:
    """Takes requests to profile a run; used by rank 0.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path, self._next_look_s = profile_path(run_dir), 0.0

    def take(self) -> ProfileRequest | None:
        """Returns a new request and removes its file; None if there is none. The disk is asked once a second."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + _PROFILE_POLL_S
        try:
            if not self._path.exists():
                return None
            words = read_regular(self._path).decode(errors="replace").split()
            self._path.unlink()
        except OSError as error:
            # A folder, or a file that cannot be removed, would be answered again and again.
            self._next_look_s = math.inf
            sys.stdout.write(f"{self._path} is ignored: {error}\n")
            return None
        numbers = [int(word) for word in words if word.isdecimal() and len(word) < _DIGITS]
        steps = min(max(numbers[0], 1), _MOST_PROFILED_STEPS) if numbers else _PROFILED_STEPS
        return ProfileRequest(steps, _MEMORY in words)


class StopSignal:
    """Checks for requests to stop and to profile, and whether it is time to save, with one small broadcast per step.

    Attributes:
        save_due: whether it was time to save at the last check, the same on all ranks.
        profile: request to profile the next steps, taken at the last check, the same on all ranks; None if there was
            none.

    Args:
        run_dir: run directory, in which the stop file appears.
        control: control plane of all ranks.
        fence: fence of the start that this rank belongs to; None: no check of the lease.
        kill_switch: additional file that stops the run; None or empty: no such file.
        time_to_save: called on rank 0.
        profile: called on rank 0; returns a new request to profile.
    """

    def __init__(
        self,
        run_dir: Path,
        control: ControlPlane,
        fence: Fence | None = None,
        kill_switch: str | None = None,
        time_to_save: Callable[[], bool] = lambda: False,
        profile: Callable[[], ProfileRequest | None] = lambda: None,
    ) -> None:
        self.save_due = False
        self.profile: ProfileRequest | None = None
        self._time_to_save, self._take_profile = time_to_save, profile
        self._run_dir, self._control, self._fence = run_dir, control, fence
        self._kill_switch = Path(kill_switch) if kill_switch else None

    def reason(self) -> str:
        """Returns why to stop, the same on all ranks; empty to continue. Collective.

        Raises:
            Fenced: on all ranks, if another start has taken the run directory over.
        """
        reason = self._look() if self._control.rank == 0 else None
        seen = _REASONS.index(reason if reason in _REASONS else REQUESTED) if reason else 0
        if self._control.rank == 0:
            asked = self._take_profile()
            profiled = 0 if asked is None else 2 * asked.steps + asked.memory
            seen += len(_REASONS) * (self._time_to_save() + 2 * profiled)
        number = self._control.broadcast_number(seen)
        number, heard_number = divmod(number, len(_REASONS))
        number, due = divmod(number, 2)
        self.save_due, heard = bool(due), _REASONS[heard_number]
        self.profile = ProfileRequest(number // 2, bool(number % 2)) if number else None
        if heard == _FENCED:
            raise Fenced("another start of this run took over: this one ends without saving; rank 0's log names it")
        return heard

    def _look(self) -> str | None:
        """Returns the reason as read by rank 0."""
        lost = self._fence.reason() if self._fence is not None else ""
        if lost:
            sys.stdout.write(f"{lost}\n")
            return _FENCED
        if self._kill_switch is not None and self._kill_switch.exists():
            return KILL_SWITCH
        return read_stop(self._run_dir)
