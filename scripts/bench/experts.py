#!/usr/bin/env python3
"""Benchmark 15: a training step of a mixture of experts, against a dense model and against transformers.

    python -m scripts.bench.experts [--rounds 5] [--threads 2] [--precision bf16] [--eager-only]

The model is like Qwen3-MoE: a token uses 4 of 32 experts. The dense model has an MLP as wide as the experts that a
token uses, so that both have the same active parameters (but for the router) and model FLOPs. The goal is GOAL of the
dense model's FLOP rate; nanochat reports 0.76 on GPUs. transformers' Qwen3MoeForCausalLM has the same weights,
converted by megads.tools.convert, sees the same tokens, and is trained like the peers of benchmark 1, with the
implementation of experts that transformers chooses. Without balance losses, because those of transformers are others.
If a peer's losses or its first gradient norm differ from megads', nothing is judged, and the exit code is 1.

Sides alternate as in benchmark 1, which has the same options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.model_size import parameter_count
from megads.model.moe_config import MoEConfig
from megads.ops.processor import torch_loops_over_bf16
from scripts.bench.processes import Taken, Turn, in_turns, side_processes
from scripts.bench.results import Verdict, against_rate, against_time, record
from scripts.bench.train_step import Bounds, faults, losses, parse_options, show
from scripts.bench.training_sides import DTYPES, TrainingWork, hugging_face_side, megads_side
from scripts.bench.turns import Times

ROW = 15
OURS, DENSE = "megads, experts", "megads, dense of the same active size"
EAGER, COMPILED = "Hugging Face, eager", "Hugging Face, compiled"
AUTOCAST = "Hugging Face, autocast"
GOAL = 0.85
"""Target share of the dense model's FLOP rate."""
BOUNDS = {
    "fp32": Bounds(first=1e-5, norm=1e-4, curve=1e-4),
    "bf16": Bounds(first=1e-3, norm=2e-2, curve=5e-3),
}
"""As in benchmark 1, but in bf16 transformers also computes the router's logits in bf16, so that tokens with two nearly
equal scores choose other experts."""
DENSE_MODEL = ModelConfig(
    num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_size=1408, vocab_size=8192, max_seq_len=512,
    position=Position.rope, qk_norm=True, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, bias=False, embedding_norm=False,
    tie_embeddings=False,
)  # fmt: skip
EXPERTS = MoEConfig(num_experts=32, top_k=4, expert_ffn_size=352)
SMALL = replace(DENSE_MODEL, num_layers=2, hidden_size=64, ffn_size=64, vocab_size=512, max_seq_len=32)
SMALL_EXPERTS = MoEConfig(num_experts=8, top_k=2, expert_ffn_size=32)


def works(precision: str, small: bool = False) -> tuple[TrainingWork, TrainingWork]:
    """Returns the training of the mixture, and of the dense model.

    Args:
        precision: a key of DTYPES.
        small: with tiny models.
    """
    dense, experts = (SMALL, SMALL_EXPERTS) if small else (DENSE_MODEL, EXPERTS)
    mixture = replace(dense, moe=experts)

    def work(model: ModelConfig) -> TrainingWork:
        batch, length = (2, 32) if small else (4, 512)
        return TrainingWork(
            model.num_layers, model.hidden_size, model.num_heads, model.vocabulary, batch, length, precision,
            shape=model,
        )  # fmt: skip

    return work(mixture), work(dense)


def sides_of(
    mixture: TrainingWork, dense: TrainingWork, with_compiled: bool
) -> dict[str, tuple[Callable[..., Turn], tuple[Any, ...]]]:
    """Returns the alternating sides; without the peers where a step of theirs would take minutes."""
    sides: dict[str, tuple[Callable[..., Turn], tuple[Any, ...]]] = {
        OURS: (megads_side, (mixture, "fused")),
        DENSE: (megads_side, (dense, "fused")),
    }
    if mixture.precision == "bf16" and mixture.hidden > SMALL.hidden_size and torch_loops_over_bf16():
        print("the peers are left out in bf16: PyTorch multiplies it in plain loops on this CPU")
        return sides
    sides[EAGER] = (hugging_face_side, (mixture, False))
    if mixture.precision == "bf16":
        sides[AUTOCAST] = (hugging_face_side, (mixture, False, True))
    if with_compiled:
        sides[COMPILED] = (hugging_face_side, (mixture, True))
    return sides


def figures_of(work: TrainingWork, taken: list[Taken], by: str) -> dict[str, float]:
    """Figures of one side from its timed steps; speeds use the time by which targets are judged."""
    times = Times([1e3 * turn.clock_s for turn in taken], [1e3 * turn.processor_s for turn in taken]).summary
    seconds = times[by] / 1e3
    return times | {
        "tokens_per_s": work.tokens / seconds,
        "gflops_per_s": work.flops / seconds / 1e9,
        "peak_bytes": float(max(turn.peak_bytes for turn in taken)),
    }


def verdicts_of(precision: str, sides: dict[str, dict[str, float]], by: str) -> list[Verdict]:
    """Compares megads' mixture with the dense model, if both ran, and with the peers."""
    name = f"train step of experts, {precision}"
    said = []
    if {OURS, DENSE} <= sides.keys():
        rates = (sides[side]["gflops_per_s"] for side in (OURS, DENSE))
        said.append(against_rate(ROW, name, next(rates), DENSE, next(rates), "GFLOP/s", GOAL))
    peers = [side for side in (EAGER, AUTOCAST, COMPILED) if OURS in sides and side in sides]
    return said + [against_time(ROW, name, sides[OURS][by], peer, sides[peer][by], 1.0) for peer in peers]


def measure(precision: str, arguments: argparse.Namespace) -> bool:
    """Measures one precision; returns whether all sides trained the same."""
    mixture, dense = works(precision, arguments.small)
    with side_processes(sides_of(mixture, dense, not arguments.eager_only), arguments.threads, print) as sides:
        taken = in_turns(sides, arguments.warm_up, arguments.rounds)
    found = {name: [turn.found for turn in turns] for name, turns in taken.items()}
    same = {name: steps for name, steps in found.items() if name != DENSE}
    wrong = {
        name: differ
        for name, steps in same.items()
        if (differ := faults(found[OURS], steps, precision, BOUNDS[precision]))
    }
    timed = {
        name: figures_of(dense if name == DENSE else mixture, turns[arguments.warm_up :], arguments.by)
        for name, turns in taken.items()
    }
    moe, millions = mixture.model.moe, [parameter_count(work.model) / 1e6 for work in (mixture, dense)]
    print(f"{mixture.text}, {moe.top_k} of {moe.num_experts} experts of {moe.expert_ffn_size}: {millions[0]:.0f} M "
          f"parameters; dense: {millions[1]:.0f} M; {mixture.flops / 1e9:.0f} GFLOP a step")  # fmt: skip
    show(timed, wrong, "GFLOP/s", lambda found: f"{found['gflops_per_s']:.1f}")
    figures = {"threads": arguments.threads, "rounds": arguments.rounds, "by": arguments.by, "faults": wrong}
    record(
        arguments.append,
        "experts",
        {**asdict(mixture), **figures, "sides": timed, "losses": {name: losses(of) for name, of in same.items()}},
        [] if wrong else verdicts_of(precision, timed, arguments.by),
        unjudged=f"train step of experts, {precision}" if wrong else "",
    )
    return not wrong


def main() -> int:
    """The command line."""
    arguments = parse_options(__doc__)
    same = [measure(precision, arguments) for precision in arguments.precision or list(DTYPES)]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
