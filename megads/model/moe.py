"""Mixture-of-experts layers: a router chooses experts for every token, and their outputs are added with its weights.

Every token reaches all of its experts, whatever the load, unless the config says that rows beyond a capacity are
dropped. Scores, weights and the sum over a token's experts are in fp32 or wider. Balance losses are defined over a
sample or the global batch, never over a micro-batch (`MoEConfig`), so that a token's gradient depends neither on the
layout nor on the micro-batch size.

Everything here runs on one process; sharding replaces `Experts.exchange` and `Router.sum_over_sequence`
(`megads.parallel.experts`).

Shape suffixes: b = batch, s = sequence, h = hidden size, e = experts, k = choices of a token, t = tokens (b * s),
n = rows of experts (t * k), m = slots of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.model.config import ModelConfig
from megads.model.layers import Linear
from megads.model.mlp import MLP, activate
from megads.model.moe_config import RouterScore
from megads.ops.config import TORCH
from megads.ops.expert_slots import assign_slots, from_slots, into_slots
from megads.ops.token_dispatch import RowCounts, combine, dispatch, sort_rows, top_choices
from megads.parallel.grouped_linear import GroupedLinear

EXPERT_BIAS, EXPERT_LOAD = "expert_bias", "expert_load"
"""Parameters of a router that the balance of a step updates, not the optimizer; always in fp32."""

SUMMARY = 3
"""Numbers in a router's statistics after the counts of the experts: balance loss, z-loss, entropy of the scores."""


class _WithLoss(torch.autograd.Function):
    """The first tensor, unchanged; the backward pass adds the loss, and its statistics to the router's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, statistics: Tensor | None, own: Tensor) -> Tensor:
        ctx.statistics, ctx.own = statistics, own
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        # In the backward pass, which runs once even if activations are recomputed.
        if ctx.statistics is not None:
            ctx.statistics += ctx.own
        return grad, torch.ones_like(ctx.like), None, None


class Router(nn.Module):
    """Chooses experts for every token.

    Attributes:
        sum_over_sequence: sums a tensor over the ranks that hold other tokens of the same samples; set by sharding.
        statistics: fp64 [e + SUMMARY] to which backward passes add the number of tokens of every expert, and sums over
            tokens, see SUMMARY; None: not counted. Set by the engine.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.moe = moe = config.moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(moe.num_experts)) if moe.router_bias else None
        self.expert_bias = self._fixed(moe.selects_by_bias)
        self.expert_load = self._fixed(moe.global_loss > 0.0)
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts: counts
        self.statistics: Tensor | None = None

    def _fixed(self, held: bool) -> nn.Parameter | None:
        return nn.Parameter(torch.empty(self.moe.num_experts), requires_grad=False) if held else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Conversions of a model to a narrower dtype leave expert_bias and expert_load in fp32."""
        before = [(one, one.detach()) for one in (self.expert_bias, self.expert_load) if one is not None]
        super()._apply(fn, recurse)
        for parameter, kept in before:
            if parameter.dtype.itemsize < kept.dtype.itemsize:
                parameter.data = kept.to(parameter.device)
        return self

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> tuple[Tensor, Tensor]:
        """Weights, fp32 or wider [b, s, k], and indices, int64 [b, s, k], of every token's experts."""
        dtype = torch.promote_types(hidden_bsh.dtype, torch.float32)
        bias_e = None if self.bias is None else self.bias.to(dtype)
        logits_bse = F.linear(hidden_bsh.to(dtype), self.weight.to(dtype), bias_e)
        softmax = self.moe.score is RouterScore.softmax
        scores_bse = logits_bse.softmax(-1) if softmax else logits_bse.sigmoid()
        chosen_bsk = self.choose(scores_bse.detach())
        weights_bsk = self._weights(scores_bse, chosen_bsk)
        if info.step_tokens is not None and torch.is_grad_enabled():
            weights_bsk = self._with_losses(weights_bsk, logits_bse, scores_bse, chosen_bsk, info.step_tokens)
        return weights_bsk, chosen_bsk

    def choose(self, scores_bse: Tensor) -> Tensor:
        """The experts with the highest scores, int64 [b, s, k], the best first; of equal scores the lowest expert.

        DeepSeek-V3 (2024, section 2.1.2): the bias is added to the scores for the choice only, and experts outside of
        the best groups are not chosen.
        """
        moe = self.moe
        scores_te = scores_bse.flatten(0, -2)
        if self.expert_bias is not None:
            scores_te = scores_te + self.expert_bias
        if moe.num_groups > 1:
            grouped_tge = scores_te.unflatten(-1, (moe.num_groups, -1))
            best_tg = grouped_tge.topk(2, dim=-1).values.sum(-1)
            kept_tg = torch.zeros_like(best_tg, dtype=torch.bool)
            kept_tg.scatter_(1, top_choices(best_tg, moe.top_groups), True)
            scores_te = grouped_tge.masked_fill(~kept_tg[..., None], -torch.inf).flatten(1)
        return top_choices(scores_te, moe.top_k).view(*scores_bse.shape[:-1], moe.top_k)

    def _weights(self, scores_bse: Tensor, chosen_bsk: Tensor) -> Tensor:
        """Weights of the chosen experts, [b, s, k]: of their scores, without the bias that helped to choose them."""
        weights_bsk = scores_bse.gather(-1, chosen_bsk)
        if self.moe.normalize_weights:
            weights_bsk = weights_bsk / weights_bsk.sum(-1, keepdim=True)
        return weights_bsk * self.moe.routed_scale

    def _with_losses(
        self, weights_bsk: Tensor, logits_bse: Tensor, scores_bse: Tensor, chosen_bsk: Tensor, step_tokens: int
    ) -> Tensor:
        """Adds this micro-batch's share of the balance losses of the step, see MoEConfig, to the loss."""
        moe, experts = self.moe, self.moe.num_experts
        shares_bse = scores_bse
        if moe.score is RouterScore.sigmoid:
            shares_bse = scores_bse / scores_bse.sum(-1, keepdim=True)
        counts_be = torch.zeros_like(scores_bse[:, 0])
        counts_be.scatter_add_(1, chosen_bsk.flatten(1), torch.ones_like(weights_bsk).flatten(1).detach())
        balance = shares_bse.new_zeros(())
        if self.expert_load is not None:
            balance = balance + moe.global_loss * (shares_bse * self.expert_load).sum()
        if moe.sequence_loss:
            of_samples_be = self.sum_over_sequence(counts_be)
            loads_be = of_samples_be * (experts / of_samples_be.sum(-1, keepdim=True))
            balance = balance + moe.sequence_loss * (shares_bse * loads_be[:, None]).sum()
        log_z_bs = logits_bse.logsumexp(-1)
        z_loss = moe.z_loss * log_z_bs.square().sum()
        entropy = -(shares_bse * shares_bse.clamp_min(1e-30).log()).sum()
        own = torch.cat((counts_be.sum(0), torch.stack((balance, z_loss, entropy)))).detach().double()
        out_bsk: Tensor = _WithLoss.apply(weights_bsk, (balance + z_loss) / step_tokens, self.statistics, own)
        return out_bsk


class _WithOverflow(torch.autograd.Function):
    """The first tensor, unchanged; the backward pass adds to an overflow, see `Experts.overflow`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, overflow: Tensor, dropped: Tensor, filled_e: Tensor) -> Tensor:
        ctx.overflow, ctx.dropped, ctx.filled_e = overflow, dropped, filled_e
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        # In the backward pass, which runs once even if activations are recomputed.
        ctx.overflow[0] += ctx.dropped
        torch.maximum(ctx.overflow[1:], ctx.filled_e, out=ctx.overflow[1:])
        return grad, None, None, None


class TokenExchange:
    """How tokens reach experts, and the outputs return: on one process they are all at hand.

    Attributes:
        copies: number of ranks that exchange the same tokens, and whose overflows are added.
    """

    copies = 1

    def enter(self, hidden_bsh: Tensor, weights_bsk: Tensor, chosen_bsk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens whose experts this rank computes, with their weights and choices."""
        return hidden_bsh, weights_bsk, chosen_bsk

    def run(
        self, rows: Callable[[], Tensor], counts_e: Tensor, compute: Callable[[Tensor, RowCounts], Tensor]
    ) -> Tensor:
        """Outputs of all rows, [n, h], in their order.

        Args:
            rows: returns the rows, [n, h], sorted by expert; the caller does not keep them alive.
            counts_e: number of rows of each expert, of all experts.
            compute: computes rows sorted by expert, given the number of rows of each of this rank's experts.
        """
        return compute(rows(), RowCounts(counts_e))

    def run_slots(self, slots_mh: Tensor, experts: int, compute: Callable[[Tensor, RowCounts], Tensor]) -> Tensor:
        """Outputs of all slots, like `run`; every expert has the same number.

        Args:
            slots_mh: slots, sorted by expert.
            experts: number of experts, of all ranks.
            compute: see `run`.
        """
        return compute(slots_mh, RowCounts.equal(len(slots_mh), experts, slots_mh.device))

    def leave(self, out_bsh: Tensor) -> Tensor:
        """The outputs of the tokens that entered on this rank."""
        return out_bsh


class Experts(nn.Module):
    """The experts of a layer: MLPs of the same size.

    The rows of `first` are as in `MLP`; those of `down` are its input features.

    Attributes:
        kernels: kernel implementation of the activation.
        exchange: how tokens reach the experts; replaced by sharding.
        padded: whether training passes compute as many rows as the capacity, see MoEConfig; where no row may be dropped
            it is False, unless the engine sets it, which discards steps with an overflow.
        overflow: fp64 [1 + e], to which backward passes add the number of rows without a slot, and in which they raise
            the largest number of rows of each expert in any group, divided by the mean over experts. None: not
            recorded. Set by the engine.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kernels, self.kind, self.moe = TORCH, config.mlp, config.moe
        self.padded = config.moe.drops
        self.overflow: Tensor | None = None
        self.num_experts, width, hidden = config.moe.num_experts, config.expert_width, config.hidden_size
        self.exchange = TokenExchange()
        first = GroupedLinear(self.num_experts, (1 + config.mlp.gated) * width, hidden, transposed=False)
        self.add_module("gate_up" if config.mlp.gated else "up", first)
        self.down = GroupedLinear(self.num_experts, width, hidden, transposed=True)

    @property
    def first(self) -> GroupedLinear:
        """The projections that read the hidden states."""
        layer = self.gate_up if self.kind.gated else self.up
        assert isinstance(layer, GroupedLinear)
        return layer

    def forward(self, hidden_bsh: Tensor, weights_bsk: Tensor, chosen_bsk: Tensor) -> Tensor:
        """Sum of the outputs of every token's experts times their weights, [b, s, h].

        Args:
            hidden_bsh: hidden states.
            weights_bsk: weights of the chosen experts.
            chosen_bsk: indices of the chosen experts.
        """
        hidden_bsh, weights_bsk, chosen_bsk = self.exchange.enter(hidden_bsh, weights_bsk, chosen_bsk)
        out_th = self._routed(hidden_bsh.flatten(0, 1), weights_bsk.flatten(0, 1), chosen_bsk)
        return self.exchange.leave(out_th.view(hidden_bsh.shape))

    def _routed(self, hidden_th: Tensor, weights_tk: Tensor, chosen_bsk: Tensor) -> Tensor:
        """See `forward`, [t, h], for the tokens that entered."""
        if self.moe.capacity_factor is None or not self.training:
            order = sort_rows(chosen_bsk.flatten(0, 1), self.num_experts)
            out_nh = self.exchange.run(lambda: dispatch(hidden_th, order), order.counts, self._compute)
            return combine(out_nh, weights_tk, order)
        # Rows are dropped by sample, so that the layout does not decide which; slots are otherwise those of all tokens.
        chosen_gtk = chosen_bsk if self.moe.drops else chosen_bsk.flatten(0, 1)[None]
        tokens = chosen_gtk.shape[1]
        slots = assign_slots(chosen_gtk, self.num_experts, self.moe.capacity(tokens))
        if self.padded:
            slots_mh = into_slots(dispatch(hidden_th, slots.rows), slots)
            out_mh = self.exchange.run_slots(slots_mh, self.num_experts, self._compute)
            out_nh = from_slots(out_mh, slots)
        else:
            out_nh = self.exchange.run(lambda: dispatch(hidden_th, slots.rows), slots.rows.counts, self._compute)
        if self.overflow is not None and torch.is_grad_enabled():
            dropped = (~slots.kept).sum() / self.exchange.copies if self.padded else torch.zeros_like(self.overflow[0])
            filled_e = slots.counts.amax(0).double() * (self.num_experts / (tokens * self.moe.top_k))
            out_nh = _WithOverflow.apply(out_nh, self.overflow, dropped, filled_e)
        return combine(out_nh, weights_tk, slots.rows)

    def _compute(self, rows_nh: Tensor, counts: RowCounts) -> Tensor:
        out_nh: Tensor = self.down(activate(self.first(rows_nh, counts), self.kind, self.kernels), counts)
        return out_nh


class MoE(nn.Module):
    """Experts with their router, and a shared expert that processes every token if the model has one."""

    untraced: ClassVar = ("forward",)
    """Excluded from torch.compile: the number of rows of an expert depends on the data."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = MLP(config, moe.shared_ffn_size) if moe.shared_ffn_size else None
        self.shared_gate = Linear(config.hidden_size, 1, bias=False) if moe.shared_gate else None

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        out_bsh: Tensor = self.experts(hidden_bsh, *self.router(hidden_bsh, info))
        if self.shared is None:
            return out_bsh
        shared_bsh: Tensor = self.shared(hidden_bsh)
        if self.shared_gate is not None:
            shared_bsh = shared_bsh * self.shared_gate(hidden_bsh).sigmoid()
        return out_bsh + shared_bsh
