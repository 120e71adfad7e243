"""Cuts the documents of a small corpus into parts, so that one book can be split into training and validation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megads.data.indexed import IndexedDataset, IndexedDatasetWriter, idx_path
from megads.data.sidecar import Sidecar, file_checksum, write_sidecar

WANTED_PARTS = 100
SMALLEST_PART_TOKENS = 256


def cut_few_documents(prefix: Path, sidecar: Sidecar) -> Sidecar:
    """Cuts the documents of a dataset of fewer than a hundred into about a hundred parts of equal length.

    No token is added or lost: parts of one document have no end-of-document token between them.

    Args:
        prefix: the dataset, which is replaced.
        sidecar: its sidecar.

    Returns:
        The new sidecar, as written; the old one where the documents are many, or too short to be cut.
    """
    if sidecar.documents >= WANTED_PARTS:
        return sidecar
    dataset = IndexedDataset(prefix)
    part_tokens = max(SMALLEST_PART_TOKENS, -(-dataset.num_tokens // WANTED_PARTS))
    with IndexedDatasetWriter(prefix, dataset.dtype) as writer:
        for document in range(dataset.num_documents):
            tokens = dataset.document_tokens(document)
            parts = max(1, tokens.size // part_tokens)
            for part in range(parts):
                writer.append(tokens[tokens.size * part // parts : tokens.size * (part + 1) // parts])
    index = None if sidecar.idx_checksum is None else file_checksum(idx_path(prefix))
    cut = dataclasses.replace(sidecar, documents=writer.num_documents, idx_checksum=index)
    write_sidecar(prefix, cut)
    return cut
