"""Tests the transfer of checkpoint images between nodes: SIGKILL at any line, changed images, authentication."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megads.checkpoint import local_files as local_files_module
from megads.checkpoint.local_files import committed, node_folder, own_folder, replica_folder, verify_image
from megads.errors import CheckpointError
from megads.runtime.ports import Secret
from megads.tools.remote import replica_process as process_module
from megads.tools.remote import replica_transfer as transfer_module
from megads.tools.remote.replica_process import ReplicaServer, SendOrder, ServeOrder, send_image
from megads.tools.remote.replica_transfer import ImageAction, ImageRequest, ReplicaConnection, fetch_image
from tests.checkpoint.local_runs import memory_of, started

TRACED = tuple(module.__file__ for module in (local_files_module, process_module, transfer_module))
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """Rank 0's images of steps 1 to 3, and the folder of another node."""

    own: tuple[Path, ...]
    other: Path
    secret: Secret

    def order(self, step: int, port: int) -> SendOrder:
        image = next(committed(folder)[1, step][0] for folder in self.own if (1, step) in committed(folder))
        return SendOrder(image, 0, (1, step), 1, None, (LOOPBACK, port))

    def send(self, step: int, port: int) -> None:
        assert send_image(self.order(step, port), self.secret).saved == (1, step)

    @property
    def served(self) -> ServeOrder:
        return ServeOrder(self.other, 0, LOOPBACK, self.secret.encode())

    def kept(self) -> list[int]:
        """Verifies every copy; returns their steps."""
        found = committed(replica_folder(self.other, 0))
        for image, commit in found.values():
            verify_image(image, commit)
        return sorted(step for _, step in found)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Images of steps 1 to 3, each of many chunks."""
    monkeypatch.setattr(transfer_module, "_CHUNK_BYTES", 500)
    own, before = own_folder(node_folder(memory_of(tmp_path, 0), tmp_path), 0), tmp_path / "before"
    with started(tmp_path) as run:
        for step in (1, 2, 3):
            run.step()
            run.wait()
            if step == 2:
                shutil.copytree(own, before)
    return Nodes((before, own), tmp_path / "other_node", Secret.random())


@contextmanager
def killed_at(number: int, armed: Path) -> Iterator[None]:
    """Kills this process before the n-th line of the transfer code, in any thread, counted while `armed` exists."""
    seen = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and armed.exists():
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    threading.settrace(count)
    sys.settrace(count)
    yield


def in_a_process(body: Callable[[], None]) -> int:
    """Runs `body` in a forked process; returns the pid."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


STRIDES = [11, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
def test_a_receiver_killed_at_every_line(stride: int, nodes: Nodes, tmp_path: Path) -> None:
    """Catches a line at which SIGKILL of the receiver loses the older copy, or leaves a torn one."""
    armed, kept = tmp_path / "armed", []
    for number in range(1, 3000, stride):
        armed.unlink(missing_ok=True)
        shutil.rmtree(nodes.other, ignore_errors=True)
        ours, theirs = Pipe()

        def serve(number: int = number, theirs: Any = theirs) -> None:
            with killed_at(number, armed):
                theirs.send(ReplicaServer(nodes.served).port)
                signal.pause()

        pid = in_a_process(serve)
        theirs.close()
        port = ours.recv()
        nodes.send(1, port)
        nodes.send(2, port)
        armed.touch()
        survived = True
        try:
            nodes.send(3, port)
        except OSError:
            survived = False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kept.append(nodes.kept())
        if survived:
            break
    assert kept[-1] == [2, 3] and len(kept) * stride > 100, "not every line was tried"
    assert set(map(tuple, kept)) == {(1, 2), (2,), (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("stride", STRIDES)
def test_a_sender_killed_at_every_line(stride: int, nodes: Nodes, tmp_path: Path) -> None:
    """Catches a line at which SIGKILL of the sender loses the older copy, or makes the receiver hang."""
    server, armed, kept = ReplicaServer(nodes.served), tmp_path / "armed", []
    armed.touch()
    for step in (1, 2):
        nodes.send(step, server.port)
    for number in range(1, 3000, stride):

        def send(number: int = number) -> None:
            with killed_at(number, armed):
                nodes.send(3, server.port)

        status = os.waitpid(in_a_process(send), 0)[1]
        if status == 0:
            break
        kept.append(nodes.kept())
        if kept[-1] == [2, 3]:
            image, _ = committed(replica_folder(nodes.other, 0))[1, 3]
            local_files_module.invalidate_image(image)
    assert len(kept) * stride > 100, "not every line was tried"
    assert set(map(tuple, kept)) <= {(1, 2), (2,), (2, 3)}
    nodes.send(3, server.port)
    assert nodes.kept() == [2, 3]


def test_an_image_that_is_copied_over_is_given_up(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a torn copy when the rank overwrites its image during the transfer, and an error in that case."""
    server = ReplicaServer(nodes.served)
    nodes.send(1, server.port)
    order = nodes.order(2, server.port)
    sent, chunks = socket.socket.sendfile, 0

    def copied_over(*arguments: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            local_files_module.invalidate_image(order.image)
        return sent(*arguments)

    monkeypatch.setattr(socket.socket, "sendfile", copied_over)
    assert send_image(order, nodes.secret).overtaken and chunks == 3
    assert nodes.kept() == [1]


def test_what_changes_on_the_way_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a receiver that skips the checksum: an image may change while the kernel still sends its pages."""
    server = ReplicaServer(nodes.served)
    nodes.send(1, server.port)
    order = nodes.order(2, server.port)
    path = order.image / "rank_00000.safetensors"
    sent, chunks = socket.socket.sendfile, 0

    def changed(*arguments: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return sent(*arguments)

    monkeypatch.setattr(socket.socket, "sendfile", changed)
    with pytest.raises(CheckpointError, match="fails its checksum"):
        send_image(order, nodes.secret)
    assert nodes.kept() == [1]


def test_only_who_knows_the_secret(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process without the secret that fetches or stores an image, or blocks the run's own processes."""
    monkeypatch.setattr(transfer_module, "HANDSHAKE_S", 1.0)
    server = ReplicaServer(nodes.served)
    nodes.send(1, server.port)
    stranger = replace(nodes, secret=Secret.random())
    with pytest.raises((OSError, CheckpointError)):
        stranger.send(2, server.port)
    with pytest.raises((OSError, CheckpointError)):
        fetch_image((LOOPBACK, server.port), stranger.secret, 0, (1, 1), tmp_path)
    with socket.create_connection((LOOPBACK, server.port)) as raw:
        raw.sendall(bytes(64))
        nonce = raw.recv(1000)
        assert len(nonce) == 32 and raw.recv(1000) == b"", "a proof for somebody who has none"
    # A message signed for another connection is refused.
    with closing(ReplicaConnection.to((LOOPBACK, server.port), nodes.secret)) as connection:
        connection._session = "of another connection"
        connection.say(ImageRequest(ImageAction.fetch, 0, (1, 1)))
        assert connection._socket.recv(1) == b""
    assert nodes.kept() == [1]
    silent = [socket.create_connection((LOOPBACK, server.port)) for _ in range(10)]
    nodes.send(2, server.port)
    assert nodes.kept() == [1, 2]
    for connected in silent:
        connected.close()


def test_an_impostor_gets_no_image(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an image sent to a process that took over the port of a dead one."""
    monkeypatch.setattr(transfer_module, "HANDSHAKE_S", 1.0)
    received = bytearray()
    with socket.create_server((LOOPBACK, 0)) as impostor:

        def serve() -> None:
            connected, _ = impostor.accept()
            with connected:
                connected.sendall(bytes(32))
                received.extend(connected.recv(32) + connected.recv(32))
                connected.sendall(bytes(32))
                while part := connected.recv(10_000):
                    received.extend(part)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(CheckpointError, match="does not know the secret"):
            nodes.send(1, impostor.getsockname()[1])
        thread.join()
    assert len(received) <= 64, "a nonce and a proof that serves nobody else"


def test_of_another_rank(nodes: Nodes) -> None:
    """Catches copies of two ranks that overwrite each other in one folder."""
    server = ReplicaServer(replace(nodes.served, keeps=5))
    with pytest.raises(CheckpointError, match="replicas of rank 5 are kept here, not of rank 0"):
        nodes.send(1, server.port)


def test_what_is_not_there_is_not_fetched(nodes: Nodes, tmp_path: Path) -> None:
    """Catches a fetch that returns another step than requested, or stops the server if the step is gone."""
    server = ReplicaServer(nodes.served)
    nodes.send(1, server.port)
    (tmp_path / "image").mkdir()
    with pytest.raises(CheckpointError, match="step 2 of rank 0 no longer exists here"):
        fetch_image((LOOPBACK, server.port), nodes.secret, 0, (1, 2), tmp_path / "image")
    assert fetch_image((LOOPBACK, server.port), nodes.secret, 0, (1, 1), tmp_path / "image").saved == (1, 1)
