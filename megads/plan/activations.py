"""What the model's operations hold in memory, one micro-batch on one rank.

Derived from the code of `megads.model`, `megads.parallel` and of torch's kernels, not from a paper's table: `kept` is
what autograd saves (tests compare it with `saved_tensors_hooks`), `forward` and `backward` are the temporaries that
are alive together (tests compare the whole with the allocator's peak).

Letters as in `megads.plan.micro_batch`.
"""

from __future__ import annotations

from dataclasses import replace

from megads.model.config import Position
from megads.parallel.config import Recompute
from megads.plan.dropout import explicit_attention, hidden_dropout
from megads.plan.micro_batch import FP32, INT64, Pass
from megads.plan.tape import Op, recomputed


def embedding_ops(p: Pass) -> list[Op]:
    """Word embedding, learned positions, embedding LayerNorm, dropout."""
    model, hidden = p.model, p.hidden
    mask, drawing = hidden_dropout(p)
    positions = p.matrix(model.max_seq_len, model.hidden_size) if model.position is Position.learned else 0
    words = p.matrix(p.vocab_rows, model.hidden_size)
    # Both ways: what was looked up, and its copy with foreign tokens masked or positions added.
    lookup = Op(
        "embedding",
        kept=4 * INT64 * p.tokens,
        forward=max(2 * p.region_hidden, p.closed()),
        backward=p.closed_backward(p.region_hidden),
        gradient=words + positions,
    )
    norm = Op("embedding norm", kept=hidden + p.norm_statistics, forward=hidden, backward=2 * hidden + p.norm_sums)
    dropout = Op("embedding dropout", kept=mask, forward=hidden + drawing, backward=2 * hidden)
    return [lookup, *([norm] if model.embedding_norm else []), *([dropout] if mask else [])]


def document_mask_ops(p: Pass) -> list[Op]:
    """The micro-batch's own additive mask, [b, n or 1, s/cp, s], that the blocks of a stage share."""
    if not p.document_mask or p.masked_by_kernel:
        return []
    hidden_keys = p.tokens * p.seq_len
    mask = p.micro_batch_size * p.bias_table * p.mask_bytes
    return [Op("document mask", kept=mask, forward=p.hidden + hidden_keys)]


def _rotary_ops(p: Pass) -> list[Op]:
    """Queries and keys turned, values copied; all of it is kept by the attention core alone.

    Forward, beside the QKV projection and the turned queries, the keys are cast to fp32, turned in halves and joined;
    backward runs the same way for each.
    """
    if p.model.position is not Position.rope:
        return []
    if p.fused:  # the kernel has no temporaries; the projection is there until attention returns
        return [Op("rotary", forward=7 * p.attention, backward=p.hidden + 6 * p.attention)]
    fp32 = FP32 * p.attention // p.weight_bytes
    turning = 2 * fp32 + (fp32 + p.attention if p.weight_bytes < FP32 else 0)
    return [Op("rotary", forward=4 * p.attention + turning, backward=p.hidden + 3 * p.attention + turning)]


def _gather_op(p: Pass) -> list[Op]:
    """Context parallelism's gathering of keys and values.

    Forward, beside the QKV projection, this rank's and all ranks' keys and values are there in the order of ranks, and,
    kept, in that of the sample. Backward sums their gradients in fp32, in a copy in the order of ranks; gloo makes
    another one.
    """
    if p.cp == 1:
        return []
    summed = FP32 * p.gathered_keys_and_values // p.weight_bytes * (1 if p.cuda else 2)
    return [
        Op(
            "gathered keys and values",
            kept=p.gathered_keys_and_values,
            forward=3 * p.attention + 2 * p.attention + p.gathered_keys_and_values * (1 if p.cuda else 2),
            backward=p.hidden
            + p.attention
            + p.gathered_keys_and_values
            + summed
            + FP32 * p.gathered_keys_and_values // p.cp // p.weight_bytes,
        )
    ]


def _attention_op(p: Pass) -> Op:
    """The kernel of scaled_dot_product_attention or our own, or the explicit product of attention dropout.

    The kernel saves queries, keys and values (views of the QKV projection, or copies where they were turned or
    gathered), its output and an fp32 logsumexp of every row; backward makes the gradients of the three from that of the
    output. Gathered keys and values are counted where they are gathered.

    The explicit product saves contiguous copies of queries, keys and values beside its probabilities; the QKV
    projection, which nobody saves, is alive beside it.
    """
    inputs = p.attention if p.cp > 1 else 3 * p.attention
    made = p.attention + (p.gathered_keys_and_values or 2 * p.attention)
    if not p.explicit_attention:
        # Our own kernel keeps two numbers of every row in its place.
        logsumexp = (2 if p.fused_attention else 1) * FP32 * p.tokens * p.heads
        return Op(
            "attention",
            kept=inputs + p.attention + logsumexp,
            forward=0 if p.cp == 1 else 3 * p.attention,
            backward=p.hidden + p.attention + made,
        )
    kept, forward, backward = explicit_attention(p)
    return Op(
        "attention",
        kept=inputs + kept,
        forward=3 * p.attention + forward,
        backward=p.hidden + max(2 * p.attention, made) + backward,
    )


def _core_ops(p: Pass, recompute: bool) -> list[Op]:
    """The attention core; recomputed, it keeps the QKV projection, and its output is the next operation's."""
    ops = [*_gather_op(p), _attention_op(p)]
    if not recompute:
        return ops
    projection = 3 * p.attention
    if p.cp > 1 or p.explicit_attention:  # what is kept otherwise are copies
        ops[0] = replace(ops[0], kept=ops[0].kept + projection, forward=ops[0].forward - projection)
    # The gradients of the core's output and of the residual beside it.
    return recomputed(ops, inputs=projection, arriving=p.hidden + p.attention)


def attention_ops(p: Pass, recompute_core: bool) -> list[Op]:
    """x + dropout(attention(norm(x)))."""
    hidden, attention, width = p.hidden, p.attention, p.model.hidden_size
    mask, drawing = hidden_dropout(p)
    dropped = hidden if mask else 0
    qkv = p.matrix(3 * width // p.tp, width)
    # The output of the explicit product is copied for the projection; it and QKV live until attention returns.
    copied, still_there = (attention, 4 * attention) if p.explicit_attention else (0, 0)
    if recompute_core:
        copied, still_there = attention, attention if p.explicit_attention else 0
    return [
        Op("input norm", kept=hidden + p.norm_statistics, forward=hidden, backward=3 * hidden + p.norm_sums),
        Op(
            "qkv",
            kept=hidden,
            forward=p.opened(3 * attention),
            backward=hidden + p.opened_backward(3 * attention, qkv),
            gradient=qkv,
            deferred=hidden + 3 * attention,
        ),
        *_rotary_ops(p),
        *_core_ops(p, recompute_core),
        Op(
            "attention output",
            kept=copied + mask,
            forward=max(p.closed() + still_there, hidden + drawing),
            backward=hidden + dropped + p.closed_backward(attention),
            gradient=p.matrix(width, width // p.tp),
            deferred=attention + p.region_hidden,
        ),
        Op("attention residual", forward=2 * hidden + dropped, backward=hidden),
    ]


def mlp_ops(p: Pass) -> list[Op]:
    """x + dropout(mlp(norm(x))). The output of attention lives until the block returns."""
    hidden, ffn, width = p.hidden, p.ffn, p.model.hidden_size
    attended = hidden
    mask, drawing = hidden_dropout(p)
    dropped = hidden if mask else 0
    matrix = p.matrix(p.model.ffn_width // p.tp, width)
    return [
        Op(
            "post-attention norm",
            kept=hidden + p.norm_statistics,
            forward=attended + dropped + hidden,
            backward=3 * hidden + p.norm_sums,
        ),
        Op(
            "mlp up",
            kept=hidden,
            forward=attended + p.opened(ffn),
            backward=hidden + p.opened_backward(ffn, matrix),
            gradient=matrix,
            deferred=hidden + ffn,
        ),
        Op("gelu", kept=ffn, forward=attended + ffn, backward=hidden + 2 * ffn),
        Op(
            "mlp down",
            kept=ffn + mask,
            forward=attended + max(p.closed(), hidden + drawing),
            backward=hidden + dropped + p.closed_backward(ffn),
            gradient=matrix,
            deferred=ffn + p.region_hidden,
        ),
        Op("mlp residual", forward=attended + 2 * hidden + dropped, backward=hidden),
    ]


def block_ops(p: Pass, mode: Recompute = Recompute.none) -> list[Op]:
    """One transformer block.

    Args:
        p: the micro-batch.
        mode: what is recomputed of it.
    """
    ops = [*attention_ops(p, mode is Recompute.selective), *mlp_ops(p)]
    return recomputed(ops, inputs=p.hidden, arriving=p.hidden) if mode is Recompute.full else ops


def final_norm_ops(p: Pass) -> list[Op]:
    """The LayerNorm after the last block."""
    return [Op("final norm", kept=p.hidden + p.norm_statistics, forward=p.hidden, backward=2 * p.hidden + p.norm_sums)]


def head_ops(p: Pass) -> list[Op]:
    """Output projection and vocabulary-parallel cross entropy.

    The loss saves fp32 probabilities, beside which the logits live until it is computed; backward writes its gradient
    into a second such tensor and, under bf16, casts that. Our own kernels keep the logits and nothing else of that
    size; backward writes their gradient.
    """
    tokens, matrix = p.tokens, p.matrix(p.vocab_rows, p.model.hidden_size)
    probabilities = FP32 * tokens * p.vocab_rows
    cast = p.logits if p.weight_bytes < FP32 else 0
    if p.fused:
        loss = Op(
            "loss",
            kept=p.logits + (INT64 + 2 * FP32) * tokens,
            forward=8 * FP32 * tokens,
            backward=p.logits,
            is_loss=True,
        )
    else:
        loss = Op(
            "loss",
            kept=probabilities + 2 * INT64 * tokens,
            forward=p.logits + 6 * FP32 * tokens,
            backward=probabilities + cast + 6 * FP32 * tokens,
            is_loss=True,
        )
    return [
        Op(
            "head",
            kept=p.hidden,
            forward=p.opened(p.logits),
            backward=p.opened_backward(p.logits, matrix),
            gradient=matrix,
            deferred=p.hidden + p.logits,
        ),
        loss,
    ]


def received_ops(p: Pass) -> list[Op]:
    """A later stage's input, read where it arrived; backward leaves its gradient, which is sent."""
    return [Op("received", kept=p.hidden, backward=p.hidden)]


def sent_ops(p: Pass) -> list[Op]:
    """An earlier stage's output, of which only the graph is kept for backward, and the test whether it is finite."""
    return [Op("sent", forward=p.hidden + 3 * p.tokens * p.model.hidden_size // p.shards)]
