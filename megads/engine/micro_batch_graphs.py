"""CUDA graphs of micro-batches: a forward and a backward pass are captured once and replayed.

A pass of a small model takes less device time than the host needs to launch it: Python, autograd and the launches of
some hundred kernels per block. A replayed graph is one launch.

A graph reads and writes the addresses that it was captured with. So micro-batches are copied to fixed buffers,
main_grad stays allocated across steps, the loss scale has a fixed address, and tensors from the operators' caches are
kept alive. The first micro-batch of a step writes main_grad and the others add to it, so there are two pairs of graphs.
All graphs share one memory pool, as they run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from megads.batch import MicroBatch, copy_into
from megads.engine.optimizer import BucketOptimizer
from megads.engine.spans import SpanRecorder
from megads.errors import ConfigError
from megads.ops.device_cache import record_cached_results
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.pipeline_actions import ActionKind

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

EAGER_STEPS = 2
"""Number of eager steps before the first capture, which compile kernels and fill caches."""

T = TypeVar("T")


class Passes(Protocol):
    """The passes of one micro-batch to capture; they consist of launches on the current stream only."""

    def forward_alone(self, batch: MicroBatch) -> Tensor:
        """Runs the forward pass of a micro-batch on the device; returns the loss."""
        ...

    def backward_alone(self) -> None:
        """Runs the backward pass of the last forward pass; gradients are accumulated in main_grad."""
        ...


def use_side_stream(device: torch.device) -> None:
    """Switches to a new CUDA stream, as the default stream cannot be captured; call before creating any parameters.

    Autograd accumulates a gradient on the stream on which its AccumulateGrad node was created.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


def capture(run: Callable[[], T], pool: _POOL_HANDLE | None) -> Callable[[], T]:
    """Captures a function as a CUDA graph, without running it.

    Args:
        run: function that launches kernels; its results are tensors of the graph.
        pool: memory pool, see torch.cuda.graph_pool_handle.

    Returns:
        A function that replays the graph and returns the results that `run` returned at capture.
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads, which write checkpoints or monitor NCCL, may call CUDA during the capture.
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        outputs = run()

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


@dataclass
class CapturedMicroBatch:
    """The pair of graphs of a micro-batch.

    Attributes:
        batch: buffers that the graphs read the micro-batch from.
        forward: replays the forward pass; returns the loss.
        backward: replays the backward pass; returns the slots of every bucket's main_grad that are still unwritten.
        kept: tensors that the graphs read and that must be kept alive.
    """

    batch: MicroBatch
    forward: Callable[[], Tensor]
    backward: Callable[[], list[set[int]]]
    kept: list[object] = field(default_factory=list)


class MicroBatchGraphs:
    """Runs the micro-batches of a step with CUDA graphs, which are captured at the first use of each shape.

    Args:
        passes: passes of a micro-batch.
        optimizer: optimizer in whose main_grad gradients are accumulated.
        loss: loss of a micro-batch.
        device: a GPU whose current stream is not the default stream.
    """

    def __init__(self, passes: Passes, optimizer: BucketOptimizer, loss: TokenMeanLoss, device: torch.device) -> None:
        self._passes, self._optimizer, self._loss, self._device = passes, optimizer, loss, device
        self._scale = torch.ones((), dtype=torch.float64, device=device)
        self._captured: dict[Hashable, CapturedMicroBatch] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._steps = 0
        optimizer.keep_main_grads()

    def should_check(self) -> bool:
        """Counts a step, and returns whether it runs with graphs."""
        self._steps += 1
        return self._steps > EAGER_STEPS

    def run(self, micro_batches: Sequence[MicroBatch], spans: SpanRecorder) -> Tensor:
        """Runs forward and backward passes of all micro-batches.

        Args:
            micro_batches: micro-batches of the step on this rank.
            spans: recorder that times every pass.

        Returns:
            The sum of the losses.

        Raises:
            ConfigError: the passes cannot be captured.
        """
        self._scale.copy_(self._loss.scale)
        self._loss.scale = self._scale
        total = torch.zeros_like(self._scale)
        for number, batch in enumerate(micro_batches):
            captured = self._graphs_of(batch, first=number == 0)
            for place, value in zip(_tensors(captured.batch), _tensors(batch), strict=True):
                copy_into(place, value)
            with spans.span(ActionKind.forward, number, 0):
                total += captured.forward()
            with spans.span(ActionKind.backward, number, 0):
                self._optimizer.update_unwritten(captured.backward())
        return total

    def _graphs_of(self, batch: MicroBatch, *, first: bool) -> CapturedMicroBatch:
        # Numbers become constants of a graph.
        numbers = (first, batch.info.seq_len, batch.info.step_tokens)
        key = (*numbers, tuple(None if x is None else x.shape for x in _all_tensors(batch)))
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(batch)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise ConfigError(
                    f"ops.cuda_graphs = true: the passes of this run cannot be captured ({reason}); set "
                    "ops.cuda_graphs=false"
                ) from error
        return self._captured[key]

    def _capture(self, batch: MicroBatch) -> CapturedMicroBatch:
        # A separate copy, as values that layers cache by micro-batch must belong to one pair of graphs.
        own = deepcopy(batch).to(self._device)

        def backward() -> list[set[int]]:
            self._passes.backward_alone()
            return self._optimizer.unwritten()

        with record_cached_results() as kept:
            return CapturedMicroBatch(
                own,
                capture(lambda: self._passes.forward_alone(own), self._pool),
                capture(backward, self._pool),
                kept,
            )


def _all_tensors(batch: MicroBatch) -> list[Tensor | None]:
    values = [getattr(part, one.name) for part in (batch, batch.info) for one in fields(part)]
    return [value for value in values if value is None or isinstance(value, Tensor)]


def _tensors(batch: MicroBatch) -> list[Tensor]:
    return [x for x in _all_tensors(batch) if x is not None]
