"""The memory plan against the allocator, on real ranks: `pytest -s tests/tools/plan/test_memory_measured.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.model.config import (
    AttentionKind,
    LayerKind,
    MLPKind,
    ModelConfig,
    MupConfig,
    NormKind,
    NormPlacement,
    Position,
    QKNormWidth,
)
from megads.model.moe_config import MoEConfig, RouterScore
from megads.ops.config import Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import ContextParallelKind, Offload, ParallelConfig, Recompute, place_of
from megads.parallel.schedule import ScheduleName
from tests.distributed import run_ranks
from tests.parity import Scenario
from tests.tools.plan.memory_meter import measured_peaks, planned, resident_growth

MODEL = ModelConfig(num_layers=3, hidden_size=256, num_heads=8, vocab_size=2048, max_seq_len=256)
DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
SCENARIO = Scenario(
    model=MODEL, global_batch_size=8, micro_batch_size=4, seq_len=128, precision="bfloat16", hot=False, clip_grad=1.0
)
FP32 = replace(SCENARIO, precision="float32")
LEARNED = replace(MODEL, position=Position.learned, embedding_norm=False, tie_embeddings=False)
# Activations outweigh the weights.
MANY_TOKENS = replace(SCENARIO, model=replace(MODEL, vocab_size=512), seq_len=256, micro_batch_size=2)
# So many tokens and layers that activations outweigh weights: with fewer, a missing one would hardly show.
DEEP = replace(SCENARIO, model=replace(MODEL, num_layers=6, vocab_size=509), seq_len=256, global_batch_size=16)
DEEP_DROPOUT = replace(DEEP, model=replace(DEEP.model, hidden_dropout=0.1, attention_dropout=0.1))
ROPE = replace(MODEL, position=Position.rope)
LLAMA = replace(ROPE, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, num_kv_heads=2, embedding_norm=False, qk_norm=True)
OLMO2 = replace(LLAMA, qk_norm_width=QKNormWidth.full, norm_placement=NormPlacement.output)
CAPPED = replace(MODEL, attention_logit_softcap=20.0, final_logit_softcap=30.0, attention_sinks=True)
GEMMA3 = replace(
    LLAMA, norm_placement=NormPlacement.both, norm_zero_centered=True, mlp=MLPKind.geglu, bias=False,
    layer_pattern=[LayerKind(layers=2, window=40), LayerKind()],
)  # fmt: skip
NEOX = replace(
    ROPE, parallel_block=True, parallel_norms=2, rotary_fraction=0.25, rotary_interleaved=True, qkv_clip=8.0,
    mlp=MLPKind.gelu_exact, tie_embeddings=False, head_bias=True,
)  # fmt: skip
MIXTRAL = replace(LLAMA, bias=False, qk_norm=False, moe=MoEConfig(num_experts=8, expert_ffn_size=512, global_loss=0.01))
# Every token chooses all experts: the load is even.
BOTH = replace(MIXTRAL, moe=replace(MIXTRAL.moe, num_experts=2))
DEEPSEEK = replace(
    BOTH, moe=replace(BOTH.moe, score=RouterScore.sigmoid, shared_ffn_size=256, bias_rate=0.01, first_dense=1)
)
MUP = MupConfig(64, output_multiplier=3.0, base_head_size=20)
PALM = replace(MODEL, parallel_block=True, mlp=MLPKind.swiglu, num_kv_heads=4, window=40)
FUSED = OpsConfig()  # kernels where there is a compiler; the plan follows
# Head and loss in chunks, and so many logits that they would otherwise determine the peak.
CHUNKS = replace(SCENARIO, model=replace(MODEL, num_layers=1, vocab_size=8192), micro_batch_size=8, seq_len=256)
IN_CHUNKS = OpsConfig(loss_chunk=200)
TORCH_IN_CHUNKS = OpsConfig(Implementation.torch, loss_chunk=200)
FEW_TOKENS = replace(SCENARIO, micro_batch_size=1, global_batch_size=2, seq_len=32)

CASES: dict[str, tuple[Scenario, ParallelConfig]] = {
    "single bf16": (SCENARIO, ParallelConfig()),
    "single bf16, dropout": (replace(SCENARIO, model=DROPOUT), ParallelConfig()),
    "single, untied, learned positions": (replace(SCENARIO, model=LEARNED), ParallelConfig()),
    "single, one micro-batch of one long sample": (
        replace(SCENARIO, global_batch_size=1, micro_batch_size=1, seq_len=512),
        ParallelConfig(),
    ),
    "tp2": (SCENARIO, ParallelConfig(tp=2)),
    "pp2, 8 micro-batches": (replace(SCENARIO, global_batch_size=16, micro_batch_size=2), ParallelConfig(pp=2)),
    "dp2": (SCENARIO, ParallelConfig(dp=2)),
    "cp2, rope, long samples, vocabulary 128": (
        replace(SCENARIO, model=replace(ROPE, vocab_size=128), global_batch_size=2, micro_batch_size=1, seq_len=1024),
        ParallelConfig(cp=2),
    ),
    "cp2 by all-to-alls, rope, long samples, vocabulary 128": (
        replace(SCENARIO, model=replace(ROPE, vocab_size=128), global_batch_size=2, micro_batch_size=1, seq_len=1024),
        ParallelConfig(cp=2, cp_kind=ContextParallelKind.ulysses),
    ),
    "cp2 fp32 by all-to-alls, KV heads repeated, packed documents, fused": (
        replace(FP32, documents=True, ops=FUSED, model=replace(MODEL, num_kv_heads=1, vocab_size=128)),
        ParallelConfig(cp=2, cp_kind=ContextParallelKind.ulysses),
    ),
    "cp2 by all-to-alls, cores recomputed, dropout": (
        replace(SCENARIO, model=replace(DROPOUT, vocab_size=128)),
        ParallelConfig(cp=2, cp_kind=ContextParallelKind.ulysses, recompute=Recompute.selective),
    ),
    "cp2 in a ring, rope, long samples, vocabulary 128": (
        replace(SCENARIO, model=replace(ROPE, vocab_size=128), global_batch_size=2, micro_batch_size=1, seq_len=1024),
        ParallelConfig(cp=2, cp_kind=ContextParallelKind.ring),
    ),
    "cp2 fp32 in a ring, one KV head, packed documents, fused": (
        replace(FP32, documents=True, ops=FUSED, model=replace(MODEL, num_kv_heads=1, vocab_size=128)),
        ParallelConfig(cp=2, cp_kind=ContextParallelKind.ring),
    ),
    "cp2 in a ring, cores recomputed, dropout": (
        replace(SCENARIO, model=replace(DROPOUT, vocab_size=128)),
        ParallelConfig(cp=2, cp_kind=ContextParallelKind.ring, recompute=Recompute.selective),
    ),
    "cp4 by all-to-alls in pairs, rope, long samples, vocabulary 128": (
        replace(SCENARIO, model=replace(ROPE, vocab_size=128), global_batch_size=2, micro_batch_size=1, seq_len=2048),
        ParallelConfig(cp=4, cp_ulysses=2),
    ),
    "cp4 in rings of ranks with the same heads, one KV head, vocabulary 128": (
        replace(
            SCENARIO,
            model=replace(ROPE, vocab_size=128, num_kv_heads=1),
            global_batch_size=2,
            micro_batch_size=1,
            seq_len=2048,
        ),
        ParallelConfig(cp=4, cp_ulysses=2, cp_kind=ContextParallelKind.ring),
    ),
    "single, packed documents": (replace(SCENARIO, documents=True), ParallelConfig()),
    "tp2, sequence parallel, dropout": (
        replace(MANY_TOKENS, model=replace(MANY_TOKENS.model, hidden_dropout=0.1)),
        ParallelConfig(tp=2, sequence_parallel=True),
    ),
    "tp2 pp2, sequence parallel": (
        replace(MANY_TOKENS, precision="float32"),
        ParallelConfig(tp=2, pp=2, sequence_parallel=True),
    ),
    "zero 3, dp2": (SCENARIO, ParallelConfig(dp=2, zero_stage=3)),
    "zero 3, dp4 in shards of 2, few tokens": (
        replace(FEW_TOKENS, global_batch_size=4),
        ParallelConfig(dp=4, zero_stage=3, zero_shard_size=2),
    ),
    "pp4, 4 micro-batches, dropout": (
        replace(SCENARIO, model=DROPOUT, global_batch_size=8, micro_batch_size=2),
        ParallelConfig(pp=4),
    ),
    "pp2, interleaved": (DEEP, ParallelConfig(pp=2, schedule=ScheduleName.interleaved)),
    "pp2, zb_v, untied": (
        replace(DEEP, model=replace(DEEP.model, tie_embeddings=False)),
        ParallelConfig(pp=2, schedule=ScheduleName.zb_v),
    ),
    "pp2, dualpipe_v, full recomputation": (
        DEEP,
        ParallelConfig(pp=2, schedule=ScheduleName.dualpipe_v, recompute=Recompute.full),
    ),
    "pp4, zb_h1": (replace(DEEP, micro_batch_size=2), ParallelConfig(pp=4, schedule=ScheduleName.zb_h1)),
    "single, dropout, recompute=selective": (DEEP_DROPOUT, ParallelConfig(recompute=Recompute.selective)),
    "pp2, every second block in full": (DEEP, ParallelConfig(pp=2, recompute=Recompute.full, recompute_interval=2)),
    "tp2, dropout, recompute=full": (DEEP_DROPOUT, ParallelConfig(tp=2, recompute=Recompute.full)),
    "single bf16, fused": (replace(SCENARIO, ops=FUSED), ParallelConfig()),
    "single, llama, recompute=full": (
        replace(DEEP, model=replace(LLAMA, num_layers=6)),
        ParallelConfig(recompute=Recompute.full),
    ),
    "tp2 fp32, llama, fused": (replace(FP32, model=LLAMA, ops=FUSED), ParallelConfig(tp=2)),
    "single, olmo2": (replace(DEEP, model=replace(OLMO2, num_layers=6)), ParallelConfig()),
    "tp2, sequence parallel, olmo2, fused": (
        replace(DEEP, model=replace(OLMO2, num_layers=6), ops=FUSED),
        ParallelConfig(tp=2, sequence_parallel=True),
    ),
    "single, capped, sinks": (replace(DEEP, model=replace(CAPPED, num_layers=6)), ParallelConfig()),
    "single, capped by kernels": (
        replace(DEEP, model=replace(CAPPED, num_layers=6, attention_sinks=False), ops=FUSED),
        ParallelConfig(),
    ),
    "single, gemma3": (replace(DEEP, model=replace(GEMMA3, num_layers=6)), ParallelConfig()),
    "tp2, gemma3, fused": (
        replace(DEEP, model=replace(GEMMA3, num_layers=6), ops=FUSED),
        ParallelConfig(tp=2, sequence_parallel=True),
    ),
    "single, gpt-neox": (replace(DEEP, model=replace(NEOX, num_layers=6), ops=FUSED), ParallelConfig()),
    "zero 3, dp2, running average": (
        replace(SCENARIO, optimizer=OptimConfig(ema_decay=0.9)),
        ParallelConfig(dp=2, zero_stage=3),
    ),
    "single, mup": (replace(DEEP, model=replace(DEEP.model, mup=MUP)), ParallelConfig()),
    "tp2, llama, mup, fused": (
        replace(DEEP, model=replace(LLAMA, num_layers=6, qk_norm=False, mup=MUP), ops=FUSED),
        ParallelConfig(tp=2),
    ),
    "zero 3, dp2, mup": (replace(SCENARIO, model=replace(MODEL, mup=MUP)), ParallelConfig(dp=2, zero_stage=3)),
    "single, many tokens, palm, fused": (
        replace(MANY_TOKENS, model=replace(PALM, vocab_size=512), ops=FUSED),
        ParallelConfig(),
    ),
    "pp2, zb_h1, palm, fused": (
        replace(DEEP, model=replace(PALM, num_layers=6), ops=FUSED),
        ParallelConfig(pp=2, schedule=ScheduleName.zb_h1),
    ),
    "single bf16, dropout, fused": (replace(SCENARIO, model=DROPOUT, ops=FUSED), ParallelConfig()),
    "single bf16, fused softmax, recompute=selective": (
        replace(DEEP, model=replace(DEEP.model, attention=AttentionKind.fused_softmax), ops=FUSED),
        ParallelConfig(recompute=Recompute.selective),
    ),
    "single, logits outweigh blocks, fused": (
        replace(
            SCENARIO, model=replace(MODEL, num_layers=1, vocab_size=8192), micro_batch_size=8, seq_len=256, ops=FUSED
        ),
        ParallelConfig(),
    ),
    "cp2 fp32, packed documents, fused": (replace(FP32, documents=True, ops=FUSED), ParallelConfig(cp=2)),
    "single, loss in chunks, fused": (replace(CHUNKS, ops=IN_CHUNKS), ParallelConfig()),
    "tp2 fp32, loss in chunks, fused": (replace(CHUNKS, precision="float32", ops=IN_CHUNKS), ParallelConfig(tp=2)),
    "tp2, sequence parallel, loss in chunks": (
        replace(CHUNKS, ops=TORCH_IN_CHUNKS),
        ParallelConfig(tp=2, sequence_parallel=True),
    ),
    "pp2, zb_v, loss in chunks, fused": (
        replace(DEEP, ops=IN_CHUNKS, model=replace(DEEP.model, vocab_size=4096)),
        ParallelConfig(pp=2, schedule=ScheduleName.zb_v),
    ),
    "zero 2, dp2, loss in chunks": (
        replace(CHUNKS, ops=TORCH_IN_CHUNKS, micro_batch_size=4),
        ParallelConfig(dp=2, zero_stage=2),
    ),
}
CHUNKED = replace(DEEP, ops=OpsConfig(Implementation.torch, mlp_chunk=128))
AWAY = Offload.activations
CASES |= {
    "single, offloaded": (DEEP, ParallelConfig(offload=AWAY)),
    "single fp32, dropout, fused, offloaded": (
        replace(DEEP_DROPOUT, precision="float32", ops=FUSED),
        ParallelConfig(offload=AWAY),
    ),
    "single, dropout, recompute=selective, offloaded": (
        DEEP_DROPOUT,
        ParallelConfig(recompute=Recompute.selective, offload=AWAY),
    ),
    "pp2, recompute=full, offloaded": (DEEP, ParallelConfig(pp=2, recompute=Recompute.full, offload=AWAY)),
    "pp2, zb_v, offloaded": (DEEP, ParallelConfig(pp=2, schedule=ScheduleName.zb_v, offload=AWAY)),
    "zero 3, dp2, offloaded": (DEEP, ParallelConfig(dp=2, zero_stage=3, offload=AWAY)),
    "single, recompute=full, MLP in chunks": (CHUNKED, ParallelConfig(recompute=Recompute.full)),
    "single, MLP in chunks, offloaded": (CHUNKED, ParallelConfig(offload=AWAY)),
    "tp2, sequence parallel, llama, fused, MLP in chunks": (
        replace(CHUNKED, model=replace(LLAMA, num_layers=6), ops=replace(CHUNKED.ops, impl=Implementation.fused)),
        ParallelConfig(tp=2, sequence_parallel=True, recompute=Recompute.full),
    ),
    "zero 2, dp2, MLP in chunks": (CHUNKED, ParallelConfig(dp=2, zero_stage=2, recompute=Recompute.full)),
}
CASES |= {
    f"{layout}, {what}": (replace(DEEP, model=replace(model, num_layers=6), **changes), parallel)
    for layout, what, model, changes, parallel in (
        ("single", "mixtral", MIXTRAL, {}, ParallelConfig()),
        ("single", "mixtral, fused", MIXTRAL, {"ops": FUSED}, ParallelConfig()),
        ("single", "mixtral, recompute=full", MIXTRAL, {}, ParallelConfig(recompute=Recompute.full)),
        ("ep2", "experts", BOTH, {}, ParallelConfig(dp=2, ep=2)),
        ("ep2 fp32", "experts, fused", BOTH, {"ops": FUSED, "precision": "float32"}, ParallelConfig(dp=2, ep=2)),
        ("ep2", "deepseek, fused", DEEPSEEK, {"ops": FUSED}, ParallelConfig(dp=2, ep=2)),
        ("tp2", "sequence parallel, deepseek", DEEPSEEK, {}, ParallelConfig(tp=2, sequence_parallel=True)),
        ("tp2 ep2", "sequence parallel, whole experts", BOTH, {},
         ParallelConfig(tp=2, ep=2, sequence_parallel=True, expert_tp=False)),
    )
}  # fmt: skip
WORLD_SIZES = sorted({parallel.world_size for _, parallel in CASES.values()})
CASES_A_START = 4
TOLERANCE = 0.05
MIB = 2**20


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, list[int]]:
    """Returns the peak of every rank in this session's cases; each start of ranks runs a few, to avoid a timeout."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    peaks: dict[str, list[int]] = {}
    for world_size in WORLD_SIZES:
        names = [name for name, (_, parallel) in CASES.items() if parallel.world_size == world_size and name in asked]
        for start in range(0, len(names), CASES_A_START):
            some = names[start : start + CASES_A_START]
            by_rank = run_ranks(measured_peaks, world_size, [CASES[name] for name in some])
            peaks |= {name: list(of_case) for name, of_case in zip(some, zip(*by_rank, strict=True), strict=True)}
    rows = ["", "| layout and config | stage | predicted MiB | measured MiB | off |", "|---|---|---|---|---|"]
    for name, ranks in peaks.items():
        rows += [
            f"| {name} | {stage} | {plan / MIB:.1f} | {real / MIB:.1f} | {plan / real - 1:+.1%} |"
            for stage, (plan, real) in enumerate(by_stage(name, ranks))
        ]
    print("\n".join(rows))
    return peaks


def by_stage(name: str, ranks: list[int]) -> list[tuple[int, int]]:
    """Returns (planned, largest measured) bytes of the ranks of every stage."""
    scenario, parallel = CASES[name]
    stages = planned(scenario, parallel).stages
    pairs = []
    for stage in stages:
        mine = [real for rank, real in enumerate(ranks) if place_of(rank, parallel).pp == stage.stage]
        # Offloaded activations are in memory that the meter does not see.
        pairs.append((stage.peak - stage.host_activations, max(mine)))
    return pairs


# One case of each mechanism is quick; the others are slow only because there are many.
@pytest.mark.distributed
@pytest.mark.quick(
    "single bf16",
    "tp2 pp2, sequence parallel",
    "zero 3, dp2",
    "cp2 fp32, packed documents, fused",
    "single, loss in chunks, fused",
    "single, logits outweigh blocks, fused",
    "ep2, experts",
    "single, offloaded",
    "single, recompute=full, MLP in chunks",
)
@pytest.mark.parametrize("name", CASES)
def test_plan_equals_allocator(name: str, measured: dict[str, list[int]]) -> None:
    """Catches an operation that saves more than is planned, a schedule that holds more micro-batches, a missing copy.

    The bound is tighter than the 10% that users are promised: at 10% a missing activation of a block would pass.
    """
    for stage, (plan, real) in enumerate(by_stage(name, measured[name])):
        assert plan == pytest.approx(real, rel=TOLERANCE), f"stage {stage}"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_meter_agrees_with_the_kernel() -> None:
    """Catches a meter that misses memory: the kernel's resident memory must grow by as much as the plan predicts."""
    scenario = replace(SCENARIO, model=replace(MODEL, hidden_size=512, vocab_size=8192, num_layers=4), seq_len=256)
    peak = planned(scenario, ParallelConfig()).largest.peak
    [growth] = run_ranks(resident_growth, 1, FEW_TOKENS, scenario, ParallelConfig())
    print(f"\npredicted {peak / MIB:.1f} MiB, VmHWM grew by {growth / MIB:.1f} MiB, {peak / growth - 1:+.1%}")
    assert peak > 300 * MIB
    assert peak == pytest.approx(growth, rel=0.1)
