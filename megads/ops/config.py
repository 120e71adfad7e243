"""Which implementation of the operators a run uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError

AUGMENTED_FEATURES = 8
"""What augmented attention adds to a head: four features are used, and kernels want a multiple of eight."""
TORCH_FLASH_WIDEST = 256
"""Features of a head that torch's FlashAttention takes on GPUs."""
AUGMENTED_LONGEST = 256 * 256
"""Keys whose places augmented attention can say in bf16."""


class Implementation(StrEnum):
    """Whose operators compute: attention, matrix products, norms, activations, the loss, the optimizer."""

    auto = "auto"
    fused = "fused"
    torch = "torch"
    apex = "apex"


class KernelOp(StrEnum):
    """An operator, or a family of operators, of which megads has kernels."""

    attention = "attention"
    """The whole of attention (on CPUs), and the masked softmax."""
    linear = "linear"
    """Matrix products (on CPUs)."""
    norm = "norm"
    add_norm = "add_norm"
    gelu = "gelu"
    swiglu = "swiglu"
    rotary = "rotary"
    dropout = "dropout"
    cross_entropy = "cross_entropy"
    square_sums = "square_sums"
    adamw = "adamw"


OPTIMIZER_OPS = frozenset({KernelOp.square_sums, KernelOp.adamw})
"""Those that optim.impl decides; ops.impl decides the others."""


class Compile(StrEnum):
    """What torch.compile compiles.

    graphs: blocks, whose pieces a GPU then replays as CUDA graphs.
    """

    none = "none"
    blocks = "blocks"
    graphs = "graphs"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that people ask for, and why they are not offered."""
        return {"True": "say what is to be compiled: blocks, or graphs", "False": "use none"}


@dataclass
class OpsConfig:
    """How operators are computed; what they compute is the same."""

    impl: Implementation = Implementation.auto
    """fused: megads' own kernels, compiled once for this machine and kept in the user's cache (a C++ compiler, torch
    >= 2.10; on GPUs nvcc, too). torch: torch's operators. auto: on a CPU fused where it can be had, else torch, and
    says so; on GPUs each kernel is checked against fp64 and timed beside torch's operator before training, on the
    run's shapes, and the faster one is taken, operator by operator (docs/kernels.md). apex: NVIDIA apex' norms, on
    GPUs, where its compiled extensions are installed; everything else is torch's then."""
    compile: Compile = Compile.none
    """blocks: each block's forward and backward pass by torch.compile, once for every shape, some ten seconds at the
    start. graphs: the same, and on a GPU its pieces are replayed as CUDA graphs, for small models whose kernels are
    shorter than their launches; neither has run on a GPU yet (docs/kernels.md). none: as it is written."""
    loss_chunk: int | None = None
    """Tokens of a micro-batch whose logits are in memory at a time: the output projection, the loss and the gradients
    of both are computed for so many at once. null: as many as have 256 MiB of logits on a rank (1 GiB on a GPU)."""

    def check(self) -> None:
        """Raises ConfigError on a chunk without tokens."""
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ConfigError(
                f"ops.loss_chunk = {self.loss_chunk}: must be at least 1 token, or null for as many as fit"
            )


def shares_keys(*, low: bool, head_dim: int) -> bool:
    """Whether one of CUDA's kernels that have no scores in memory takes heads that share keys: without a mask only.

    It is torch's FlashAttention. Where it cannot be taken, keys and values are repeated.

    Args:
        low: queries are bf16 or fp16.
        head_dim: features of a head.
    """
    return low and head_dim <= TORCH_FLASH_WIDEST
