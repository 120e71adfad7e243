"""Progress display of a command: one redrawn line on a terminal, erased at the end; occasional lines elsewhere.

It is written to standard error; the plain lines of `megads train` are part of its log on standard output. Other output
passes through `cleared_line`, which erases the line first. A separate thread draws, so that a blocked terminal
(Ctrl-S) does not block the command.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from megads.runtime import environment
from megads.runtime.terminal_text import visible

if TYPE_CHECKING:
    from megads.runtime.rich_console import LiveRegion

DRAWN_AFTER_S = 0.2
"""Shorter phases are not drawn, as they would flicker."""
SAID_AFTER_S = 1.0
"""Shorter phases are not printed if there is no terminal."""
SAID_AGAIN_S = 30.0
_REDRAWN_S = 0.25
_ERASED_WITHIN_S = 1.0


class Progress:
    """Context manager: one phase of a command; a nested phase is shown in place of the outer one.

    Args:
        label: description of the phase.
        total_bytes: size of the whole input; 0 if unknown, for example of a pipe.
        said_after_s: seconds after which a line is printed if there is no terminal; infinite for no line.
    """

    def __init__(self, label: str, total_bytes: int = 0, said_after_s: float | None = None) -> None:
        self.label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._note = ""
        self._start_s = time.monotonic()
        self.said = False
        self.say_at_s = self._start_s + (SAID_AFTER_S if said_after_s is None else said_after_s)

    def update(self, done_bytes: int = 0, note: str = "") -> None:
        """Updates the number of bytes done and a note, such as a count of tokens."""
        self._done_bytes, self._note = done_bytes, note

    def go_on(self, *, anew: bool) -> None:
        """Continues this phase after a nested one has ended.

        Args:
            anew: restart its timer.
        """
        now = time.monotonic()
        self._start_s = now if anew else self._start_s
        self.say_at_s = max(self.say_at_s, now + (SAID_AGAIN_S if self.said else SAID_AFTER_S))

    @property
    def age_s(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self._start_s

    @property
    def title(self) -> str:
        """Label and total size."""
        return f"{self.label}, {self._total_bytes / 1e6:,.1f} MB" if self._total_bytes else self.label

    def __str__(self) -> str:
        done, total, age_s = self._done_bytes, self._total_bytes, self.age_s
        rate = done / max(age_s, 1e-3)
        parts = [self._note]
        if total and 0 < done < total:
            share = f"{100 * done / total:.0f}% of {total / 1e6:,.1f} MB"
            parts = [share, f"{rate / 1e6:,.1f} MB/s", f"{render_duration((total - done) / rate)} left", *parts]
        elif done and not total:
            parts = [f"{done / 1e6:,.1f} MB", f"{rate / 1e6:,.1f} MB/s", *parts]
        elif age_s >= 1:
            parts.append(render_duration(age_s))
        said = ", ".join(filter(None, parts))
        return f"{self.label}: {said}" if said else self.label

    def __enter__(self) -> Self:
        _LINE.push(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LINE.remove(self)


class _Line:
    """Display of this process's innermost phase."""

    def __init__(self) -> None:
        self._reset()
        # A forked child does not have the thread, and the lock may be held in the parent.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._phases: list[Progress] = []
        self._between: Progress | None = None
        self._quiet = False
        self._plain_on_stdout = False
        self._held = 0
        """Number of active `cleared_line` blocks."""
        self._shown = False
        """Whether a line is on the screen, or about to be."""
        self._thread: threading.Thread | None = None

    def push(self, phase: Progress) -> None:
        with self._changed:
            self._phases.append(phase)
            self._wake()

    def remove(self, phase: Progress) -> None:
        with self._changed:
            self._phases.remove(phase)
            outer = self._current
            if outer is not None:
                outer.go_on(anew=outer is self._between)
            self._erased()

    def enter(self, label: str, note: str, said_after_s: float | None) -> None:
        with self._changed:
            if self._between is None or self._between.label != label:
                self._between = Progress(label, said_after_s=said_after_s)
            self._between.update(note=note)
            self._wake()

    def leave(self) -> None:
        with self._changed:
            self._between = None
            self._erased()

    def configure(self, *, quiet: bool, plain_on_stdout: bool) -> None:
        with self._changed:
            self._quiet, self._plain_on_stdout = quiet, plain_on_stdout
            self._erased()

    @contextmanager
    def cleared_line(self) -> Iterator[None]:
        with self._changed:
            self._held += 1
            self._erased()
        try:
            yield
        finally:
            with self._changed:
                self._held -= 1
                self._changed.notify_all()

    @property
    def _kept_away(self) -> bool:
        return bool(self._held) or self._quiet or self._current is None

    @property
    def _current(self) -> Progress | None:
        return self._phases[-1] if self._phases else self._between

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _erased(self) -> None:
        """Waits until the line is erased, if its phase has ended or other output is printed."""
        self._changed.notify_all()
        if threading.current_thread() is self._thread:
            return
        deadline = time.monotonic() + _ERASED_WITHIN_S
        while self._shown and self._kept_away:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._changed.wait(left_s):
                return

    def _run(self) -> None:
        """Target of the thread."""
        region: LiveRegion | None = None
        drawn = ""
        while True:
            with self._changed:
                while self._current is None and not drawn:
                    self._changed.wait()
                phase = None if self._kept_away else self._current
                redrawn = environment.can_redraw(sys.stderr)
                wanted = str(phase) if redrawn and phase is not None and phase.age_s >= DRAWN_AFTER_S else ""
                said = "" if redrawn or phase is None else _due_line(phase)
                self._shown = bool(drawn or wanted)
            if said:
                _write(f"{said}\n", sys.stdout if self._plain_on_stdout else sys.stderr)
            if wanted != drawn:
                if region is None:
                    # Imported late: it imports rich, which is slow.
                    from megads.runtime.rich_console import LiveRegion

                    region = LiveRegion()
                drawn = wanted
                _write(region.one_line(visible(drawn), sys.stderr), sys.stderr)
            with self._changed:
                self._shown = bool(drawn)
                self._changed.notify_all()
                if not (drawn and self._kept_away):
                    self._changed.wait(_REDRAWN_S)


def _due_line(phase: Progress) -> str:
    """Returns the line to print now if there is no terminal; empty if none is due."""
    if time.monotonic() < phase.say_at_s:
        return ""
    line = str(phase) if phase.said or phase.age_s >= SAID_AGAIN_S else phase.title
    phase.said, phase.say_at_s = True, time.monotonic() + SAID_AGAIN_S
    return visible(line)


def _write(text: str, out: TextIO) -> None:
    """Writes to a stream without its buffer, on whose lock an exiting interpreter could block."""
    with suppress(OSError, ValueError):
        try:
            descriptor = out.fileno()
        except (OSError, ValueError):
            out.write(text)
            return
        data = text.encode(out.encoding, errors="replace")
        while data:
            data = data[os.write(descriptor, data) :]


_LINE = _Line()


def enter(label: str, note: str = "", said_after_s: float | None = None) -> None:
    """Shows a phase until another one is entered or `leave` is called.

    Args:
        label: description of the phase; entering the same label again only changes the note.
        note: additional text.
        said_after_s: see `Progress`.
    """
    _LINE.enter(label, note, said_after_s)


def leave() -> None:
    """Ends the phase that `enter` shows."""
    _LINE.leave()


def configure(*, quiet: bool, plain_on_stdout: bool) -> None:
    """Configures the display.

    Args:
        quiet: show nothing.
        plain_on_stdout: print plain lines on standard output instead of standard error.
    """
    _LINE.configure(quiet=quiet, plain_on_stdout=plain_on_stdout)


def cleared_line() -> AbstractContextManager[None]:
    """Context manager that hides the line while the block prints other output."""
    return _LINE.cleared_line()


def render_duration(seconds: float) -> str:
    """Returns a duration as 42s, 3m12s, 2h05m or 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
