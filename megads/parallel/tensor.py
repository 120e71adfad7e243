"""Tensor-parallel layers (Shoeybi et al. 2019), each holding one rank's share of the weights.

With sequence parallelism (Korthikanti et al. 2022) what is replicated outside of a parallel region is cut along the
sequence instead: layers that open a region gather it, layers that close one scatter it.

Shape suffixes: b = batch, s = sequence, t = this rank's share of the sequence (s / size with sequence parallelism, else
s), i = local input features, o = local output features, h = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.parallel.collectives import leave_region, scatter_sequence
from megads.parallel.grid import Axis
from megads.parallel.head_loss import Targets, head_loss
from megads.parallel.lookup import lookup
from megads.parallel.region_linear import Region, closing_linears, opening_linear, opening_linears
from megads.parallel.vocabulary import padded_rows
from megads.parallel.weight_gradients import SplitLayer, linear


class RegionBorder(nn.Module):
    """What enters or leaves a parallel region."""

    region: Region

    @property
    def untraced(self) -> tuple[str, ...]:
        """What `megads.parallel.compile` leaves as it is: messages beside products, and products of our own on CPUs."""
        own = self.region.fused and any(parameter.device.type == "cpu" for parameter in self.parameters(recurse=False))
        return ("forward",) if own or self.region.axis.size > 1 else ()


class ColumnParallelLinear(RegionBorder, SplitLayer):
    """y = x W^T + b with the rows of W, the output features, cut over the axis, b or none. Opens a parallel region."""

    def __init__(self, in_features: int, out_features: int, region: Region, bias: bool = True) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(torch.empty(out_features // region.axis.size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // region.axis.size)) if bias else None

    def forward(self, x_bti: Tensor) -> Tensor:
        """[b, t, in] -> [b, s, out / size]."""
        return opening_linear(x_bti, self.weight, self.bias, self.region, self.weight_gradients)


class RowParallelLinear(RegionBorder, SplitLayer):
    """y = x W^T + b with the columns of W, the input features, cut over the axis. Closes a parallel region.

    A bias is added once, after the sum over ranks; with sequence parallelism by every rank to its own tokens.
    """

    def __init__(self, in_features: int, out_features: int, region: Region, bias: bool = True) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(torch.empty(out_features, in_features // region.axis.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_bsi: Tensor) -> Tensor:
        """[b, s, in / size] -> [b, t, out]."""
        if self.region.axis.size == 1:
            # The product is then rounded once, as in nn.Linear.
            return linear(x_bsi, self.weight, self.bias, self.weight_gradients, self.region.fused)
        out_bto = closing_linears([x_bsi], [self.weight], self.region, self.weight_gradients)
        return out_bto if self.bias is None else out_bto + self.bias


class ColumnParallelBranches(RegionBorder):
    """Several `ColumnParallelLinear` of one input, which enter their region once."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x_bti: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
        """[b, t, in] -> [b, s, out / size] of every layer."""
        if self.region.axis.size == 1:
            return tuple(layer(x_bti) for layer in layers)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return opening_linears(x_bti, weights, biases, self.region, layers[0].weight_gradients)


class RowParallelBranches(RegionBorder):
    """The sum of several `RowParallelLinear`, which leave their region once.

    What a rank has of the sum is added before the message, so it is sent, and rounded, once.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, inputs: Sequence[Tensor], layers: Sequence[RowParallelLinear]) -> Tensor:
        """[b, s, in / size] of every layer -> [b, t, out]."""
        if self.region.axis.size == 1:
            first_bto, *others = (layer(x_bsi) for layer, x_bsi in zip(layers, inputs, strict=True))
            return sum(others, start=first_bto)
        out_bto = closing_linears(inputs, [layer.weight for layer in layers], self.region, layers[0].weight_gradients)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return out_bto + sum(biases) if biases else out_bto


class VocabParallelEmbedding(SplitLayer):
    """An embedding table whose rows are cut over the axis; each rank looks up the tokens it holds, the sum is whole.

    Its gradient is added to the sums of the step where there are any; it is never put off, as nobody waits for more.
    """

    def __init__(self, vocab_size: int, hidden_size: int, axis: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.rows = padded_rows(vocab_size, axis.size)
        self.start = axis.rank * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """int64 [b, s] -> [b, t, h]."""
        local_bs = tokens_bs - self.start
        foreign_bs = (local_bs < 0) | (local_bs >= self.rows)
        hidden_bsh = lookup(local_bs.masked_fill(foreign_bs, 0), self.weight, self.weight_gradients)
        hidden_bsh = hidden_bsh.masked_fill(foreign_bs[..., None], 0.0)
        return (scatter_sequence if self.sequence_parallel else leave_region)(hidden_bsh, self.axis)


class PositionShardEmbedding(nn.Module):
    """A whole table of positions, of which every rank looks up those of its share of the sequence.

    Only with sequence parallelism: what is added to a sharded hidden state is the shard's.
    """

    def __init__(self, num_positions: int, hidden_size: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [..., s], of all the tokens that this rank's region holds -> [..., t, h]."""
        share = positions.shape[-1] // self.axis.size
        return F.embedding(positions.narrow(-1, self.axis.rank * share, share), self.weight)


class VocabParallelHead(RegionBorder, SplitLayer):
    """Output projection whose rows are cut over the axis. The region it opens is closed by the loss."""

    def __init__(self, vocab_size: int, hidden_size: int, region: Region) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(torch.empty(padded_rows(vocab_size, region.axis.size), hidden_size))

    def forward(self, hidden_bth: Tensor, info: BatchInfo, targets: Targets | None = None) -> Tensor:
        """[b, t, h] -> logits [b, s, rows] of this rank's rows, padding rows included.

        Args:
            hidden_bth: what is projected.
            info: of the micro-batch.
            targets: where the logits are only wanted for the loss: what it compares them with. Returns the loss then,
                see `megads.parallel.head_loss.head_loss`, and the logits are never whole.
        """
        if targets is not None:
            return head_loss(hidden_bth, self.weight, targets, self.region, self.weight_gradients)
        return opening_linear(hidden_bth, self.weight, None, self.region, self.weight_gradients)
