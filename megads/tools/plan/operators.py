"""Roofline time of a layer's operators on one rank: the larger of compute and memory time (Williams et al. 2009).

A GEMM runs in waves of tiles over the device's processors (NVIDIA, "Matrix Multiplication Background User's Guide":
tile and wave quantization); a partial wave takes as long as a full one. The time of an elementwise kernel is its memory
traffic over the bandwidth. Attention is one flash kernel, which skips causally masked scores, or GEMMs with
materialized scores. Collectives of tensor and context parallelism count as far as megads' layers expose them
(megads.parallel.region_linear, megads.parallel.context).

T: tokens of the rank's pass; h: hidden_size; w: bytes per element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import comb

from megads.api import (
    AttentionKind,
    ModelConfig,
    NormPlacement,
    ParallelConfig,
    Position,
    Recompute,
    padded_rows,
)
from megads.parallel.schedule import SPLIT_SCHEDULES
from megads.tools.plan.collectives import (
    FLAT,
    CommunicationGroup,
    Network,
    all_gather,
    all_reduce,
    all_to_all,
    communication_group,
    context_groups,
    context_messages,
    context_seconds,
    expert_groups,
    overlapped_seconds,
    reduce_scatter,
)
from megads.tools.plan.devices import Device, between
from megads.tools.plan.execution import LAUNCH_US, MEGADS, Execution
from megads.tools.plan.float8_time import Float8Time
from megads.tools.plan.gemm_time import Gemm, Passes, add_passes, matmul_seconds
from megads.tools.plan.workload import Workload

FP32 = 4
Parts = Mapping[str, float]
"""Seconds by component: matmul, attention, elementwise, host, recompute, main_grad, tp, cp, ep."""
BACKWARD_TRAFFIC = 1.5
"""Backward traffic of elementwise kernels relative to forward: they read a gradient and the input."""
_FLASH_BACKWARD = 2.5
"""Matmuls of a flash kernel in backward relative to forward: five instead of two (Dao 2023)."""
_RING_BYTES = 8 * FP32, 14 * FP32
"""Traffic per score of ring attention's operators, forward and backward: an estimate, not measured."""
_LOSS_BYTES = 16
"""Traffic per logit, forward and backward: three reads and a write in bf16; fp32 in between."""

_ROUTER_KERNELS, _ROW_KERNELS, _READ_US = 30, 8, 30.0
"""Kernels of a router, and of sorting and adding rows; and the time in which a GPU is idle after the host has read the
numbers of rows. Estimates: experts have not been measured on a GPU."""
_SCORE_BYTES = 64
"""Memory traffic per score of a router: fp32 logits, scores, their sort keys and balance losses."""


@dataclass(frozen=True)
class LayerSeconds:
    """Time of one layer for one micro-batch on a rank, in seconds by component.

    Attributes:
        forward: time of the forward pass.
        backward_input: time of recomputation and of the backward pass without weight gradients.
        backward_weight: time of weight gradients and their accumulation.
    """

    forward: Parts
    backward_input: Parts
    backward_weight: Parts

    @property
    def total(self) -> float:
        return total(self.forward) + total(self.backward_input) + total(self.backward_weight)


@dataclass(frozen=True)
class ExpertSeconds:
    """Time of a layer's router and chosen experts for one micro-batch on a rank, in seconds.

    Attributes:
        gemms: GEMMs of experts and router.
        moved: memory traffic of routing, dispatch, activation and combination, forward and backward.
        exchange: exposed all-to-alls of a forward, and of a backward pass.
        tp: collectives at the borders of the tensor-parallel region, likewise.
        launches: host time of kernel launches, likewise.
        read: time in which the device waits after the host has read the numbers of rows.
        parameters: number of matrix elements on the rank.
    """

    gemms: Passes
    moved: tuple[float, float]
    exchange: float
    tp: float
    launches: tuple[float, float]
    read: float
    parameters: float


@dataclass(frozen=True)
class RankOperators:
    """Operator times on one rank; all ranks of the layout have the same.

    Attributes:
        model: model config.
        parallel: the layout.
        workload: the training step.
        device: device of the rank.
        network: network between nodes.
        execution: execution strategy of the trainer.
        fp8: whether the block's linear layers multiply in FP8.
        chunked_mlp: whether MLPs are computed in chunks.
    """

    model: ModelConfig
    parallel: ParallelConfig
    workload: Workload
    device: Device
    network: Network = FLAT
    execution: Execution = MEGADS
    fp8: bool = False
    chunked_mlp: bool = False

    @property
    def tokens(self) -> int:
        """T: tokens of a micro-batch on this rank."""
        return self.workload.micro_batch_size * self.workload.seq_len // self.parallel.cp

    @property
    def width(self) -> int:
        """w: bytes per element of weights and activations."""
        return self.workload.weight_bytes

    @cached_property
    def _tp(self) -> CommunicationGroup:
        return communication_group(self.parallel, ("tp",), self.device.ranks_per_node, self.network)

    @cached_property
    def _cp(self) -> CommunicationGroup:
        return communication_group(self.parallel, ("cp",), self.device.ranks_per_node, self.network)

    @cached_property
    def _ep(self) -> CommunicationGroup:
        return expert_groups(self.parallel, self.device.ranks_per_node, self.network)[0]

    @property
    def _sequence_parallel(self) -> bool:
        """Whether a rank holds only a part of the tokens outside of tensor-parallel regions."""
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    @property
    def _splits_backward(self) -> bool:
        """Whether the schedule splits backward passes and defers weight gradients."""
        return self.parallel.schedule in SPLIT_SCHEDULES

    def _matmul(self, outputs: float, inputs: float) -> Passes:
        """Seconds of a linear layer's GEMMs."""
        device, width, rate = self.device, self.width, self.execution.gemm_rate
        # With measured GEMMs each of the tp_chunks is a separate call; the built-in GPU tables have no call overhead.
        parts = self.parallel.tp_chunks if self.parallel.tp > 1 and device.products else 1
        forward = parts * matmul_seconds(device, self.tokens / parts, outputs, inputs, width=width)
        dgrad = matmul_seconds(device, self.tokens, inputs, outputs, width=width, kind=Gemm.dgrad)
        wgrad = matmul_seconds(device, outputs, inputs, self.tokens, width=width, kind=Gemm.wgrad)
        return forward / rate, dgrad / rate, wgrad / rate

    @cached_property
    def _float8(self) -> Float8Time:
        of_run = self.model, self.parallel, self.workload, self.device, self.execution
        return Float8Time(*of_run, self.tokens, self._tp, self._cp)

    def _fp8_matmul(self, layer: str, outputs: float, inputs: float) -> Passes:
        """Seconds of a linear layer's GEMMs in FP8, and of the quantization of its input and its output's gradient.

        The weight gradient is not in FP8.
        """
        forward, dgrad, wgrad = self._matmul(outputs, inputs)
        quantize, quantize_gradient = map(self._traffic, self._float8.traffic(layer, outputs, inputs))
        rate = self.device.fp8_rate
        return forward / rate + quantize, dgrad / rate + quantize_gradient, wgrad

    def _traffic(self, size: float) -> float:
        return size / self.device.memory_bytes_per_s

    def _accumulate_seconds(self, parameters: float) -> float:
        """Seconds to accumulate a weight gradient into main_grad: read the gradient, read and write main_grad."""
        if self.execution.fused_wgrad_accumulation or self.device.weight_products:
            return 0.0
        return self._traffic(parameters * (self.width + 2 * FP32))

    @cached_property
    def mlp_forward(self) -> float:
        """Seconds of the forward pass of an MLP or a shared expert, which chunks repeat in the backward pass."""
        model, width, opened = self.model, self._dense_width / self.parallel.tp, 1 + self.model.mlp.gated
        up, down = self._matmul(opened * width, model.hidden_size), self._matmul(model.hidden_size, width)
        waits = self._column_parallel_waits(up)[0] + self._row_parallel_waits(down)[0] if self.parallel.tp > 1 else 0.0
        return up[0] + down[0] + waits + self._traffic(self.tokens * (opened + 1) * width * self.width)

    @property
    def _norms_and_residuals(self) -> tuple[int, int]:
        """Number of norms, and of residual additions, in a block."""
        if self.model.parallel_block:
            return self.model.parallel_norms, 1
        return (4 if self.model.norm_placement is NormPlacement.both else 2), 2

    @cached_property
    def elementwise_bytes(self) -> float:
        """Memory traffic of a block's forward norms, residuals, dropouts, activation function and rotary embedding."""
        model, parallel = self.model, self.parallel
        outside = self.tokens * model.hidden_size / (parallel.tp if self._sequence_parallel else 1)
        norms, residuals = self._norms_and_residuals
        passes = 3.0 if self.execution.fused or not model.hidden_dropout else 5.0
        dropped = 0.5 if model.hidden_dropout else 0.0
        size = outside * (2.0 * norms + (passes + dropped + model.parallel_block) * residuals)
        gates = 3 if model.mlp.gated else 2
        size += self.tokens * gates * self._dense_width / parallel.tp
        per_head = (model.position is Position.rope) + model.qk_norm
        keys = model.local_kv_heads(parallel.tp) * model.head_dim
        size += per_head * 2 * self.tokens * (model.attention_width / parallel.tp + keys)
        return size * self.width

    @property
    def _dense_width(self) -> int:
        """Width of the MLP, or of the shared expert, which processes all tokens."""
        return self.model.moe.shared_ffn_size if self.model.moe.enabled else self.model.ffn_width

    @cached_property
    def experts(self) -> ExpertSeconds:
        """Time of a layer's router and chosen experts, with the even load."""
        model, parallel, device, width = self.model, self.parallel, self.device, self.width
        moe, hidden, fused = model.moe, model.hidden_size, self.execution.grouped_experts
        routed = self.tokens / (1 if parallel.expert_tp else parallel.tp)
        local, rows = moe.num_experts // parallel.ep, routed * moe.top_k * (moe.capacity_factor or 1.0)
        outside = self.tokens / (parallel.tp if self._sequence_parallel else 1)
        features = model.expert_width / (parallel.tp if parallel.expert_tp else 1)
        # GEMMs of experts with rows / local rows each, and the router's in fp32.
        loops, count = (1, local) if fused else (local, 1)
        each, opened, rate = rows / local, (1 + model.mlp.gated) * features, self.execution.gemm_rate
        gemms = [
            (
                loops * matmul_seconds(device, each, outputs, inputs, count, width) / rate,
                loops * matmul_seconds(device, each, inputs, outputs, count, width, Gemm.dgrad) / rate,
                loops * matmul_seconds(device, outputs, inputs, each, count, width, Gemm.wgrad) / rate,
            )
            for outputs, inputs in ((opened, hidden), (hidden, features))
        ]
        scoring = 2 * outside * hidden * moe.num_experts / ((device.fp32_tflops or device.peak_tflops) * 1e12)
        routing = outside * (hidden * (width + 2 * FP32) + moe.num_experts * _SCORE_BYTES)
        # Dispatch and combination. One kernel reads and writes each row once; PyTorch's operators copy the rows of each
        # choice, widen them to fp32 and add them to the sum.
        exchanged = 4 * rows * hidden * width if parallel.ep > 1 else 0.0
        if fused:
            sorting, sorting_back = (2 * rows + 2 * routed) * hidden * width, (2 * rows + 2 * routed) * hidden * width
        else:
            sorting = rows * hidden * (2 * width + 3 * width + 4 * FP32)
            sorting_back = rows * hidden * (3 * width + 2 * FP32 + 5 * width + 6 * FP32)
        acting = rows * ((1 + model.mlp.gated) + 1) * features * width
        # One all-to-all to the experts and one back, in each pass.
        copies = None
        if self.execution.one_row_a_node and self._ep.nodes > 1:
            elsewhere = moe.num_experts - moe.num_experts // self._ep.nodes
            missed = comb(elsewhere, moe.top_k) / comb(moe.num_experts, moe.top_k)
            copies = (self._ep.nodes - 1) * (1 - missed) * routed * hidden * width
        exchange = 2 * all_to_all(device, self._ep, rows * hidden * width, width, copies)
        compute = sum(forward for forward, _, _ in gemms)
        exchange = overlapped_seconds(device, exchange, compute) if self.execution.overlap_experts else exchange
        border = 0.0
        if parallel.tp > 1 and parallel.expert_tp:
            size = self._hidden_bytes()
            border = all_reduce(device, self._tp, size, width)
            if self._sequence_parallel:
                border = sum(pass_on(device, self._tp, size, width) for pass_on in (all_gather, reduce_scatter))
        kernels = (_ROUTER_KERNELS + _ROW_KERNELS) / (4 if fused else 1) + (0 if fused else 2 * moe.top_k)
        launch = 0.0 if device.on_cpu else LAUNCH_US * 1e-6
        return ExpertSeconds(
            add_passes([*gemms, (scoring, scoring, scoring)]),
            (
                self._traffic(routing + sorting + exchanged + acting),
                self._traffic(2 * routing + sorting_back + exchanged + BACKWARD_TRAFFIC * acting),
            ),
            exchange,
            border,
            (launch * (kernels + 2 * loops), launch * (kernels + 4 * loops)),
            0.0 if device.on_cpu else _READ_US * 1e-6,
            local * (opened + features) * hidden + moe.num_experts * hidden,
        )

    @cached_property
    def elementwise(self) -> tuple[float, float]:
        """Seconds of a block's elementwise kernels, forward and backward."""
        forward, backward = (
            self._traffic(self.elementwise_bytes)
            if costs is None
            else self.elementwise_bytes / (costs.gigabytes_per_s * 1e9)
            for costs in (self.device.forward_costs, self.device.backward_costs)
        )
        least = 0.0
        if self.device.forward_costs is None:
            kernels = sum(self._norms_and_residuals) + 1 + (self.model.position is Position.rope) + self.model.qk_norm
            least = kernels * self.device.kernel_us * 1e-6
        return max(forward, least), max(BACKWARD_TRAFFIC * backward, BACKWARD_TRAFFIC * least)

    @property
    def launches(self) -> tuple[float, float]:
        """Host seconds to launch the kernels of a block's forward and backward pass."""
        device = self.device
        forward = device.forward_costs.block_us if device.forward_costs else device.forward_launch_us
        backward = device.backward_costs.block_us if device.backward_costs else device.backward_launch_us
        return 1e-6 * forward, 1e-6 * backward

    def host(self, launches: float, busy: Iterable[float]) -> float:
        """Seconds that a block waits for the host, given seconds of kernel launches and of the kernels (`busy`).

        On a CPU the host is the device. A GPU waits only if its kernels finish before the host has launched the next.
        """
        if self.execution.cuda_graphs:
            return 0.0
        return launches if self.device.on_cpu else max(0.0, launches - sum(busy))

    @property
    def scores_in_memory(self) -> bool:
        """Whether attention materializes its scores: if asked, for dropout with a bias (no flash kernel) or a ring."""
        model, asked = self.model, self.execution.scores_in_memory
        if asked is not None:
            return asked
        biased = model.position is Position.alibi or model.window is not None or self.parallel.core_cp > 1
        if self.parallel.is_ring:
            return not self.workload.flash_in_ring(model, cuda=not self.device.on_cpu)
        return model.attention is AttentionKind.fused_softmax or bool(model.attention_dropout and biased)

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Seconds of the attention core, forward and backward."""
        model, device, seq = self.model, self.device, self.workload.seq_len
        features = model.attention_width / self.parallel.tp
        seen = min(model.window or seq, seq)
        pairs = self.tokens * (seen - seen * seen / (2 * seq))
        if not self.scores_in_memory:
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
        if self.parallel.is_ring:
            share, (read, read_back) = pairs / (self.tokens * seq), _RING_BYTES
            forward = inner + outer + self._traffic(scores * (read + dropped))
            return share * forward, share * (2.5 * (inner + outer) + self._traffic(scores * (read_back + dropped)))
        forward = inner + outer + self._traffic(scores * (2 * self.width + dropped))
        backward = 2 * (inner + outer) + self._traffic(scores * (3 * self.width + dropped))
        return forward, backward

    def _chunked_seconds(self, communication: float, gemm: float) -> float:
        """Exposed seconds of a collective that feeds or follows a GEMM, both split into tp_chunks chunks."""
        chunks = self.parallel.tp_chunks
        return communication / chunks + overlapped_seconds(self.device, communication, gemm) * (chunks - 1) / chunks

    def _hidden_bytes(self) -> float:
        return self.tokens * self.model.hidden_size * self.width

    def _column_parallel_waits(self, gemms: Passes, sums: int = 1) -> Passes:
        """Exposed communication of column-parallel layers of the same input, in seconds; `sums`: input gradients that
        they reduce."""
        device, size = self.device, self._hidden_bytes()
        forward_gemm, input_gemm, weight_gemm = gemms
        overlaps = self.execution.overlap_tp and not self._splits_backward
        if not self._sequence_parallel:
            reduced = sums * all_reduce(device, self._tp, size, self.width)
            return 0.0, overlapped_seconds(device, reduced, weight_gemm) if overlaps else reduced, 0.0
        gather, scatter = (pass_on(device, self._tp, size, self.width) for pass_on in (all_gather, reduce_scatter))
        scatter *= sums
        forward = self._chunked_seconds(self._float8.gather if self.fp8 else gather, forward_gemm)
        if self._splits_backward:
            return forward, scatter, gather
        if not overlaps:
            return forward, scatter + gather, 0.0
        hidden = overlapped_seconds(device, gather, input_gemm) + overlapped_seconds(device, scatter, weight_gemm)
        return forward, hidden, 0.0

    def _row_parallel_waits(self, gemms: Passes, sums: int = 1) -> Passes:
        """Exposed communication of row-parallel layers whose outputs are added, in seconds; `sums`: outputs that they
        reduce."""
        device, size = self.device, self._hidden_bytes()
        if not self._sequence_parallel:
            return self._chunked_seconds(sums * all_reduce(device, self._tp, size, self.width), gemms[0]), 0.0, 0.0
        forward = self._chunked_seconds(sums * reduce_scatter(device, self._tp, size, self.width), gemms[0])
        return forward, self._chunked_seconds(all_gather(device, self._tp, size, self.width), gemms[1]), 0.0

    def _tp_waits(self, gemms: Mapping[str, Passes]) -> Passes:
        """Exposed tensor-parallel communication of a block, in seconds, given the GEMMs of its linear layers; that of
        chosen experts excluded."""
        if self.parallel.tp == 1:
            return 0.0, 0.0, 0.0
        column, row = self._column_parallel_waits, self._row_parallel_waits
        if self.model.parallel_block:
            # Attention and MLP share the collectives at the start and end of their tensor-parallel region, but in FP8
            # reduce what each computes. With a norm each, they enter it separately.
            entering, sums = [gemms["qkv"], gemms["up"]], 1 + self.fp8
            one = self.model.parallel_norms == 1
            waits = [column(add_passes(entering), sums)] if one else [column(gemm) for gemm in entering]
            waits.append(row(add_passes([gemms["dense"], gemms["down"]]), sums))
        else:
            waits = [column(gemms["qkv"]), row(gemms["dense"])]
            waits += [column(gemms["up"]), row(gemms["down"])] if "up" in gemms else []
        if self.model.kv_heads < self.parallel.tp:  # keys and values of ranks that share KV heads
            elements = 2 * self.tokens * self.model.kv_heads * self.model.head_dim
            gathered = all_gather(self.device, self._tp, elements * self.width, self.width)
            waits.append((gathered, reduce_scatter(self.device, self._tp, elements * FP32, FP32), 0.0))
        return add_passes(waits)

    def block(self, mode: Recompute) -> LayerSeconds:
        """Time of one transformer block with recomputation mode `mode`."""
        device, model, parallel, tokens = self.device, self.model, self.parallel, self.tokens
        shapes = {
            "qkv": (model.qkv_width / parallel.tp, model.hidden_size),
            "dense": (model.hidden_size, model.attention_width / parallel.tp),
        }
        if self._dense_width:
            shapes["up"] = ((1 + model.mlp.gated) * self._dense_width / parallel.tp, model.hidden_size)
            shapes["down"] = (model.hidden_size, self._dense_width / parallel.tp)
        gemms = {
            name: self._fp8_matmul(name, *shape) if self.fp8 else self._matmul(*shape) for name, shape in shapes.items()
        }
        matmul = add_passes(gemms.values())
        tp = self._tp_waits(gemms)
        if self.fp8:
            tp = add_passes([tp, (*self._float8.agreements, 0.0)])
        core_forward, core_backward = self.attention
        messages = context_messages(model, parallel, tokens, self.width, self.workload.micro_batch_size)
        groups = context_groups(parallel, device.ranks_per_node, self.network)
        gathered, scattered = context_seconds(device, groups, messages, self.width, self.attention)
        moved, moved_back = self.elementwise
        launching, launching_back = self.launches
        if self.fp8 and not device.on_cpu:
            quantizing, quantizing_back = self._float8.launches(shapes)
            launching, launching_back = launching + quantizing, launching_back + quantizing_back
        experts = self.experts if model.moe.enabled else None
        if experts is not None:
            matmul = add_passes([matmul, experts.gemms])
            tp = add_passes([tp, (experts.tp, experts.tp, 0.0)])
            moved, moved_back = moved + experts.moved[0], moved_back + experts.moved[1]
            launching, launching_back = launching + experts.launches[0], launching_back + experts.launches[1]
        exchange, read = (experts.exchange, experts.read) if experts is not None else (0.0, 0.0)
        # Measured overhead of tensor and context parallelism, and of deferred weight gradients.
        hidden = tokens * model.hidden_size
        overhead = device.layout_seconds("cp", hidden) if parallel.cp > 1 else 0.0
        if parallel.tp > 1:
            chunked = "sp_chunks" if parallel.tp_chunks > 1 else "sp"
            overhead += device.layout_seconds(chunked if self._sequence_parallel else "tp", hidden)
        splits = parallel.pp > 1 and self._splits_backward
        deferred = device.layout_seconds("split", hidden) if splits else 0.0
        recompute = launching_again = 0.0
        if mode is Recompute.full:
            recompute = matmul[0] + core_forward + moved + tp[0] + gathered + overhead / 3 + exchange + read
            if not self.execution.whole_recompute and not model.hidden_dropout and experts is None:
                recompute -= gemms["down"][0] + self._row_parallel_waits(gemms["down"])[0]
            launching_again = launching
        elif mode is Recompute.selective:
            recompute = core_forward + gathered
        if recompute:
            launching_again += device.layout_seconds(f"recompute_{mode}", hidden)
        recompute += self.mlp_forward if self.chunked_mlp else 0.0
        if device.on_cpu:
            recompute, launching_again = recompute + launching_again, 0.0
        busy_back = (matmul[1], matmul[2], core_backward, moved_back, recompute)
        return LayerSeconds(
            {
                "matmul": matmul[0],
                "attention": core_forward,
                "elementwise": moved,
                "host": self.host(launching, (matmul[0], core_forward, moved)) + overhead / 3 + read,
                "tp": tp[0],
                "cp": gathered,
                "ep": exchange,
            },
            {
                "matmul": matmul[1],
                "attention": core_backward,
                "elementwise": moved_back,
                "host": self.host(launching_back + launching_again, busy_back) + 2 * overhead / 3,
                "recompute": recompute,
                "tp": tp[1],
                "cp": scattered,
                "ep": exchange,
            },
            {
                "matmul": matmul[2],
                "main_grad": self._accumulate_seconds(
                    sum(outputs * inputs for outputs, inputs in shapes.values())
                    + (experts.parameters if experts is not None else 0.0)
                ),
                "tp": tp[2],
                "host": deferred,
            },
        )

    def head(self) -> LayerSeconds:
        """Time of the output projection and the loss."""
        multiple = self.parallel.rows_multiple(cuda=not self.device.on_cpu)
        rows = padded_rows(self.model.vocabulary, self.parallel.tp, multiple)
        gemms = self._matmul(rows, self.model.hidden_size)
        tp = self._column_parallel_waits(gemms) if self.parallel.tp > 1 else (0.0, 0.0, 0.0)
        loss, loss_back = (
            self._traffic(self.tokens * rows * _LOSS_BYTES) / 2
            if costs is None
            else self.tokens * rows * costs.logit_ns * 1e-9
            for costs in (self.device.forward_costs, self.device.backward_costs)
        )
        accumulation = self._accumulate_seconds(rows * self.model.hidden_size)
        return LayerSeconds(
            {"matmul": gemms[0], "elementwise": loss, "tp": tp[0]},
            {"matmul": gemms[1], "elementwise": loss_back, "tp": tp[1]},
            {"matmul": gemms[2], "main_grad": accumulation, "tp": tp[2]},
        )

    def embedding(self) -> LayerSeconds:
        """Time of the lookup, its all-reduce or reduce-scatter, and its weight gradient."""
        size = self._hidden_bytes()
        moved = self._traffic(3 * size)
        leave, enter = 0.0, 0.0
        if self.parallel.tp > 1:
            reduce = reduce_scatter if self._sequence_parallel else all_reduce
            leave = reduce(self.device, self._tp, size, self.width)
            enter = all_gather(self.device, self._tp, size, self.width) if self._sequence_parallel else 0.0
        return LayerSeconds(
            {"elementwise": moved, "tp": leave}, {"tp": enter}, {"main_grad": self._traffic(size * 2 * FP32)}
        )


def total(parts: Parts) -> float:
    """Sum of the seconds of all components."""
    return sum(parts.values())


def add_up(layers: Iterable[tuple[Parts, int]]) -> dict[str, float]:
    """Sums components over layers; each layer is given with its count."""
    found: dict[str, float] = {}
    for parts, count in layers:
        for name, seconds in parts.items():
            found[name] = found.get(name, 0.0) + seconds * count
    return found
