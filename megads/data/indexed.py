"""Megatron's indexed dataset, byte for byte: `<prefix>.bin` holds tokens, `<prefix>.idx` says where each document is.

Layout of `.idx`, little-endian: 9 bytes of magic, u64 version, u8 dtype code, u64 N sequences, u64 D = documents + 1,
then int32 [N] lengths in tokens, int64 [N] byte offsets into `.bin`, int64 [D] first sequence of each document and N.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megads.data.content_digest import file_state
from megads.data.indexed_check import check_document_index, check_offsets
from megads.data.indexed_header import DTYPES, HEADER, MAGIC, REMEDY, VERSION, read_header, unpack_header
from megads.data.verified_once import computed_once
from megads.errors import DataError
from megads.ops.data_kernels import DocumentOffsets
from megads.runtime.files import sync, sync_directory, temporary_path

# Checks and writes go over the index in pieces, so that memory stays small at a billion documents.
CHUNK = 1 << 20
LARGE_INDEX_BYTES = 1 << 22
"""A smaller index is read faster than an answer is looked up."""

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns Megatron's choice of token dtype: uint16 for a vocabulary below 65,500, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    """Returns the file of tokens of the dataset at `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Returns the index file of the dataset at `prefix`."""
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """A dataset in Megatron's format, memory-mapped and checked in full when opened, a large one once a node and boot.

    A document is one or more consecutive sequences. Sequences lie in `.bin` without gaps (checked), so any run of
    consecutive documents is one contiguous stream of tokens.

    Args:
        prefix: path without the `.bin` and `.idx` endings.
        holds_the_same: tells whether a file that was written to after it was opened holds what it held; None: nobody
            knows.
        anew: check the index even if a process of this node has done so before.

    Raises:
        DataError: a file is missing, empty or corrupt; the message names file, byte offset, value and remedy.
    """

    def __init__(
        self, prefix: str | Path, holds_the_same: Callable[[Path], bool] | None = None, anew: bool = False
    ) -> None:
        self.prefix = str(prefix)
        self._holds_the_same = holds_the_same
        index, tokens = idx_path(prefix), bin_path(prefix)
        for path in (index, tokens):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file; make the dataset with `megads preprocess input=<files> output={prefix}`"
                )
        self._path = index
        self._state, self._anew = file_state(index), anew
        self._written = {path: _written(path) for path in (index, tokens)}
        self.dtype, self.num_sequences, num_entries = read_header(index)
        self.num_documents = num_entries - 1
        self._token_bytes = self.dtype.itemsize
        raw = _map_bytes(index)
        self.sequence_sizes = np.frombuffer(raw, "<i4", self.num_sequences, HEADER.size)
        self._offsets = np.frombuffer(raw, "<i8", self.num_sequences, HEADER.size + 4 * self.num_sequences)
        self.document_index = np.frombuffer(raw, "<i8", num_entries, HEADER.size + 12 * self.num_sequences)
        self._bin_bytes = tokens.stat().st_size
        end = int(self._once("where the sequences end", self._check_index))
        if end != self._bin_bytes:
            raise DataError(
                f"{tokens}: has {self._bin_bytes} bytes, {index} describes {end}: "
                f"the two files do not belong together or one is truncated; {REMEDY}"
            )
        if end == 0:
            raise DataError(f"{tokens}: holds no tokens; give `megads preprocess` documents with text")
        mapped = _map_bytes(tokens)
        self._maps = {index: raw, tokens: mapped}
        self.all_tokens: Array = np.frombuffer(mapped, self.dtype)
        """[num_tokens], a read-only view of `.bin`."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the dataset."""
        return self.all_tokens.size

    def tokens(self, sequence: int, offset: int = 0, length: int | None = None) -> Array:
        """Returns tokens of one sequence.

        Args:
            sequence: number of the sequence.
            offset: first token wanted.
            length: how many; None is up to the end of the sequence.

        Returns:
            A read-only view [length] of the file in the dataset's dtype.

        Raises:
            IndexError: the sequence has no such tokens.
        """
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} of {self.num_sequences}")
        begin = int(self._offsets[sequence]) // self.dtype.itemsize
        return self._slice(begin, begin + int(self.sequence_sizes[sequence]), offset, length)

    def document_tokens(self, document: int, offset: int = 0, length: int | None = None) -> Array:
        """Returns tokens of one document, all its sequences joined; arguments and errors as in `tokens`."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        return self._slice(self.document_start(document), self.document_start(document + 1), offset, length)

    def stream(self, documents: range) -> Array:
        """Returns the tokens of consecutive documents as one read-only view of the file."""
        assert documents.step == 1
        return self.all_tokens[self.document_start(documents.start) : self.document_start(documents.stop)]

    def document_start(self, document: int) -> int:
        """Returns the position of a document's first token in `.bin`; that of `num_documents` is the end."""
        sequence = self.document_index.item(document)
        return self._offsets.item(sequence) // self._token_bytes if sequence < self.num_sequences else self.num_tokens

    def document_bounds(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        """Returns, int64 [n] each, the positions in `.bin` of the first tokens of n documents and of their ends."""
        index = self.document_index
        return self.sequence_starts(index[documents]), self.sequence_starts(index[documents + 1])

    def document_sizes(self, documents: range) -> IntArray:
        """Returns int64 [len(documents)], tokens in each of consecutive documents."""
        assert documents.step == 1
        return np.diff(self.sequence_starts(self.document_index[documents.start : documents.stop + 1]))

    def sequence_starts(self, sequences: IntArray) -> IntArray:
        """Returns int64 [n], positions in `.bin` of the first tokens of n sequences; `num_sequences` gives the end."""
        starts = self._offsets[np.minimum(sequences, self.num_sequences - 1)] // self.dtype.itemsize
        return np.where(sequences < self.num_sequences, starts, self.num_tokens)

    def addresses(self, first: int) -> DocumentOffsets:
        """Returns where compiled code finds the starts of documents, `first` counting as 0; valid as long as this."""
        return DocumentOffsets(
            self.document_index[first:].ctypes.data,
            self._offsets.ctypes.data,
            self.num_sequences,
            self.num_tokens,
            self.dtype.itemsize,
        )

    def document_of(self, position: int) -> int:
        """Returns the number of the document that holds the token at `position` in `.bin`."""
        return bisect_right(range(self.num_documents), position, key=self.document_start) - 1

    def fingerprint(self) -> str:
        """Returns 16 hex digits that change with the index or the size of `.bin`; it does not read the tokens."""
        return self._once(f"fingerprint with {self._bin_bytes} bytes of tokens", self._hash_index)

    def _hash_index(self) -> str:
        digest = hashlib.sha256(HEADER.pack(*unpack_header(self._path)))
        digest.update(self._bin_bytes.to_bytes(8, "little"))
        for part in (self.sequence_sizes, self.document_index):
            for begin in range(0, part.size, CHUNK):
                digest.update(part[begin : begin + CHUNK].data)
        return digest.hexdigest()[:16]

    def require_whole(self) -> None:
        """Raises DataError where a file is shorter than when it was opened.

        What a mapped file has lost reads as zeros up to the end of a page, and kills the process by SIGBUS beyond it.
        """
        for path, mapped in self._maps.items():
            if (found := mapped.size()) < len(mapped):
                raise DataError(
                    f"{path}: has {found} bytes, {len(mapped)} when it was opened: it was truncated while it was read; "
                    "put the file back and start again"
                )

    def require_unwritten(self) -> None:
        """Raises DataError where something has written to a file since it was opened, or it is no longer whole.

        A file of another inode is no matter: what is mapped is the one that was opened. Nor is one that still holds the
        same: files on scratch disks are touched, lest they be purged.
        """
        for path, before in self._written.items():
            now = _written(path)
            if before is None or now is None or now[0] != before[0]:
                self.require_whole()
                continue
            # One look at a file tells both, unless its name stands for another one now.
            if now[2] < len(self._maps[path]):
                self.require_whole()
            if now[1] != before[1]:
                if self._holds_the_same is not None and self._holds_the_same(path):
                    self._written[path] = now
                    logging.getLogger(__name__).warning("%s was written to or touched, and holds the same", path)
                    continue
                raise DataError(
                    f"{path}: something wrote to it after this run had opened it: hold it to its checksums with "
                    f"`megads dataset check input={self.prefix}`, put it back if it is damaged, and start again"
                )

    def _slice(self, begin: int, end: int, offset: int, length: int | None) -> Array:
        wanted = end - begin - offset if length is None else length
        if offset < 0 or wanted < 0 or begin + offset + wanted > end:
            raise IndexError(f"tokens [{offset}, {offset + wanted}) of {end - begin}")
        return self.all_tokens[begin + offset : begin + offset + wanted]

    def _once(self, claim: str, compute: Callable[[], str]) -> str:
        """What follows from the index: computed once a node where that takes long and the file is the one opened."""
        if self._anew or self._state[0] < LARGE_INDEX_BYTES or file_state(self._path) != self._state:
            return compute()
        return computed_once([self._path], claim, compute)

    def _check_index(self) -> str:
        end = check_offsets(self._path, self.sequence_sizes, self._offsets, self.dtype.itemsize, self._bin_bytes)
        check_document_index(self._path, self.document_index, self.num_sequences)
        return str(end)


def _written(path: Path) -> tuple[int, int, int] | None:
    """Inode, time of the last write in ns, and size; None where there is no such file any more."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _map_bytes(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class IndexedDatasetWriter:
    """Writes an indexed dataset of one sequence a document; it appears complete or not at all.

    As a context manager it commits on success and removes its temporaries on failure.

    Args:
        prefix: path without the `.bin` and `.idx` endings; its folder is made where missing.
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
        """Documents appended so far."""
        return len(self._sizes)

    def append(self, tokens: Sequence[int] | Array, *, continues: bool = False) -> None:
        """Appends one document, or what is next of one.

        Args:
            tokens: [length] token ids; may be empty.
            continues: the next call goes on with the same document.

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
        if size > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}: document {self.num_documents} has {size} tokens, the format's limit is 2^31 - 1; "
                "split the document"
            )
        try:
            self._file.write(wide.astype(self.dtype).tobytes())
        except OSError as error:
            raise self._write_error(error) from error
        self.num_tokens += int(wide.size)
        self._unfinished_tokens = int(size) if continues else 0
        if not continues:
            self._sizes.append(size)

    def commit(self) -> None:
        """Puts both files on disk and gives them their names, `.idx` last: without it there is no dataset.

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
            # An old index must never be seen beside the new tokens, not even after a crash between the renames.
            idx_path(self.prefix).unlink(missing_ok=True)
            self._temporary_bin.replace(bin_path(self.prefix))
            self._temporary_idx.replace(idx_path(self.prefix))
            sync_directory(self._temporary_bin.parent)
        except OSError as error:
            raise self._write_error(error) from error

    def abort(self) -> None:
        """Removes the temporaries; a dataset that was there before stays."""
        # Closing flushes, and fails once more on the full disk that brought us here.
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
        """Entries begin to end - 1: the first sequence of each document."""
        return np.arange(begin, end)

    def _write_error(self, error: OSError) -> DataError:
        return DataError(
            f"{self._temporary_bin}: writing failed after {self.num_tokens * self.dtype.itemsize} bytes of tokens: "
            f"{error.strerror}; free space or permissions there, or choose another output"
        )
