"""What a check for flipped bits costs beside a step: python scripts/bench/replica_check.py

One process trains a model of 19 million parameters; the check digests its weights and optimizer state twice, as
resilience.check_replicas_every_steps has it, and compares weights with their masters. Medians of five.
"""

from __future__ import annotations

import statistics
import time

import torch.distributed as dist

from megads.engine.interface import TrainEngine
from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig
from megads.resilience.replicas import differing, digests
from megads.tools.verify.layout import build_engine, rank_batches
from megads.tools.verify.scenario import Scenario

MODEL = ModelConfig(num_layers=4, hidden_size=512, num_heads=8, vocab_size=12_000, max_seq_len=256)


def check(engine: TrainEngine) -> None:
    """Both halves of a check."""
    for _ in range(2):
        replicas = engine.replicas()
        found = digests(replicas)
    differing(replicas, found, 0)
    assert not engine.stale_weights()


def main() -> None:
    """Prints the median times and their ratio."""
    scenario = Scenario(model=MODEL, seq_len=256, precision="bfloat16", global_batch_size=4, micro_batch_size=2)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    engine = build_engine(scenario, ParallelConfig())
    steps, checks = [], []
    for number in range(5):
        begin = time.perf_counter()
        engine.step(rank_batches(scenario, number, engine.grid), scenario.lr)
        steps.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        check(engine)
        checks.append(time.perf_counter() - begin)
    step_s, check_s = statistics.median(steps), statistics.median(checks)
    size = sum(replica.tensor.nbytes for replica in engine.replicas())
    share = check_s / step_s
    print(f"step of {4 * 256:,} tokens {step_s:.3f} s; check of {size / 1e6:.0f} MB {check_s:.4f} s: {share:.2%}")
    print(f"every 100 steps: {share / 100:.4%} of the training")


if __name__ == "__main__":
    main()
