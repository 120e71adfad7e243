#!/usr/bin/env python3
"""Times each operator: ours, torch eager, torch.compile, and what the machine could do at best, all in one run.

    python -m scripts.bench.ops [--rounds 15] [--threads 2] [--only attention] [--append bench.jsonl]

The sides take turns in one process with the allocator settings of a rank, so that other work on the machine hits all of
them alike; fastest and median time count. `limit` is the time of reading and writing what the operator must read and
write at the copy bandwidth measured beside it, or of its matrix products at the measured GEMM peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.alibi import alibi_slopes, causal_bias
from megads.model.config import ModelConfig
from megads.model.gpt import GPT
from megads.model.stages import use_kernels
from megads.ops.attention import attention
from megads.ops.choice import load
from megads.ops.config import Implementation, OpsConfig
from megads.ops.gelu import gelu
from megads.parallel.cross_entropy import loss_in_place, vocab_parallel_token_losses
from megads.parallel.grid import single_rank_grid
from megads.runtime.environment import available_cores, rank_variables
from megads.runtime.metrics import JsonLinesWriter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AXIS = single_rank_grid().tp


@dataclass(frozen=True)
class Sizes:
    """Shapes of all cases.

    Attributes:
        rows, width: of GELU and LayerNorm.
        tokens, vocabulary: of cross entropy.
        attention: batch, heads, sequence length and head dim, also the model's.
        layers, model_vocabulary: of the model.
    """

    rows: int = 4096
    width: int = 2048
    tokens: int = 1024
    vocabulary: int = 50304
    attention: tuple[int, int, int, int] = (4, 8, 512, 64)
    layers: int = 8
    model_vocabulary: int = 32000


SMALL = Sizes(64, 32, 16, 512, (1, 2, 48, 8), layers=1, model_vocabulary=512)


@dataclass(frozen=True)
class Case:
    """One operator in one dtype.

    Attributes:
        name: of the operator and its shape.
        sides: what takes turns, ours first where there is one.
        moved_bytes: read and written at least.
        flops: of its matrix products at least.
    """

    name: str
    sides: dict[str, Callable[[], object]]
    moved_bytes: float = 0.0
    flops: float = 0.0


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile, for one set of shapes."""
    return torch.compile(function, dynamic=False)  # type: ignore[no-any-return]


def forward_backward(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Callable[[], None]:
    """One forward and backward pass, of inputs that are leaves."""

    def call() -> None:
        for leaf in inputs:
            leaf.grad = None
        function(*inputs).backward(grad)

    return call


def gelu_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    x = torch.randn(sizes.rows, sizes.width).to(dtype).requires_grad_()
    grad = torch.randn(sizes.rows, sizes.width).to(dtype)
    sides: dict[str, Callable[[], object]] = {
        "ours": forward_backward(lambda x: gelu(x, True), [x], grad),
        "eager": forward_backward(lambda x: gelu(x, False), [x], grad),
        "inductor": forward_backward(compiled(lambda x: gelu(x, False)), [x], grad),
    }
    return Case(f"GELU f+b {sizes.rows}x{sizes.width}", sides, 5 * x.numel() * x.itemsize)


def layer_norm_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Only torch's: whether a kernel of our own could win anything."""
    x = torch.randn(sizes.rows, sizes.width).to(dtype).requires_grad_()
    gain, bias = (torch.ones(sizes.width).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(sizes.rows, sizes.width).to(dtype)

    def norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (sizes.width,), gain, bias)

    sides: dict[str, Callable[[], object]] = {
        "eager": forward_backward(norm, [x, gain, bias], grad),
        "inductor": forward_backward(compiled(norm), [x, gain, bias], grad),
    }
    return Case(f"LayerNorm f+b {sizes.rows}x{sizes.width}", sides, 5 * x.numel() * x.itemsize)


def cross_entropy_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Loss and gradient of the logits; ours leaves the gradient in their place, and reads that the next time."""
    logits = torch.randn(1, sizes.tokens, sizes.vocabulary).to(dtype).requires_grad_()
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens))
    weights = torch.full((1, sizes.tokens), 1.0 / sizes.tokens)
    own_logits = logits.detach().clone().requires_grad_()

    def megatron() -> Tensor:
        return (vocab_parallel_token_losses(logits, labels, sizes.vocabulary, AXIS) * weights).sum()

    def hugging_face(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    inductor = compiled(hugging_face)
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: torch.autograd.grad(
            loss_in_place(own_logits, labels, weights, sizes.vocabulary, AXIS), own_logits
        ),
        "eager, as Hugging Face": lambda: torch.autograd.grad(hugging_face(logits), logits),
        "eager, ops.impl=torch": lambda: torch.autograd.grad(megatron(), logits),
        "inductor": lambda: torch.autograd.grad(inductor(logits), logits),
    }
    # The logits once and the gradient once.
    return Case(f"cross entropy f+b {sizes.tokens}x{sizes.vocabulary}", sides, 2 * logits.numel() * logits.itemsize)


def attention_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    batch, heads, seq_len, dim = sizes.attention
    shape = (batch, seq_len, heads, dim)
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape).to(dtype).transpose(1, 2)
    slopes = alibi_slopes(heads)
    mask = causal_bias(heads, 0, heads, seq_len, True, torch.device("cpu"), torch.float32)
    distances = (slopes[:, None] * torch.arange(seq_len)).repeat(batch, 1)[:, None].to(dtype)
    future = mask[:, :1].clamp(min=torch.finfo(dtype).min).to(dtype)

    def ours(*bsnd: Tensor) -> Tensor:
        return attention(*(x.transpose(1, 2) for x in bsnd), slopes)

    def sdpa(*bsnd: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in bsnd), attn_mask=mask)

    def hugging_face(*bsnd: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).reshape(batch * heads, seq_len, dim) for x in bsnd)
        scores = torch.baddbmm(distances, q, k.transpose(1, 2), alpha=dim**-0.5).view(batch, heads, seq_len, seq_len)
        weights = torch.softmax(scores + future, dim=-1, dtype=torch.float32).to(dtype)
        return torch.bmm(weights.view(batch * heads, seq_len, seq_len), v).view(batch, heads, seq_len, dim)

    sides: dict[str, Callable[[], object]] = {
        "ours": forward_backward(ours, leaves, grad),
        "eager, SDPA with a mask": forward_backward(sdpa, leaves, grad),
        "eager, as Hugging Face": forward_backward(hugging_face, leaves, grad),
        "inductor, as Hugging Face": forward_backward(compiled(hugging_face), leaves, grad),
    }
    # Two products forward and five backward, of the half of the square that causality leaves.
    flops = 7 * 2 * batch * heads * seq_len**2 * dim / 2
    return Case(f"attention f+b B{batch} H{heads} S{seq_len} D{dim}", sides, flops=flops)


def model_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Forward and backward of a whole model with its loss: what the operators are worth together."""
    layers, vocabulary = sizes.layers, sizes.model_vocabulary
    batch, heads, seq_len, dim = sizes.attention
    hidden = heads * dim
    config = ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocabulary)
    tokens, labels = (torch.randint(0, vocabulary, (batch, seq_len)) for _ in range(2))
    info = BatchInfo(torch.arange(batch))

    def step(fused: bool) -> Callable[[], object]:
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

    weights = 12 * layers * hidden**2 + vocabulary * hidden
    flops = float(batch * seq_len * (6 * weights + 12 * layers * hidden * seq_len))
    sides = {"ours, ops.impl=fused": step(True), "ours, ops.impl=torch": step(False)}
    return Case(f"model f+b {layers}x{hidden} V{vocabulary} B{batch} S{seq_len}", sides, flops=flops)


CASES = {
    "attention": attention_case,
    "cross_entropy": cross_entropy_case,
    "gelu": gelu_case,
    "layer_norm": layer_norm_case,
    "model": model_case,
}


@dataclass(frozen=True)
class Times:
    """Milliseconds of one side in every round: by the clock, and of all threads on the processor.

    Where other work takes most of the machine only the second says much, and only with --threads 1: threads that wait
    for each other count as busy.
    """

    clock: list[float]
    processor: list[float]


def take_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Times of every side."""
    for call in sides.values():
        call()
        call()
    times = {name: Times([], []) for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            begin, begin_processor = time.perf_counter(), time.process_time()
            call()
            times[name].clock.append(1e3 * (time.perf_counter() - begin))
            times[name].processor.append(1e3 * (time.process_time() - begin_processor))
    return times


def limits(case: Case, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What the machine needs for the bytes, by copying, and for the products, by one large GEMM of as many."""
    if case.moved_bytes:
        source = torch.empty(max(1, int(case.moved_bytes / 2 / dtype.itemsize)), dtype=dtype).normal_()
        target = torch.empty_like(source)
        return {"limit, copy": lambda: target.copy_(source)}
    size = 1024
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    count = max(1, round(case.flops / (2 * size**3)))

    def products() -> None:
        for _ in range(count):
            left @ right

    return {"limit, GEMM": products}


def measure(names: list[str], sizes: Sizes, rounds: int, with_compiled: bool) -> Iterator[dict[str, Any]]:
    """One record a case and dtype."""
    for name in names:
        for dtype_name, dtype in DTYPES.items():
            case = CASES[name](sizes, dtype)
            sides = {name: side for name, side in case.sides.items() if with_compiled or "inductor" not in name}
            times = take_turns(sides | limits(case, dtype), rounds)
            yield {
                "bench": "ops",
                "case": case.name,
                "dtype": dtype_name,
                "fastest_ms": {side: min(of_side.clock) for side, of_side in times.items()},
                "median_ms": {side: statistics.median(of_side.clock) for side, of_side in times.items()},
                "processor_ms": {side: min(of_side.processor) for side, of_side in times.items()},
            }


def show(record: dict[str, Any]) -> None:
    print(f"{record['case']}, {record['dtype']}: ms, and in brackets over the first side's")
    columns = {"fastest_ms": "fastest", "median_ms": "median", "processor_ms": "processor"}
    sides = list(record["fastest_ms"])
    for side in sides:
        cells = [
            f"{title} {record[key][side]:9.2f} ({record[key][side] / record[key][sides[0]]:5.2f})"
            for key, title in columns.items()
        ]
        print(f"  {side:<28} {'   '.join(cells)}", flush=True)


def with_rank_settings(threads: int) -> None:
    """Starts this process anew with the environment of a rank, as glibc reads it at its start only."""
    variables = rank_variables(threads, cuda=False)
    if any(os.environ.get(name) != value for name, value in variables.items() if name.startswith(("MALLOC", "OMP"))):
        os.execve(sys.executable, [sys.executable, "-m", "scripts.bench.ops", *sys.argv[1:]], os.environ | variables)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--small", action="store_true", help="tiny shapes, nothing compiled: does it run?")
    parser.add_argument("--eager-only", action="store_true", help="without torch.compile, which takes long to compile")
    parser.add_argument("--append", type=Path, help="file of results")
    arguments = parser.parse_args()
    with_rank_settings(arguments.threads)
    load(OpsConfig(Implementation.fused), print, cuda=False)
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    records = []
    sizes, names = SMALL if arguments.small else Sizes(), arguments.only or list(CASES)
    for record in measure(names, sizes, arguments.rounds, not (arguments.small or arguments.eager_only)):
        show(record)
        records.append(record)
    if arguments.append:
        writer = JsonLinesWriter(arguments.append)
        for record in records:
            writer.write_line(record | {"time": time.time(), "load": os.getloadavg()[0], "torch": torch.__version__})
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
