"""Joins pieces of indexed datasets by copying bytes: only the index is held in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megads.data.indexed import IndexedDatasetWriter, IntArray
from megads.errors import DataError

LONGEST_SEQUENCE = np.iinfo(np.int32).max
# Tokens are copied in pieces of this size.
COPY_BYTES = 1 << 22


class IndexedDatasetAppender(IndexedDatasetWriter):
    """Writes an indexed dataset from tokens that are bytes already, many documents at a time.

    Arguments, commit and errors are those of `IndexedDatasetWriter`; `append` is not for this one.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        super().__init__(prefix, dtype)
        self._digest = xxhash.xxh3_64()
        self._document_ends = array("q")
        self._open = False

    @property
    def num_documents(self) -> int:
        """Documents appended so far."""
        return len(self._document_ends)

    @property
    def bin_checksum(self) -> str:
        """XXH3 of the tokens appended so far, 16 hex digits."""
        return self._digest.hexdigest()

    def extend(
        self,
        sizes: npt.NDArray[np.int32],
        tokens: Iterable[bytes],
        *,
        documents: IntArray | None = None,
        continues: bool = False,
    ) -> None:
        """Appends consecutive documents.

        Args:
            sizes: [sequences] their lengths in tokens.
            tokens: their tokens, in the dataset's dtype, in pieces of any size.
            documents: [documents] how many of the sequences lie before the end of each; None makes each a document.
            continues: the first sequence of the next call goes on with the last one of this.

        Raises:
            DataError: a sequence is longer than 2^31 - 1 tokens, or the disk is full.
        """
        if self._open and sizes.size:
            sizes = np.concatenate(([self._take_back() + int(sizes[0])], sizes[1:]))
        if sizes.max(initial=0) > LONGEST_SEQUENCE:
            raise DataError(
                f"{self.prefix}: document {self.num_documents} has {sizes.max()} tokens, the format's limit is 2^31 - "
                "1; split the document"
            )
        ends = np.arange(1, sizes.size + 1) if documents is None else documents
        self._document_ends.frombytes((len(self._sizes) + ends.astype(np.int64)).tobytes())
        self._sizes.frombytes(sizes.astype(np.int32).tobytes())
        # A piece without documents neither ends nor begins one.
        self._open = continues if sizes.size else self._open
        try:
            for piece in tokens:
                self._digest.update(piece)
                self.num_tokens += len(piece) // self.dtype.itemsize
                self._file.write(piece)
        except OSError as error:
            raise self._write_error(error) from error

    def _take_back(self) -> int:
        """Takes back the last document, which was not at its end, and returns its length."""
        self._document_ends.pop()
        return self._sizes.pop()

    def _document_index(self, begin: int, end: int) -> IntArray:
        ends = np.frombuffer(self._document_ends, np.int64)
        return np.concatenate((np.zeros(int(begin == 0), np.int64), ends[max(0, begin - 1) : end - 1]))


def in_pieces(tokens: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yields mapped tokens in pieces, so that no more than one is in memory."""
    for begin in range(0, tokens.size, COPY_BYTES // tokens.dtype.itemsize):
        yield tokens[begin : begin + COPY_BYTES // tokens.dtype.itemsize]
