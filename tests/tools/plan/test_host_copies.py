"""Offloaded activations and chunked MLPs in the plan: memory of device and host, and the time of the copies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megads.cli.main import run
from megads.config.root import RootConfig
from megads.config.train import Precision, TrainConfig
from megads.model.config import ModelConfig
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import OpsConfig
from megads.parallel.config import Offload, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.tools.plan.activations import block_ops, stage_ops
from megads.tools.plan.devices import find_device
from megads.tools.plan.host_copies import copies_json, copies_line
from megads.tools.plan.memory import StageMemory, one_pass
from megads.tools.plan.memory_timeline import (
    MainGradMemory,
    Op,
    backward_moments,
    forward_moments,
    host_bytes,
    kept_bytes,
    numbered,
)
from megads.tools.plan.output import step_compute
from megads.tools.plan.run_plan import plan_of, step_model_of, step_of, step_workload

MODEL = ModelConfig(num_layers=8, hidden_size=1024, num_heads=8, vocab_size=512, attention=AttentionKind.flex)
NOTHING = MainGradMemory(allocated=lambda _: 0)
AWAY = Offload.activations


def config_of(parallel: ParallelConfig, **ops: Any) -> RootConfig:
    train = TrainConfig(seq_len=8192, global_batch_size=16, micro_batch_size=1, precision=Precision.bf16)
    return RootConfig(model=MODEL, parallel=parallel, train=train, ops=OpsConfig(**ops))


def stages_of(parallel: ParallelConfig) -> tuple[StageMemory, ...]:
    return plan_of(config_of(parallel), cuda=True).stages


def block_bytes(parallel: ParallelConfig) -> int:
    sizes = one_pass(MODEL, parallel, step_workload(config_of(parallel), cuda=True))
    return kept_bytes(block_ops(sizes, parallel.recompute))


@pytest.mark.parametrize("mode", [Recompute.none, Recompute.full])
def test_two_blocks_stay_on_the_device_and_the_others_are_on_the_host(mode: Recompute) -> None:
    """Catches bytes that are counted in both memories or in none, and a last block that leaves."""
    plain, moved = (stages_of(ParallelConfig(recompute=mode, offload=offload))[0] for offload in Offload)
    one = block_bytes(ParallelConfig(recompute=mode))
    assert plain.host_activations == 0
    assert 0.99 * 7 * one <= moved.host_activations <= 7 * one
    freed = plain.fullest.activations - moved.fullest.activations
    assert 0.99 * 5 * one <= freed <= 7 * one


def test_moments_of_offloaded_blocks() -> None:
    """Catches a block that is freed while it is copied, or that comes back too late or too early."""
    ops = [op for block in range(4) for op in numbered([Op("", kept=2**20)], block, leaves=block < 3, stays=0)]
    ops = [Op("before", kept=5), *ops, Op("after", kept=7)]
    mib = 2**20
    ahead = [moment.activations for moment in forward_moments(ops, 0, NOTHING)]
    # While a block runs, the one before it is copied; after the last block, which stays, all have left.
    assert ahead == [5, 5 + mib, 5 + 2 * mib, 5 + 2 * mib, 5 + 2 * mib, 12 + mib]
    back = [moment.activations for moment in backward_moments(ops, 0, NOTHING)]
    assert back == [12 + mib, 5 + 2 * mib, 5 + 2 * mib, 5 + 2 * mib, 5 + mib, 5]
    assert host_bytes(ops) == 3 * mib


def test_small_tensors_and_received_inputs_stay() -> None:
    """Catches a plan that moves what the engine keeps on the device."""
    assert host_bytes(numbered([Op("", kept=2**20 - 1), Op("", kept=2**20)], 0, leaves=True, stays=0)) == 2**20
    assert host_bytes(numbered([Op("", kept=3 * 2**20)], 0, leaves=True, stays=2**20)) == 2 * 2**20
    sizes = one_pass(MODEL, ParallelConfig(), step_workload(config_of(ParallelConfig()), cuda=True))
    layers = {f"blocks.{index}": Recompute.full for index in range(2, 4)}
    inner = stage_ops(sizes, layers, first=False, last=False, leaving=set(layers))
    assert host_bytes(inner) == sizes.hidden  # of the second block


def test_the_host_holds_the_micro_batches_in_flight() -> None:
    """Catches a pipeline whose first stage is planned with the host memory of one micro-batch."""
    parallel = ParallelConfig(pp=4, recompute=Recompute.full, offload=AWAY)
    first, *_, last = stages_of(parallel)
    one = block_bytes(ParallelConfig(recompute=Recompute.full))
    # The engine holds the inputs of later stages; the last block, beside the loss, does not leave.
    assert first.host_activations == 4 * len([n for n in first.layers if n.startswith("blocks.")]) * one
    assert last.host_activations == 0 and last.in_flight == 1
    plain = stages_of(replace(parallel, offload=Offload.none))[0]
    assert first.device_peak < plain.device_peak
    split = stages_of(replace(parallel, schedule=ScheduleName.zb_h1))[0]
    assert split.host_activations >= first.host_activations


def test_on_a_cpu_offloading_saves_nothing() -> None:
    """Catches a run that is accepted although its activations are in the same memory."""
    plain, moved = (plan_of(config_of(ParallelConfig(offload=offload)), cuda=False) for offload in Offload)
    assert moved.largest.peak >= plain.largest.peak


def test_chunks_need_less_memory_and_repeat_the_mlp() -> None:
    """Catches a chunk that is planned with the features of all tokens, or whose second forward pass is free."""
    parallel, device = ParallelConfig(recompute=Recompute.full), find_device("h100")
    whole, chunked = (config_of(parallel, mlp_chunk=chunk) for chunk in (None, 1024))
    peaks = [plan_of(one, cuda=True).largest.peak for one in (whole, chunked)]
    features = 8192 * MODEL.ffn_width * 2
    assert peaks[0] - peaks[1] > features
    assert plan_of(config_of(parallel, mlp_chunk=8192), cuda=True) == plan_of(whole, cuda=True)
    flops = [step_compute(one, plan_of(one, cuda=True))["hardware_flops_per_token"] for one in (whole, chunked)]
    assert flops[1] - flops[0] == 8 * 2 * 2 * MODEL.ffn_width * MODEL.hidden_size
    model = step_model_of(chunked, device)
    again = 8 * 16 * model.operators.mlp_forward
    more = step_of(chunked, device).parts["recompute"] - step_of(whole, device).parts["recompute"]
    assert more == pytest.approx(again)


def test_copies_are_hidden_or_exposed() -> None:
    """Catches a plan that hides copies behind the whole step, or exposes those that a block hides."""
    fast = find_device("h100")
    slow = replace(fast, host_gigabytes_per_s=fast.host_gigabytes_per_s / 100)
    config = config_of(ParallelConfig(recompute=Recompute.full, offload=AWAY))
    hidden, exposed = (step_model_of(config, device).copies() for device in (fast, slow))
    assert len(hidden) == 7 and {copy.size for copy in hidden} == {8192 * 1024 * 2}
    assert all(copy.is_hidden for copy in hidden) and "hidden by the next block" in copies_line(hidden, fast)
    assert "offload" not in step_of(config, fast).parts
    one = exposed[0]
    assert one.seconds == pytest.approx(one.size / (slow.host_gigabytes_per_s * 1e9))
    assert one.exposed == pytest.approx((one.seconds - one.forward, one.seconds - one.backward))
    waits = 16 * sum(sum(copy.exposed) for copy in exposed)
    assert step_of(config, slow).parts["offload"] == pytest.approx(waits)
    assert "the device waits" in copies_line(exposed, slow)
    assert not copies_json(exposed)["hidden"] and copies_json(hidden)["hidden"]
    assert copies_line([], fast) == ""


def test_the_verb_prints_host_memory_and_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches host memory and copies that are planned but not shown."""
    overrides = ["model=bloom_1b1", "train.seq_len=8192", "train.global_batch_size=8", "parallel.recompute=full"]
    overrides += ["parallel.offload=activations", "device=h100"]
    assert run(["plan", *overrides]) == 0
    shown = capsys.readouterr().out
    assert "of host memory a rank for offloaded activations" in shown and "offloading moves" in shown
    assert run(["plan", *overrides, "json=true"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["offload"]["moved_bytes"] == printed["stages"][0]["host_activations"] > 0
