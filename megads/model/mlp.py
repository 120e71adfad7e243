"""The MLP of a block, with and without gates."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megads.model.config import MLPKind, ModelConfig
from megads.model.layers import Linear
from megads.ops.activation import geglu, gelu, squared_relu, swiglu
from megads.ops.config import TORCH, Kernels


def activate(x: Tensor, kind: MLPKind, kernels: Kernels) -> Tensor:
    """The activation function of an MLP.

    Args:
        x: output of the first projection, [..., f]; with gates [..., 2 f], gates in the even columns.
        kind: the function.
        kernels: selects the implementation.

    Returns:
        [..., f].
    """
    match kind:
        case MLPKind.swiglu:
            return swiglu(x, kernels)
        case MLPKind.geglu | MLPKind.geglu_exact:
            return geglu(x, exact=kind is MLPKind.geglu_exact)
        case MLPKind.gelu_exact:
            return F.gelu(x)
        case MLPKind.relu:
            return F.relu(x)
        case MLPKind.relu2:
            return squared_relu(x)
    return gelu(x, kernels)


class MLP(nn.Module):
    """down(act(up)), or with gates down(act(gate) * up) (Shazeer 2020), maybe in chunks of the sequence.

    Gate and up projection are fused in `gate_up`: row 2 i of its weight is gate i, row 2 i + 1 is up i. A contiguous
    tensor-parallel shard of the rows holds matching gates and ups, and corresponds to the same shard of the columns of
    `down`.

    Args:
        config: config of the model.
        width: features between the projections; None: `config.ffn_width`.

    Attributes:
        kernels: kernel implementation of the activation, and the tokens of a chunk.
        kind: the activation function.
    """

    up: nn.Module
    gate_up: nn.Module
    down: nn.Module

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        self.kernels, self.kind = TORCH, config.mlp
        hidden, width, bias = config.hidden_size, config.ffn_width if width is None else width, config.has_mlp_bias
        if self.kind.gated:
            self.gate_up = Linear(hidden, 2 * width, bias=bias)
        else:
            self.up = Linear(hidden, width, bias=bias)
        self.down = Linear(width, hidden, bias=bias)

    @property
    def first(self) -> nn.Module:
        """The projection that reads the hidden states."""
        return self.gate_up if self.kind.gated else self.up

    @property
    def is_chunked(self) -> bool:
        """Whether the sequence is computed in chunks."""
        return self.kernels.mlp_chunk is not None

    @property
    def untraced(self) -> tuple[str, ...]:
        """Methods excluded from torch.compile: chunks have backward passes of their own."""
        return ("forward",) if self.is_chunked else ()

    def activate(self, features_bsf: Tensor) -> Tensor:
        """Activation function between `first` and `down`.

        Args:
            features_bsf: output of `first`, [b, s, f]; with gates [b, s, 2 f].

        Returns:
            [b, s, f].
        """
        return activate(features_bsf, self.kind, self.kernels)

    def forward(self, hidden_bsh: Tensor) -> Tensor:
        """Returns [b, s, h]."""
        if not self.is_chunked:
            return self._whole(hidden_bsh)
        # Imported late: it loads tensor parallelism, which a model without chunks does not need.
        from megads.parallel.chunked_mlp import in_chunks

        return in_chunks(self, self.first, self._whole, hidden_bsh, self.kernels.mlp_chunk)

    def _whole(self, hidden_bsh: Tensor) -> Tensor:
        out_bsh: Tensor = self.down(self.activate(self.first(hidden_bsh)))
        return out_bsh
