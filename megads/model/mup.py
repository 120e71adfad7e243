"""Maximal update parametrization. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megads.errors import ConfigError

_HIDDEN_MATRICES = tuple(f"{module}.weight" for module in ("qkv", "dense", "up", "gate_up", "down"))


@dataclass(unsafe_hash=True)
class MupConfig:
    """Maximal update parametrization (muP; Yang and Hu et al. 2022, Tensor Programs V, arXiv 2203.03466, table 8): the
    optimal learning rate of a narrow model is also optimal for a wide one. All widths must scale with hidden_size."""

    base_width: int | None = None
    """hidden_size to which optim.lr, model.init_std and output_multiplier refer, and at which muP changes nothing;
    null: no muP."""
    output_multiplier: float = 1.0
    """Multiplier of the logits at the base width; at other widths it is divided by hidden_size / base_width."""
    base_head_size: int | None = None
    """Scales attention scores by sqrt(base_head_size) / head size instead of 1 / sqrt(head size); the two are equal at
    base_head_size. null: 1 / sqrt(head size), for models that scale the number of heads, not their size."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        for name in ("base_width", "base_head_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.mup.{name} = {value}: must be at least 1, or null")
        if not 0.0 < self.output_multiplier < math.inf:
            raise ConfigError(f"model.mup.output_multiplier = {self.output_multiplier}: must be positive")
        if self.base_width is None and self != MupConfig():
            raise ConfigError("model.mup only applies with model.mup.base_width: set it, or leave model.mup out")


def width_scale(width_ratio: float, *, muon: bool) -> Callable[[str], float]:
    """Function from a parameter's name to its learning-rate factor under muP.

    A step of Adam or Lion changes every element by about the learning rate, so the step of a matrix with
    `width_ratio` times as many inputs is divided by that ratio. A step of Muon has a spectral norm of about
    sqrt(width), which must stay constant.

    Args:
        width_ratio: hidden_size over the base width.
        muon: whether the matrices of blocks are orthogonalized.
    """
    factor = width_ratio**-0.5 if muon else 1.0 / width_ratio

    def scale(name: str) -> float:
        return factor if name.startswith("blocks.") and name.endswith(_HIDDEN_MATRICES) else 1.0

    return scale
