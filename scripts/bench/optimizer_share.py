#!/usr/bin/env python3
"""Benchmark 15: the share of a training step that each optimizer takes, on one thread of this CPU.

The real engine trains a BLOOM of 8 layers x 512, as in benchmark 1, in one process. The share is one of CPU time, which
other work on the machine hardly changes. The optimizer's time is that of the gradient norm, clipping, the update and
the rounding to model weights. It does not depend on the tokens of a step, so its share decreases with them: the step of
--tokens is extrapolated from the measured micro-batches.

Run from the repository: python -m scripts.bench.optimizer_share [--tokens 2048 32768] [--precision bfloat16 float32]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from megads.model.config import ModelConfig
from megads.ops.config import Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.tools.verify.layout import build_engine
from megads.tools.verify.scenario import Scenario, step_batches
from scripts.bench.results import Verdict, add_results_option, record
from tests.distributed import run_ranks

MODEL = ModelConfig(num_layers=8, hidden_size=512, num_heads=8, vocab_size=32_000, max_seq_len=512)
SEQ_LEN, MICRO_BATCH = 512, 4
ROW = 15
TARGET, JUDGED_TOKENS = 0.04, 32_768
"""Of Muon, at so many tokens a step."""
OPTIMIZERS = {
    "adamw": OptimConfig(),
    "lamb": OptimConfig(name="lamb"),
    "lion": OptimConfig(name="lion"),
    "muon": OptimConfig(name="muon"),
    "muon, qkv by head": OptimConfig(name="muon", options={"qkv": "head"}),
}


def measure(name: str, precision: str, impl: str, steps: int) -> tuple[float, float]:
    """Median CPU seconds of one micro-batch, forward and backward, and of the optimizer step."""
    scenario = Scenario(
        model=MODEL, precision=precision, hot=False, seq_len=SEQ_LEN, micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH, optimizer=OPTIMIZERS[name], ops=OpsConfig(Implementation(impl)),
    )  # fmt: skip
    engine: Any = build_engine(scenario, ParallelConfig())
    optimizer = engine.optimizer
    inner, updates, wholes = optimizer.step, [], []

    def step(*args: Any) -> None:
        begin = time.process_time()
        inner(*args)
        updates.append(time.process_time() - begin)

    optimizer.step = step
    batches = step_batches(scenario, 0)
    for _ in range(steps + 1):
        begin = time.process_time()
        engine.step(batches, scenario.lr)
        wholes.append(time.process_time() - begin)
    passes = [whole - update for whole, update in zip(wholes, updates, strict=True)]
    return statistics.median(passes[1:]), statistics.median(updates[1:])


def _measure_on_one_thread(*arguments: Any) -> tuple[float, float]:
    torch.set_num_threads(1)
    return measure(*arguments)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 32_768, 131_072], help="tokens per step")
    parser.add_argument("--precision", nargs="*", default=["bfloat16", "float32"], help="dtype of the weights")
    parser.add_argument(
        "--only", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS), help="only these optimizers"
    )
    parser.add_argument("--impl", default="fused", choices=["fused", "torch"], help="value of ops.impl")
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps, of which the median is used, after one warmup step"
    )
    add_results_option(parser)
    arguments = parser.parse_args()
    shown = " | ".join(f"{tokens:,} tokens" for tokens in arguments.tokens)
    print(f"| precision | optimizer | micro-batch of 2,048 tokens, s | optimizer, s | share at {shown} |")
    print("|---|---|---|---|" + "---|" * len(arguments.tokens))
    for precision in arguments.precision:
        for name in arguments.only:
            work = (name, precision, arguments.impl, arguments.steps)
            ((passes, update),) = run_ranks(_measure_on_one_thread, 1, *work)
            micro_batches = [tokens / (SEQ_LEN * MICRO_BATCH) for tokens in arguments.tokens]
            shares = [update / (update + count * passes) for count in micro_batches]
            cells = " | ".join(f"{share:.1%}" for share in shares)
            print(f"| {precision} | {name} | {passes:.3f} | {update:.3f} | {cells} |", flush=True)
            verdicts = []
            if name == "muon":
                share = update / (update + JUDGED_TOKENS / (SEQ_LEN * MICRO_BATCH) * passes)
                what = f"share of the step, {precision}, {JUDGED_TOKENS:,} tokens"
                verdicts = [
                    Verdict(ROW, what, f"{share:.1%}", "the wanted share", f"{TARGET:.0%}", TARGET / share, 1.0)
                ]
            figures = {"optimizer": name, "precision": precision, "passes_s": passes, "update_s": update}
            record(arguments.append, "optimizer_share", figures, verdicts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
