"""Writes indexed datasets: one sequence per document, several turns per document, or copied from other datasets.

Only the index is held in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import xxhash

from megads.data.indexed.dataset import CHUNK, DTYPES, HEADER, MAGIC, VERSION, Array, IntArray, bin_path, idx_path
from megads.errors import DataError, reason_of
from megads.runtime.files import sync, sync_directory, temporary_path

_LONGEST_SEQUENCE = np.iinfo(np.int32).max
# Size of the pieces in which tokens are copied.
COPY_BYTES = 1 << 22


class IndexedDatasetWriter:
    """Writes an indexed dataset with one sequence per document; it appears only when complete.

    As a context manager it commits on success and removes its temporary files on failure.

    Args:
        prefix: path without the `.bin` and `.idx` extensions; its folder is created if missing.
        dtype: a token dtype, see `token_dtype`.

    Raises:
        DataError: the folder or the file cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._limits = np.iinfo(self.dtype)
        self._sizes = array("i")
        self._unfinished_tokens = 0
        self.num_tokens = 0
        self._temporary_bin = temporary_path(bin_path(prefix))
        self._temporary_idx = temporary_path(idx_path(prefix))
        try:
            self._temporary_bin.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._temporary_bin.open("wb")
        except OSError as error:
            raise self._write_error(error) from error

    @property
    def num_documents(self) -> int:
        """Number of documents appended so far."""
        return len(self._sizes)

    def append(self, tokens: Sequence[int] | Array, *, continues: bool = False) -> None:
        """Appends one document, or the next part of one.

        Args:
            tokens: [length] token ids; may be empty.
            continues: whether the next call continues the same document.

        Raises:
            DataError: a token does not fit the dtype, the document is longer than 2^31 - 1 tokens, or the disk is full.
        """
        wide: IntArray = np.asarray(tokens, dtype=np.int64)
        if wide.size and (wide.min() < self._limits.min or wide.max() > self._limits.max):
            raise DataError(
                f"{self.prefix}: document {self.num_documents} has tokens from {wide.min()} to {wide.max()}, "
                f"{self.dtype} holds {self._limits.min} to {self._limits.max}; write it with a wider dtype"
            )
        size = self._unfinished_tokens + wide.size
        self._require_short(size)
        try:
            self._file.write(wide.astype(self.dtype).tobytes())
        except OSError as error:
            raise self._write_error(error) from error
        self.num_tokens += int(wide.size)
        self._unfinished_tokens = int(size) if continues else 0
        if not continues:
            self._sizes.append(size)

    def commit(self) -> None:
        """Syncs both files to disk and renames them, `.idx` last, since a dataset exists only with its index.

        Raises:
            DataError: nothing was appended, or the disk is full.
        """
        assert not self._unfinished_tokens, "the last document was never ended"
        if self.num_tokens == 0:
            raise DataError(f"{self.prefix}: no tokens to write; the dataset would be empty")
        try:
            sync(self._file)
            self._file.close()
            with self._temporary_idx.open("wb") as file:
                for piece in self._index_bytes():
                    file.write(piece)
                sync(file)
            # An old index must never be beside the new tokens, not even after a crash between the renames.
            idx_path(self.prefix).unlink(missing_ok=True)
            self._temporary_bin.replace(bin_path(self.prefix))
            self._temporary_idx.replace(idx_path(self.prefix))
            sync_directory(self._temporary_bin.parent)
        except OSError as error:
            raise self._write_error(error) from error

    def abort(self) -> None:
        """Removes the temporary files; an existing dataset stays."""
        # Closing flushes, which may fail again if the disk is full.
        with suppress(OSError):
            self._file.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()

    def _index_bytes(self) -> Iterator[bytes]:
        sizes = np.frombuffer(self._sizes, np.int32)
        count, entries = sizes.size, self.num_documents + 1
        yield HEADER.pack(MAGIC, VERSION, self._code, count, entries)
        yield sizes.astype("<i4").tobytes()
        end = 0
        for begin in range(0, count, CHUNK):
            ends = end + np.cumsum(sizes[begin : begin + CHUNK], dtype=np.int64) * self.dtype.itemsize
            yield np.concatenate(([end], ends[:-1])).astype("<i8").tobytes()
            end = int(ends[-1])
        for begin in range(0, entries, CHUNK):
            yield self._document_index(begin, min(begin + CHUNK, entries)).astype("<i8").tobytes()

    def _document_index(self, begin: int, end: int) -> IntArray:
        """Returns entries begin to end - 1 of the document index: the first sequence of each document."""
        return np.arange(begin, end)

    def _require_short(self, tokens: int) -> None:
        if tokens > _LONGEST_SEQUENCE:
            raise DataError(
                f"{self.prefix}: document {self.num_documents} has {tokens} tokens, the format's limit is 2^31 - 1; "
                "split the document"
            )

    def _write_error(self, error: OSError) -> DataError:
        return DataError(
            f"{self._temporary_bin}: writing failed after {self.num_tokens * self.dtype.itemsize} bytes of tokens: "
            f"{reason_of(error)}; free space or permissions there, or choose another output"
        )


class IndexedDatasetAppender(IndexedDatasetWriter):
    """Writes an indexed dataset from tokens in bytes, many documents at a time.

    Arguments, commit and errors are those of `IndexedDatasetWriter`; do not use `append`.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        super().__init__(prefix, dtype)
        self._digest = xxhash.xxh3_64()
        self._document_ends = array("q")
        self._open = False

    @property
    def num_documents(self) -> int:
        """Number of documents appended so far."""
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
            sizes: [sequences], lengths in tokens.
            tokens: their tokens, in the dataset's dtype, in pieces of any size.
            documents: [documents], for each document the number of sequences up to its end; None makes each sequence a
                document.
            continues: whether the first sequence of the next call continues the last one of this call.

        Raises:
            DataError: a sequence is longer than 2^31 - 1 tokens, or the disk is full.
        """
        if self._open and sizes.size:
            sizes = np.concatenate(([self._take_back() + int(sizes[0])], sizes[1:]))
        self._require_short(sizes.max(initial=0))
        ends = np.arange(1, sizes.size + 1) if documents is None else documents
        self._document_ends.frombytes((len(self._sizes) + ends.astype(np.int64)).tobytes())
        self._sizes.frombytes(sizes.astype(np.int32).tobytes())
        # A call without sequences neither ends nor begins a document.
        self._open = continues if sizes.size else self._open
        try:
            for piece in tokens:
                self._digest.update(piece)
                self.num_tokens += len(piece) // self.dtype.itemsize
                self._file.write(piece)
        except OSError as error:
            raise self._write_error(error) from error

    def _take_back(self) -> int:
        """Removes the last document, which is unfinished, and returns its length."""
        self._document_ends.pop()
        return self._sizes.pop()

    def _document_index(self, begin: int, end: int) -> IntArray:
        ends = np.frombuffer(self._document_ends, np.int64)
        return np.concatenate((np.zeros(int(begin == 0), np.int64), ends[max(0, begin - 1) : end - 1]))


class TurnWriter(IndexedDatasetWriter):
    """Writes a dataset with several sequences per document: prompt, response, prompt and so on."""

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._first_sequences = array("q", [0])
        super().__init__(prefix, dtype)

    def append_turns(self, *turns: Sequence[int] | Array) -> None:
        """Appends one document.

        Args:
            turns: [length] token ids each, alternating between prompts and responses; may be empty.

        Raises:
            DataError: as `append` does.
        """
        for turn in turns:
            self.append(turn)
        self._first_sequences.append(self._first_sequences[-1] + len(turns))

    @property
    def num_documents(self) -> int:
        """Number of documents appended so far."""
        return len(self._first_sequences) - 1

    def _document_index(self, begin: int, end: int) -> IntArray:
        return np.array(self._first_sequences[begin:end], np.int64)


def in_pieces(tokens: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yields memory-mapped tokens in pieces, so that only one is in memory at a time."""
    for begin in range(0, tokens.size, COPY_BYTES // tokens.dtype.itemsize):
        yield tokens[begin : begin + COPY_BYTES // tokens.dtype.itemsize]
