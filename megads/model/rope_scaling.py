"""RoPE scaling: lower rotary frequencies for sequences longer than those of pretraining. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from megads.errors import ConfigError


class RopeScaling(StrEnum):
    """RoPE scaling method, for sequences longer than those of pretraining."""

    none = "none"
    linear = "linear"
    dynamic = "dynamic"
    llama3 = "llama3"
    yarn = "yarn"
    longrope = "longrope"


@dataclass(unsafe_hash=True)
class RopeScalingConfig:
    """RoPE scaling: lower rotary frequencies, so that angles in a longer context stay within the trained range."""

    kind: RopeScaling = RopeScaling.none
    """none; linear, all frequencies divided by factor (Chen et al. 2023); llama3, low frequencies only (Llama 3.1);
    yarn, low frequencies only, with larger attention scores (Peng et al. 2023); dynamic (dynamic NTK), in sequences of
    s > original_max_seq_len tokens a base of rope_theta (factor s / original_max_seq_len - factor + 1)^(d / (d - 2))
    for d rotated features; longrope (Ding et al. 2024), the frequency of each pair of features divided by its
    short_factor, or by its long_factor in sequences of more than original_max_seq_len tokens, with larger attention
    scores. The sequence is the whole sample in training (train.seq_len, whatever documents it packs), and the tokens so
    far in generation, which rotates all keys anew when the frequencies change."""
    factor: float = 1.0
    """Ratio of the new to the original context length; at least 1."""
    original_max_seq_len: int = 8192
    """Maximum sequence length of pretraining, for dynamic, llama3, yarn and longrope."""
    low_freq_factor: float = 1.0
    """llama3: frequencies with wavelengths above original_max_seq_len / low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: frequencies with wavelengths below original_max_seq_len / high_freq_factor are unchanged."""
    beta_fast: float = 32.0
    """yarn: frequencies with more rotations than this in original_max_seq_len tokens are unchanged."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations than this in original_max_seq_len tokens are divided by factor."""
    attention_factor: float | None = None
    """yarn and longrope: factor of rotated queries and keys, whose square scales the attention scores; null:
    0.1 ln(factor) + 1 for yarn, sqrt(1 + ln(factor) / ln(original_max_seq_len)) for longrope."""
    short_factor: list[float] = field(default_factory=list, hash=False)
    """longrope: divisor of the frequency of each rotated pair of features, in short sequences."""
    long_factor: list[float] = field(default_factory=list, hash=False)
    """longrope: the same in long sequences."""

    @property
    def rotation_scale(self) -> float:
        """Factor of rotated queries and keys, of any sequence."""
        if self.kind not in (RopeScaling.yarn, RopeScaling.longrope):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind is RopeScaling.yarn:
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_seq_len))

    def effective_length(self, seq_len: int) -> int:
        """The length that determines the frequencies of a sequence of `seq_len` tokens; 0 if none does."""
        match self.kind:
            case RopeScaling.dynamic:
                return max(seq_len, self.original_max_seq_len)
            case RopeScaling.longrope:
                return self.original_max_seq_len + (seq_len > self.original_max_seq_len)
            case _:
                return 0

    def check(self) -> None:
        """Raises ConfigError on invalid values; `check_pairs` checks those that depend on the heads."""
        if self.factor < 1.0 or self.original_max_seq_len < 1:
            raise ConfigError(
                f"model.rope_scaling.factor = {self.factor}, original_max_seq_len = {self.original_max_seq_len}: "
                "must be at least 1"
            )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not 0.0 < getattr(self, low) < getattr(self, high):
                raise ConfigError(
                    f"model.rope_scaling.{low} = {getattr(self, low)}, {high} = {getattr(self, high)}: want "
                    f"0 < {low} < {high}"
                )
        if self.attention_factor is not None and not 0.0 < self.attention_factor < math.inf:
            raise ConfigError(f"model.rope_scaling.attention_factor = {self.attention_factor}: must be positive")
        if self.kind is RopeScaling.longrope and self.original_max_seq_len < 2:
            raise ConfigError(
                f"model.rope_scaling.original_max_seq_len = {self.original_max_seq_len}: longrope needs at least 2"
            )

    def check_pairs(self, pairs: int) -> None:
        """Checks the settings that depend on the number of rotated pairs of a head's features.

        Raises:
            ConfigError: longrope's factors are of another number, or dynamic scaling has one pair.
        """
        if self.kind is RopeScaling.dynamic and pairs < 2:
            raise ConfigError("model.rope_scaling.kind = dynamic needs 4 rotated features per head or more, not 2")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            wanted = pairs if self.kind is RopeScaling.longrope else 0
            if len(factors) != wanted:
                told = f"want one number for each of the {pairs} pairs of rotated features of a head"
                told = told if wanted else "only applies with model.rope_scaling.kind=longrope: leave it out"
                raise ConfigError(f"model.rope_scaling.{name} has {len(factors)} numbers: {told}")
            if any(not 0.0 < factor < math.inf for factor in factors):
                raise ConfigError(f"model.rope_scaling.{name} = {factors}: must be positive numbers")
