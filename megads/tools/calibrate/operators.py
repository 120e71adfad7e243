"""Rates of the operators that take most of a pass: matrix products, attention, copies.

Products are measured as layers compute them (`megads.ops.linear`), in all three passes. As in training a weight is out
of the caches when its turn comes: calls go around several copies of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from megads.batch import BatchInfo
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig
from megads.ops.config import Kernels
from megads.ops.linear import add_weight_gradient, input_gradient, linear

_TOKENS = (128, 512, 2048)
_FEATURES = (
    *((128, 128), (512, 128), (128, 512), (256, 256), (1024, 256), (256, 1024), (512, 512), (2048, 512), (512, 2048)),
    *((1024, 1024), (4096, 1024), (1024, 4096), (8192, 256), (32768, 512)),
)
"""Output and input features."""
_LARGEST = 2**34
"""Multiply-adds of a product that is measured: half a second in fp32 on a core."""
_LENGTHS = (128, 256, 512, 1024, 2048)
_COLD_BYTES = 48 * 2**20
_MOST_COPIES = 64
_COPIED_BYTES = 256 * 2**20

Product = list[float]
"""m, n, k, TFLOPs."""


@dataclass(frozen=True)
class Bench:
    """How to measure on this rank.

    Attributes:
        device: that computes.
        dtype: of products.
        kernels: that the ranks of a run would take.
        seconds: for which each measurement is repeated.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    seconds: float

    def time_s(self, work: Callable[[], object], least: int = 3) -> float:
        """Median seconds of some work, begun on all ranks together; as often on each, as rank 0 says."""

        def once() -> float:
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        once()
        first = torch.tensor([once()], dtype=torch.float64, device=self.device)
        dist.broadcast(first, 0)
        repeats = max(least, min(2000, int(self.seconds / max(first.item(), 1e-6))))
        dist.barrier()
        return median(once() for _ in range(repeats))


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
    for tokens, (outputs, inputs) in itertools.product(_TOKENS, _FEATURES):
        if tokens * outputs * inputs > _LARGEST:
            continue
        copies = max(1, min(_MOST_COPIES, _COLD_BYTES // (outputs * inputs * bench.dtype.itemsize)))
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


def measured_attention(bench: Bench) -> list[list[float]]:
    """TFLOPs of causal attention, hidden scores not counted: tokens a sample, forward, backward."""
    found = []
    for tokens in _LENGTHS:
        samples, heads, dim = max(1, 512 // tokens), 4, 64
        core = AttentionCore(ModelConfig(num_layers=1, hidden_size=heads * dim, num_heads=heads, vocab_size=1), 0, "x")
        core = core.to(bench.device)
        core.kernels = bench.kernels
        info = BatchInfo(torch.arange(samples), seq_len=tokens)
        q, k, v = (_random(bench, samples, heads, tokens, dim).requires_grad_() for _ in range(3))
        attend = partial(core, q, k, v, info)
        grad = torch.ones_like(attend())
        forward_s = bench.time_s(attend)
        both_s = bench.time_s(partial(_there_and_back, attend, grad))
        flops = 2 * samples * heads * tokens**2 * dim / 1e12
        found.append([tokens, round(flops / forward_s, 5), round(2.5 * flops / max(both_s - forward_s, 1e-9), 5)])
    return found


def _there_and_back(forward: Callable[[], torch.Tensor], grad: torch.Tensor) -> None:
    """A forward pass and its backward pass."""
    forward().backward(grad)


def copied_bytes_per_s(bench: Bench) -> float:
    """Read and written."""
    source = torch.ones(_COPIED_BYTES // 4, device=bench.device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / bench.time_s(lambda: target.copy_(source))


def smallest_s(bench: Bench) -> float:
    """Seconds of an operator on next to nothing."""
    one = torch.ones(8, device=bench.device)
    return bench.time_s(lambda: one.add_(1.0))
