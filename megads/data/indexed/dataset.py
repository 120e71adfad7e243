"""Megatron's indexed dataset, byte for byte: `<prefix>.bin` holds tokens, `<prefix>.idx` says where each document is.

Layout of `.idx`, little-endian: 9 bytes of magic, u64 version, u8 dtype code, u64 N sequences, u64 D = documents + 1,
then int32 [N] lengths in tokens, int64 [N] byte offsets into `.bin`, int64 [D] first sequence of each document and N.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import struct
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megads.data.indexed.verified_once import computed_once, file_state
from megads.errors import DataError
from megads.ops.data_kernels import DocumentOffsets

MAGIC = b"MMIDIDX\x00\x00"
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
_REMEDY = "copy the pair of files again, or make it anew with `megads preprocess`"
# The index is checked and written in chunks, to bound memory for a billion documents.
CHUNK = 1 << 20
LARGE_INDEX_BYTES = 1 << 22
"""Smaller indexes are checked every time, because that is faster than looking up an earlier result."""
Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]


class Tokens(Protocol):
    """The tokens of a dataset: an array [size], or an object that is sliced like one."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Array: ...


class RemoteTokens(Tokens, Protocol):
    """Tokens in remote storage; slicing waits until they are fetched."""

    @property
    def num_bytes(self) -> int: ...

    def read_bytes(self, begin: int, end: int) -> npt.NDArray[np.uint8]: ...

    def fetch_ahead(self, starts: IntArray, ends: IntArray) -> int: ...

    def fetch(self, starts: IntArray, ends: IntArray) -> None: ...


def _refusal(path: Path, byte: int, found: str, remedy: str = _REMEDY) -> DataError:
    """Returns the error for a damaged file, with the byte offset of the damage."""
    return DataError(f"{path}: byte {byte}: {found}; {remedy}")


def _unpack_header(path: Path) -> tuple[bytes, int, int, int, int]:
    """Returns magic, version, dtype code, number of sequences and length of the document index."""
    with path.open("rb") as file:
        magic, version, code, num_sequences, num_entries = HEADER.unpack(file.read(HEADER.size))
    return magic, version, code, num_sequences, num_entries


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Returns token dtype, number of sequences and length of the document index; raises DataError on an invalid
    header."""
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    file_bytes = path.stat().st_size
    if start.startswith(_LEGACY_MAGIC):
        raise _refusal(
            path,
            0,
            f"magic {start!r} is Megatron's legacy format (`lazy` and `cached` datasets)",
            "convert it: read it with the legacy reader of an old Megatron-LM and add its documents to an `mmap` "
            "builder, or make it anew from the raw text with `megads preprocess`",
        )
    if len(start) == len(MAGIC) and start != MAGIC:
        raise _refusal(path, 0, f"magic {start!r}, want {MAGIC!r}: not an indexed dataset", "check data.train path")
    if file_bytes < HEADER.size:
        raise _refusal(path, file_bytes, f"the file ends inside its header of {HEADER.size} bytes")
    _, version, code, num_sequences, num_entries = _unpack_header(path)
    if version != VERSION:
        raise _refusal(path, 9, f"version {version}, only {VERSION} is known")
    if code in (6, 7):
        raise _refusal(
            path,
            17,
            f"dtype code {code}: codes 6 and 7 are float64 and float32 in Megatron-LM and swapped in GPT-NeoX, "
            "and tokens are never floats",
            "make the dataset anew with `megads preprocess`",
        )
    if code not in DTYPES:
        raise _refusal(path, 17, f"dtype code {code} is unknown, want one of {sorted(DTYPES)}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if num_sequences and expected + num_sequences == file_bytes:
        raise _refusal(
            path,
            expected,
            f"a byte for each of the {num_sequences} sequences follows the document index: these are the modes of "
            "Megatron's multimodal datasets, and megads trains on text only",
            "write its sequences of text to a dataset without modes: read them with Megatron's IndexedDataset("
            "multimodal=True), and write them with its IndexedDatasetBuilder(multimodal=False)",
        )
    if expected != file_bytes:
        state = "truncated" if file_bytes < expected else "longer than that"
        found = (
            f"{num_sequences} sequences and {num_entries} document index entries take {expected} bytes, "
            f"the file has {file_bytes}: it is {state} or the counts are wrong"
        )
        raise _refusal(path, 18, found)
    if num_sequences == 0 or num_entries < 2:
        found = f"{num_sequences} sequences in {max(num_entries - 1, 0)} documents: the dataset is empty"
        raise _refusal(path, 18, found, "give `megads preprocess` documents with text")
    return DTYPES[code], num_sequences, num_entries


def _check_offsets(
    path: Path,
    sizes: npt.NDArray[np.integer[Any]],
    offsets: npt.NDArray[np.integer[Any]],
    token_bytes: int,
    bin_bytes: int,
) -> int:
    """Checks that lengths and offsets tile `.bin`; returns the byte at which the last sequence ends.

    Args:
        path: the `.idx` file.
        sizes: [sequences], length of each sequence in tokens.
        offsets: [sequences], byte offset of each sequence in `.bin`.
        token_bytes: bytes per token.
        bin_bytes: size of `.bin`, for the message.

    Raises:
        DataError: a sequence is wrong; the message names the first one.
    """
    end = 0
    for begin in range(0, sizes.size, CHUNK):
        wide = sizes[begin : begin + CHUNK].astype(np.int64)
        if wide.min() < 0:
            bad = begin + int(np.argmax(wide < 0))
            raise _refusal(path, HEADER.size + 4 * bad, f"sequence {bad} has a length of {sizes[bad]} tokens")
        ends = end + np.cumsum(wide) * token_bytes
        expected = np.concatenate(([end], ends[:-1]))
        wrong = offsets[begin : begin + CHUNK] != expected
        if wrong.any():
            bad = begin + int(np.argmax(wrong))
            found = (
                f"sequence {bad} starts at byte {offsets[bad]} of the .bin file, its predecessors end at "
                f"{expected[bad - begin]} and the .bin file has {bin_bytes} bytes"
            )
            raise _refusal(path, HEADER.size + 4 * sizes.size + 8 * bad, found)
        end = int(ends[-1])
    return end


def _check_document_index(path: Path, index: npt.NDArray[np.integer[Any]], num_sequences: int) -> None:
    """Checks that the document index rises from 0 to the number of sequences and never decreases.

    Args:
        path: the `.idx` file.
        index: [documents + 1], first sequence of each document, and the end.
        num_sequences: number of sequences in the dataset.

    Raises:
        DataError: an entry is wrong; the message names the first one.
    """
    base = HEADER.size + 12 * num_sequences
    if index[0] != 0:
        raise _refusal(path, base, f"the document index starts at sequence {index[0]}, not 0")
    for begin in range(0, index.size - 1, CHUNK):
        steps = np.diff(index[begin : begin + CHUNK + 1])
        if steps.min() < 0:
            bad = begin + int(np.argmax(steps < 0)) + 1
            raise _refusal(path, base + 8 * bad, f"the document index decreases from {index[bad - 1]} to {index[bad]}")
    if index[-1] != num_sequences:
        found = f"the document index ends at sequence {index[-1]}, the dataset has {num_sequences}"
        raise _refusal(path, base + 8 * (index.size - 1), found)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns Megatron's choice of token dtype: uint16 for a vocabulary below 65,500, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    """Returns the token file of the dataset at `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Returns the index file of the dataset at `prefix`."""
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """A memory-mapped dataset in Megatron's format. It is checked when opened; a large index once per node and boot.

    A document is one or more consecutive sequences. Sequences lie in `.bin` without gaps (checked), so any range of
    consecutive documents is one contiguous stream of tokens.

    Args:
        prefix: path without the `.bin` and `.idx` extensions.
        holds_the_same: returns whether a file that was written to after it was opened still has the same content; None
            if that cannot be determined.
        anew: check the index even if a process of this node has done so before.
        name: name for messages; None is the prefix.
        open_tokens: opens the tokens with a given dtype if `.bin` is not beside `.idx`; None if it is.

    Raises:
        DataError: a file is missing, empty or corrupt; the message names file, byte offset, value and remedy.
    """

    def __init__(
        self,
        prefix: str | Path,
        holds_the_same: Callable[[Path], bool] | None = None,
        anew: bool = False,
        name: str | None = None,
        open_tokens: Callable[[np.dtype[Any]], RemoteTokens] | None = None,
    ) -> None:
        self.prefix = str(prefix)
        self.name = name if name is not None else self.prefix
        self._holds_the_same = holds_the_same
        index, tokens = idx_path(prefix), bin_path(prefix)
        files = (index,) if open_tokens is not None else (index, tokens)
        for path in files:
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file; make the dataset with `megads preprocess input=<files> output={prefix}`, "
                    "or name an existing one: data.train='[{path: <prefix>}]'"
                )
        self._path = index
        self._state, self._anew = file_state(index), anew
        self._written = {path: _written(path) for path in files}
        self.dtype, self.num_sequences, num_entries = _read_header(index)
        self.num_documents = num_entries - 1
        self._token_bytes = self.dtype.itemsize
        raw = _map_bytes(index)
        self.sequence_sizes = np.frombuffer(raw, "<i4", self.num_sequences, HEADER.size)
        self._offsets = np.frombuffer(raw, "<i8", self.num_sequences, HEADER.size + 4 * self.num_sequences)
        self.document_index = np.frombuffer(raw, "<i8", num_entries, HEADER.size + 12 * self.num_sequences)
        self._remote = None if open_tokens is None else open_tokens(self.dtype)
        self._bin_bytes = tokens.stat().st_size if self._remote is None else self._remote.num_bytes
        end = int(self._once("where the sequences end", self._check_index))
        if end != self._bin_bytes:
            raise DataError(
                f"{self.name}.bin: has {self._bin_bytes} bytes, {index} describes {end}: "
                f"the two files do not belong together or one is truncated; {_REMEDY}"
            )
        if end == 0:
            raise DataError(f"{self.name}.bin: holds no tokens; give `megads preprocess` documents with text")
        self._maps = {index: raw}
        self.all_tokens: Tokens
        """[num_tokens], the content of `.bin`: a read-only view of the file, unless it is remote."""
        if self._remote is not None:
            self.all_tokens = self._remote
        else:
            self._maps[tokens] = _map_bytes(tokens)
            self.all_tokens = np.frombuffer(self._maps[tokens], self.dtype)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the dataset."""
        return self.all_tokens.size

    def tokens(self, sequence: int, offset: int = 0, length: int | None = None) -> Array:
        """Returns tokens of one sequence.

        Args:
            sequence: index of the sequence.
            offset: first token.
            length: number of tokens; None is up to the end of the sequence.

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
        """Returns tokens of one document, its sequences concatenated; arguments and errors as in `tokens`."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        return self._slice(self.document_start(document), self.document_start(document + 1), offset, length)

    def stream(self, documents: range) -> Array:
        """Returns the tokens of consecutive documents as one read-only view of the file; remote tokens are copied."""
        assert documents.step == 1
        return self.all_tokens[self.document_start(documents.start) : self.document_start(documents.stop)]

    def num_tokens_of(self, documents: range) -> int:
        """Returns the total number of tokens of consecutive documents."""
        assert documents.step == 1
        return max(self.document_start(documents.stop) - self.document_start(documents.start), 0)

    def fetch_ahead(self, starts: IntArray, ends: IntArray) -> int:
        """Starts fetching tokens that will be read soon.

        Args:
            starts: int64 [n], positions in `.bin` of the first tokens of n spans.
            ends: int64 [n], positions of their ends, exclusive.

        Returns:
            Bytes that they take in this node's cache; 0 for a local dataset.
        """
        return 0 if self._remote is None else self._remote.fetch_ahead(starts, ends)

    def fetch(self, starts: IntArray, ends: IntArray) -> None:
        """Waits until tokens are on this machine; arguments as in `fetch_ahead`.

        Raises:
            DataError: they cannot be read.
        """
        if self._remote is not None:
            self._remote.fetch(starts, ends)

    @property
    def is_remote(self) -> bool:
        """Whether its tokens are in remote storage."""
        return self._remote is not None

    def bin_bytes(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Returns bytes of `.bin`, uint8 [end - begin]; a view of the file if it is local."""
        if self._remote is not None:
            return self._remote.read_bytes(begin, end)
        return np.frombuffer(self._maps[bin_path(self.prefix)], np.uint8, end - begin, begin)

    def document_start(self, document: int) -> int:
        """Returns the position in `.bin` of a document's first token; for `num_documents` the end."""
        sequence = self.document_index.item(document)
        return self._offsets.item(sequence) // self._token_bytes if sequence < self.num_sequences else self.num_tokens

    def document_bounds(self, documents: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the positions in `.bin` of the first tokens of n documents and of their ends, int64 [n] each."""
        index = self.document_index
        return self.sequence_starts(index[documents]), self.sequence_starts(index[documents + 1])

    def document_sizes(self, documents: range) -> IntArray:
        """Returns int64 [len(documents)], the number of tokens in each of consecutive documents."""
        assert documents.step == 1
        return np.diff(self.sequence_starts(self.document_index[documents.start : documents.stop + 1]))

    def sequence_starts(self, sequences: IntArray) -> IntArray:
        """Returns int64 [n], positions in `.bin` of the first tokens of n sequences; `num_sequences` gives the end."""
        starts = self._offsets[np.minimum(sequences, self.num_sequences - 1)] // self.dtype.itemsize
        return np.where(sequences < self.num_sequences, starts, self.num_tokens)

    def addresses(self, first: int) -> DocumentOffsets:
        """Returns the addresses of document starts for compiled code, from document `first` on; valid while this
        lives."""
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
        digest = hashlib.sha256(HEADER.pack(*_unpack_header(self._path)))
        digest.update(self._bin_bytes.to_bytes(8, "little"))
        for part in (self.sequence_sizes, self.document_index):
            for begin in range(0, part.size, CHUNK):
                digest.update(part[begin : begin + CHUNK].data)
        return digest.hexdigest()[:16]

    def require_whole(self) -> None:
        """Raises DataError if a file is shorter than when it was opened.

        The missing part of a mapped file reads as zeros up to the end of a page, and raises SIGBUS beyond it.
        """
        for path, mapped in self._maps.items():
            if (found := mapped.size()) < len(mapped):
                raise DataError(
                    f"{path}: has {found} bytes, {len(mapped)} when it was opened: it was truncated while it was read; "
                    "put the file back and start again"
                )

    def require_unwritten(self) -> None:
        """Raises DataError if a file was written to or truncated since it was opened.

        A file that was replaced by one with another inode is ignored, since the old one stays mapped. So is a file with
        unchanged content: files on scratch disks are touched to avoid their deletion.
        """
        for path, before in self._written.items():
            now = _written(path)
            if before is None or now is None or now[0] != before[0]:
                self.require_whole()
                continue
            # One stat call gives size and times, unless the path refers to another file now.
            if now[2] < len(self._maps[path]):
                self.require_whole()
            if now[1] != before[1]:
                if self._holds_the_same is not None and self._holds_the_same(path):
                    self._written[path] = now
                    logging.getLogger(__name__).warning("%s was written to or touched, content unchanged", path)
                    continue
                raise DataError(
                    f"{path}: something wrote to it after this run had opened it: compare it with its checksums with "
                    f"`megads dataset check input={self.prefix}`, put it back if it is damaged, and start again"
                )

    def _slice(self, begin: int, end: int, offset: int, length: int | None) -> Array:
        wanted = end - begin - offset if length is None else length
        if offset < 0 or wanted < 0 or begin + offset + wanted > end:
            raise IndexError(f"tokens [{offset}, {offset + wanted}) of {end - begin}")
        return self.all_tokens[begin + offset : begin + offset + wanted]

    def _once(self, claim: str, compute: Callable[[], str]) -> str:
        """Computes a result from the index, once per node if the index is large and still the one that was opened."""
        if self._anew or self._state[0] < LARGE_INDEX_BYTES or file_state(self._path) != self._state:
            return compute()
        return computed_once([self._path], claim, compute)

    def _check_index(self) -> str:
        end = _check_offsets(self._path, self.sequence_sizes, self._offsets, self.dtype.itemsize, self._bin_bytes)
        _check_document_index(self._path, self.document_index, self.num_sequences)
        return str(end)


def _written(path: Path) -> tuple[int, int, int] | None:
    """Inode, modification time in ns, and size; None if the file no longer exists."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _map_bytes(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
