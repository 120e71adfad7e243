"""The replica process of a rank: sends the rank's images to another node, keeps replicas of a rank there, serves both.

It is a child process of the rank as its writer is, and runs at low priority. A replacement for a process that
died is a new interpreter: by then the rank has threads and perhaps a CUDA context, with which it cannot be forked.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from megads.api import CheckpointError, ConfigError, Secret, allocate, listen
from megads.checkpoint.local_files import (
    IMAGES,
    Saved,
    committed,
    held_folders,
    image_to_replace,
    open_folder,
    open_image,
    read_commit,
    replica_folder,
)
from megads.checkpoint.store import failure_of
from megads.checkpoint.writer import ChildProcess, run_child
from megads.tools.remote.replica_transfer import (
    SILENCE_S,
    Address,
    ImageAction,
    ImageAnswer,
    ImageRequest,
    Overtaken,
    ReplicaConnection,
    decoded,
    offer_image,
    receive_image,
)

_PRIORITY = 10
_STRANGERS = 16
"""Maximum number of connections that have not authenticated yet."""


@dataclass(frozen=True)
class ServeOrder:
    """Order to listen for connections; answered by a `ReplicaOutcome` with the port.

    Attributes:
        node: folder of the run in this node's memory.
        keeps: rank on another node whose replicas the process keeps.
        host: address of this node to listen on.
        secret: `Secret.encode` of this start.
    """

    node: Path
    keeps: int
    host: str
    secret: str


@dataclass(frozen=True)
class AllocateOrder:
    """Order to allocate memory for the replicas that the process keeps; answered by a `ReplicaOutcome`.

    Attributes:
        size: bytes of one image.
    """

    size: int


@dataclass(frozen=True)
class SendOrder:
    """Order to send a committed image; answered by a `ReplicaOutcome`.

    Attributes:
        image: folder of the image.
        owner: rank whose state the image holds.
        saved: start and step of the image.
        start: lease number of the rank's start.
        base: start and step of the local checkpoint that the start continued from; None: none.
        to: address of the replica process that keeps the image.
    """

    image: Path
    owner: int
    saved: Saved
    start: int
    base: Saved | None
    to: Address


@dataclass(frozen=True)
class ReplicaOutcome:
    """Outcome of an order.

    Attributes:
        reason: why it failed; empty if it succeeded.
        overtaken: whether a newer state replaced the image before it was sent.
        port: port on which the process listens.
        saved: start and step of the image that was sent.
    """

    reason: str = ""
    overtaken: bool = False
    port: int = 0
    saved: Saved | None = None


class ReplicaServer:
    """Receives and serves images, with one thread per connection.

    Args:
        order: folder, address and secret to use.

    Raises:
        OSError: the folder cannot be locked.
        ConfigError: the process cannot listen on the address.
    """

    def __init__(self, order: ServeOrder) -> None:
        self._order, self._secret = order, Secret.decode(order.secret)
        self._folder = replica_folder(order.node, order.keeps)
        self._lock = open_folder(self._folder)
        self._socket = listen(order.host)
        self.port: int = self._socket.getsockname()[1]
        self._keeping, self._strangers = threading.Lock(), threading.Semaphore(_STRANGERS)
        threading.Thread(target=self._accept, daemon=True).start()

    def allocate(self, size: int) -> None:
        """Allocates memory for two images; an existing image of that size is kept. Raises OSError."""
        for name in IMAGES:
            descriptor = open_image(self._folder / name, self._order.keeps, size)
            try:
                allocate(descriptor, size)
            finally:
                os.close(descriptor)

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            connected, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with closing(connected), suppress(OSError):
            try:
                connection = ReplicaConnection(connected, self._secret, server=True)
            except CheckpointError:
                logging.getLogger(__name__).warning(
                    "refused a connection to port %d from a process that does not belong to this start; see "
                    "docs/slurm.md, Ports and strangers",
                    self.port,
                )
                return
            finally:
                self._strangers.release()
            with suppress(CheckpointError):  # an invalid request
                request = connection.hear(ImageRequest)
                (self._keep if request.action is ImageAction.keep else self._hand_out)(connection, request)

    def _keep(self, connection: ReplicaConnection, request: ImageRequest) -> None:
        refusal = ""
        if request.owner != self._order.keeps:
            refusal = f"replicas of rank {self._order.keeps} are kept here, not of rank {request.owner}"
        # A previous connection, which its sender has given up, may still be open for a moment.
        elif not self._keeping.acquire(timeout=SILENCE_S / 2):
            refusal = "another image is being received"
        if refusal:
            connection.say(ImageAnswer(refusal))
            return
        try:
            commit = decoded(request.commit)
            there = committed(self._folder).get(commit.saved)
            if there is not None and there[1] == commit:
                connection.say(ImageAnswer(complete=True))
                return
            image = image_to_replace(self._folder, request.start, request.base)
            connection.say(ImageAnswer())
            receive_image(connection, image, request.owner, commit)
            connection.say(ImageAnswer(complete=True))
        except (CheckpointError, OSError) as error:
            connection.say(ImageAnswer(f"the image is not a valid local checkpoint: {failure_of(error)[0]}"))
        finally:
            self._keeping.release()

    def _hand_out(self, connection: ReplicaConnection, request: ImageRequest) -> None:
        for folder, owner in held_folders(self._order.node).items():
            if owner == request.owner and request.saved in (found := committed(folder)):
                image, commit = found[request.saved]
                connection.say(ImageAnswer(commit=commit.encode().decode()))
                for name, record in commit.contents().files.items():
                    connection.send_file(image / name, record.bytes, lambda: True)
                return
        connection.say(ImageAnswer(f"step {request.saved[1]} of rank {request.owner} no longer exists here"))


class ReplicaProcess(ChildProcess):
    """The rank's handle of its replica process. Every order in its pipe is answered by a `ReplicaOutcome`."""

    def __init__(self, *, fork: bool) -> None:
        """Starts the process.

        Args:
            fork: fork this process, which must not have threads yet; else start a new interpreter, which takes seconds.

        Raises:
            OSError: the process cannot be started.
        """
        self._new: subprocess.Popen[bytes] | None = None
        if fork:
            super().__init__(carry_out_orders)
            return
        self._status = None
        self.connection, theirs = Pipe()
        command = f"from {__name__} import main; main({os.getpid()})"
        try:
            # In the rank's process group, so that killing the group kills this process, too.
            self._new = subprocess.Popen([sys.executable, "-c", command], stdin=theirs.fileno())
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.pid = self._new.pid

    def _has_ended(self) -> bool:
        if self._new is None:
            return super()._has_ended()
        self._status = self._new.poll()
        return self._status is not None


def main(parent: int) -> NoReturn:
    """Entry point of a new interpreter, which receives orders on standard input; `parent` is the pid of the rank."""
    run_child(parent, Connection(os.dup(0)), carry_out_orders)


def carry_out_orders(connection: Connection) -> None:
    """Carries out orders until the rank ends."""
    # After the imports of a new interpreter: at low priority they would take a minute on a fully loaded node.
    os.nice(_PRIORITY)
    server: ReplicaServer | None = None
    secret = Secret.random()
    while True:
        order = connection.recv()
        try:
            if isinstance(order, ServeOrder):
                secret, server = Secret.decode(order.secret), ReplicaServer(order)
                connection.send(ReplicaOutcome(port=server.port))
            elif isinstance(order, AllocateOrder):
                assert server is not None
                server.allocate(order.size)
                connection.send(ReplicaOutcome())
            else:
                connection.send(send_image(order, secret))
        except (CheckpointError, ConfigError, OSError) as error:
            connection.send(ReplicaOutcome(failure_of(error)[0]))


def send_image(order: SendOrder, secret: Secret) -> ReplicaOutcome:
    """Sends a committed image.

    Args:
        order: the image and its destination.
        secret: secret of this start.

    Raises:
        CheckpointError: the receiver refused the image, or received it damaged.
        OSError: the receiver does not respond, or closed the connection.
    """
    expected = read_commit(order.image)
    if expected is None or expected.saved != order.saved:
        return ReplicaOutcome(overtaken=True)
    request = ImageRequest(
        ImageAction.keep, order.owner, order.saved, order.start, order.base, expected.encode().decode()
    )
    with closing(ReplicaConnection.to(order.to, secret)) as connection:
        try:
            offer_image(connection, order.image, request, lambda: read_commit(order.image) == expected)
        except Overtaken:
            return ReplicaOutcome(overtaken=True)
    return ReplicaOutcome(saved=order.saved)
