"""One real training step on a GPU over NCCL against the CPU reference; the same body runs on a CPU over gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megads.batch import BatchInfo
from megads.engine.training import PipelineTrainEngine
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from tests import parity
from tests.distributed import free_port, run_ranks
from tests.parity import Scenario, scenario_with, step_batches, train_reference

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")],
)
DEVICES = [pytest.param("cpu", marks=pytest.mark.distributed), CUDA]


def train_one_step(device_type: str, scenario: Scenario) -> dict[str, Any]:
    """The engine's first step on one rank."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    engine = PipelineTrainEngine(
        scenario.model,
        ParallelConfig(),
        scenario.optim,
        build_grid(ParallelConfig(), 0, 1),
        precision=scenario.dtype,
        micro_batch_size=scenario.micro_batch_size,
        seed=scenario.seed,
        device=device,
        value=parity.initial_weights(scenario),
        compiled=scenario.ops.compile,
    )
    result = engine.step(step_batches(scenario, 0), scenario.lr)
    shards = engine.named_shards()
    assert {s.tensor.device.type for s in shards} == {device_type}
    rows = [(s.key, s.global_shape, s.offset, s.tensor.cpu().numpy()) for s in shards]
    return {"loss": result.loss, "norm": result.grad_norm, "weights": parity.assemble(rows, "weight")}


def _cuda_rank(connection: Any, port: int, scenario: Scenario) -> None:
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        DS_ACCELERATOR="cuda",
    )  # fmt: skip
    try:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", rank=0, world_size=1)
        connection.send((True, train_one_step("cuda", scenario)))
        dist.destroy_process_group()
    except BaseException:
        connection.send((False, traceback.format_exc()))


def step_on(device_type: str, scenario: Scenario) -> dict[str, Any]:
    """Runs the step in a process of its own; one that uses CUDA must not be forked."""
    if device_type == "cpu":
        return run_ranks(train_one_step, 1, device_type, scenario)[0]
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_cuda_rank, args=(theirs, free_port(), scenario))
    process.start()
    theirs.close()
    try:
        assert ours.poll(300), "the step did not end within 300 s"
        ok, value = ours.recv()
        assert ok, value
        return value
    finally:
        process.join(30)
        process.kill()


@pytest.mark.parametrize("device_type", DEVICES)
def test_fp32_step(device_type: str) -> None:
    """Catches a tensor left on the CPU, TF32 where fp32 was asked for, and an optimizer that differs on a GPU."""
    check_fp32_step(device_type, Compile.none)


@pytest.mark.parametrize("compiled", [Compile.blocks, Compile.graphs])
@pytest.mark.parametrize("device_type", [CUDA])
def test_compiled_step(device_type: str, compiled: Compile) -> None:
    """Catches a graph replayed over what its last micro-batch left for the backward pass: there are six of them."""
    check_fp32_step(device_type, compiled)


def check_fp32_step(device_type: str, compiled: Compile) -> None:
    """Asserts that a step of six micro-batches equals the reference's."""
    scenario = scenario_with(masked=True, ops=OpsConfig(Implementation.torch, compiled))
    found, reference = step_on(device_type, scenario), train_reference(scenario)
    assert found["loss"] == pytest.approx(reference.losses[0], rel=1e-5)
    assert found["norm"] == pytest.approx(reference.norms[0], rel=1e-4)
    for name, weight in reference.weights.items():
        ours, theirs = (
            parity.without_key_bias(name, values, scenario.model) for values in (found["weights"][name], weight)
        )
        # Adam's first step is lr * sign(gradient): a gradient near zero may move a weight the other way.
        assert parity.relative(ours, theirs) <= 1e-3, name


@pytest.mark.parametrize("device_type", DEVICES)
def test_bf16_step(device_type: str) -> None:
    """Catches a mask, softmax or loss in bf16: the error is at most twice that of the CPU's bf16 step and rounding."""
    exact = train_reference(scenario_with(masked=True))
    scenario = scenario_with(masked=True, precision="bfloat16")
    found, reference = step_on(device_type, scenario), train_reference(scenario)
    own_error = abs(reference.losses[0] - exact.losses[0])
    assert abs(found["loss"] - exact.losses[0]) <= 2 * own_error + 2e-3 * exact.losses[0]
    assert found["norm"] == pytest.approx(exact.norms[0], rel=3e-2)
    assert all(np.isfinite(values).all() for values in found["weights"].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device_type", [pytest.param("cpu"), CUDA])
def test_attention_takes_its_mask_in_every_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Catches a mask dtype that the device's kernel refuses or misreads; forward and backward, odd lengths too."""
    core = AttentionCore(ModelConfig(hidden_size=64, num_heads=4), 0, "core")
    bound = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    for seq_len in (7, 64, 129):
        generator = torch.Generator().manual_seed(seq_len)
        inputs = [torch.randn(2, 4, seq_len, 16, generator=generator).to(dtype) for _ in range(4)]
        exact = attend_and_return(core, [x.double() for x in inputs], "cpu")
        for ours, theirs in zip(attend_and_return(core, inputs, device_type), exact, strict=True):
            assert (ours - theirs).norm() <= bound * theirs.norm()


def attend_and_return(core: AttentionCore, inputs: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Output and gradients of q, k and v, given them and the output's gradient; fp64 on the CPU."""
    *leaves, cotangent = (x.to(device, copy=True) for x in inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    out = core(*leaves, BatchInfo(sample_ids=torch.tensor([0, 1])))
    out.backward(cotangent)
    return [t.detach().double().cpu() for t in (out, *(leaf.grad for leaf in leaves))]
