"""What dropout holds in memory: our own kernels nothing, plain torch what it needs to draw and apply a mask."""

from __future__ import annotations

from megads.plan.micro_batch import FP32, INT64, Pass

DRAWN_AT_ONCE = 2**22
"""As `megads.ops.dropout`, which a launcher must not import, for it imports torch."""


def drawing(elements: int, width: int) -> int:
    """Bytes beside the mask while plain torch draws it: a byte of four tensors for a bit that is drawn, and counters.

    Args:
        elements: of the mask.
        width: of a row of it.
    """
    return INT64 * min(elements, max(DRAWN_AT_ONCE, width)) + 3 * INT64 * (elements // width)


def hidden_dropout(p: Pass) -> tuple[int, int]:
    """(kept, forward): torch's mask, a byte an element; while it is drawn, or applied with a product on the way."""
    if not p.model.hidden_dropout:
        return 0, 0
    if p.fused:
        return 0, p.hidden
    elements = p.tokens * p.model.hidden_size // p.shards
    return elements, max(drawing(elements, p.model.hidden_size), 2 * p.hidden)


def explicit_attention(p: Pass) -> tuple[int, int, int]:
    """(kept, forward, backward) of scores in memory, beside queries, keys and values.

    Kept are probabilities. Forward and backward are what is alive beyond that: scores and what dropout leaves; the
    gradients of both, and what dropout leaves, made again. Plain torch computes the softmax in fp32, and holds a mask
    meanwhile.
    """
    w, scores = p.weight_bytes, p.scores
    if not p.model.attention_dropout:  # raw scores; gradients of probabilities and scores
        return w * scores, w * scores, 2 * w * scores
    if p.masked_by_kernel:
        return w * scores, 2 * w * scores, 3 * w * scores
    mask = scores + drawing(scores, p.seq_len)
    forward = w * scores + max((2 * FP32 - w) * scores, mask, (1 + w) * scores)
    wide = (3 if w < FP32 else 1) * FP32 * scores  # gradient and probabilities cast, and the gradient of the scores
    backward = w * scores + max(mask, scores + max(wide, 2 * w * scores))
    return w * scores, forward, backward
