"""Which implementation computes each operator. Imports no torch, for which a launcher must not wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megads.ops.config import OPTIMIZER_OPS, Compile, Implementation, KernelOp

if TYPE_CHECKING:
    from torch import Tensor

KERNEL_DTYPES = {
    "cpu": ("torch.float32", "torch.bfloat16"),
    "cuda": ("torch.float32", "torch.bfloat16", "torch.float16"),
}
"""What megads' kernels read and write on each type of device; inside they compute in fp32."""


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
        loss_chunk: tokens whose logits are in memory at a time; None goes by their size.
        tuned: under auto the operators that megads' kernels compute, as measured on the GPU (`megads.engine.autotune`);
            torch computes the others. None: not measured yet.
    """

    model: Implementation
    optimizer: Implementation
    reason: str = ""
    compiled: Compile = Compile.none
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
