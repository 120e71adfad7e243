"""Sends images of local checkpoints between processes of a run, over a TCP connection for each.

Both ends prove that they know the secret of this start, and every message but the image itself carries a proof. The
receiver makes a local checkpoint of an image only once its checksums hold; killed earlier it leaves none.
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

from megads.checkpoint.local_files import LocalCommit, Saved, commit_image, invalidate_image, verify_image
from megads.checkpoint.rank_file import STRICT, Count, file_name
from megads.errors import CheckpointError
from megads.runtime.run_secret import Secret

HANDSHAKE_S = 5.0
"""For a peer to answer: one that is stopped, or a stranger, does not."""
SILENCE_S = 30.0
"""Longest wait for the next bytes of an image."""
_VERIFIED_BYTES_PER_S = 200e6
"""At least: how long a sender waits for the receiver's checksums."""
_NONCE_BYTES = _PROOF_BYTES = 32
_MOST_BYTES = 2**28
"""Of a message."""
_CHUNK_BYTES = 32 * 2**20
Address = tuple[str, int]


class ImageAction(Enum):
    """What a caller wants: to leave an image, or to get one."""

    keep = "keep"
    fetch = "fetch"


@dataclass(frozen=True)
class ImageRequest:
    """First message of a caller.

    Attributes:
        action: what it wants.
        owner: rank whose state the image holds.
        saved: start and step of the image.
        start: that the caller belongs to.
        base: local checkpoint that its start continued from.
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
    """What a server says to a request, and once more after it received an image.

    Attributes:
        refusal: why not; empty where it does.
        complete: the image is a local checkpoint here: nothing is to be sent.
        commit: `LocalCommit.encode` of an image that follows.
    """

    __pydantic_config__: ClassVar = STRICT

    refusal: str = ""
    complete: bool = False
    commit: str = ""


class Overtaken(Exception):
    """The image that was being sent is no local checkpoint any more: the rank copies a newer state into it."""


class ReplicaConnection:
    """A connection whose two ends belong to this start.

    Args:
        connected: the socket, which this takes over.
        secret: of the start.
        server: whether this end accepted it.

    Raises:
        CheckpointError: the other end does not know the secret.
        OSError: it does not answer.
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
        # The server shows its proof to nobody who has not shown one.
        if not server:
            self._socket.sendall(secret.proof(f"replica {roles[0]}", *nonces))
        shown = self._exactly(_PROOF_BYTES, deadline)
        if not hmac.compare_digest(shown, secret.proof(f"replica {roles[1]}", *nonces)):
            raise CheckpointError("the other end does not know the secret of this start")
        if server:
            self._socket.sendall(secret.proof(f"replica {roles[0]}", *nonces))

    @classmethod
    def to(cls, address: Address, secret: Secret) -> ReplicaConnection:
        """Connects to a server; raises as above."""
        connected = socket.create_connection(address, timeout=HANDSHAKE_S)
        try:
            return cls(connected, secret, server=False)
        except (OSError, CheckpointError):
            connected.close()
            raise

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def say(self, message: ImageRequest | ImageAnswer) -> None:
        """Sends a message."""
        text = TypeAdapter(type(message)).dump_json(message).decode()
        sealed = self._secret.seal(f"replica message {self._session}", text).encode()
        self._socket.sendall(len(sealed).to_bytes(8, "big") + sealed)

    def hear(self, kind: type[Any], within_s: float = HANDSHAKE_S) -> Any:
        """Receives a message of a type.

        Raises:
            CheckpointError: it is another one, or not of this connection.
            OSError: there is none.
        """
        deadline = time.monotonic() + within_s
        length = int.from_bytes(self._exactly(8, deadline), "big")
        if length > _MOST_BYTES:
            raise CheckpointError(f"a message of {length} bytes was announced")
        text = self._secret.unseal(f"replica message {self._session}", self._exactly(length, deadline))
        if text is None:
            raise CheckpointError("a message came that was not made by the other end")
        try:
            return TypeAdapter(kind).validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"a message is no {kind.__name__}: {error.errors()[0]['msg']}") from None

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
        """Sends a file, from memory to the network without a copy of this process.

        Args:
            path: of the file.
            size: of it.
            is_valid: whether it still is what it was.

        Raises:
            Overtaken: it is not.
            OSError: nobody receives it.
        """
        self._socket.settimeout(SILENCE_S)
        with path.open("rb") as file:
            for at in range(0, size, _CHUNK_BYTES):
                if not is_valid():
                    raise Overtaken
                if not self._socket.sendfile(file, at, min(_CHUNK_BYTES, size - at)):
                    raise CheckpointError(f"{path} has less than {size} bytes")

    def receive_into(self, descriptor: int, size: int) -> None:
        """Receives the contents of a file straight into its memory, which is taken as they come. Raises OSError."""
        self._socket.settimeout(SILENCE_S)
        with mmap.mmap(descriptor, size) as mapped, memoryview(mapped) as view:
            taken = at = 0
            while at < size:
                if at == taken:
                    # A page that cannot be had would kill with SIGBUS.
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
    """Brings an image to a process that keeps a copy of it; returns once that is a local checkpoint there.

    Args:
        connection: to that process.
        image: folder of the image, which is committed.
        request: to keep it.
        is_valid: whether it still is.

    Raises:
        Overtaken: it is no more.
        CheckpointError: the other end refuses it, or what came there is damaged.
        OSError: the other end is silent or gone.
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
    """Receives an image, and makes a local checkpoint of it if its checksums hold.

    Args:
        connection: from which it comes.
        image: folder for it; what it held before is no local checkpoint any more.
        owner: rank whose state it is.
        commit: of the image.

    Raises:
        CheckpointError: a checksum does not hold.
        OSError: the other end is silent or gone, or there is no memory for it.
    """
    size = _size_of(commit, owner)
    invalidate_image(image)
    path = image / file_name(owner)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size != max(size, 1):
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, max(size, 1))
        if size:
            connection.receive_into(descriptor, size)
    finally:
        os.close(descriptor)
    verify_image(image, commit)
    commit_image(image, commit)


def fetch_image(address: Address, secret: Secret, owner: int, saved: Saved, image: Path) -> LocalCommit:
    """Fetches an image from a process that holds it.

    Args:
        address: of that process.
        secret: of this start.
        owner: rank whose state it is.
        saved: start and step of it.
        image: folder for it.

    Raises:
        CheckpointError: it is not there, or damaged.
        OSError: the other end is silent or gone, or there is no memory for it.
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
    """Reads a commit that came in a message; raises CheckpointError where it is none."""
    try:
        return LocalCommit.decode(text.encode())
    except ValidationError as error:
        raise CheckpointError(f"what should say what an image holds does not: {error.errors()[0]['msg']}") from None


def _size_of(commit: LocalCommit, owner: int) -> int:
    """Bytes of an image's file; 0 where the rank holds nothing."""
    files = commit.contents().files
    if set(files) - {file_name(owner)}:
        raise CheckpointError(f"an image of rank {owner} would hold {', '.join(sorted(files))}")
    return files[file_name(owner)].bytes if files else 0
