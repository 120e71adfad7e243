"""Agrees, between steps, on whether to stop: rank 0 looks for the stop file and tells the others."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megads.runtime.stop_file import INTERRUPTED, PREEMPTED, REQUESTED, read_stop

_REASONS = ("", INTERRUPTED, PREEMPTED, REQUESTED)


class StopSignal:
    """One small broadcast a step.

    Args:
        run_dir: where the stop file would appear.
        rank: this rank.
        device: device of the broadcast.
    """

    def __init__(self, run_dir: Path, rank: int, device: torch.device) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._code = torch.zeros((), dtype=torch.int64, device=device)

    def reason(self) -> str:
        """Why to stop, the same on every rank; empty to go on. Collective."""
        reason = read_stop(self._run_dir) if self._rank == 0 else None
        self._code.fill_(_REASONS.index(reason if reason in _REASONS else REQUESTED) if reason else 0)
        dist.broadcast(self._code, src=0)
        return _REASONS[int(self._code.item())]
