"""A private SLURM whose nodes can fail."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

from megads.tools.rehearse.private_slurm import PrivateSlurm


class FaultyCluster(PrivateSlurm):
    """A private SLURM with methods that take nodes down and bring them back."""

    def kill_slurmd(self, node: str) -> None:
        """Kills the slurmd of a node with SIGKILL; its job steps continue, as after a crash of slurmd."""
        _kill([self._pids.pop(node)])

    def lose_node(self, node: str) -> None:
        """Kills the slurmd of a node and everything the node runs with SIGKILL, like a power failure."""
        self._pids.pop(node, None)
        groups = [psutil.Process(pid) for pid in self._groups.pop(node, []) if psutil.pid_exists(pid)]
        below = [process for group in groups for process in group.children(recursive=True)]
        _kill([process.pid for process in (*below, *groups)])

    def revive(self, node: str) -> None:
        """Starts the slurmd of a lost node again and waits until the node can run jobs."""
        self._start_daemon(node, ["slurmd", "-D", "-N", node])
        self.wait_for_nodes("idle", [node])


def _kill(pids: list[int]) -> None:
    # SIGSTOP all first: in a power failure no process observes another one's end, and srun does not end the step
    # because the task of its own node died.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} survive SIGKILL"
        time.sleep(0.01)
