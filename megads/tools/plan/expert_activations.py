"""Activation memory of a mixture-of-experts layer without its shared expert, for one micro-batch on one rank.

Derived from the code of `megads.model.moe`, `megads.ops.token_dispatch` and `megads.parallel.experts`, and tested like
`activations`. The memory of experts depends on the load: with the even load a rank's experts get as many rows as the
rank sends; with the worst, all rows of the expert-parallel group (`BatchSizes.expert_rows`).

Symbols as in `megads.tools.plan.micro_batch`; E = experts, k = choices of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megads.api import RouterScore
from megads.tools.plan.memory_timeline import Op
from megads.tools.plan.micro_batch import FP32, INT64, BatchSizes

_CHOOSING = FP32 + 3 * INT64
"""Temporary bytes per score while experts are chosen: the scores' bits, and three int64 tensors of the sort keys."""


@dataclass(frozen=True)
class ExpertSizes:
    """Bytes of the tensors of a layer's experts.

    Attributes:
        p: the micro-batch in this layer.
        alive: bytes of other tensors that are alive during the layer's forward pass.
    """

    p: BatchSizes
    alive: int

    @cached_property
    def tokens(self) -> int:
        """A hidden state of every token that this rank sends to experts."""
        return self._hidden(self.p.routed_tokens, self.p.weight_bytes)

    @cached_property
    def sent(self) -> int:
        """The rows that this rank sends to experts."""
        return self._hidden(self.p.sent_rows, self.p.weight_bytes)

    @cached_property
    def rows(self) -> int:
        """The rows of this rank's experts."""
        return self._hidden(self.p.expert_rows, self.p.weight_bytes)

    @cached_property
    def features(self) -> int:
        """The features of the rows of this rank's experts, between their two GEMMs."""
        return self.p.expert_rows * self.p.expert_features * self.p.weight_bytes

    def _hidden(self, rows: int, width: int) -> int:
        return rows * self.p.model.hidden_size * width

    @cached_property
    def gathered(self) -> int:
        """The hidden states of the whole sequence, if each tensor-parallel rank computes a part of every expert."""
        return self.tokens if self.p.shards > 1 and self.p.expert_tp else 0

    @cached_property
    def held(self) -> int:
        """What is alive while experts compute: the layer's input."""
        normed = self.p.hidden if self.p.weight_bytes < FP32 else 0  # else the router keeps it
        return self.alive + normed + self.gathered

    def router(self) -> Op:
        """The router in fp32, its choice of experts and its balance losses."""
        p, moe = self.p, self.p.model.moe
        tokens, scores = p.tokens // p.shards, FP32 * (p.tokens // p.shards) * moe.num_experts
        wide, matrix = FP32 * tokens * p.model.hidden_size, FP32 * moe.num_experts * p.model.hidden_size
        low = p.weight_bytes < FP32
        # The input and the weight; logits, scores and the logarithm of the softmax' sum; the choice.
        kept = wide + (matrix if low else 0) + 2 * scores + FP32 * tokens + INT64 * tokens * moe.top_k
        if moe.normalize_weights:  # the weights and their sum
            kept += FP32 * tokens * (moe.top_k + 1)
        if moe.score is RouterScore.sigmoid:  # the sum of the scores
            kept += FP32 * tokens
        if moe.sequence_loss:
            kept += FP32 * p.micro_batch_size * moe.num_experts
        choosing = _CHOOSING * tokens * moe.num_experts + scores * (moe.selects_by_bias + 2 * (moe.num_groups > 1))
        backward = 2 * p.hidden + 3 * scores + wide + (p.hidden + matrix if low else 0)
        gradient = p.matrix(moe.num_experts, p.model.hidden_size)
        normed = p.hidden if low else 0
        return Op("router", kept=kept, forward=self.alive + normed + choosing, backward=backward, gradient=gradient)

    def dispatch(self) -> Op:
        """Rows of the tokens, sorted by expert, and their way to the experts' ranks."""
        p = self.p
        kept = 2 * INT64 * (p.sent_rows + (p.expert_rows if p.ep > 1 else 0))
        wide = FP32 * p.routed_tokens * p.model.hidden_size
        returning = self.sent + wide + self.tokens
        if p.ep > 1:
            returning = max(2 * self.rows, self.rows + self.sent, returning)
        entering = self.gathered + p.gloo_copy + p.hidden if self.gathered else 0
        # Rows sent and received, then received and the same sorted by expert.
        forward = self.held + (self.rows + max(self.sent, self.rows) if p.ep > 1 else self.sent)
        return Op("token dispatch", kept=kept, forward=forward, backward=p.hidden + max(returning, entering))

    def up(self, opened: int) -> Op:
        """The experts' first GEMMs, given the bytes of their output."""
        p, gated = self.p, 1 + self.p.model.mlp.gated
        gradient = p.matrix(self._experts * gated * p.expert_features, p.model.hidden_size)
        return Op(
            "experts up",
            kept=self.rows,
            forward=self.held + opened,
            backward=p.hidden + opened + self.rows,
            gradient=gradient,
            deferred=self.rows + opened,
        )

    def down(self) -> Op:
        """The experts' second GEMMs, and the way of their outputs back."""
        p = self.p
        exchanged = max(2 * self.rows, self.rows + self.sent) if p.ep > 1 else 0
        return Op(
            "experts down",
            kept=self.features,
            forward=self.held + max(self.rows, exchanged),
            backward=p.hidden + max(self.rows + self.features, exchanged),
            gradient=p.matrix(self._experts * p.expert_features, p.model.hidden_size),
            deferred=self.features + self.rows,
        )

    def combine(self) -> Op:
        """The weighted sum of a token's rows in fp32, and the way out of the tensor-parallel region."""
        p = self.p
        wide = FP32 * p.routed_tokens * p.model.hidden_size
        leaving = self.tokens + p.hidden + p.gloo_copy if self.gathered else 2 * self.tokens
        forward = self.held + max(2 * wide + (self.tokens if p.weight_bytes < FP32 else 0), leaving)
        # The gradient of every row, and its product with the row.
        backward = p.hidden + self.tokens + 2 * self._hidden(p.sent_rows, FP32)
        return Op("combine", kept=self.sent + FP32 * p.sent_rows, forward=forward, backward=backward)

    @property
    def _experts(self) -> int:
        """Number of this rank's experts."""
        return self.p.model.moe.num_experts // self.p.ep
