"""What the model's operations hold in memory, one micro-batch on one rank.

Derived from the code of `megads.model`, `megads.parallel` and of torch's kernels, not from a paper's table: `kept` is
what autograd saves (tests compare it with `saved_tensors_hooks`), `forward` and `backward` are the temporaries that
are alive together (tests compare the whole with the allocator's peak). Our own kernels hold nothing for dropout, plain
torch what it needs to draw and apply a mask.

Letters as in `megads.plan.micro_batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megads.model.config import MLPKind, NormPlacement, Position, QKNormWidth
from megads.model.stage_names import EMBEDDING, HEAD
from megads.ops import processor
from megads.ops.config import AUGMENTED_FEATURES, DRAWN_AT_ONCE
from megads.parallel.config import Recompute
from megads.plan.memory_timeline import Op, recomputed
from megads.plan.micro_batch import FP32, INT64, Pass


def _drawing(elements: int, width: int) -> int:
    """Bytes beside the mask while plain torch draws it: a byte of four tensors for a bit that is drawn, and counters.

    Args:
        elements: of the mask.
        width: of a row of it.
    """
    return INT64 * min(elements, max(DRAWN_AT_ONCE, width)) + 3 * INT64 * (elements // width)


def _hidden_dropout(p: Pass) -> tuple[int, int]:
    """(kept, forward): torch's mask, a byte an element; while it is drawn, or applied with a product on the way."""
    if not p.model.hidden_dropout:
        return 0, 0
    if p.fused:
        return 0, p.hidden
    elements = p.tokens * p.model.hidden_size // p.shards
    return elements, max(_drawing(elements, p.model.hidden_size), 2 * p.hidden)


def _explicit_attention(p: Pass) -> tuple[int, int, int]:
    """(kept, forward, backward) of scores in memory, beside queries, keys and values.

    Kept are probabilities. Forward and backward are what is alive beyond that: scores and what dropout leaves; the
    gradients of both, and what dropout leaves, made again. Plain torch computes the softmax in fp32, and holds a mask
    meanwhile.
    """
    w, scores = p.weight_bytes, p.scores
    if p.model.attention_logit_softcap is not None:
        kept, forward, backward = _explicit_softmax(p)
        # The slope of the cap; while it is made scores are there in fp32 twice.
        return kept + w * scores, forward + 2 * FP32 * scores, backward + w * scores
    return _explicit_softmax(p)


def _explicit_softmax(p: Pass) -> tuple[int, int, int]:
    """The same of scores that are not capped."""
    w, scores = p.weight_bytes, p.scores
    if not p.model.attention_dropout and not p.masked_by_kernel:
        # The softmax, in fp32, and its cast; with sinks a column more.
        column = FP32 * p.tokens * p.heads if p.model.attention_sinks else 0
        cast = w * scores if w < FP32 else 0
        kept = FP32 * scores + column + cast
        return kept, 2 * FP32 * scores + column, 3 * FP32 * scores + column
    if not p.model.attention_dropout:  # raw scores; gradients of probabilities and scores
        return w * scores, w * scores, 2 * w * scores
    if p.masked_by_kernel:
        return w * scores, 2 * w * scores, 3 * w * scores
    mask = scores + _drawing(scores, p.seq_len)
    forward = w * scores + max((2 * FP32 - w) * scores, mask, (1 + w) * scores)
    wide = (3 if w < FP32 else 1) * FP32 * scores  # gradient and probabilities cast, and the gradient of the scores
    backward = w * scores + max(mask, scores + max(wide, 2 * w * scores))
    return w * scores, forward, backward


def _norm_op(p: Pass, name: str, *, beside: int = 0, backward: int) -> Op:
    """A norm: its input is kept, its output is not its own.

    Args:
        p: the micro-batch.
        name: which norm.
        beside: bytes that are alive beside it forward.
        backward: of the gradients that are alive together.
    """
    # The square, or the product, beside the output.
    working = p.norm_working
    forward = beside + p.hidden + working
    return Op(name, kept=p.norm_kept, forward=forward, backward=backward + 3 * working + p.norm_sums)


def embedding_ops(p: Pass) -> list[Op]:
    """Word embedding, learned positions, embedding norm, dropout."""
    model, hidden = p.model, p.hidden
    mask, drawing = _hidden_dropout(p)
    positions = p.matrix(model.max_seq_len, model.hidden_size) if model.position is Position.learned else 0
    words = p.matrix(p.vocab_rows, model.hidden_size)
    straight = p.step_sums and not p.cuda and not positions
    # On a CPU gradients of tokens are added in fp32, in the sums of the step or in a table of their own.
    wide = 0 if p.cuda or p.weight_bytes == FP32 else FP32 * p.tokens * model.hidden_size
    table = 0 if p.cuda or p.step_sums or p.weight_bytes == FP32 else FP32 * words // p.weight_bytes
    # Both ways: what was looked up, and its copy with foreign tokens masked or positions added.
    lookup = Op(
        "embedding",
        kept=4 * INT64 * p.tokens,
        forward=max(2 * p.region_hidden, p.closed()),
        backward=p.closed_backward(p.region_hidden) + wide + table,
        gradient=words + positions,
        in_sums=straight,
    )
    norm = _norm_op(p, "embedding norm", backward=2 * hidden)
    dropout = Op("embedding dropout", kept=mask, forward=hidden + drawing, backward=2 * hidden)
    return [lookup, *([norm] if model.embedding_norm else []), *([dropout] if mask else [])]


def _document_mask_ops(p: Pass) -> list[Op]:
    """The micro-batch's own additive mask, [b, n or 1, s/cp, s], that the blocks of a stage share."""
    if not p.document_mask or p.masked_by_kernel:
        return []
    hidden_keys = p.tokens * p.seq_len
    mask = p.micro_batch_size * p.bias_table * p.mask_bytes
    return [Op("document mask", kept=mask, forward=p.hidden + hidden_keys)]


def _head_norm_ops(p: Pass) -> list[Op]:
    """Norms of queries and keys, which keep copies of both."""
    if not p.model.qk_norm:
        return []
    working = FP32 * p.attention // p.weight_bytes if p.norm_in_steps else 0
    if p.model.qk_norm_width is QKNormWidth.full and p.tp > 1:  # of both in fp32
        working = FP32 * (p.attention + p.keys) // p.weight_bytes
    return [
        Op(
            "query and key norms",
            kept=p.head_norms_kept,
            forward=p.projection + p.attention + p.keys + working,
            backward=p.hidden + 2 * p.projection + 3 * working + p.head_norm_sums,
        )
    ]


def _copied_ops(p: Pass) -> list[Op]:
    """Queries and keys normed and turned, or queries of several groups put beside each other; values copied.

    But for what the norms keep, all of it is kept by the attention core alone. Turning, beside the QKV projection and
    the turned queries, the keys are cast to fp32, turned in halves and joined; backward runs the same way for each.
    """
    # Beside the projection: queries and keys that the norms made, or queries that are copied.
    beside = p.attention if p.model.queries_per_kv > 1 and p.model.kv_heads > p.tp else 0
    if p.model.qk_norm:
        beside = p.attention + p.keys
    elif p.model.query_scale != 1.0:
        beside = p.attention
    norms = _head_norm_ops(p)
    if p.model.position is not Position.rope:
        copied = Op("heads copied", forward=2 * p.projection, backward=p.hidden + 2 * p.projection)
        return [*norms, copied] if beside else []
    there = p.projection + beside
    if p.fused:  # the kernel has no temporaries
        return [*norms, Op("rotary", forward=there + p.projection, backward=p.hidden + beside + 2 * p.projection)]

    def turning(size: int) -> int:
        fp32 = FP32 * size // p.weight_bytes
        return 2 * fp32 + (fp32 + size if p.weight_bytes < FP32 else 0)

    return [
        *norms,
        Op(
            "rotary",
            forward=there + max(turning(p.attention), p.attention + turning(p.keys)),
            backward=p.hidden + there + turning(p.attention),
        ),
    ]


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
            forward=p.projection + 2 * p.keys + p.gathered_keys_and_values * (1 if p.cuda else 2),
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
    output. Gathered keys and values are counted where they are gathered. So do the kernels for GPUs, of which none has
    been measured: FlexAttention's, flash-attn's, cuDNN's.

    The explicit product saves contiguous copies of queries, keys and values beside its probabilities; the QKV
    projection, which nobody saves, is alive beside it.
    """
    inputs = p.attention if p.cp > 1 else p.projection
    made = p.attention + (p.gathered_keys_and_values or 2 * p.keys)
    if p.augmented_attention:
        return _augmented_attention_op(p)
    if not p.explicit_attention:
        # Our own kernel keeps two numbers of every row in its place.
        logsumexp = (2 if p.fused_attention else 1) * FP32 * p.tokens * p.heads
        return Op(
            "attention",
            kept=inputs + p.attention + logsumexp + p.repeated_keys,
            forward=0 if p.cp == 1 else p.projection,
            backward=p.hidden + p.attention + made + p.repeated_keys + p.split_sums,
        )
    one_group = p.model.queries_per_kv > 1 and p.model.kv_heads == p.tp
    if one_group and p.cp == 1 and p.model.position is not Position.rope and not p.model.qk_norm:
        inputs += p.attention  # the queries are copied, keys and values are views of the projection
    kept, forward, backward = _explicit_attention(p)
    return Op(
        "attention",
        kept=inputs + kept,
        forward=p.projection + forward,
        backward=p.hidden + max(2 * p.attention, made) + backward,
    )


def _augmented_attention_op(p: Pass) -> Op:
    """Longer copies of queries, keys, values and the output, and of the output what the next product reads."""
    length = p.model.head_dim + AUGMENTED_FEATURES
    wide = (2 * p.attention + 2 * p.keys) * length // p.model.head_dim
    return Op(
        "attention",
        kept=wide + p.attention + FP32 * p.tokens * p.heads,
        forward=p.projection,
        backward=p.hidden + p.attention + wide,
    )


def _core_ops(p: Pass, recompute: bool) -> list[Op]:
    """The attention core; recomputed, it keeps the QKV projection, and its output is the next operation's."""
    ops = [*_gather_op(p), _attention_op(p)]
    if not recompute:
        return ops
    projection = p.projection
    if p.cp > 1 or p.explicit_attention:  # what is kept otherwise are copies
        ops[0] = replace(ops[0], kept=ops[0].kept + projection, forward=ops[0].forward - projection)
    # The gradients of the core's output and of the residual beside it.
    return recomputed(ops, inputs=projection, arriving=p.hidden + p.attention)


def _attention_ops(p: Pass, recompute_core: bool) -> list[Op]:
    """x + dropout(attention(norm(x))), or x + dropout(norm(attention(x)))."""
    before = p.model.norm_placement is NormPlacement.input
    hidden, attention, projection, width = p.hidden, p.attention, p.projection, p.model.hidden_size
    mask, drawing = _hidden_dropout(p)
    dropped = hidden if mask else 0
    qkv = p.matrix(p.model.qkv_width // p.tp, width)
    # The output of the explicit product is copied for the projection; it and QKV live until attention returns.
    copied, still_there = (attention, attention + projection) if p.explicit_attention else (0, 0)
    if recompute_core:
        copied, still_there = attention, attention if p.explicit_attention else 0
    output = Op(
        "attention output",
        kept=copied + mask,
        forward=max(p.closed() + still_there, hidden + drawing),
        backward=hidden + dropped + p.closed_backward(attention),
        gradient=p.matrix(width, p.model.attention_width // p.tp),
        deferred=attention + p.region_hidden,
    )
    return [
        *([_norm_op(p, "input norm", backward=3 * hidden)] if before else []),
        Op(
            "qkv",
            kept=hidden,
            forward=p.opened(projection),
            backward=hidden + p.opened_backward(projection, qkv),
            gradient=qkv,
            deferred=hidden + projection,
        ),
        *_copied_ops(p),
        *_core_ops(p, recompute_core),
        output,
        *([] if before else [_norm_op(p, "attention output norm", backward=3 * hidden)]),
        Op("attention residual", forward=2 * hidden + dropped, backward=hidden),
    ]


def _inner_op(p: Pass, attended: int) -> tuple[Op, int]:
    """What is between the MLP's projections, and the bytes of its input.

    Of GELU that is kept, and of our own kernel of SwiGLU; torch's also keeps silu(gate), and backward has the gradients
    of both factors before they are put together.
    """
    hidden, ffn = p.hidden, p.ffn
    if p.model.mlp is MLPKind.gelu:
        return Op("gelu", kept=ffn, forward=attended + ffn, backward=hidden + 2 * ffn), ffn
    silu, apart = (0, 0) if p.fused else (ffn, 2 * ffn)
    kept, backward = 2 * ffn + silu, hidden + 3 * ffn + apart
    return Op("swiglu", kept=kept, forward=attended + ffn, backward=backward), 2 * ffn


def _mlp_ops(p: Pass) -> list[Op]:
    """x + dropout(mlp(norm(x))), beside which the output of attention lives; or x + dropout(norm(mlp(x)))."""
    hidden, ffn, width = p.hidden, p.ffn, p.model.hidden_size
    before = p.model.norm_placement is NormPlacement.input
    attended = hidden if before else 0
    mask, drawing = _hidden_dropout(p)
    dropped = hidden if mask else 0
    inner, opened = _inner_op(p, attended)
    into, out_of = p.matrix(p.model.mlp_rows // p.tp, width), p.matrix(p.model.ffn_width // p.tp, width)
    norm = _norm_op(p, "post-attention norm", beside=attended + dropped, backward=3 * hidden)
    return [
        *([norm] if before else []),
        Op(
            "mlp up",
            kept=hidden,
            forward=attended + p.opened(opened),
            backward=hidden + p.opened_backward(opened, into),
            gradient=into,
            deferred=hidden + opened,
        ),
        inner,
        Op(
            "mlp down",
            kept=ffn + mask,
            forward=attended + max(p.closed(), hidden + drawing),
            backward=hidden + dropped + p.closed_backward(ffn),
            gradient=out_of,
            deferred=ffn + p.region_hidden,
        ),
        *([] if before else [_norm_op(p, "mlp output norm", backward=3 * hidden)]),
        Op("mlp residual", forward=attended + 2 * hidden + dropped, backward=hidden),
    ]


def _parallel_ops(p: Pass, recompute_core: bool) -> list[Op]:
    """x + dropout(attention(norm(x)) + mlp(norm(x))): both enter and leave their region together.

    What the MLP's first projection made waits for attention to be done, and its gradient backward.
    """
    hidden, attention, projection, ffn, width = p.hidden, p.attention, p.projection, p.ffn, p.model.hidden_size
    mask, drawing = _hidden_dropout(p)
    dropped = hidden if mask else 0
    copied = attention if p.explicit_attention or recompute_core else 0
    inner, opened = _inner_op(p, attended=copied)
    into = p.matrix(p.model.qkv_width // p.tp, width) + p.matrix(p.model.mlp_rows // p.tp, width)
    out_of = p.matrix(width, p.model.attention_width // p.tp) + p.matrix(p.model.ffn_width // p.tp, width)
    core = [*_copied_ops(p), *_core_ops(p, recompute_core)]
    return [
        _norm_op(p, "input norm", backward=3 * hidden),
        Op(
            "qkv and mlp up",
            kept=hidden + opened,
            forward=p.opened(projection + opened) - opened,
            backward=hidden + p.opened_backward(projection + opened, into),
            gradient=into,
            deferred=hidden + projection + opened,
        ),
        *(replace(op, backward=op.backward + opened) for op in core),
        replace(inner, kept=inner.kept - opened, backward=inner.backward + attention),
        Op(
            "attention output and mlp down",
            kept=copied + ffn + mask,
            forward=max(p.closed() + copied, hidden + drawing),
            backward=hidden + dropped + p.closed_backward(attention + ffn),
            gradient=out_of,
            deferred=attention + ffn + p.region_hidden,
        ),
        Op("residual", forward=2 * hidden + dropped, backward=hidden),
    ]


def block_ops(p: Pass, mode: Recompute = Recompute.none) -> list[Op]:
    """One transformer block.

    Args:
        p: the micro-batch.
        mode: what is recomputed of it.
    """
    selective = mode is Recompute.selective
    ops = _parallel_ops(p, selective) if p.model.parallel_block else [*_attention_ops(p, selective), *_mlp_ops(p)]
    normed = ops[0].name == "input norm"
    if mode is Recompute.full and normed and p.norm_in_steps and p.weight_bytes < FP32:  # a copy is kept, not the input
        ops[0] = replace(ops[0], kept=ops[0].kept + p.hidden)
    return recomputed(ops, inputs=p.hidden, arriving=p.hidden) if mode is Recompute.full else ops


def final_norm_ops(p: Pass) -> list[Op]:
    """The norm after the last block."""
    norm = _norm_op(p, "final norm", backward=2 * p.hidden)
    # What is multiplied is there beside the product.
    return [norm if p.model.logit_multiplier == 1.0 else replace(norm, forward=norm.forward + p.hidden)]


def _head_ops(p: Pass) -> list[Op]:
    """Output projection and vocabulary-parallel cross entropy.

    The loss saves fp32 probabilities, beside which the logits live until it is computed; backward writes its gradient
    into a second such tensor and, under bf16, casts that. Our own kernels write the gradient over the logits, forward.
    """
    if p.in_chunks:
        return [_chunked_head_op(p)]
    tokens, matrix = p.tokens, p.matrix(p.vocab_rows, p.model.hidden_size)
    probabilities = FP32 * tokens * p.vocab_rows
    cast = p.logits if p.weight_bytes < FP32 else 0
    if p.fused:
        loss = Op(
            "loss",
            kept=p.logits,
            forward=12 * FP32 * tokens,
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
    # The slope of capped logits; while it is made they are there in fp32 twice.
    capped = 0 if p.model.final_logit_softcap is None else p.logits
    return [
        Op(
            "head",
            kept=p.hidden + capped,
            forward=p.opened(p.logits) + (2 * probabilities if capped else 0),
            backward=p.opened_backward(p.logits, matrix),
            arriving=p.logits,
            gradient=matrix,
            deferred=p.hidden + p.logits,
        ),
        loss,
    ]


def _chunked_head_op(p: Pass) -> Op:
    """Both in chunks of tokens, whose gradients are made forward; that of the input is kept, and waits for backward."""
    matrix, logits = p.matrix(p.vocab_rows, p.model.hidden_size), p.chunk * p.vocab_rows * p.weight_bytes
    wide = FP32 * p.chunk * p.vocab_rows if p.weight_bytes < FP32 else 0
    loss = 12 * FP32 * p.chunk if p.fused else wide + 6 * FP32 * p.chunk
    # Our own products add to the sums; torch's are made first and, on a CPU, cast.
    cast = FP32 * matrix // p.weight_bytes if p.weight_bytes < FP32 and not p.cuda else 0
    in_sums = p.fused and not p.cuda and processor.multiplies(low=p.weight_bytes < FP32)
    working = logits + max(loss, 0 if in_sums else matrix + cast)
    if p.model.final_logit_softcap is not None:
        working += logits + 2 * FP32 * p.chunk * p.vocab_rows
    if p.shards > 1:
        # Input and its gradient, of all tokens each; then the gradient is scattered.
        working = max(2 * p.region_hidden - p.hidden + working, p.region_hidden + p.reordered + p.gloo_copy)
    return Op(
        "head and loss",
        kept=p.hidden + (0 if p.step_sums else FP32 * matrix // p.weight_bytes),
        forward=p.hidden + working,
        gradient=0 if p.step_sums else matrix,
        early=matrix if p.step_sums else 0,
        is_loss=True,
    )


def _received_ops(p: Pass) -> list[Op]:
    """A later stage's input, read where it arrived; backward leaves its gradient, which is sent."""
    return [Op("received", kept=p.hidden, backward=p.hidden)]


def _sent_ops(p: Pass) -> list[Op]:
    """An earlier stage's output, of which only the graph is kept for backward, and the test whether it is finite."""
    return [Op("sent", forward=p.hidden + 3 * p.tokens * p.model.hidden_size // p.shards)]


def stage_ops(
    one_pass: Pass, layers: Sequence[str], recompute: Mapping[str, Recompute], *, first: bool, last: bool
) -> list[Op]:
    """The operations of a pipeline stage, in order.

    Args:
        one_pass: the micro-batch.
        layers: names of the model's stages it holds.
        recompute: what each of the blocks among them recomputes.
        first: it reads tokens instead of receiving activations.
        last: it computes the loss instead of sending activations.
    """
    first_block = next((layer for layer in layers if layer.startswith("blocks.")), None)
    ops: list[Op] = [] if first else _received_ops(one_pass)
    for layer in layers:
        if layer == EMBEDDING:
            ops += embedding_ops(one_pass)
        elif layer == HEAD:
            ops += _head_ops(one_pass)
        elif layer == "final_norm":
            ops += final_norm_ops(one_pass)
        else:
            ops += _document_mask_ops(one_pass) if layer == first_block else []
            ops += block_ops(one_pass, recompute[layer])
    if not last:
        ops += _sent_ops(one_pass)
    return ops
