#!/usr/bin/env python3
"""Benchmarks 2 to 5: each operator by megads, torch eager, torch.compile, and the hardware limit.

    python -m scripts.bench.ops [--rounds 15] [--threads 2] [--only attention] [--append bench.jsonl]

The sides alternate in one process with the allocator settings of a rank. `limit` is the time to read and write the
operator's necessary bytes at the copy bandwidth measured in the same round, or of its GEMMs at the measured GEMM peak.
Targets are judged by the fastest round or, with --by processor_ms --threads 1, by CPU time, because wall-clock time is
unreliable on a machine that others use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.attention import alibi_slopes, causal_bias
from megads.model.config import ModelConfig
from megads.model.gpt import GPT, use_kernels
from megads.model.model_size import model_flops_per_token
from megads.ops.adamw import AdamWStep, adamw
from megads.ops.attention import attention
from megads.ops.compiler import compiled
from megads.ops.config import FUSED, TORCH, Implementation, Kernels, OpsConfig
from megads.ops.linear import input_gradient, linear, weight_gradient
from megads.ops.resolve import load
from megads.parallel.loss import loss_in_place, vocab_parallel_token_losses
from megads.runtime.environment import available_cores
from scripts.bench.operators import AXIS, DTYPES, SMALL, Function, Sizes, operators
from scripts.bench.results import Comparison, add_results_option, record
from scripts.bench.turns import add_judge_option, with_rank_settings

Call = Callable[[], object]
on_cpu = cache(partial(operators, device="cpu"))
OURS, EAGER, INDUCTOR = "ours", "eager", "inductor"
GEMM = 1024
SDPA, HUGGING_FACE = "eager, SDPA with a mask", "eager, as Hugging Face"
CLIP = 0.5
ADAMW = AdamWStep(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, step=10)


def compared(
    name: str, dtype: torch.dtype, sides: Mapping[str, Call], targets: dict[str, float], *, moved_bytes: float = 0.0,
    flops: float = 0.0, in_place: bool = False, row: int = 0, limit_target: float | None = None,
) -> Comparison:  # fmt: skip
    """One operator in one dtype, with its hardware limit.

    Args:
        name: operator and shape.
        dtype: dtype of its tensors.
        sides: timed functions.
        targets: how many times as fast as a side megads must be.
        moved_bytes: minimum of bytes read and written; the limit is the time to move them.
        flops: minimum FLOPs of its GEMMs; the limit is their time in large GEMMs by the kernel that megads chooses.
        in_place: the operator works in place, which costs less than writing elsewhere.
        row: number of the benchmark in docs/notes/performance.md; 0 if it is not in its table.
        limit_target: target of the limit in fp32.
    """
    if moved_bytes:
        source = torch.empty(max(1, int(moved_bytes / 2 / dtype.itemsize)), dtype=dtype).normal_()
        limit, target = "pass over its bytes in place" if in_place else "copy of its bytes", torch.empty_like(source)
        call: Call = source.neg_ if in_place else lambda: target.copy_(source)
    else:
        left, right = (torch.randn(GEMM, GEMM).to(dtype) for _ in range(2))
        count = max(1, round(flops / (2 * GEMM**3)))
        limit, call = "GEMM of its products", lambda: [linear(left, right, None, FUSED) for _ in range(count)][-1]
    fp32 = dtype == torch.float32
    wanted = {**targets, limit: limit_target if fp32 else None}
    return Comparison(row, f"{name}, {'fp32' if fp32 else 'bf16'}", {**sides, limit: call}, OURS, wanted, limit)


def forward_backward(function: Function, inputs: list[Tensor], grad: Tensor) -> Call:
    """One forward and backward pass; inputs are leaves."""

    def call() -> Tensor:
        for leaf in inputs:
            leaf.grad = None
        out = function(*inputs)
        out.backward(grad)
        return out.detach()

    return call


def forward(function: Function, inputs: list[Tensor]) -> Call:
    """One forward pass without a graph."""
    return torch.no_grad()(lambda: function(*inputs))


@dataclass(frozen=True)
class Elementwise:
    """How an operator of scripts.bench.operators is timed here: its name there, what is timed, and see `compared`."""

    operator: str
    row: int = 0
    only_forward: bool = False

    def __call__(self, sizes: Sizes, dtype: torch.dtype) -> Comparison:
        (found,) = (each for each in on_cpu(sizes, dtype) if each.name == self.operator)
        ours, peer = found.using(FUSED), found.peer or found.using(TORCH)
        with torch.no_grad():
            grad = torch.randn_like(ours(*found.inputs))

        def timed(function: Function, inputs: list[Tensor]) -> Call:
            return forward(function, inputs) if self.only_forward else forward_backward(function, inputs, grad)

        theirs = found.peer_inputs or found.inputs
        sides = {OURS: timed(ours, found.inputs), EAGER: timed(peer, theirs), INDUCTOR: timed(compiled(peer), theirs)}
        # All of the scores are read here, unlike in the GPU's kernel.
        moved = 2 * found.inputs[0].numel() if self.only_forward else sum(found.moved)
        name = f"{self.operator} {'forward' if self.only_forward else 'f+b'} {'x'.join(map(str, grad.shape))}"
        return compared(
            name, dtype, sides, {EAGER: 1.0, INDUCTOR: 1.0}, moved_bytes=moved * dtype.itemsize, row=self.row,
            # 6 ms where the copy takes 4.
            limit_target=2 / 3 if self.only_forward else None,
        )  # fmt: skip


def attention_case(sizes: Sizes, dtype: torch.dtype) -> Comparison:
    """Causal attention with queries, keys and values as in a model: views of [b, s, n, d]."""
    batch, seq_len, heads, dim = sizes.heads
    leaves = [torch.randn(sizes.heads).to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(sizes.heads).to(dtype).transpose(1, 2)
    slopes = alibi_slopes(heads)
    place = torch.device("cpu"), torch.float32
    mask = causal_bias(heads, range(heads), seq_len, True, *place)
    distances = (slopes[:, None] * torch.arange(seq_len)).repeat(batch, 1)[:, None].to(dtype)
    future = causal_bias(heads, range(1), seq_len, False, *place).clamp(min=torch.finfo(dtype).min).to(dtype)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), slopes)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)

    def hugging_face(*bsnd: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).reshape(batch * heads, seq_len, dim) for x in bsnd)
        scores = torch.baddbmm(distances, q, k.transpose(1, 2), alpha=dim**-0.5).view(batch, heads, seq_len, seq_len)
        weights = torch.softmax(scores + future, dim=-1, dtype=torch.float32).to(dtype)
        return torch.bmm(weights.view(batch * heads, seq_len, seq_len), v).view(batch, heads, seq_len, dim)

    functions: dict[str, Function] = {
        OURS: ours,
        SDPA: sdpa,
        HUGGING_FACE: hugging_face,
        INDUCTOR: compiled(hugging_face),
    }
    sides = {name: forward_backward(function, leaves, grad) for name, function in functions.items()}
    # Two products forward and five backward, of the half of the square that causality leaves.
    flops = 7 * 2 * batch * heads * seq_len**2 * dim / 2
    name = f"attention f+b B{batch} H{heads} S{seq_len} D{dim}"
    return compared(name, dtype, sides, {SDPA: 1.5}, flops=flops, row=2)


def cross_entropy_case(sizes: Sizes, dtype: torch.dtype) -> Comparison:
    """Mean loss and gradient of the logits; megads overwrites the logits with it, and reads that in the next call."""
    logits = torch.randn(1, sizes.tokens, sizes.vocabulary).to(dtype).requires_grad_()
    own_logits = logits.detach().clone().requires_grad_()
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens))
    weights = torch.full((1, sizes.tokens), 1.0 / sizes.tokens)

    def ours() -> Tensor:
        return torch.autograd.grad(loss_in_place(own_logits, labels, weights, sizes.vocabulary, AXIS), own_logits)[0]

    def hugging_face(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    compiled_loss = compiled(hugging_face)
    sides = {
        OURS: ours,
        HUGGING_FACE: lambda: torch.autograd.grad(hugging_face(logits), logits)[0],
        INDUCTOR: lambda: torch.autograd.grad(compiled_loss(logits), logits)[0],
    }
    # The logits once and the gradient once.
    moved = 2 * logits.numel() * logits.itemsize
    name = f"cross entropy f+b {sizes.tokens}x{sizes.vocabulary}"
    return compared(name, dtype, sides, {HUGGING_FACE: 4.0}, moved_bytes=moved, in_place=True, row=5)


def linear_case(sizes: Sizes, dtype: torch.dtype) -> Comparison:
    """The up projection of the model's MLP over a micro-batch, with its bias, and the gradients of input and weight."""
    batch, seq_len, heads, dim = sizes.heads
    tokens, hidden = batch * seq_len, heads * dim
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(4 * hidden, hidden).to(dtype)
    bias, grad = torch.randn(4 * hidden).to(dtype), torch.randn(tokens, 4 * hidden).to(dtype)

    def products(kernels: Kernels) -> list[Tensor]:
        found = linear(x, weight, bias, kernels), input_gradient(grad, weight, kernels)
        return [*found, weight_gradient(grad, x, kernels)]

    sides: dict[str, Call] = {
        OURS: lambda: products(FUSED),
        EAGER: lambda: [F.linear(x, weight, bias), grad @ weight, grad.t() @ x],
    }
    flops = 3 * 2.0 * tokens * hidden * 4 * hidden
    return compared(f"linear f+b {tokens}x{hidden}x{4 * hidden}", dtype, sides, {EAGER: 1.0}, flops=flops)


def adamw_case(sizes: Sizes, dtype: torch.dtype) -> Comparison:
    """Clipping, AdamW over flat fp32 state, and rounding to model weights of the dtype; torch counts its steps."""
    master, exp_avg, exp_avg_sq, grad = (torch.rand(sizes.parameters) for _ in range(4))
    weights = master.to(dtype)
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = torch.empty_like(grad)
    torchs = torch.optim.AdamW([parameter], lr=ADAMW.lr, betas=ADAMW.betas, weight_decay=ADAMW.weight_decay, fused=True)
    torchs_weights, clip = master.to(dtype), torch.tensor(CLIP)

    def eager() -> None:
        assert parameter.grad is not None
        torch.mul(grad, CLIP, out=parameter.grad)
        torchs.step()
        torchs_weights.copy_(parameter.detach())

    sides: dict[str, Call] = {
        OURS: lambda: adamw(master, exp_avg, exp_avg_sq, weights, grad, clip, ADAMW),
        EAGER: eager,
    }
    # Master and moments in and out, gradient in, weights out.
    moved = sizes.parameters * (7 * 4 + dtype.itemsize)
    name = f"AdamW {sizes.parameters:,} parameters"
    return compared(name, dtype, sides, {EAGER: 1.0}, moved_bytes=moved, in_place=True)


def model_case(sizes: Sizes, dtype: torch.dtype) -> Comparison:
    """A whole model with its loss, with ops.impl=fused and torch: the combined effect of the operators."""
    layers, vocabulary = sizes.layers, sizes.model_vocabulary
    batch, seq_len, heads, dim = sizes.heads
    config = ModelConfig(num_layers=layers, hidden_size=heads * dim, num_heads=heads, vocab_size=vocabulary)
    tokens, labels = (torch.randint(0, vocabulary, (batch, seq_len)) for _ in range(2))
    info = BatchInfo(torch.arange(batch))

    def step(fused: bool) -> Call:
        model = GPT(config, seed=0).to(dtype)
        if fused:
            use_kernels(model)

        def call() -> None:
            model.zero_grad(set_to_none=True)
            logits = model(tokens, info)
            if fused:
                loss = loss_in_place(logits, labels, torch.full(labels.shape, 1 / labels.numel()), vocabulary, AXIS)
            else:
                loss = vocab_parallel_token_losses(logits, labels, vocabulary, AXIS).mean()
            loss.backward()

        return call

    flops = float(batch * seq_len * model_flops_per_token(config, seq_len))
    name = f"model f+b {layers}x{heads * dim} V{vocabulary} B{batch} S{seq_len}"
    return compared(name, dtype, {OURS: step(True), EAGER: step(False)}, {EAGER: 1.0}, flops=flops)


CASES: dict[str, Callable[[Sizes, torch.dtype], Comparison]] = {
    "attention": attention_case,
    "softmax": Elementwise("ALiBi softmax", row=3, only_forward=True),
    "bias_gelu": Elementwise("bias GELU", row=4, only_forward=True),
    "gelu": Elementwise("GELU", row=4),
    "swiglu": Elementwise("SwiGLU", row=4),
    "layer_norm": Elementwise("LayerNorm", row=5),
    "add_layer_norm": Elementwise("residual + LayerNorm + sum", row=5),
    "rms_norm": Elementwise("RMSNorm", row=5),
    "rotary": Elementwise("rotary"),
    "cross_entropy": cross_entropy_case,
    "linear": linear_case,
    "adamw": adamw_case,
    "model": model_case,
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--only", choices=CASES, action="append")
    add_judge_option(parser)
    parser.add_argument("--small", action="store_true", help="smoke test with tiny shapes, nothing compiled")
    parser.add_argument("--eager-only", action="store_true", help="omit torch.compile, which takes long to compile")
    add_results_option(parser)
    arguments = parser.parse_args()
    with_rank_settings(arguments.threads, "scripts.bench.ops")
    load(OpsConfig(Implementation.fused), print, cuda=False)
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    sizes, eager_only = SMALL if arguments.small else Sizes(), arguments.small or arguments.eager_only
    for name, dtype in product(arguments.only or CASES, DTYPES.values()):
        case = CASES[name](sizes, dtype)
        if eager_only:
            case = replace(case, sides={side: call for side, call in case.sides.items() if side != INDUCTOR})
        found = case.measure(arguments.rounds)
        figures = {"case": case.work, "threads": arguments.threads, "by": arguments.by, "sides": found}
        record(arguments.append, "ops", figures, case.verdicts(found, arguments.by))
    return 0


if __name__ == "__main__":
    sys.exit(main())
