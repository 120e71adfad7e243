"""Merges and splits indexed datasets by copying ranges of bytes; only their indexes are worked on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megads.data.carried_tokenizer import carried_path, write_carried
from megads.data.config import TextSpecialTokens
from megads.data.indexed import Array, IndexedDataset, bin_path, idx_path
from megads.data.indexed_append import IndexedDatasetAppender, in_pieces
from megads.data.progress import ByteProgress
from megads.data.sidecar import Sidecar, file_checksum, read_sidecar, sidecar_path, write_sidecar
from megads.data.text import KEPT_EXAMPLES
from megads.errors import ConfigError, DataError

# Documents whose index entries are handled at a time.
_DOCUMENTS = 1 << 20


def merge(prefixes: Sequence[str], output: str, overwrite: bool = False) -> IndexedDataset:
    """Joins datasets into one, in the order given.

    Args:
        prefixes: the datasets; all of one tokenizer where their sidecars tell.
        output: prefix of the dataset to write. It has a sidecar if all of them have one.
        overwrite: replace a dataset that is there.

    Returns:
        The new dataset, opened.

    Raises:
        ConfigError: the output exists, or is one of the inputs.
        DataError: a dataset is damaged, or made with another tokenizer; or the disk is full.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    sidecars = [read_sidecar(prefix) for prefix in prefixes]
    _require_one_tokenizer(prefixes, sidecars)
    _claim(output, prefixes, overwrite)
    carried = next((carried_path(p).read_bytes() for p in prefixes if carried_path(p).is_file()), None)
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    total_bytes = sum(dataset.num_tokens for dataset in datasets) * dtype.itemsize
    counted = _Copied()
    with IndexedDatasetAppender(output, dtype) as writer, ByteProgress("merging", total_bytes) as progress:
        for dataset in datasets:
            _append(writer, dataset, range(dataset.num_documents), counted, progress)
        _forget(output)
    made = [sidecar for sidecar in sidecars if sidecar is not None]
    if len(made) == len(sidecars):
        _write_sidecar(output, writer, counted, _joined(made))
    if carried is not None:
        write_carried(output, carried)
    return IndexedDataset(output)


def split(prefix: str, output: str, parts: Mapping[str, float], overwrite: bool = False) -> dict[str, IndexedDataset]:
    """Cuts a dataset at documents into datasets of its consecutive parts.

    Args:
        prefix: the dataset.
        output: part `name` is written at `<output>-<name>`.
        parts: share of the documents by name, in order; they need not add up to one.
        overwrite: replace datasets that are there.

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
        if not documents or not dataset.stream(documents).size:
            raise ConfigError(
                f"parts = {dict(parts)}: {name} gets {len(documents)} of {dataset.num_documents} documents and no "
                "tokens; give it a larger share or leave it out"
            )
        _claim(f"{output}-{name}", [prefix], overwrite)
    with ByteProgress("splitting", dataset.num_tokens * dataset.dtype.itemsize) as progress:
        for name, documents in ranges.items():
            _write_part(dataset, documents, f"{output}-{name}", sidecar, progress)
    return {name: IndexedDataset(f"{output}-{name}") for name in parts}


class _Copied:
    """What is learnt of tokens while they are copied."""

    def __init__(self) -> None:
        self.bytes = 0
        self.max_token_id = 0

    def through(self, tokens: Array, dtype: npt.DTypeLike, progress: ByteProgress) -> Iterator[bytes]:
        for piece in in_pieces(tokens):
            self.max_token_id = max(self.max_token_id, int(piece.max(initial=0)))
            copied = piece.astype(dtype).tobytes()
            self.bytes += len(copied)
            yield copied
            progress.update(self.bytes)


def _append(
    writer: IndexedDatasetAppender, dataset: IndexedDataset, documents: range, counted: _Copied, progress: ByteProgress
) -> None:
    for begin in range(documents.start, documents.stop, _DOCUMENTS):
        some = range(begin, min(begin + _DOCUMENTS, documents.stop))
        sequences = dataset.document_index[some.start : some.stop + 1]
        sizes, ends = dataset.sequence_sizes[sequences[0] : sequences[-1]], sequences[1:] - sequences[0]
        writer.extend(sizes, counted.through(dataset.stream(some), writer.dtype, progress), documents=ends)


def _write_part(
    dataset: IndexedDataset, documents: range, output: str, sidecar: Sidecar | None, progress: ByteProgress
) -> None:
    counted = _Copied()
    counted.bytes = dataset.document_start(documents.start) * dataset.dtype.itemsize
    with IndexedDatasetAppender(output, dataset.dtype) as writer:
        _append(writer, dataset, documents, counted, progress)
        _forget(output)
    if sidecar is not None:
        # Which line of the input gave which document is not recorded: rejected lines stay with the whole.
        share = writer.num_tokens / dataset.num_tokens
        part = dataclasses.replace(
            sidecar,
            text_bytes=round(sidecar.text_bytes * share),
            rejected_lines=0,
            rejected_reasons={},
            rejected_examples=[],
        )
        _write_sidecar(output, writer, counted, part)
    carried = carried_path(dataset.prefix)
    if carried.is_file():
        write_carried(output, carried.read_bytes())


def _write_sidecar(output: str, writer: IndexedDatasetAppender, counted: _Copied, base: Sidecar) -> None:
    made = dataclasses.replace(
        base,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        max_token_id=counted.max_token_id,
        bin_checksum=writer.bin_checksum,
        idx_checksum=file_checksum(idx_path(output)),
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
    )


def _require_one_tokenizer(prefixes: Sequence[str], sidecars: Sequence[Sidecar | None]) -> None:
    known = [(p, s.tokenizer_sha256, s.end_of_document_id) for p, s in zip(prefixes, sidecars, strict=True) if s]
    for prefix, sha256, end_id in known[1:]:
        if sha256 != known[0][1]:
            raise DataError(
                f"{prefix} was made with the tokenizer {sha256[:12]}, {known[0][0]} with {known[0][1][:12]}: their ids "
                "mean different text; preprocess both with one tokenizer"
            )
        if end_id != known[0][2]:
            raise DataError(
                f"{prefix} ends documents with token {end_id}, {known[0][0]} with {known[0][2]}; preprocess both with "
                "the same end_of_document"
            )


def _claim(output: str, inputs: Sequence[str], overwrite: bool) -> None:
    for path in (bin_path(output), idx_path(output), sidecar_path(output), carried_path(output)):
        if any(path.resolve() == make(p).resolve() for p in inputs for make in (bin_path, idx_path)):
            raise ConfigError(f"output = {output}: {path} is an input and would be lost; choose another output")
        if path.exists() and not overwrite:
            raise ConfigError(f"output = {output}: {path} exists; choose another output or give overwrite=true")


def _forget(output: str) -> None:
    """Removes what belongs to a dataset that is about to be replaced: valid without, wrong with another's."""
    for path in (sidecar_path(output), carried_path(output)):
        Path(path).unlink(missing_ok=True)
