"""What a rank holds of the optimizer's state under DeepSpeed's ZeRO-2 and ZeRO-3, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """A run of elements of one flattened local parameter that this rank updates.

    Attributes:
        parameter: the parameter.
        first: index of the run's first element in the flattened parameter.
        master: index of the optimizer's flat fp32 tensor in which the run lies.
        start: where it starts there.
        length: elements.
    """

    parameter: Parameter
    first: int
    master: int
    start: int
    length: int


class ZeroState(Protocol):
    """State of a sharding optimizer, whatever its stage."""

    @property
    def masters(self) -> list[Tensor]:
        """Flat fp32 weights that AdamW updates."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """All this rank updates, padding excluded."""
        ...

    def gradients(self) -> list[Tensor]:
        """The reduced fp32 gradient of every piece, flat, in the order of `pieces`; between the last backward pass and
        the step."""
        ...

    def refresh_weights(self) -> None:
        """Derives the working weights from the masters; collective."""
        ...


def local_shape(parameter: Parameter) -> tuple[int, ...]:
    """Shape of a parameter before ZeRO-3 cut it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class FlatPartitions:
    """ZeRO-2: the parameters of a group end to end, cut into equal partitions.

    Args:
        optimizer: DeepSpeedZeroOptimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def masters(self) -> list[Tensor]:
        """See ZeroState.masters."""
        return list(self._optimizer.single_partition_of_fp32_groups)

    def pieces(self) -> Iterator[Piece]:
        """See ZeroState.pieces."""
        for group, parameters in enumerate(self._optimizer.bit16_groups):
            size = int(self._optimizer.partition_size[group])
            begin = dist.get_rank(self._optimizer.real_dp_process_group[group]) * size
            offset = 0
            for parameter in parameters:
                start, stop = max(begin, offset), min(begin + size, offset + parameter.numel())
                if start < stop:
                    yield Piece(parameter, start - offset, group, start - begin, stop - start)
                offset += parameter.numel()

    def gradients(self) -> list[Tensor]:
        """See ZeroState.gradients."""
        partitions = [self._optimizer.averaged_gradients[group] for group in range(len(self.masters))]
        # Padding is marked; what is left are the pieces, in their order.
        return [g.flatten() for partition in partitions for g in partition if not getattr(g, "_zero_padding", False)]

    def refresh_weights(self) -> None:
        """See ZeroState.refresh_weights."""
        self._optimizer.update_lp_params()


class ParameterPartitions:
    """ZeRO-3: every parameter cut into equal parts, the last one padded.

    Args:
        optimizer: DeepSpeedZeroOptimizer_Stage3.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def masters(self) -> list[Tensor]:
        """See ZeroState.masters."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def pieces(self) -> Iterator[Piece]:
        """See ZeroState.pieces."""
        rank = dist.get_rank(self._optimizer.dp_process_group)
        for group, parameters in enumerate(self._optimizer.fp16_groups):
            offset = 0
            for parameter in parameters:
                size = parameter.partition_numel()
                first = rank * size
                length = min(size, prod(local_shape(parameter)) - first)
                if length > 0:
                    yield Piece(parameter, first, group, offset, length)
                offset += size

    def gradients(self) -> list[Tensor]:
        """See ZeroState.gradients."""
        flat = self._optimizer.grad_partitions_flat_buffer
        begins = [0]
        for master in self.masters:
            begins.append(begins[-1] + master.numel())
        return [flat.narrow(0, begins[piece.master] + piece.start, piece.length) for piece in self.pieces()]

    def refresh_weights(self) -> None:
        """See ZeroState.refresh_weights."""
        optimizer = self._optimizer
        with torch.no_grad():
            optimizer._partition_all_parameters()
            for group in range(len(self.masters)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


class AdamState:
    """AdamW's moments and step counter beside the masters.

    Args:
        adamw: the optimizer that ZeRO drives.
        masters: its flat tensors.
    """

    def __init__(self, adamw: torch.optim.Optimizer, masters: list[Tensor]) -> None:
        self._adamw, self._masters = adamw, masters
        # Before the first step, so that a checkpoint of step 0 has the shape of any other.
        for master in masters:
            adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                **{moment: torch.zeros_like(master, requires_grad=False) for moment in MOMENTS},
            }

    def of(self, piece: Piece) -> dict[str, Tensor]:
        """Views of the master weight and the moments of one piece, flat, by kind."""
        master = self._masters[piece.master]
        state = self._adamw.state[master]
        tensors = {"weight": master.data, **{moment: state[moment] for moment in MOMENTS}}
        return {kind: tensor.narrow(0, piece.start, piece.length) for kind, tensor in tensors.items()}

    @property
    def steps(self) -> int:
        """Steps AdamW has taken, skipped ones not counted."""
        return int(self._adamw.state[self._masters[0]]["step"].item())

    def set_steps(self, steps: int) -> None:
        """Sets AdamW's bias-correction counter."""
        for master in self._masters:
            self._adamw.state[master]["step"].fill_(float(steps))
