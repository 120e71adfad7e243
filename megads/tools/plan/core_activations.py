"""Activation memory of the attention core, and of what context-parallel ranks exchange for it.

See `megads.tools.plan.activations`, which has the other operations of a block.
"""

from __future__ import annotations

from dataclasses import replace

from megads.api import KEYS_AT_ONCE, Position
from megads.ops.config import AUGMENTED_FEATURES, DRAWN_AT_ONCE
from megads.tools.plan.memory_timeline import Op, recomputed
from megads.tools.plan.micro_batch import FP32, INT64, BatchSizes


def mask_temporaries(elements: int, width: int) -> int:
    """Temporary bytes while plain PyTorch generates a dropout mask, the mask excluded.

    Eight bytes per element that is generated at once, and three int64 counters per row.

    Args:
        elements: number of elements of the mask.
        width: number of elements of one row of the mask.
    """
    return INT64 * min(elements, max(DRAWN_AT_ONCE, width)) + 3 * INT64 * (elements // width)


def _explicit_attention(p: BatchSizes) -> tuple[int, int, int]:
    """(kept, forward, backward) of attention that materializes its scores; queries, keys and values are excluded.

    The probabilities are kept. The forward pass also holds the scores and the dropout output; the backward pass holds
    the gradients of both and the recomputed dropout output. Plain PyTorch computes the softmax in fp32, while it holds
    a mask.
    """
    w, scores = p.weight_bytes, p.scores
    if not p.model.attention_dropout and not p.masked_by_kernel:
        # The fp32 softmax and its cast; attention sinks add one column.
        column = FP32 * p.tokens * p.heads if p.model.attention_sinks else 0
        kept = FP32 * scores + column + (w * scores if w < FP32 else 0)
        forward, backward = 2 * FP32 * scores + column, 3 * FP32 * scores + column
    elif not p.model.attention_dropout:  # raw scores; gradients of probabilities and of scores
        kept, forward, backward = w * scores, w * scores, 2 * w * scores
    elif p.masked_by_kernel:
        kept, forward, backward = w * scores, 2 * w * scores, 3 * w * scores
    else:
        kept, mask = w * scores, scores + mask_temporaries(scores, p.seq_len)
        forward = w * scores + max((2 * FP32 - w) * scores, mask, (1 + w) * scores)
        # fp32 copies of gradient and probabilities, and the score gradient
        wide = (3 if w < FP32 else 1) * FP32 * scores
        backward = w * scores + max(mask, scores + max(wide, 2 * w * scores))
    if p.model.attention_logit_softcap is not None:
        # The derivative of the softcap is kept; computing it needs the scores in fp32 twice.
        kept, forward, backward = kept + w * scores, forward + 2 * FP32 * scores, backward + w * scores
    return kept, forward, backward


def _gather_op(p: BatchSizes) -> list[Op]:
    """Context parallelism's all-gather of keys and values.

    The forward pass holds the QKV projection, with Ulysses before it also what that has exchanged, this rank's keys and
    values, and all ranks' keys and values in rank order; it keeps those in sample order. The backward pass
    reduce-scatters their gradients in fp32, from a copy in rank order; gloo makes another copy. With a small window
    both hold instead what is sent, twice, and what is received.
    """
    if p.core_cp == 1 or p.ring:
        return []
    gathered, copies = p.gathered_keys_and_values, 1 if p.cuda else 2
    summed = FP32 * gathered // p.weight_bytes * copies + FP32 * gathered // p.core_cp // p.weight_bytes
    moved = gathered * copies
    if p.window_rows is not None:
        moved, summed = 3 * p.window_rows, FP32 * (3 * p.window_rows + 2 * p.exchanged_keys) // p.weight_bytes
    forward = p.projection + p.exchanged_beside + 2 * p.exchanged_keys + moved
    backward = p.hidden + p.attention + gathered + summed
    return [Op("gathered keys and values", kept=gathered, forward=forward, backward=backward)]


def _tokens_to_heads_op(p: BatchSizes) -> list[Op]:
    """Ulysses' all-to-all of queries, keys and values, which the attention core then saves, or a ring around it.

    The forward pass holds the QKV projection, copies of repeated KV heads, and two of: what is sent, what is received,
    and that in sample order. The backward pass holds the core's gradients and two of the same; repeated KV heads are
    summed in fp32.
    """
    if not p.ulysses:
        return []
    summed = FP32 * p.keys // p.weight_bytes + p.keys if p.repeated_kv else 0
    backward = p.hidden + 3 * p.exchanged_inputs + summed
    return [Op("tokens to heads", forward=p.projection + p.repeated_kv + 2 * p.exchanged_inputs, backward=backward)]


def _heads_to_tokens_op(p: BatchSizes, kept: int) -> list[Op]:
    """Ulysses' all-to-all of the attention core's output, which is another tensor than the one that the core saves.

    Args:
        p: the micro-batch.
        kept: bytes of the output that the next projection saves, unless it is counted there.
    """
    if not p.ulysses:
        return []
    # Explicit attention saves copies of its inputs, and not its output.
    alive = p.projection + (p.exchanged_inputs + p.attention if p.explicit_attention else p.exchanged_beside)
    return [
        Op(
            "heads to tokens",
            kept=kept,
            forward=alive + 2 * p.attention - min(kept, p.attention),
            backward=p.hidden + 3 * p.attention,
        )
    ]


def _attention_op(p: BatchSizes) -> Op:
    """The attention core: scaled_dot_product_attention, megads' fused kernel, or attention with explicit scores.

    The kernels save queries, keys and values (views of the QKV projection, or copies after rotary embedding or an
    all-gather), their output and one fp32 logsumexp per row. The backward pass computes the three gradients from that
    of the output. Gathered keys and values are counted at the all-gather. The GPU kernels of FlexAttention, flash-attn
    and cuDNN are assumed to behave the same; none has been measured.

    Explicit attention saves the probabilities and contiguous copies of queries, keys and values. The QKV projection is
    alive during it, but not saved.
    """
    inputs = p.attention if p.core_cp > 1 else p.core_inputs
    made = p.core_inputs
    if p.augmented_attention:
        # Padded copies of queries, keys, values and output are kept, and the output for the next GEMM.
        wide = (2 * p.attention + 2 * p.core_keys) * (p.model.head_dim + AUGMENTED_FEATURES) // p.model.head_dim
        kept = wide + p.attention + FP32 * p.tokens * p.heads
        return Op("attention", kept=kept, forward=p.projection, backward=p.hidden + p.attention + wide)
    if not p.explicit_attention:
        # megads' kernel keeps two numbers per row instead of the logsumexp.
        logsumexp = (2 if p.fused_attention else 1) * FP32 * p.tokens * p.heads
        kept = inputs + p.attention + logsumexp + p.repeated_keys
        backward = p.hidden + p.attention + made + p.repeated_keys + p.dq_partials
        forward = 0 if p.cp == 1 else p.projection + p.exchanged_beside
        return Op("attention", kept=kept, forward=forward, backward=backward)
    heads, kv_heads = p.core_heads
    in_projection = p.cp == 1 and p.model.position is not Position.rope and not p.model.qk_norm
    if heads > kv_heads == 1 and (in_projection or (p.ulysses and p.core_cp == 1)):
        inputs += p.attention  # queries are copied; keys and values are views of a tensor that has them, too
    kept, forward, backward = _explicit_attention(p)
    backward += p.hidden + max(2 * p.attention, made)
    forward += p.projection + p.exchanged_beside
    return Op("attention", kept=inputs + kept, forward=forward, backward=backward)


def _ring_op(p: BatchSizes) -> Op:
    """Ring attention: it saves this rank's queries, keys and values, the output and one log-sum-exp per row.

    Both passes hold the block of keys and values that they compute with, the next one, what is sent meanwhile, and the
    scores of a part of a block, unless FlashAttention computes it. The forward pass adds the output up in fp32, the
    backward pass the gradients of queries and of own keys and values; it also holds the gradients of a block, and of
    the previous one, which are on their way.
    """
    w = p.weight_bytes
    wide, chunk = max(FP32, w), p.seq_len // (2 * p.core_cp)
    blocks, widened = 3 * 2 * p.core_keys, wide // w if w < FP32 else 0
    scores = p.micro_batch_size * p.core_heads[0] * chunk * min(chunk, KEYS_AT_ONCE)
    drops = bool(p.model.attention_dropout)
    mask = scores + mask_temporaries(scores, min(chunk, KEYS_AT_ONCE)) if drops else 0
    capped = wide * scores if p.model.attention_logit_softcap is not None else 0
    part = max(2 * wide * scores + capped, wide * scores + mask)
    part = (w + wide) // w * p.attention // 2 if p.flash_in_ring else part
    copied = 2 * 2 * p.core_keys  # a block is put together while the one before is there
    forward = widened * p.attention + blocks + max(copied, part)
    part_back = max(2 * wide * scores, wide * scores + (2 * wide * scores + mask if drops else 0)) + capped
    part_back = p.attention + 2 * p.core_keys if p.flash_in_ring else part_back
    gradients = wide // w * (p.attention + 4 * 2 * p.core_keys)
    backward = p.hidden + p.attention + gradients + blocks + max(copied, part_back)
    kept = p.core_inputs + p.attention + wide * p.tokens * p.heads
    forward += p.projection if p.ulysses else 0
    return Op("attention", kept=kept, forward=forward, backward=backward)


def core_ops(p: BatchSizes, recompute: bool) -> list[Op]:
    """The attention core. If recomputed, it keeps the QKV projection; its output counts at the next operation."""
    counted = recompute or p.explicit_attention
    ops = [
        *_tokens_to_heads_op(p),
        *_gather_op(p),
        _ring_op(p) if p.ring else _attention_op(p),
        *_heads_to_tokens_op(p, 0 if counted else p.attention),
    ]
    if not recompute:
        return ops
    projection = p.projection
    if p.ulysses or p.gathered_keys_and_values or p.explicit_attention:  # without recomputation copies are kept instead
        ops[0] = replace(ops[0], kept=ops[0].kept + projection, forward=ops[0].forward - projection)
    # The gradients of the core's output and of the residual.
    return recomputed(ops, inputs=projection, arriving=p.hidden + p.attention)
