"""Attention whose scores are in memory, between two matrix products: what dropout on probabilities needs.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def explicit_attention(
    q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, soften: Callable[[Tensor], Tensor], drop: Callable[[Tensor], Tensor]
) -> Tensor:
    """drop(soften(q k^T)) v, [b, n, s, d]; n / m heads of queries next to each other share keys and values.

    Args:
        q_bnsd: queries.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        soften: scores [b, n, s, t] to probabilities of their dtype, scale and mask included.
        drop: dropout of probabilities.
    """
    (batch, heads, queries, dim), (shared, keys) = q_bnsd.shape, k_bmtd.shape[1:3]
    # The queries of all heads that share keys are rows of one product.
    rows = heads // shared * queries
    # Nothing but probabilities has a name here: scores are freed as soon as they are softened.
    dropped_bnst = drop(
        soften((q_bnsd.reshape(batch, shared, rows, dim) @ k_bmtd.transpose(-1, -2)).view(batch, heads, queries, keys))
    )
    return (dropped_bnst.view(batch, shared, rows, keys) @ v_bmtd).view(q_bnsd.shape)
