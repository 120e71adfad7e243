"""Micro-batches as CUDA graphs: a forward and a backward pass are captured once and replayed.

A pass of a small model is shorter than what its host takes to launch it: Python, autograd and the launches of some
hundred kernels a block. A replayed graph is one launch.

A graph reads and writes the memory that it was captured with. So a micro-batch is copied to where the first one was,
main_grad stays where it is from step to step, the loss' scale has a place of its own, and what the operators' caches
gave out is kept. The first micro-batch of a step writes main_grad and the others add to it: those are two pairs of
graphs. All of them share one pool of memory, as they run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from megads.batch import BatchInfo, MicroBatch, copy_into
from megads.engine.optimizer import BucketAdamW
from megads.engine.timeline import SpanRecorder
from megads.errors import ConfigError
from megads.ops.device_cache import keep_cached
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.pipeline_actions import ActionKind

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

EAGER_STEPS = 2
"""Steps before the first capture: kernels are compiled and caches are filled in them."""

T = TypeVar("T")
Outputs = tuple[Tensor, Tensor]
"""Of a forward pass: loss, and whether all of it was finite."""


class Passes(Protocol):
    """What is captured: the passes of one micro-batch, by nothing but launches on the current stream."""

    def forward_alone(self, batch: MicroBatch) -> Outputs:
        """Of a micro-batch on the device."""
        ...

    def backward_alone(self) -> None:
        """Of the last forward pass; gradients go to main_grad."""
        ...


def leave_default_stream(device: torch.device) -> None:
    """Goes on in a stream of its own, which alone can be captured; to be called before there are any parameters.

    Autograd adds a gradient up in the stream in which its parameter was made known.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


def capture(run: Callable[[], T], pool: _POOL_HANDLE | None) -> Callable[[], T]:
    """Captures what is launched, which does not run yet; the result runs it and returns what `run` did, of then.

    Args:
        run: launches; its results are tensors of the graph.
        pool: of memory, see torch.cuda.graph_pool_handle.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, which write checkpoints or watch NCCL, may ask CUDA for whatever they like meanwhile.
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        outputs = run()

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


@dataclass
class CapturedMicroBatch:
    """A pair of graphs.

    Attributes:
        batch: where they read the micro-batch.
        forward, backward: replay them.
        unwritten: of every bucket, the slots of main_grad that are still empty after the backward pass.
        kept: what they read and nobody else may hold any more.
    """

    batch: MicroBatch
    forward: Callable[[], Outputs]
    backward: Callable[[], list[set[int]]]
    kept: list[object] = field(default_factory=list)


class MicroBatchGraphs:
    """Runs the micro-batches of a step by graphs, which it captures when it first meets their shapes.

    Args:
        passes: of a micro-batch.
        optimizer: whose main_grad the gradients go to.
        loss: of a micro-batch.
        device: a GPU, of which the current stream is not the default one.
    """

    def __init__(self, passes: Passes, optimizer: BucketAdamW, loss: TokenMeanLoss, device: torch.device) -> None:
        self._passes, self._optimizer, self._loss, self._device = passes, optimizer, loss, device
        self._scale = torch.ones((), dtype=torch.float64, device=device)
        self._captured: dict[Hashable, CapturedMicroBatch] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._steps = 0
        optimizer.keep_main_grads()

    def is_due(self) -> bool:
        """Whether this step is to run by graphs; counts it."""
        self._steps += 1
        return self._steps > EAGER_STEPS

    def run(self, micro_batches: Sequence[MicroBatch], spans: SpanRecorder) -> Outputs:
        """Forward and backward passes of all of them.

        Args:
            micro_batches: of the step, of this rank.
            spans: are told of every pass.

        Returns:
            The sum of the losses, and whether all forward passes were finite.

        Raises:
            ConfigError: the passes of this run cannot be captured.
        """
        self._scale.copy_(self._loss.scale)
        self._loss.scale = self._scale
        total, finite = torch.zeros_like(self._scale), torch.ones((), dtype=torch.bool, device=self._device)
        for number, batch in enumerate(micro_batches):
            captured = self._graphs_of(batch, first=number == 0)
            for place, value in zip(_tensors(captured.batch), _tensors(batch), strict=True):
                copy_into(place, value)
            with spans.span(ActionKind.forward, number, 0):
                loss, whole = captured.forward()
                total += loss
                finite &= whole
            with spans.span(ActionKind.backward, number, 0):
                self._optimizer.set_unwritten(captured.backward())
        return total, finite

    def _graphs_of(self, batch: MicroBatch, *, first: bool) -> CapturedMicroBatch:
        key = (first, batch.info.seq_len, tuple(None if x is None else x.shape for x in _all_tensors(batch)))
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
        # A graph's own: what layers keep with a micro-batch belongs to one pair of graphs.
        own = deepcopy(batch).to(self._device)

        def backward() -> list[set[int]]:
            self._passes.backward_alone()
            return self._optimizer.unwritten()

        with keep_cached() as kept:
            return CapturedMicroBatch(
                own,
                capture(lambda: self._passes.forward_alone(own), self._pool),
                capture(backward, self._pool),
                kept,
            )


def _all_tensors(batch: MicroBatch) -> list[Tensor | None]:
    values = [getattr(part, one.name) for part in (batch, batch.info) for one in fields(part)]
    return [value for value in values if not isinstance(value, (BatchInfo, int))]


def _tensors(batch: MicroBatch) -> list[Tensor]:
    return [x for x in _all_tensors(batch) if x is not None]
