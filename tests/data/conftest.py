"""Small real datasets on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.writer import IndexedDatasetWriter

MakeDataset = Callable[..., IndexedDataset]
VOCAB_SIZE = 1000


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Writes a dataset of the given document sizes with random tokens below VOCAB_SIZE, or with given tokens."""

    def make(
        sizes: Sequence[int] = (), documents: Sequence[Sequence[int]] | None = None, name: str = "corpus"
    ) -> IndexedDataset:
        random = np.random.default_rng(0)
        if documents is None:
            documents = [random.integers(0, VOCAB_SIZE, size).tolist() for size in sizes]
        with IndexedDatasetWriter(tmp_path / name, np.int32) as writer:
            for document in documents:
                writer.append(document)
        return IndexedDataset(tmp_path / name)

    return make
