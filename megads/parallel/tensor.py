"""Tensor-parallel layers (Shoeybi et al. 2019), each holding one rank's share of the weights.

Shape suffixes: b = batch, s = sequence, i = local input features, o = local output features, h = hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.parallel.collectives import enter_region, leave_region
from megads.parallel.grid import Axis


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W, the output features, cut over the axis. Opens a parallel region."""

    def __init__(self, in_features: int, out_features: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(out_features // axis.size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // axis.size))

    def forward(self, x_bsi: Tensor) -> Tensor:
        """[b, s, in] replicated -> [b, s, out / size]."""
        return F.linear(enter_region(x_bsi, self.axis), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W, the input features, cut over the axis. Closes a parallel region.

    The bias is added once, after the sum over ranks.
    """

    def __init__(self, in_features: int, out_features: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(out_features, in_features // axis.size))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x_bsi: Tensor) -> Tensor:
        """[b, s, in / size] -> [b, s, out] replicated."""
        if self.axis.size == 1:
            # The product is then rounded once, as in nn.Linear.
            return F.linear(x_bsi, self.weight, self.bias)
        return leave_region(F.linear(x_bsi, self.weight), self.axis) + self.bias


def padded_rows(vocab_size: int, size: int) -> int:
    """Rows each rank holds so that all hold the same number; those beyond the vocabulary are padding."""
    return -(-vocab_size // size)


class VocabParallelEmbedding(nn.Module):
    """An embedding table whose rows are cut over the axis; each rank looks up the tokens it holds, the sum is whole."""

    def __init__(self, vocab_size: int, hidden_size: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.rows = padded_rows(vocab_size, axis.size)
        self.start = axis.rank * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """int64 [b, s] -> [b, s, h] replicated."""
        local_bs = tokens_bs - self.start
        foreign_bs = (local_bs < 0) | (local_bs >= self.rows)
        hidden_bsh = F.embedding(local_bs.masked_fill(foreign_bs, 0), self.weight)
        return leave_region(hidden_bsh.masked_fill(foreign_bs[..., None], 0.0), self.axis)


class VocabParallelHead(nn.Module):
    """Output projection whose rows are cut over the axis. The region it opens is closed by the loss."""

    def __init__(self, vocab_size: int, hidden_size: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(padded_rows(vocab_size, axis.size), hidden_size))

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """[b, s, h] replicated -> logits [b, s, rows] of this rank's rows, padding rows included."""
        return F.linear(enter_region(hidden_bsh, self.axis), self.weight)
