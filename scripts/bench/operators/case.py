"""What a case of an operator is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Shapes of all cases.

    Attributes:
        rows, width: of what works row by row: GELU, SwiGLU, norms.
        tokens, vocabulary: of cross entropy.
        attention: batch, heads, sequence length and head dim, also the model's.
        scores: batch, heads and sequence length of the softmax over attention scores.
        parameters: of the optimizer.
        layers, model_vocabulary: of the model.
    """

    rows: int = 4096
    width: int = 2048
    tokens: int = 1024
    vocabulary: int = 50304
    attention: tuple[int, int, int, int] = (4, 8, 512, 64)
    scores: tuple[int, int, int] = (2, 8, 1024)
    parameters: int = 20_000_000
    layers: int = 8
    model_vocabulary: int = 32000


SMALL = Sizes(64, 32, 16, 512, (1, 2, 48, 8), (1, 2, 16), 3000, layers=1, model_vocabulary=512)


@dataclass(frozen=True)
class Target:
    """Ours must be at least `times` as fast as a side; below 1 it may take longer.

    Attributes:
        side: its name; LIMIT is the machine's.
        times: how many times as fast.
        dtypes: where this is asked.
    """

    side: str
    times: float
    dtypes: tuple[str, ...] = ("fp32", "bf16")


OURS, LIMIT = "ours", "limit"


@dataclass(frozen=True)
class Case:
    """One operator in one dtype.

    Attributes:
        name: of the operator and its shape.
        sides: what takes turns, ours first where there is one.
        moved_bytes: read and written at least.
        in_place: it writes where it has read, which costs less than writing elsewhere.
        flops: of its matrix products at least.
        row: number of the benchmark in docs/performance.md; 0 for what its table does not ask.
        targets: what is to be reached.
    """

    name: str
    sides: Mapping[str, Call]
    moved_bytes: float = 0.0
    in_place: bool = False
    flops: float = 0.0
    row: int = 0
    targets: tuple[Target, ...] = ()


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile, for one set of shapes."""
    return torch.compile(function, dynamic=False)  # type: ignore[no-any-return]


def forward_backward(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Call:
    """One forward and backward pass, of inputs that are leaves."""

    def call() -> None:
        for leaf in inputs:
            leaf.grad = None
        function(*inputs).backward(grad)

    return call


def forward(function: Callable[..., Tensor], inputs: list[Tensor]) -> Call:
    """One forward pass without a graph."""

    def call() -> None:
        with torch.no_grad():
            function(*inputs)

    return call


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """A leaf of normal values."""
    return torch.randn(shape).to(dtype).requires_grad_()
