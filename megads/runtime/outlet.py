"""Writes to a terminal, pipe or file from a thread of its own, so that a slow or closed one never holds up a run."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TextIO

_BACKLOG_CHARACTERS = 2**20
_DRAIN_S = 2.0


class Outlet:
    """Takes text at once and writes it when the other end accepts it.

    A reader that stops reading (Ctrl-S, a stalled connection) costs lines beyond a backlog of 1 MiB, and one that goes
    away costs all later ones; neither is an error. A stream without a file descriptor is written to directly.

    Args:
        out: where text goes; nobody else may write to it until `close`.
    """

    def __init__(self, out: TextIO):
        self._out = out
        self._encoding = out.encoding or "utf-8"
        self._descriptor = _descriptor(out)
        self._texts: deque[str] = deque()
        self._backlog = 0
        self._dropped_texts = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """True when everything has been written: who draws frames draws the next one only now."""
        return self._backlog == 0

    @property
    def unicode(self) -> bool:
        """True when the stream can hold any character."""
        return self._encoding.lower().replace("-", "").startswith("utf")

    def write(self, text: str) -> None:
        """Takes a text; returns at once."""
        if self._descriptor is None:
            self._out.write(text)
            self._out.flush()
            return
        with self._changed:
            if self._backlog + len(text) > _BACKLOG_CHARACTERS:
                self._dropped_texts += 1
                return
            if self._dropped_texts:
                text = f"[{self._dropped_texts} lines not shown: the terminal did not take them]\n{text}"
                self._dropped_texts = 0
            self._backlog += len(text)
            self._texts.append(text)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for what is left, two seconds at most; what is written later is written the same way."""
        if self._descriptor is None:
            return
        deadline = time.monotonic() + _DRAIN_S
        with self._changed:
            while self._backlog and self._changed.wait(max(0.0, deadline - time.monotonic())):
                continue

    def _run(self) -> None:
        """Body of the thread."""
        while True:
            with self._changed:
                while not self._texts:
                    self._changed.wait()
                text = "".join(self._texts)
                self._texts.clear()
            try:
                self._write_all(text.encode(self._encoding, errors="replace"))
            except OSError:
                self._give_up()
            with self._changed:
                self._backlog -= len(text)
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> None:
        assert self._descriptor is not None
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])

    def _give_up(self) -> None:
        """Goes on without a reader: a closed pipe or a lost connection must not end the training.

        The descriptor is replaced, so that Python's own flush at exit does not fail and change the exit code.
        """
        assert self._descriptor is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._descriptor)
        os.close(nowhere)


def _descriptor(out: TextIO) -> int | None:
    """The stream's file descriptor, its own buffer written; None where it has none."""
    try:
        descriptor = out.fileno()
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        out.flush()
    return descriptor
