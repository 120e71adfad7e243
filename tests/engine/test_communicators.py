"""Communicators that training opens: those of the memory plan, none of DeepSpeed's own.

NCCL opens a communicator at the first use of a process group, and of every pair of ranks in a group with p2p. Each
takes hundreds of MiB on a GPU. On CPUs the uses are recorded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megads.parallel.config import ContextParallelKind, ParallelConfig, place_of
from megads.tools.plan.memory import communicators
from megads.tools.verify.layout import rank_batches
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with

pytestmark = pytest.mark.distributed

DEFAULT = "0"
"""Name of the group of all ranks."""
P2P = ("send", "recv_", "recv_any_source_")
# A rank in the middle of tp2 pp4 dp2 opened 12 communicators where the plan had 8.
CASES = {
    "tp2pp2dp2": LAYOUTS["tp2pp2dp2"],
    "pp3dp2": ParallelConfig(pp=3, dp=2),
    "cp2dp2": LAYOUTS["cp2dp2"],
    "cp2dp2, ulysses": replace(LAYOUTS["cp2dp2"], cp_kind=ContextParallelKind.ulysses),
    "cp2dp2, ring": replace(LAYOUTS["cp2dp2"], cp_kind=ContextParallelKind.ring),
    "cp4, heads and keys": ParallelConfig(cp=4, cp_ulysses=2),
    "zero3tp2dp2": LAYOUTS["zero3tp2dp2"],
    "hierarchical": LAYOUTS["hierarchical"],
}


class Uses(TorchDispatchMode):
    """Records the process groups of all collectives and p2p transfers: (kind, name, ranks)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            boxed = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
            group = dist.ProcessGroup.unbox(boxed)
            kind = "p2p" if name in P2P else "collective"
            self.found.add((kind, group.group_name, tuple(dist.get_process_group_ranks(group))))
        return func(*args, **(kwargs or {}))


def used_groups(scenario: Scenario, parallel: ParallelConfig) -> set[tuple[str, str, tuple[int, ...]]]:
    uses = Uses()
    with uses:
        engine = build_engine(scenario, parallel)
        engine.step(rank_batches(scenario, 0, engine.grid), scenario.lr)
        engine.evaluate(rank_batches(scenario, 1, engine.grid))
    return uses.found


@pytest.mark.quick("pp3dp2", "zero3tp2dp2")
@pytest.mark.parametrize("case", CASES)
def test_only_planned_communicators_are_opened(case: str) -> None:
    """Catches a group that DeepSpeed opens for a broadcast or a number that nobody reads, p2p in the group of all
    ranks, two groups of the same ranks, and a plan that omits a group."""
    parallel, scenario = CASES[case], scenario_with(steps=1, micro_batch_size=1)
    tied = scenario.model.tie_embeddings
    for rank, found in enumerate(run_ranks(used_groups, parallel.world_size, scenario, parallel)):
        assert not any(kind == "p2p" and name == DEFAULT for kind, name, _ in found), sorted(found)
        planned = communicators(parallel, place_of(rank, parallel).pp, tied=tied)
        sizes = Counter(one.ranks for one in planned if not one.name.startswith("p2p"))
        assert Counter(len(ranks) for kind, _, ranks in found if kind == "collective") == sizes, sorted(found)
