"""The optimizer under the engine: DeepSpeed's BF16_Optimizer, for both precisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class PartitionRange:
    """Elements [start, start + length) of this rank's partition of one parameter group."""

    group: int
    start: int
    length: int


class Fp32GradientOptimizer(BF16_Optimizer):
    """ZeRO-1 with fp32 master weights, fp32 gradient accumulation and fp32 reduction.

    The same code drives bf16 and fp32 weights, so what the fp32 parity tests prove is what bf16 training runs.
    """

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """Gradients this rank contributes to the global norm.

        A rank whose parameters are all counted elsewhere (a tied head and replicated norms) contributes a zero:
        DeepSpeed's norm cannot take an empty list.

        Returns:
            All gradients for clipping, else (the gradients, an empty dict of experts'), as DeepSpeed wants it.
        """
        grads = super().get_grads_for_norm(for_clipping)
        if for_clipping:
            return grads
        dense, experts = grads
        return dense or [torch.zeros(1, device=self.fp32_groups_gradients_flat[0].device)], experts

    def initialise_state(self) -> None:
        """Gives AdamW its moments before the first step, so that a checkpoint of step 0 has the shape of any other."""
        for master in self.fp32_groups_flat_partition:
            self.optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @property
    def parameters(self) -> list[Parameter]:
        """Every parameter this rank trains, in the order of its gradients."""
        return [parameter for group in self.bf16_groups for parameter in group]

    @property
    def gradients(self) -> list[Tensor]:
        """The flat fp32 gradient of every parameter, in the order of `parameters`."""
        return [gradient for group in self.fp32_groups_gradients for gradient in group]

    def partition_ranges(self) -> Iterator[tuple[Parameter, int, PartitionRange]]:
        """For every parameter of which this rank's ZeRO partition holds a part: the parameter, the index in its
        flattened local tensor at which that part starts, and where the part lies in the partition."""
        for group, parameters in enumerate(self.bf16_groups):
            size = self.fp32_groups_flat_partition[group].numel()
            begin = dist.get_rank(self.real_dp_process_group[group]) * size
            offset = 0
            for parameter in parameters:
                start, stop = max(begin, offset), min(begin + size, offset + parameter.numel())
                if start < stop:
                    yield parameter, start - offset, PartitionRange(group, start - begin, stop - start)
                offset += parameter.numel()

    def state_of(self, part: PartitionRange) -> dict[str, Tensor]:
        """Views of the fp32 master weight and the moments of one range, flat, by kind."""
        master = self.fp32_groups_flat_partition[part.group]
        state = self.optimizer.state[master]
        tensors = {"weight": master.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        return {kind: tensor.narrow(0, part.start, part.length) for kind, tensor in tensors.items()}

    def gradient_of(self, part: PartitionRange) -> Tensor:
        """View of the reduced fp32 gradient of one range, flat."""
        begin = (
            dist.get_rank(self.real_dp_process_group[part.group]) * self.fp32_groups_flat_partition[part.group].numel()
        )
        gradient: Tensor = self.fp32_groups_gradients_flat[part.group].narrow(0, begin + part.start, part.length)
        return gradient

    @property
    def steps(self) -> int:
        """Steps AdamW has taken, skipped ones not counted."""
        return int(self.optimizer.state[self.fp32_groups_flat_partition[0]]["step"].item())

    def set_steps(self, steps: int) -> None:
        """Sets AdamW's bias-correction counter."""
        for master in self.fp32_groups_flat_partition:
            self.optimizer.state[master]["step"].fill_(float(steps))
