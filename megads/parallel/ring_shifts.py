"""Which keys and values context-parallel ranks need of each other, and in which order ring attention sends them.

With `parallel.cp_kind=allgather`, layers with a small window exchange just these rows, too, in one all-to-all.

The causal mask balances as for the all-gather: rank i holds chunks i and 2 cp - 1 - i of the 2 cp equal chunks of a
sample. A chunk that no query of the receiver sees is not sent: those after its last query, and with a window those, or
the part of one, that no window reaches. A shift that no rank needs is omitted.

Does not import torch, since the planner uses it, too.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass


def context_chunks(rank: int, size: int) -> tuple[int, int]:
    """Indices of the two chunks of a sample that a context rank holds, in memory order."""
    return rank, 2 * size - 1 - rank


def keys_needed(receiver: int, owner: int, size: int, chunk: int, window: int | None) -> tuple[range, ...]:
    """Positions of the keys of one rank that any query of another one sees, a range for each chunk, in memory order.

    Args:
        receiver: context rank that holds the queries.
        owner: context rank that holds the keys.
        size: number of context ranks.
        chunk: tokens of a chunk.
        window: number of keys that a query sees; None: all up to its own position.
    """
    found = []
    for held in context_chunks(owner, size):
        seeing = [queries for queries in context_chunks(receiver, size) if queries >= held]
        first, end = held * chunk, (held + 1) * chunk
        if seeing and window is not None:
            first = max(first, min(seeing) * chunk - (window - 1))
        if seeing and first < end:
            found.append(range(first, end))
    return tuple(found)


def held_rows(positions: range, rank: int, size: int, chunk: int) -> slice:
    """Indices of consecutive positions of one of a rank's chunks among its tokens.

    Args:
        positions: positions in the sample.
        rank: context rank that holds them.
        size: number of context ranks.
        chunk: tokens of a chunk.
    """
    chunks = context_chunks(rank, size)
    half = chunks.index(positions.start // chunk)
    first = positions.start - chunks[half] * chunk + half * chunk
    return slice(first, first + len(positions))


@functools.lru_cache(maxsize=64)
def most_window_rows(size: int, chunk: int, window: int | None) -> tuple[int, int] | None:
    """The most rows of keys that a rank receives, and that it sends, if only those that windows reach are exchanged.

    Returns:
        The two numbers; None if a rank receives more than half as many rows as by an all-gather, which is then used: it
        has faster algorithms, and sends a row to another node once for all ranks there.

    Args:
        size: number of context ranks.
        chunk: tokens of a chunk.
        window: number of keys that a query sees; None: all up to its own position.
    """
    if window is None:
        return None
    received, sent = [0] * size, [0] * size
    for receiver, owner in itertools.permutations(range(size), 2):
        rows = sum(map(len, keys_needed(receiver, owner, size, chunk, window)))
        received[receiver] += rows
        sent[owner] += rows
    return (max(received), max(sent)) if max(received) <= (size - 1) * chunk else None


@dataclass(frozen=True)
class Shift:
    """One step of the ring, from the perspective of a rank.

    Attributes:
        source: context rank whose keys and values arrive.
        target: context rank to which this rank's own are sent.
        arriving: positions of the keys that arrive, see `keys_needed`.
        leaving: positions of the keys that are sent.
    """

    source: int
    target: int
    arriving: tuple[range, ...]
    leaving: tuple[range, ...]


@functools.lru_cache(maxsize=64)
def ring_shifts(rank: int, size: int, chunk: int, window: int | None) -> tuple[Shift, ...]:
    """The shifts of a layer, in order; those that no rank needs are omitted.

    Args:
        rank: context rank.
        size: number of context ranks.
        chunk: tokens of a chunk.
        window: number of keys that a query sees; None: all up to its own position.
    """
    needed = functools.partial(keys_needed, size=size, chunk=chunk, window=window)
    found = []
    for distance in range(1, size):
        if any(needed(receiver, (receiver - distance) % size) for receiver in range(size)):
            source, target = (rank - distance) % size, (rank + distance) % size
            found.append(Shift(source, target, needed(rank, source), needed(target, rank)))
    return tuple(found)
