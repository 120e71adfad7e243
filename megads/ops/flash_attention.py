"""Attention by the package flash-attn (Dao 2023, FlashAttention-2), where it is installed; on GPUs, in bf16.

It knows ALiBi, windows and shared keys; documents become sequences of their own length, one after another.

Shape suffixes: b = batch, s = sequence, n = heads, m = heads of keys and values, d = head dim, c = documents of all
samples together.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

INSTALLED = importlib.util.find_spec("flash_attn_2_cuda") is not None
"""Its compiled kernels are there: other packages bring a folder flash_attn, too."""


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch, for a kernel that takes sequences of any length one after another.

    Attributes:
        bounds: int32 [c + 1], where each begins among all tokens of the batch, and their number.
        longest: tokens of the longest.
    """

    bounds: Tensor
    longest: int


def documents_of(starts_bs: Tensor) -> Documents:
    """Reads off where documents begin; waits for the device once, so it is made once for a micro-batch.

    Args:
        starts_bs: int64 place at which each token's document starts; every sample is whole.
    """
    batch, length = starts_bs.shape
    # One copy to the host: how many documents there are decides shapes.
    begins = (starts_bs == torch.arange(length, device=starts_bs.device)).flatten().cpu().nonzero().flatten()
    bounds = torch.cat([begins, torch.tensor([batch * length])])
    return Documents(bounds.to(starts_bs.device, torch.int32), int(bounds.diff().max()))


def flash_attention(
    q_bnsd: Tensor,
    k_bmsd: Tensor,
    v_bmsd: Tensor,
    slopes_n: Tensor | None = None,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - s)) v over the keys up to a query's own place, [b, n, s, d].

    Gradients are the same bits on every run. In memory the result is [b, s, n, d].

    Args:
        q_bnsd: queries, bf16 on a GPU; at most 256 features a head.
        k_bmsd: keys of the same places; m divides n.
        v_bmsd: their values.
        slopes_n: fp32 ALiBi slope of every head, on the device; None: no bias.
        window: keys that a query sees, the one at its own place being the last; None: all.
        documents: tokens see only their own; None: every sample is one.
    """
    package = importlib.import_module("flash_attn")
    q_bsnd, k_bsmd, v_bsmd = (x.transpose(1, 2) for x in (q_bnsd, k_bmsd, v_bmsd))
    options = {
        "softmax_scale": q_bnsd.shape[-1] ** -0.5,
        "causal": True,
        "window_size": (-1 if window is None else window - 1, 0),
        "alibi_slopes": slopes_n,
        "deterministic": True,
    }
    if documents is None:
        out_bsnd: Tensor = package.flash_attn_func(q_bsnd, k_bsmd, v_bsmd, **options)
        return out_bsnd.transpose(1, 2)
    bounds, longest = documents.bounds, documents.longest
    rows = (x.flatten(0, 1) for x in (q_bsnd, k_bsmd, v_bsmd))
    out = package.flash_attn_varlen_func(*rows, bounds, bounds, longest, longest, **options)
    return out.view(q_bsnd.shape).transpose(1, 2)
