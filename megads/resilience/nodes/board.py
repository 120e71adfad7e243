"""The key-value store by which a check's coordinator and the checkers on the nodes talk.

The coordinator serves it; nodes only ever wait for it with a limit, so that none hangs when the check is over.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

_POLL_S = 0.01


class Board:
    """One end of the store.

    Args:
        host: address of the coordinator.
        port: where it listens; 0 serves the store in this process, on a free port.
        timeout_s: for reaching it.

    Raises:
        RuntimeError: nobody answers there.
    """

    def __init__(self, host: str, port: int = 0, timeout_s: float = 60.0):
        limit = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, port, is_master=port == 0, timeout=limit, wait_for_workers=False)
        self.port = int(self._store.port)

    def put(self, key: str, value: Any) -> None:
        """Sets a key to what JSON can hold."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any | None:
        """Returns the value of a key, None where it is not set yet."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait(self, key: str, timeout_s: float) -> Any | None:
        """Waits for a key; returns None when the time is over."""
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return value

    def part(self, name: str) -> Store:
        """A store of its own, for a pair to meet at."""
        return PrefixStore(name, self._store)
