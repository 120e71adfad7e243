"""Tests that real ranks find and name flipped bits in weights and optimizer state, without false alarms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megads.tools.rerun.silent_corruption
from megads.errors import UnhealthyNode
from megads.monitor.hooks import LayerNormsHook, layer_names
from megads.runtime.hooks import Hook, TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from megads.tools.rerun.silent_corruption import BitFault, BitSymptom, ReplicaHook, bit_faults
from megads.tools.verify.layout import rank_batches
from tests.distributed import run_ranks
from tests.engine.test_moe import scenario as moe_scenario
from tests.engine.test_training import filling_from, state
from tests.parity import LAYOUTS, MODEL, ParallelConfig, build_engine, scenario_with
from tests.resilience.test_spikes import StepLoss, info

NORM = "blocks.1.input_norm.weight"
BIAS = "blocks.1.attention.qkv.bias"
EMBEDDING = "embedding.word.weight"
EXPERTS, STATE = "blocks.1.mlp.experts.down.weight", "blocks.1.mlp.router.expert_bias"
MORE = {
    "dp3": ParallelConfig(dp=3),
    "dp3, ZeRO-0": ParallelConfig(dp=3, zero_stage=0),
    "ep2dp2 of experts": ParallelConfig(dp=4, ep=2),
    "tp2ep2 of whole experts": ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True, expert_tp=False),
}
AFTER, BETWEEN = "after the update", "before the next"

# Layout, moment, key of the tensor, rank whose copy gets a flipped bit, and the expected message.
FLIPS = [
    ("dp3, ZeRO-0", AFTER, f"exp_avg/{BIAS}", 1, "of rank 1 differs from its copies on ranks 0, 1, 2"),
    ("dp3, ZeRO-0", AFTER, f"working_weight/{BIAS}", 2, "of rank 2 differs from its copies on ranks 0, 1, 2"),
    ("dp3", AFTER, f"working_weight/{EMBEDDING}", 0, "of rank 0 differs from its copies on ranks 0, 1, 2"),
    ("dp3", BETWEEN, f"exp_avg_sq/{EMBEDDING}", 1, "of rank 1 changed between two steps"),
    ("tp2dp2", AFTER, f"weight/{NORM}", None, "differs from its copies on ranks"),
    ("tp2dp2", BETWEEN, f"working_weight/{BIAS}", 3, "of rank 3 changed between two steps"),
    ("pp2dp2", AFTER, f"exp_avg/{EMBEDDING}", None, "differs from its copies on ranks"),
    ("zero2dp2", BETWEEN, f"working_weight/{BIAS}", 1, "of rank 1 changed between two steps"),
    ("zero3dp2", BETWEEN, f"exp_avg/{EMBEDDING}", 0, "of rank 0 changed between two steps"),
    ("single", BETWEEN, f"weight/{BIAS}", 0, "of rank 0 changed between two steps"),
    ("ep2dp2 of experts", AFTER, f"working_weight/{EXPERTS}", None, "differs from its copies on ranks 1, 3"),
    ("ep2dp2 of experts", AFTER, f"weight/{STATE}", 2, "of rank 2 differs from its copies on ranks 0, 1, 2, 3"),
    ("ep2dp2 of experts", BETWEEN, f"exp_avg/{EXPERTS}", 2, "of rank 2 changed between two steps"),
    ("tp2ep2 of whole experts", AFTER, f"working_weight/{EXPERTS}", None, "differs from its copies on ranks 1, 3"),
    ("tp2ep2 of whole experts", AFTER, f"weight/{STATE}", None, "differs from its copies on ranks"),
]
HEALTHY = ["cp2dp2", "pp2dp3", "tp2pp2dp2", "tp2dp2sp", "pp2dp2, ZeRO-0", "hierarchical", "pp2dp2 dualpipe_v"]


def watched_steps(layout: str, folder: Path, flips: list[tuple[str, str, int | None]]) -> list[str]:
    """Trains with a check at every step and one flip per step; returns the message of each flip."""
    megads.tools.rerun.silent_corruption.HEAD_START_S = 0.0
    model = moe_scenario("deepseek").model if "experts" in layout else MODEL
    scenario = scenario_with(precision="bfloat16", steps=1, global_batch_size=24, model=model)
    engine = build_engine(scenario, (LAYOUTS | MORE)[layout])
    hooks: list[Hook] = [
        ReplicaHook(engine, EventWriter(folder, enabled=engine.grid.rank == 0), 1),
        # Reads the gradients of every step, too.
        LayerNormsHook(engine, layer_names(scenario.model), 1, MetricsWriter(folder, enabled=False)),
    ]
    number, said = 0, []

    def start() -> None:
        for hook in hooks:
            hook.on_start(TrainState())

    def step(after: str = "", rank: int | None = None) -> None:
        nonlocal number
        number += 1
        engine.step(rank_batches(scenario, number, engine.grid), scenario.lr)
        if after:
            flip(after, rank)
        for hook in hooks:
            hook.on_step(info(StepLoss(number, number, 1.0, 1.0)))

    def flip(key: str, rank: int | None) -> None:
        """Flips one bit of the tensor's first element, on `rank` or else on the last rank that holds it."""
        held = [replica.tensor for replica in engine.replicas() if replica.key == key]
        holders = [at for at, has in enumerate(engine.grid.control.gather(bool(held), bool)) if has]
        assert rank is None or rank in holders, f"{key} is on ranks {holders}"
        if engine.grid.rank == (holders[-1] if rank is None else rank):
            words = held[0].detach().view(torch.int16 if held[0].element_size() == 2 else torch.int32)
            words[0] ^= 8

    start()
    for _ in range(2):
        step()
    for moment, key, rank in flips:
        saved, steps = state(engine), engine.optimizer_steps
        try:
            if moment == AFTER:
                step(after=key, rank=rank)
            else:
                flip(key, rank)
                step()
            said.append("nothing")
        except UnhealthyNode as error:
            said.append(str(error))
        engine.load_shards(filling_from(saved), steps)
        start()
        step()
    return said


@pytest.mark.quick("tp2dp2")
@pytest.mark.always("tp2dp2")
@pytest.mark.parametrize("layout", dict.fromkeys(layout for layout, *_ in FLIPS))
def test_a_flipped_bit_is_found_and_its_rank_and_tensor_named(layout: str, tmp_path: Path) -> None:
    """Catches a copy that is never compared, a tensor or rank that is wrongly named, a check that does not end all
    ranks, and healthy steps before and after that are reported as faulty."""
    wanted = [flip for flip in FLIPS if flip[0] == layout]
    world = (LAYOUTS | MORE)[layout].world_size
    everyone = run_ranks(watched_steps, world, layout, tmp_path, [flip[1:4] for flip in wanted])
    assert all(said == everyone[0] for said in everyone)
    for said, (_, _, key, rank, text) in zip(everyone[0], wanted, strict=True):
        assert f"{key} of rank" in said and text in said, (key, said)
        assert rank is None or f"{key} of rank {rank} " in said
    events = [event for event in read_json_lines(tmp_path / EVENTS_FILE) if event["event"] == "replicas_differ"]
    assert len(events) == len(wanted) and all(event["tensors"] and event["ranks"] for event in events)


@pytest.mark.slow
@pytest.mark.parametrize("layout", HEALTHY)
def test_healthy_ranks_are_not_accused(layout: str, tmp_path: Path) -> None:
    """Catches copies that differ without a fault in some layout, and a deadlock in groups that exclude some ranks."""
    assert (
        run_ranks(watched_steps, LAYOUTS[layout].world_size, layout, tmp_path, []) == [[]] * LAYOUTS[layout].world_size
    )


def test_the_minority_is_at_fault() -> None:
    """Catches blaming the majority for one bad rank, and blaming one of two copies at random."""
    line = (0, 2, 4)
    seen = [BitSymptom(rank, "exp_avg/x", line, "a" if rank != 2 else "b", "differs") for rank in line]
    assert bit_faults(seen) == [BitFault("exp_avg/x", (2,), line, "differs")]
    pair = [BitSymptom(rank, "weight/x", (0, 1), str(rank), "differs") for rank in (0, 1)]
    assert bit_faults(pair) == [BitFault("weight/x", (0, 1), (0, 1), "differs")]
    both = bit_faults([*pair, BitSymptom(1, "weight/x", (), "", "changed")])
    assert replace(both[1], what="") == BitFault("weight/x", (1,), (0, 1), "")
    assert "rank 0 or rank 1 differs" in str(bit_faults(pair)[0])
