"""The memory plan: exact parts checked in round numbers and against BLOOM, and GPU memory outside of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.config.root import RootConfig
from megads.model.config import LayerKind, ModelConfig, Position
from megads.ops.config import Float8, Float8Recipe
from megads.optim.config import OptimConfig
from megads.optim.groups import ALIGNMENT
from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from megads.tools.plan import memory
from megads.tools.plan.disk_need import checkpoint_bytes
from megads.tools.plan.memory import (
    BIAS_PHASE,
    CONTEXT_BYTES,
    CUBLAS_BYTES,
    RECEIVE_BYTES,
    communicators,
    memory_plan,
    non_tensor_memory,
)
from megads.tools.plan.workload import Workload

BLOOM = ModelConfig(num_layers=70, hidden_size=14336, num_heads=112, vocab_size=250_880)
SMALL = ModelConfig(num_layers=4, hidden_size=64, num_heads=4, vocab_size=509)
WORK = Workload(seq_len=32, micro_batch_size=2, micro_batches=4, weight_bytes=2)


@pytest.mark.always
def test_bloom_176b() -> None:
    """Catches a layout other than BLOOM's, and a parameter that is lost or counted twice in it."""
    plan = memory_plan(BLOOM, ParallelConfig(tp=4, pp=12, dp=8), replace(WORK, seq_len=2048, micro_batches=256))
    assert plan.parameters == 176_247_271_424
    tied = 250_880 * 14336
    assert sum(stage.parameters for stage in plan.stages) == plan.parameters + tied
    assert [len(stage.layers) for stage in plan.stages] == [6] * 11 + [7]
    middle = plan.stages[5]
    assert middle.masters + middle.optimizer_state == pytest.approx(12 * middle.rank_parameters / 8, rel=1e-6)
    assert middle.fp32_gradients == pytest.approx(4 * middle.rank_parameters, rel=1e-6)
    assert middle.reduced_gradients == pytest.approx(4 * middle.rank_parameters / 8, rel=1e-6)
    assert [stage.first_rank for stage in plan.stages] == list(range(0, 48, 4))
    assert plan.largest.stage == 1, "as many blocks as the others, and more micro-batches in flight than they"


def test_quantized_weights_are_planned() -> None:
    """Catches FP8 copies that are left out, of the first and last block, or of what is not a linear layer."""
    work = replace(WORK, float8=Float8(Float8Recipe.rowwise))
    for tp in (1, 2):
        plain, fp8 = (memory_plan(SMALL, ParallelConfig(tp=tp), each).stages[0] for each in (WORK, work))
        hidden = SMALL.hidden_size
        linear = hidden * (SMALL.qkv_width + SMALL.attention_width + 2 * SMALL.ffn_width)
        assert plain.quantized_weights == 0
        assert fp8.quantized_weights == 2 * 2 * linear // tp
        assert fp8.peak - plain.peak == fp8.quantized_weights


def test_vocabulary_padding_and_alignment() -> None:
    """Catches a rank planned with fewer rows than it allocates, and flat buffers not divisible by dp."""
    [stage] = memory_plan(SMALL, ParallelConfig(tp=2, dp=3), WORK).stages
    unsharded = memory_plan(SMALL, ParallelConfig(), WORK).stages[0]
    assert stage.rank_parameters < unsharded.rank_parameters / 2 + 64 * 64
    assert stage.weights % (2 * ALIGNMENT * 3) == 0
    assert stage.masters * 3 == stage.fp32_gradients


def test_rows_of_the_vocabulary_are_aligned_on_gpus() -> None:
    """Catches a plan without the rows that align the vocabulary on each rank of GPUs, or with them on CPUs."""
    model = replace(SMALL, num_heads=8, vocab_size=50257, tie_embeddings=False)

    def parameters(multiple: int | None, *, cuda: bool) -> int:
        layout = ParallelConfig(tp=8, vocab_multiple=multiple)
        return memory_plan(model, layout, replace(WORK, cuda=cuda)).stages[0].rank_parameters

    unaligned = parameters(None, cuda=False)
    for cuda, multiple, rows in ((True, None, 6400), (True, 1, 6283), (False, 8, 6288)):
        assert parameters(multiple, cuda=cuda) - unaligned == 2 * (rows - 6283) * model.hidden_size


def test_in_flight() -> None:
    """Catches a plan that ignores that the first stage holds the most micro-batches, or that there may be fewer."""
    for micro_batches, held in ((8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])):
        plan = memory_plan(SMALL, ParallelConfig(pp=4), replace(WORK, micro_batches=micro_batches))
        assert [stage.in_flight for stage in plan.stages] == held


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(pp=4),
        ParallelConfig(pp=3, virtual_stages=2, schedule="interleaved"),
        ParallelConfig(pp=2, virtual_stages=2, schedule="interleaved", contiguous_micro_batches=30),
        ParallelConfig(pp=4, schedule="zb_h1"),
        ParallelConfig(pp=3, virtual_stages=2, schedule="zb_v"),
        ParallelConfig(pp=2, virtual_stages=2, schedule="dualpipe_v"),
    ],
    ids=lambda parallel: str(parallel.schedule),
)
def test_a_long_step_is_planned_by_a_short_one(parallel: ParallelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a simulated step so short that a rank holds less than in a long one, or whose steady state differs."""
    sizes = [24, 25, 29, 35, 48, 61]
    model = replace(SMALL, num_layers=12)
    short = [memory_plan(model, parallel, replace(WORK, micro_batches=size)) for size in sizes]
    monkeypatch.setattr(memory, "STEADY_ROUNDS", 10**6)
    assert short == [memory_plan(model, parallel, replace(WORK, micro_batches=size)) for size in sizes]


def test_zero_shards_the_optimizer_only() -> None:
    """Catches ZeRO-1 gradients or weights divided by dp."""
    one, four = (memory_plan(SMALL, ParallelConfig(dp=dp), WORK).largest for dp in (1, 4))
    assert four.weights == pytest.approx(one.weights, rel=1e-3)
    assert four.fp32_gradients == pytest.approx(one.fp32_gradients, rel=1e-3)
    assert four.masters == pytest.approx(one.masters / 4, rel=1e-3)


def test_gradients_are_not_there_all_the_time() -> None:
    """Catches main_grad planned for a step's first forward pass, where the loss is the peak on a single rank, and
    reduced gradients that are not sharded."""
    wide = replace(SMALL, vocab_size=50_000)
    [alone] = memory_plan(wide, ParallelConfig(), replace(WORK, seq_len=512, micro_batches=1)).stages
    assert alone.fullest.name == "first micro-batch: loss, backward" and alone.fullest.gradients == 0
    shared = memory_plan(wide, ParallelConfig(dp=4), WORK).largest
    phases = {moment.name.partition(":")[0]: moment for moment in shared.phases}
    assert phases["later micro-batch"].gradients == shared.fp32_gradients
    assert phases["gradient reduction"].gradients == shared.fp32_gradients + shared.reduced_gradients
    assert phases["optimizer step"].total == shared.reduced_gradients == shared.fp32_gradients / 4


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(dp=4), ParallelConfig(dp=4, zero_stage=0)])
def test_graphs_keep_their_memory_from_step_to_step(parallel: ParallelConfig) -> None:
    """Catches main_grad or activations planned as freed with ops.cuda_graphs: GPUs run out of memory that the plan
    found sufficient."""
    work = replace(WORK, cuda=True)
    plain = memory_plan(SMALL, parallel, work).stages[0]
    (later,) = (phase for phase in plain.phases if phase.name.startswith("later micro-batch"))
    for micro_batches in (1, work.micro_batches):
        captured = replace(work, micro_batches=micro_batches, cuda_graphs=True)
        graphs = memory_plan(SMALL, parallel, captured).stages[0]
        beside = graphs.reduced_gradients if graphs.masters < graphs.fp32_gradients else 0
        between = [phase for phase in graphs.phases if "micro-batch" not in phase.name and phase.name != BIAS_PHASE]
        assert {phase.total for phase in between} == {later.total + beside}
        assert graphs.fullest.total == later.total + beside


def test_without_zero_every_replica_holds_everything() -> None:
    """Catches states divided by dp under ZeRO-0, and an all-gather of weights that are not sharded."""
    one, four = (
        memory_plan(SMALL, ParallelConfig(dp=dp, zero_stage=0), replace(WORK, micro_batches=1)).largest for dp in (1, 4)
    )
    assert (one.masters, one.optimizer_state, one.reduced_gradients) == (
        four.masters,
        four.optimizer_state,
        four.fp32_gradients,
    )
    assert [moment.name for moment in one.phases] == [moment.name for moment in four.phases]


@pytest.mark.parametrize(
    ("parallel", "rank", "tied", "expected"),
    [
        (ParallelConfig(), 0, True, {}),
        (ParallelConfig(dp=4), 0, True, {"all ranks": 4, "gradients": 4}),
        (
            ParallelConfig(tp=2, cp=2, pp=4, dp=3), 1, True,
            {"all ranks": 48, "tensor parallel": 2, "context parallel": 2, "gradients": 6, "pipeline": 4,
             "p2p with stage 0": 2, "p2p with stage 2": 2},
        ),
        (
            ParallelConfig(pp=4), 3, True,
            {"all ranks": 4, "pipeline": 4, "p2p with stage 2": 2, "tied embedding": 2},
        ),
        (
            # With virtual stages, the last rank sends to the first.
            ParallelConfig(pp=3, schedule=ScheduleName.interleaved, virtual_stages=2), 0, False,
            {"all ranks": 3, "pipeline": 3, "p2p with stage 1": 2, "p2p with stage 2": 2},
        ),
        (
            # In a V-shaped schedule, rank 0 holds embedding and head.
            ParallelConfig(pp=2, schedule=ScheduleName.zb_v), 0, True,
            {"all ranks": 2, "pipeline": 2, "p2p with stage 1": 2},
        ),
        (
            ParallelConfig(dp=8, zero_stage=3, zero_shard_size=4), 0, False,
            {"all ranks": 8, "gradients": 8, "shards": 4, "replicas of a shard": 2},
        ),
    ],
)  # fmt: skip
def test_every_communicator_is_planned(
    parallel: ParallelConfig, rank: int, tied: bool, expected: dict[str, int]
) -> None:
    """Catches a process group that the plan omits, a missing peer of a virtual stage, and a group never created."""
    assert {found.name: found.ranks for found in communicators(parallel, rank, tied=tied)} == expected


def test_bytes_follow_nccls_defaults() -> None:
    """Catches partial pages, a neighbour counted once although it sends and receives, and a process without a CUDA
    context. 24 channels of 2 + 10 MiB: one neighbour in groups of two ranks, two in larger groups; 8 channels between
    pipeline neighbours."""
    mib = 2**20
    assert 10 * mib == RECEIVE_BYTES
    taken = non_tensor_memory(ParallelConfig(pp=4), 1, tied=False)
    assert taken == {
        "CUDA context and kernels": CONTEXT_BYTES, "cuBLAS workspaces": CUBLAS_BYTES, "NCCL, all ranks": 576 * mib,
        "NCCL, pipeline": 576 * mib, "NCCL, p2p with stage 0": 96 * mib, "NCCL, p2p with stage 2": 96 * mib,
    }  # fmt: skip
    assert non_tensor_memory(ParallelConfig(tp=2), 0, tied=False)["NCCL, tensor parallel"] == 288 * mib


def test_the_mask_is_built_beside_its_distances() -> None:
    """Catches a boolean mask or fp32 original that is not counted while ALiBi's bias is built: an int32 distance and a
    boolean for every pair of the 32 tokens, half of them on each of two context-parallel ranks."""
    for parallel, changes, transient in (
        (ParallelConfig(), {}, 5 * 32 * 32),
        (ParallelConfig(cp=2), {}, 5 * 32 * 32 // 2),
        (ParallelConfig(tp=2), {"cuda": True}, 5 * 32 * 32 + 4 * (2 * 32 * 32)),  # two heads, cast to bf16
    ):
        [stage] = memory_plan(SMALL, parallel, replace(WORK, **changes)).stages
        [mask] = [moment for moment in stage.phases if moment.name == memory.BIAS_PHASE]
        assert mask.total == mask.transient == transient


def test_layers_that_differ_have_their_own_masks_and_tables() -> None:
    """Catches one mask planned for layers of different windows, or one for every layer, and rotary tables of layers
    without rope."""
    kinds = [LayerKind(layers=2, window=4), LayerKind(position=Position.rope)]
    [stage] = memory_plan(replace(SMALL, layer_pattern=kinds), ParallelConfig(), WORK).stages
    windowed, plain = (
        memory_plan(replace(SMALL, **changes), ParallelConfig(), WORK).stages[0].attention_bias
        for changes in ({"window": 4}, {"position": Position.rope})
    )
    assert stage.attention_bias == windowed + plain


def test_a_tied_weight_has_one_gradient() -> None:
    """Catches a tied embedding whose gradient allocates a main_grad bucket that has no gradient yet: the rank with both
    ends of a V has allocated all buckets no earlier than at the first block's last weight gradient."""
    model = ModelConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=64)
    parallel = ParallelConfig(pp=2, schedule=ScheduleName.zb_v, virtual_stages=2, bucket_elements=1000)
    work = replace(WORK, seq_len=8, micro_batch_size=1, micro_batches=1)
    first = memory_plan(model, parallel, work).stages[0]
    assert first.fullest.name == "first micro-batch: qkv, weight gradient"
    assert first.fullest.gradients == first.fp32_gradients


def test_what_waits_between_passes() -> None:
    """Catches a p2p buffer or a micro-batch that is counted twice, or on a rank that holds none.

    A hidden tensor in bf16 has 2 * 32 * 64 * 2 bytes. Tokens, labels and mask have 2 * 32 * 20 bytes a micro-batch, for
    four micro-batches of the step and four of the prefetched step.
    """
    hidden, batches = 2 * 32 * 64 * 2, 4 * 2 * (2 * 32 * 20)
    stages = memory_plan(SMALL, ParallelConfig(pp=4), replace(WORK, steps_loaded=2)).stages
    # The first rank sends activations and receives gradients, middle ranks have two peers, the last sends gradients.
    assert [stage.pipeline_buffers for stage in stages] == [
        2 * hidden + batches, 3 * hidden, 3 * hidden, hidden + batches
    ]  # fmt: skip
    # A context-parallel rank holds the whole samples of loaded steps, and its half of those of the current one.
    [half] = memory_plan(SMALL, ParallelConfig(cp=2), replace(WORK, steps_loaded=2)).stages
    assert half.pipeline_buffers == batches + 4 * (32 * 20)


def test_loaded_steps_stay_on_the_host_of_a_gpu() -> None:
    """Catches GPU memory that grows with the micro-batches of a step: long sequences would not fit in the plan."""
    few, many = (
        memory_plan(SMALL, ParallelConfig(cp=2), replace(WORK, micro_batches=count, steps_loaded=4, cuda=True)).stages[
            0
        ]
        for count in (4, 64)
    )
    assert few.pipeline_buffers == many.pipeline_buffers == 2 * (32 * 20)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_running_average_is_as_large_as_the_masters(zero_stage: int) -> None:
    """Catches fp32 averages of the weights that are not planned, in memory and on disk."""
    averaged = OptimConfig(ema_decay=0.999)
    layout = ParallelConfig(dp=2, zero_stage=zero_stage)
    without, kept = (
        memory_plan(SMALL, layout, replace(WORK, optim=optim)).stages[0] for optim in (OptimConfig(), averaged)
    )
    assert kept.optimizer_state - without.optimizer_state == kept.masters == without.masters
    assert kept.optimizer_state == pytest.approx(1.5 * without.optimizer_state)
    small, large = (checkpoint_bytes(RootConfig(model=SMALL, optim=optim)) for optim in (OptimConfig(), averaged))
    assert large == pytest.approx(4 / 3 * small)
