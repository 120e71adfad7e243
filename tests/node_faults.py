"""Faulty node checkers: `python -m tests.node_faults <fault>` and the arguments of a checker."""

from __future__ import annotations

import os
import signal
import sys

from megads.tools.doctor import node_checker
from megads.tools.doctor.node_check import CheckStore

run_checker = node_checker.run_checker
FAULTY = "/2"
"""Suffix of the faulty node's name: the third checker on a machine."""


def send_wrong_data(board: CheckStore, node: str) -> None:
    """The faulty node sends one wrong element."""
    right = node_checker.known_data

    def wrong(rank: int) -> object:
        data = right(rank)
        data[12345] += 1
        return data

    def exchange(store: object, rank: int, timeout_s: float) -> str:
        # It expects the right data: its memory or network adapter corrupts what it sends.
        node_checker.known_data = lambda of: wrong(of) if of == rank else right(of)  # type: ignore[assignment]
        inner(store, rank, timeout_s)  # type: ignore[arg-type]
        return ""

    inner = node_checker.exchange
    if node.endswith(FAULTY):
        node_checker.exchange = exchange  # type: ignore[assignment]
    run_checker(board, node)


def stop(board: CheckStore, node: str) -> None:
    """The faulty node hangs before its first report, as one whose disk or driver does not respond."""
    if node.endswith(FAULTY):
        os.kill(os.getpid(), signal.SIGSTOP)
    run_checker(board, node)


if __name__ == "__main__":
    node_checker.run_checker = {"send_wrong_data": send_wrong_data, "stop": stop}[sys.argv.pop(1)]
    node_checker.main()
