"""RoPE scaling: lower rotary frequencies for sequences longer than those of pretraining. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


class RopeScaling(StrEnum):
    """RoPE scaling method, for sequences longer than those of pretraining."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(unsafe_hash=True)
class RopeScalingConfig:
    """RoPE scaling: lower rotary frequencies, so that angles in a longer context stay within the trained range."""

    kind: RopeScaling = RopeScaling.none
    """none; linear, all frequencies divided by factor (Chen et al. 2023); llama3, low frequencies only (Llama 3.1);
    yarn, low frequencies only, with larger attention scores (Peng et al. 2023)."""
    factor: float = 1.0
    """Ratio of the new to the original context length; at least 1."""
    original_max_seq_len: int = 8192
    """Maximum sequence length of pretraining, for llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: frequencies with wavelengths above original_max_seq_len / low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: frequencies with wavelengths below original_max_seq_len / high_freq_factor are unchanged."""
    beta_fast: float = 32.0
    """yarn: frequencies with more rotations than this in original_max_seq_len tokens are unchanged."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations than this in original_max_seq_len tokens are divided by factor."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
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
