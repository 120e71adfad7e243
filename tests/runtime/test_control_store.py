"""Orders of the launcher, and their delivery to agents."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from megads.runtime.control_store import ControlStore, EndOrder
from megads.runtime.ports import Secret


def wait_until(order: EndOrder, within_s: float = 120.0) -> None:
    """Waits for an order."""
    begin = time.monotonic()
    while not order.given():
        assert time.monotonic() < begin + within_s, "the order did not come"
        time.sleep(0.005)


def test_an_agent_receives_only_the_launchers_orders() -> None:
    """Catches an agent that does not receive the order, that obeys a forged one, or that misses the real order after a
    forged one."""
    secret = Secret.random()
    launcher = ControlStore(secret, "127.0.0.1")
    orders = [EndOrder(ControlStore(secret, "127.0.0.1", launcher.port)) for _ in range(4)]
    stranger = TCPStore("127.0.0.1", launcher.port, is_master=False, wait_for_workers=False)
    forger = PrefixStore(secret.name("control"), stranger)
    time.sleep(0.2)
    assert not any(order.given() for order in orders)
    forger.set("end", secret.seal("word", "end this start"))
    forger.set("ending", "")
    time.sleep(0.5)
    assert not any(order.given() for order in orders)
    launcher.order_end()
    for order in orders:
        wait_until(order)
    alone = ControlStore(secret, "127.0.0.1")
    undisturbed = EndOrder(ControlStore(secret, "127.0.0.1", alone.port))
    time.sleep(0.2)
    assert not undisturbed.given()
    alone.order_end()
    wait_until(undisturbed)
    late = EndOrder(ControlStore(secret, "127.0.0.1", launcher.port))
    wait_until(late)


def test_a_launcher_that_is_gone_is_noticed() -> None:
    """Catches ranks that outlive a killed launcher because the agent keeps waiting for its order."""
    secret = Secret.random()
    serve = (
        "import sys, time; from megads.runtime.control_store import ControlStore; "
        "from megads.runtime.ports import Secret; "
        "store = ControlStore(Secret.decode(sys.argv[1]), '127.0.0.1'); print(store.port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", serve, secret.encode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        order = EndOrder(ControlStore(secret, "127.0.0.1", int(launcher.stdout.readline())))
        time.sleep(0.2)
        assert not order.given()
        launcher.kill()
    with pytest.raises(RuntimeError):
        wait_until(order)


def test_a_node_reads_only_its_own_assignment() -> None:
    """Catches an assignment of another node, a forged one, and one that an attacker moved to another node."""
    secret = Secret.random()
    launcher = ControlStore(secret, "127.0.0.1")
    agent = ControlStore(secret, "127.0.0.1", launcher.port)
    launcher.assign({"a": {"node": 0}, "b": {"node": 1}})
    assert (agent.assigned("a"), agent.assigned("b"), agent.assigned("c")) == ({"node": 0}, {"node": 1}, None)
    forger = PrefixStore(
        secret.name("control"),
        TCPStore("127.0.0.1", launcher.port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False),
    )
    forger.set("place of a", forger.get("place of b"))
    forger.set("place of b", '{"node": 0}')
    assert forger.get("place of b") == b'{"node": 0}'
    assert (agent.assigned("a"), agent.assigned("b")) == (None, None)
