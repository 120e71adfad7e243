"""Initial weights as a pure function of seed and name: bitwise the same in every layout.

Each full tensor is drawn from its own random stream and sliced afterwards, so no more than one full matrix is in
memory at a time and no rank needs to know what another one drew.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from megads.model.config import ModelConfig

InitialValue = Callable[[str, tuple[int, ...]], Tensor]
"""(parameter name, unsharded shape) -> fp32 tensor on the CPU."""


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """A random stream of its own for every parameter name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_value(config: ModelConfig, seed: int) -> InitialValue:
    """BLOOM's initialisation: matrices N(0, std), the projections that end a branch N(0, std / sqrt(2 L)),
    gains one, biases zero.

    Args:
        config: the model's shape; `config.weight_std` is std.
        seed: the run's seed.
    """
    branch_std = config.weight_std / math.sqrt(2.0 * config.num_layers)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        std = branch_std if name.endswith(("attention.dense.weight", "mlp.down.weight")) else config.weight_std
        return torch.empty(shape).normal_(0.0, std, generator=parameter_generator(seed, name))

    return value
