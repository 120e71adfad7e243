"""What dropout holds in memory: a byte an element is kept, and drawing and applying the mask have their temporaries."""

from __future__ import annotations

from megads.plan.micro_batch import FP32, Pass

INT32 = 4


def drawing(p: Pass, elements: int, whole_sample: int) -> int:
    """Bytes beside the mask while that of one sample is drawn.

    A CPU draws whole numbers of four bytes first. A part of a sample takes its rows of the draw for the whole.

    Args:
        p: the micro-batch.
        elements: of the mask.
        whole_sample: elements of the mask of a whole sample, where the rank holds a part; else 0.
    """
    of_sample = whole_sample or elements // p.micro_batch_size
    return whole_sample + (0 if p.cuda else INT32 * of_sample)


def hidden_dropout(p: Pass) -> tuple[int, int]:
    """(kept, forward): the mask; while it is drawn, or applied, by torch with a product on the way."""
    if not p.model.hidden_dropout:
        return 0, 0
    elements = p.tokens * p.model.hidden_size // p.shards
    whole = p.seq_len * p.model.hidden_size if p.cp * p.shards > 1 else 0
    return elements, max(drawing(p, elements, whole), (1 if p.fused else 2) * p.hidden + whole)


def explicit_attention(p: Pass) -> tuple[int, int, int]:
    """(kept, forward, backward) of scores in memory, beside queries, keys and values.

    Kept are probabilities, in fp32 where torch makes them from bf16, and with dropout the mask and what it leaves.
    Forward and backward are what is alive beyond that.
    """
    w = p.weight_bytes
    made = w if p.masked_by_kernel else FP32  # bytes of a probability
    whole = p.heads * p.seq_len**2 if p.cp > 1 else 0
    if not p.model.attention_dropout:  # raw scores; gradients of probabilities and scores
        return w * p.scores, w * p.scores, 2 * w * p.scores
    kept = (made + 1 + w) * p.scores
    rounded = w if made != w else 0  # probabilities in bf16 beside those in fp32
    applying = (rounded + (0 if p.fused else w)) * p.scores + whole
    softening = 0 if p.masked_by_kernel else 3 * p.scores
    forward = max(applying, softening, drawing(p, p.scores, whole) + (rounded - w) * p.scores)
    return kept, forward, max(w, 2 * made - w - 1) * p.scores
