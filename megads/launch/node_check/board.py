"""The key-value store by which a check's coordinator and the checkers on the nodes talk.

The coordinator serves it; nodes only ever wait for it with a limit, so that none hangs when the check is over. Values
carry a proof that they come from this check: whoever reaches the port can write to the store.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megads.runtime.control_store import look_up, reach_store, serve_store
from megads.runtime.run_secret import Secret

_POLL_S = 0.01


class Board:
    """One end of the store.

    Args:
        secret: of this check.
        host: address of the coordinator.
        port: where it listens; 0 serves the store in this process, on a free port.
        timeout_s: for reaching it.

    Raises:
        ConfigError: it is to be served at an address that is not this machine's.
        RuntimeError: nobody answers there.
    """

    def __init__(self, secret: Secret, host: str, port: int = 0, timeout_s: float = 60.0):
        limit = timedelta(seconds=timeout_s)
        store = reach_store(host, port, limit) if port else serve_store(host, limit)
        self.port = int(store.port)
        self._secret, self._store = secret, PrefixStore(secret.name("board"), store)

    def put(self, key: str, value: Any) -> None:
        """Sets a key to what JSON can hold."""
        self._store.set(key, self._secret.seal(f"board {key}", json.dumps(value)))

    def get(self, key: str) -> Any | None:
        """Returns the value of a key, None where it is not set yet, or by somebody who is not part of the check."""
        sealed = look_up(self._store, key)
        text = self._secret.unseal(f"board {key}", sealed) if sealed is not None else None
        return json.loads(text) if text is not None else None

    def wait(self, key: str, timeout_s: float) -> Any | None:
        """Waits for a key; returns None when the time is over."""
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return value

    def part(self, name: str) -> Store:
        """A store of its own, for a pair to meet at."""
        return PrefixStore(name, self._store)
