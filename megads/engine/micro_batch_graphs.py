"""CUDA graphs of micro-batches: a forward and a backward pass are captured once and replayed.

A pass of a small model takes less device time than the host needs to launch it: Python, autograd and the launches of
some hundred kernels per block. A replayed graph is one launch.

A graph reads and writes the addresses that it was captured with. So micro-batches are copied to fixed buffers,
main_grad stays allocated across steps, the loss scale has a fixed address, and tensors from the operators' caches are
kept alive. The first micro-batch of a step writes main_grad and the others add to it, so there are two pairs of graphs.
All graphs share one memory pool, as they run one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from megads.batch import MicroBatch, copy_into
from megads.engine.interface import PassTimes
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
TIMED_PASSES = 5
"""Number of times that the passes of a micro-batch are timed."""

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
        eager_steps: number of steps to come before the first that runs with graphs.
    """

    def __init__(
        self,
        passes: Passes,
        optimizer: BucketOptimizer,
        loss: TokenMeanLoss,
        device: torch.device,
        eager_steps: int = EAGER_STEPS,
    ) -> None:
        self._passes, self._optimizer, self._loss, self._device = passes, optimizer, loss, device
        self._scale = torch.ones((), dtype=torch.float64, device=device)
        self._captured: dict[Hashable, CapturedMicroBatch] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._steps, self._eager_steps = 0, eager_steps
        optimizer.keep_main_grads()

    def should_check(self) -> bool:
        """Counts a step, and returns whether it runs with graphs."""
        self._steps += 1
        return self._steps > self._eager_steps

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

    def time_replays(self, batch: MicroBatch) -> float:
        """Returns the mean time of several replays of both passes in milliseconds, which do not wait for the host.

        Args:
            batch: a micro-batch that has been run as the first of a step; its gradients are discarded.
        """
        captured = self._graphs_of(batch, first=True)
        marks = _marks(self._device)
        for _ in range(TIMED_PASSES):
            captured.forward()
            captured.backward()
        return marks() / TIMED_PASSES

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
                    f"ops.cuda_graphs: the passes of this run cannot be captured ({reason}); set ops.cuda_graphs=false"
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


def time_passes(
    passes: Passes,
    optimizer: BucketOptimizer,
    loss: TokenMeanLoss,
    device: torch.device,
    micro_batches: Sequence[MicroBatch],
    *,
    reduces: bool,
) -> tuple[PassTimes, MicroBatchGraphs | None]:
    """Times the passes of a micro-batch between two steps, in eager mode and captured; gradients are discarded.

    Args:
        passes: passes of a micro-batch.
        optimizer: optimizer in whose main_grad gradients are accumulated.
        loss: loss of a micro-batch, with the scale of the last step.
        device: device of this rank.
        micro_batches: micro-batches of the last step on this rank.
        reduces: whether gradients are reduced over data-parallel ranks; collective then.

    Returns:
        The times, and the graphs, which run from the next step on; None if the passes could not be captured.
    """
    own = deepcopy(micro_batches[0]).to(device)
    launches_ms, reductions_ms = list[float](), [0.0]
    for _ in range(TIMED_PASSES):
        optimizer.begin(overlap=False)
        _synchronize(device)  # else the host could wait for room in the queue of launches
        begin = time.perf_counter()
        passes.forward_alone(own)
        passes.backward_alone()
        launches_ms.append(1e3 * (time.perf_counter() - begin))
        if reduces:
            reductions_ms.append(_reduction_ms(optimizer, device))
    # A reduction also waits for slower ranks, the shortest one the least.
    host_ms, reduce_ms = statistics.median(launches_ms), min(reductions_ms[1:], default=0.0)
    times = PassTimes(len(micro_batches), host_ms, None, reduce_ms)
    optimizer.begin(overlap=False)
    try:
        graphs = MicroBatchGraphs(passes, optimizer, loss, device, eager_steps=0)
        graphs.run(micro_batches[:2], SpanRecorder(device))  # the first writes main_grad, the second adds to it
        return replace(times, device_ms=graphs.time_replays(micro_batches[0])), graphs
    except torch.OutOfMemoryError:
        failure = "out of memory"
    except ConfigError as error:
        failure = str(error.__cause__ or error).splitlines()[0]
    return replace(times, failure=failure), None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reduction_ms(optimizer: BucketOptimizer, device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    optimizer.reduce()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def _marks(device: torch.device) -> Callable[[], float]:
    """Starts a timer; returns a function that waits for the device and returns its time since then in milliseconds."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        return lambda: 1e3 * (time.perf_counter() - begin_s)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def elapsed_ms() -> float:
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    return elapsed_ms


def _all_tensors(batch: MicroBatch) -> list[Tensor | None]:
    values = [getattr(part, one.name) for part in (batch, batch.info) for one in fields(part)]
    return [value for value in values if value is None or isinstance(value, Tensor)]


def _tensors(batch: MicroBatch) -> list[Tensor]:
    return [x for x in _all_tensors(batch) if x is not None]
