"""Transfers images of local checkpoints between processes of a run, with one TCP connection per image.

Both ends authenticate with the secret of this start, and every message except for the image itself is authenticated.
The receiver commits an image as a local checkpoint only after verifying its checksums; if it is killed earlier, the
image does not count.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from megads.api import CheckpointError, Secret
from megads.checkpoint.local_files import LocalCommit, Saved, commit_image, invalidate_image, open_image, verify_image
from megads.checkpoint.rank_file import STRICT, Count, file_name

HANDSHAKE_S = 5.0
"""Timeout of the handshake and of short messages: a stopped process or a stranger does not answer."""
SILENCE_S = 30.0
"""Longest wait for the next bytes of an image."""
_VERIFIED_BYTES_PER_S = 200e6
"""Assumed minimum rate of the receiver's checksums, for the sender's timeout."""
_NONCE_BYTES = _PROOF_BYTES = 32
_MOST_BYTES = 2**28
"""Maximum size of a message."""
_CHUNK_BYTES = 32 * 2**20
Address = tuple[str, int]


class ImageAction(Enum):
    """Action that a client requests: keep an image that it sends, or return one."""

    keep = "keep"
    fetch = "fetch"


@dataclass(frozen=True)
class ImageRequest:
    """First message of a client.

    Attributes:
        action: requested action.
        owner: rank whose state the image holds.
        saved: start and step of the image.
        start: lease number of the client's start.
        base: start and step of the local checkpoint that the client's start continued from; None: none.
        commit: `LocalCommit.encode` of an image to keep.
    """

    __pydantic_config__: ClassVar = STRICT

    action: ImageAction
    owner: Count
    saved: tuple[Count, Count]
    start: Count = 0
    base: tuple[Count, Count] | None = None
    commit: str = ""


@dataclass(frozen=True)
class ImageAnswer:
    """A server's answer to a request, sent again after it has received an image.

    Attributes:
        refusal: why the request is refused; empty if it is accepted.
        complete: whether the server already holds the image as a local checkpoint, so it need not be sent.
        commit: `LocalCommit.encode` of an image that follows.
    """

    __pydantic_config__: ClassVar = STRICT

    refusal: str = ""
    complete: bool = False
    commit: str = ""


class Overtaken(Exception):
    """The image was invalidated while it was sent, because the rank copies a newer state into it."""


class ReplicaConnection:
    """An authenticated connection between two processes of this start.

    Args:
        connected: the connected socket, whose ownership is taken.
        secret: secret of the start.
        server: whether this end accepted the connection.

    Raises:
        CheckpointError: the other end does not know the secret.
        OSError: the other end does not answer.
    """

    def __init__(self, connected: socket.socket, secret: Secret, *, server: bool) -> None:
        self._socket, self._secret = connected, secret
        self._socket.settimeout(HANDSHAKE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own, deadline = secrets.token_bytes(_NONCE_BYTES), time.monotonic() + HANDSHAKE_S
        self._socket.sendall(own)
        other = self._exactly(_NONCE_BYTES, deadline)
        nonces = (own, other) if server else (other, own)
        self._session = (nonces[0] + nonces[1]).hex()
        roles = ("server", "client") if server else ("client", "server")
        # The server sends its proof only after it has verified the client's.
        if not server:
            self._socket.sendall(secret.proof(f"replica {roles[0]}", *nonces))
        shown = self._exactly(_PROOF_BYTES, deadline)
        if not hmac.compare_digest(shown, secret.proof(f"replica {roles[1]}", *nonces)):
            raise CheckpointError("the other end does not know the secret of this start")
        if server:
            self._socket.sendall(secret.proof(f"replica {roles[0]}", *nonces))

    @classmethod
    def to(cls, address: Address, secret: Secret) -> ReplicaConnection:
        """Connects to a server; raises the same errors as the constructor."""
        connected = socket.create_connection(address, timeout=HANDSHAKE_S)
        try:
            return cls(connected, secret, server=False)
        except (OSError, CheckpointError):
            connected.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def say(self, message: ImageRequest | ImageAnswer) -> None:
        """Sends a message."""
        text = TypeAdapter(type(message)).dump_json(message).decode()
        sealed = self._secret.seal(f"replica message {self._session}", text).encode()
        self._socket.sendall(len(sealed).to_bytes(8, "big") + sealed)

    def hear(self, kind: type[Any], within_s: float = HANDSHAKE_S) -> Any:
        """Receives a message of type `kind`.

        Raises:
            CheckpointError: the message has another type, or fails authentication.
            OSError: there is no message in time, or the connection was closed.
        """
        deadline = time.monotonic() + within_s
        length = int.from_bytes(self._exactly(8, deadline), "big")
        if length > _MOST_BYTES:
            raise CheckpointError(f"a message of {length} bytes was announced")
        text = self._secret.unseal(f"replica message {self._session}", self._exactly(length, deadline))
        if text is None:
            raise CheckpointError("a received message failed authentication")
        try:
            return TypeAdapter(kind).validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"a message is not a {kind.__name__}: {error.errors()[0]['msg']}") from None

    def _exactly(self, count: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < count:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._socket.recv(min(count - len(received), 2**20))
            if not part:
                raise ConnectionError("the other end closed the connection")
            received += part
        return bytes(received)

    def send_file(self, path: Path, size: int, is_valid: Callable[[], bool]) -> None:
        """Sends a file in memory with sendfile, without copying it in this process.

        Args:
            path: path of the file.
            size: its size in bytes.
            is_valid: returns whether the file is still unchanged.

        Raises:
            Overtaken: the file has changed.
            OSError: the receiver does not respond, or closed the connection.
        """
        self._socket.settimeout(SILENCE_S)
        with path.open("rb") as file:
            for at in range(0, size, _CHUNK_BYTES):
                if not is_valid():
                    raise Overtaken
                if not self._socket.sendfile(file, at, min(_CHUNK_BYTES, size - at)):
                    raise CheckpointError(f"{path} has less than {size} bytes")

    def receive_into(self, descriptor: int, size: int) -> None:
        """Receives a file's contents directly into its memory, which is allocated in chunks. Raises OSError."""
        self._socket.settimeout(SILENCE_S)
        with mmap.mmap(descriptor, size) as mapped, memoryview(mapped) as view:
            taken = at = 0
            while at < size:
                if at == taken:
                    # Without this, a page that cannot be allocated would kill with SIGBUS.
                    os.posix_fallocate(descriptor, at, min(_CHUNK_BYTES, size - at))
                    taken = min(size, at + _CHUNK_BYTES)
                with view[at:taken] as rest:
                    received = self._socket.recv_into(rest)
                if not received:
                    raise ConnectionError("the other end closed the connection")
                at += received


def offer_image(
    connection: ReplicaConnection, image: Path, request: ImageRequest, is_valid: Callable[[], bool]
) -> None:
    """Sends an image to a replica process; returns once it is a local checkpoint there.

    Args:
        connection: connection to that process.
        image: folder of the committed image.
        request: request to keep the image.
        is_valid: returns whether the image is still committed.

    Raises:
        Overtaken: the image is no longer committed.
        CheckpointError: the receiver refused the image, or received it damaged.
        OSError: the receiver does not respond, or closed the connection.
    """
    connection.say(request)
    answer = connection.hear(ImageAnswer, SILENCE_S)
    if not answer.refusal and not answer.complete:
        size = _size_of(LocalCommit.decode(request.commit.encode()), request.owner)
        connection.send_file(image / file_name(request.owner), size, is_valid)
        answer = connection.hear(ImageAnswer, SILENCE_S + size / _VERIFIED_BYTES_PER_S)
    if answer.refusal:
        if not is_valid():
            raise Overtaken
        raise CheckpointError(answer.refusal)


def receive_image(connection: ReplicaConnection, image: Path, owner: int, commit: LocalCommit) -> None:
    """Receives an image, verifies its checksums and commits it as a local checkpoint.

    Args:
        connection: connection to the sender.
        image: folder for the image; a local checkpoint in it is invalidated.
        owner: rank whose state the image holds.
        commit: commit record of the image.

    Raises:
        CheckpointError: a checksum does not match.
        OSError: the sender does not respond, closed the connection, or there is not enough memory.
    """
    size = _size_of(commit, owner)
    invalidate_image(image)
    descriptor = open_image(image, owner, size)
    try:
        os.ftruncate(descriptor, max(size, 1))
        if size:
            connection.receive_into(descriptor, size)
    finally:
        os.close(descriptor)
    verify_image(image, commit)
    commit_image(image, commit)


def fetch_image(address: Address, secret: Secret, owner: int, saved: Saved, image: Path) -> LocalCommit:
    """Fetches an image from a replica process that holds it.

    Args:
        address: address of that process.
        secret: secret of this start.
        owner: rank whose state the image holds.
        saved: start and step of the image.
        image: folder for the image.

    Raises:
        CheckpointError: the process does not hold the image, or it is damaged.
        OSError: the process does not respond, closed the connection, or there is not enough memory.
    """
    connection = ReplicaConnection.to(address, secret)
    try:
        connection.say(ImageRequest(ImageAction.fetch, owner, saved))
        answer = connection.hear(ImageAnswer, SILENCE_S)
        if answer.refusal:
            raise CheckpointError(answer.refusal)
        commit = decoded(answer.commit)
        if commit.saved != saved:
            raise CheckpointError(f"step {commit.saved[1]} came instead of step {saved[1]}")
        receive_image(connection, image, owner, commit)
        return commit
    finally:
        connection.close()


def decoded(text: str) -> LocalCommit:
    """Parses the commit record in a message; raises CheckpointError if it is invalid."""
    try:
        return LocalCommit.decode(text.encode())
    except ValidationError as error:
        raise CheckpointError(f"the commit record of an image is invalid: {error.errors()[0]['msg']}") from None


def _size_of(commit: LocalCommit, owner: int) -> int:
    """Bytes of an image's file; 0 if the rank holds nothing."""
    files = commit.contents().files
    if set(files) - {file_name(owner)}:
        raise CheckpointError(f"the commit record of an image of rank {owner} lists {', '.join(sorted(files))}")
    return files[file_name(owner)].bytes if files else 0
