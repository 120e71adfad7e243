#!/usr/bin/env python3
"""Every kind of causal attention with ALiBi that runs here: time, memory, error against fp64; the model's own code.

    python -m scripts.bench.gpu_attention [--device cuda] [--append bench.jsonl]

`model.attention`'s kinds are timed through the model's attention core, beside the formula in plain torch with all
scores in memory, as Hugging Face has it, and flash-attn where it is installed. Each is held to fp64: its error may be
twice that of the formula in bf16. Extra memory is the most that a forward and a backward pass take beside their inputs.
Exit 1: one is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model.alibi import alibi_slopes
from megads.model.attention import AttentionCore
from megads.model.config import AttentionKind, ModelConfig
from megads.ops.choice import load
from megads.ops.config import Implementation, OpsConfig
from scripts.bench.device_clock import median_seconds
from scripts.bench.gpu_lines import Line, add_line_options, appender

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v), each [b, n, s, d] -> [b, n, s, d]."""
FORMULA = "scores in memory, plain torch"


@dataclass(frozen=True)
class Shape:
    """Batch, heads, sequence length and head dim."""

    batch: int = 4
    heads: int = 16
    seq_len: int = 2048
    dim: int = 128

    @property
    def text(self) -> str:
        return f"B{self.batch} H{self.heads} S{self.seq_len} D{self.dim} bf16"

    @property
    def flops(self) -> int:
        """Two products forward and five backward, of the half of the square that causality leaves."""
        return 7 * self.batch * self.heads * self.seq_len**2 * self.dim


SMALL = Shape(1, 2, 48, 8)


def formula(q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - s)) v, the softmax in fp32, or fp64 where the inputs are."""
    heads, length, dim = q_bnsd.shape[1:]
    wide = torch.promote_types(q_bnsd.dtype, torch.float32)
    place_s = torch.arange(length, device=q_bnsd.device)
    distance_st = place_s[None, :] - place_s[:, None]
    bias_nst = alibi_slopes(heads).to(q_bnsd.device, wide)[:, None, None] * distance_st
    scores_bnst = (q_bnsd @ k_bnsd.transpose(2, 3)).to(wide) * dim**-0.5 + bias_nst
    weights_bnst = torch.softmax(scores_bnst.masked_fill(distance_st > 0, -torch.inf), dim=-1)
    return weights_bnst.to(v_bnsd.dtype) @ v_bnsd


def core_of(kind: AttentionKind, shape: Shape) -> Attend:
    """The model's attention of one kind.

    Raises:
        ConfigError: the model refuses it.
    """
    model = ModelConfig(hidden_size=shape.heads * shape.dim, num_heads=shape.heads, attention=kind)
    model.check()
    core = AttentionCore(model, 0, "core")
    core.fused = True
    info = BatchInfo(torch.arange(shape.batch), seq_len=shape.seq_len)
    return lambda q, k, v: core(q, k, v, info)


def flash(q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor) -> Tensor:
    """The package flash-attn."""
    slopes_n = alibi_slopes(q_bnsd.shape[1]).to(q_bnsd.device)
    q, k, v = (x.transpose(1, 2) for x in (q_bnsd, k_bnsd, v_bnsd))
    function = importlib.import_module("flash_attn").flash_attn_func
    out: Tensor = function(q, k, v, causal=True, alibi_slopes=slopes_n, deterministic=True)
    return out.transpose(1, 2)


def sides(shape: Shape, device: str) -> dict[str, Attend | str]:
    """What is compared, or why it is not."""
    found: dict[str, Attend | str] = {FORMULA: formula}
    for kind in AttentionKind:
        if kind is AttentionKind.auto:
            continue
        try:
            found[kind.value] = core_of(kind, shape)
        except ConfigError as reason:
            found[kind.value] = str(reason)
        if device == "cuda" and kind in (AttentionKind.fused, AttentionKind.fused_softmax):
            found[kind.value] = "the model does not take it on GPUs"
    installed = importlib.util.find_spec("flash_attn") is not None
    return found | {"package flash-attn": flash if installed else "not installed"}


def gradients(attend: Attend, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of q, k and v, with inputs in `dtype`."""
    *inputs, grad = (x.to(dtype, copy=True) for x in tensors)
    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative, of the output and of each gradient."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def costs(attend: Attend, tensors: list[Tensor], device: str, rounds: int) -> Line:
    """Microseconds of a forward pass, and of one with its backward pass; most bytes beside the inputs."""
    *inputs, grad = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)

    both()
    extra = 0
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        extra = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        forward = median_seconds(lambda: attend(*leaves), device, rounds)
    return {"fwd_us": forward * 1e6, "us": median_seconds(both, device, rounds) * 1e6, "extra_bytes": extra}


def main() -> int:
    """Checks, times, appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    device, append = arguments.device, appender(arguments, "gpu_attention")
    load(OpsConfig(Implementation.fused), print, cuda=device == "cuda")
    shape = Shape() if device == "cuda" else SMALL
    size = (shape.batch, shape.seq_len, shape.heads, shape.dim)
    generator = torch.Generator(device).manual_seed(0)
    # As views of [b, s, n, d], which is how a projection leaves them.
    tensors = [torch.randn(size, generator=generator, device=device).bfloat16().transpose(1, 2) for _ in range(4)]
    exact = gradients(formula, tensors, torch.float64)
    measure = errors(gradients(formula, tensors, torch.bfloat16), exact)
    wrong = []
    for name, side in sides(shape, device).items():
        line: Line = {"kind": name, "shape": shape.text, "flops": shape.flops, "outcome": "not run", "reason": ""}
        if isinstance(side, str):
            append(line | {"reason": side})
            continue
        try:
            found = errors(gradients(side, tensors, torch.bfloat16), exact)
            line |= costs(side, tensors, device, arguments.rounds)
        except (RuntimeError, NotImplementedError, ImportError) as error:  # each kernel has its own conditions
            append(line | {"outcome": "failed", "reason": str(error).strip().split("\n")[0][:200]})
            continue
        ratio = max(ours / theirs for ours, theirs in zip(found, measure, strict=True))
        wrong += [name] if not ratio <= 2 else []
        append(line | {"outcome": "done", "error": max(found), "error_ratio": ratio})
        print(f"{name}: {line['us']:.0f} us, error {max(found):.1e}, {ratio:.2f} times the formula's", flush=True)
    if wrong:
        print(f"errors of more than twice the formula's: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
