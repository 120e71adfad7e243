"""Training steps on a fake GPU, on any rank of any layout: see tests/engine/fake_cuda.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megads.engine.native_engine
import megads.engine.optimizer
import megads.engine.train_engine
import megads.ops.token_dispatch
import megads.parallel.experts
from megads.engine import activation_offload, build_train_engine, micro_batch_graphs
from megads.engine.interface import EngineSpec, PassTimes, Shard, TrainEngine
from megads.engine.micro_batch_graphs import EAGER_STEPS
from megads.engine.native_engine import NativeEngine
from megads.engine.zero_engine import ZeroEngine
from megads.model.attention import AttentionCore
from megads.model.config import MLPKind, NormKind, Position
from megads.model.moe_config import Overflow
from megads.ops.attention_kinds import AttentionKind
from megads.ops.build import build
from megads.ops.config import Float8, Float8Recipe, Implementation, Kernels, OpsConfig
from megads.ops.resolve import load_library
from megads.parallel.config import (
    ContextParallelKind,
    EngineKind,
    Offload,
    ParallelConfig,
    Partition,
    Recompute,
    resolve_engine,
)
from megads.parallel.grid import build_grid
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.engine.fake_cuda import FakeGpu, FakeGpus, GpuFault, path_in_package
from tests.engine.test_model_features import MODELS as OPTIONS
from tests.engine.test_moe import scenario as expert_scenario
from tests.parity import MODEL, Scenario, scenario_with, step_batches

FUSED, IN_CHUNKS = OpsConfig(Implementation.fused), OpsConfig(Implementation.torch, loss_chunk=9)
SMALL = replace(MODEL, num_layers=2)
ROPE = replace(SMALL, position=Position.rope, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, num_kv_heads=2, bias=False)
WIDE = replace(MODEL, num_layers=4, hidden_size=64, num_heads=4)
"""The GEMMs of FP8 want multiples of 16 features on a rank."""
TENSORWISE = Float8(Float8Recipe.tensorwise)
DROPOUT = replace(SMALL, hidden_dropout=0.1, attention_dropout=0.1)
_DEEPSEEK = expert_scenario("deepseek").model
EXPERTS = replace(_DEEPSEEK, num_layers=4, moe=replace(_DEEPSEEK.moe, first_dense=0))
PADDED = replace(EXPERTS, moe=replace(EXPERTS.moe, capacity_factor=1.25))
DROPPING = replace(EXPERTS, moe=replace(EXPERTS.moe, capacity_factor=1.25, overflow=Overflow.drop))

READ_OF_COUNTS = ("ops/token_dispatch.py", "read_counts")
"""The numbers of rows that the ranks exchange, or that a loop over experts needs."""


@dataclass(frozen=True)
class Case:
    """A run, and its ranks that are tested.

    Attributes:
        parallel: the layout.
        ranks: global ranks.
        scenario: what is trained, in bf16 unless it says otherwise.
    """

    parallel: ParallelConfig
    ranks: tuple[int, ...]
    scenario: Scenario


def case(parallel: ParallelConfig, *ranks: int, **changes: Any) -> Case:
    return Case(
        parallel,
        ranks or (0,),
        scenario_with(
            **{"precision": "bfloat16", "model": SMALL, "global_batch_size": 4, "micro_batch_size": 1} | changes
        ),
    )


def attention(kind: AttentionKind, **changes: Any) -> Any:
    return replace(changes.pop("model", SMALL), attention=kind, **changes)


def ulysses(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(cp_kind=ContextParallelKind.ulysses, **sizes)


def ring(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(cp_kind=ContextParallelKind.ring, **sizes)


CASES = {
    "single, fp32": case(ParallelConfig(), precision="float32", masked=True),
    "single, kernels, dropout, documents": case(ParallelConfig(), ops=FUSED, model=DROPOUT, documents=True),
    "tp2, loss in chunks, recomputed": case(
        ParallelConfig(tp=2, recompute=Recompute.full), 0, 1, ops=IN_CHUNKS, model=DROPOUT
    ),
    "tp2, kernels, loss in chunks": case(ParallelConfig(tp=2, tp_chunks=2), 1, ops=replace(FUSED, loss_chunk=9)),
    "pp3 1f1b, rope": case(ParallelConfig(pp=3), 0, 1, 2, model=ROPE, documents=True),
    "pp2 interleaved, cores recomputed": case(
        ParallelConfig(pp=2, schedule=ScheduleName.interleaved, recompute=Recompute.selective), 0, 1, ops=FUSED
    ),
    "pp3 zb_h1": case(ParallelConfig(pp=3, schedule=ScheduleName.zb_h1), 0, 1, 2, model=DROPOUT),
    "pp2 zb_v, kernels": case(ParallelConfig(pp=2, schedule=ScheduleName.zb_v), 0, 1, ops=FUSED, model=ROPE),
    "pp2dp2 dualpipe_v": case(ParallelConfig(pp=2, dp=2, schedule=ScheduleName.dualpipe_v), 0, 3, ops=IN_CHUNKS),
    "dp2, ZeRO-0, kernels": case(ParallelConfig(dp=2, zero_stage=0), 1, ops=FUSED),
    "dp3, small buckets": case(ParallelConfig(dp=3, bucket_elements=8192), 1, global_batch_size=12),
    "dp2, small buckets, overlapped gathers": case(
        ParallelConfig(dp=2, bucket_elements=8192, overlap_param_gather=True), 1, ops=FUSED
    ),
    "pp2dp2 zb_v, overlapped gathers": case(
        ParallelConfig(pp=2, dp=2, schedule=ScheduleName.zb_v, bucket_elements=8192, overlap_param_gather=True), 0, 3
    ),
    "cp2, windows, documents": case(
        ParallelConfig(cp=2), 0, 1, model=replace(ROPE, window=7), documents=True, ops=FUSED
    ),
    "cp2 by all-to-alls, windows, documents": case(
        ulysses(cp=2), 0, 1, model=replace(ROPE, window=7), documents=True, ops=FUSED
    ),
    "tp2cp3 by all-to-alls, dropout, KV heads repeated": case(
        ulysses(tp=2, cp=3, sequence_parallel=True), 4, model=replace(DROPOUT, num_kv_heads=2)
    ),
    "pp2cp2 by all-to-alls, zb_v, cores recomputed": case(
        ulysses(pp=2, cp=2, schedule=ScheduleName.zb_v, recompute=Recompute.selective), 0, 3, ops=FUSED, documents=True
    ),
    "zero3cp2 by all-to-alls": case(ulysses(cp=2, zero_stage=3), 1),
    "cp3 in a ring, windows, documents": case(
        ring(cp=3), 2, model=replace(ROPE, num_layers=1, window=7), documents=True, ops=FUSED, global_batch_size=2
    ),
    "tp2cp2 in a ring, dropout, KV heads shared": case(
        ring(tp=2, cp=2, sequence_parallel=True),
        3,
        model=replace(DROPOUT, num_layers=1, num_kv_heads=2),
        global_batch_size=1,
    ),
    "pp2cp2 in a ring, zb_v, cores recomputed, capped": case(
        ring(pp=2, cp=2, schedule=ScheduleName.zb_v, recompute=Recompute.selective),
        *(0, 3),
        model=replace(SMALL, attention_logit_softcap=5.0, attention_sinks=True),
        ops=FUSED,
        global_batch_size=2,
    ),
    "cp2 in a ring, FlashAttention": case(
        ring(cp=2), 1, model=replace(ROPE, num_layers=1), ops=FUSED, global_batch_size=2
    ),
    "zero3cp2 in a ring, fp32": case(
        ring(cp=2, zero_stage=3), 1, model=replace(SMALL, num_layers=1), precision="float32", global_batch_size=1
    ),
    "cp4 on two levels, windows, documents": case(
        ParallelConfig(cp=4, cp_ulysses=2),
        1,
        model=replace(ROPE, num_layers=1, window=7),
        documents=True,
        ops=FUSED,
        global_batch_size=2,
    ),
    "cp4 in rings of ranks with the same heads, dropout": case(
        ring(cp=4, cp_ulysses=2), 2, model=replace(DROPOUT, num_layers=1), global_batch_size=1
    ),
    "flex, heads by all-to-alls": case(
        ulysses(cp=2), 1, model=attention(AttentionKind.flex, num_heads=2), documents=True
    ),
    "augmented, heads by all-to-alls": case(ulysses(cp=2), 1, model=attention(AttentionKind.augmented)),
    "tp2cp2, dropout": case(ParallelConfig(tp=2, cp=2, sequence_parallel=True), 3, model=DROPOUT),
    "tp2pp2dp2, sequence parallel": case(
        ParallelConfig(tp=2, pp=2, dp=2, sequence_parallel=True, tp_chunks=3), 0, 3, 7, ops=FUSED
    ),
    "zero2dp2": case(ParallelConfig(dp=2, zero_stage=2), 1, model=DROPOUT),
    "zero2tp2dp2, kernels": case(ParallelConfig(tp=2, dp=2, zero_stage=2, sequence_parallel=True), 3, ops=FUSED),
    "zero3dp2, loss in chunks": case(ParallelConfig(dp=2, zero_stage=3), 0, 1, ops=IN_CHUNKS),
    "zero3tp2dp2, recomputed": case(ParallelConfig(tp=2, dp=2, zero_stage=3, recompute=Recompute.full), 1, ops=FUSED),
    "hierarchical": case(ParallelConfig(dp=4, zero_stage=3, zero_shard_size=2), 3, model=ROPE),
    "engine=deepspeed, dp2, kernels": case(ParallelConfig(dp=2), 1, ops=FUSED, engine=EngineKind.deepspeed),
    # DeepSpeed's later stages read the shape of activations from a message, which the fake group leaves empty.
    "engine=deepspeed, tp2pp2, sequence parallel": case(
        ParallelConfig(tp=2, pp=2, sequence_parallel=True), 0, engine=EngineKind.deepspeed, documents=True
    ),
    "tp2cp2, gemma3, kernels, documents": case(
        ParallelConfig(tp=2, cp=2), 3, model=replace(MODEL, **OPTIONS["gemma3"]), ops=FUSED, documents=True
    ),
    "tp2, gpt-j, loss in chunks": case(
        ParallelConfig(tp=2), 1, model=replace(MODEL, **OPTIONS["gpt-j"]), ops=replace(FUSED, loss_chunk=9)
    ),
    "experts, kernels": case(ParallelConfig(), model=EXPERTS, ops=FUSED),
    "experts, kernels, recomputed": case(ParallelConfig(recompute=Recompute.full), model=EXPERTS, ops=FUSED),
    "experts in a loop": case(ParallelConfig(), model=EXPERTS),
    "ep2, experts, kernels": case(ParallelConfig(dp=2, ep=2), 1, model=EXPERTS, ops=FUSED),
    "tp2ep2, experts, recomputed": case(
        ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True, recompute=Recompute.full), 0, 3, model=EXPERTS
    ),
    "ep2 zb_v, experts": case(
        ParallelConfig(pp=2, dp=2, ep=2, schedule=ScheduleName.zb_v, partition=Partition.uniform),
        *(0, 3),
        model=EXPERTS,
        ops=FUSED,
    ),
    "ep2, experts with a capacity, kernels": case(ParallelConfig(dp=2, ep=2), 1, model=PADDED, ops=FUSED),
    "tp2ep2, dropping experts, recomputed": case(
        ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True, recompute=Recompute.full), 3, model=DROPPING
    ),
    "ep2 zb_v, experts with a capacity": case(
        ParallelConfig(pp=2, dp=2, ep=2, schedule=ScheduleName.zb_v, partition=Partition.uniform), 3, model=PADDED
    ),
    "tp2cp2, FP8": case(
        ParallelConfig(tp=2, cp=2, sequence_parallel=True),
        *(0, 3),
        model=WIDE,
        ops=FUSED,
        float8=TENSORWISE,
        micro_batch_size=2,
    ),
    "pp2 zb_h1, FP8 of tokens, recomputed": case(
        ParallelConfig(pp=2, schedule=ScheduleName.zb_h1, recompute=Recompute.full),
        *(0, 1),
        model=WIDE,
        float8=Float8(Float8Recipe.rowwise),
    ),
    "tp2, FP8 of tokens, kernels": case(
        ParallelConfig(tp=2), 1, model=WIDE, ops=FUSED, float8=Float8(Float8Recipe.rowwise)
    ),
    "tp2, FP8": case(ParallelConfig(tp=2), 1, model=WIDE, float8=TENSORWISE),
    "tp2, FP8 of a parallel block, kernels": case(
        ParallelConfig(tp=2, sequence_parallel=True),
        *(0, 1),
        model=replace(WIDE, parallel_block=True),
        ops=FUSED,
        float8=TENSORWISE,
        micro_batch_size=2,
    ),
    "tp2pp2 zb_h1, FP8 of tokens gathered, kernels": case(
        ParallelConfig(tp=2, pp=2, sequence_parallel=True, schedule=ScheduleName.zb_h1),
        *(0, 3),
        model=WIDE,
        ops=FUSED,
        float8=Float8(Float8Recipe.rowwise),
        micro_batch_size=2,
    ),
    "offloaded": case(ParallelConfig(offload=Offload.activations), ops=FUSED, model=DROPOUT, documents=True),
    "pp2 zb_v, offloaded, recomputed": case(
        ParallelConfig(
            pp=2,
            schedule=ScheduleName.zb_v,
            recompute=Recompute.full,
            offload=Offload.activations,
            partition=Partition.uniform,
        ),
        *(0, 1),
        model=replace(MODEL, num_layers=4),
    ),
    "zero3tp2dp2, offloaded": case(ParallelConfig(tp=2, dp=2, zero_stage=3, offload=Offload.activations), 1),
    "augmented": case(ParallelConfig(), model=attention(AttentionKind.augmented)),
    "softmax kernel": case(ParallelConfig(cp=2), 1, model=attention(AttentionKind.fused_softmax), ops=FUSED),
    "flex": case(ParallelConfig(cp=2), 1, model=attention(AttentionKind.flex, num_heads=3), documents=True),
    "cudnn": case(ParallelConfig(), model=attention(AttentionKind.cudnn, model=ROPE, window=5)),
}


@pytest.fixture(scope="module")
def gpus() -> Iterator[FakeGpus]:
    """A process that forks ranks with fake GPUs."""
    with FakeGpus() as started:
        yield started


DEEPSPEED_WAITS = {
    "engine/train_engine.py",
    "engine/zero_engine.py",
    "deepspeed/runtime/pipe/engine.py",
    "deepspeed/runtime/utils.py",
    "deepspeed/runtime/zero/stage3.py",
    "deepspeed/runtime/zero/stage_1_and_2.py",
}
"""Files that wait for the device where DeepSpeed trains: it handles overflow flags, norms, gradients and batches."""


def train(gpu: FakeGpu, case: Case, defect: Callable[[], None] | None = None) -> Counter[tuple[str, str]]:
    """Runs two steps, validation, and a save and load of the state; in the second step the host must not wait.

    Returns:
        Files and functions in which the host waits nevertheless, where DeepSpeed trains or the model has experts.
    """
    scenario = case.scenario
    if scenario.ops.impl is Implementation.fused:
        load_library(build(print))
    if defect is not None:
        defect()
    activation_offload.SMALLEST_OFFLOADED_BYTES = 1
    reads: Counter[tuple[str, str]] = Counter()
    if scenario.model.moe.enabled:
        reads = balance(scenario)
    engine = engine_of(gpu, case)
    grid = engine.grid
    batches = [step_batches(scenario, step, grid.dp.rank, grid.dp.size) for step in range(3)]
    engine.step(batches[0], scenario.lr)
    gpu.waits.clear()
    if isinstance(engine, NativeEngine):
        reads.clear()
        with gpu.no_waits():
            engine.launch_step(batches[1], scenario.lr)
    else:
        if isinstance(engine, ZeroEngine):
            # DeepSpeed's timers begin with the second step.
            engine.deepspeed.tput_timer.global_step_count += 2
        engine.step(batches[1], scenario.lr)
    waited = gpu.waits + reads
    if grid.rank == case.ranks[0]:
        engine.evaluate(batches[2])
        assert {shard.tensor.device for shard in engine.named_shards(owned=False)} == {gpu.device}
        engine.load_shards(fill, engine.optimizer_steps)
    return waited


def engine_of(gpu: FakeGpu, case: Case, *, cuda_graphs: bool | None = False) -> TrainEngine:
    """Builds the engine of a case; `cuda_graphs` is None if they are to be measured."""
    scenario, parallel = case.scenario, case.parallel
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    spec = EngineSpec(
        scenario.model,
        parallel,
        scenario.optim,
        grid,
        precision=scenario.dtype,
        micro_batch_size=scenario.micro_batch_size,
        seed=scenario.seed,
        device=gpu.device,
        value=parity.initial_weights(scenario),
        kernels=Kernels(
            scenario.ops.impl,
            scenario.ops.impl,
            cuda_graphs=cuda_graphs,
            loss_chunk=scenario.ops.loss_chunk,
            fp8_emulation=scenario.ops.fp8_emulation,
        ),
        engine=resolve_engine(scenario.engine, parallel.zero_stage),
        float8=scenario.float8,
    )
    return build_train_engine(spec)


def balance(scenario: Scenario) -> Counter[tuple[str, str]]:
    """Makes all counts that the host reads equal, as the fake GPU has no values; returns the number of reads so far."""
    moe, reads = scenario.model.moe, Counter[tuple[str, str]]()
    each = scenario.micro_batch_size * scenario.seq_len * moe.top_k // moe.num_experts

    def equal(counts: torch.Tensor) -> list[Any]:
        reads[READ_OF_COUNTS] += 1
        return torch.full(counts.shape, each, device="cpu").tolist()

    for module in (megads.ops.token_dispatch, megads.parallel.experts):
        module.read_counts = equal
    return reads


def fill(shards: list[Shard]) -> None:
    for shard in shards:
        shard.tensor.copy_(torch.zeros(shard.tensor.shape))


@pytest.mark.quick("tp2cp2, dropout-3", "zero3dp2, loss in chunks-1")
@pytest.mark.parametrize(("name", "rank"), [(name, rank) for name, case in CASES.items() for rank in case.ranks])
@pytest.mark.usefixtures("kernels")
def test_a_step_runs_on_the_fake_gpu_without_host_waits(gpus: FakeGpus, name: str, rank: int) -> None:
    """Catches a tensor left on the CPU, a host that waits, and a CPU tensor in a collective, anywhere in a step."""
    case = CASES[name]
    waited = gpus.run(train, rank, case.parallel.world_size, case)
    engine = resolve_engine(case.scenario.engine, case.parallel.zero_stage)
    if case.scenario.model.moe.enabled:
        assert waited == Counter({READ_OF_COUNTS: reads_of_counts(case)})
    else:
        assert {file for file, _ in waited} <= (DEEPSPEED_WAITS if engine is EngineKind.deepspeed else set())


def measure_graphs(gpu: FakeGpu, case: Case, takes: bool) -> tuple[PassTimes, set[tuple[str, str]], Counter[str]]:
    """Measures graphs after two steps; returns the times, where the host waited, and what the next step launches."""
    scenario, asked = case.scenario, list[PassTimes]()

    def capture(run: Callable[[], Any], _pool: object) -> Callable[[], Any]:
        with gpu.no_waits():
            outputs = run()
        return lambda: outputs

    def choose(times: PassTimes) -> bool:
        asked.append(times)
        return takes

    micro_batch_graphs.capture = capture  # type: ignore[assignment]
    if scenario.ops.impl is Implementation.fused:
        load_library(build(print))
    engine: Any = engine_of(gpu, case, cuda_graphs=None)
    assert gpu.stream.number > 0, "the default stream cannot be captured"
    batches = step_batches(scenario, 0, engine.grid.dp.rank, engine.grid.dp.size)
    for _ in range(EAGER_STEPS):
        engine.step(batches, scenario.lr)
        gpu.waits.clear()
        engine.choose_cuda_graphs(choose)
    waited = set(gpu.waits)
    gpu.launched.clear()
    with gpu.no_waits():
        engine.launch_step(batches, scenario.lr)
    (times,) = asked
    return times, waited, gpu.launched


@pytest.mark.quick("dp2, ZeRO-0, kernels")
@pytest.mark.parametrize("name", ["single, fp32", "dp2, ZeRO-0, kernels"])
@pytest.mark.usefixtures("kernels")
def test_graphs_are_measured_on_the_fake_gpu(gpus: FakeGpus, name: str) -> None:
    """Catches a pass that a graph cannot capture, a measurement that waits inside a pass, so that it does not time the
    launches alone, and replays that still launch operators."""
    case = CASES[name]
    (times, waited, launched), (_, _, eagerly) = (
        gpus.run(measure_graphs, case.ranks[0], case.parallel.world_size, case, takes) for takes in (True, False)
    )
    assert times.host_ms > 0 and times.device_ms is not None and not times.failure
    assert waited == {("engine/micro_batch_graphs.py", function) for function in ("_synchronize", "elapsed_ms")}
    assert 3 * sum(launched.values()) < sum(eagerly.values())


def reads_of_counts(case: Case) -> int:
    """Reads of a step on a rank: one for each layer with experts and micro-batch, two if layers are recomputed; none if
    experts have a capacity, or if one kernel computes all experts and rows stay on the rank."""
    if case.scenario.model.moe.capacity_factor is not None:
        return 0
    parallel, scenario = case.parallel, case.scenario
    if parallel.ep == 1 and scenario.ops.impl is Implementation.fused:
        return 0
    layers = sum(map(scenario.model.moe.holds, range(scenario.model.num_layers)))
    micro_batches = scenario.global_batch_size // scenario.micro_batch_size // parallel.dp
    assert layers % parallel.pp == 0, "stages hold different numbers of experts"
    return layers // parallel.pp * micro_batches * (1 + (parallel.recompute is Recompute.full))


def test_warning_paths_are_right_in_a_checkout_named_megads(tmp_path: Path) -> None:
    """Catches paths cut at the first folder named megads, which is what `git clone` calls the checkout."""
    source = tmp_path / "megads" / "megads" / "engine" / "zero_engine.py"
    source.parent.mkdir(parents=True)
    for folder in (source.parent, source.parent.parent):
        (folder / "__init__.py").touch()
    assert path_in_package(source) == "engine/zero_engine.py"
    assert path_in_package(tmp_path / "megads" / "setup.py") == "setup.py"


def tokens_left_on_the_cpu() -> None:
    megads.engine.native_engine.copy_to = lambda x, device: x


def tokens_that_are_not_pinned() -> None:
    megads.engine.native_engine.copy_to = lambda x, device: x.to(device)


def a_norm_that_is_read() -> None:
    inner = megads.engine.optimizer.clip_factor
    megads.engine.optimizer.clip_factor = lambda norm, largest: inner(norm, largest) if norm > 0 else norm


def tokens_counted_on_the_cpu() -> None:
    inner = megads.engine.train_engine.global_tokens
    megads.engine.train_engine.global_tokens = lambda batches, grid, device, rank: inner(
        batches, grid, torch.device("cpu"), rank
    )


def activations_that_are_not_pinned() -> None:
    inner = activation_offload.HostBuffers
    activation_offload.HostBuffers = lambda _pinned: inner(False)


def a_kernel_for_cpus() -> None:
    AttentionCore.backend = lambda self, q_bnsd: AttentionKind.fused


DEFECTS = {
    tokens_left_on_the_cpu: "on the CPU beside ones on the device",
    tokens_that_are_not_pinned: "the host waits: copy to the device",
    a_norm_that_is_read: "the host waits: _local_scalar_dense",
    activations_that_are_not_pinned: "the host waits: copy to the CPU",
    tokens_counted_on_the_cpu: "NCCL was handed a tensor",
    a_kernel_for_cpus: "has no CUDA implementation",
}


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.usefixtures("kernels")
def test_the_fake_gpu_refuses_what_a_real_one_would(gpus: FakeGpus, defect: Callable[[], None]) -> None:
    """Catches a fake GPU that accepts what a real one does not."""
    offload = Offload.activations if defect is activations_that_are_not_pinned else Offload.none
    run = case(ParallelConfig(dp=2, offload=offload), ops=FUSED, model=SMALL, global_batch_size=2)
    with pytest.raises(AssertionError, match=DEFECTS[defect]):
        gpus.run(train, 0, 2, run, defect)


def a_scaled_gemm_that_fails() -> None:
    def fail(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise GpuFault("an FP8 GEMM was called")

    torch._scaled_mm = fail


def an_old_gpu() -> None:
    torch.cuda.get_device_capability = lambda *_: (8, 0)


@pytest.mark.parametrize(
    ("defect", "change", "fault"),
    [
        (a_scaled_gemm_that_fails, {}, "an FP8 GEMM was called"),
        (an_old_gpu, {}, "fake has compute capability 8.0, and FP8 GEMMs need 8.9"),
        (None, {"model": replace(WIDE, hidden_size=60)}, "FP8 GEMMs need multiples of 16 features"),
        (None, {"precision": "float32", "float8": Float8(Float8Recipe.rowwise)}, "only returns bf16"),
    ],
)
def test_a_gpu_multiplies_in_fp8_or_refuses(
    gpus: FakeGpus, defect: Callable[[], None] | None, change: dict[str, Any], fault: str
) -> None:
    """Catches products that are emulated on a GPU without being asked to, and a failure deep inside of a step."""
    run = case(ParallelConfig(), **{"model": WIDE, "float8": TENSORWISE} | change)
    with pytest.raises(AssertionError, match=fault):
        gpus.run(train, 0, 1, run, defect)


def test_an_old_gpu_emulates_fp8_if_asked_to(gpus: FakeGpus) -> None:
    """Catches a refusal, and an FP8 GEMM, where ops.fp8_emulation asks for neither."""
    emulated = replace(OpsConfig(Implementation.torch), fp8_emulation=True)
    assert not gpus.run(train, 0, 1, case(ParallelConfig(), model=WIDE, float8=TENSORWISE, ops=emulated), an_old_gpu)
