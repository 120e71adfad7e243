"""Tuning tasks for the operators of a run: megads' kernel against PyTorch's, on the shapes of one rank.

Shape suffixes: b = batch, s = this rank's tokens of a sample, h = hidden size, f = MLP width of this rank, n = heads of
queries, m = heads of keys, d = head dim, c = tokens of a chunk, r = this rank's rows of the vocabulary, e = elements,
or experts with `n` rows, `i` input and `o` output features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megads.api import (
    FUSED,
    GRADIENT_STAGES,
    TIED_COPY,
    TIED_PARAMETER,
    TORCH,
    BucketLayout,
    Float8,
    Float8Recipe,
    Implementation,
    Kernels,
    Member,
    MLPKind,
    ModelConfig,
    NormKind,
    ParallelConfig,
    Position,
    add_weight_gradient,
    bucket_layouts,
    chunk_tokens,
    gelu,
    padded_rows,
    parameter_role,
    single_rank_grid,
    stage_bounds,
)
from megads.model.gpt import layer_specs
from megads.model.rotary import rotary_tables
from megads.ops import float8
from megads.ops.activation import swiglu
from megads.ops.adamw import AdamWStep, Pieces, adamw_reference, square_sums
from megads.ops.config import KernelOp
from megads.ops.dropout import DropoutMask, dropout, site_key, threshold_of
from megads.ops.grouped_linear import add_grouped_weight_gradient, grouped_linear
from megads.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megads.ops.rotary import rotate
from megads.ops.token_dispatch import RowCounts
from megads.optim.optimizers import FusedAdamW
from megads.parallel.experts import ExpertParallel
from megads.parallel.grid import Axis
from megads.parallel.loss import weighted_loss_
from megads.parallel.sharding import shard_layer
from megads.tools.autotune.benchmark import Step, error_ratio

OURS, TORCHS = "megads", "torch"
CANDIDATES = {OURS: FUSED, TORCHS: TORCH}
"""Candidate kernels by name."""

Function = Callable[..., Sequence[Tensor]]
"""Maps kernels and inputs, in any floating-point dtype, to outputs."""
Draw = Callable[..., Tensor]
"""Draws a normally distributed tensor of a given shape, in the run's dtype."""


@dataclass(frozen=True)
class OperatorWork:
    """What the shapes of a rank's operators, and the choice between implementations, depend on.

    Attributes:
        model: model architecture.
        parallel: the layout.
        seq_len: tokens per sample.
        micro_batch_size: samples per forward pass.
        dtype: dtype of weights and activations.
        loss_chunk: number of tokens whose logits are in memory at a time; None derives it from their size.
        deterministic: whether PyTorch uses deterministic algorithms.
        float8: which linear layers multiply in FP8.
    """

    model: ModelConfig
    parallel: ParallelConfig
    seq_len: int
    micro_batch_size: int
    dtype: torch.dtype
    loss_chunk: int | None = None
    deterministic: bool = True
    float8: Float8 = field(default_factory=Float8)


class OperatorTrial:
    """Tuning task of one operator on random inputs, see `benchmark.TuningTask`; candidates are kernel sets.

    Args:
        op: the operator.
        function: function that computes the operator.
        inputs: inputs of the function.
        arriving: gradients of its outputs; None if the operator has no backward pass, in which case it may overwrite
            its inputs.
    """

    remedy = "use ops.impl=torch"

    def __init__(
        self, op: KernelOp, function: Function, inputs: Sequence[Tensor], arriving: Sequence[Tensor] | None = None
    ) -> None:
        self.name = f"ops.impl = auto, {op},"
        self.device = inputs[0].device
        self._function, self._inputs, self._arriving = function, inputs, arriving

    def step(self, candidate: Kernels) -> Step:
        """See `TuningTask.step`."""
        return self._step(candidate, self._inputs)

    def error(self, candidate: Kernels) -> float:
        """See `TuningTask.error`."""
        return error_ratio(
            self._run(candidate, self._inputs),
            self._run(TORCH, self._inputs),
            self._run(TORCH, [x.double() for x in self._inputs]),
        )

    def _run(self, kernels: Kernels, inputs: Sequence[Tensor]) -> list[Tensor]:
        forward, backward = self._step(kernels, inputs)
        results = backward(forward())
        return [x.double() if x.dtype.itemsize == 1 else x for x in results]  # FP8 has no arithmetic

    def _step(self, kernels: Kernels, inputs: Sequence[Tensor]) -> Step:
        if self._arriving is None:
            copies = [x.clone() for x in inputs]
            return lambda: self._function(kernels, *copies), list
        leaves = [x.detach().requires_grad_() for x in inputs]
        arriving = [grad.to(inputs[0].dtype) for grad in self._arriving]

        def backward(outputs: Sequence[Tensor]) -> list[Tensor]:
            gradients = torch.autograd.grad(outputs, leaves, arriving)
            return [*(x.detach() for x in outputs), *gradients]

        return lambda: self._function(kernels, *leaves), backward


@dataclass(frozen=True)
class OperatorCase:
    """An operator of a run with its shape; nothing is allocated yet.

    Attributes:
        op: the operator.
        shape: shape text for display and the cache key; with the operator it determines the result.
        make: creates the tuning task, with random inputs on a device.
    """

    op: KernelOp
    shape: str
    make: Callable[[torch.device], OperatorTrial]


def operator_cases(work: OperatorWork, kernels: Kernels) -> list[OperatorCase]:
    """Returns the operators to measure: those that the run uses and whose implementation is `auto`.

    Args:
        work: operators of the first rank.
        kernels: the configured kernels.
    """
    cases = [*_model_cases(work), _cross_entropy(work)]
    if work.parallel.zero_stage not in GRADIENT_STAGES:  # with ZeRO-2 and 3 DeepSpeed's optimizer calls torch's AdamW
        cases += _optimizer_cases(work)
    auto = Implementation.auto
    return [case for case in cases if kernels.implementation(case.op) is auto]


def _model_cases(work: OperatorWork) -> Iterator[OperatorCase]:
    model, parallel = work.model, work.parallel
    batch, tokens = work.micro_batch_size, work.seq_len // parallel.cp
    outside = tokens // (parallel.tp if parallel.sequence_parallel else 1)
    hidden, ffn = (batch, outside, model.hidden_size), _largest_mlp(work)
    if model.norm_affine:
        yield _case(work, KernelOp.norm, _norm, hidden, model.norm.value)
        if not model.parallel_block:
            yield _case(work, KernelOp.add_norm, _add_norm, hidden, model.norm.value)
    if model.mlp is MLPKind.swiglu:
        yield _case(work, KernelOp.swiglu, _swiglu, (*ffn[:2], 2 * ffn[2]))
    elif model.mlp is MLPKind.gelu:
        yield _case(work, KernelOp.gelu, _gelu, ffn)
    if work.dtype.itemsize == 2 and parallel.zero_stage not in GRADIENT_STAGES:  # those have DeepSpeed's main_grad
        experts = 1 if _has_mlp(model) else model.moe.num_experts // parallel.ep
        shape = max(1, ffn[0] * ffn[1] // experts), model.hidden_size, (1 + model.mlp.gated) * ffn[2]
        yield _case(work, KernelOp.linear, _weight_gradient, shape)
    if model.moe.enabled and work.dtype is torch.bfloat16:
        yield _case(work, KernelOp.grouped_linear, _experts, _experts_shape(work))
    if work.float8.blocks(model.num_layers):
        yield _case(work, KernelOp.quantize, _quantize, (*ffn, model.hidden_size))
    if any(kind.position is Position.rope for kind, _ in model.layer_kinds()) and not model.rotary_interleaved:
        heads = (batch, tokens, model.num_heads // parallel.tp, model.local_kv_heads(parallel.tp), model.rotary_dim)
        yield _case(work, KernelOp.rotary, _rotary, heads)
    if model.hidden_dropout:
        yield _case(work, KernelOp.dropout, _dropout, hidden)


def _has_mlp(model: ModelConfig) -> bool:
    """Whether any layer has an MLP instead of experts."""
    return any(count and not kind.moe.enabled for kind, count in model.layer_kinds())


def _largest_mlp(work: OperatorWork) -> tuple[int, int, int]:
    """Shape of the MLP's activations on a rank, [batch, tokens, features]; that of experts if all layers have experts.

    Experts have one row for each choice of a token, with an even load; those of a rank are one batch.
    """
    model, parallel = work.model, work.parallel
    batch, tokens = work.micro_batch_size, work.seq_len // parallel.cp
    if _has_mlp(model):
        return batch, tokens, model.ffn_width // parallel.tp
    divided = 1 if parallel.expert_tp else parallel.tp
    rows = batch * tokens * model.moe.top_k // divided
    return 1, rows, model.expert_width * divided // parallel.tp


def _experts_shape(work: OperatorWork) -> tuple[int, int, int, int]:
    """Experts of a rank, their rows with an even load, hidden size, and output features of their first GEMM."""
    model, parallel = work.model, work.parallel
    divided = 1 if parallel.expert_tp else parallel.tp
    rows = work.micro_batch_size * work.seq_len // parallel.cp * model.moe.top_k // divided
    opened = (1 + model.mlp.gated) * model.expert_width * divided // parallel.tp
    return model.moe.num_experts // parallel.ep, rows, model.hidden_size, opened


def _cross_entropy(work: OperatorWork) -> OperatorCase:
    """Cross entropy on one rank; with tensor parallelism the kernels are the same, with collectives between them."""
    tokens = work.micro_batch_size * work.seq_len // work.parallel.cp
    rows = padded_rows(work.model.vocabulary, work.parallel.tp, work.parallel.rows_multiple(cuda=True))
    chunk = chunk_tokens(tokens, rows * work.dtype.itemsize, "cuda", work.loss_chunk)
    return _case(work, KernelOp.cross_entropy, _loss, (chunk, rows))


def _optimizer_cases(work: OperatorWork) -> Iterator[OperatorCase]:
    """Square sums of the first rank's largest bucket, and AdamW on the slice of it that one rank updates."""
    bucket = max(_buckets(work), key=lambda bucket: bucket.numel)
    size = len(bucket.slice_of(0, _sharing(work.parallel, expert=bucket.expert)))
    slots = [(slot.start, slot.stop) for slot in bucket.slots]
    sums = replace(work, dtype=torch.float32)
    digest = hashlib.sha256(str(slots).encode()).hexdigest()[:8]
    note = f"in {len(slots)} pieces ({digest})"
    yield _case(sums, KernelOp.square_sums, partial(_square_sums, slots=slots), (bucket.numel,), note)
    yield _case(work, KernelOp.adamw, _adamw, (size,))


def _sharing(parallel: ParallelConfig, *, expert: bool = False) -> int:
    """Number of ranks that a bucket, or one of experts, is sharded over."""
    ranks = parallel.expert_data_size if expert else parallel.data_size
    return ranks if parallel.zero_stage else 1


def _buckets(work: OperatorWork) -> list[BucketLayout]:
    """Bucket layouts of the first rank's optimizer, see `megads.engine.optimizer.BucketOptimizer`."""
    parallel, specs, members = work.parallel, layer_specs(work.model, 0), list[Member]()
    bounds, tied = stage_bounds([spec.cost for spec in specs], parallel), work.model.tie_embeddings
    axis = Axis(0, tuple(range(parallel.tp)), None)
    experts = ExpertParallel(Axis(0, tuple(range(parallel.ep)), None), not parallel.expert_tp, Axis(0, (0,), None))
    for number in parallel.placement.stages_of(0):
        for spec in specs[bounds[number] : bounds[number + 1]]:
            with torch.device("meta"):
                layer = spec.build()
            layer, places = shard_layer(
                layer,
                spec.name,
                spec.table,
                axis,
                sequence_parallel=parallel.sequence_parallel,
                vocab_multiple=parallel.rows_multiple(cuda=True),
                experts=experts,
            )
            for path, parameter in layer.named_parameters():
                place = places[path]
                if not parameter.requires_grad:  # a router's balance
                    continue
                of_pair = tied and place.key in (TIED_PARAMETER, TIED_COPY)
                key = TIED_PARAMETER if of_pair else place.key
                if not any(member.name == key for member in members):
                    role = parameter_role(key, of_pair)
                    members.append(Member(key, parameter.numel(), role, place.partial, expert=place.expert))
    shards = _sharing(parallel), _sharing(parallel, expert=True)
    return bucket_layouts(members, shards[0], parallel.bucket_elements, shards[1])


def _case(
    work: OperatorWork,
    op: KernelOp,
    make: Callable[[OperatorWork, Draw, tuple[int, ...]], tuple[Function, Sequence[Tensor], bool]],
    shape: tuple[int, ...],
    note: str = "",
) -> OperatorCase:
    def trial(device: torch.device) -> OperatorTrial:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(work.dtype)

        function, inputs, differentiates = make(work, draw, shape)
        if not differentiates:
            return OperatorTrial(op, function, inputs)
        with torch.no_grad():
            arriving = [draw(*out.shape) for out in function(TORCH, *inputs)]
        return OperatorTrial(op, function, inputs, arriving)

    dtype = str(work.dtype).removeprefix("torch.")
    text = " ".join(part for part in (" x ".join(map(str, shape)), dtype, note) if part)
    return OperatorCase(op, text, trial)


Made = tuple[Function, Sequence[Tensor], bool]
"""An operator, its inputs, and whether it has a backward pass."""


def _norm(work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    eps, width = work.model.norm_eps, shape[-1]
    if work.model.norm is NormKind.rmsnorm:
        return (lambda kernels, x, w: (rms_norm(x, w, eps, kernels),)), (draw(*shape), draw(width)), True
    if not work.model.bias:
        return (lambda kernels, x, w: (layer_norm(x, w, None, eps, kernels),)), (draw(*shape), draw(width)), True
    inputs = draw(*shape), draw(width), draw(width)
    return (lambda kernels, x, w, b: (layer_norm(x, w, b, eps, kernels),)), inputs, True


def _add_norm(work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    eps, width = work.model.norm_eps, shape[-1]
    inputs = draw(*shape), draw(*shape), draw(width)
    if work.model.norm is NormKind.rmsnorm:
        return (lambda kernels, x, y, w: add_rms_norm(x, y, w, eps, kernels)), inputs, True
    if not work.model.bias:
        return (lambda kernels, x, y, w: add_layer_norm(x, y, w, None, eps, kernels)), inputs, True
    return (lambda kernels, x, y, w, b: add_layer_norm(x, y, w, b, eps, kernels)), (*inputs, draw(width)), True


def _gelu(_work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    return (lambda kernels, x: (gelu(x, kernels),)), (draw(*shape),), True


def _swiglu(_work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    return (lambda kernels, x: (swiglu(x, kernels),)), (draw(*shape),), True


def _weight_gradient(_work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    """The weight gradient of the MLP's first layer, added to main_grad."""
    tokens, hidden, width = shape

    def accumulate(kernels: Kernels, grad_mo: Tensor, x_mi: Tensor, main_grad_oi: Tensor) -> tuple[Tensor]:
        add_weight_gradient(main_grad_oi, grad_mo, x_mi, first=False, kernels=kernels)
        return (main_grad_oi,)

    return accumulate, (draw(tokens, width), draw(tokens, hidden), draw(width, hidden).float()), False


def _experts(_work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    """The GEMMs of the first projection of a rank's experts: output, gradient of the input, and the weight gradients
    added to main_grad. The first expert has no rows, the last twice as many as the others."""
    experts, rows, hidden, opened = shape
    x_ni, grad_no, weights_eoi = draw(rows, hidden), draw(rows, opened), draw(experts, opened, hidden)
    each = torch.full((experts,), rows // experts, device=x_ni.device)
    each[0], each[-1] = 0, rows - rows // experts * max(0, experts - 2)

    def products(
        kernels: Kernels, x_ni: Tensor, grad_no: Tensor, weights_eoi: Tensor, main_grad_eoi: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts = RowCounts(each)  # with the host's read of a layer, if it needs one
        out_no = grouped_linear(x_ni, weights_eoi, counts, kernels)
        grad_x_ni = grouped_linear(grad_no, weights_eoi.mT, counts, kernels)
        add_grouped_weight_gradient(main_grad_eoi, grad_no, x_ni, counts, False, kernels)
        return out_no, grad_x_ni, main_grad_eoi

    return products, (x_ni, grad_no, weights_eoi, torch.zeros_like(weights_eoi, dtype=torch.float32)), False


def _quantize(work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    """What the last layer of the MLP quantizes: its input, the gradient of its output, and its weight."""
    *_, features, hidden = shape
    rowwise, divided = work.float8.recipe is Float8Recipe.rowwise, work.parallel.tp > 1

    def quantized(kernels: Kernels, x_bsf: Tensor, grad_bsh: Tensor, weight_hf: Tensor) -> list[Tensor]:
        found = []
        of_input, of_gradient = (x_bsf, float8.E4M3, rowwise and not divided), (grad_bsh, float8.E5M2, rowwise)
        for values, dtype, by_rows in (of_input, of_gradient):
            if by_rows:
                found.append(float8.quantize_rows(values, dtype, kernels))
                continue
            bits = float8.magnitude_bits(values, (2,) if rowwise else (1, 2), kernels)
            found.append(float8.quantize(values, bits, dtype, kernels))
        of_weight = [
            float8.magnitude_bits(weight_hf, dims, kernels) for dims in (((1,), (0,)) if rowwise else ((0, 1),))
        ]
        found += float8.quantize_weight(weight_hf, of_weight, kernels)
        return [part for each in found for part in each]

    inputs = draw(*shape[:3]), draw(*shape[:2], hidden), draw(hidden, features)
    return quantized, inputs, False


def _rotary(work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    """Rotary embedding with the model's memory layout: views of one projection, unless several groups share keys."""
    batch, tokens, heads, kv_heads, head_dim = shape
    group = heads // kv_heads
    qkv = draw(batch, tokens, kv_heads, group + 2, head_dim)
    q_bsnd, k_bsmd, _ = (x.flatten(2, 3) for x in qkv.split((group, 1, 1), dim=3))
    places_s = torch.arange(tokens, device=qkv.device)
    # The time does not depend on the angles.
    cos, sin = rotary_tables(places_s, head_dim, work.model.rope_theta, torch.float32)

    def turned(kernels: Kernels, q_bsnd: Tensor, k_bsmd: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q_bsnd.dtype, torch.float32)
        tables = cos.to(wide), sin.to(wide)
        return rotate(q_bsnd, *tables, kernels), rotate(k_bsmd, *tables, kernels)

    return turned, (q_bsnd, k_bsmd), True


def _dropout(work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    x, residual = draw(*shape), draw(*shape)
    samples_b, places_s = (torch.arange(size, device=x.device) for size in shape[:2])
    whole = work.parallel.cp == 1 and not (work.parallel.sequence_parallel and work.parallel.tp > 1)
    given = None if whole else places_s  # positions are only needed if the rank has a part of a sample
    mask = DropoutMask(site_key(0, "trial"), threshold_of(work.model.hidden_dropout), samples_b)
    return (lambda kernels, x, residual: (dropout(x, mask, given, residual, kernels),)), (x, residual), True


def _loss(work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    """Loss of a chunk, and the gradient of its logits, which overwrites them."""
    tokens, rows = shape
    valid = min(rows, work.model.vocabulary)
    logits_cr = draw(tokens, rows)
    generator = torch.Generator(logits_cr.device).manual_seed(1)
    labels_c = torch.randint(valid, (tokens,), generator=generator, device=logits_cr.device)
    weights_c = torch.full((tokens,), 1.0 / tokens, dtype=torch.float64, device=logits_cr.device)
    axis = single_rank_grid().tp

    def loss(kernels: Kernels, logits_cr: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_loss_(logits_cr, labels_c, weights_c, valid, axis, trains=True, kernels=kernels), logits_cr

    return loss, (logits_cr,), False


def _square_sums(_work: OperatorWork, draw: Draw, shape: tuple[int, ...], *, slots: Sequence[tuple[int, int]]) -> Made:
    flat_e = draw(*shape)
    pieces = Pieces(slots, flat_e.device)
    return (lambda kernels, flat_e: (square_sums(flat_e, pieces, kernels),)), (flat_e,), False


def _adamw(work: OperatorWork, draw: Draw, shape: tuple[int, ...]) -> Made:
    """AdamW at step 100, with clipping."""
    master_e, exp_avg_e, exp_avg_sq_e, grad_e = (scale * draw(*shape).float() for scale in (0.02, 1e-3, 1e-3, 1e-2))
    clip = torch.full((), 0.7, device=master_e.device)
    lr, betas, eps, decay, steps = 3e-4, (0.9, 0.95), 1e-8, 0.1, 99

    def update(kernels: Kernels, *state: Tensor) -> Sequence[Tensor]:
        master_e, exp_avg_e, exp_avg_sq_e, grad_e = state
        if master_e.dtype == torch.float64:
            weights_e = torch.empty_like(master_e)
            how = AdamWStep(lr, decay, betas, eps, steps + 1)
            adamw_reference(master_e, exp_avg_e, exp_avg_sq_e, weights_e, grad_e, clip, how)
            return master_e, exp_avg_e, exp_avg_sq_e, weights_e
        weights_e = torch.empty_like(master_e, dtype=work.dtype)
        groups = [{"params": [master_e], "weights": [weights_e], "weight_decay": decay}]
        optimizer = FusedAdamW(groups, lr, betas, eps, kernels)
        optimizer.set_steps(steps)
        optimizer.state[master_e] |= {"exp_avg": exp_avg_e, "exp_avg_sq": exp_avg_sq_e}
        master_e.grad = grad_e
        optimizer.step(clip)
        return master_e, exp_avg_e, exp_avg_sq_e, weights_e

    return update, (master_e, exp_avg_e, exp_avg_sq_e.square(), grad_e), False
