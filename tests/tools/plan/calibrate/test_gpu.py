"""`megads calibrate` for GPUs, as far as a CPU can run it, with small shapes."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from megads.engine import build_train_engine
from megads.model.config import Position
from megads.model.model_size import parameter_count
from megads.ops.config import OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig, Recompute
from megads.tools.plan.calibrate import passes
from megads.tools.plan.calibrate.measure import Gpu, measured_gpu
from megads.tools.plan.calibrate.operators import GPU_SHAPES, Bench
from megads.tools.plan.calibrate.passes import (
    GPU_TRIALS,
    LAUNCH_TRIALS,
    PLAIN,
    Trial,
    TrialTimes,
    launches_again,
    pass_costs,
    time_trials,
)
from megads.tools.plan.devices import DEVICES, PassCosts, built_in_device_of, device_from, read_device
from megads.tools.plan.operators import RankOperators
from megads.tools.plan.step_estimate import StepModel
from megads.tools.plan.workload import Workload
from tests.distributed import run_ranks

SHAPES = replace(
    GPU_SHAPES,
    tokens=(32, 64),
    features=((32, 32), (64, 32), (32, 64)),
    further=((64, 128, 32),),
    cold_bytes=2**16,
    lengths=(32, 64),
    attended=64,
    heads=2,
    head_dim=16,
    copied_bytes=2**16,
)
TRIALS = tuple(replace(trial, layers=1, hidden=64, vocabulary=64, seq_len=32, samples=2) for trial in GPU_TRIALS[2:5])


def _measure(folder: str, gpu: str) -> None:
    kernels = load(OpsConfig(), lambda _message: None, cuda=False)
    bench = Bench(torch.device("cpu"), torch.bfloat16, kernels, 0.001, SHAPES)
    found = measured_gpu(bench, Gpu(gpu, 132, 2**37), {}, TRIALS, LAUNCH_TRIALS[:2])
    if dist.get_rank() == 0:
        (Path(folder) / f"{gpu.split()[1]}.yaml").write_text(yaml.safe_dump(found), encoding="utf-8")


@pytest.mark.distributed
def test_a_gpus_file_is_planned_with(tmp_path: Path) -> None:
    """Catches attributes that plan does not accept, the GPU's own copy rate used as link rate where its node is known,
    and the host's thread count used as the GPU's number of processors."""
    for gpu in ("NVIDIA H200", "NVIDIA T4"):
        run_ranks(_measure, 1, str(tmp_path), gpu)
    known, other = (read_device(tmp_path / name) for name in ("H200.yaml", "T4.yaml"))
    h200 = DEVICES["h200"]
    for name in ("ranks_per_node", "node_gigabytes_per_s", "nic_gigabytes_per_s", "link_efficiency", "nic_latency_us"):
        assert getattr(known, name) == getattr(h200, name)
    assert other.node_gigabytes_per_s == other.nic_gigabytes_per_s and other.ranks_per_node == 1
    assert known.processors == 132 and known.memory_gib == 128.0 and not known.on_cpu
    assert known.peak_tflops == 989.0 and other.peak_tflops == max(rate for *_, rate in other.products)
    assert [row[0] for row in known.attention_rates] == [32, 64] == [row[0] for row in known.alibi_attention_rates]
    assert len(known.products) == len(known.weight_products) == 7
    for trial in TRIALS:
        assert StepModel(trial.model, ParallelConfig(), Workload(32, 2, 3), known).estimate().step_time_s > 0


def _alive() -> int:
    """Number of engines that are still alive after the last trial."""
    kernels = load(OpsConfig(), lambda _message: None, cuda=False)
    bench = Bench(torch.device("cpu"), torch.bfloat16, kernels, 0.001, SHAPES)
    built: list[Any] = []

    def build(spec: Any) -> Any:
        engine = build_train_engine(spec)
        built.append(weakref.ref(engine.optimizer))  # type: ignore[attr-defined]
        return engine

    passes.build_train_engine = build  # type: ignore[attr-defined]
    time_trials(TRIALS, bench, {PLAIN: ParallelConfig(zero_stage=0)}, rounds=2)
    assert len(built) == 2 * len(TRIALS)
    return sum(engine() is not None for engine in built)


@pytest.mark.distributed
def test_an_engine_is_gone_before_the_next() -> None:
    """Catches engines that are never freed, such as by gc.freeze, which hides their reference cycles: calibrating two
    ranks took 17 GB."""
    assert run_ranks(_alive, 1) == [1]


def _passes(trial: Trial, device: Any, launch_us: float) -> TrialTimes:
    """The times of a trial on a simulated GPU with these costs."""
    operators = RankOperators(trial.model, ParallelConfig(), trial.workload(2), device)
    block, head = operators.block(Recompute.none), operators.head()
    sides = []
    for parts in (("forward",), ("backward_input", "backward_weight")):
        of_block, of_head = (sum(sum(getattr(of, part).values()) for part in parts) for of in (block, head))
        sides.append(max(trial.layers * launch_us * 1e-6, trial.layers * of_block + of_head))
    parameters = parameter_count(trial.model)
    return TrialTimes(trial, *sides, optimizer=1e-4 + parameters * 9e-12, rest=1e-4, step=1.0, parameters=parameters)


def test_costs_of_a_gpu_are_found_again() -> None:
    """Catches launch time, which a busy GPU hides, in the costs of all blocks, and elementwise rates that include the
    time of other operations."""
    costs = PassCosts(block_us=0.0, pass_us=0.0, gigabytes_per_s=3000.0, logit_ns=0.004)
    rates = ((1024, 300.0, 200.0), (8192, 400.0, 300.0))
    alibi = ((1024, 100.0, 100.0), (8192, 200.0, 100.0))
    device = replace(DEVICES["h200"], attention_rates=rates, alibi_attention_rates=alibi)
    device = replace(device, products=((8192, 2048, 2048, 600.0),), weight_products=((2048, 2048, 8192, 500.0),))
    measured = replace(device, forward_costs=costs, backward_costs=costs)
    large = [_passes(trial, measured, 300.0) for trial in GPU_TRIALS]
    small = [_passes(trial, measured, 300.0) for trial in LAUNCH_TRIALS]
    found = device_from({"like": "h200"} | pass_costs(large, device, 2, small), "found")
    for side in (found.forward_costs, found.backward_costs):
        assert side is not None
        assert side.gigabytes_per_s == pytest.approx(3000.0, rel=0.02)
        assert side.logit_ns == pytest.approx(0.004, rel=0.05)
        assert side.block_us == pytest.approx(300.0, rel=0.01) and side.pass_us < 20.0
    assert found.update_ns == pytest.approx(0.009, rel=0.01)
    again = {
        Recompute.selective: replace(small[-1], backward=small[-1].backward + 9 * 40e-6),
        Recompute.full: replace(small[-1], backward=small[-1].backward + 9 * 430e-6),
    }
    assert launches_again(small[-1], again) == [
        ["recompute_selective", pytest.approx(40.0), 0.0],
        ["recompute_full", pytest.approx(130.0), 0.0],
    ]


def test_trials_keep_a_gpu_busy_and_fit_one() -> None:
    """Catches trials with a chunked loss, whose backward pass runs in the forward pass, and GEMMs or models that do not
    fit into the memory of small GPUs."""
    for trial in GPU_TRIALS:
        assert 2 * trial.tokens * trial.vocabulary <= 2**30
        assert 18 * parameter_count(trial.model) < 9 * 2**30
        assert 24 * trial.tokens * trial.hidden**2 / 1e15 > 4e-5 or trial.vocabulary > 200_000
    for tokens, outputs, inputs in GPU_SHAPES.products:
        assert 2 * (2 * tokens * outputs + tokens * inputs) + 2 * GPU_SHAPES.cold_bytes < 4 * 2**30


def test_attention_with_alibi_is_planned_by_its_own_rates() -> None:
    """Catches a plan of attention with ALiBi that uses the rates of the faster kernel without ALiBi."""
    device = replace(DEVICES["h200"], attention_rates=((1024, 400.0, 400.0),))
    both = replace(device, alibi_attention_rates=((1024, 200.0, 200.0),))
    bloom, gpt = GPU_TRIALS[0].model, replace(GPU_TRIALS[0].model, position=Position.learned)

    def attention_s(model: Any, of: Any) -> float:
        return StepModel(model, ParallelConfig(), Workload(2048, 4, 1), of).estimate().parts["attention"]

    assert attention_s(bloom, device) == attention_s(gpt, device) == attention_s(gpt, both)
    assert attention_s(bloom, both) == pytest.approx(2 * attention_s(gpt, both))


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-PCIE-40GB", None),
    ],
)
def test_gpus_are_known_by_the_drivers_names(gpu: str, name: str | None) -> None:
    """Catches the link rates of an SXM module used for a PCIe card or for a MIG slice."""
    assert built_in_device_of(gpu) == name
