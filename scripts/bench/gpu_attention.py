#!/usr/bin/env python3
"""Every attention kernel for causal attention with ALiBi that runs here: time, memory, error against fp64.

    python -m scripts.bench.gpu_attention [--device cuda] [--append bench.jsonl]

Runs the trials of `model.attention=auto` at the start of a run (megads.engine.attention_trials), one kernel after the
other, and the formula in plain torch with all scores in memory, as in Hugging Face. A kernel whose error against fp64
is more than twice plain torch's is excluded, with the reason. Training runs of the same run of gpu.sh use the fastest.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megads.engine.attention_trials import TRIED, AttentionTrial, measure, plain_attention, random_problem
from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.ops.attention_kinds import AttentionKind, AttentionWork
from megads.ops.autotune import TuningResult, compare
from megads.ops.config import Implementation, OpsConfig
from megads.ops.resolve import load
from megads.runtime.process import make_deterministic
from scripts.bench.gpu_lines import Line, add_line_options, appender

FORMULA = "scores in memory, plain torch"


@dataclass(frozen=True)
class Shape:
    """Batch, heads, sequence length and head dim; default: the 1.3B model."""

    batch: int = 4
    heads: int = 16
    seq_len: int = 2048
    dim: int = 128

    @property
    def text(self) -> str:
        return f"B{self.batch} H{self.heads} S{self.seq_len} D{self.dim} bf16"

    @property
    def flops(self) -> int:
        """FLOPs of two GEMMs forward and five backward over the causal half of the scores."""
        return 7 * self.batch * self.heads * self.seq_len**2 * self.dim

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(hidden_size=self.heads * self.dim, num_heads=self.heads)

    def work(self, cuda: bool) -> AttentionWork:
        """The attention of one rank, with megads' kernels."""
        return replace(
            self.model.attention_work(),
            bf16=True,
            cuda=cuda,
            impl=Implementation.fused,
            seq_len=self.seq_len,
            micro_batch_size=self.batch,
        )


SMALL = Shape(1, 2, 48, 8)


def outcome_of(kind: AttentionKind, shape: Shape, device: torch.device, rounds: int) -> TuningResult:
    """Returns the result of the trial of one kernel, or the reason why there is none."""
    work = shape.work(device.type == "cuda")
    try:
        found = measure(shape.model, work, device, (kind,), rounds=rounds).outcomes or {}
    except ConfigError as reason:
        return TuningResult(str(reason).split(f"here: {kind}: ")[-1])
    return found[kind.value]


def formula_outcome(shape: Shape, device: torch.device, rounds: int) -> TuningResult:
    """Returns the same for plain torch."""
    problem, _ = random_problem(shape.model, shape.work(device.type == "cuda"), device, None)

    def attend(q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor) -> Tensor:
        return plain_attention(q_bnsd, k_bnsd, v_bnsd, problem.slopes_n)

    return compare({FORMULA: attend}, AttentionTrial(problem), rounds)[FORMULA]


def line_of(name: str, shape: Shape, found: TuningResult) -> Line:
    """Returns the result line of an outcome."""
    line: Line = {"kind": name, "shape": shape.text, "flops": shape.flops, "reason": found.reason}
    if found.time_ms is None:
        return line | {"outcome": "left out" if found.error is not None else "not run"}
    return line | {
        "outcome": "done",
        "us": found.time_ms * 1e3,
        "error_ratio": found.error,
        "repeats": found.repeats,
        "kept_bytes": found.kept_bytes or 0,
        "peak_bytes": found.peak_bytes or 0,
    }


def main() -> int:
    """Runs the trials and appends the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    append, cuda = appender(arguments, "gpu_attention"), arguments.device == "cuda"
    load(OpsConfig(Implementation.fused), print, cuda=cuda)
    shape, device = Shape() if cuda else SMALL, torch.device(arguments.device)
    make_deterministic(device)  # as a run does before it tries them
    for kind in dict.fromkeys((*TRIED, AttentionKind.fused)):
        line = line_of(kind.value, shape, outcome_of(kind, shape, device, arguments.rounds))
        append(line)
        print(line, flush=True)
    append(line_of(FORMULA, shape, formula_outcome(shape, device, arguments.rounds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
