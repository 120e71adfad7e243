"""Looks into indexed datasets: documents as text, lengths, and whether all bytes are what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megads.data.carried_tokenizer import find_tokenizer
from megads.data.indexed import IndexedDataset, IntArray, bin_path, idx_path
from megads.data.indexed_append import in_pieces
from megads.data.progress import ByteProgress
from megads.data.sidecar import file_checksum, read_sidecar, sidecar_path
from megads.data.tokenizer import tokenizing
from megads.errors import ConfigError, DataError

# Lengths are counted one by one up to here, longer documents together: 8 MB, however many documents there are.
_LONGEST_COUNTED = 1 << 20
_DOCUMENTS = 1 << 20


@dataclass(frozen=True)
class InspectedDocument:
    """One document as text.

    Attributes:
        number: in the dataset.
        tokens: how many it has, its end included.
        text: its beginning, special tokens spelt out.
        cut: there is more of it.
    """

    number: int
    tokens: int
    text: str
    cut: bool


def inspect(
    prefix: str, first: int, count: int, max_characters: int, tokenizer: str | None
) -> Iterator[InspectedDocument]:
    """Yields consecutive documents, decoded.

    Args:
        prefix: the dataset.
        first: number of the first document.
        count: how many; fewer where the dataset ends.
        max_characters: of each.
        tokenizer: file to decode with; None is the one beside the dataset.

    Raises:
        ConfigError: the dataset has no such document.
        DataError: the dataset is damaged, or there is no tokenizer for it.
    """
    dataset = IndexedDataset(prefix)
    if first >= dataset.num_documents:
        raise ConfigError(f"first = {first}: {prefix} has {dataset.num_documents} documents, the last is number "
                          f"{dataset.num_documents - 1}")  # fmt: skip
    found = find_tokenizer([Path(prefix)], tokenizer)
    for number in range(first, min(first + count, dataset.num_documents)):
        tokens = dataset.document_tokens(number)
        # A character takes four tokens at most, of one byte each.
        shown = tokens[: 4 * max_characters].tolist()
        with tokenizing(found.path):
            text = found.tokenizer.decode(shown, skip_special_tokens=False)
        cut = len(shown) < tokens.size or len(text) > max_characters
        yield InspectedDocument(number, tokens.size, text[:max_characters], cut)


@dataclass(frozen=True)
class LengthStatistics:
    """Counts of one dataset.

    Attributes:
        prefix: the dataset.
        dtype: of its tokens.
        documents: how many.
        sequences: how many; more where documents consist of several.
        tokens: how many.
        shortest: tokens in the shortest document.
        longest: tokens in the longest.
        percentiles: tokens below which so many percent of documents lie; those above 2^20 tokens count as 2^20.
        histogram: int64 [32], documents of 0 tokens, 1, 2 to 3, 4 to 7, ... 2^(i-1) to 2^i - 1.
    """

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    shortest: int
    longest: int
    percentiles: dict[int, int]
    histogram: IntArray


def length_statistics(prefix: str) -> LengthStatistics:
    """Counts a dataset's documents by length, in constant memory and without reading tokens.

    Raises:
        DataError: the dataset is damaged.
    """
    dataset = IndexedDataset(prefix)
    counts = np.zeros(_LONGEST_COUNTED + 1, np.int64)
    histogram = np.zeros(33, np.int64)
    shortest, longest = 1 << 62, 0
    for begin in range(0, dataset.num_documents, _DOCUMENTS):
        sizes = dataset.document_sizes(range(begin, min(begin + _DOCUMENTS, dataset.num_documents)))
        shortest, longest = min(shortest, int(sizes.min())), max(longest, int(sizes.max()))
        counts += np.bincount(np.minimum(sizes, _LONGEST_COUNTED), minlength=counts.size)
        # The exponent of the next power of two: exact for whole numbers up to 2^53.
        histogram += np.bincount(np.frexp(sizes)[1], minlength=histogram.size)
    ends = np.cumsum(counts)
    wanted = {share: int(np.searchsorted(ends, share / 100 * dataset.num_documents)) for share in (5, 25, 50, 75, 95)}
    return LengthStatistics(
        prefix, str(dataset.dtype), dataset.num_documents, dataset.num_sequences, dataset.num_tokens,
        shortest, longest, wanted, histogram,
    )  # fmt: skip


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset that is what was written, as far as can be told.

    Attributes:
        prefix: the dataset.
        documents: how many.
        tokens: how many.
        empty_documents: documents without a token.
        checksums_held: the sidecar records checksums, and they are right; False: it records none.
        bin_checksum: XXH3 of .bin.
        idx_checksum: XXH3 of .idx.
    """

    prefix: str
    documents: int
    tokens: int
    empty_documents: int
    checksums_held: bool
    bin_checksum: str
    idx_checksum: str


def check(prefix: str) -> CheckedDataset:
    """Reads every byte of a dataset and holds it to its index and its sidecar.

    Raises:
        DataError: something does not fit; the message says what, and where.
    """
    dataset = IndexedDataset(prefix, anew=True)
    sidecar = read_sidecar(prefix)
    digest, vocab_size = xxhash.xxh3_64(), sidecar.vocab_size if sidecar else None
    done = 0
    with ByteProgress("checking", dataset.num_tokens * dataset.dtype.itemsize) as progress:
        for piece in in_pieces(dataset.stream(range(dataset.num_documents))):
            digest.update(piece.tobytes())
            _check_ids(dataset, piece.astype(np.int64), done, vocab_size)
            done += piece.size
            progress.update(done * dataset.dtype.itemsize)
    index_checksum = file_checksum(idx_path(prefix))
    if sidecar is not None:
        for path, found, recorded in (
            (bin_path(prefix), digest.hexdigest(), sidecar.bin_checksum),
            (idx_path(prefix), index_checksum, sidecar.idx_checksum),
        ):
            if recorded is not None and recorded != found:
                raise DataError(
                    f"{path}: its XXH3 is {found}, {sidecar_path(prefix)} records {recorded}: the file is not what was "
                    "written; copy the dataset again or make it anew"
                )
        if (sidecar.documents, sidecar.tokens) != (dataset.num_documents, dataset.num_tokens):
            raise DataError(
                f"{sidecar_path(prefix)}: describes {sidecar.documents} documents of {sidecar.tokens} tokens, the "
                f"dataset has {dataset.num_documents} of {dataset.num_tokens}; copy the dataset again"
            )
    empty = length_statistics(prefix).histogram[0]
    held = sidecar is not None and sidecar.bin_checksum is not None
    return CheckedDataset(
        prefix, dataset.num_documents, dataset.num_tokens, int(empty), held, digest.hexdigest(), index_checksum
    )


def _check_ids(dataset: IndexedDataset, ids: IntArray, start: int, vocab_size: int | None) -> None:
    wrong = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        position = start + int(np.argmax(wrong))
        document = dataset.document_of(position)
        inside = position - dataset.document_start(document)
        known = "negative" if vocab_size is None else f"none of the tokenizer's {vocab_size} tokens"
        raise DataError(
            f"{bin_path(dataset.prefix)}: byte {position * dataset.dtype.itemsize}: token {int(ids[position - start])} "
            f"of document {document}, at {inside}, is {known}; copy the dataset again or make it anew"
        )
