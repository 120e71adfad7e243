"""Rates of the operators that dominate a pass: GEMMs, attention, copies.

GEMMs are measured as layers compute them (`megads.ops.linear`): forward, input gradient and weight gradient. As in
training, weights are not in cache when they are read: calls cycle through several copies. On a GPU, times are device
times without the host's kernel launches (`Bench.time_s`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from megads.api import AttentionCore, AttentionKind, BatchInfo, Kernels, ModelConfig, Position, add_weight_gradient
from megads.ops.linear import input_gradient, linear

_MOST_COPIES = 64
_BLOCKS, _MOST_QUEUED = 5, 50
"""Timed blocks of calls on a GPU, and the most calls per block: the launch queue holds about a thousand launches."""
_CYCLES_PER_S = 2e9
"""Clock rate assumed for `torch.cuda._sleep` while calls are queued: no GPU's clock is much higher."""
_AHEAD = 2.0
"""Sleep of the GPU before a block of calls, as a multiple of the host's time to issue the block."""

Product = list[float]
"""m, n, k, TFLOPs."""


@dataclass(frozen=True)
class Shapes:
    """Shapes of the measured operators.

    Attributes:
        tokens: numbers of tokens (rows) of the GEMMs.
        features: output and input features of the weights.
        largest: most multiply-adds of a GEMM from `tokens` x `features`.
        further: tokens, output and input features of additional GEMMs.
        cold_bytes: total bytes of the copies of a weight, more than caches hold.
        lengths: sequence lengths of attention.
        attended: tokens of all samples in attention, unless one sample is longer.
        heads, head_dim: attention heads and features per head.
        copied_bytes: bytes of a copy.
    """

    tokens: tuple[int, ...]
    features: tuple[tuple[int, int], ...]
    largest: int
    further: tuple[tuple[int, int, int], ...]
    cold_bytes: int
    lengths: tuple[int, ...]
    attended: int
    heads: int
    head_dim: int
    copied_bytes: int = 256 * 2**20

    @property
    def products(self) -> Iterator[tuple[int, int, int]]:
        """Tokens, output features and input features of each measured GEMM."""
        for tokens, (outputs, inputs) in itertools.product(self.tokens, self.features):
            if tokens * outputs * inputs <= self.largest:
                yield tokens, outputs, inputs
        yield from self.further


CPU_SHAPES = Shapes(
    tokens=(128, 512, 2048),
    features=(
        *((128, 128), (512, 128), (128, 512), (256, 256), (1024, 256), (256, 1024), (512, 512), (2048, 512)),
        *((512, 2048), (1024, 1024), (4096, 1024), (1024, 4096), (8192, 256), (32768, 512)),
    ),
    largest=2**34,  # half a second in fp32 on a core
    further=(),
    cold_bytes=48 * 2**20,
    lengths=(128, 256, 512, 1024, 2048),
    attended=512,
    heads=4,
    head_dim=64,
)
GPU_SHAPES = Shapes(
    tokens=(2048, 8192, 32768),
    features=(
        *((1024, 1024), (4096, 1024), (1024, 4096), (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096)),
        *((16384, 4096), (4096, 16384)),
    ),
    largest=2**41,  # seven milliseconds in bf16 on an H100, with 2.4 GiB of inputs and output
    further=((8192, 6144, 2048), (8192, 50304, 2048)),
    cold_bytes=256 * 2**20,
    lengths=(1024, 2048, 8192),
    attended=8192,
    heads=16,
    head_dim=128,
)


@dataclass(frozen=True)
class Bench:
    """Device, kernels and repetitions of the measurements on this rank.

    Attributes:
        device: device of the rank.
        dtype: dtype of the GEMMs.
        kernels: kernels that a run would use.
        seconds: seconds for which each measurement is repeated.
        shapes: shapes of the operators.
        attention: autotuned attention implementations, keyed by whether ALiBi is used; empty if not autotuned.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    seconds: float
    shapes: Shapes
    attention: Mapping[bool, AttentionKind] = field(default_factory=dict)

    def attention_kind_of(self, model: ModelConfig) -> AttentionKind:
        """Attention implementation of a model."""
        return self.attention.get(model.position is Position.alibi, model.attention)

    def time_s(self, work: Callable[[], object], least: int = 3) -> float:
        """Median seconds of some work that all ranks start together; rank 0 sets the number of repeats for all.

        On a GPU this is device time: calls are queued first, so the host's time to issue them is hidden.
        """
        self._waited_s(work)
        first = torch.tensor([self._waited_s(work)], dtype=torch.float64, device=self.device)
        dist.broadcast(first, 0)
        repeats = max(least, min(2000, int(self.seconds / max(first.item(), 1e-6))))
        dist.barrier()
        if self.device.type == "cuda":
            return _queued_s(work, repeats)
        return median(self._waited_s(work) for _ in range(repeats))

    def _waited_s(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


@dataclass(frozen=True)
class RepeatedBench(Bench):
    """Repeats the same measurements, in the same order, at several moments; the fastest time is used.

    Other activity of the machine can slow down every measurement for some seconds.

    Attributes:
        before: fastest times of the earlier moments, in seconds; empty at the first one.
        times: fastest times so far, in seconds, of what has been measured at this moment.
        slower: relative increase of each time at the slower moment compared with the faster one.
    """

    before: Sequence[float] = ()
    times: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)

    def time_s(self, work: Callable[[], object], least: int = 3) -> float:
        """Like `Bench.time_s`; returns the fastest time of this and earlier moments."""
        taken = super().time_s(work, least)
        if self.before:
            earlier = self.before[len(self.times)]
            self.slower.append(max(taken, earlier) / min(taken, earlier) - 1)
            taken = min(taken, earlier)
        self.times.append(taken)
        return taken

    def again(self) -> RepeatedBench:
        """Returns the bench for the next moment."""
        return replace(self, before=tuple(self.times), times=[], slower=[])


def _queued_s(work: Callable[[], object], calls: int) -> float:
    """Median seconds per call over several blocks of calls, timed by CUDA events."""
    begin = time.perf_counter()
    work()
    issue_s = time.perf_counter() - begin
    queued = max(1, min(_MOST_QUEUED, calls // _BLOCKS))
    times = []
    for _ in range(min(_BLOCKS, calls)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(_CYCLES_PER_S * _AHEAD * issue_s * queued))
        start.record()
        for _ in range(queued):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / queued)
    return median(times)


def measured_gemms(bench: Bench) -> dict[str, list[Product]]:
    """TFLOPs by m, n, k of forward, input gradient and weight gradient GEMMs (the latter accumulate into main_grad)."""
    found: dict[str, list[Product]] = {"products": [], "input_products": [], "weight_products": []}
    for tokens, outputs, inputs in bench.shapes.products:
        seconds = map(bench.time_s, _gemms_of_layer(bench, tokens, outputs, inputs))
        shapes = ((tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens))
        for rows, shape, taken_s in zip(found.values(), shapes, seconds, strict=True):
            rows.append([*shape, round(2 * tokens * outputs * inputs / 1e12 / taken_s, 5)])
    return found


def _gemms_of_layer(bench: Bench, tokens: int, outputs: int, inputs: int) -> tuple[Callable[[], object], ...]:
    """Calls of a linear layer's forward, dgrad and wgrad GEMMs; each uses another copy of the weight, not in cache."""
    copies = max(1, min(_MOST_COPIES, bench.shapes.cold_bytes // (outputs * inputs * bench.dtype.itemsize)))
    x_mi, grad_mo, weight_oi = (
        _random(bench, *shape) for shape in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
    )
    weights = itertools.cycle([weight_oi.clone() for _ in range(copies)])
    main_grads = itertools.cycle([weight_oi.float() for _ in range(max(1, copies // 2))])
    return (
        lambda: linear(x_mi, next(weights), None, bench.kernels),
        lambda: input_gradient(grad_mo, next(weights), bench.kernels),
        lambda: add_weight_gradient(next(main_grads), grad_mo, x_mi, first=False, kernels=bench.kernels),
    )


def _random(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=bench.device).to(bench.dtype)


def attention_model(shapes: Shapes, position: Position) -> ModelConfig:
    """Config of a model with the measured attention."""
    return ModelConfig(
        num_layers=1,
        hidden_size=shapes.heads * shapes.head_dim,
        num_heads=shapes.heads,
        vocab_size=1,
        position=position,
    )


def measured_attention(bench: Bench, position: Position = Position.alibi) -> list[list[float]]:
    """Rows of sequence length, forward and backward TFLOPs of causal attention; masked scores are not counted."""
    found, shapes = [], bench.shapes
    model = attention_model(shapes, position)
    for tokens in shapes.lengths:
        samples, heads, dim = max(1, shapes.attended // tokens), shapes.heads, shapes.head_dim
        core = AttentionCore(replace(model, attention=bench.attention_kind_of(model)), 0, "x").to(bench.device)
        core.kernels = bench.kernels
        info = BatchInfo(torch.arange(samples, device=bench.device), seq_len=tokens)
        # Views of one QKV projection, as in the model.
        whole = _random(bench, samples, tokens, heads, 3, dim)
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in whole.unbind(3))
        attend = partial(core, q, k, v, info)
        grad = torch.ones_like(attend())
        forward_s = bench.time_s(attend)
        both_s = bench.time_s(partial(_forward_backward, attend, (q, k, v), grad))
        flops = 2 * samples * heads * tokens**2 * dim / 1e12
        found.append([tokens, round(flops / forward_s, 5), round(2.5 * flops / max(both_s - forward_s, 1e-9), 5)])
    return found


def _forward_backward(forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> None:
    torch.autograd.grad(forward(), inputs, grad)


def copied_bytes_per_s(bench: Bench) -> float:
    """Memory bandwidth of a device copy in bytes per second, reads plus writes."""
    size = bench.shapes.copied_bytes
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / bench.time_s(lambda: target.copy_(source))


def host_bytes_per_s(bench: Bench) -> float:
    """Bytes per second of a copy to host memory, which is pinned if the device is a GPU."""
    source = torch.ones(bench.shapes.copied_bytes // 4, device=bench.device)
    target = torch.empty(source.shape, pin_memory=bench.device.type == "cuda")
    return bench.shapes.copied_bytes / bench.time_s(lambda: target.copy_(source, non_blocking=True))


def smallest_s(bench: Bench) -> float:
    """Seconds of an elementwise operator on 8 elements."""
    one = torch.ones(8, device=bench.device)
    return bench.time_s(lambda: one.add_(1.0))
