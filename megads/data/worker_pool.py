"""Runs one function over a stream of items in several processes, with bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

from megads.errors import UnhealthyNode
from megads.runtime.environment import tokenize_on_one_thread

Item = TypeVar("Item")
Result = TypeVar("Result")
# Items that wait for each worker: enough to keep it busy, few enough for memory.
AHEAD = 2


class _Worker:
    """What a worker process keeps between items."""

    make: Callable[[], Callable[[int, Any], Any]]
    function: Callable[[int, Any], Any] | None = None


def map_in_processes(
    make: Callable[[], Callable[[int, Item], Result]], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Calls a function with the number and the value of every item, in fresh processes.

    Processes are spawned, not forked: threads of this process, such as torch's, are never copied in mid-work. They end
    with this process, however it ends.

    Args:
        make: called once in each process; returns the function. It must be picklable, and so must items and results.
        items: taken from the iterator only as fast as workers finish.
        workers: processes.

    Yields:
        Results in the order in which they are finished.

    Raises:
        UnhealthyNode: a process died.
        MegadsError: as the function raised it.
    """
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(make,))
    running: set[Future[Result]] = set()
    try:
        for number, item in enumerate(items):
            running.add(executor.submit(_call, number, item))
            if len(running) >= AHEAD * workers:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    except BrokenProcessPool as error:
        raise UnhealthyNode(
            f"one of {workers} tokenizing processes died, killed perhaps for want of memory: finished parts are kept, "
            "give the same command again, with fewer workers if memory is short"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _start(make: Callable[[], Callable[[int, Any], Any]]) -> None:
    # The terminal sends Ctrl-C to all its processes; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenize_on_one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.make = make


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _call(number: int, item: Any) -> Any:
    # Made here, not at the start: what it raises reaches the parent only from a call.
    if _Worker.function is None:
        _Worker.function = _Worker.make()
    return _Worker.function(number, item)
