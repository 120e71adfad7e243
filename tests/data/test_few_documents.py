from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megads.data.few_documents import cut_few_documents
from megads.data.indexed import IndexedDataset
from megads.data.samples import split_documents
from megads.data.sidecar import Sidecar, read_sidecar

from .conftest import MakeDataset


def describe(dataset: IndexedDataset) -> Sidecar:
    return Sidecar("ab", 999, 998, 0, dataset.num_documents, dataset.num_tokens, 9, 0, {}, [], [])


@pytest.mark.parametrize("sizes", [[50_000], [30_000, 70, 20_000, 0]])
def test_the_same_tokens_in_about_a_hundred_parts(make_dataset: MakeDataset, sizes: list[int]) -> None:
    """Catches a book that cannot be split, or whose validation share is a third of it; and lost tokens."""
    dataset = make_dataset(sizes)
    before = np.array(dataset.stream(range(len(sizes))))
    cut = cut_few_documents(Path(dataset.prefix), describe(dataset))
    after = IndexedDataset(dataset.prefix)
    assert np.array_equal(after.stream(range(after.num_documents)), before)
    assert 80 < after.num_documents <= 103
    assert cut == read_sidecar(dataset.prefix) == dataclasses.replace(describe(dataset), documents=after.num_documents)
    _, valid = split_documents(after, [0.98, 0.02])
    assert 0.01 < after.stream(valid).size / before.size < 0.04


@pytest.mark.parametrize("sizes", [[500], [10] * 100])
def test_short_and_many_documents_stay_as_they_are(make_dataset: MakeDataset, sizes: list[int]) -> None:
    """Catches ends of documents that vanish where nothing had to be cut."""
    dataset = make_dataset(sizes)
    fingerprint = dataset.fingerprint()
    assert cut_few_documents(Path(dataset.prefix), describe(dataset)).documents == len(sizes)
    assert IndexedDataset(dataset.prefix).fingerprint() == fingerprint
