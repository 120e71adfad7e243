"""Whether the arrays of `.idx` fit each other; in pieces, so that memory stays small at a billion documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.data.indexed_header import HEADER, refusal

CHUNK = 1 << 20


def check_offsets(
    path: Path,
    sizes: npt.NDArray[np.integer[Any]],
    offsets: npt.NDArray[np.integer[Any]],
    token_bytes: int,
    bin_bytes: int,
) -> int:
    """Refuses lengths and offsets that do not tile `.bin`; returns the byte at which they end.

    Args:
        path: of `.idx`.
        sizes: [sequences], tokens in each.
        offsets: [sequences], byte of `.bin` at which each starts.
        token_bytes: of one token.
        bin_bytes: of `.bin`, for the message.

    Raises:
        DataError: names the first sequence that is wrong.
    """
    end = 0
    for begin in range(0, sizes.size, CHUNK):
        wide = sizes[begin : begin + CHUNK].astype(np.int64)
        if wide.min() < 0:
            bad = begin + int(np.argmax(wide < 0))
            raise refusal(path, HEADER.size + 4 * bad, f"sequence {bad} has a length of {sizes[bad]} tokens")
        ends = end + np.cumsum(wide) * token_bytes
        expected = np.concatenate(([end], ends[:-1]))
        wrong = offsets[begin : begin + CHUNK] != expected
        if wrong.any():
            bad = begin + int(np.argmax(wrong))
            found = (
                f"sequence {bad} starts at byte {offsets[bad]} of the .bin file, its predecessors end at "
                f"{expected[bad - begin]} and the .bin file has {bin_bytes} bytes"
            )
            raise refusal(path, HEADER.size + 4 * sizes.size + 8 * bad, found)
        end = int(ends[-1])
    return end


def check_document_index(path: Path, index: npt.NDArray[np.integer[Any]], num_sequences: int) -> None:
    """Refuses a document index that does not go from 0 to the number of sequences, never down.

    Args:
        path: of `.idx`.
        index: [documents + 1], first sequence of each document, and the end.
        num_sequences: in the dataset.

    Raises:
        DataError: names the first entry that is wrong.
    """
    base = HEADER.size + 12 * num_sequences
    if index[0] != 0:
        raise refusal(path, base, f"the document index starts at sequence {index[0]}, not 0")
    for begin in range(0, index.size - 1, CHUNK):
        steps = np.diff(index[begin : begin + CHUNK + 1])
        if steps.min() < 0:
            bad = begin + int(np.argmax(steps < 0)) + 1
            raise refusal(path, base + 8 * bad, f"the document index decreases from {index[bad - 1]} to {index[bad]}")
    if index[-1] != num_sequences:
        found = f"the document index ends at sequence {index[-1]}, the dataset has {num_sequences}"
        raise refusal(path, base + 8 * (index.size - 1), found)
