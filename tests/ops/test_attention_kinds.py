"""Support of each attention kind, and rejection of unsupported work before a run starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.ops.attention_kinds import AttentionKind, AttentionWork, unsupported_reason
from megads.ops.config import Implementation

GPU = AttentionWork(
    head_dim=64, heads=8, kv_heads=8, alibi=True, bf16=True, cuda=True, impl=Implementation.torch, seq_len=2048
)
EVERY = set(AttentionKind)
NEEDS_KERNELS = {AttentionKind.fused, AttentionKind.fused_softmax}
# As if flash-attn were installed, see below.
CASES: dict[str, tuple[dict[str, object], set[AttentionKind]]] = {
    "alibi in bf16": ({}, EVERY - NEEDS_KERNELS),
    "kernels": ({"impl": Implementation.fused}, EVERY - {AttentionKind.fused}),
    "fp32": ({"bf16": False}, {AttentionKind.auto, AttentionKind.sdpa, AttentionKind.flex}),
    "rotary": ({"alibi": False}, EVERY - NEEDS_KERNELS - {AttentionKind.augmented}),
    "window": ({"window": 100}, EVERY - NEEDS_KERNELS - {AttentionKind.augmented}),
    "documents": ({"documents": True}, EVERY - NEEDS_KERNELS - {AttentionKind.augmented}),
    "context": ({"context": 2}, {AttentionKind.auto, AttentionKind.sdpa, AttentionKind.flex, AttentionKind.cudnn}),
    "ring": ({"context": 2, "ring": True}, {AttentionKind.auto, AttentionKind.sdpa}),
    "ring with kernels": (
        {"context": 2, "ring": True, "cuda": False, "impl": Implementation.fused},
        {AttentionKind.auto, AttentionKind.sdpa},
    ),
    "deterministic": ({"deterministic": True}, EVERY - NEEDS_KERNELS - {AttentionKind.cudnn}),
    "dropout": ({"dropout": 0.1}, {AttentionKind.auto, AttentionKind.sdpa}),
    "dropout with kernels": (
        {"dropout": 0.1, "impl": Implementation.fused, "cuda": False},
        {AttentionKind.auto, AttentionKind.sdpa, *NEEDS_KERNELS},
    ),
    "narrow heads": ({"head_dim": 12}, EVERY - NEEDS_KERNELS - {AttentionKind.flex, AttentionKind.cudnn}),
    "wide heads": (
        {"head_dim": 320},
        EVERY - NEEDS_KERNELS - {AttentionKind.flash, AttentionKind.cudnn},
    ),
    "cpu": ({"cuda": False}, {AttentionKind.auto, AttentionKind.sdpa, AttentionKind.augmented}),
    "cpu with kernels": (
        {"cuda": False, "impl": Implementation.fused},
        {AttentionKind.auto, AttentionKind.sdpa, AttentionKind.augmented, *NEEDS_KERNELS},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_attention_kind_accepts_exactly_what_it_computes(name: str) -> None:
    """Catches a kind that is accepted but computes a wrong result or crashes on the ranks, one that works but is
    rejected, and a reason without a remedy."""
    changes, able = CASES[name]
    work = replace(GPU, **changes)
    reasons = {kind: unsupported_reason(kind, work) for kind in AttentionKind}
    if "flash-attn, which is not installed" in reasons[AttentionKind.flash]:
        reasons[AttentionKind.flash] = ""
    assert {kind for kind, reason in reasons.items() if not reason} == able
    assert all(": " in reason for reason in reasons.values() if reason)
    if work.deterministic:
        assert "train.deterministic=false" in reasons[AttentionKind.cudnn]


@pytest.mark.parametrize("kind", [AttentionKind.flash, AttentionKind.flex, AttentionKind.cudnn])
def test_dropout_of_probabilities_is_refused_by_the_model(kind: AttentionKind) -> None:
    """Catches attention dropout that a kernel silently ignores."""
    with pytest.raises(ConfigError, match=rf"model\.attention = {kind} .*model\.attention_dropout = 0\.1"):
        ModelConfig(attention=kind, attention_dropout=0.1).check()
