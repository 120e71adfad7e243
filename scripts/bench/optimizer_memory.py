#!/usr/bin/env python3
"""Benchmark 12: memory and gradient traffic of both engines against stock DeepSpeed's, on gloo ranks of this CPU.

All train the same untied model in bf16 with ZeRO-1 on very few tokens, so that memory is nearly all weights, gradients
and optimizer states. Every allocation of torch's allocator is counted; collectives are counted as they are issued. Run
from the repository: python -m scripts.bench.optimizer_memory
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed.runtime.engine
import torch.distributed as dist

from megads.model.config import ModelConfig
from megads.model.model_size import parameter_count
from megads.parallel.config import EngineKind, ParallelConfig
from megads.tools.verify.layout import rank_batches
from scripts.bench.results import Verdict, add_results_option, record
from tests.distributed import run_ranks
from tests.parity import Collective, Scenario, build_engine, recorded_collectives, step_batches
from tests.stock_deepspeed import build_stock
from tests.tools.plan.memory_meter import allocator_ledger, patient_collectives

MODEL = ModelConfig(num_layers=4, hidden_size=512, num_heads=8, vocab_size=8192, max_seq_len=16, tie_embeddings=False)
STEPS = 2
ROW = 12


OURS, ADAPTED, STOCK = "megads", "megads, engine=deepspeed", "DeepSpeed"
KINDS = {OURS: EngineKind.native, ADAPTED: EngineKind.deepspeed}


def train(side: str, parallel: ParallelConfig) -> Any:
    """Builds an engine and trains on two micro-batches of 16 tokens per rank; returns it to keep its memory alive."""
    scenario = Scenario(
        model=MODEL, precision="bfloat16", hot=False, seq_len=16, micro_batch_size=1, global_batch_size=2 * parallel.dp,
        engine=KINDS.get(side, EngineKind.native),
    )  # fmt: skip
    engine: Any = build_stock(scenario, parallel) if side == STOCK else build_engine(scenario, parallel)
    for step in range(STEPS):
        if side == STOCK:
            engine.train(step_batches(scenario, step, dist.get_rank(), parallel.dp))
        else:
            engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
    return engine


def memory_of(train: Callable[[], Any]) -> tuple[float, float]:
    """Peak bytes, and bytes between steps, of the engine that `train` returns, per parameter that this rank holds."""
    engines: list[Any] = []
    with patient_collectives():
        ledger = allocator_ledger(lambda: engines.append(train()))
    parameters = sum(parameter.numel() for parameter in engines[0].module.parameters())
    return ledger.peak / parameters, ledger.total / parameters


def measure(dp: int) -> dict[str, tuple[float, float, float]]:
    """Peak bytes, bytes between steps and gradient bytes received per step, per parameter, by side; of this rank."""
    found = {}
    for side in (OURS, ADAPTED, STOCK):
        run = partial(train, side, ParallelConfig(dp=dp))
        run()  # initializes everything that is loaded at first use
        seen: list[Collective] = []
        of_engine = [] if side == OURS else [deepspeed.runtime.engine]
        with recorded_collectives(seen, *of_engine):
            peak, kept = memory_of(run)
        reductions = [c for c in seen if c.name in ("all_reduce", "reduce_scatter_tensor") and c.numel > 1]
        received = sum(collective.received_bytes for collective in reductions) / STEPS
        found[side] = (peak, kept, received / parameter_count(MODEL))
    return found


def verdicts_of(dp: int, sides: dict[str, dict[str, float]]) -> list[Verdict]:
    """Compares bytes per parameter with DeepSpeed's, at the peak and between steps."""
    return [
        Verdict(
            ROW, f"memory a parameter, {what}, dp {dp}", f"{sides[OURS][what]:.2f} bytes", peer,
            f"{sides[peer][what]:.2f} bytes", sides[peer][what] / sides[OURS][what], 1.0 if peer == STOCK else None,
        )
        for what in ("peak", "between steps")
        for peer in (ADAPTED, STOCK)
    ]  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, nargs="*", default=[1, 2, 4], help="data-parallel sizes")
    add_results_option(parser)
    arguments = parser.parse_args()
    print(f"{parameter_count(MODEL):,} parameters, bf16, ZeRO-1; bytes per parameter on the fullest rank")
    print("| dp | engine | peak | between steps | gradients received per step |\n|---|---|---|---|---|")
    for dp in arguments.dp:
        by_rank = run_ranks(measure, dp, dp)
        sides: dict[str, dict[str, float]] = {}
        for name in by_rank[0]:
            peak, kept, sent = (max(found[name][index] for found in by_rank) for index in range(3))
            print(f"| {dp} | {name} | {peak:.2f} | {kept:.2f} | {sent:.2f} |")
            sides[name] = {"peak": peak, "between steps": kept, "gradients received": sent}
        record(arguments.append, "optimizer_memory", {"dp": dp, "sides": sides}, verdicts_of(dp, sides))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
