"""The key-value store at which the agents of a run's nodes meet, and by which they and the launcher talk.

The launcher serves it on a port that is free by construction, so nobody has to guess one; it outlives every rank. Words
travel through it and not through files: a shared file system may show a file to another node seconds later.

Imports torch: to be imported only by what starts ranks.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

_TIMEOUT = timedelta(seconds=300)
_END_KEY = "end"
_WORDS_KEY = "words"


class ControlStore:
    """One end of the store.

    Args:
        host: address at which the nodes reach the launcher.
        port: where it listens; 0 serves the store in this process, on a free port.

    Raises:
        RuntimeError: nobody answers there.
    """

    def __init__(self, host: str, port: int = 0):
        self.host = host
        self._store = TCPStore(host, port, is_master=port == 0, timeout=_TIMEOUT, wait_for_workers=False)
        self.port = int(self._store.port)
        self._words = PrefixStore("control", self._store)
        self._heard = 0

    def say(self, word: dict[str, Any]) -> None:
        """Tells the launcher something."""
        number = self._words.add(_WORDS_KEY, 1)
        self._words.set(f"{_WORDS_KEY}/{number}", json.dumps(word))

    def hear(self) -> list[dict[str, Any]]:
        """Returns what was said since the last call."""
        words = []
        while self._words.check([f"{_WORDS_KEY}/{self._heard + 1}"]):
            self._heard += 1
            words.append(json.loads(self._words.get(f"{_WORDS_KEY}/{self._heard}")))
        return words

    def order_end(self) -> None:
        """Tells all agents to kill their ranks."""
        self._words.set(_END_KEY, "1")

    def end_ordered(self) -> bool:
        """Whether the launcher said so.

        Raises:
            RuntimeError: the launcher is gone.
        """
        return bool(self._words.check([_END_KEY]))

    def meeting(self) -> Store:
        """The part in which the elastic agents agree on ranks."""
        return PrefixStore("agents", self._store)


class NumberedNodes(RendezvousHandler):
    """A rendezvous of nodes that know their number, so that neighbouring ranks are on neighbouring nodes.

    Args:
        control: the store; ranks meet at it too.
        node: number of this node.
        num_nodes: all nodes.
    """

    def __init__(self, control: ControlStore, node: int, num_nodes: int):
        self._control, self._node, self._num_nodes = control, node, num_nodes

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "megads"

    def get_run_id(self) -> str:
        return "megads"

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(self._control.host, self._control.port)
        return RendezvousInfo(self._control.meeting(), self._node, self._num_nodes, address)

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: there are no restarts."""

    def shutdown(self) -> bool:
        return True
