"""Activation memory of the model's operations, for one micro-batch on one rank.

Derived from the code of `megads.model`, `megads.parallel` and PyTorch's kernels, not from a paper's table. `kept` is
what autograd saves (tests compare it with `saved_tensors_hooks`). `forward` and `backward` are temporaries that are
alive at the same time (tests compare the total with the allocator's peak). megads' kernels save nothing for dropout;
plain PyTorch saves the mask and needs memory to generate and apply it.

Symbols as in `megads.tools.plan.micro_batch`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megads.api import EMBEDDING, HEAD, MLPKind, NormPlacement, Position, QKNormWidth, Recompute
from megads.model.config import FINAL_NORM
from megads.tools.plan.core_activations import core_ops, mask_temporaries
from megads.tools.plan.expert_activations import ExpertSizes
from megads.tools.plan.memory_timeline import Op, numbered, recomputed
from megads.tools.plan.micro_batch import FP32, INT64, BatchSizes, adds_to_main_grad


def _hidden_dropout(p: BatchSizes) -> tuple[int, int]:
    """(kept, forward): PyTorch's mask, one byte per element, and the temporaries to generate or apply it."""
    if not p.model.hidden_dropout:
        return 0, 0
    if p.fused:
        return 0, p.hidden
    elements = p.tokens * p.model.hidden_size // p.shards
    return elements, max(mask_temporaries(elements, p.model.hidden_size), 2 * p.hidden)


def _norm_op(p: BatchSizes, name: str, *, alive: int = 0, backward: int) -> Op:
    """A norm; what it keeps and its temporaries are those of `BatchSizes`, its output is counted at the next operation.

    Args:
        p: the micro-batch.
        name: which norm.
        alive: bytes of other tensors that are alive during its forward pass.
        backward: bytes of the gradients that are alive at the same time in its backward pass.
    """
    rows, width = p.tokens // p.shards, p.model.hidden_size
    # The fp32 square, or the scaled input, is alive with the output, or with the input gradient.
    working = FP32 * rows * width if p.unfused_rmsnorm else 0
    backward += 3 * working + p.norm_partial_grads(rows, width)
    return Op(name, kept=p.kept_by_norm(rows, width), forward=alive + p.hidden + working, backward=backward)


def _column_parallel_op(
    p: BatchSizes, name: str, output: int, rows: int, *, alive: int = 0, residual: int | None = None
) -> Op:
    """The GEMM of a column-parallel layer, which keeps its input.

    With sequence parallelism the input is gathered, in the backward pass again while the input gradient is alive; the
    input gradient is then reduce-scattered while wgrad is computed.

    Args:
        p: the micro-batch.
        name: which layer.
        output: bytes of its output, whose gradient is alive in the backward pass.
        rows: rows of its weight on this rank.
        alive: bytes of other tensors that are alive during its forward pass.
        residual: bytes of the residual's gradient in the backward pass; None: a hidden tensor.
    """
    hidden, whole, gradient = p.hidden, p.region_hidden, p.matrix(rows, p.model.hidden_size)
    if p.shards == 1:
        forward, backward = output, max(hidden + output, 2 * hidden if p.tp > 1 else 0)
    else:
        forward = whole + max(p.gloo_copy, p.reordered, output)
        gathering = whole + max(p.gloo_copy, p.reordered)
        scattering = whole + p.gloo_copy + hidden
        backward = output + whole
        backward += max(gathering - gradient, p.reordered + scattering - gradient, scattering)
    backward += hidden if residual is None else residual
    return Op(
        name, kept=hidden, forward=alive + forward, backward=backward, gradient=gradient, deferred=hidden + output
    )


def _row_parallel_op(
    p: BatchSizes, name: str, inputs: int, columns: int, *, kept: int, alive: int = 0, held: int = 0
) -> Op:
    """The GEMM of a row-parallel layer that leaves a tensor-parallel region, its reduction, bias and dropout.

    Args:
        p: the micro-batch.
        name: which layer.
        inputs: bytes of its input.
        columns: columns of its weight on this rank.
        kept: bytes of the input that no other operation keeps.
        alive: bytes of other tensors that are alive during its forward pass.
        held: bytes of those that are alive until its output is reduced.
    """
    mask, generating = _hidden_dropout(p)
    return Op(
        name,
        kept=kept + mask,
        forward=alive + max(p.row_parallel_forward() + held, p.hidden + generating),
        backward=p.hidden + (p.hidden if mask else 0) + p.row_parallel_backward(inputs),
        gradient=p.matrix(p.model.hidden_size, columns),
        deferred=inputs + p.region_hidden,
    )


def embedding_ops(p: BatchSizes) -> list[Op]:
    """Word embedding, learned positions, embedding norm, dropout."""
    model, hidden = p.model, p.hidden
    mask, generating = _hidden_dropout(p)
    positions = p.matrix(model.max_seq_len, model.hidden_size) if model.position is Position.learned else 0
    words = p.matrix(p.vocab_rows, model.hidden_size)
    in_main_grad = p.fused_accumulation and not p.cuda and not positions
    # On a CPU token gradients are accumulated in fp32, in main_grad or in a separate table.
    wide = 0 if p.cuda or p.weight_bytes == FP32 else FP32 * p.tokens * model.hidden_size
    table = 0 if p.cuda or p.fused_accumulation or p.weight_bytes == FP32 else FP32 * words // p.weight_bytes
    # In both passes: the lookup's output, and a copy of it with other ranks' tokens masked or positions added.
    lookup = Op(
        "embedding",
        kept=4 * INT64 * p.tokens,
        forward=max(2 * p.region_hidden, p.row_parallel_forward()),
        backward=p.row_parallel_backward(p.region_hidden) + wide + table,
        gradient=words + positions,
        in_main_grad=in_main_grad,
    )
    norm = _norm_op(p, "embedding norm", backward=2 * hidden)
    dropout = Op("embedding dropout", kept=mask, forward=hidden + generating, backward=2 * hidden)
    return [lookup, *([norm] if model.embedding_norm else []), *([dropout] if mask else [])]


def _head_layout_ops(p: BatchSizes) -> list[Op]:
    """QK norms, rotary embedding, and copies of the heads before the attention core.

    Except for what the norms keep, these tensors are counted at the attention core. Rotary embedding of the keys casts
    them to fp32, rotates the halves and concatenates them, while the QKV projection and the rotated queries are alive.
    The backward pass needs the same temporaries.
    """
    ops, w = list[Op](), p.weight_bytes
    # Alive with the projection: normalized queries and keys, or copied queries.
    alive = p.attention if p.model.queries_per_kv > 1 and p.model.kv_heads > p.tp else 0
    if p.model.qk_norm:
        alive = p.attention + p.keys
        working = FP32 * p.attention // w if p.unfused_rmsnorm else 0
        if p.model.qk_norm_width is QKNormWidth.full and p.tp > 1:  # queries and keys in fp32
            working = FP32 * alive // w
        kept, partial_grads = p.head_norms()
        forward, backward = p.projection + alive + working, p.hidden + 2 * p.projection + 3 * working + partial_grads
        ops.append(Op("query and key norms", kept=kept, forward=forward, backward=backward))
    elif p.model.query_scale != 1.0:
        alive = p.attention
    if p.model.qkv_clip is not None:  # its input is kept in addition to the clipped tensor
        clipped = Op("qkv clip", kept=p.projection, forward=2 * p.projection, backward=p.hidden + 2 * p.projection)
        ops = [clipped, *ops]
    if p.model.position is not Position.rope:
        copied = Op("heads copied", forward=2 * p.projection, backward=p.hidden + 2 * p.projection)
        return [*ops, copied] if alive else ops
    there = p.projection + alive
    if p.fused and not p.model.rotary_interleaved and p.model.rotary_fraction == 1.0:  # no temporaries
        return [*ops, Op("rotary", forward=there + p.projection, backward=p.hidden + alive + 2 * p.projection)]

    def rotary_temporaries(size: int) -> int:
        # With a rotated fraction, the concatenation is at least as large as what this counts too much.
        fp32 = FP32 * size // w
        return 2 * fp32 + (fp32 + size if w < FP32 else 0)

    forward = there + max(rotary_temporaries(p.attention), p.attention + rotary_temporaries(p.keys))
    backward = p.hidden + there + rotary_temporaries(p.attention)
    return [*ops, Op("rotary", forward=forward, backward=backward)]


def _shared_keys_op(p: BatchSizes) -> list[Op]:
    """The all-gather of keys and values over tensor-parallel ranks that share KV heads.

    The forward pass holds the GEMM's output, all ranks' keys and values, a copy of this rank's, and their concatenation
    with its queries. The backward pass reduce-scatters their gradients in fp32. Gloo makes a copy of both.
    """
    if not p.shared_keys:
        return []
    copies, summed = 1 if p.cuda else 2, FP32 * p.shared_keys // p.weight_bytes
    forward = p.qkv_output + copies * p.shared_keys + 2 * p.keys + p.projection
    backward = p.hidden + p.projection + copies * summed + summed // p.tp + p.qkv_output
    return [Op("shared keys and values", forward=forward, backward=backward)]


def _norms_of(p: BatchSizes) -> tuple[bool, bool]:
    """Whether a block normalizes the inputs, and the outputs, of its attention and MLP."""
    placement = p.model.norm_placement
    return placement is not NormPlacement.output, placement is not NormPlacement.input


def _attention_ops(p: BatchSizes, recompute_core: bool) -> list[Op]:
    """x + dropout(attention(norm(x))), or x + dropout(norm(attention(x)))."""
    before, after = _norms_of(p)
    hidden, attention = p.hidden, p.attention
    dropped = hidden if _hidden_dropout(p)[0] else 0
    # Explicit attention's output is copied for the projection; it and QKV stay alive until attention returns.
    copied, held = (attention, attention + p.projection) if p.explicit_attention else (0, 0)
    if recompute_core:
        copied, held = attention, attention if p.explicit_attention else 0
    columns = p.model.attention_width // p.tp
    return [
        *([_norm_op(p, "input norm", backward=3 * hidden)] if before else []),
        _column_parallel_op(p, "qkv", p.qkv_output, p.model.qkv_width // p.tp),
        *_shared_keys_op(p),
        *_head_layout_ops(p),
        *core_ops(p, recompute_core),
        _row_parallel_op(p, "attention output", attention, columns, kept=copied, held=held),
        *([_norm_op(p, "attention output norm", backward=3 * hidden)] if after else []),
        Op("attention residual", forward=2 * hidden + dropped, backward=hidden),
    ]


def _activation_op(p: BatchSizes, attended: int, ffn: int) -> tuple[Op, int]:
    """The MLP's activation function, and the bytes of its input, given those of its output.

    GELU and megads' SwiGLU kernel keep their input. ReLU keeps its output, which is also the next layer's input; its
    square keeps the ReLU. PyTorch's SwiGLU and GeGLU also keep the activated gate, and their backward pass holds the
    gradients of both factors before they are concatenated.
    """
    hidden, kind = p.hidden, p.model.mlp
    if not kind.gated:
        kept = 0 if kind is MLPKind.relu else ffn
        return Op(kind.value, kept=kept, forward=attended + ffn, backward=hidden + 2 * ffn), ffn
    gate, apart = (0, 0) if p.fused and kind is MLPKind.swiglu else (ffn, 2 * ffn)
    kept, backward = 2 * ffn + gate, hidden + 3 * ffn + apart
    return Op(kind.value, kept=kept, forward=attended + ffn, backward=backward), 2 * ffn


def _mlp_ops(p: BatchSizes) -> list[Op]:
    """x + dropout(mlp(norm(x))), during which attention's output is alive; or x + dropout(norm(mlp(x)))."""
    before, after = _norms_of(p)
    hidden, dropped = p.hidden, p.hidden if _hidden_dropout(p)[0] else 0
    attended = hidden if before else 0
    norm = _norm_op(p, "post-attention norm", alive=attended + dropped, backward=3 * hidden)
    return [
        *([norm] if before else []),
        *(_moe_ops(p, attended) if p.model.moe.enabled else _dense_ops(p, "mlp", attended)),
        *([_norm_op(p, "mlp output norm", backward=3 * hidden)] if after else []),
        Op("mlp residual", forward=attended + 2 * hidden + dropped, backward=hidden),
    ]


def _dense_ops(p: BatchSizes, name: str, alive: int) -> list[Op]:
    """Two linear layers with an activation function in between, while `alive` bytes of other tensors are alive."""
    if p.mlp_parts > 1:
        return [_chunked_mlp_op(p, name, alive)]
    inner, opened = _activation_op(p, alive, p.ffn)
    return [
        _column_parallel_op(p, f"{name} up", opened, p.model.mlp_rows // p.tp, alive=alive),
        inner,
        _row_parallel_op(p, f"{name} down", p.ffn, p.model.ffn_width // p.tp, kept=p.ffn, alive=alive),
    ]


def _chunked_mlp_op(p: BatchSizes, name: str, alive: int) -> Op:
    """An MLP in chunks of the sequence: it keeps its input, and its backward pass runs each chunk again.

    Beside a chunk's own tensors, the forward pass holds the output, and the backward pass the gradients of output and
    input, and of the weights in fp32 unless they are accumulated in main_grad.
    """
    chunk = replace(p, seq_len=-(-p.seq_len // p.mlp_parts), mlp_chunk=None)
    ops = _dense_ops(chunk, name, 0)
    up, inner, down = ops
    copied = chunk.hidden if p.micro_batch_size > 1 else 0
    features = max(up.forward, inner.forward, chunk.ffn + chunk.row_parallel_forward())
    held, again = 0, 0
    for op in ops:
        held += op.kept
        again = max(again, held + max(op.forward, op.backward))
    matrices = up.gradient + down.gradient
    in_main_grad = p.fused_accumulation and not p.cuda and adds_to_main_grad(p.weight_bytes, fused=p.fused)
    sums = 0 if in_main_grad else FP32 * matrices // p.weight_bytes
    return Op(
        f"{name} in chunks",
        kept=p.hidden,
        forward=alive + p.hidden + copied + features,
        backward=2 * p.hidden + copied + again + sums,
        gradient=matrices,
        in_main_grad=in_main_grad,
    )


def _moe_ops(p: BatchSizes, alive: int) -> list[Op]:
    """A router, experts, and a shared expert if there is one; arguments as in `_dense_ops`."""
    moe, mask = p.model.moe, _hidden_dropout(p)
    sizes = ExpertSizes(p, alive)
    inner, opened = _activation_op(p, sizes.held, sizes.features)
    ops = [sizes.router(), sizes.dispatch(), sizes.up(opened), inner, sizes.down(), sizes.combine()]
    if not moe.shared_ffn_size:
        last = ops[-1]
        ops[-1] = replace(last, kept=last.kept + mask[0], forward=max(last.forward, alive + p.hidden + mask[1]))
        return ops
    # The experts' output is alive, and the layer's input, which the router keeps in fp32 or the shared expert keeps.
    shared = _dense_ops(replace(p, model=replace(p.model, ffn_size=moe.shared_ffn_size)), "shared", alive + p.hidden)
    if p.weight_bytes == FP32:
        shared[0] = replace(shared[0], kept=shared[0].kept - p.hidden)
    if moe.shared_gate:  # the gate and the ungated output
        gate = p.tokens // p.shards * p.weight_bytes
        shared.append(Op("shared gate", kept=p.hidden + gate, forward=alive + 2 * p.hidden, backward=4 * p.hidden))
    shared.append(Op("sum of shared and chosen experts", forward=alive + 3 * p.hidden, backward=2 * p.hidden))
    return [*ops, *shared]


def _parallel_ops(p: BatchSizes, recompute_core: bool) -> list[Op]:
    """x + dropout(attention(norm(x)) + mlp(norm(x))), whose two branches share their tensor-parallel collectives.

    The output of the MLP's first projection stays alive during attention, as does its gradient in the backward pass.
    """
    model, hidden, dropped = p.model, p.hidden, p.hidden if _hidden_dropout(p)[0] else 0
    copied = p.attention if p.explicit_attention or recompute_core else 0
    inner, opened = _activation_op(p, copied, p.ffn)
    rows, columns = model.qkv_width // p.tp + model.mlp_rows // p.tp, (model.attention_width + model.ffn_width) // p.tp
    into = _column_parallel_op(p, "qkv and mlp up", p.qkv_output + opened, rows)
    name, inputs = "attention output and mlp down", p.attention + p.ffn
    core = [*_shared_keys_op(p), *_head_layout_ops(p), *core_ops(p, recompute_core)]
    second = [_norm_op(p, "second norm", alive=hidden, backward=4 * hidden)] if p.model.parallel_norms == 2 else []
    if second and not p.fp32_norm_input:  # both norms keep the same input
        second[0] = replace(second[0], kept=second[0].kept - hidden)
    return [
        _norm_op(p, "input norm", backward=3 * hidden),
        *second,
        replace(into, kept=into.kept + len(second) * hidden + opened, forward=into.forward - opened),
        *(replace(op, backward=op.backward + opened) for op in core),
        replace(inner, kept=inner.kept - opened, backward=inner.backward + p.attention),
        _row_parallel_op(p, name, inputs, columns, kept=copied + p.ffn, held=copied),
        Op("residual", forward=2 * hidden + dropped, backward=hidden),
    ]


def block_ops(p: BatchSizes, mode: Recompute = Recompute.none) -> list[Op]:
    """One transformer block.

    Args:
        p: the micro-batch.
        mode: recomputation mode.
    """
    selective = mode is Recompute.selective
    ops = _parallel_ops(p, selective) if p.model.parallel_block else [*_attention_ops(p, selective), *_mlp_ops(p)]
    normed = ops[0].name == "input norm"
    if mode is Recompute.full and normed and p.fp32_norm_input:
        ops[0] = replace(ops[0], kept=ops[0].kept + p.hidden)
    return recomputed(ops, inputs=p.hidden, arriving=p.hidden) if mode is Recompute.full else ops


def final_norm_ops(p: BatchSizes) -> list[Op]:
    """The norm after the last block."""
    norm = _norm_op(p, "final norm", backward=2 * p.hidden)
    # The scaled copy is alive with the norm's output.
    return [norm if p.model.logit_multiplier == 1.0 else replace(norm, forward=norm.forward + p.hidden)]


def _head_ops(p: BatchSizes) -> list[Op]:
    """Output projection and vocabulary-parallel cross entropy.

    The loss saves fp32 probabilities; the logits stay alive until it is computed. The backward pass writes the gradient
    to a second fp32 tensor and casts it under bf16. megads' kernels overwrite the logits with their gradient in the
    forward pass.
    """
    if p.in_chunks:
        return [_chunked_head_op(p)]
    tokens = p.tokens
    probabilities = FP32 * tokens * p.vocab_rows
    cast = p.logits if p.weight_bytes < FP32 else 0
    if p.fused:
        loss = Op("loss", kept=p.logits, forward=12 * FP32 * tokens, is_loss=True)
    else:
        kept, forward = probabilities + 2 * INT64 * tokens, p.logits + 6 * FP32 * tokens
        backward = probabilities + cast + 6 * FP32 * tokens
        loss = Op("loss", kept=kept, forward=forward, backward=backward, is_loss=True)
    head = _column_parallel_op(p, "head", p.logits, p.vocab_rows, residual=0)
    head = replace(head, arriving=p.logits)
    if p.model.final_logit_softcap is not None:
        # The derivative of the softcap is kept; computing it needs the logits in fp32 twice.
        head = replace(head, kept=head.kept + p.logits, forward=head.forward + 2 * probabilities)
    return [head, loss]


def _chunked_head_op(p: BatchSizes) -> Op:
    """Head and loss in chunks of tokens; gradients are computed in the forward pass, and the input's is kept."""
    matrix, logits = p.matrix(p.vocab_rows, p.model.hidden_size), p.chunk * p.vocab_rows * p.weight_bytes
    wide = FP32 * p.chunk * p.vocab_rows if p.weight_bytes < FP32 else 0
    loss = 12 * FP32 * p.chunk if p.fused else wide + 6 * FP32 * p.chunk
    # Otherwise a temporary gradient is needed and, on a CPU, an fp32 cast of it.
    in_main_grad = not p.cuda and adds_to_main_grad(p.weight_bytes, fused=p.fused)
    cast = FP32 * matrix // p.weight_bytes if p.weight_bytes < FP32 and not p.cuda else 0
    working = logits + max(loss, 0 if in_main_grad else matrix + cast)
    if p.model.final_logit_softcap is not None:
        working += logits + 2 * FP32 * p.chunk * p.vocab_rows
    if p.shards > 1:
        # The input and its gradient, each of all tokens; then the gradient is reduce-scattered.
        working = max(2 * p.region_hidden - p.hidden + working, p.region_hidden + p.reordered + p.gloo_copy)
    return Op(
        "head and loss",
        kept=p.hidden + (0 if p.fused_accumulation else FP32 * matrix // p.weight_bytes),
        forward=p.hidden + working,
        gradient=0 if p.fused_accumulation else matrix,
        early=matrix if p.fused_accumulation else 0,
        is_loss=True,
    )


def stage_ops(
    p: BatchSizes,
    layers: Mapping[str, Recompute],
    *,
    first: bool,
    last: bool,
    leaving: Collection[str] = (),
) -> list[Op]:
    """The operations of a pipeline stage, in forward order.

    Args:
        p: the micro-batch.
        layers: layers of this stage by name, with the recomputation mode of each block.
        first: whether the stage reads tokens instead of receiving activations.
        last: whether the stage computes the loss instead of sending activations.
        leaving: names of the blocks whose activations are offloaded.
    """
    # A received input is used in its receive buffer; the backward pass sends its gradient.
    ops = [] if first else [Op("received", kept=p.hidden, backward=p.hidden)]
    masks, blocks = set[object](), 0
    for layer, recompute in layers.items():
        if layer == EMBEDDING:
            ops += embedding_ops(p)
        elif layer == HEAD:
            ops += _head_ops(p)
        elif layer == FINAL_NORM:
            ops += final_norm_ops(p)
        else:
            in_block = p.of_layer(layer)
            mask = p.micro_batch_size * in_block.bias_table * in_block.mask_bytes if p.document_mask else 0
            if mask and in_block.mask_kind not in masks:  # [b, n or 1, s/cp, s], shared by the blocks of its kind
                ops.append(Op("document mask", kept=mask, forward=p.hidden + p.tokens * p.seq_len))
                masks.add(in_block.mask_kind)
            of_block = block_ops(in_block, recompute)
            received = blocks == 0 and EMBEDDING not in layers
            if leaving:
                stays = p.hidden if received and not in_block.fp32_norm_input else 0
                of_block = numbered(of_block, blocks, leaves=layer in leaving, stays=stays)
            ops, blocks = ops + of_block, blocks + 1
    if not last:
        # Only the output's graph is kept; the check that it is finite needs three bytes per element.
        ops.append(Op("sent", forward=p.hidden + 3 * p.tokens * p.model.hidden_size // p.shards))
    return ops
