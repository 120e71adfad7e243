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
from enum import StrEnum
from functools import cached_property
from math import ceil

from megads.model.config import MLPKind, ModelConfig, Position
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import SPLIT_SCHEDULES, ParallelConfig, Recompute
from megads.plan.collectives import FLAT, CommunicationGroup, Network, all_gather, all_reduce, group_of, reduce_scatter
from megads.plan.devices import Device, PassCosts
from megads.plan.measured_rates import between, product_seconds

FP32 = 4
Parts = Mapping[str, float]
"""Seconds by what takes them: matmul, attention, elementwise, host, recompute, gradient sums, tp, cp."""

_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.75))
"""Rows and columns of cuBLAS' tiles, and their rates beside the largest's (NVIDIA's guide, figure 2: less reuse)."""
_PROLOGUE = 128
"""Steps of a product's inner dimension that a tile takes before and after its products: k / (k + 128) is left."""
_ALIGNED = 64
_UNALIGNED_RATE = 0.8
"""Of products whose dimensions are no multiples of 64 elements, 128 bytes (NVIDIA's guide). BLOOM's own trials: 94.4
TFLOPs with 14400 / 8 = 1800 columns, 120.1 with 13824 / 8 = 1728 (bigscience, tr11-176B-ml, chronicles-prequel.md)."""
BACKWARD_TRAFFIC = 1.5
"""Of elementwise kernels, beside forward: they read a gradient beside the input."""
_FLASH_BACKWARD = 2.5
"""Products of a flash kernel backward beside forward: five instead of two (Dao 2023)."""
_LOSS_BYTES = 16
"""Traffic of one logit forward and back: read in bf16 for the maximum, the sum and the gradient, which is written;
fp32 in between."""


def waits_beside(device: Device, message: float, work: float) -> float:
    """Seconds that a message costs beside work: what work does not hide, and a share of what it does.

    The share is `Device.hidden_cost`: a collective's kernels occupy processors and memory.
    """
    return max(0.0, message - work) + device.hidden_cost * min(message, work)


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
        repeatable: gradients of attention are the same bits on every run, which the quickest kernels' are not.
        cuda_graphs: passes are captured and replayed, so that no GPU waits for its host.
        product_rate: of its matrix products beside what the device's table has: older libraries, lower clocks.
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
    repeatable: bool = False
    cuda_graphs: bool = False
    product_rate: float = 1.0


MEGADS = Execution()


class Product(StrEnum):
    """Which of a linear layer's products: they read, pack and write other operands."""

    forward = "forward"
    of_input = "of_input"
    of_weight = "of_weight"


def matmul_seconds(
    device: Device,
    m: float,
    n: float,
    k: float,
    count: float = 1.0,
    width: int = 2,
    kind: Product = Product.forward,
) -> float:
    """Seconds of `count` products [m, k] x [k, n] that run together.

    Args:
        device: with its peak and processors, or measured products.
        m, n, k: the dimensions.
        count: of a batch.
        width: bytes of an element.
        kind: where products were measured, those of which pass count.
    """
    if device.products:
        measured = {Product.of_input: device.input_products, Product.of_weight: device.weight_products}.get(kind)
        seconds = product_seconds(measured or device.products, m * count, n, k)
        return max(seconds, device.kernel_us * 1e-6)
    traffic = width * (m * k + k * n + m * n) * count / device.memory_bytes_per_s
    rate = device.peak_flops * device.matmul_efficiency * k / (k + _PROLOGUE)
    if m % _ALIGNED or n % _ALIGNED or k % _ALIGNED:
        rate *= _UNALIGNED_RATE
    waves = min(
        ceil(ceil(m / rows) * ceil(n / columns) * count / device.processors) * rows * columns / share
        for rows, columns, share in _TILES
    )
    return max(waves * device.processors * 2 * k / rate, traffic, device.kernel_us * 1e-6)


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
        device, width, rate = self.device, self.width, self.execution.product_rate
        # Parts of a region's product: as they were measured, each is a call. Tables of GPUs have no such costs.
        parts = self.parallel.tp_chunks if self.parallel.tp > 1 and device.products else 1
        forward = parts * matmul_seconds(device, self.tokens / parts, outputs, inputs, width=width)
        of_input = matmul_seconds(device, self.tokens, inputs, outputs, width=width, kind=Product.of_input)
        of_weight = matmul_seconds(device, outputs, inputs, self.tokens, width=width, kind=Product.of_weight)
        return forward / rate, of_input / rate, of_weight / rate

    def _traffic(self, size: float) -> float:
        return size / self.device.memory_bytes_per_s

    def _sum_gradient(self, parameters: float) -> float:
        """Seconds to add a gradient of a weight to its fp32 sum: read it, read and write the sum."""
        if self.execution.sums_in_product or self.device.weight_products:
            return 0.0
        return self._traffic(parameters * (self.width + 2 * FP32))

    @property
    def _norms_and_residuals(self) -> int:
        """Of each of them, in a block."""
        return 1 if self.model.parallel_block else 2

    @cached_property
    def elementwise_bytes(self) -> float:
        """Of norms, residuals, dropouts, activation and rotations of a block forward, read and written."""
        model, parallel = self.model, self.parallel
        outside = self.tokens * model.hidden_size / (parallel.tp if self._shared else 1)
        norms = residuals = self._norms_and_residuals
        passes = 3.0 if self.execution.fused or not model.hidden_dropout else 5.0
        dropped = 0.5 if model.hidden_dropout else 0.0
        size = outside * (2.0 * norms + (passes + dropped + model.parallel_block) * residuals)
        gates = 3 if model.mlp is MLPKind.swiglu else 2
        size += self.tokens * gates * model.ffn_width / parallel.tp
        turned = (model.position is Position.rope) + model.qk_norm
        size += turned * 2 * self.tokens * (model.attention_width + model.kv_heads * model.head_dim) / parallel.tp
        return size * self.width

    @cached_property
    def elementwise(self) -> tuple[float, float]:
        """Seconds of a block's elementwise kernels, forward and backward."""
        forward = self._moved(self.elementwise_bytes, self.device.forward_costs)
        backward = BACKWARD_TRAFFIC * self._moved(self.elementwise_bytes, self.device.backward_costs)
        if self.device.forward_costs is None:
            kernels = 2 * self._norms_and_residuals + 1 + (self.model.position is Position.rope) + self.model.qk_norm
            least = kernels * self.device.kernel_us * 1e-6
            return max(forward, least), max(backward, BACKWARD_TRAFFIC * least)
        return forward, backward

    def _moved(self, size: float, costs: PassCosts | None) -> float:
        """Seconds of elementwise kernels that read and write so many bytes."""
        return self._traffic(size) if costs is None else size / (costs.gigabytes_per_s * 1e9)

    @property
    def launches(self) -> tuple[float, float]:
        """Seconds that the host takes to launch a block's passes, forward and backward."""
        device = self.device
        forward, backward = (
            None if costs is None else costs.block_us for costs in (device.forward_costs, device.backward_costs)
        )
        return (
            1e-6 * (device.forward_launch_us if forward is None else forward),
            1e-6 * (device.backward_launch_us if backward is None else backward),
        )

    def host(self, launches: float, busy: Iterable[float]) -> float:
        """Seconds that a block waits for its host, which launches for so long what takes `busy` seconds in all.

        On a CPU the host is the device; a GPU waits only where it is done before the host is.
        """
        if self.execution.cuda_graphs:
            return 0.0
        return launches if self.device.on_cpu else max(0.0, launches - sum(busy))

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
            alibi = model.position is Position.alibi
            if measured := (alibi and device.alibi_attention_rates) or device.attention_rates:
                rates = [between([(row[0], row[way]) for row in measured], seq) for way in (1, 2)]
            elif (alibi or self.execution.repeatable) and (measured := device.repeatable_attention_rates):
                rates = [between([(row[0], row[way]) for row in measured], model.head_dim) for way in (1, 2)]
            else:
                rates = [device.peak_tflops * device.attention_efficiency] * 2
            forward, backward = (4 * pairs * features / (rate * 1e12) for rate in rates)
            least = device.kernel_us * 1e-6
            return max(forward, least), _FLASH_BACKWARD * max(backward, least)
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
        return message / chunks + waits_beside(self.device, message, product) * (chunks - 1) / chunks

    def _hidden_bytes(self) -> float:
        return self.tokens * self.model.hidden_size * self.width

    def _open(self, products: tuple[float, float, float]) -> tuple[float, float, float]:
        """Seconds that a layer waits for messages where it opens a region; of the three passes."""
        device, size = self.device, self._hidden_bytes()
        forward_product, input_product, weight_product = products
        beside = self.execution.overlap_tp and not self._splits
        if not self._shared:
            summed = all_reduce(device, self._tp, size, self.width)
            return 0.0, waits_beside(device, summed, weight_product) if beside else summed, 0.0
        gather, scatter = (pass_on(device, self._tp, size, self.width) for pass_on in (all_gather, reduce_scatter))
        forward = self._exposed(gather, forward_product)
        if self._splits:
            return forward, scatter, gather
        if not beside:
            return forward, scatter + gather, 0.0
        hidden = waits_beside(device, gather, input_product) + waits_beside(device, scatter, weight_product)
        return forward, hidden, 0.0

    def _close(self, products: tuple[float, float, float]) -> tuple[float, float, float]:
        """Likewise where it closes one."""
        device, size = self.device, self._hidden_bytes()
        if not self._shared:
            return self._exposed(all_reduce(device, self._tp, size, self.width), products[0]), 0.0, 0.0
        forward = self._exposed(reduce_scatter(device, self._tp, size, self.width), products[0])
        return forward, self._exposed(all_gather(device, self._tp, size, self.width), products[1]), 0.0

    def block(self, mode: Recompute) -> LayerSeconds:
        """One transformer block that recomputes `mode`."""
        device = self.device
        products = [(opens, self._matmul(outputs, inputs)) for opens, outputs, inputs in self._products()]
        matmul = [sum(seconds[number] for _, seconds in products) for number in range(3)]
        tp = self._tp_waits([(opens, seconds) for opens, seconds in products])
        core_forward, core_backward = self.attention
        keys = 2 * self._hidden_bytes() * self.model.kv_heads * self.model.head_dim
        keys *= self.parallel.cp / self.parallel.tp / self.model.hidden_size
        gathered = all_gather(self.device, self._cp, keys, self.width)
        scattered = reduce_scatter(self.device, self._cp, keys * FP32 / self.width, FP32)
        moved, moved_back = self.elementwise
        beside = self._layout_costs()
        weight_sums = self._sum_gradient(sum(outputs * inputs for _, outputs, inputs in self._products()))
        launching, launching_back = self.launches
        launches = self.host(launching, (matmul[0], core_forward, moved))
        recompute = launching_again = 0.0
        if mode is Recompute.full:
            last, last_wait = products[-1][1][0], self._close(products[-1][1])[0]
            again = self.execution.whole_recompute or bool(self.model.hidden_dropout)
            recompute = matmul[0] + core_forward + moved + tp[0] + gathered + beside / 3
            recompute -= 0.0 if again else last + last_wait
            launching_again = launching
        elif mode is Recompute.selective:
            recompute = core_forward + gathered
        if recompute:
            launching_again += device.layout_seconds(f"recompute_{mode}", self.tokens * self.model.hidden_size)
        if device.on_cpu:
            recompute, launching_again = recompute + launching_again, 0.0
        busy_back = (matmul[1], matmul[2], core_backward, moved_back, recompute)
        launches_back = self.host(launching_back + launching_again, busy_back)
        return LayerSeconds(
            {
                "matmul": matmul[0],
                "attention": core_forward,
                "elementwise": moved,
                "host": launches + beside / 3,
                "tp": tp[0],
                "cp": gathered,
            },
            {
                "matmul": matmul[1],
                "attention": core_backward,
                "elementwise": moved_back,
                "host": launches_back + 2 * beside / 3,
                "recompute": recompute,
                "tp": tp[1],
                "cp": scattered,
            },
            {"matmul": matmul[2], "gradient sums": weight_sums, "tp": tp[2], "host": self._split_costs()},
        )

    def _split_costs(self) -> float:
        """Seconds that a block takes more where the gradients of its weights are put off, where that was measured."""
        splits = self.parallel.pp > 1 and self._splits
        return self.device.layout_seconds("split", self.tokens * self.model.hidden_size) if splits else 0.0

    def _layout_costs(self) -> float:
        """Seconds that a block takes more where tensor or context parallelism cuts it, where that was measured."""
        parallel, elements = self.parallel, self.tokens * self.model.hidden_size
        found = self.device.layout_seconds("cp", elements) if parallel.cp > 1 else 0.0
        if parallel.tp > 1:
            shared = "sp_chunks" if parallel.tp_chunks > 1 else "sp"
            found += self.device.layout_seconds(shared if self._shared else "tp", elements)
        return found

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
        loss, loss_back = (
            self._traffic(self.tokens * rows * _LOSS_BYTES) / 2
            if costs is None
            else self.tokens * rows * costs.logit_ns * 1e-9
            for costs in (self.device.forward_costs, self.device.backward_costs)
        )
        sums = self._sum_gradient(rows * self.model.hidden_size)
        return LayerSeconds(
            {"matmul": products[0], "elementwise": loss, "tp": tp[0]},
            {"matmul": products[1], "elementwise": loss_back, "tp": tp[1]},
            {"matmul": products[2], "gradient sums": sums, "tp": tp[2]},
        )

    def embedding(self) -> LayerSeconds:
        """The lookup, its sum over ranks, and its gradient's rows."""
        size = self._hidden_bytes()
        moved = self._traffic(3 * size)
        leave, enter = 0.0, 0.0
        if self.parallel.tp > 1:
            summed = reduce_scatter if self._shared else all_reduce
            leave = summed(self.device, self._tp, size, self.width)
            enter = all_gather(self.device, self._tp, size, self.width) if self._shared else 0.0
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
