"""Tests attacks by a process that reaches the ports of a run but does not know its secret."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import PrefixStore, TCPStore

from megads.runtime.control_store import ControlStore
from megads.runtime.ports import Secret, secret_path
from megads.tools.doctor.node_check import CheckStore
from tests.command import REPOSITORY, Launched, StartLauncher, launchers_in

pytestmark = pytest.mark.distributed

IMPOSTOR = """
import sys
from datetime import timedelta
import torch.distributed as dist
from megads.runtime.distributed import authenticate
from megads.runtime.distributed import open_control_plane
from megads.runtime.ports import Secret
port, prefix, limit = int(sys.argv[1]), sys.argv[2], timedelta(seconds=float(sys.argv[3]))
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=1, world_size=2, timeout=limit)
print("met", flush=True)
control = open_control_plane()
try:
    authenticate(control, Secret.random())
except Exception as error:
    print(type(error).__name__, flush=True)
print(control.gather("rank 1", str), flush=True)
"""


class Program:
    """An object whose unpickling runs code: it creates a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartLauncher]:
    """Starts launchers without fork: the test looks for secrets in environments, and a fork's cannot be read."""
    with launchers_in(tmp_path / "run") as start:
        yield start


def listening(pid: int) -> list[Any]:
    """Addresses at which a process and its children listen."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = []
    for process in processes:
        found += [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found


def store_port(launched: Launched) -> int:
    """The port of the launcher's store."""
    found: list[int] = []

    def look() -> bool:
        connections = psutil.Process(launched.process.pid).net_connections("inet")
        found.extend(c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN)
        return bool(found)

    launched.wait_for(look)
    return found[0]


def stranger(port: int) -> TCPStore:
    """A client of the store that does not know the secret."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def join(port: int, prefix: str, timeout_s: float) -> subprocess.Popen[str]:
    """Starts a process that joins as rank 1."""
    command = [sys.executable, "-c", IMPOSTOR, str(port), prefix, str(timeout_s)]
    variables = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def require_unreachable_from_elsewhere(port: int) -> None:
    """Checks that every address of this machine other than loopback refuses connections to the port."""
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    for address in addresses:
        if not address.startswith("127."):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, port), timeout=5).close()


def require_kept(secret: str, launched: Launched) -> None:
    """Checks that the secret is in no file that others can read, and in no command line or environment."""
    for path in launched.run_dir.rglob("*"):
        if path.is_file() and secret.encode() in path.read_bytes():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for process in [psutil.Process(launched.process.pid), *psutil.Process(launched.process.pid).children(True)]:
        assert secret not in " ".join(process.cmdline())
        assert secret not in " ".join(process.environ().values())


@pytest.mark.slow
def test_an_attacker_runs_no_code(start: StartLauncher, tmp_path: Path) -> None:
    """Catches a store that listens on all addresses, a store value that is unpickled, a rank that is admitted under
    torch's default keys, garbage that ends a run, and a secret in a log, a file, `ps` or an environment."""
    launched, mark = start("meet_until_told"), tmp_path / "owned"
    port = store_port(launched)
    secret = secret_path(launched.run_dir, None)
    launched.wait_for(secret.exists)
    text = secret.read_text().strip()
    (launched.run_dir / "late").touch()
    launched.wait_for(lambda: all((launched.run_dir / f"met_{rank}").exists() for rank in range(2)))

    assert {address.ip for address in listening(launched.process.pid)} == {"127.0.0.1"}
    require_unreachable_from_elsewhere(port)
    require_kept(text, launched)
    client, program = stranger(port), pickle.dumps(Program(mark))
    report = json.dumps({"word": "report", "number": 0, "report": {}}).encode()
    known = client.list_keys()
    assert known, "the stranger does see the keys"
    for key in (*known, "end", "control/end", "words/1", "default_pg/0//cpu//0/0", "huge"):
        client.set(key, b"x" * 2**22 if key == "huge" else program)
        for value in (program, report, b"\xff\x00"):
            client.queue_push(key, value)
    assert "huge" in client.list_keys(), "the server has it all"
    for address in listening(launched.process.pid):
        with socket.create_connection(address) as raw:
            raw.sendall(program + bytes(range(256)) * 16)
    impostor = join(port, "default_pg", 3)
    assert impostor.wait(240) != 0 and impostor.communicate()[0] == ""

    (launched.run_dir / "go").touch()
    code, out, err = launched.end()
    assert (code, err) == (0, "") and not mark.exists() and not secret.exists()
    contents = [path.read_bytes() for path in launched.run_dir.rglob("*") if path.is_file()]
    assert not any(text.encode() in content for content in (*contents, out.encode(), err.encode()))


@pytest.mark.slow
def test_an_impostor_is_not_admitted(start: StartLauncher) -> None:
    """Catches a process that reads the store's keys, takes the place of a late rank, and is admitted."""
    launched = start("meet_until_told")
    client, prefixes = stranger(store_port(launched)), set[str]()

    def look() -> bool:
        prefixes.update(key.partition("/")[0] for key in client.list_keys() if key.count("/") > 2)
        return bool(prefixes)

    launched.wait_for(look)
    impostor = join(client.port, prefixes.pop(), 20)
    code, _, err = launched.end()
    assert code == 9 and "rank 1 of 2 joined with another secret than this start's: no data of the run" in err
    assert "Traceback" not in err
    out = impostor.communicate(timeout=240)[0]
    assert out.split() == ["met", "UnhealthyNode"], "it met rank 0, which told it nothing"
    assert not (launched.run_dir / "met_0").exists()


def test_only_agents_messages_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a forged or replayed report or order, messages lost behind garbage, an exception in the launcher or in an
    agent, and a log that an attacker can fill."""
    secret = Secret.random()
    launcher = ControlStore(secret, "127.0.0.1")
    agent, other = (ControlStore(secret, "127.0.0.1", launcher.port) for _ in range(2))
    # The forger even knows the key prefix of the messages.
    forger = PrefixStore(secret.name("control"), stranger(launcher.port))
    agent.send({"word": "failing", "number": 0})
    said, theirs = forger.queue_pop("words"), Secret.random().seal("word", '["a", 1, {}]').encode()
    forgeries = (
        said,
        b"",
        b"\xff\xfe",
        b'{"word": "report"}',
        b"x" * 2**22,
        theirs,
    )
    with caplog.at_level(logging.WARNING):
        for forged in (said, *forgeries):
            forger.queue_push("words", forged)
        other.send({"word": "failing", "number": 1})
        agent.send({"word": "report", "number": 0, "report": {"é": [1]}})
        forger.queue_push("words", said)
        # A client's push returns before the server has the value.
        deadline = time.monotonic() + 240
        while forger.queue_len("words") < len(forgeries) + 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        heard = [(word["word"], word["number"]) for word in launcher.hear()]
        assert sorted(heard) == [("failing", 0), ("failing", 1), ("report", 0)]
        assert heard.index(("failing", 0)) < heard.index(("report", 0))
        assert launcher.hear() == []
        assert len(caplog.records) == 1 and "does not belong to this start" in caplog.text

    assert not agent.end_ordered()
    for forged in (*forgeries, secret.seal("word", "end this start").encode()):
        forger.set("end", forged)
        assert forger.get("end") == forged and not agent.end_ordered()
    launcher.order_end()
    assert launcher.end_ordered() and agent.end_ordered() and other.end_ordered()


def test_only_node_checkers_measurements_are_accepted() -> None:
    """Catches a forged measurement that gets a healthy node rejected, and a signed one replayed under another key."""
    secret = Secret.random()
    coordinator = CheckStore(secret, "127.0.0.1")
    checker = CheckStore(secret, "127.0.0.1", coordinator.port)
    forger = PrefixStore(secret.name("board"), stranger(coordinator.port))
    for forged in (b"{}", b"\xff", secret.seal("board measured/b", "{}").encode()):
        forger.set("measured/a", forged)
        assert forger.get("measured/a") == forged and coordinator.get("measured/a") is None
    checker.put("measured/a", {"errors": {}})
    assert checker.get("measured/a") == coordinator.get("measured/a") == {"errors": {}}
