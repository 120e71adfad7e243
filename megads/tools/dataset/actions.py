"""The actions of `megads dataset`: merge, split, inspect, count and check indexed datasets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from megads.api import (
    KEPT_EXAMPLES,
    Array,
    ConfigError,
    DataError,
    IndexedDataset,
    IndexedDatasetAppender,
    IntArray,
    Progress,
    Sidecar,
    TextSpecialTokens,
    bin_path,
    carried_path,
    file_checksum,
    find_tokenizer,
    idx_path,
    read_sidecar,
    sidecar_path,
    tokenizing,
    write_carried,
    write_sidecar,
    written_checksums,
)
from megads.data.indexed.writer import in_pieces

# Number of documents whose index entries are processed at a time.
_DOCUMENTS = 1 << 20
# Longest document that is counted by its exact length: bounds the counts to 8 MB, however many documents there are.
_LONGEST_COUNTED = 1 << 20


def merge(prefixes: Sequence[str], output: str, overwrite: bool = False) -> IndexedDataset:
    """Concatenates datasets, in the order given, by copying bytes.

    Args:
        prefixes: prefixes of the datasets; all made with one tokenizer, as far as their sidecars tell.
        output: prefix of the dataset to write. It has a sidecar if all inputs have one.
        overwrite: replace an existing dataset.

    Returns:
        The new dataset, opened.

    Raises:
        ConfigError: the output exists, or is one of the inputs.
        DataError: a dataset is damaged or made with another tokenizer, or the disk is full.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    sidecars = [read_sidecar(prefix) for prefix in prefixes]
    _require_one_tokenizer(prefixes, sidecars)
    _check_output(output, prefixes, overwrite)
    carried = next((carried_path(p).read_bytes() for p in prefixes if carried_path(p).is_file()), None)
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    total_bytes = sum(dataset.num_tokens for dataset in datasets) * dtype.itemsize
    counted = _CopyStatistics()
    with IndexedDatasetAppender(output, dtype) as writer, Progress("merging", total_bytes) as progress:
        for dataset in datasets:
            _append(writer, dataset, range(dataset.num_documents), counted, progress)
        _remove_sidecar(output)
    made = [sidecar for sidecar in sidecars if sidecar is not None]
    if len(made) == len(sidecars):
        _write_sidecar(output, writer, counted, _joined(made))
    if carried is not None:
        write_carried(output, carried)
    return IndexedDataset(output)


def split(prefix: str, output: str, parts: Mapping[str, float], overwrite: bool = False) -> dict[str, IndexedDataset]:
    """Splits a dataset between documents into datasets of consecutive documents.

    Args:
        prefix: prefix of the dataset.
        output: part `name` is written to `<output>-<name>`.
        parts: share of the documents by name, in order; the shares need not add up to one.
        overwrite: replace existing datasets.

    Returns:
        The new datasets by name, opened.

    Raises:
        ConfigError: a part has no documents or exists.
        DataError: the dataset is damaged, or the disk is full.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(prefix)
    bounds = np.round(np.cumsum([0.0, *parts.values()]) / sum(parts.values()) * dataset.num_documents).astype(int)
    ranges = {name: range(bounds[i], bounds[i + 1]) for i, name in enumerate(parts)}
    for name, documents in ranges.items():
        if not documents or not dataset.num_tokens_of(documents):
            raise ConfigError(
                f"parts = {dict(parts)}: {name} gets {len(documents)} of {dataset.num_documents} documents and no "
                "tokens; give it a larger share or leave it out"
            )
        _check_output(f"{output}-{name}", [prefix], overwrite)
    with Progress("splitting", dataset.num_tokens * dataset.dtype.itemsize) as progress:
        for name, documents in ranges.items():
            _write_part(dataset, documents, f"{output}-{name}", sidecar, progress)
    return {name: IndexedDataset(f"{output}-{name}") for name in parts}


class _CopyStatistics:
    """Statistics of tokens, collected while they are copied."""

    def __init__(self) -> None:
        self.bytes = 0
        self.max_token_id = 0

    def through(self, tokens: Array, dtype: npt.DTypeLike, progress: Progress) -> Iterator[bytes]:
        for piece in in_pieces(tokens):
            self.max_token_id = max(self.max_token_id, int(piece.max(initial=0)))
            copied = piece.astype(dtype).tobytes()
            self.bytes += len(copied)
            yield copied
            progress.update(self.bytes)


def _append(
    writer: IndexedDatasetAppender,
    dataset: IndexedDataset,
    documents: range,
    counted: _CopyStatistics,
    progress: Progress,
) -> None:
    for begin in range(documents.start, documents.stop, _DOCUMENTS):
        some = range(begin, min(begin + _DOCUMENTS, documents.stop))
        sequences = dataset.document_index[some.start : some.stop + 1]
        sizes, ends = dataset.sequence_sizes[sequences[0] : sequences[-1]], sequences[1:] - sequences[0]
        writer.extend(sizes, counted.through(dataset.stream(some), writer.dtype, progress), documents=ends)


def _write_part(
    dataset: IndexedDataset, documents: range, output: str, sidecar: Sidecar | None, progress: Progress
) -> None:
    counted = _CopyStatistics()
    counted.bytes = dataset.document_start(documents.start) * dataset.dtype.itemsize
    with IndexedDatasetAppender(output, dataset.dtype) as writer:
        _append(writer, dataset, documents, counted, progress)
        _remove_sidecar(output)
    if sidecar is not None:
        # The sidecar does not record which line gave which document, so rejected lines are not assigned to parts.
        share = writer.num_tokens / dataset.num_tokens
        part = dataclasses.replace(
            sidecar,
            text_bytes=round(sidecar.text_bytes * share),
            rejected_lines=0,
            rejected_reasons={},
            rejected_examples=[],
            input_identity=None,
        )
        _write_sidecar(output, writer, counted, part)
    carried = carried_path(dataset.prefix)
    if carried.is_file():
        write_carried(output, carried.read_bytes())


def _write_sidecar(output: str, writer: IndexedDatasetAppender, counted: _CopyStatistics, base: Sidecar) -> None:
    made = dataclasses.replace(
        base,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        max_token_id=counted.max_token_id,
        bin_checksum=writer.bin_checksum,
        **written_checksums(output),
    )
    write_sidecar(output, made)


def _joined(sidecars: Sequence[Sidecar]) -> Sidecar:
    reasons: Counter[str] = Counter()
    for sidecar in sidecars:
        reasons.update(sidecar.rejected_reasons)
    parsed = any(sidecar.text_special_tokens == TextSpecialTokens.parse for sidecar in sidecars)
    examples = [example for sidecar in sidecars for example in sidecar.rejected_examples]
    return dataclasses.replace(
        sidecars[0],
        text_bytes=sum(sidecar.text_bytes for sidecar in sidecars),
        rejected_lines=reasons.total(),
        rejected_reasons=dict(reasons),
        rejected_examples=examples[:KEPT_EXAMPLES],
        input_files=[name for sidecar in sidecars for name in sidecar.input_files],
        text_special_tokens=(TextSpecialTokens.parse if parsed else TextSpecialTokens.ignore).value,
        input_identity=None,
    )


def _require_one_tokenizer(prefixes: Sequence[str], sidecars: Sequence[Sidecar | None]) -> None:
    known = [(prefix, sidecar) for prefix, sidecar in zip(prefixes, sidecars, strict=True) if sidecar]
    for prefix, sidecar in known[1:]:
        first, of_first = known[0]
        if sidecar.tokenizer_sha256 != of_first.tokenizer_sha256:
            raise DataError(
                f"{prefix} was made with the tokenizer {sidecar.tokenizer_sha256[:12]}, {first} with "
                f"{of_first.tokenizer_sha256[:12]}: their ids mean different text; preprocess both with one tokenizer"
            )
        for key, verb in (("end_of_document", "ends"), ("begin_of_document", "begins")):
            ours, theirs = (getattr(one, f"{key}_id") for one in (sidecar, of_first))
            if ours != theirs:
                raise DataError(
                    f"{prefix} {verb} documents with token {ours}, {first} with {theirs}; preprocess both with one "
                    f"{key}"
                )


def _check_output(output: str, inputs: Sequence[str], overwrite: bool) -> None:
    for path in (bin_path(output), idx_path(output), sidecar_path(output), carried_path(output)):
        if any(path.resolve() == make(p).resolve() for p in inputs for make in (bin_path, idx_path)):
            raise ConfigError(f"output = {output}: {path} is an input and would be lost; choose another output")
        if path.exists() and not overwrite:
            raise ConfigError(f"output = {output}: {path} exists; choose another output or give overwrite=true")


def _remove_sidecar(output: str) -> None:
    """Removes sidecar and tokenizer of a dataset that is about to be replaced; a dataset without them is valid."""
    for path in (sidecar_path(output), carried_path(output)):
        Path(path).unlink(missing_ok=True)


@dataclass(frozen=True)
class InspectedDocument:
    """One decoded document.

    Attributes:
        number: index of the document in the dataset.
        tokens: number of tokens, including the end-of-document token.
        text: beginning of the text, including special tokens.
        cut: whether the text is truncated.
    """

    number: int
    tokens: int
    text: str
    cut: bool


def read_decoded(
    prefix: str, first: int, count: int, max_characters: int, tokenizer: str | None
) -> Iterator[InspectedDocument]:
    """Yields consecutive documents, decoded.

    Args:
        prefix: prefix of the dataset.
        first: index of the first document.
        count: number of documents; fewer if the dataset ends before.
        max_characters: maximum number of characters per document.
        tokenizer: tokenizer file for decoding; None is the one beside the dataset.

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
        # A character is at most four tokens, of one byte each.
        shown = tokens[: 4 * max_characters].tolist()
        with tokenizing(found.path):
            text = found.tokenizer.decode(shown, skip_special_tokens=False)
        cut = len(shown) < tokens.size or len(text) > max_characters
        yield InspectedDocument(number, tokens.size, text[:max_characters], cut)


@dataclass(frozen=True)
class LengthStatistics:
    """Length statistics of one dataset.

    Attributes:
        prefix: prefix of the dataset.
        dtype: token dtype.
        documents: number of documents.
        sequences: number of sequences; a document has one or more.
        tokens: number of tokens.
        shortest: tokens in the shortest document.
        longest: tokens in the longest document.
        percentiles: document length in tokens by percentile; lengths above 2^20 count as 2^20.
        histogram: int64 [33], number of documents with 0 tokens, 1, 2 to 3, 4 to 7, ... 2^(i-1) to 2^i - 1.
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
        # frexp gives the exponent of the next power of two, exactly for integers up to 2^53.
        histogram += np.bincount(np.frexp(sizes)[1], minlength=histogram.size)
    ends = np.cumsum(counts)
    wanted = {share: int(np.searchsorted(ends, share / 100 * dataset.num_documents)) for share in (5, 25, 50, 75, 95)}
    return LengthStatistics(
        prefix, str(dataset.dtype), dataset.num_documents, dataset.num_sequences, dataset.num_tokens,
        shortest, longest, wanted, histogram,
    )  # fmt: skip


@dataclass(frozen=True)
class CheckedDataset:
    """A dataset that passed all checks.

    Attributes:
        prefix: prefix of the dataset.
        documents: number of documents.
        tokens: number of tokens.
        empty_documents: number of documents without tokens.
        checksums_held: whether checksums in the sidecar were compared and match; False if it has none.
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
    """Reads every byte of a dataset and compares it with its index and its sidecar.

    Raises:
        DataError: a check fails; the message has the cause and the position.
    """
    dataset = IndexedDataset(prefix, anew=True)
    sidecar = read_sidecar(prefix)
    digest, vocab_size = xxhash.xxh3_64(), sidecar.vocab_size if sidecar else None
    done = 0
    with Progress("checking the data", dataset.num_tokens * dataset.dtype.itemsize) as progress:
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
