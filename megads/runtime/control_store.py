"""The key-value store at which the agents of a run's nodes meet, and by which they and the launcher talk.

The launcher serves it on a port that is free by construction, so nobody has to guess one; it outlives every rank. Words
travel through it and not through files: a shared file system may show a file to another node seconds later.

Whoever reaches the port can read, write and list its keys: torch's store knows no password. So every word carries a
proof that it comes from this start (megads.runtime.run_secret), and whatever does not is dropped. Names that nobody can
guess keep out those who only guess.

Imports torch: to be imported only by what starts ranks.
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

from megads.runtime.listener import listen
from megads.runtime.run_secret import Secret

_TIMEOUT = timedelta(seconds=300)
_WORDS_AT_ONCE = 1000
_END_KEY, _END = "end", "end this start"
_ENDING_KEY = "ending"
"""Is there once an end is ordered. `look_up` leaves a key behind, so nobody could wait for one that is looked up."""
_WORDS_KEY = "words"
_PLACE_KEY = "place of "
_ABSENT = b"absent"
_LONGEST_WAIT = timedelta(days=20)
"""torch counts the milliseconds in 32 bits. A wait that times out writes two warnings."""
_FORGED_PAUSE_S = 1.0


def serve_store(address: str, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """A store that this process serves, on a free port of one address and not, as torch's own, on all of them.

    Raises:
        ConfigError: it is no address of this machine.
    """
    server = listen(address)
    port, descriptor = server.getsockname()[1], server.detach()
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor)


def reach_store(host: str, port: int, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """A store that another process serves.

    Raises:
        RuntimeError: nobody answers there.
    """
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def look_up(store: Store, key: str) -> bytes | None:
    """The value of a key, None where it is not set; never waits, whoever removes keys meanwhile."""
    found = bytes(store.compare_set(key, _ABSENT.decode(), _ABSENT.decode()))
    return None if found == _ABSENT else found


class ControlStore:
    """One end of the store.

    Args:
        secret: of this start.
        host: address at which the nodes reach the launcher.
        port: where it listens; 0 serves the store in this process, on a free port.

    Raises:
        ConfigError: it is to be served at an address that is not this machine's.
        RuntimeError: nobody answers there.
    """

    def __init__(self, secret: Secret, host: str, port: int = 0):
        self.host = host
        self._secret = secret
        self._store = reach_store(host, port) if port else serve_store(host)
        self.port = int(self._store.port)
        self._words = PrefixStore(secret.name("control"), self._store)
        self._speaker, self._said = secrets.token_hex(8), 0
        self._heard: dict[str, int] = {}
        self._warned = False

    def say(self, word: dict[str, Any]) -> None:
        """Tells the launcher something."""
        self._said += 1
        text = json.dumps([self._speaker, self._said, word])
        # A queue has no numbers in which a stranger could leave a gap.
        self._words.queue_push(_WORDS_KEY, self._secret.seal("word", text))

    def report(self, word: dict[str, Any]) -> None:
        """Tells the launcher something and returns once its store has it.

        Raises:
            RuntimeError: the launcher is gone. `say` may not notice: a socket takes what it is given, though its other
                end was closed a moment ago.
        """
        self.say(word)
        # The store answers in turn.
        self.end_ordered()

    def hear(self) -> list[dict[str, Any]]:
        """Returns what was said since the last call; what was not said by this start's agents is dropped."""
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
            # Whoever reads the store can say a word again.
            if number > self._heard.get(speaker, 0):
                self._heard[speaker] = number
                words.append(word)
        return words

    def assign(self, places: Mapping[str, Any]) -> None:
        """Tells nodes what each of them gets: every agent reads its own part only, however many there are.

        Args:
            places: what JSON can hold, by the name of the node.
        """
        for name, place in places.items():
            key = _PLACE_KEY + name
            self._words.set(key, self._secret.seal(key, json.dumps(place)))
        # Setting does not wait for the server; this answer comes after all of it.
        self.assigned("")

    def assigned(self, name: str) -> Any | None:
        """What the launcher has told a node; None where it has told it nothing."""
        key = _PLACE_KEY + name
        sealed = look_up(self._words, key)
        text = self._secret.unseal(key, sealed) if sealed is not None else None
        return json.loads(text) if text is not None else None

    def order_end(self) -> None:
        """Tells all agents to kill their ranks."""
        self._words.set(_END_KEY, self._secret.seal(_END_KEY, _END))
        self._words.set(_ENDING_KEY, "")

    def end_ordered(self) -> bool:
        """Whether the launcher said so.

        Raises:
            RuntimeError: the launcher is gone.
        """
        order = look_up(self._words, _END_KEY)
        if order is not None and self._secret.unseal(_END_KEY, order) != _END:
            self._warn()
            return False
        return order is not None

    def await_end(self) -> None:
        """Returns when the launcher orders the end. Nothing can be said through this end of the store meanwhile.

        Raises:
            RuntimeError: the launcher is gone.
        """
        while not self.end_ordered():
            try:
                self._words.wait([_ENDING_KEY], _LONGEST_WAIT)
            except DistStoreError:  # the time is over
                continue
            if not self.end_ordered():
                # Forged: the wait would not be one.
                time.sleep(_FORGED_PAUSE_S)

    def _warn(self) -> None:
        """Says it once: a stranger could fill a disk with it."""
        if not self._warned:
            self._warned = True
            logging.getLogger(__name__).warning(
                "somebody who does not belong to this start wrote to its control store (%s port %d): dropped; "
                "docs/slurm.md, Ports and strangers, says how to keep others off",
                self.host,
                self.port,
            )


class EndOrder:
    """Knows at once, and without asking, when the launcher orders the end, or is gone.

    It waits on a connection of its own. Agents that ask ten times a second are 20,000 messages a second from 2,000
    nodes.

    Args:
        control: another end of the store, used by nobody else.
    """

    def __init__(self, control: ControlStore):
        self._control = control
        self._error: RuntimeError | None = None
        self._given = threading.Event()
        threading.Thread(target=self._wait, name="end order", daemon=True).start()

    def given(self) -> bool:
        """Whether the launcher has ordered the end.

        Raises:
            RuntimeError: it is gone.
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
