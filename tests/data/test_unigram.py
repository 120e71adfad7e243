from __future__ import annotations

import math
from collections import Counter

import pytest

from megads.data import unigram
from megads.data.indexed import IndexedDataset
from megads.data.samples import ValidationSamples
from megads.data.unigram import unigram_entropy
from megads.errors import DataError

from .conftest import MakeDataset

SEQ_LEN = 8


def brute_force_entropy(dataset: IndexedDataset, documents: range) -> float:
    labels = [token for document in documents for token in dataset.document_tokens(document).tolist()][1:]
    return -sum(count / len(labels) * math.log(count / len(labels)) for count in Counter(labels).values())


def test_unigram_entropy_in_pieces(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the first token being counted, base 2, and pieces that are lost or of growing range."""
    dataset = make_dataset([50, 100, 70])
    monkeypatch.setattr(unigram, "CHUNK_TOKENS", 13)
    expected = brute_force_entropy(dataset, range(1, 3))
    assert unigram_entropy(ValidationSamples(dataset, range(1, 3), SEQ_LEN)) == pytest.approx(expected, rel=1e-12)


def test_unigram_entropy_refuses_damage(make_dataset: MakeDataset) -> None:
    """Catches a count array of 2^31 entries because of one flipped bit."""
    dataset = make_dataset(documents=[[1, 2], [3, 2**31 - 1]])
    with pytest.raises(DataError, match="document 1 holds token 2147483647"):
        unigram_entropy(ValidationSamples(dataset, range(2), SEQ_LEN))
