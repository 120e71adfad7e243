"""Which implementation computes each operator: as configured, and as resolved (`Kernels`). Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from megads.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

AUGMENTED_FEATURES = 8
"""Features that augmented attention adds to a head: four are used, and kernels require a multiple of eight."""
TORCH_FLASH_WIDEST = 256
"""Largest head dim of PyTorch's FlashAttention on GPUs."""
AUGMENTED_LONGEST = 256 * 256
"""Largest number of keys whose positions augmented attention can represent in bf16."""
DRAWN_AT_ONCE = 2**22
"""Elements of a dropout mask that plain PyTorch generates at once; a row is never split."""
KEYS_AT_ONCE = 1024
"""Keys whose scores ring attention has in memory at a time."""
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 256 << 20, 1 << 30
"""Default limit on the bytes of a rank's logits in memory at once. Smaller chunks are slower: each reads the weight and
its main_grad once more (docs/notes/performance.md)."""
GRAPHS_AUTO = "auto"
"""Value of ops.cuda_graphs that leaves the choice to a measurement."""
LEAST_GRAPHS_SAVING = 0.03
"""Share of the time of a step's passes that CUDA graphs have to save for ops.cuda_graphs=auto to choose them."""
KERNEL_DTYPES = {
    "cpu": ("torch.float32", "torch.bfloat16"),
    "cuda": ("torch.float32", "torch.bfloat16", "torch.float16"),
}
"""Input and output dtypes of megads' kernels by device type; they compute in fp32 internally."""


class Implementation(StrEnum):
    """Implementation of attention, GEMMs, norms, activations, the loss and the optimizer."""

    auto = "auto"
    fused = "fused"
    torch = "torch"
    apex = "apex"
    deepspeed = "deepspeed"


class KernelOp(StrEnum):
    """An operator, or a family of operators, for which megads has kernels."""

    attention = "attention"
    """Fused attention (on CPUs), and the masked softmax."""
    linear = "linear"
    """GEMMs on CPUs; on GPUs, the accumulation of weight gradients in cuBLAS' GEMM."""
    grouped_linear = "grouped_linear"
    """The GEMMs of all experts of a layer as one kernel of PyTorch's, on Hopper GPUs in bf16."""
    norm = "norm"
    add_norm = "add_norm"
    gelu = "gelu"
    swiglu = "swiglu"
    rotary = "rotary"
    dropout = "dropout"
    cross_entropy = "cross_entropy"
    quantize = "quantize"
    """Quantization to FP8, with train.fp8."""
    square_sums = "square_sums"
    adamw = "adamw"


OPTIMIZER_OPS = frozenset({KernelOp.square_sums, KernelOp.adamw})
"""Operators selected by optim.impl; ops.impl selects the others."""


class Compile(StrEnum):
    """What torch.compile compiles."""

    none = "none"
    blocks = "blocks"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that users may expect, and why they are not supported."""
        return {
            "True": "say what is to be compiled: blocks",
            "False": "use none",
            "graphs": "CUDA graphs of whole micro-batches have taken its place: ops.cuda_graphs=true",
        }


class Float8Recipe(StrEnum):
    """Groups of values that share a scale in the FP8 products of linear layers; none: no FP8."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that users may expect, and why they are not supported."""
        return {
            "True": "say which values share a scale: tensorwise or rowwise",
            "False": "use none",
            "delayed": "scales of earlier steps depend on the history of a run; use tensorwise",
            "rowwise_with_gw_hp": "use rowwise, which always computes weight gradients in train.precision",
        }


@dataclass(frozen=True)
class Float8:
    """Which linear layers multiply in FP8.

    Attributes:
        recipe: see `Float8Recipe`.
        bf16_blocks: blocks at each end of the model that do not.
    """

    recipe: Float8Recipe = Float8Recipe.none
    bf16_blocks: int = 1

    def blocks(self, num_layers: int) -> range:
        """Indices of the blocks whose linear layers multiply in FP8.

        Args:
            num_layers: blocks of the model.
        """
        return range(0 if self.recipe is Float8Recipe.none else num_layers)[
            self.bf16_blocks : max(0, num_layers - self.bf16_blocks)
        ]


@dataclass
class OpsConfig:
    """Implementation of the operators; their results are the same up to rounding."""

    impl: Implementation = Implementation.auto
    """fused: megads' kernels, compiled once for this machine and kept in the user's cache (needs a C++ compiler, torch
    >= 2.10, and nvcc on GPUs). torch: PyTorch's operators. auto: on a CPU fused if available, else torch, which is
    reported; on GPUs each kernel is checked against fp64 and benchmarked against PyTorch's operator on the run's shapes
    before training, and the faster one is used for each operator (docs/kernels.md). apex: NVIDIA apex's norms, on GPUs
    with its compiled extensions installed, and PyTorch's operators for everything else."""
    compile: Compile = Compile.none
    """blocks: torch.compile of each block's forward and backward pass, once per shape, some ten seconds at the start.
    none: eager mode."""
    cuda_graphs: bool | str = field(default=False, metadata={"choices": ("true", "false", GRAPHS_AUTO)})
    """Captures the forward and backward pass of a micro-batch as CUDA graphs and replays them: for small models and
    micro-batches, which a GPU computes faster than the host launches the kernels (docs/kernels.md). Requires one
    pipeline stage, no tensor, context or expert parallelism, and of models with experts model.moe.capacity_factor;
    data-parallel gradients are reduced after the last backward pass. auto: false where graphs are not supported or
    their memory would not fit; else the first start times both after two steps and keeps the faster one."""
    loss_chunk: int | None = None
    """Tokens of a micro-batch whose logits are in memory at once: the output projection, the loss and their gradients
    are computed in chunks of this many. null: as many as have 256 MiB of logits per rank (1 GiB on a GPU)."""
    mlp_chunk: int | None = None
    """Tokens of a micro-batch whose MLP features are in memory at once: an MLP is computed in chunks of the sequence of
    about this many tokens, each of which the backward pass computes again. For long sequences, together with
    parallel.recompute=full (docs/memory.md). Routed experts are not divided. null: all tokens at once."""
    fp8_emulation: bool = False
    """With train.fp8 on GPUs: multiplies the quantized values in the dtype of train.precision, as CPUs always do. Slow;
    the reference of the FP8 GEMMs, and for GPUs that have none."""

    @property
    def graphs_undecided(self) -> bool:
        """Whether it is left to a measurement if CUDA graphs are used."""
        return self.cuda_graphs == GRAPHS_AUTO

    def check(self) -> None:
        """Raises ConfigError on empty chunks, on an implementation that only has optimizer kernels, and on a text that
        is no value of cuda_graphs."""
        if self.impl is Implementation.deepspeed:
            raise ConfigError(
                "ops.impl = deepspeed: DeepSpeed has kernels of the optimizer only; use ops.impl=auto and "
                "optim.impl=deepspeed"
            )
        if self.cuda_graphs not in (True, False, GRAPHS_AUTO):
            raise ConfigError(f"ops.cuda_graphs = {self.cuda_graphs}: use true, false or {GRAPHS_AUTO}")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ConfigError(
                f"ops.loss_chunk = {self.loss_chunk}: must be at least 1 token, or null for as many as fit"
            )
        if self.mlp_chunk is not None and self.mlp_chunk < 1:
            raise ConfigError(f"ops.mlp_chunk = {self.mlp_chunk}: must be at least 1 token, or null for all at once")


def shares_kv_heads(*, low: bool, head_dim: int) -> bool:
    """Whether a CUDA kernel supports grouped-query attention without repeated keys and without scores in memory.

    That kernel is PyTorch's FlashAttention, which takes no mask. Otherwise keys and values are repeated.

    Args:
        low: queries are bf16 or fp16.
        head_dim: head dim.
    """
    return low and head_dim <= TORCH_FLASH_WIDEST


def chunk_tokens(tokens: int, bytes_a_token: int, device: str, asked: int | None = None) -> int:
    """Tokens of the largest chunk of a micro-batch; all of its tokens if its logits need no chunking.

    Args:
        tokens: number of tokens of the micro-batch.
        bytes_a_token: bytes of this rank's logits per token.
        device: device type.
        asked: maximum number of tokens; None: derived from the bytes of their logits.
    """
    room = CPU_CHUNK_BYTES if device == "cpu" else GPU_CHUNK_BYTES
    most = asked if asked is not None else max(1, room // bytes_a_token)
    chunks = -(-tokens // most)
    return -(-tokens // max(1, chunks))


def mlp_chunks(tokens: int, sequence: int, most: int | None) -> int:
    """Number of chunks of the sequence in which an MLP is computed.

    Args:
        tokens: tokens of a micro-batch that the layers of the MLP see.
        sequence: tokens of each sample, which are divided; with sequence parallelism this rank's share.
        most: most tokens of a chunk; None: all.
    """
    return 1 if most is None else min(sequence, -(-tokens // most))


def kernel_supports(x: Tensor) -> bool:
    """Whether megads' kernels support this tensor's device and dtype."""
    return str(x.dtype) in KERNEL_DTYPES.get(x.device.type, ())


@dataclass(frozen=True)
class Kernels:
    """Which implementation computes each operator of a run.

    Attributes:
        model: implementation of the model's operators and the loss: fused, torch, apex, or auto, see `tuned`.
        optimizer: implementation of gradient norms and AdamW, likewise.
        reason: why this implementation was chosen; empty if there was nothing to decide.
        compiled: what torch.compile compiles.
        cuda_graphs: whether the passes of micro-batches are captured and replayed. None: the run measures it
            (`megads.tools.autotune.graphs`), and is eager until then.
        loss_chunk: tokens whose logits are in memory at once; None: derived from the bytes of their logits.
        mlp_chunk: most tokens whose MLP features are in memory at once; None: all.
        fp8_emulation: whether GPUs emulate FP8 products.
        tuned: under auto, the operators that megads' kernels compute, as measured on the GPU
            (`megads.tools.autotune.choice`); PyTorch computes the others. None: not measured yet.
    """

    model: Implementation
    optimizer: Implementation
    reason: str = ""
    compiled: Compile = Compile.none
    cuda_graphs: bool | None = False
    loss_chunk: int | None = None
    fp8_emulation: bool = False
    mlp_chunk: int | None = None
    tuned: frozenset[KernelOp] | None = None

    def fused(self, op: KernelOp) -> bool:
        """Whether megads' kernel computes this operator, on tensors that it supports."""
        impl = self.implementation(op)
        return impl is Implementation.fused or (impl is Implementation.auto and op in (self.tuned or ()))

    def takes(self, op: KernelOp, x: Tensor) -> bool:
        """Whether megads' kernel computes this operator on this tensor."""
        return self.fused(op) and kernel_supports(x)

    def apex(self, op: KernelOp) -> bool:
        """Whether NVIDIA apex computes this operator, on tensors that it supports."""
        return self.implementation(op) is Implementation.apex

    def implementation(self, op: KernelOp) -> Implementation:
        """The implementation from ops.impl or optim.impl, whichever applies to this operator."""
        return self.optimizer if op in OPTIMIZER_OPS else self.model

    @property
    def loaded(self) -> bool:
        """Whether megads' kernels are loaded in this process, to be used or only benchmarked."""
        return self.model in (Implementation.fused, Implementation.auto)

    @property
    def text(self) -> str:
        """Description for the console and the event."""
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
"""PyTorch's operators only."""
FUSED = Kernels(Implementation.fused, Implementation.fused)
"""Megads' kernels wherever there is one; requires that `load` has loaded them."""
