"""Sequence parallelism beyond the parity matrix: dropout and positions, and communication volume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megads.model.config import Position
from megads.parallel.config import ParallelConfig
from tests import parity
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with, step_batches, train_layout, train_reference

pytestmark = pytest.mark.distributed

# Three ranks share 12 tokens.
EVERYTHING = scenario_with(
    model=replace(
        parity.MODEL, position=Position.learned, tie_embeddings=False, hidden_dropout=0.2, attention_dropout=0.2
    ),
    seq_len=12,
    steps=3,
    masked=True,
)


def test_sequence_parallelism_equals_the_unsharded_model() -> None:
    """Catches dropout masks that differ from those of the unsharded sequence, positions that start at 0 on every shard,
    gradients of learned positions or norms that are not all-reduced, and wrong validation."""
    whole = train_reference(EVERYTHING)
    sharded = train_layout(EVERYTHING, ParallelConfig(tp=3, sequence_parallel=True))
    checks = (parity.check_initial_weights, parity.check_first_step, parity.check_curve, parity.check_validation)
    assert [fault for check in checks for fault in check(sharded, whole)] == []
    assert parity.check_replicas(sharded, whole) == []


def _sent_bytes(scenario: Scenario, name: str) -> tuple[int, set[tuple[int, ...]]]:
    """Bytes and shapes of this rank's sends to other stages in a step."""
    parallel = LAYOUTS[name]
    engine = build_engine(scenario, parallel)
    original, total, shapes = dist.isend, 0, set()

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        total += tensor.nbytes
        shapes.add(tuple(tensor.shape))
        return original(tensor, *args, **kwargs)

    dist.isend = counting
    engine.step(step_batches(scenario, 0, engine.grid.dp.rank, parallel.dp), scenario.lr)
    return total, shapes


@pytest.mark.slow
def test_pipeline_messages_shrink_by_tp() -> None:
    """Catches stages that all-gather a sequence only to send it, and sends of any other shape."""
    scenario = scenario_with()
    micro_batches, width = scenario.global_batch_size // scenario.micro_batch_size, scenario.model.hidden_size
    for name, tokens in (("tp2pp2", scenario.seq_len), ("tp2pp2sp", scenario.seq_len // 2)):
        shape = (scenario.micro_batch_size, tokens, width)
        for total, shapes in run_ranks(_sent_bytes, 4, scenario, name):
            assert shapes == {shape}
            assert total == micro_batches * shape[0] * shape[1] * shape[2] * scenario.dtype.itemsize


# Bytes that a rank of n sends in a ring algorithm, in units of (n - 1) / n of the full tensor.
RING = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


def _collectives_of_hidden_states(scenario: Scenario, name: str) -> Counter[str]:
    """Counts the collectives of a step that carry a hidden state, [b, s, h] when it is full."""
    engine = build_engine(scenario, LAYOUTS[name])
    size = scenario.micro_batch_size * scenario.seq_len * scenario.model.hidden_size
    calls: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # The larger of output and input is the full tensor.
            calls[name] += max((x.numel() for x in args if isinstance(x, Tensor)), default=0) == size
            return original(*args, **kwargs)

        return call

    for collective in RING:
        setattr(dist, collective, counting(collective, getattr(dist, collective)))
    engine.step(step_batches(scenario, 0), scenario.lr)
    return calls


@pytest.mark.parametrize(("parallel_block", "regions_a_block"), [(False, 2), (True, 1)])
def test_a_step_has_exactly_the_expected_collectives(parallel_block: bool, regions_a_block: int) -> None:
    """Catches an unnecessary collective: a region needs an all-reduce per direction; with sequence parallelism an
    all-gather and a reduce-scatter, and one more all-gather in the backward pass. A parallel block is one region."""
    scenario = scenario_with(global_batch_size=2, model=replace(parity.MODEL, parallel_block=parallel_block))
    regions = regions_a_block * scenario.model.num_layers + 1
    expected = {
        "tp2": {"all_reduce": 2 * regions},
        "tp2sp": {"all_gather_into_tensor": 3 * regions, "reduce_scatter_tensor": 2 * regions},
    }
    units = {}
    for name, counts in expected.items():
        for calls in run_ranks(_collectives_of_hidden_states, 2, scenario, name):
            assert +calls == counts
        units[name] = sum(RING[collective] * count for collective, count in counts.items())
    assert units["tp2sp"] / units["tp2"] == 1.25
