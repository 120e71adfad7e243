"""Rates of the operators that take most of a pass: matrix products, attention, copies.

Products are measured as layers compute them (`megads.ops.linear`), in all three passes. As in training a weight is out
of the caches when its turn comes: calls go around several copies of it. A GPU's times are its own clock's, without
what the host takes to launch kernels (`Bench.time_s`).
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

from megads.batch import BatchInfo
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig, Position
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import Kernels
from megads.ops.linear import add_weight_gradient, input_gradient, linear

_MOST_COPIES = 64
_BLOCKS, _MOST_QUEUED = 5, 50
"""Blocks of calls that a GPU times, and calls of one: its queue takes about a thousand launches."""
_CYCLES_PER_S = 2e9
"""Of a GPU that idles while calls are queued: no GPU's clock is much higher."""
_AHEAD = 2.0
"""Times the host's time for a block of calls, for which the GPU idles before it."""

Product = list[float]
"""m, n, k, TFLOPs."""


@dataclass(frozen=True)
class Shapes:
    """What is measured of operators.

    Attributes:
        tokens: of products.
        features: outputs and inputs of their weights.
        largest: multiply-adds of such a product that is measured.
        further: tokens, outputs and inputs of products beside those.
        cold_bytes: of the copies of a weight together, more than caches hold.
        lengths: tokens a sample in attention.
        attended: tokens of all samples, if one is not longer.
        heads, head_dim: of attention.
        copied_bytes: of a copy.
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
        """Tokens, outputs and inputs."""
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
    """How to measure on this rank.

    Attributes:
        device: that computes.
        dtype: of products.
        kernels: that the ranks of a run would take.
        seconds: for which each measurement is repeated.
        shapes: of operators.
        attention: how it is computed, with ALiBi and without, where that was tried.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    seconds: float
    shapes: Shapes
    attention: Mapping[bool, AttentionKind] = field(default_factory=dict)

    def kind_of(self, model: ModelConfig) -> AttentionKind:
        """How a model's attention is computed."""
        return self.attention.get(model.position is Position.alibi, model.attention)

    def time_s(self, work: Callable[[], object], least: int = 3) -> float:
        """Median seconds of some work, begun on all ranks together; as often on each, as rank 0 says.

        On a GPU these are its own: calls wait for it in its queue, and what the host takes to issue them is hidden.
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
    """Measures the same at several moments, always in the same order: the quickest time counts.

    Whatever else a machine does for some seconds makes everything slower that is measured meanwhile.

    Attributes:
        before: seconds of what was measured at the moments before; nothing at the first one.
        times: of what is measured now, or before where that was quicker.
        slower: how much longer each took at the slower moment than at the quicker one, as a share.
    """

    before: Sequence[float] = ()
    times: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)

    def time_s(self, work: Callable[[], object], least: int = 3) -> float:
        """See Bench."""
        taken = super().time_s(work, least)
        if self.before:
            earlier = self.before[len(self.times)]
            self.slower.append(max(taken, earlier) / min(taken, earlier) - 1)
            taken = min(taken, earlier)
        self.times.append(taken)
        return taken

    def again(self) -> RepeatedBench:
        """For the next moment."""
        return replace(self, before=tuple(self.times), times=[], slower=[])


def _queued_s(work: Callable[[], object], calls: int) -> float:
    """Median seconds of a call among blocks of them, by the GPU's clock."""
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


@dataclass(frozen=True)
class _ColdLayer:
    """A linear layer whose weight is another one at every call.

    Attributes:
        x_mi: input.
        grad_mo: gradient of the output.
        weights: [o, i] each.
        sums: fp32, likewise.
        kernels: that compute.
    """

    x_mi: torch.Tensor
    grad_mo: torch.Tensor
    weights: Iterator[torch.Tensor]
    sums: Iterator[torch.Tensor]
    kernels: Kernels

    def forward(self) -> None:
        """The product of a forward pass."""
        linear(self.x_mi, next(self.weights), None, self.kernels)

    def of_input(self) -> None:
        """The gradient of the input."""
        input_gradient(self.grad_mo, next(self.weights), self.kernels)

    def of_weight(self) -> None:
        """The gradient of the weight, added to its sum."""
        add_weight_gradient(next(self.sums), self.grad_mo, self.x_mi, first=False, kernels=self.kernels)


def measured_products(bench: Bench) -> dict[str, list[Product]]:
    """TFLOPs by m, n, k of forward products, those of input gradients, and those of weight gradients with their sum."""
    found: dict[str, list[Product]] = {"products": [], "input_products": [], "weight_products": []}
    for tokens, outputs, inputs in bench.shapes.products:
        copies = max(1, min(_MOST_COPIES, bench.shapes.cold_bytes // (outputs * inputs * bench.dtype.itemsize)))
        weight_oi = _random(bench, outputs, inputs)
        layer = _ColdLayer(
            _random(bench, tokens, inputs),
            _random(bench, tokens, outputs),
            itertools.cycle([weight_oi.clone() for _ in range(copies)]),
            itertools.cycle([weight_oi.float() for _ in range(max(1, copies // 2))]),
            bench.kernels,
        )
        forward, of_input, of_weight = map(bench.time_s, (layer.forward, layer.of_input, layer.of_weight))
        flops = 2 * tokens * outputs * inputs / 1e12
        for name, shape, seconds in (
            ("products", (tokens, outputs, inputs), forward),
            ("input_products", (tokens, inputs, outputs), of_input),
            ("weight_products", (outputs, inputs, tokens), of_weight),
        ):
            found[name].append([*shape, round(flops / seconds, 5)])
    return found


def _random(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=bench.device).to(bench.dtype)


def attention_model(shapes: Shapes, position: Position) -> ModelConfig:
    """A model that has the attention which is measured."""
    return ModelConfig(
        num_layers=1,
        hidden_size=shapes.heads * shapes.head_dim,
        num_heads=shapes.heads,
        vocab_size=1,
        position=position,
    )


def measured_attention(bench: Bench, position: Position = Position.alibi) -> list[list[float]]:
    """TFLOPs of causal attention, hidden scores not counted: tokens a sample, forward, backward."""
    found, shapes = [], bench.shapes
    model = attention_model(shapes, position)
    for tokens in shapes.lengths:
        samples, heads, dim = max(1, shapes.attended // tokens), shapes.heads, shapes.head_dim
        core = AttentionCore(replace(model, attention=bench.kind_of(model)), 0, "x").to(bench.device)
        core.kernels = bench.kernels
        info = BatchInfo(torch.arange(samples, device=bench.device), seq_len=tokens)
        # Views of one projection, as in the model.
        whole = _random(bench, samples, tokens, heads, 3, dim)
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in whole.unbind(3))
        attend = partial(core, q, k, v, info)
        grad = torch.ones_like(attend())
        forward_s = bench.time_s(attend)
        both_s = bench.time_s(partial(_there_and_back, attend, (q, k, v), grad))
        flops = 2 * samples * heads * tokens**2 * dim / 1e12
        found.append([tokens, round(flops / forward_s, 5), round(2.5 * flops / max(both_s - forward_s, 1e-9), 5)])
    return found


def _there_and_back(forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> None:
    """A forward pass and its backward pass."""
    torch.autograd.grad(forward(), inputs, grad)


def copied_bytes_per_s(bench: Bench) -> float:
    """Read and written."""
    size = bench.shapes.copied_bytes
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / bench.time_s(lambda: target.copy_(source))


def host_bytes_per_s(bench: Bench) -> float:
    """Of a copy to the host's memory, pinned where a GPU makes it."""
    source = torch.ones(bench.shapes.copied_bytes // 4, device=bench.device)
    target = torch.empty(source.shape, pin_memory=bench.device.type == "cuda")
    return bench.shapes.copied_bytes / bench.time_s(lambda: target.copy_(source, non_blocking=True))


def smallest_s(bench: Bench) -> float:
    """Seconds of an operator on next to nothing."""
    one = torch.ones(8, device=bench.device)
    return bench.time_s(lambda: one.add_(1.0))
