"""A small corpus with structure, the same on every machine: integer arithmetic only, no random library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megads.data.indexed.writer import IndexedDatasetWriter

VOCAB_SIZE = 509
NUM_DOCUMENTS = 160


def documents() -> Iterator[list[int]]:
    """Token lists in which the next token depends on the one before and on the document's topic."""
    draw = _draws()
    for number in range(NUM_DOCUMENTS):
        token, topic, tokens = draw(VOCAB_SIZE), number % 7, []
        for _ in range(20 + draw(100)):
            # Three draws out of four stay among a topic's forty tokens, so that some tokens are frequent.
            token = (3 * token + topic) % 40 if draw(4) else draw(VOCAB_SIZE)
            tokens.append(token)
        yield tokens


def write_corpus(prefix: Path) -> Path:
    """Writes the corpus as a dataset without a sidecar, as Megatron's own tools make them; returns the prefix."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for tokens in documents():
            writer.append(tokens)
    return prefix


def _draws() -> Callable[[int], int]:
    """Returns draw(n), an integer below n from a linear congruential generator."""
    state = 20240229

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 1103515245 + 12345) % 2**31
        return (state >> 8) % below

    return draw
