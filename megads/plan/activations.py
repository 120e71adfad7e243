"""What the model's operations hold in memory, one micro-batch on one rank.

Derived from the code of `megads.model`, `megads.parallel` and of torch's kernels, not from a paper's table: `kept` is
what autograd saves (tests compare it with `saved_tensors_hooks`), `forward` and `backward` are the temporaries that
are alive together (tests compare the whole with the allocator's peak).

Letters: T = tokens of a micro-batch on this rank, w = bytes of a weight, h = hidden size; h/t and f/t are this
tensor-parallel rank's share of the attention width and the MLP width; n = this rank's heads, s = its queries of a
sample, k = the keys they look at: the whole sample, of which context parallelism leaves a rank a part of the queries.
What lies between tensor-parallel regions, norms, dropouts and residuals, has a length of its own: `Pass.shard`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from megads.model.config import ModelConfig, Position
from megads.parallel.config import Recompute
from megads.parallel.tensor import padded_rows
from megads.plan.tape import Op, recomputed

FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank.

    Attributes:
        model: the model's shape.
        tp: tensor parallel size.
        micro_batch_size: samples.
        seq_len: tokens a sample.
        weight_bytes: of one element of weights and activations: 2 for bf16, 4 for fp32.
        cuda: on a GPU; else on a CPU.
        cp: context parallel size, over which every sample is cut.
        sequence_shards: ranks over which a sample is cut between tensor-parallel regions.
    """

    model: ModelConfig
    tp: int
    micro_batch_size: int
    seq_len: int
    weight_bytes: int
    cuda: bool = False
    cp: int = 1
    sequence_shards: int = 1

    @property
    def query_len(self) -> int:
        """Tokens of a sample on this rank."""
        return self.seq_len // self.cp

    @property
    def key_len(self) -> int:
        """Tokens of a sample that queries look at."""
        return self.seq_len

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.query_len

    @property
    def heads(self) -> int:
        """Attention heads of this rank."""
        return self.model.num_heads // self.tp

    @property
    def hidden(self) -> int:
        """T h w: bytes of one [b, s, h] tensor."""
        return self.tokens * self.model.hidden_size * self.weight_bytes

    @property
    def shard(self) -> int:
        """Bytes of such a tensor between tensor-parallel regions."""
        return self.hidden // self.sequence_shards

    @property
    def attention(self) -> int:
        """T h/t w: bytes of this rank's queries, keys, values or context."""
        return self.hidden // self.tp

    @property
    def entered(self) -> int:
        """A gradient and its copy that is summed over ranks where a tensor-parallel region was entered."""
        return 2 * self.hidden if self.tp > 1 else 0

    @property
    def ffn(self) -> int:
        """T f/t w: bytes of this rank's MLP activation."""
        return self.tokens * self.model.ffn_width // self.tp * self.weight_bytes

    @property
    def scores(self) -> int:
        """Elements of this rank's attention scores, [b, n, s, k]."""
        return self.tokens * self.key_len * self.heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding on this rank, padding included."""
        return padded_rows(self.model.vocabulary, self.tp)

    @property
    def logits(self) -> int:
        """Bytes of this rank's logits, [b, s, rows]."""
        return self.tokens * self.vocab_rows * self.weight_bytes

    @property
    def norm_statistics(self) -> int:
        """Mean and reciprocal deviation of a LayerNorm: in the weights' dtype on a CPU, in fp32 on a GPU."""
        return 2 * self.tokens // self.sequence_shards * (FP32 if self.cuda else self.weight_bytes)

    @property
    def bias_table(self) -> int:
        """Elements of the cached additive mask, [1, n or 1, s, k]."""
        return (self.heads if self.model.position is Position.alibi else 1) * self.query_len * self.key_len

    def matrix(self, *shape: int) -> int:
        """Bytes of a weight's gradient as a backward pass makes it, before it is added to the one that is there."""
        return prod(shape) * self.weight_bytes


def _hidden_dropout(p: Pass) -> tuple[int, int]:
    """(kept, forward): the scaled mask; the fp32 draw and its quotient, or the product, while it is made."""
    if not p.model.hidden_dropout:
        return 0, 0
    return p.shard, 2 * FP32 * p.tokens // p.sequence_shards * p.model.hidden_size


def embedding_ops(p: Pass) -> list[Op]:
    """Word embedding, learned positions, embedding LayerNorm, dropout."""
    model, hidden = p.model, p.hidden
    mask, drawing = _hidden_dropout(p)
    positions = p.matrix(model.max_seq_len, model.hidden_size) if model.position is Position.learned else 0
    words = p.matrix(p.vocab_rows, model.hidden_size)
    # Both ways: what was looked up, and its copy with foreign tokens masked or positions added.
    lookup = Op("embedding", 4 * INT64 * p.tokens, forward=2 * hidden, backward=hidden, gradient=words + positions)
    norm = Op("embedding norm", kept=p.shard + p.norm_statistics, forward=p.shard, backward=2 * p.shard)
    dropout = Op("embedding dropout", kept=mask, forward=p.shard + drawing, backward=2 * p.shard)
    return [lookup, *([norm] if model.embedding_norm else []), *([dropout] if mask else [])]


def _attention_core_op(p: Pass, recompute: bool) -> Op:
    """The kernel of scaled_dot_product_attention, or with attention dropout the explicit product.

    The kernel saves views of the QKV projection, its output and an fp32 logsumexp of every row; backward makes three
    gradients of the output's size from that of the output.

    The explicit product saves fp32 probabilities (which fp32 weights use as they are), the dropout's mask, the dropped
    probabilities and contiguous copies of queries, keys and values. While the mask is made the biased scores, the
    rounded probabilities, the draw and its quotient are alive too, 12 (bf16) or 8 (fp32) bytes a score more than is
    kept; and so is the QKV projection, which nobody saves.

    A recomputed core keeps the QKV projection in either case; its output is the next operation's.
    """
    projection = 3 * p.attention
    if p.model.attention_dropout:
        op = Op(
            "attention",
            kept=3 * p.attention + (FP32 + 2 * p.weight_bytes) * p.scores,
            forward=projection + (12 if p.weight_bytes < FP32 else 8) * p.scores,
            backward=p.hidden + 2 * p.attention + 4 * p.scores,
        )
        if recompute:
            op = replace(op, kept=op.kept + projection, forward=op.forward - projection)
    else:
        logsumexp = FP32 * p.tokens * p.heads
        op = Op("attention", kept=projection + p.attention + logsumexp, backward=p.hidden + 4 * p.attention)
    # The gradients of the core's output and of the residual beside it.
    return recomputed([op], inputs=projection, arriving=p.hidden + p.attention)[0] if recompute else op


def attention_ops(p: Pass, recompute_core: bool) -> list[Op]:
    """x + dropout(attention(norm(x)))."""
    hidden, attention, width = p.hidden, p.attention, p.model.hidden_size
    mask, drawing = _hidden_dropout(p)
    # The output of the explicit product is copied for the projection; it and QKV live until attention returns.
    copied, still_there = (attention, 4 * attention) if p.model.attention_dropout else (0, 0)
    if recompute_core:
        copied, still_there = attention, attention if p.model.attention_dropout else 0
    return [
        Op("input norm", kept=p.shard + p.norm_statistics, forward=p.shard, backward=3 * p.shard),
        Op(
            "qkv",
            kept=hidden,
            forward=3 * attention,
            backward=hidden + max(hidden + 3 * attention, p.entered),
            gradient=p.matrix(3 * width // p.tp, width),
        ),
        _attention_core_op(p, recompute_core),
        Op(
            "attention output",
            kept=copied + mask,
            forward=max(2 * hidden + still_there, p.shard + drawing),
            backward=hidden + mask + attention,
            gradient=p.matrix(width, width // p.tp),
        ),
        Op("attention residual", forward=2 * p.shard + mask, backward=p.shard),
    ]


def mlp_ops(p: Pass) -> list[Op]:
    """x + dropout(mlp(norm(x))). The output of attention lives until the block returns."""
    hidden, ffn, width = p.hidden, p.ffn, p.model.hidden_size
    attended = p.shard
    mask, drawing = _hidden_dropout(p)
    matrix = p.matrix(p.model.ffn_width // p.tp, width)
    return [
        Op("post-attention norm", kept=p.shard + p.norm_statistics, forward=attended + p.shard, backward=3 * p.shard),
        Op(
            "mlp up",
            kept=hidden,
            forward=attended + ffn,
            backward=hidden + max(hidden + ffn, p.entered),
            gradient=matrix,
        ),
        Op("gelu", kept=ffn, forward=attended + ffn, backward=hidden + 2 * ffn),
        Op(
            "mlp down",
            kept=ffn + mask,
            forward=attended + max(2 * hidden, p.shard + drawing),
            backward=hidden + mask + ffn,
            gradient=matrix,
        ),
        Op("mlp residual", forward=attended + 2 * p.shard + mask, backward=p.shard),
    ]


def block_ops(p: Pass, mode: Recompute = Recompute.none) -> list[Op]:
    """One transformer block.

    Args:
        p: the micro-batch.
        mode: what is recomputed of it.
    """
    ops = [*attention_ops(p, mode is Recompute.selective), *mlp_ops(p)]
    return recomputed(ops, inputs=p.shard, arriving=p.shard) if mode is Recompute.full else ops


def final_norm_ops(p: Pass) -> list[Op]:
    """The LayerNorm after the last block."""
    return [Op("final norm", kept=p.shard + p.norm_statistics, forward=p.shard, backward=2 * p.shard)]


def head_ops(p: Pass) -> list[Op]:
    """Output projection and vocabulary-parallel cross entropy.

    The loss saves fp32 probabilities, beside which the logits live until it is computed; backward writes its gradient
    into a second such tensor and, under bf16, casts that.
    """
    width, tokens = p.model.hidden_size, p.tokens
    probabilities = FP32 * tokens * p.vocab_rows
    cast = p.logits if p.weight_bytes < FP32 else 0
    return [
        Op(
            "head",
            kept=p.hidden,
            forward=p.logits,
            backward=max(p.logits + p.hidden, p.entered),
            gradient=p.matrix(p.vocab_rows, width),
        ),
        Op(
            "loss",
            kept=probabilities + 2 * INT64 * tokens,
            forward=p.logits + 6 * FP32 * tokens,
            backward=probabilities + cast + 6 * FP32 * tokens,
            is_loss=True,
        ),
    ]


def received_ops(p: Pass) -> list[Op]:
    """A later stage's input: the engine keeps what it received beside the copy that the model reads.

    Backward leaves the gradient of what was received there until it is sent.
    """
    return [Op("received", kept=p.shard, forward=p.shard, backward=p.shard)]


def hold_previous(ops: list[Op], p: Pass) -> list[Op]:
    """The operations of a last stage that receives.

    Until the next loss is there the engine has the previous one, and through its graph what was received, and the
    gradient of that.
    """
    return [replace(op, forward=op.forward + 2 * p.shard) for op in ops]


def sent_ops(p: Pass) -> list[Op]:
    """An earlier stage's output, which the engine keeps, and the test whether it is finite."""
    finite = 3 * p.tokens // p.sequence_shards * p.model.hidden_size
    return [Op("sent", kept=p.shard, forward=p.shard + finite, backward=0)]


def tie_gradients(ops: list[Op]) -> list[Op]:
    """The same operations where embedding and head, the first and the last but one, share a weight.

    Autograd holds the head's gradient until it has the embedding's, and adds the two into a third tensor.
    """
    held = ops[-2].gradient
    head = replace(ops[-2], backward=ops[-2].backward + held, gradient=0)
    body = [replace(op, backward=op.backward + held) for op in ops[1:-2]]
    return [replace(ops[0], backward=ops[0].backward + 2 * held), *body, head, ops[-1]]
