"""Which implementation computes each operator: as the user asks, and as decided (`Kernels`). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from megads.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

AUGMENTED_FEATURES = 8
"""What augmented attention adds to a head: four features are used, and kernels want a multiple of eight."""
TORCH_FLASH_WIDEST = 256
"""Features of a head that torch's FlashAttention takes on GPUs."""
AUGMENTED_LONGEST = 256 * 256
"""Keys whose places augmented attention can say in bf16."""
DRAWN_AT_ONCE = 2**22
"""Elements of a dropout mask that plain torch draws together; a row is never cut."""
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 256 << 20, 1 << 30
"""Of a rank's logits that are in memory at once where nothing else is asked for. Smaller chunks are slower: each reads
the weight and its main_grad once more (docs/performance.md)."""
KERNEL_DTYPES = {
    "cpu": ("torch.float32", "torch.bfloat16"),
    "cuda": ("torch.float32", "torch.bfloat16", "torch.float16"),
}
"""What megads' kernels read and write on each type of device; inside they compute in fp32."""


class Implementation(StrEnum):
    """Whose operators compute: attention, matrix products, norms, activations, the loss, the optimizer."""

    auto = "auto"
    fused = "fused"
    torch = "torch"
    apex = "apex"
    deepspeed = "deepspeed"


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
    """What torch.compile compiles."""

    none = "none"
    blocks = "blocks"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that people ask for, and why they are not offered."""
        return {
            "True": "say what is to be compiled: blocks",
            "False": "use none",
            "graphs": "CUDA graphs of whole micro-batches have taken its place: ops.cuda_graphs=true",
        }


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
    start. none: as it is written."""
    cuda_graphs: bool = False
    """Captures the forward and the backward pass of a micro-batch as CUDA graphs and replays them: for small models and
    micro-batches, which a GPU computes faster than its host launches them (docs/kernels.md). On one pipeline stage
    without tensor or context parallelism; the gradients of data-parallel ranks are reduced after the last pass."""
    loss_chunk: int | None = None
    """Tokens of a micro-batch whose logits are in memory at a time: the output projection, the loss and the gradients
    of both are computed for so many at once. null: as many as have 256 MiB of logits on a rank (1 GiB on a GPU)."""

    def check(self) -> None:
        """Raises ConfigError on a chunk without tokens, and on an implementation of the optimizer alone."""
        if self.impl is Implementation.deepspeed:
            raise ConfigError(
                "ops.impl = deepspeed: DeepSpeed has kernels of the optimizer only; use ops.impl=auto and "
                "optim.impl=deepspeed"
            )
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


def chunk_tokens(tokens: int, bytes_a_token: int, device: str, asked: int | None = None) -> int:
    """Tokens of the largest chunk of a micro-batch; all of them where its logits need not be cut.

    Args:
        tokens: of the micro-batch.
        bytes_a_token: of this rank's logits.
        device: type of the device.
        asked: at most so many tokens; None goes by the bytes of their logits.
    """
    room = CPU_CHUNK_BYTES if device == "cpu" else GPU_CHUNK_BYTES
    most = asked if asked is not None else max(1, room // bytes_a_token)
    chunks = -(-tokens // most)
    return -(-tokens // max(1, chunks))


def kernel_takes(x: Tensor) -> bool:
    """Whether megads' kernels have code for this tensor's device and dtype."""
    return str(x.dtype) in KERNEL_DTYPES.get(x.device.type, ())


@dataclass(frozen=True)
class Kernels:
    """Which implementation computes each operator of a run.

    Attributes:
        model: of the model's operators and the loss: fused, torch, apex, or auto, which is `tuned`.
        optimizer: of gradient norms and AdamW, likewise.
        reason: why not others; empty where nothing had to be decided.
        compiled: what torch.compile compiles.
        cuda_graphs: passes of micro-batches are captured and replayed.
        loss_chunk: tokens whose logits are in memory at a time; None goes by their size.
        tuned: under auto the operators that megads' kernels compute, as measured on the GPU (`megads.engine.autotune`);
            torch computes the others. None: not measured yet.
    """

    model: Implementation
    optimizer: Implementation
    reason: str = ""
    compiled: Compile = Compile.none
    cuda_graphs: bool = False
    loss_chunk: int | None = None
    tuned: frozenset[KernelOp] | None = None

    def fused(self, op: KernelOp) -> bool:
        """Whether megads' kernel computes this operator, on tensors that it takes."""
        impl = self.implementation(op)
        return impl is Implementation.fused or (impl is Implementation.auto and op in (self.tuned or ()))

    def takes(self, op: KernelOp, x: Tensor) -> bool:
        """Whether megads' kernel computes this operator on this tensor."""
        return self.fused(op) and kernel_takes(x)

    def apex(self, op: KernelOp) -> bool:
        """Whether NVIDIA apex computes this operator, on tensors that it takes."""
        return self.implementation(op) is Implementation.apex

    def implementation(self, op: KernelOp) -> Implementation:
        """What ops.impl or optim.impl, whichever decides about this operator, stands for."""
        return self.optimizer if op in OPTIMIZER_OPS else self.model

    @property
    def loaded(self) -> bool:
        """Megads' kernels are in this process, whether the model takes them or only tries them."""
        return self.model in (Implementation.fused, Implementation.auto)

    @property
    def text(self) -> str:
        """For the console and the event."""
        apart = f", optim.impl: {self.optimizer}" if self.optimizer is not self.model else ""
        model = str(self.model)
        if Implementation.auto in (self.model, self.optimizer):
            model += " (each operator is measured on the GPU)" if self.tuned is None else f" ({self._tuned_text})"
        return f"ops.impl: {model}{apart}{f' ({self.reason})' if self.reason else ''}"

    @property
    def _tuned_text(self) -> str:
        names = ", ".join(op for op in KernelOp if self.fused(op))
        return f"megads' kernels: {names}; torch's: the others" if names else "torch's operators"


TORCH = Kernels(Implementation.torch, Implementation.torch)
"""Torch's operators as they are."""
FUSED = Kernels(Implementation.fused, Implementation.fused)
"""Megads' kernels wherever there is one; `load` has loaded them."""
