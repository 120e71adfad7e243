"""What FP8 adds to the time of a block: quantization, agreement on scales, and collectives of quantized tensors.

See `megads.parallel.float8_linear`. A parallel block's attention and MLP share the quantization of the input that they
read, if it is the same, and of the gradient of their sum; the magnitudes of their other tensors are agreed on at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megads.api import Float8Recipe, ModelConfig, ParallelConfig
from megads.tools.plan.collectives import CommunicationGroup, all_gather, all_reduce
from megads.tools.plan.devices import Device
from megads.tools.plan.execution import LAUNCH_US, Execution
from megads.tools.plan.micro_batch import FP32
from megads.tools.plan.workload import Workload

_TORCH_KERNELS = 15
"""Kernels of PyTorch that find the magnitudes of a tensor, compute scales and quantize it; they read a value four times
and write it twice. megads' kernels read a value twice, or once if a block of threads finds the scale itself."""
_ENTERING = frozenset({"qkv", "up"})
"""Linear layers of a block that enter a tensor-parallel region."""


@dataclass(frozen=True)
class Float8Time:
    """What the linear layers of a block in FP8 add to its time on one rank.

    Attributes:
        model: model config.
        parallel: the layout.
        workload: the training step.
        device: device of the rank.
        execution: execution strategy of the trainer.
        tokens: tokens of a micro-batch on this rank.
        tp: the tensor-parallel ranks.
        cp: the context-parallel ranks.
    """

    model: ModelConfig
    parallel: ParallelConfig
    workload: Workload
    device: Device
    execution: Execution
    tokens: int
    tp: CommunicationGroup
    cp: CommunicationGroup

    @property
    def _rowwise(self) -> bool:
        return self.workload.float8.recipe is Float8Recipe.rowwise

    @property
    def _gathers(self) -> bool:
        """Whether ranks hold shares of the tokens of a column-parallel layer's input."""
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    @property
    def shared_input(self) -> bool:
        """Whether attention and MLP read the same input."""
        return self.model.parallel_block and self.model.parallel_norms == 1

    def _quantizes(self, layer: str) -> tuple[bool, bool]:
        """Whether a linear layer quantizes its input and its output's gradient, or reads what attention's has."""
        return not (layer == "up" and self.shared_input), not (layer == "down" and self.model.parallel_block)

    def _quantization(self, *, divided: bool) -> tuple[int, int]:
        """Bytes moved for a value, and kernels, to quantize a tensor whose features are divided over ranks or not."""
        width = self.workload.weight_bytes
        if not self.execution.fused_quantization:
            return 4 * width + 1, _TORCH_KERNELS
        if not self._rowwise:
            return 2 * width + 1, 3
        return (2 * width + 1, 2) if divided and self.parallel.tp > 1 else (width + 1, 1)

    def traffic(self, layer: str, outputs: float, inputs: float) -> tuple[float, float]:
        """Bytes moved to quantize a linear layer's input, and its output's gradient.

        Layers that enter a tensor-parallel region have their outputs divided over ranks, others their inputs. With
        sequence parallelism a rank quantizes its share of the tokens that enter.
        """
        enters = layer in _ENTERING
        of_input, of_gradient = self._quantizes(layer)
        moved, moved_back = (self._quantization(divided=divided)[0] for divided in (not enters, enters))
        share = self.tokens / self.parallel.tp if enters and self._gathers else self.tokens
        return of_input * share * moved * inputs, of_gradient * self.tokens * moved_back * outputs

    def launches(self, layers: Iterable[str]) -> tuple[float, float]:
        """Host seconds to launch the quantization of the inputs of linear layers, and of their outputs' gradients."""
        kernels = [0, 0]
        for layer in layers:
            for number, quantizes in enumerate(self._quantizes(layer)):
                divided = (layer in _ENTERING) is bool(number)
                kernels[number] += quantizes * self._quantization(divided=divided)[1]
        return kernels[0] * LAUNCH_US * 1e-6, kernels[1] * LAUNCH_US * 1e-6

    @property
    def agreements(self) -> tuple[float, float]:
        """Seconds of the all-reduces of magnitudes in a block's forward and backward pass."""
        # How many tensors each all-reduce is for: inputs of the layers that enter a region and of those that leave it,
        # and gradients of their outputs.
        entering, entering_back = ((1,), (2,)) if self.shared_input else ((1, 1), (1, 1))
        leaving, leaving_back = ((2,), (1,)) if self.model.parallel_block else ((1, 1), (1, 1))
        size = FP32 * (self.tokens if self._rowwise else self.workload.micro_batch_size)

        def over(group: CommunicationGroup, tensors: Iterable[int]) -> float:
            return sum(all_reduce(self.device, group, count * size, FP32) for count in tensors)

        # A sample is divided over ranks in inputs of row-parallel layers, and with sequence parallelism in all inputs.
        inputs = (*entering, *leaving) if self._gathers and not self._rowwise else leaving
        forward, backward = over(self.tp, inputs), over(self.tp, entering_back)
        if self._rowwise:
            return forward, backward
        return forward + over(self.cp, (*entering, *leaving)), backward + over(self.cp, (*entering_back, *leaving_back))

    @property
    def gather(self) -> float:
        """Seconds to all-gather the quantized input of a column-parallel layer and, of tokens, their scales."""
        values = all_gather(self.device, self.tp, self.tokens * self.model.hidden_size, 1)
        return values + (all_gather(self.device, self.tp, FP32 * self.tokens, FP32) if self._rowwise else 0.0)
