"""Tests what flash-attn is given, without flash-attn: where the documents of a batch begin."""

from __future__ import annotations

import pytest
import torch

import megads.model.attention
from megads.batch import BatchInfo
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig
from megads.ops.attention import DocumentBounds, flash_document_bounds
from megads.ops.attention_kinds import AttentionKind


def test_document_bounds_of_a_batch_are_right() -> None:
    """Catches a sample whose first document is merged with the last of the previous sample, a bound off by one, and a
    missing end of the batch."""
    starts = torch.tensor([[0, 0, 0, 3, 3], [0, 1, 1, 1, 4], [0, 0, 0, 0, 0]])
    documents = flash_document_bounds(starts, torch.device("cpu"))
    assert documents.bounds.tolist() == [0, 3, 5, 6, 9, 10, 15] and documents.bounds.dtype is torch.int32
    assert documents.longest == 5


def test_document_bounds_are_not_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a read of the document starts from the device, which waits for all kernels of the micro-batches before:
    on the meta device a read raises. Also catches bounds that are computed again in each layer or recomputation."""
    given: list[DocumentBounds] = []

    def flash_attention(q: torch.Tensor, *_: object) -> torch.Tensor:
        assert isinstance(_[-1], DocumentBounds)
        given.append(_[-1])
        return q

    monkeypatch.setattr(megads.model.attention, "flash_attention", flash_attention)
    monkeypatch.setattr(AttentionCore, "backend", lambda self, q: AttentionKind.flash)
    meta = torch.device("meta")
    starts = torch.tensor([[0, 0, 0, 3, 3], [0, 1, 1, 1, 4]])
    info = BatchInfo(torch.arange(2), document_starts=starts).to(meta)
    core = AttentionCore(ModelConfig(hidden_size=8, num_heads=2), 0, "core")
    q = torch.empty(2, 2, 5, 4, device=meta)
    for _ in range(2):
        core(q, q, q, info)
    assert given[0] is given[1]
    assert given[0].bounds.device == meta and given[0].bounds.shape == (6,) and given[0].longest == 3
