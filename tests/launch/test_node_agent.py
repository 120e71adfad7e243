"""Messages between a node agent and the launcher, and their frequency."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megads.launch import node_agent
from megads.launch.node_agent import AgentOrders, LauncherContact, place_of, run_agent
from megads.launch.node_ranks import NodePart
from megads.launch.rank_outcome import NodeReport
from megads.runtime.control_store import ControlStore
from megads.runtime.ports import read_secret, secret_path, start_secret

_LAUNCHER = """
import sys
from pathlib import Path
from megads.launch.node_agent import place_of
from megads.runtime.control_store import ControlStore
from megads.runtime.ports import read_secret
store = ControlStore(read_secret(Path(sys.argv[1])), "127.0.0.1")
store.assign({"a": place_of(0, 1, "127.0.0.1")})
print(store.port, flush=True)
sys.stdin.read()
"""


def test_an_agent_reports_that_it_is_alive_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an agent that is considered lost, one that contacts the launcher at every poll, and one that misses an
    order because the connection that signals it was cut."""
    clock, said, ordered = itertools.count(1000.0, 0.1), list[dict[str, Any]](), [False]
    monkeypatch.setattr(node_agent, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    control: Any = SimpleNamespace(send=said.append, end_ordered=lambda: ordered[0])
    never: Any = SimpleNamespace(given=lambda: False)
    contact = LauncherContact(control, 7, never)
    assert not any(contact.end_ordered() for _ in range(1000))
    assert 20 <= len(said) <= 22 and said[0] == {"kind": "alive", "number": 7}
    ordered[0] = True
    assert sum(contact.end_ordered() for _ in range(60)) > 5
    at_once: Any = SimpleNamespace(given=lambda: True)
    assert LauncherContact(SimpleNamespace(send=said.append, end_ordered=lambda: False), 7, at_once).end_ordered()  # type: ignore[arg-type]


def test_an_agent_starts_only_its_own_nodes_ranks(tmp_path: Path) -> None:
    """Catches an agent that starts another node's ranks, and one that starts ranks on a node that has none."""
    begun: list[NodePart] = []

    class Started(Exception):
        """Raised when the agent would start ranks."""

    def make_ranks(_part: NodePart, _control: ControlStore) -> Any:
        raise Started

    with start_secret(tmp_path, 3):
        part = NodePart(tmp_path, ("-m", "module"), 8, 1, lease=3)
        launcher = ControlStore(read_secret(secret_path(tmp_path, 3)), "127.0.0.1")
        launcher.assign({name: place_of(number, 2, f"10.0.0.{number}") for number, name in enumerate(("a", "b"))})
        orders = AgentOrders(part, "127.0.0.1", launcher.port)
        with pytest.raises(Started):
            run_agent(orders, "b", [], make_ranks, begun.append)
        with pytest.raises(RuntimeError, match="has no ranks for node c"):
            run_agent(orders, "c", [], make_ranks, begun.append)
        launcher.order_end()
    (mine,) = begun
    assert (mine.node, mine.num_nodes, mine.address, mine.ranks) == (1, 2, "10.0.0.1", range(8, 16))


def test_an_agent_fails_if_nobody_receives_its_report(tmp_path: Path) -> None:
    """Catches an agent that exits normally after a report that nobody received: its ranks fail at once when the
    launcher's node is lost, before it polls the launcher, and the job would idle until its time limit."""
    launcher: subprocess.Popen[str] | None = None

    class Failing:
        """Ranks that fail because the launcher's node is lost."""

        failing = False

        def __init__(self, part: NodePart, _control: ControlStore):
            self.part = part

        def start(self) -> None:
            assert launcher is not None
            launcher.kill()
            launcher.wait()

        def poll(self) -> bool:
            return False

        def reports(self) -> list[NodeReport]:
            return [NodeReport("a", error="a peer is gone", exit_code=6)]

    with start_secret(tmp_path, 3):
        path = secret_path(tmp_path, 3)
        launcher = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with launcher:
            assert launcher.stdout is not None
            orders = AgentOrders(
                NodePart(tmp_path, ("-m", "module"), 1, 1, cpu=True, lease=3),
                "127.0.0.1",
                int(launcher.stdout.readline()),
            )
            with pytest.raises(RuntimeError):
                run_agent(orders, "a", [], Failing)  # type: ignore[arg-type]
