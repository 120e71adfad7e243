"""The ways to compute attention, and which work each of them can do. Knows no torch: a launcher asks it, too."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from enum import StrEnum

from megads.ops.config import AUGMENTED_LONGEST, Implementation

FLASH_PACKAGE = "flash-attn"
OLDEST_FLASH = (2, 4, 1)
"""The first flash-attn with ALiBi and gradients that are the same on every run."""
FLASH_WIDEST = 256
FLEX_NARROWEST = 16
CUDNN_WIDEST = 256
"""Features of a head; beyond 128 it depends on the GPU."""


class AttentionKind(StrEnum):
    """How attention is computed; all compute the same."""

    auto = "auto"
    fused = "fused"
    fused_softmax = "fused_softmax"
    sdpa = "sdpa"
    augmented = "augmented"
    flash = "flash"
    flex = "flex"
    cudnn = "cudnn"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that people ask for, and why they are not offered."""
        return {
            "reference": "use sdpa, which is plain torch",
            "flash_attention": "flash is the package flash-attn, fused megads' own kernel for CPUs",
            "flex_attention": "flex is torch's FlexAttention",
        }


@dataclass(frozen=True)
class AttentionWork:
    """What a rank asks of attention; None where that is not known yet.

    Attributes:
        head_dim: features of a head.
        heads: of queries, on this rank.
        kv_heads: of keys and values, on this rank.
        alibi: biases are linear in the distance.
        window: keys that a query sees; None: all before it.
        dropout: probability of a probability to be dropped.
        softcap: scores are capped.
        sinks: heads have a logit beside their scores.
        bf16: tensors are bf16; else fp32.
        cuda: on a GPU; else on a CPU.
        impl: which operators there are; fused, where megads' own kernels are there for sure.
        seq_len: tokens of a sample.
        micro_batch_size: samples of a forward pass.
        context: ranks that share a sample.
        documents: packed documents are hidden from each other.
        deterministic: train.deterministic.
    """

    head_dim: int
    heads: int
    kv_heads: int
    alibi: bool
    window: int | None = None
    dropout: float = 0.0
    softcap: bool = False
    sinks: bool = False
    bf16: bool | None = None
    cuda: bool | None = None
    impl: Implementation | None = None
    seq_len: int | None = None
    micro_batch_size: int | None = None
    context: int = 1
    documents: bool = False
    deterministic: bool = False


def why_not(kind: AttentionKind, work: AttentionWork) -> str:
    """Returns why attention of this kind cannot do this work, and what to change; empty where it can.

    What only the device can tell, such as a GPU too old for a kernel, shows when it is tried
    (`megads.engine.attention_trials`).
    """
    match kind:
        case AttentionKind.auto | AttentionKind.sdpa:
            return ""
        case AttentionKind.fused_softmax:
            return _without_kernels(kind, work) or _without_sinks(work)
        case AttentionKind.fused:
            return _without_kernels(kind, work) or _without_softcap(work)
        case AttentionKind.augmented:
            return _not_augmented(work) or _without_dropout(work) or _without_softcap(work)
        case AttentionKind.flash:
            return _without_dropout(work) or _without_softcap(work) or _not_flash(work)
        case AttentionKind.flex:
            return _without_dropout(work) or _without_softcap(work) or _not_flex(work)
        case AttentionKind.cudnn:
            return _without_dropout(work) or _without_softcap(work) or _not_cudnn(work)


def _without_dropout(work: AttentionWork) -> str:
    if not work.dropout:
        return ""
    return (
        f"cannot drop probabilities, but model.attention_dropout = {work.dropout}: set model.attention_dropout=0, or "
        "model.attention=fused_softmax or auto"
    )


def _without_softcap(work: AttentionWork) -> str:
    if not work.softcap:
        return _without_sinks(work)
    return (
        "cannot cap scores, but model.attention_logit_softcap is set: use model.attention=fused_softmax, sdpa or auto, "
        "which have scores in memory"
    )


def _without_sinks(work: AttentionWork) -> str:
    if not work.sinks:
        return ""
    return "knows no logit beside the scores, but model.attention_sinks = true: use model.attention=sdpa or auto"


def _without_kernels(kind: AttentionKind, work: AttentionWork) -> str:
    if kind is AttentionKind.fused and work.cuda:
        return "is for CPUs, but this run is on GPUs: use model.attention=auto, which tries what there is for GPUs"
    if work.impl not in (None, Implementation.fused):
        return (
            f"needs megads' own kernels, but ops.impl = {work.impl} can do without: set ops.impl=fused, or "
            "model.attention=auto"
        )
    return ""


def _not_augmented(work: AttentionWork) -> str:
    for wrong, found, wanted in (
        (not work.alibi, "positions are not those of ALiBi", "model.position=alibi"),
        (work.window is not None, f"model.window = {work.window}", "model.window=null"),
        (work.bf16 is False, "train.precision = fp32", "train.precision=bf16"),
        (work.context > 1, f"parallel.cp = {work.context}", "parallel.cp=1"),
        (work.documents, "data.document_mask = true", "data.document_mask=false"),
        (
            (work.seq_len or 0) > AUGMENTED_LONGEST,
            f"train.seq_len = {work.seq_len or 0:,}",
            f"{AUGMENTED_LONGEST:,} or less",
        ),
    ):
        if wrong:
            return (
                f"is ALiBi in bf16 through a plain causal kernel that can do nothing else, but {found}: set {wanted}, "
                "or model.attention=auto"
            )
    return ""


def _not_flash(work: AttentionWork) -> str:
    if work.cuda is False:
        return f"is for GPUs ({FLASH_PACKAGE}), but this run is on a CPU: use model.attention=auto"
    if work.bf16 is False:
        return f"computes in bf16 ({FLASH_PACKAGE}), but train.precision = fp32: set train.precision=bf16"
    if work.context > 1:
        return (
            f"takes the queries of one stretch of a sample, but parallel.cp = {work.context} gives each rank two: set "
            "parallel.cp=1, or model.attention=flex"
        )
    if work.head_dim > FLASH_WIDEST:
        return f"takes heads of up to {FLASH_WIDEST} features, but they have {work.head_dim}: raise model.num_heads"
    # Where ranks run is known: this machine's packages count.
    return _flash_missing() if work.cuda else ""


@functools.cache
def _flash_missing() -> str:
    remedy = f"pip install {FLASH_PACKAGE}, or use model.attention=auto"
    try:
        version = importlib.metadata.version(FLASH_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"needs the package {FLASH_PACKAGE}, which is not installed: {remedy}"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers >= OLDEST_FLASH:
        return ""
    oldest = ".".join(map(str, OLDEST_FLASH))
    return f"needs {FLASH_PACKAGE} >= {oldest}, but {version} is installed: {remedy}"


def _not_flex(work: AttentionWork) -> str:
    if work.cuda is False:
        return "has no backward pass on a CPU (torch's FlexAttention), but this run is on one: use model.attention=auto"
    if work.head_dim < FLEX_NARROWEST:
        return (
            f"takes heads of at least {FLEX_NARROWEST} features (torch's FlexAttention), but they have "
            f"{work.head_dim}: lower model.num_heads"
        )
    return ""


def _not_cudnn(work: AttentionWork) -> str:
    if work.cuda is False:
        return "is for GPUs (cuDNN), but this run is on a CPU: use model.attention=auto"
    if work.bf16 is False:
        return "computes in bf16 (cuDNN), but train.precision = fp32: set train.precision=bf16"
    if work.deterministic and work.cuda:
        return (
            "sums gradients in an order that changes (cuDNN), but train.deterministic = true: set "
            "train.deterministic=false, or model.attention=auto"
        )
    if work.head_dim % 8 or work.head_dim > CUDNN_WIDEST:
        return (
            f"takes heads of a multiple of 8 features, at most {CUDNN_WIDEST} (cuDNN), but they have {work.head_dim}: "
            "change model.num_heads or model.hidden_size"
        )
    return ""
