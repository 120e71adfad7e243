"""One real training step on a GPU over NCCL against the CPU reference; the same code runs on a CPU over gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megads.batch import BatchInfo
from megads.checkpoint.image import ImageLayout, StateBuffer, in_file_order
from megads.engine import activation_offload
from megads.engine.interface import EngineSpec, PassTimes, Shard
from megads.engine.micro_batch_graphs import EAGER_STEPS
from megads.engine.native_engine import NativeEngine
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import Offload, ParallelConfig, Recompute
from megads.parallel.grid import build_grid
from megads.runtime.process import make_deterministic
from tests import parity
from tests.distributed import free_port, run_ranks
from tests.ops.test_apex import without_apex
from tests.parity import MODEL, Scenario, scenario_with, step_batches, train_reference

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")],
)
DEVICES = [pytest.param("cpu", marks=pytest.mark.distributed), CUDA]


ALONE = ParallelConfig()


def engine_on(device_type: str, scenario: Scenario, parallel: ParallelConfig = ALONE) -> NativeEngine:
    """The engine of one rank, with its scenario's kernels."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    kernels = load(scenario.ops, print, cuda=device_type == "cuda")
    spec = EngineSpec(
        scenario.model,
        parallel,
        scenario.optim,
        build_grid(parallel, 0, 1),
        precision=scenario.dtype,
        micro_batch_size=scenario.micro_batch_size,
        seed=scenario.seed,
        device=device,
        value=parity.initial_weights(scenario),
        kernels=kernels,
    )
    return NativeEngine(spec)


def train_one_step(device_type: str, scenario: Scenario) -> dict[str, Any]:
    """Loss, gradient norm and weights of the engine's first step."""
    engine = engine_on(device_type, scenario)
    result = engine.step(step_batches(scenario, 0), scenario.lr)
    shards = engine.named_shards()
    assert {s.tensor.device.type for s in shards} == {device_type}
    rows = [(s.key, s.global_shape, s.offset, s.tensor.cpu().numpy()) for s in shards]
    return {"loss": result.loss, "norm": result.grad_norm, "weights": parity.assemble(rows, "weight")}


def step_without_waiting(device_type: str, scenario: Scenario) -> tuple[float, float]:
    """Loss and gradient norm of the second step, where CUDA raises on host synchronization; the first fills caches."""
    engine = engine_on(device_type, scenario)
    engine.step(step_batches(scenario, 0), scenario.lr)
    mode = torch.cuda.get_sync_debug_mode() if device_type == "cuda" else 0
    try:
        if device_type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        outcome = engine.launch_step(step_batches(scenario, 1), scenario.lr)
    finally:
        if device_type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)
    loss, _, norm = outcome.tolist()
    return loss, norm


def train_and_resume(device_type: str, scenario: Scenario) -> tuple[list[list[float]], list[bool]]:
    """Losses and gradient norms of steps 2 and 3, of a run and of another one that loads its state after step 1; and
    for each shard of the final state, whether both have the same bits."""
    make_deterministic(torch.device(device_type))
    engines, results = [engine_on(device_type, scenario)], []
    for step in range(2):
        engines[0].step(step_batches(scenario, step), scenario.lr)
    saved = {(s.key, s.offset): s.tensor.clone() for s in engines[0].named_shards(owned=False)}
    engines.append(engine_on(device_type, scenario))

    def fill(shards: list[Shard]) -> None:
        for shard in shards:
            shard.tensor.copy_(saved[shard.key, shard.offset])

    engines[1].load_shards(fill, engines[0].optimizer_steps)
    for engine in engines:
        steps = [engine.step(step_batches(scenario, step), scenario.lr) for step in (2, 3)]
        results.append([number for step in steps for number in (step.loss, step.grad_norm)])
    first, second = (engine.named_shards() for engine in engines)
    return results, [torch.equal(a.tensor, b.tensor) for a, b in zip(first, second, strict=True)]


def copy_beside_a_step(device_type: str, scenario: Scenario) -> tuple[list[bool], bool]:
    """For each shard, whether a copy started before a step equals it before the step; whether the step changed any."""
    engine = engine_on(device_type, scenario)
    shards = engine.named_shards()
    before = [shard.tensor.cpu().clone() for shard in in_file_order(shards)]
    image = StateBuffer.anonymous(ImageLayout.of(shards, shards))
    if device_type == "cuda":
        image.pin()
        # The copy is queued behind this kernel, as it would be behind a long optimizer step.
        torch.cuda._sleep(10**9)
    copying = image.start_copy(shards, lambda: None)
    engine.before_update(copying.before_update)
    engine.step(step_batches(scenario, 0), scenario.lr)
    copying.copied.result()
    copied = [torch.equal(shard.tensor, was) for shard, was in zip(image.shards, before, strict=True)]
    now = [shard.tensor.cpu() for shard in in_file_order(engine.named_shards())]
    return copied, not all(torch.equal(one, was) for one, was in zip(now, before, strict=True))


def _cuda_rank(connection: Any, port: int, body: Callable[[str, Scenario], Any], scenario: Scenario) -> None:
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        DS_ACCELERATOR="cuda",
    )  # fmt: skip
    try:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", rank=0, world_size=1)
        connection.send((True, body("cuda", scenario)))
        dist.destroy_process_group()
    except BaseException:
        connection.send((False, traceback.format_exc()))


def run_on(device_type: str, body: Callable[[str, Scenario], Any], scenario: Scenario) -> Any:
    """Runs a function in its own process; with CUDA the process is spawned, as it must not be forked."""
    if device_type == "cpu":
        return run_ranks(body, 1, device_type, scenario)[0]
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_cuda_rank, args=(theirs, free_port(), body, scenario))
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


BY_TORCH, BY_APEX = OpsConfig(Implementation.torch), OpsConfig(Implementation.apex)
COMPILED = OpsConfig(Implementation.torch, Compile.blocks)


@pytest.mark.parametrize(
    ("device_type", "ops"),
    [
        pytest.param("cpu", BY_TORCH, marks=pytest.mark.distributed),
        pytest.param("cuda", BY_TORCH, marks=CUDA.marks),
        pytest.param("cuda", BY_APEX, marks=[pytest.mark.gpu, without_apex]),
        pytest.param("cuda", COMPILED, marks=CUDA.marks),
    ],
    ids=["cpu", "cuda", "apex", "compiled"],
)
def test_a_gpu_step_in_fp32_equals_the_cpus(device_type: str, ops: OpsConfig) -> None:
    """Catches a tensor left on the CPU, TF32 in place of fp32, and an optimizer that differs on a GPU."""
    scenario = scenario_with(masked=True, ops=ops)
    found, reference = run_on(device_type, train_one_step, scenario), train_reference(scenario)
    assert found["loss"] == pytest.approx(reference.losses[0], rel=1e-5)
    assert found["norm"] == pytest.approx(reference.norms[0], rel=1e-4)
    for name, weight in reference.weights.items():
        ours, theirs = (
            parity.drop_key_biases(name, values, scenario.model) for values in (found["weights"][name], weight)
        )
        # Adam's first step is lr * sign(gradient): a gradient near zero may move a weight the other way.
        assert parity.relative(ours, theirs) <= 1e-3, name


@pytest.mark.parametrize("device_type", DEVICES)
def test_a_gpu_step_in_bf16_has_at_most_twice_the_cpus_error(device_type: str) -> None:
    """Catches a mask, softmax or loss in bf16: the error is at most twice that of the CPU's bf16 step and rounding."""
    exact = train_reference(scenario_with(masked=True))
    scenario = scenario_with(masked=True, precision="bfloat16")
    found, reference = run_on(device_type, train_one_step, scenario), train_reference(scenario)
    own_error = abs(reference.losses[0] - exact.losses[0])
    assert abs(found["loss"] - exact.losses[0]) <= 2 * own_error + 2e-3 * exact.losses[0]
    assert found["norm"] == pytest.approx(exact.norms[0], rel=3e-2)
    assert all(np.isfinite(values).all() for values in found["weights"].values())


DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
def test_a_gpu_step_launches_without_waiting(impl: Implementation, device_type: str) -> None:
    """Catches host synchronization: a copy from unpinned memory, a mask made on the host, any read of a GPU value."""
    scenario = scenario_with(model=DROPOUT, documents=True, precision="bfloat16", ops=OpsConfig(impl))
    loss, norm = run_on(device_type, step_without_waiting, scenario)
    assert 0 < loss < 20 and 0 < norm < 100


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
def test_a_resumed_gpu_run_continues_bit_for_bit(impl: Implementation, device_type: str) -> None:
    """Catches reductions in nondeterministic order: attention's backward pass on GPUs, atomics, split-K GEMMs."""
    # On a CPU, where other tests cover this, it shows that the test works.
    seq_len, samples = (1024, 8) if device_type == "cuda" else (64, 2)
    model = replace(DROPOUT, max_seq_len=seq_len)
    scenario = scenario_with(
        model=model, precision="bfloat16", seq_len=seq_len, global_batch_size=samples, ops=OpsConfig(impl)
    )
    (whole, resumed), same = run_on(device_type, train_and_resume, scenario)
    assert whole == resumed and all(same) and len(same) > 50


def with_graphs_and_without(
    device_type: str, scenario: Scenario, recompute: Recompute
) -> tuple[list[list[float]], list[bool]]:
    """Losses and gradient norms of some steps without CUDA graphs, with them, and with those that a measurement has
    captured, a validation in between; and for each shard of the state, whether all have the same bits."""
    make_deterministic(torch.device(device_type))
    engines, results, parallel = [], [], ParallelConfig(recompute=recompute)
    measured: list[PassTimes] = []

    def choose(times: PassTimes) -> bool:
        measured.append(times)
        return True

    for cuda_graphs in (False, True, "auto"):
        own = replace(scenario, ops=replace(scenario.ops, cuda_graphs=cuda_graphs))
        engine = engine_on(device_type, own, parallel)
        found: list[float] = []
        for step in range(EAGER_STEPS + 4):
            if step == EAGER_STEPS + 2:
                # At other lengths, so that caches evict tensors that they returned before.
                for seq_len in range(8, 8 + 10):
                    shorter = replace(scenario, seq_len=seq_len)
                    found.append(engine.evaluate(step_batches(shorter, 0)).loss_sum)
            done = engine.step(step_batches(scenario, step), scenario.lr)
            found += [done.loss, done.grad_norm]
            if cuda_graphs == "auto":
                engine.choose_cuda_graphs(choose)
        engines.append(engine)
        results.append(found)
    (times,) = measured
    assert times.host_ms > 0 and times.device_ms is not None and times.device_ms > 0
    shards = [engine.named_shards() for engine in engines]
    return results, [torch.equal(a.tensor, x.tensor) for a, *others in zip(*shards, strict=True) for x in others]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
@pytest.mark.parametrize("device_type", [CUDA])
def test_cuda_graphs_change_no_bit(impl: Implementation, recompute: Recompute, device_type: str) -> None:
    """Catches a graph that reads memory reallocated since its capture, and a replay that overwrites activations which
    the last micro-batch's backward pass still needs."""
    scenario = scenario_with(model=DROPOUT, documents=True, masked=True, precision="bfloat16", ops=OpsConfig(impl))
    body = partial(with_graphs_and_without, recompute=recompute)
    (eager, replayed, measured), same = run_on(device_type, body, scenario)
    assert eager == replayed == measured and all(same) and len(same) > 50


def with_offloading_and_without(
    device_type: str, scenario: Scenario, recompute: Recompute
) -> tuple[list[list[float]], list[bool], int]:
    """Losses and gradient norms of some steps without and with offloading; for each shard of the state, whether both
    have the same bits; and the bytes moved to the host."""
    make_deterministic(torch.device(device_type))
    activation_offload.SMALLEST_OFFLOADED_BYTES = 1
    engines, results = [], []
    for offload in Offload:
        engine = engine_on(device_type, scenario, ParallelConfig(recompute=recompute, offload=offload))
        steps = [engine.step(step_batches(scenario, step), scenario.lr) for step in range(4)]
        engines.append(engine)
        results.append([value for done in steps for value in (done.loss, done.grad_norm)])
    first, second = (engine.named_shards() for engine in engines)
    same = [torch.equal(a.tensor, b.tensor) for a, b in zip(first, second, strict=True)]
    return results, same, engines[1].module.offload.to_host_bytes


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
@pytest.mark.parametrize("device_type", DEVICES)
def test_offloading_on_streams_changes_no_bit(recompute: Recompute, device_type: str) -> None:
    """Catches copies that are not ordered with the kernels of a block, and memory that is reused while it is copied."""
    scenario = scenario_with(model=DROPOUT, documents=True, precision="bfloat16", ops=OpsConfig(Implementation.fused))
    body = partial(with_offloading_and_without, recompute=recompute)
    (here, away), same, moved = run_on(device_type, body, scenario)
    assert here == away and all(same) and len(same) > 50 and moved > 0


@pytest.mark.parametrize("device_type", DEVICES)
def test_a_state_copy_beside_a_step_is_complete(device_type: str) -> None:
    """Catches an optimizer update that does not wait for the copy of the tensors it changes, and an incomplete copy."""
    copied, changed = run_on(device_type, copy_beside_a_step, scenario_with(precision="bfloat16"))
    assert changed and all(copied) and len(copied) > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device_type", [pytest.param("cpu"), CUDA])
def test_attention_accepts_its_mask_in_every_dtype(device_type: str, dtype: torch.dtype) -> None:
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
