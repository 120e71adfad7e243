"""Seconds of a layer's operators on one rank: the larger of arithmetic and memory traffic (Williams et al. 2009).

A matrix product runs in waves of tiles over the device's processors (NVIDIA, "Matrix Multiplication Background User's
Guide": tile and wave quantization); a wave that is not full takes as long as a full one. An elementwise kernel takes as
long as the bytes that it reads and writes. Attention is one flash kernel, which skips what causality hides, or products
around scores in memory. Collectives of tensor and context parallelism count as far as megads' layers wait for them
(megads.parallel.region_linear, megads.parallel.context).

T: tokens of the rank's pass; h: hidden_size; w: bytes of an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from megads.model.config import MLPKind, ModelConfig, Position
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import SPLIT_SCHEDULES, ParallelConfig, Recompute
from megads.plan.collectives import FLAT, CommunicationGroup, Network, all_gather, all_reduce, group_of, reduce_scatter
from megads.plan.devices import Device

FP32 = 4
Parts = Mapping[str, float]
"""Seconds by what takes them: matmul, attention, elementwise, recompute, gradient sums, tp, cp."""

_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.75))
"""Rows and columns of cuBLAS' tiles, and their rates beside the largest's (NVIDIA's guide, figure 2: less reuse)."""
_PROLOGUE = 128
"""Steps of a product's inner dimension that a tile takes before and after its products: k / (k + 128) is left."""
_ALIGNED = 64
_UNALIGNED_RATE = 0.8
"""Of products whose dimensions are no multiples of 64 elements, 128 bytes (NVIDIA's guide). BLOOM's own trials: 94.4
TFLOPs with 14400 / 8 = 1800 columns, 120.1 with 13824 / 8 = 1728 (bigscience, tr11-176B-ml, chronicles-prequel.md)."""
_BACKWARD_TRAFFIC = 1.5
"""Of elementwise kernels, beside forward: they read a gradient beside the input."""
_FLASH_BACKWARD = 2.5
"""Products of a flash kernel backward beside forward: five instead of two (Dao 2023)."""
_LOSS_BYTES = 16
"""Traffic of one logit forward and back: read in bf16 for the maximum, the sum and the gradient, which is written;
fp32 in between."""


HIDDEN_COST = 0.2
"""Share of a collective's time that it takes from the work beside it: its kernels occupy processors and memory.
Calculon (Isaev et al. 2023, systems/a100_80g.json) has 0.15 on NVLink."""


def waits_beside(message: float, work: float) -> float:
    """Seconds that a message costs beside work: what work does not hide, and a share of what it does."""
    return max(0.0, message - work) + HIDDEN_COST * min(message, work)


@dataclass(frozen=True)
class Execution:
    """How a trainer runs what a layout asks for. The defaults are megads' on GPUs.

    Attributes:
        scores_in_memory: attention keeps its scores in memory; None: where no flash kernel can do the work.
        fused: dropout and residual are one kernel.
        sums_in_product: gradients of weights are added to fp32 sums inside of the products.
        overlap_tp: backward, messages of regions beside products.
        overlap_reduction: gradients reduce beside the last backward pass (buckets).
        overlap_gather: new weights are gathered beside the next forward pass.
        overlap_messages: messages of the pipeline travel beside passes.
        overlap_zero: ZeRO-2 and ZeRO-3 reduce gradients beside the backward pass; megads' do not (overlap_comm: false).
        scatter_messages: each tensor-parallel rank sends its share of a pipeline message, which the receivers gather
            (Narayanan et al. 2021, section 4.1).
        gradient_bytes: of an element of the reduction.
        whole_recompute: recomputation of a block makes its last product again, too.
    """

    scores_in_memory: bool | None = None
    fused: bool = True
    sums_in_product: bool = False
    overlap_tp: bool = True
    overlap_reduction: bool = True
    overlap_gather: bool = False
    overlap_messages: bool = True
    overlap_zero: bool = False
    scatter_messages: bool = False
    gradient_bytes: int = FP32
    whole_recompute: bool = False


MEGADS = Execution()


def matmul_seconds(device: Device, m: float, n: float, k: float, count: float = 1.0, width: int = 2) -> float:
    """Seconds of `count` products [m, k] x [k, n] that run together.

    Args:
        device: with its peak and processors, or measured products.
        m, n, k: the dimensions.
        count: of a batch.
        width: bytes of an element.
    """
    flops = 2 * m * n * k * count
    traffic = width * (m * k + k * n + m * n) * count / device.memory_bytes_per_s
    if device.products:
        return max(flops / _measured_rate(device, m * count, n, k), device.kernel_us * 1e-6)
    rate = device.peak_flops * device.matmul_efficiency * k / (k + _PROLOGUE)
    if m % _ALIGNED or n % _ALIGNED or k % _ALIGNED:
        rate *= _UNALIGNED_RATE
    waves = min(
        ceil(ceil(m / rows) * ceil(n / columns) * count / device.processors) * rows * columns / share
        for rows, columns, share in _TILES
    )
    return max(waves * device.processors * 2 * k / rate, traffic, device.kernel_us * 1e-6)


def _measured_rate(device: Device, m: float, n: float, k: float) -> float:
    """FLOPs a second of the measured products that are nearest, in the ratios of their dimensions."""
    near = sorted(
        (sum(max(a / b, b / a) for a, b in ((m, found[0]), (n, found[1]), (k, found[2]))), found[3])
        for found in device.products
    )[:3]
    weights = [1 / (distance - 3 + 0.05) for distance, _ in near]
    return 1e12 * sum(w * rate for w, (_, rate) in zip(weights, near, strict=True)) / sum(weights)


@dataclass(frozen=True)
class LayerSeconds:
    """Of one layer and one micro-batch on a rank.

    Attributes:
        forward: pass.
        backward_input: with what is recomputed.
        backward_weight: gradients of matrices, and their sums.
    """

    forward: Parts
    backward_input: Parts
    backward_weight: Parts


@dataclass(frozen=True)
class RankOperators:
    """The operators of one rank; all its ranks are alike.

    Attributes:
        model: the model's shape.
        parallel: the layout.
        tokens: of a micro-batch that the rank holds, T.
        seq_len: tokens of a sample.
        width: bytes of an element.
        device: that computes.
        network: that connects nodes.
        execution: the trainer's ways.
    """

    model: ModelConfig
    parallel: ParallelConfig
    tokens: int
    seq_len: int
    width: int
    device: Device
    network: Network = FLAT
    execution: Execution = MEGADS

    @cached_property
    def _tp(self) -> CommunicationGroup:
        return group_of(self.parallel, ("tp",), self.device.ranks_per_node, self.network)

    @cached_property
    def _cp(self) -> CommunicationGroup:
        return group_of(self.parallel, ("cp",), self.device.ranks_per_node, self.network)

    @property
    def _shared(self) -> bool:
        """Outside of regions a rank has a part of the tokens only."""
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    @property
    def _splits(self) -> bool:
        """Backward passes have two parts, and the weights' is put off."""
        return self.parallel.schedule in SPLIT_SCHEDULES

    def _products(self) -> list[tuple[bool, float, float]]:
        """A block's matrices: (opens a region, output features, input features) of a rank."""
        model, tp = self.model, self.parallel.tp
        return [
            (True, model.qkv_width / tp, model.hidden_size),
            (False, model.hidden_size, model.attention_width / tp),
            (True, model.mlp_rows / tp, model.hidden_size),
            (False, model.hidden_size, model.ffn_width / tp),
        ]

    def _matmul(self, outputs: float, inputs: float) -> tuple[float, float, float]:
        """Seconds of a layer's product: forward, gradient of the input, gradient of the weight."""
        device, width = self.device, self.width
        forward = matmul_seconds(device, self.tokens, outputs, inputs, width=width)
        of_input = matmul_seconds(device, self.tokens, inputs, outputs, width=width)
        return forward, of_input, matmul_seconds(device, outputs, inputs, self.tokens, width=width)

    def _traffic(self, size: float) -> float:
        return size / self.device.memory_bytes_per_s

    def _sum_gradient(self, parameters: float) -> float:
        """Seconds to add a gradient of a weight to its fp32 sum: read it, read and write the sum."""
        return 0.0 if self.execution.sums_in_product else self._traffic(parameters * (self.width + 2 * FP32))

    @cached_property
    def elementwise(self) -> float:
        """Seconds of norms, residuals, dropouts, activation and rotations of a block forward."""
        model, parallel = self.model, self.parallel
        outside = self.tokens * model.hidden_size / (parallel.tp if self._shared else 1)
        norms, residuals = (1, 1) if model.parallel_block else (2, 2)
        passes = 3.0 if self.execution.fused or not model.hidden_dropout else 5.0
        dropped = 0.5 if model.hidden_dropout else 0.0
        size = outside * (2.0 * norms + (passes + dropped + model.parallel_block) * residuals)
        gates = 3 if model.mlp is MLPKind.swiglu else 2
        size += self.tokens * gates * model.ffn_width / parallel.tp
        turned = (model.position is Position.rope) + model.qk_norm
        size += turned * 2 * self.tokens * (model.attention_width + model.kv_heads * model.head_dim) / parallel.tp
        kernels = norms + residuals + 1 + turned
        return max(self._traffic(size * self.width), kernels * self.device.kernel_us * 1e-6)

    @property
    def scores_in_memory(self) -> bool:
        """Whether attention keeps its scores: asked for, or dropout with a bias, which no flash kernel has."""
        model, asked = self.model, self.execution.scores_in_memory
        if asked is not None:
            return asked
        biased = model.position is Position.alibi or model.window is not None or self.parallel.cp > 1
        return model.attention is AttentionKind.fused_softmax or bool(model.attention_dropout and biased)

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Seconds of the attention core, forward and backward."""
        model, device, seq = self.model, self.device, self.seq_len
        features = model.attention_width / self.parallel.tp
        if not self.scores_in_memory:
            seen = min(model.window or seq, seq)
            pairs = self.tokens * (seen - seen * seen / (2 * seq))
            forward = 4 * pairs * features / (device.peak_flops * device.attention_efficiency)
            forward = max(forward, device.kernel_us * 1e-6)
            return forward, _FLASH_BACKWARD * forward
        heads = model.num_heads / self.parallel.tp
        scores, queries = self.tokens * seq * heads, self.tokens * heads / seq
        inner = matmul_seconds(device, seq, seq, model.head_dim, queries, self.width)
        outer = matmul_seconds(device, seq, model.head_dim, seq, queries, self.width)
        dropped = (2 * self.width + 1) if model.attention_dropout else 0
        forward = inner + outer + self._traffic(scores * (2 * self.width + dropped))
        backward = 2 * (inner + outer) + self._traffic(scores * (3 * self.width + dropped))
        return forward, backward

    def _exposed(self, message: float, product: float) -> float:
        """Seconds of a message that waits for a product, or it for the message, cut into tp_chunks parts."""
        chunks = self.parallel.tp_chunks
        return message / chunks + waits_beside(message, product) * (chunks - 1) / chunks

    def _hidden_bytes(self) -> float:
        return self.tokens * self.model.hidden_size * self.width

    def _open(self, products: tuple[float, float, float]) -> tuple[float, float, float]:
        """Seconds that a layer waits for messages where it opens a region; of the three passes."""
        device, size = self.device, self._hidden_bytes()
        forward_product, input_product, weight_product = products
        beside = self.execution.overlap_tp and not self._splits
        if not self._shared:
            summed = all_reduce(device, self._tp, size)
            return 0.0, waits_beside(summed, weight_product) if beside else summed, 0.0
        gather, scatter = all_gather(device, self._tp, size), reduce_scatter(device, self._tp, size)
        forward = self._exposed(gather, forward_product)
        if self._splits:
            return forward, scatter, gather
        if not beside:
            return forward, scatter + gather, 0.0
        return forward, waits_beside(gather, input_product) + waits_beside(scatter, weight_product), 0.0

    def _close(self, products: tuple[float, float, float]) -> tuple[float, float, float]:
        """Likewise where it closes one."""
        device, size = self.device, self._hidden_bytes()
        if not self._shared:
            return self._exposed(all_reduce(device, self._tp, size), products[0]), 0.0, 0.0
        forward = self._exposed(reduce_scatter(device, self._tp, size), products[0])
        return forward, self._exposed(all_gather(device, self._tp, size), products[1]), 0.0

    def block(self, mode: Recompute) -> LayerSeconds:
        """One transformer block that recomputes `mode`."""
        products = [(opens, self._matmul(outputs, inputs)) for opens, outputs, inputs in self._products()]
        matmul = [sum(seconds[number] for _, seconds in products) for number in range(3)]
        tp = self._tp_waits([(opens, seconds) for opens, seconds in products])
        core_forward, core_backward = self.attention
        keys = 2 * self._hidden_bytes() * self.model.kv_heads * self.model.head_dim
        keys *= self.parallel.cp / self.parallel.tp / self.model.hidden_size
        gathered = all_gather(self.device, self._cp, keys)
        scattered = reduce_scatter(self.device, self._cp, keys * FP32 / self.width)
        recompute = 0.0
        if mode is Recompute.full:
            last, last_wait = products[-1][1][0], self._close(products[-1][1])[0]
            again = self.execution.whole_recompute or bool(self.model.hidden_dropout)
            recompute = matmul[0] + core_forward + self.elementwise + tp[0] + gathered
            recompute -= 0.0 if again else last + last_wait
        elif mode is Recompute.selective:
            recompute = core_forward + gathered
        parameters = sum(outputs * inputs for _, outputs, inputs in self._products())
        return LayerSeconds(
            {
                "matmul": matmul[0],
                "attention": core_forward,
                "elementwise": self.elementwise,
                "tp": tp[0],
                "cp": gathered,
            },
            {
                "matmul": matmul[1],
                "attention": core_backward,
                "elementwise": _BACKWARD_TRAFFIC * self.elementwise,
                "recompute": recompute,
                "tp": tp[1],
                "cp": scattered,
            },
            {"matmul": matmul[2], "gradient sums": self._sum_gradient(parameters), "tp": tp[2]},
        )

    def _tp_waits(self, products: list[tuple[bool, tuple[float, float, float]]]) -> list[float]:
        """Seconds of a block's passes in which it waits for tensor-parallel messages."""
        if self.parallel.tp == 1:
            return [0.0, 0.0, 0.0]
        if self.model.parallel_block:
            # Attention and MLP enter and leave their region together.
            merged = []
            for opens in (True, False):
                parts = [seconds for first, seconds in products if first is opens]
                merged.append((opens, (sum(p[0] for p in parts), sum(p[1] for p in parts), sum(p[2] for p in parts))))
            products = merged
        waits = [self._open(seconds) if opens else self._close(seconds) for opens, seconds in products]
        return [sum(wait[number] for wait in waits) for number in range(3)]

    def head(self) -> LayerSeconds:
        """The output projection and the loss."""
        rows = ceil(self.model.vocabulary / self.parallel.tp)
        rows = -(-rows // _ALIGNED) * _ALIGNED if self.parallel.tp > 1 or rows > _ALIGNED else rows
        products = self._matmul(rows, self.model.hidden_size)
        tp = self._open(products) if self.parallel.tp > 1 else (0.0, 0.0, 0.0)
        loss = self._traffic(self.tokens * rows * _LOSS_BYTES) / 2
        sums = self._sum_gradient(rows * self.model.hidden_size)
        return LayerSeconds(
            {"matmul": products[0], "elementwise": loss, "tp": tp[0]},
            {"matmul": products[1], "elementwise": loss, "tp": tp[1]},
            {"matmul": products[2], "gradient sums": sums, "tp": tp[2]},
        )

    def embedding(self) -> LayerSeconds:
        """The lookup, its sum over ranks, and its gradient's rows."""
        size = self._hidden_bytes()
        moved = self._traffic(3 * size)
        leave, enter = 0.0, 0.0
        if self.parallel.tp > 1:
            summed = reduce_scatter if self._shared else all_reduce
            leave = summed(self.device, self._tp, size)
            enter = all_gather(self.device, self._tp, size) if self._shared else 0.0
        return LayerSeconds(
            {"elementwise": moved, "tp": leave}, {"tp": enter}, {"gradient sums": self._traffic(size * 2 * FP32)}
        )


def total(parts: Parts) -> float:
    """Seconds of all parts."""
    return sum(parts.values())


def add_up(layers: Iterable[tuple[Parts, int]]) -> dict[str, float]:
    """The sum of parts, each so many times."""
    found: dict[str, float] = {}
    for parts, count in layers:
        for name, seconds in parts.items():
            found[name] = found.get(name, 0.0) + seconds * count
    return found
