"""Agrees, between steps, on whether to stop: rank 0 looks for the stop file and tells the others."""

from __future__ import annotations

import sys
from pathlib import Path

from megads.errors import Fenced
from megads.runtime.control_plane import ControlPlane
from megads.runtime.lease import Fence
from megads.runtime.stop_file import INTERRUPTED, KILL_SWITCH, PREEMPTED, REQUESTED, TIME_LIMIT, read_stop

_FENCED = "fenced"
_REASONS = ("", INTERRUPTED, PREEMPTED, REQUESTED, TIME_LIMIT, KILL_SWITCH, _FENCED)


class StopSignal:
    """One small broadcast a step.

    Args:
        run_dir: where the stop file would appear.
        control: of all ranks.
        fence: of the start that this rank belongs to; None for none.
        kill_switch: another file that stops the run; None for none.
    """

    def __init__(
        self,
        run_dir: Path,
        control: ControlPlane,
        fence: Fence | None = None,
        kill_switch: Path | None = None,
    ) -> None:
        self._run_dir, self._control, self._fence, self._kill_switch = run_dir, control, fence, kill_switch

    def reason(self) -> str:
        """Why to stop, the same on every rank; empty to go on. Collective.

        Raises:
            Fenced: on every rank, when another start took the run directory over.
        """
        reason = self._look() if self._control.rank == 0 else None
        seen = _REASONS.index(reason if reason in _REASONS else REQUESTED) if reason else 0
        heard = _REASONS[self._control.broadcast_number(seen)]
        if heard == _FENCED:
            raise Fenced("another start of this run took over: this one ends without saving; rank 0's log names it")
        return heard

    def _look(self) -> str | None:
        """What rank 0 sees."""
        lost = self._fence.reason() if self._fence is not None else ""
        if lost:
            sys.stdout.write(f"{lost}\n")
            return _FENCED
        if self._kill_switch is not None and self._kill_switch.exists():
            return KILL_SWITCH
        return read_stop(self._run_dir)
