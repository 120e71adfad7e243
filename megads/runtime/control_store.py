"""Key-value store for rendezvous of a run's node agents and for their messages to and from the launcher.

The launcher serves it on a free port that the system assigns; it outlives every rank. Messages use the store and not
files, because a shared file system may show a new file to another node seconds later.

PyTorch's store has no authentication: whoever reaches the port can read, write and list its keys. So every message is
authenticated with the secret of this start (`megads.runtime.ports`), and others are dropped. Key prefixes are
derived from the secret, so they cannot be guessed.

Imports torch: to be imported only by code that starts ranks.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    QueueEmptyError,
    Store,
    TCPStore,
)

from megads.runtime.ports import Secret, listen

_TIMEOUT = timedelta(seconds=300)
_WORDS_AT_ONCE = 1000
_END_KEY, _END = "end", "end this start"
_ENDING_KEY = "ending"
"""Set once an end is ordered. A separate key, as `get_if_set` creates the key it reads, which ends a wait for it."""
_WORDS_KEY = "words"
_PLACE_KEY = "place of "
_ABSENT = b"absent"
_LONGEST_WAIT = timedelta(days=20)
"""PyTorch stores timeouts as milliseconds in 32 bits. A wait that times out logs two warnings."""
_FORGED_PAUSE_S = 1.0


def start_store(address: str, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Serves a store on a free port of one address, unlike PyTorch's default, which listens on all addresses.

    Raises:
        ConfigError: the address is not one of this machine.
    """
    server = listen(address)
    port, descriptor = server.getsockname()[1], server.detach()
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor)


def connect_store(host: str, port: int, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Connects to a store that another process serves.

    Raises:
        RuntimeError: the server does not answer.
    """
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def get_if_set(store: Store, key: str) -> bytes | None:
    """Returns the value of a key, or None if it is not set; never blocks, even if keys are removed concurrently."""
    found = bytes(store.compare_set(key, _ABSENT.decode(), _ABSENT.decode()))
    return None if found == _ABSENT else found


class ControlStore:
    """Authenticated message channel between launcher and agents; one instance per process or connection.

    Args:
        secret: secret of this start.
        host: address at which the nodes reach the launcher.
        port: port of the store; 0 serves the store in this process, on a free port.

    Raises:
        ConfigError: the store is to be served at an address that is not one of this machine.
        RuntimeError: the server does not answer.
    """

    def __init__(self, secret: Secret, host: str, port: int = 0):
        self.host = host
        self._secret = secret
        self._store = connect_store(host, port) if port else start_store(host)
        self.port = int(self._store.port)
        self._words = PrefixStore(secret.name("control"), self._store)
        self._speaker, self._said = secrets.token_hex(8), 0
        self._heard: dict[str, int] = {}
        self._warned = False

    def send(self, word: dict[str, Any]) -> None:
        """Sends a message to the launcher."""
        self._said += 1
        text = json.dumps([self._speaker, self._said, word])
        # A queue, because numbered keys could be blocked by a gap that an attacker leaves.
        self._words.queue_push(_WORDS_KEY, self._secret.seal("word", text))

    def report(self, word: dict[str, Any]) -> None:
        """Sends a message to the launcher and waits until its store has received it.

        Raises:
            RuntimeError: the launcher is gone. `send` may not notice, as a socket accepts data after its peer has
                closed it.
        """
        self.send(word)
        # The store processes requests in order, so its answer confirms the message.
        self.end_ordered()

    def hear(self) -> list[dict[str, Any]]:
        """Returns the messages since the last call; messages that are not from this start are dropped."""
        words = []
        for _ in range(min(self._words.queue_len(_WORDS_KEY), _WORDS_AT_ONCE)):
            try:
                text = self._secret.unseal("word", self._words.queue_pop(_WORDS_KEY, block=False))
            except QueueEmptyError:
                self._warn()
                break
            if text is None:
                self._warn()
                continue
            speaker, number, word = json.loads(text)
            # Drops replayed messages.
            if number > self._heard.get(speaker, 0):
                self._heard[speaker] = number
                words.append(word)
        return words

    def assign(self, places: Mapping[str, Any]) -> None:
        """Publishes one value per node; each agent reads only its own.

        Args:
            places: JSON-serializable values by node name.
        """
        for name, place in places.items():
            key = _PLACE_KEY + name
            self._words.set(key, self._secret.seal(key, json.dumps(place)))
        # set() does not wait for the server; this lookup is answered after all of them.
        self.assigned("")

    def assigned(self, name: str) -> Any | None:
        """Returns the value that the launcher has assigned to a node; None if there is none."""
        key = _PLACE_KEY + name
        sealed = get_if_set(self._words, key)
        text = self._secret.unseal(key, sealed) if sealed is not None else None
        return json.loads(text) if text is not None else None

    def order_end(self) -> None:
        """Orders all agents to kill their ranks."""
        self._words.set(_END_KEY, self._secret.seal(_END_KEY, _END))
        self._words.set(_ENDING_KEY, "")

    def end_ordered(self) -> bool:
        """Whether the launcher has ordered the end.

        Raises:
            RuntimeError: the launcher is gone.
        """
        order = get_if_set(self._words, _END_KEY)
        if order is not None and self._secret.unseal(_END_KEY, order) != _END:
            self._warn()
            return False
        return order is not None

    def await_end(self) -> None:
        """Blocks until the launcher orders the end; this instance cannot be used otherwise meanwhile.

        Raises:
            RuntimeError: the launcher is gone.
        """
        while not self.end_ordered():
            try:
                self._words.wait([_ENDING_KEY], _LONGEST_WAIT)
            except DistStoreError:  # timeout
                continue
            if not self.end_ordered():
                # The key is forged, so the wait returns immediately.
                time.sleep(_FORGED_PAUSE_S)

    def _warn(self) -> None:
        """Warns once, so that an attacker cannot fill the disk with warnings."""
        if not self._warned:
            self._warned = True
            logging.getLogger(__name__).warning(
                "a process that does not belong to this start wrote to its control store (%s port %d): dropped; "
                "docs/slurm.md, Ports and strangers, says how to keep others off",
                self.host,
                self.port,
            )


class EndOrder:
    """Waits in a thread until the launcher orders the end or is gone, without polling.

    It uses its own connection. If agents polled ten times a second, 2,000 nodes would send 20,000 requests a second.

    Args:
        control: another instance, used by nothing else.
    """

    def __init__(self, control: ControlStore):
        self._control = control
        self._error: RuntimeError | None = None
        self._given = threading.Event()
        threading.Thread(target=self._wait, name="end order", daemon=True).start()

    def given(self) -> bool:
        """Whether the launcher has ordered the end.

        Raises:
            RuntimeError: the launcher is gone.
        """
        if self._error is not None:
            raise self._error
        return self._given.is_set()

    def _wait(self) -> None:
        try:
            self._control.await_end()
            self._given.set()
        except RuntimeError as error:
            self._error = error
