"""Escaping of control characters in terminal output with text from ranks, files and users.

An escape sequence in a message could hide lines, change the window title or send input in the user's place, and a
bidirectional override can disguise a name. Files keep such text unchanged.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

# C0 without tab and newline, DEL and C1, bidirectional controls, line separators, and surrogates, which terminals do
# not accept.
_STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns the text with control characters escaped, as in \\x1b and \\u202e; newlines and tabs are kept."""
    return _STEERING.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class VisibleStream(io.TextIOWrapper):
    """Stream that writes `visible` text to the descriptor of another stream.

    Args:
        stream: the other stream.
        cleared_line: context manager that clears the terminal line for other output.

    Attributes:
        rich_proxied_file: stream to which rich writes directly, as its own codes must reach the terminal
            (`rich_console` escapes the texts between them).
    """

    def __init__(self, stream: TextIO, cleared_line: Callable[[], AbstractContextManager[None]] = nullcontext):
        binary = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115 - it lives as long as the process
        super().__init__(binary, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
        self.rich_proxied_file = stream
        self._cleared_line = cleared_line

    def write(self, text: str) -> int:
        with self._cleared_line():
            super().write(visible(text))
        return len(text)


def escape_terminal_output(cleared_line: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Passes the output of this process through `visible`.

    Standard error is always escaped; standard output only on a terminal, as elsewhere a program reads it.

    Args:
        cleared_line: context manager that clears the terminal line for other output.
    """
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout.flush()
        sys.stdout = VisibleStream(sys.stdout, cleared_line)
    if sys.stderr is not None:
        sys.stderr = VisibleStream(sys.stderr, cleared_line)
