#!/usr/bin/env python3
"""Benchmark 10: step time over the ideal of megads' schedules and engines, stock DeepSpeed and torch's pipelining.

All train the same untied model in fp32 on gloo ranks of this CPU, one thread each, in one process group, alternating;
all times include clipping and AdamW. Every block sleeps --wait-ms in the forward pass and in each part of its backward
pass instead of computing. The CPU is then as idle as with an accelerator, so that more ranks than cores, or other work
on the machine, do not affect the measurement of the schedule and its overhead. The ideal is 1F1B's formula,
(m + p - 1) / m times the compute time of a rank for m micro-batches: no p2p communication, no optimizer, no waiting
except the bubble. Run from the repository: python -m scripts.bench.pipeline --wait-ms 5 --pp 2 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from megads.batch import BatchInfo
from megads.model.config import ModelConfig
from megads.model.gpt import Block, layer_specs
from megads.parallel.config import EngineKind, ParallelConfig, Partition
from megads.parallel.partition import stage_bounds
from megads.parallel.schedule import ScheduleName
from megads.parallel.weight_gradients import SplitLayer, WeightGradient, give
from scripts.bench.results import Verdict, add_results_option, record
from tests import distributed
from tests.parity import Scenario, build_engine, step_batches
from tests.stock_deepspeed import build_stock

MODEL = ModelConfig(num_layers=8, hidden_size=64, num_heads=2, vocab_size=64, tie_embeddings=False)
BATCH, SEQ_LEN = 2, 64
CLIP = 1.0
ROW = 10
ADAPTED = "megads 1f1b, engine=deepspeed"
NOT_SLOWER = 0.97
"""Medians that differ by less than this count as equal: repeated runs differ as much."""
Step = Callable[[], None]


def scenario_of(micro_batches: int, engine: EngineKind = EngineKind.native) -> Scenario:
    """A scenario with this many micro-batches of 128 tokens."""
    return Scenario(
        model=MODEL, hot=False, seq_len=SEQ_LEN, micro_batch_size=BATCH, global_batch_size=BATCH * micro_batches,
        clip_grad=CLIP, engine=engine,
    )  # fmt: skip


def layout_of(schedule: str, ranks: int) -> ParallelConfig:
    """The same blocks on every stage, because embedding and head are small here."""
    return ParallelConfig(pp=ranks, schedule=ScheduleName(schedule), partition=Partition.uniform)


class SleepingWgrad(WeightGradient):
    """A weight gradient of zeros, whose GEMM sleeps.

    Args:
        weight: the weight.
        wait_s: seconds to sleep.
    """

    def __init__(self, weight: Tensor, wait_s: float) -> None:
        self._weight, self._wait_s = weight, wait_s

    @property
    def straight(self) -> bool:
        """See WeightGradient; autograd accumulates the gradient unless it is deferred."""
        return False

    def compute(self) -> Tensor:
        """See WeightGradient."""
        time.sleep(self._wait_s)
        return torch.zeros_like(self._weight)

    def add_to(self, main_grad_oi: Tensor, first: bool) -> None:
        """See WeightGradient."""
        gradient = self.compute()
        if first:
            main_grad_oi.copy_(gradient)
        else:
            main_grad_oi += gradient


class WaitForAll(torch.autograd.Function):
    """Waits as long as a block of megads' engine; the weight gradient can be deferred."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: nn.Linear | SplitLayer, weight: Tensor, wait_s: float) -> Tensor:
        ctx.layer, ctx.wait_s = layer, wait_s
        time.sleep(wait_s)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        time.sleep(ctx.wait_s)
        weight = ctx.layer.weight
        return grad.clone(), None, give(ctx.layer.weight_gradients, weight, SleepingWgrad(weight, ctx.wait_s)), None


class WaitForInput(torch.autograd.Function):
    """Forward, and the input gradient in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        time.sleep(wait_s)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.wait_s)
        return grad.clone(), None


class WaitForWeight(torch.autograd.Function):
    """The weight gradient, which torch's zero-bubble schedules run later."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wait_s: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.wait_s = wait_s
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        time.sleep(ctx.wait_s)
        return None, torch.zeros_like(ctx.saved_tensors[0]), None


def wait_in_blocks(wait_s: float) -> None:
    """Makes all blocks wait instead of compute, in this process."""

    def forward(self: Block, hidden: Tensor, _info: BatchInfo) -> Tensor:
        layer: Any = self.mlp.down
        if isinstance(layer, SplitLayer):
            return WaitForAll.apply(hidden, layer, layer.weight, wait_s)
        return WaitForInput.apply(hidden, wait_s) + WaitForWeight.apply(hidden.detach(), layer.weight, wait_s)

    Block.forward = forward  # type: ignore[assignment, method-assign]


class Chunk(nn.Module):
    """Stages of the model in the form that torch's pipelining calls: with one argument."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.info = BatchInfo(sample_ids=torch.arange(BATCH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps tokens or [b, s, h] to [b, s, h] or logits."""
        for stage in self.stages:
            hidden = stage(hidden, self.info)
        return hidden


def cross_entropy(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Mean loss over all tokens."""
    return F.cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten())


def torch_step(name: str, layout: str, micro_batches: int) -> Step:
    """A step of torch.distributed.pipelining with clipping and AdamW; collective.

    Args:
        name: name of its schedule.
        layout: megads' schedule with the same placement of stages.
        micro_batches: micro-batches of a step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel = layout_of(layout, ranks)
    specs = layer_specs(MODEL, 0)
    bounds = stage_bounds([spec.cost for spec in specs], parallel)
    stages = []
    for number in parallel.placement.stages_of(rank):
        built = [spec.build() for spec in specs[bounds[number] : bounds[number + 1]]]
        for parameter in (p for module in built for p in module.parameters()):
            nn.init.normal_(parameter, 0.0, 0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
        chunk = Chunk(built)
        stages.append(pipelining.PipelineStage(chunk, number, parallel.num_stages, torch.device("cpu")))
    make = getattr(pipelining, name)
    schedule = make(stages if len(stages) > 1 else stages[0], micro_batches, loss_fn=cross_entropy)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    adamw = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    batches = step_batches(scenario_of(micro_batches), 0)
    tokens, labels = (torch.cat([getattr(b, key) for b in batches]) for key in ("tokens_bs", "labels_bs"))
    first, last = (rank == end for end in parallel.placement.ends)

    def step() -> None:
        schedule.step(*([tokens] if first else []), **({"target": labels, "losses": []} if last else {}))
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        adamw.step()
        adamw.zero_grad()

    return step


def our_step(schedule: str, micro_batches: int, kind: EngineKind, engines: dict[tuple[str, EngineKind], Any]) -> Step:
    """A step of one of megads' engines with the optimizer; collective.

    Args:
        schedule: name of its pipeline schedule.
        micro_batches: micro-batches of a step.
        kind: the engine.
        engines: engines built so far, which steps of any number of micro-batches share.
    """
    if (schedule, kind) not in engines:
        engines[schedule, kind] = build_engine(scenario_of(4, kind), layout_of(schedule, dist.get_world_size()))
    batches, engine = step_batches(scenario_of(micro_batches), 0), engines[schedule, kind]
    return lambda: engine.step(batches, 1e-4)


def stock_step(micro_batches: int) -> Step:
    """A step of DeepSpeed on stages with the same blocks; collective."""
    scenario = scenario_of(micro_batches)
    engine = build_stock(scenario, layout_of("1f1b", dist.get_world_size()))
    batches = step_batches(scenario, 0)
    return lambda: engine.train(batches)


PEERS = {
    "torch 1F1B": ("Schedule1F1B", "1f1b"),
    "torch interleaved 1F1B": ("ScheduleInterleaved1F1B", "interleaved"),
    "torch interleaved zero bubble": ("ScheduleInterleavedZeroBubble", "interleaved"),
    "torch ZB-V": ("ScheduleZBVZeroBubble", "zb_v"),
}


class Taken(NamedTuple):
    """Time of one step over the ideal, and CPU seconds of all threads of rank 0."""

    over_ideal: float
    cpu_s: float


Found = dict[tuple[str, int], list[Taken]]
"""Times of all sides' steps, by side and micro-batches."""


def measure(counts: list[int], rounds: int, wait_s: float) -> Found:
    """Runs the steps of all sides, one after the other, `rounds` times for each number of micro-batches; collective."""
    wait_in_blocks(wait_s)
    ranks, engines, found = dist.get_world_size(), dict[tuple[str, EngineKind], Any](), Found()
    for count in counts:
        sides = {f"megads {name}": our_step(name, count, EngineKind.native, engines) for name in ScheduleName}
        sides[ADAPTED] = our_step("1f1b", count, EngineKind.deepspeed, engines)
        sides["DeepSpeed 1F1B"] = stock_step(count)
        sides |= {name: torch_step(*peer, count) for name, peer in PEERS.items()}
        for step in sides.values():
            step()
        ideal_s = 3 * wait_s * MODEL.num_layers * (count + ranks - 1) / ranks
        for _ in range(rounds):
            for name, step in sides.items():
                dist.barrier()
                begin, busy = time.perf_counter(), time.process_time()
                step()
                busy = time.process_time() - busy
                dist.barrier()
                found.setdefault((name, count), []).append(Taken((time.perf_counter() - begin) / ideal_s, busy))
    return found


def report(found: Mapping[tuple[str, int], list[Taken]], ranks: int, counts: list[int]) -> None:
    """Prints the table of medians, with minima in brackets."""
    print(f"p = {ranks}: step time / ideal of 1F1B, median (least); load average {os.getloadavg()[0]:.1f}")
    heads = [*(f"m = {count}" for count in counts), f"CPU ms per micro-batch, m = {counts[-1]}"]
    print("| engine and schedule | " + " | ".join(heads) + " |")
    print("|---|" + "---|" * len(heads))
    for name in dict.fromkeys(name for name, _ in found):
        ratios = [[taken.over_ideal for taken in found[name, count]] for count in counts]
        cells = [f"{statistics.median(of_count):.2f} ({min(of_count):.2f})" for of_count in ratios]
        busy = statistics.median(taken.cpu_s for taken in found[name, counts[-1]])
        cells.append(f"{1e3 * busy / counts[-1]:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def verdicts_of(found: Mapping[tuple[str, int], list[Taken]], ranks: int, counts: list[int]) -> list[Verdict]:
    """Compares both engines' 1F1B with DeepSpeed's, and the other schedules with 1F1B; medians over the ideal."""
    pairs = (
        ("megads 1f1b", "DeepSpeed 1F1B", NOT_SLOWER), ("megads 1f1b", ADAPTED, NOT_SLOWER),
        (ADAPTED, "DeepSpeed 1F1B", NOT_SLOWER), ("megads interleaved", "megads 1f1b", 1.0),
        ("megads zb_h1", "megads 1f1b", 1.0),
    )  # fmt: skip

    def over(name: str, count: int) -> float:
        return statistics.median(taken.over_ideal for taken in found[name, count])

    return [
        Verdict(
            ROW, f"{ours}, p = {ranks}, m = {count}", f"{over(ours, count):.3f} x the ideal", peer,
            f"{over(peer, count):.3f} x the ideal", over(peer, count) / over(ours, count), target,
        )
        for ours, peer, target in pairs
        for count in counts
    ]  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="*", default=[2], help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait-ms", type=float, default=5.0, help="milliseconds for which blocks sleep")
    add_results_option(parser)
    arguments = parser.parse_args()
    distributed.TIMEOUT_S = 3600.0
    for ranks in arguments.pp:
        counts, wait_s = arguments.micro_batches, arguments.wait_ms / 1e3
        found = distributed.run_ranks(measure, ranks, counts, arguments.rounds, wait_s)[0]
        report(found, ranks, counts)
        sides = {f"{name}, m = {count}": [step._asdict() for step in steps] for (name, count), steps in found.items()}
        figures = {"pp": ranks, "wait_ms": arguments.wait_ms, "sides": sides}
        record(arguments.append, "pipeline", figures, verdicts_of(found, ranks, counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
