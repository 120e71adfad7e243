"""Definition of an operator benchmark case."""

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
        rows, width: shapes of row-wise operators: GELU, SwiGLU, norms.
        tokens, vocabulary: shape of cross entropy.
        attention: batch, heads, sequence length and head dim, also of the model.
        scores: batch, heads and sequence length of the softmax over attention scores.
        parameters: number of parameters of the optimizer.
        layers, model_vocabulary: size of the model.
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
    """megads must be at least `times` as fast as a side; below 1 it may take longer.

    Attributes:
        side: name of the side; LIMIT is the hardware limit.
        times: how many times as fast.
        dtypes: dtypes to which the target applies.
    """

    side: str
    times: float
    dtypes: tuple[str, ...] = ("fp32", "bf16")


OURS, LIMIT = "ours", "limit"


@dataclass(frozen=True)
class Case:
    """One operator in one dtype.

    Attributes:
        name: operator and shape.
        sides: timed functions, megads first if present.
        moved_bytes: minimum of bytes read and written.
        in_place: the operator works in place, which costs less than writing elsewhere.
        flops: minimum FLOPs of its GEMMs.
        row: number of the benchmark in docs/notes/performance.md; 0 if it is not in its table.
        targets: targets to reach.
    """

    name: str
    sides: Mapping[str, Call]
    moved_bytes: float = 0.0
    in_place: bool = False
    flops: float = 0.0
    row: int = 0
    targets: tuple[Target, ...] = ()


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile for a single set of shapes."""
    return torch.compile(function, dynamic=False)  # type: ignore[no-any-return]


def forward_backward(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Call:
    """One forward and backward pass; inputs are leaves."""

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
    """Returns a leaf of normally distributed values."""
    return torch.randn(shape).to(dtype).requires_grad_()
