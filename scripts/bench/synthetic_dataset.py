"""Writes an indexed dataset of random documents, identical on every machine: token frequencies follow Zipf's law."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megads.data.indexed.dataset import token_dtype
from megads.data.indexed.writer import IndexedDatasetWriter


def write(prefix: Path, num_tokens: int, vocab_size: int) -> int:
    """Writes documents of 100 to 3000 tokens until there are `num_tokens` tokens; returns the number of documents."""
    random = np.random.default_rng(0)
    frequencies = 1.0 / np.arange(1, vocab_size + 1)
    cumulated = np.cumsum(frequencies / frequencies.sum())
    with IndexedDatasetWriter(prefix, token_dtype(vocab_size)) as writer:
        while writer.num_tokens < num_tokens:
            length = min(int(random.integers(100, 3001)), num_tokens - writer.num_tokens)
            ids = np.searchsorted(cumulated, random.random(length), side="right")
            writer.append(np.minimum(ids, vocab_size - 1))
        return writer.num_documents
