"""Tests what flash-attn is given, without flash-attn: where the documents of a batch begin."""

from __future__ import annotations

import torch

from megads.ops.attention import documents_of


def test_documents_of_a_batch() -> None:
    """Catches a sample whose first document is merged with the last of the previous sample, a bound off by one, and a
    missing end of the batch."""
    starts = torch.tensor([[0, 0, 0, 3, 3], [0, 1, 1, 1, 4], [0, 0, 0, 0, 0]])
    documents = documents_of(starts)
    assert documents.bounds.tolist() == [0, 3, 5, 6, 9, 10, 15] and documents.bounds.dtype is torch.int32
    assert documents.longest == 5
