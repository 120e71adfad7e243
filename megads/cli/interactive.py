"""Prompts typed at a terminal, or piped in, one a line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from megads.cli.text_stream import stream
from megads.errors import EXIT_OK, ConfigError
from megads.runtime.environment import user_cache_dir

if TYPE_CHECKING:
    from megads.evaluate.completion import TextGenerator

HISTORY_LINES = 1000
_HELP = "Type a text to continue; a backslash at the end goes on in the next line. Ctrl-C stops a text, Ctrl-D leaves."


def converse(generator: TextGenerator, source: TextIO, echo: bool) -> int:
    """Continues every prompt of a source until it ends.

    Args:
        generator: makes the text.
        source: stdin.
        echo: print a prompt in front of its completion, where it does not stand on the terminal already.

    Raises:
        ConfigError: a piped prompt does not fit the model, or there was none. At a terminal the user is told.
    """
    typed = source.isatty()
    number = 0
    for text in _typed() if typed else _joined(source):
        if not text.strip():
            continue
        try:
            with _interrupts() as interrupted:
                stream(generator, generator.prompt(text), number, echo and not typed, interrupted)
        except ConfigError as error:
            if not typed:
                raise
            print(error, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            if not typed:
                raise
            print("stopped", file=sys.stderr, flush=True)
        # Every text has draws of its own: the same prompt again is continued in another way.
        number += 1
    if not number and not typed:
        raise ConfigError("there is no prompt: give prompt='...', prompts, input, or lines on stdin")
    return EXIT_OK


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed since the start of a text, without raising anything; a second one raises.

    An exception in the midst of a token may come up inside of a library that swallows it: seen once in a busy machine's
    tests, and the text went on.
    """
    pressed = Event()

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            signal.default_int_handler(number, frame)
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _joined(lines: TextIO | Iterator[str]) -> Iterator[str]:
    """Yields prompts: a line that ends in a backslash goes on in the next one."""
    begun = ""
    for line in lines:
        text = begun + line.removesuffix("\n")
        begun = ""
        if text.endswith("\\"):
            begun = text[:-1] + "\n"
            continue
        yield text
    if begun:
        yield begun


def _typed() -> Iterator[str]:
    """Yields what the user types, with the history of earlier sessions on the arrow keys."""
    print(_HELP, file=sys.stderr, flush=True)
    history = user_cache_dir() / "generate_history"
    with suppress(ImportError, OSError):  # a Python without readline, or no history yet
        import readline

        readline.set_history_length(HISTORY_LINES)
        readline.read_history_file(history)
    try:
        yield from _joined(_lines())
    finally:
        with suppress(ImportError, OSError):
            import readline

            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


def _lines() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
