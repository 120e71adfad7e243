"""Completions to stdout as they come, news about them to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megads.evaluate.completion import Prompt, TextGenerator


def stream(
    generator: TextGenerator, prompt: Prompt, number: int, echo: bool, interrupted: Callable[[], bool] = lambda: False
) -> None:
    """Prints one completion as it comes, and then its speed on stderr, also when it is interrupted.

    Raises:
        KeyboardInterrupt: `interrupted`, which is asked after every token, said so.
    """
    from megads.evaluate.completion import Speed

    speed = Speed()
    if echo:
        print(prompt.text, end="", flush=True)
    try:
        for _, text, _ in generator.complete([prompt], [number], speed):
            if text:
                print(text, end="", flush=True)
            if interrupted():
                raise KeyboardInterrupt
    finally:
        print(flush=True)
        say(speed)


def say(message: object) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)
