"""Configuration of mixture-of-experts layers. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


class RouterScore(StrEnum):
    """Function from a token's router logits to its scores of the experts."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Overflow(StrEnum):
    """What happens in a training step in which an expert gets more rows than its capacity."""

    recompute = "recompute"
    drop = "drop"


@dataclass(unsafe_hash=True)
class MoEConfig:
    """Mixture of experts (Shazeer et al. 2017; Fedus et al. 2022): in some layers the MLP is replaced by experts, of
    which a router chooses top_k for every token. No token is ever dropped, unless overflow=drop."""

    num_experts: int = 0
    """Number of experts of a layer; 0: no layer has experts."""
    top_k: int = 2
    """Number of experts that process a token."""
    expert_ffn_size: int | None = None
    """Width of an expert's MLP; null: model.ffn_size."""
    shared_ffn_size: int = 0
    """Width of the shared expert, which processes all tokens in addition (DeepSeekMoE, Dai et al. 2024); several shared
    experts are one of their total width. 0: none."""
    shared_gate: bool = False
    """Multiply the shared expert's output by sigmoid(w x), with a learned w (Qwen 1.5 MoE)."""
    first_dense: int = 0
    """Number of first layers with an MLP instead of experts (DeepSeek-V3: 3)."""
    interval: int = 1
    """Every interval-th layer has experts, counted from 1, as Qwen's decoder_sparse_step; the others have an MLP."""
    score: RouterScore = RouterScore.softmax
    """softmax over all experts, or sigmoid of each logit (DeepSeek-V3). Always computed in fp32 or wider."""
    normalize_weights: bool = True
    """Divide the scores of the chosen experts by their sum (Mixtral, Qwen3); false: the scores are the weights (OLMoE).
    With softmax, true equals a softmax over the chosen logits only."""
    routed_scale: float = 1.0
    """Factor of the weights of the chosen experts (DeepSeek-V3 routed_scaling_factor: 2.5)."""
    num_groups: int = 1
    """Number of groups of adjacent experts (DeepSeek-V3 n_group: 8); a token's experts come from its top_groups
    groups."""
    top_groups: int = 1
    """Number of groups that a token chooses, by the sum of each group's two highest scores (DeepSeek-V3 topk_group)."""
    router_bias: bool = False
    """Learned bias of the router's logits (gpt-oss)."""
    global_loss: float = 0.0
    """Weight of the balance loss over the global batch, sum_i load_i * P_i: P_i is expert i's mean score over the step,
    and load_i its number of tokens in the previous step, divided by the mean over experts (1 in the first step). So it
    equals Switch Transformer's loss E * sum_i f_i P_i (Fedus et al. 2022) with the counts of the previous step, which
    does not depend on layout or micro-batch size (Qiu et al. 2025, "Demons in the Detail", argue for global counts).
    Scores are normalized to sum to 1."""
    sequence_loss: float = 0.0
    """Weight of the balance loss of each sample, E * sum_i f_i P_i with the sample's own counts and mean scores,
    averaged over samples (DeepSeek-V3's sequence-wise auxiliary loss)."""
    bias_rate: float = 0.0
    """Change per step of the bias that only selects experts: raised for experts with fewer tokens in the step's global
    batch than the mean, lowered for those with more (Wang et al. 2024, auxiliary-loss-free balancing; DeepSeek-V3:
    0.001). 0: no such bias."""
    z_loss: float = 0.0
    """Weight of the mean of logsumexp(logits)^2 of the router (ST-MoE, Zoph et al. 2022; OLMoE: 0.001)."""
    capacity_factor: float | None = None
    """Training steps compute a fixed number of rows for each expert, its capacity: this factor times the mean, rounded
    up; missing rows are padded with zeros. Shapes do not depend on the data then: the host reads no number of rows, and
    ops.cuda_graphs can be used. null: exactly the rows that there are (dropless). Validation is always dropless."""
    overflow: Overflow = Overflow.recompute
    """What happens if an expert gets more rows than its capacity. recompute: the step is discarded and computed again
    without a capacity, so that no token is dropped. drop: an expert takes the first rows of each sample and drops the
    others (GShard, Switch Transformer), like Megatron's --moe-token-drop-policy position."""

    @property
    def enabled(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    @property
    def selects_by_bias(self) -> bool:
        """Whether there is a bias that only selects experts."""
        return self.bias_rate > 0.0

    @property
    def drops(self) -> bool:
        """Whether rows beyond an expert's capacity are dropped."""
        return self.capacity_factor is not None and self.overflow is Overflow.drop

    def capacity(self, tokens: int) -> int:
        """Rows that an expert computes for a group of tokens, see `capacity_factor`."""
        assert self.capacity_factor is not None
        # 1.1 * 100 is 110.00000000000001 in floating point.
        return math.ceil(self.capacity_factor * tokens * self.top_k / self.num_experts - 1e-9)

    def holds(self, index: int) -> bool:
        """Whether a layer has experts, by its index in the whole model."""
        return self.enabled and index >= self.first_dense and (index + 1) % self.interval == 0

    def check(self, num_layers: int) -> None:
        """Raises ConfigError on invalid values."""
        if not self.enabled:
            if self.num_experts < 0 or self != MoEConfig(num_experts=self.num_experts):
                raise ConfigError(
                    f"model.moe only applies with model.moe.num_experts above 0, which is {self.num_experts}: set it, "
                    "or leave model.moe out"
                )
            return
        for name, least in (("top_k", 1), ("expert_ffn_size", 1), ("shared_ffn_size", 0), ("first_dense", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"model.moe.{name} = {value}: must be at least {least}")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"model.moe.top_k = {self.top_k} is above model.moe.num_experts = {self.num_experts}: a token chooses "
                "different experts; lower top_k"
            )
        if self.shared_gate and not self.shared_ffn_size:
            raise ConfigError("model.moe.shared_gate = true needs a shared expert: set model.moe.shared_ffn_size")
        if self.interval < 1 or not any(map(self.holds, range(num_layers))):
            raise ConfigError(
                f"model.moe.first_dense = {self.first_dense} and interval = {self.interval} leave no layer of "
                f"model.num_layers = {num_layers} with experts: lower them, or leave model.moe out"
            )
        self._check_groups()
        self._check_capacity()
        for name in ("global_loss", "sequence_loss", "bias_rate", "z_loss"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"model.moe.{name} = {value}: must be 0 (off) or positive")
        if not 0.0 < self.routed_scale < math.inf:
            raise ConfigError(f"model.moe.routed_scale = {self.routed_scale}: must be positive")

    def _check_capacity(self) -> None:
        factor = self.capacity_factor
        if factor is None:
            if self.overflow is not Overflow.recompute:
                raise ConfigError(
                    f"model.moe.overflow = {self.overflow} only applies with model.moe.capacity_factor, which is null: "
                    "set it, for example to 1.25, or remove overflow"
                )
        elif not 0.0 < factor < math.inf:
            raise ConfigError(f"model.moe.capacity_factor = {factor}: must be positive, or null for no capacity")
        elif factor < 1.0 and not self.drops:
            raise ConfigError(
                f"model.moe.capacity_factor = {factor} is below 1: experts have less capacity than there are rows, so "
                "that every step would be computed twice; use at least 1, or model.moe.overflow=drop"
            )

    def _check_groups(self) -> None:
        groups, chosen = self.num_groups, self.top_groups
        if groups < 1 or self.num_experts % groups:
            raise ConfigError(
                f"model.moe.num_groups = {groups} does not divide model.moe.num_experts = {self.num_experts}: choose a "
                "divisor, or 1 for no groups"
            )
        size = self.num_experts // groups
        if groups > 1 and size < 2:
            raise ConfigError(
                f"model.moe.num_groups = {groups} leaves {size} expert a group, but groups are ranked by their two "
                "best experts: use fewer groups"
            )
        if not 1 <= chosen <= groups or chosen * size < self.top_k:
            raise ConfigError(
                f"model.moe.top_groups = {chosen} of num_groups = {groups} groups with {size} experts each: must be at "
                f"most num_groups, and hold top_k = {self.top_k} experts"
            )
