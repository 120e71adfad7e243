"""Tests the secret of a start: who can read its file, and what it proves."""

from __future__ import annotations

import os
import socket
import stat
import traceback
from pathlib import Path

import psutil
import pytest

from megads.errors import ConfigError, UnhealthyNode
from megads.runtime.ports import (
    Secret,
    gloo_interface,
    launcher_address,
    listen,
    read_secret,
    secret_path,
    start_secret,
)


def test_each_start_has_its_own_private_secret(tmp_path: Path) -> None:
    """Catches a secret that others can read, one that outlives its start, and one that the next start reuses."""
    found = []
    for lease in (None, 3, 4):
        path = secret_path(tmp_path, lease)
        with start_secret(tmp_path, lease):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            found.append(read_secret(path).encode())
        assert not list(tmp_path.iterdir())
    assert len(set(found)) == 3 and all(len(text) == 64 for text in found)


def test_the_secret_of_a_killed_start_is_replaced(tmp_path: Path) -> None:
    """Catches an old secret that is trusted, and a symbolic link that leaks the new one."""
    elsewhere, orphan = tmp_path / "elsewhere", secret_path(tmp_path, 1)
    elsewhere.write_text("a" * 64)
    secret_path(tmp_path, 2).symlink_to(elsewhere)
    orphan.write_text("b" * 64)
    with start_secret(tmp_path, 2):
        assert read_secret(secret_path(tmp_path, 2)).encode() not in ("a" * 64, "b" * 64)
        assert elsewhere.read_text() == "a" * 64 and not orphan.exists()
        with pytest.raises(UnhealthyNode, match="the start that this process belongs to is over"):
            read_secret(orphan, within_s=0.0)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file system that ignores file modes, and a secret file that was made readable by others."""
    with start_secret(tmp_path, None):
        path = secret_path(tmp_path, None)
        path.chmod(0o640)
        with pytest.raises(UnhealthyNode, match="has mode 640, not 600"):
            read_secret(path)
    inner = os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda descriptor, _mode: inner(descriptor, 0o777))
    with pytest.raises(ConfigError, match=r"mode 777 where 600 was asked for.*run\.dir"), start_secret(tmp_path, None):
        pass
    assert not list(tmp_path.iterdir())


def test_error_messages_do_not_contain_the_secret(tmp_path: Path) -> None:
    """Catches a damaged secret that is quoted in a rank's error, and from there in logs and events."""
    path = secret_path(tmp_path, None)
    path.touch(0o600)
    path.write_text(f"{'c' * 63}x\n")
    with pytest.raises(UnhealthyNode) as raised:
        read_secret(path)
    assert "ccc" not in "".join(traceback.format_exception(raised.value))
    assert "it contains no secret" in str(raised.value)
    assert "c" * 64 not in repr(Secret.decode("c" * 64))


def test_a_proof_is_valid_for_one_purpose_only() -> None:
    """Catches a proof that is also valid for another secret, another purpose or other parts."""
    ours, theirs = Secret.random(), Secret.random()
    proofs = [
        *(secret.proof("a", b"bc", b"d") for secret in (ours, theirs)),
        *(ours.proof(purpose, *parts) for purpose, *parts in (("b", b"bc", b"d"), ("a", b"b", b"cd"), ("a", b"bcd"))),
    ]
    assert len(set(proofs)) == len(proofs)
    sealed = ours.seal("word", "text with spaces é").encode()
    assert ours.unseal("word", sealed) == "text with spaces é"
    for wrong in (sealed[:-1], sealed + b"x", b"", b" ", sealed[65:], b"\xff" * 70, theirs.seal("word", "x").encode()):
        assert ours.unseal("word", wrong) is None
    assert ours.unseal("end", sealed) is None


def test_a_launcher_listens_where_other_nodes_reach_it() -> None:
    """Catches a host name that resolves to 127.0.1.1 on its own machine, where no other node reaches the launcher, and
    an address that does not belong to this machine."""
    assert launcher_address("127.0.0.2", ["127.0.0.2", "127.0.0.3"]) == "127.0.0.2"
    assert launcher_address("192.0.2.77", ["192.0.2.77", "192.0.2.78"]) == "192.0.2.77"
    ours = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    for address in ours:
        if not address.startswith("127."):
            assert launcher_address("127.0.1.1", ["127.0.1.1", address]) == address
    with listen(launcher_address("localhost", [])) as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.7"):
        listen("203.0.113.7")
    with pytest.raises(ConfigError, match=r"the node address no-such-node\.invalid does not resolve"):
        launcher_address("127.0.0.1", ["no-such-node.invalid"])


def test_gloo_leaves_the_loopback_only_for_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches gloo on 127.0.1.1 on one of several nodes, an interface forced on nodes whose name needs none, and one
    that does not exist in a rehearsal, whose nodes are loopback addresses."""
    ours = {
        a.address: name for name, found in psutil.net_if_addrs().items() for a in found if a.family == socket.AF_INET
    }
    routed = [address for address in ours if not address.startswith("127.")]
    # The second name resolves, but to no address of this machine: gloo falls back to the loopback.
    for host_name in ("127.0.1.1", "203.0.113.7", "no-such-node.invalid"):
        monkeypatch.setattr(socket, "gethostname", lambda host_name=host_name: host_name)
        assert gloo_interface("127.8.9.1") is None
        for address in routed:
            assert gloo_interface(address) == ours[address]
    for address in routed:
        monkeypatch.setattr(socket, "gethostname", lambda address=address: address)
        assert gloo_interface(address) is None
