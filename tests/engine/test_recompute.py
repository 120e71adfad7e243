"""Activation recomputation changes no bit: loss, norm, weights against the same layout without it, dropout on."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.engine.stage_pipeline import recomputed
from megads.model.attention import AttentionCore
from megads.model.gpt import Block
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.partition import block_modes
from tests.distributed import run_ranks
from tests.parity import MODEL, Scenario, build_engine, digest, evaluate, step_batches

pytestmark = pytest.mark.distributed

# Six micro-batches per replica: several are in flight in every pipeline.
SCENARIO = Scenario(
    model=replace(MODEL, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1), steps=2, global_batch_size=12
)
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
}
BLOCKS = {1: [4], 2: [2, 2]}
"""Blocks of each stage, by the number of stages: embedding and head count as a block."""
KINDS = ["selective", "full", "every second block", "per stage"]
PRECISIONS = ["float32", "bfloat16"]


def recomputing(parallel: ParallelConfig, kind: str) -> ParallelConfig:
    changes: dict[str, Any] = {
        "none": {},
        "selective": {"recompute": Recompute.selective},
        "full": {"recompute": Recompute.full},
        "every second block": {"recompute": Recompute.full, "recompute_interval": 2},
        "per stage": {"recompute": Recompute.full, "recompute_blocks": [1, 2][-parallel.pp :]},
    }[kind]
    return replace(parallel, **changes)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts forward calls of blocks and attention cores; recomputation wraps the forward found at stage build."""
    calls: Counter[str] = Counter()
    originals = {kind: kind.forward for kind in (Block, AttentionCore)}

    def counting(name: str, original: Any) -> Any:
        def forward(self: Any, *args: Any) -> Any:
            calls[name] += 1
            return original(self, *args)

        return forward

    for kind, original in originals.items():
        kind.forward = counting(kind.__name__, original)
    try:
        yield calls
    finally:
        for kind, original in originals.items():
            kind.forward = original


def train(scenario: Scenario, parallel: ParallelConfig) -> tuple[dict[str, Any], dict[str, int]]:
    """This rank's results, which must be bitwise equal, and its call counts in validation and in the steps."""
    with counted_calls() as calls:
        engine = build_engine(scenario, parallel)
        validation = evaluate(engine, scenario)
        counts = {f"validation {name}": count for name, count in calls.items()}
        calls.clear()
        steps = [
            engine.step(step_batches(scenario, step, engine.grid.dp.rank, parallel.dp), scenario.lr)
            for step in range(scenario.steps)
        ]
        shards = {f"{s.key} {s.offset}": digest(s.tensor) for s in engine.named_shards(owned=False)}
    results = {"steps": [(s.loss, s.grad_norm) for s in steps], "validation": validation, "shards": shards}
    return results, counts | dict(calls)


def train_all(cases: list[tuple[Scenario, ParallelConfig]]) -> list[Any]:
    return [train(scenario, parallel) for scenario, parallel in cases]


@functools.cache
def runs(layout: str) -> dict[tuple[str, str], list[Any]]:
    """Results of every rank, by precision and kind; one start of ranks for all."""
    keys = [(precision, kind) for precision in PRECISIONS for kind in ("none", *KINDS)]
    cases = [(replace(SCENARIO, precision=precision), recomputing(LAYOUTS[layout], kind)) for precision, kind in keys]
    by_rank = run_ranks(train_all, LAYOUTS[layout].world_size, cases)
    return dict(zip(keys, (list(of_case) for of_case in zip(*by_rank, strict=True)), strict=True))


@pytest.mark.quick("pp2-float32-full", "pp2-bfloat16-selective", "pp2-bfloat16-per stage")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("single", "tp2")), "pp2"])
def test_recomputation_changes_no_bit(layout: str, precision: str, kind: str) -> None:
    """Catches recomputation with another micro-batch's samples or dropout mask, and collectives omitted or repeated."""
    plain, again = runs(layout)[precision, "none"], runs(layout)[precision, kind]
    for (results, _), (expected, _) in zip(again, plain, strict=True):
        assert results == expected
    assert plain[0][0]["steps"][0] != plain[0][0]["steps"][1]


@pytest.mark.quick("pp2-every second block")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.slow), "pp2"])
def test_exactly_the_chosen_blocks_run_twice(layout: str, kind: str) -> None:
    """Catches recomputation that never happens, in the wrong stage or number of blocks, or in validation."""
    parallel = recomputing(LAYOUTS[layout], kind)
    passes = SCENARIO.steps * SCENARIO.global_batch_size // SCENARIO.micro_batch_size
    plain, again = runs(layout)["float32", "none"], runs(layout)["float32", kind]
    for stage, num_blocks in enumerate(BLOCKS[parallel.pp]):
        modes = block_modes(parallel, stage, num_blocks)
        assert plain[stage][1]["Block"] == plain[stage][1]["AttentionCore"] == passes * num_blocks
        expected = Counter(plain[stage][1])
        expected["Block"] += passes * modes.count(Recompute.full)
        expected["AttentionCore"] += passes * (num_blocks - modes.count(Recompute.none))
        assert again[stage][1] == expected and expected["validation Block"] > 0


def test_a_recomputed_function_runs_again_for_backward_only() -> None:
    """Catches a function whose activations are saved, or that is recomputed in validation or with later inputs."""
    calls = []

    def scaled(x: Tensor, factor: float) -> Tensor:
        calls.append(factor)
        return (x * factor).exp()

    twice = recomputed(scaled)
    with torch.no_grad():
        twice(torch.ones(2, requires_grad=True), 1.0)
    assert calls == [1.0]
    inputs = [torch.full((2,), float(i), requires_grad=True) for i in (1, 2)]
    outputs = [twice(x, x[0].item()) for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        y.sum().backward()
        assert torch.equal(x.grad, x[0].item() * y)
    assert calls == [1.0, 1.0, 2.0, 1.0, 2.0]
