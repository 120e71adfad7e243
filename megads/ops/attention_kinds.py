"""Attention implementations and what each supports. Does not import torch, since the launcher uses it, too."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from enum import StrEnum

from megads.ops.config import AUGMENTED_LONGEST, TORCH_FLASH_WIDEST, Implementation

FLASH_PACKAGE = "flash-attn"
OLDEST_FLASH = (2, 4, 1)
"""First version of flash-attn with ALiBi and deterministic gradients."""
FLASH_WIDEST = 256
FLEX_NARROWEST = 16
CUDNN_WIDEST = 256
"""Largest head dim of cuDNN's kernel; above 128 it depends on the GPU."""


class AttentionKind(StrEnum):
    """Implementation of attention; all compute the same function."""

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
        """Values that users may expect, and why they are not supported."""
        return {
            "reference": "use sdpa, which is plain torch",
            "flash_attention": "flash is the package flash-attn, fused megads' own kernel for CPUs",
            "flex_attention": "flex is torch's FlexAttention",
        }


@dataclass(frozen=True)
class AttentionWork:
    """Requirements of a rank on attention; optional fields are None if not known yet.

    Attributes:
        head_dim: head dim.
        heads: number of query heads on this rank.
        kv_heads: number of key and value heads on this rank.
        alibi: whether ALiBi biases are used.
        window: number of keys that a query sees; None: all keys up to its position.
        dropout: dropout probability of the attention probabilities.
        softcap: whether attention logits are soft-capped.
        sinks: whether heads have attention sinks.
        bf16: whether tensors are bf16; else fp32.
        cuda: whether attention runs on a GPU; else on a CPU.
        impl: operator implementation; fused only if megads' kernels are known to be available.
        seq_len: tokens per sample.
        micro_batch_size: samples per micro-batch.
        context: context-parallel ranks over which the queries of a sample are divided inside an attention core.
        ring: whether keys come in blocks from one context-parallel rank after another (parallel.cp_kind=ring).
        documents: whether packed documents are masked from each other.
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
    ring: bool = False
    documents: bool = False
    deterministic: bool = False


def unsupported_reason(kind: AttentionKind, work: AttentionWork) -> str:
    """Returns why an implementation does not support the requirements, and what to change; empty if it does.

    Limits that depend on the device, such as a GPU that is too old for a kernel, are found by trying it
    (`megads.tools.autotune.attention_trials`).
    """
    if work.ring and kind not in (AttentionKind.auto, AttentionKind.sdpa):
        return (
            "attends to all keys at once, but parallel.cp_kind = ring combines blocks of keys, for which it returns "
            "too little: use model.attention=auto, or parallel.cp_kind=allgather"
        )
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


def flash_in_ring(work: AttentionWork) -> bool:
    """Whether PyTorch's FlashAttention computes the blocks of a ring, as `megads.ops.block_attention` decides; all
    fields must be known."""
    masked = work.alibi or work.window is not None or work.documents
    if masked or work.dropout or work.softcap:
        return False
    if not work.cuda:
        return not work.bf16
    return bool(work.bf16) and work.head_dim % 8 == 0 and work.head_dim <= TORCH_FLASH_WIDEST


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
    return "does not support attention sinks, but model.attention_sinks = true: use model.attention=sdpa or auto"


def _without_kernels(kind: AttentionKind, work: AttentionWork) -> str:
    if kind is AttentionKind.fused and work.cuda:
        return "is for CPUs, but this run is on GPUs: use model.attention=auto, which tries the kernels for GPUs"
    if work.impl not in (None, Implementation.fused):
        return (
            f"needs megads' own kernels, but ops.impl = {work.impl} does not require them: set ops.impl=fused, or "
            "model.attention=auto"
        )
    return ""


def _not_augmented(work: AttentionWork) -> str:
    for wrong, found, wanted in (
        (not work.alibi, "the model does not use ALiBi", "model.position=alibi"),
        (work.window is not None, f"model.window = {work.window}", "model.window=null"),
        (work.bf16 is False, "train.precision = fp32", "train.precision=bf16"),
        (work.context > 1, f"queries are divided over {work.context} context-parallel ranks", "parallel.cp=1"),
        (work.documents, "data.document_mask = true", "data.document_mask=false"),
        (
            (work.seq_len or 0) > AUGMENTED_LONGEST,
            f"train.seq_len = {work.seq_len or 0:,}",
            f"{AUGMENTED_LONGEST:,} or less",
        ),
    ):
        if wrong:
            return (
                f"only computes ALiBi in bf16, through a plain causal kernel, but {found}: set {wanted}, or "
                "model.attention=auto"
            )
    return ""


def _not_flash(work: AttentionWork) -> str:
    if work.cuda is False:
        return f"is for GPUs ({FLASH_PACKAGE}), but this run is on a CPU: use model.attention=auto"
    if work.bf16 is False:
        return f"computes in bf16 ({FLASH_PACKAGE}), but train.precision = fp32: set train.precision=bf16"
    if work.context > 1:
        return (
            "takes queries of one contiguous chunk of a sample, but each of "
            f"{work.context} context-parallel ranks has two: set parallel.cp=1, or model.attention=flex"
        )
    if work.head_dim > FLASH_WIDEST:
        return f"takes heads of up to {FLASH_WIDEST} features, but they have {work.head_dim}: raise model.num_heads"
    # If `cuda` is known, this machine runs ranks, so its packages can be checked.
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
            "accumulates gradients in nondeterministic order (cuDNN), but train.deterministic = true: set "
            "train.deterministic=false, or model.attention=auto"
        )
    if work.head_dim % 8 or work.head_dim > CUDNN_WIDEST:
        return (
            f"takes heads of a multiple of 8 features, at most {CUDNN_WIDEST} (cuDNN), but they have {work.head_dim}: "
            "change model.num_heads or model.hidden_size"
        )
    return ""
