"""Ranks that agents in other processes start and report about: what launchers on SLURM and on other platforms share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megads.launch.hang_detection import furthest_behind
from megads.launch.node_agent import ALIVE_EVERY_S, MessageKind
from megads.launch.node_ranks import KILL_AFTER_S, NodePart
from megads.launch.rank_outcome import NodeReport
from megads.runtime.heartbeat import RankPosition

if TYPE_CHECKING:
    from megads.runtime.control_store import ControlStore

NODE_SILENT_S = 4 * ALIVE_EVERY_S
"""Time without a message after which an agent counts as silent."""
_MOST_PASSED_S = 1.0
_SIGNAL_SETTLES_S = 1.0


class AgentRanks:
    """What the agents of a start have reported about their ranks.

    Args:
        part: what each agent starts; number and address are set by the agent.
        names: names of the agents, by their number.
    """

    def __init__(self, part: NodePart, names: Sequence[str]):
        self._part = part
        self._names = names
        self._reports: dict[int, NodeReport] = {}
        self._silences: list[RankPosition] = []
        self._hangs: dict[int, list[RankPosition]] = {}
        self._waited_for: list[RankPosition] | None = None
        self._heard_s: dict[int, float] = {}
        self._listened_s, self._listened_at = 0.0, 0.0
        self._phase = ""
        self._failed_at: float | None = None
        self._signalled_at: float | None = None
        self._ended_at: float | None = None
        self._control: ControlStore | None = None

    def hear(self) -> None:
        """Takes in the agents' messages since the last call."""
        assert self._control is not None
        for message in self._control.hear():
            self._take(message)
        self._listened()

    def act(self) -> None:
        """Forwards a signal that only an agent received, and ends the ranks some time after the first failure."""
        now = time.monotonic()
        if self._signalled_at is not None and now - self._signalled_at > _SIGNAL_SETTLES_S:
            self._signalled_at = None
            # A scheduler ends a failed step with the same signal, which then is no stop request; the failure of an
            # agent that died becomes known a little later. The signal is forwarded to this process, in case only the
            # agents got it; if the launcher got it too, this is only its second signal.
            if self._failed_at is None:
                os.kill(os.getpid(), signal.SIGTERM)
        if self._failed_at is not None and now - self._failed_at > KILL_AFTER_S:
            self.kill()

    def kill(self) -> None:
        """Orders every agent to kill its ranks."""
        if self._control is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
            self._control.order_end()

    def silences(self) -> list[RankPosition]:
        """Ranks whose heartbeats stopped or returned since the last call, as reported by the agents."""
        found, self._silences = self._silences, []
        return found

    def phase(self) -> str:
        """The slow phase that rank 0 is in; empty while it executes steps."""
        return self._phase

    def hang(self) -> list[RankPosition]:
        """The hung ranks that the ranks of all nodes wait for.

        Empty while a node reports none: the others may be waiting for that node, which is making progress.
        """
        if len(self._hangs) < len(self._names):
            return []
        if self._waited_for is None:
            # Cached: slow with 16,000 ranks, and polled ten times a second.
            found = [position for _, found in sorted(self._hangs.items()) for position in found]
            self._waited_for = furthest_behind(found)
        return self._waited_for

    def silent_nodes(self) -> dict[str, float]:
        """Nodes whose agents have stopped sending messages, with the seconds since the last one."""
        return {self._names[number]: silent_s for number, silent_s in self._silent().items()}

    def lost_nodes(self) -> dict[str, float]:
        """The silent nodes that the ranks of all other nodes wait for: an agent may be silent while its ranks train."""
        silent = self._silent()
        if 2 * len(silent) > len(self._names) or len(self._hangs.keys() | silent.keys()) < len(self._names):
            return {}
        return self.silent_nodes()

    def _listened(self) -> None:
        """Advances the time in which messages were received: it excludes pauses of the launcher itself, such as of a
        suspended job, for which the agents must not be blamed."""
        now = time.monotonic()
        self._listened_s += min(now - self._listened_at, _MOST_PASSED_S)
        self._listened_at = now

    def _silent(self) -> dict[int, float]:
        """Seconds since the last message of each silent node, by node number."""
        since = {n: self._listened_s - at for n, at in self._heard_s.items() if n not in self._reports}
        return {number: silent_s for number, silent_s in since.items() if silent_s >= NODE_SILENT_S}

    def _only_silent_left(self) -> bool:
        """Whether all agents that have not reported are silent, so that waiting for them is useless."""
        missing = set(range(len(self._names))) - self._reports.keys()
        return bool(missing) and missing <= self._silent().keys()

    def _take(self, message: dict[str, Any]) -> None:
        """Processes a message from an agent."""
        number: Any = message.get("number")
        if isinstance(number, int):
            self._heard_s[number] = self._listened_s
        match message["kind"]:
            case MessageKind.signalled:
                self._signalled_at = self._signalled_at or time.monotonic()
            case MessageKind.silence:
                self._silences.append(RankPosition(**message["position"]))
            case MessageKind.phase:
                self._phase = message["phase"]
            case MessageKind.hang:
                self._waited_for = None
                self._hangs[number] = [RankPosition(**position) for position in message["positions"]]
                if not self._hangs[number]:
                    del self._hangs[number]
            case MessageKind.failing:
                self._failed_at = self._failed_at or time.monotonic()
            case MessageKind.report:
                report = self._reports[number] = NodeReport.decode(message["report"])
                if report.failed:
                    self._failed_at = self._failed_at or time.monotonic()
