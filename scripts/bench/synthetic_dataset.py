#!/usr/bin/env python3
"""Writes an indexed dataset of random documents, identical on every machine: token frequencies follow Zipf's law."""

from __future__ import annotations

import argparse
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="prefix of the .bin and .idx files")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    arguments = parser.parse_args()
    documents = write(arguments.output, arguments.tokens, arguments.vocab_size)
    print(f"{arguments.output}: {arguments.tokens:,} tokens in {documents:,} documents")


if __name__ == "__main__":
    main()
