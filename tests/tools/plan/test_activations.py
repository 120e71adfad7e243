"""Planned activation memory of operations against what autograd saves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo, MicroBatch
from megads.engine.stage_pipeline import recompute_module
from megads.model.config import AttentionKind, MLPKind, ModelConfig, NormKind, NormPlacement, Position, QKNormWidth
from megads.model.gpt import Block, Embedding, FinalNorm, initial_value, make_block, use_kernels
from megads.model.sharding import SHARDING, sharding_of
from megads.ops import linear as gemm
from megads.parallel.config import ContextParallelKind, ParallelConfig, Recompute
from megads.parallel.context import shard_micro_batch, wrap_attention_cores
from megads.parallel.grid import Axis, build_grid
from megads.parallel.region_linear import Region
from megads.parallel.sharding import materialise, shard_layer
from megads.tools.plan.activations import block_ops, embedding_ops, final_norm_ops, stage_ops
from megads.tools.plan.memory_timeline import (
    MainGradMemory,
    Moment,
    Op,
    backward_moments,
    forward_moments,
    kept_bytes,
    recomputed,
)
from megads.tools.plan.micro_batch import FP32, INT64, BatchSizes
from tests.distributed import run_ranks
from tests.parallel.test_region_linear import tensor_axis

MODEL = ModelConfig(num_layers=1, hidden_size=96, num_heads=6, vocab_size=320, max_seq_len=64, ffn_size=168)
BATCH, SEQ_LEN = 2, 32


@dataclass(eq=False)
class Saved:
    """A tensor that autograd saves, as long as it does."""

    tensor: Tensor


def saved_bytes(layer: torch.nn.Module, inputs: Tensor, info: BatchInfo | None = None) -> int:
    """Bytes of the storages that are saved for the backward pass after a forward pass, parameters excluded.

    On any processor as on one with bf16 GEMMs: elsewhere autograd also saves fp32 copies of what it multiplies, which
    the engine's layers and the fused kernel do not.
    """
    noted = WeakSet[Saved]()

    def note(tensor: Tensor) -> Saved:
        noted.add(saved := Saved(tensor))
        return saved

    info = info or BatchInfo(torch.arange(BATCH))
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved.tensor)
    with hooks, mock.patch.object(gemm, "_torch_loops", lambda: False):
        output = layer(inputs, info)
    storages = [one.tensor.untyped_storage() for one in noted]
    saved = {storage.data_ptr(): storage.nbytes() for storage in storages}
    kept = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    assert output.requires_grad
    return sum(size for address, size in saved.items() if address not in kept)


@pytest.mark.parametrize(
    ("dtype", "hidden", "attention", "position", "tp"),
    [
        *product((torch.bfloat16, torch.float32), (0.0, 0.1), (0.0, 0.1), (Position.alibi,), (1, 3)),
        (torch.bfloat16, 0.0, 0.0, Position.learned, 1),
        *product((torch.bfloat16, torch.float32), (0.0,), (0.0, 0.1), (Position.rope,), (1, 3)),
    ],
)
def test_block(dtype: torch.dtype, hidden: float, attention: float, position: Position, tp: int) -> None:
    """Catches an operation of the block that saves more or fewer bytes than the plan says.

    With tensor parallelism, one rank's shard runs without collectives, which save nothing.
    """
    model = replace(MODEL, hidden_dropout=hidden, attention_dropout=attention, position=position)
    check_block(model, dtype, tp)


FEATURES = {
    "shared keys": {"num_kv_heads": 3},
    "shared keys, rope": {"num_kv_heads": 3, "position": Position.rope},
    "RMSNorm": {"norm": NormKind.rmsnorm},
    "SwiGLU": {"mlp": MLPKind.swiglu},
    "parallel": {"parallel_block": True},
    "no biases": {"bias": False},
    "wide heads": {"head_size": 10, "num_kv_heads": 3},
    "normed heads": {"qk_norm": True},
    "norms of outputs": {"norm_placement": NormPlacement.output, "hidden_dropout": 0.1},
    "capped": {"attention_logit_softcap": 0.7, "num_kv_heads": 3},
    "sinks": {"attention_sinks": True, "num_kv_heads": 3},
    "norms on both sides": {"norm_placement": NormPlacement.both, "hidden_dropout": 0.1},
    "two norms of a parallel block": {"parallel_block": True, "parallel_norms": 2, "num_kv_heads": 3},
    "norm weights around 0": {"norm_zero_centered": True, "norm": NormKind.rmsnorm, "qk_norm": True},
    "norms without weights": {"norm_affine": False},
    "RMSNorm without weights": {"norm_affine": False, "norm": NormKind.rmsnorm},
    "clipped": {"qkv_clip": 0.5, "num_kv_heads": 3},
    "part of the head rotated": {"position": Position.rope, "rotary_fraction": 0.5},
    "adjacent features rotated": {"position": Position.rope, "rotary_interleaved": True, "num_kv_heads": 3},
    "no positions": {"position": Position.none},
    "multipliers": {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "hidden_dropout": 0.1},
    **{f"MLP with {kind.value}": {"mlp": kind} for kind in MLPKind},
    "parallel block with ReLU": {"mlp": MLPKind.relu, "parallel_block": True},
    "Qwen3": {
        "qk_norm": True, "head_size": 10, "num_kv_heads": 3, "norm": NormKind.rmsnorm, "position": Position.rope,
    },
    "OLMo 2": {
        "qk_norm": True, "qk_norm_width": QKNormWidth.full, "num_kv_heads": 3, "norm": NormKind.rmsnorm,
        "norm_placement": NormPlacement.output, "position": Position.rope, "mlp": MLPKind.swiglu,
    },
    "all": {
        "num_kv_heads": 3, "qk_norm": True, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "parallel_block": True,
        "attention_dropout": 0.1, "hidden_dropout": 0.1,
    },
}  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", FEATURES)
def test_block_with_features(features: str, dtype: torch.dtype, fused: bool) -> None:
    """Catches a projection kept in addition to its copies, a norm that parallel branches keep twice, gates counted once
    that are kept twice; with torch's operators and with our own."""
    model = replace(MODEL, **FEATURES[features])
    # A norm over all heads needs a collective: test_block_on_a_shard_of_the_sequence checks what it saves.
    for tp in (1,) if model.qk_norm_width is QKNormWidth.full else (1, 3):
        check_block(model, dtype, tp, fused)


@pytest.mark.parametrize("features", [{}, {"num_kv_heads": 3}])
def test_block_with_augmented_attention(features: dict[str, Any]) -> None:
    """Catches extra features of the heads that are not counted, and a mask that is counted although none is kept."""
    model = replace(MODEL, attention=AttentionKind.augmented, **features)
    for tp in (1, 3):
        check_block(model, torch.bfloat16, tp)


@pytest.mark.parametrize("position", [Position.alibi, Position.rope])
def test_attention_kinds_of_gpus(position: Position) -> None:
    """Catches a mask counted for kernels that need none, one missing for cuDNN with a bias, wrong copies of keys that
    heads share, and a GPU kind that changes the plan for a CPU. The sizes have not been measured on a GPU."""
    model = replace(MODEL, position=position, num_kv_heads=3)
    sdpa, flash, flex, cudnn = (
        BatchSizes(replace(model, attention=kind), 1, BATCH, SEQ_LEN, 2, cuda=True)
        for kind in (AttentionKind.sdpa, AttentionKind.flash, AttentionKind.flex, AttentionKind.cudnn)
    )
    alibi = position is Position.alibi
    assert not flash.bias_table and not flex.bias_table
    assert bool(cudnn.bias_table) is bool(sdpa.bias_table) is bool(sdpa.repeated_keys) is alibi
    kept = [kept_bytes(block_ops(p)) for p in (flash, flex, sdpa, cudnn)]
    assert kept[0] == kept[1] == kept[2] - sdpa.repeated_keys == kept[3] - cudnn.repeated_keys and cudnn.repeated_keys
    assert BatchSizes(replace(model, attention=AttentionKind.sdpa), 1, BATCH, SEQ_LEN, 4, cuda=True).repeated_keys
    packed = replace(cudnn, document_mask=True)
    assert packed.bias_table
    for kind in (AttentionKind.flash, AttentionKind.flex, AttentionKind.cudnn):
        on_cpu, plain = (
            BatchSizes(replace(model, attention=k), 1, BATCH, SEQ_LEN, 2) for k in (kind, AttentionKind.sdpa)
        )
        assert block_ops(on_cpu) == block_ops(plain) and on_cpu.bias_table == plain.bias_table


def check_block(model: ModelConfig, dtype: torch.dtype, tp: int, fused: bool = False) -> None:
    """Asserts that a block on one of `tp` ranks saves what the plan says."""
    with torch.device("meta"):
        unsharded = make_block(model, 0, 0)
    if fused:
        use_kernels(unsharded)
    block, placements = shard_layer(
        unsharded, "blocks.0", sharding_of(model), Axis(0, tuple(range(tp)), None), sequence_parallel=False
    )
    materialise(block, placements, initial_value(model, 0), torch.device("cpu"))
    for module in block.modules():
        if hasattr(module, "region"):
            module.region = Region(Axis(0, (0,), None))
    inputs = torch.randn(BATCH, SEQ_LEN, model.hidden_size, dtype=dtype, requires_grad=True)
    one_pass = BatchSizes(model, tp, BATCH, SEQ_LEN, dtype.itemsize, fused=fused)
    # The kernel also saves the cached mask or slopes, which the plan counts once for all blocks; an add does not.
    added = model.attention_dropout or model.scores_in_memory
    mask = one_pass.rotary_tables + (0 if added else one_pass.bias_table * 4)
    if one_pass.fused_attention and model.position is Position.alibi:
        mask += 4 * model.num_heads // tp
    if fused and (model.hidden_dropout or model.attention_dropout):
        mask += BATCH * INT64  # the numbers of the micro-batch's samples
    assert saved_bytes(block.to(dtype), inputs) - mask == kept_bytes(block_ops(one_pass))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("dtype", "dropout", "position", "attention"),
    [
        (torch.bfloat16, 0.0, Position.alibi, AttentionKind.auto),
        (torch.bfloat16, 0.1, Position.alibi, AttentionKind.auto),
        (torch.float32, 0.1, Position.rope, AttentionKind.auto),
        (torch.bfloat16, 0.0, Position.alibi, AttentionKind.fused_softmax),
    ],
)
def test_block_of_kernels(dtype: torch.dtype, dropout: float, position: Position, attention: AttentionKind) -> None:
    """Catches a mask, statistics or fp32 probabilities that a kernel saves but the plan omits, or vice versa."""
    model = replace(
        MODEL, hidden_dropout=dropout, attention_dropout=dropout, position=position, attention=attention, init_std=0.1
    )
    block = Block(model, 0, 0).to(dtype)
    use_kernels(block)
    inputs = torch.randn(BATCH, SEQ_LEN, model.hidden_size, dtype=dtype, requires_grad=True)
    one_pass = BatchSizes(model, 1, BATCH, SEQ_LEN, dtype.itemsize, fused=True)
    shared = one_pass.rotary_tables + one_pass.heads * FP32 * (
        position is Position.alibi and not one_pass.explicit_attention
    )
    shared += BATCH * INT64 if dropout else 0  # the numbers of the micro-batch's samples
    assert saved_bytes(block, inputs) - shared == kept_bytes(block_ops(one_pass))


def _saved_on_a_shard(model: ModelConfig) -> int:
    """Bytes that this rank of a tensor-parallel group saves in a block with sequence parallelism."""
    axis = tensor_axis()
    with torch.device("meta"):
        unsharded = make_block(model, 0, 0)
    block, placements = shard_layer(unsharded, "blocks.0", sharding_of(model), axis, sequence_parallel=True)
    materialise(block, placements, initial_value(model, 0), torch.device("cpu"))
    return saved_bytes(block, torch.randn(BATCH, SEQ_LEN // axis.size, model.hidden_size, requires_grad=True))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_dropout": 0.1},
        FEATURES["OLMo 2"] | {"num_kv_heads": 2},
        {"num_kv_heads": 1},
        {"num_kv_heads": 1, "position": Position.rope, "qk_norm": True, "parallel_block": True},
        {"num_kv_heads": 1, "attention_logit_softcap": 0.7},
    ],
)
def test_block_on_a_shard_of_the_sequence(changes: dict[str, Any]) -> None:
    """Catches an all-gathered sequence that is saved for backward, a norm or dropout on the whole sequence, a wrong
    count of what a norm over all heads saves, and keys that ranks share counted in parts or saved twice."""
    model = replace(MODEL, **changes)
    one_pass = BatchSizes(model, 2, BATCH, SEQ_LEN, 4, sequence_parallel=True)
    for saved in run_ranks(_saved_on_a_shard, 2, model):
        shared = one_pass.rotary_tables + (0 if model.scores_in_memory else one_pass.bias_table * 4)
        assert saved - shared == kept_bytes(block_ops(one_pass))


@pytest.mark.parametrize("mode", [Recompute.selective, Recompute.full])
@pytest.mark.parametrize("attention", [0.0, 0.1])
def test_recomputed_block(mode: Recompute, attention: float) -> None:
    """Catches recomputation that saves more than its inputs, and a wrong count of the core's output or projection."""
    model = replace(MODEL, hidden_dropout=0.1, attention_dropout=attention)
    block = Block(model, 0, 0)
    recompute_module(block if mode is Recompute.full else block.attention.core)
    inputs = torch.randn(BATCH, SEQ_LEN, model.hidden_size, requires_grad=True)
    one_pass = BatchSizes(model, 1, BATCH, SEQ_LEN, 4)
    assert saved_bytes(block, inputs) == kept_bytes(block_ops(one_pass, mode)) < kept_bytes(block_ops(one_pass))


def saved_and_planned_of_a_context_rank(
    parallel: ParallelConfig, attention_dropout: float, position: Position, kv_heads: int
) -> tuple[int, int]:
    """Bytes that a block saves on a context-parallel rank, and the plan's; both with the cached mask."""
    grid = build_grid(parallel, torch.distributed.get_rank(), parallel.cp)
    model = replace(MODEL, attention_dropout=attention_dropout, position=position, num_kv_heads=kv_heads)
    with torch.device("meta"):
        block, placements = shard_layer(Block(model, 0, 0), "blocks.0", SHARDING, grid.tp, sequence_parallel=False)
    wrap_attention_cores(block, "blocks.0", SHARDING, grid, parallel.cp_kind)
    materialise(block, placements, initial_value(model, 0), torch.device("cpu"))
    whole = MicroBatch(BatchInfo(torch.arange(BATCH), seq_len=SEQ_LEN))
    info = shard_micro_batch(whole, grid.cp, torch.device("cpu"), parallel.ulysses_size).info
    inputs = torch.randn(BATCH, SEQ_LEN // parallel.cp, model.hidden_size, requires_grad=True)
    kind = {"cp": parallel.cp, "cp_kind": parallel.cp_kind, "cp_ulysses": parallel.cp_ulysses}
    one_pass = BatchSizes(model, 1, BATCH, SEQ_LEN, FP32, **kind)  # type: ignore[arg-type]
    tables = one_pass.rotary_tables + (0 if attention_dropout else one_pass.bias_table * FP32)
    return saved_bytes(block, inputs, info), kept_bytes(block_ops(one_pass)) + tables


@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [
        *(ParallelConfig(cp=2, cp_kind=kind) for kind in ContextParallelKind if kind is not ContextParallelKind.auto),
        ParallelConfig(cp=4, cp_ulysses=2),
        ParallelConfig(cp=4, cp_ulysses=2, cp_kind=ContextParallelKind.ring),
    ],
    ids=lambda parallel: parallel.context_text,
)
@pytest.mark.parametrize("kv_heads", [6, 2, 3])
def test_a_block_of_a_context_rank(parallel: ParallelConfig, kv_heads: int) -> None:
    """Catches exchanged keys and values saved together with their shards or the whole QKV projection, repeated KV heads
    that are saved twice, and an output that is saved once if it has been exchanged."""
    for dropout, position in ((0.0, Position.alibi), (0.1, Position.alibi), (0.0, Position.rope)):
        for saved, expected in run_ranks(
            saved_and_planned_of_a_context_rank, parallel.cp, parallel, dropout, position, kv_heads
        ):
            assert saved == expected, (dropout, position)


@pytest.mark.parametrize("norm", [True, False])
def test_ends(norm: bool) -> None:
    """Catches an embedding or a final norm that saves more or less than planned, except for token ids."""
    model = replace(MODEL, embedding_norm=norm, hidden_dropout=0.1)
    one_pass = BatchSizes(model, 1, BATCH, SEQ_LEN, 4)
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    ids = embedding_ops(one_pass)[0].kept
    saved = saved_bytes(Embedding(model, 0), tokens) - tokens.nbytes
    assert 0 <= kept_bytes(embedding_ops(one_pass)) - saved <= ids
    hidden = torch.randn(BATCH, SEQ_LEN, model.hidden_size, requires_grad=True)
    assert saved_bytes(FinalNorm(model), hidden) == kept_bytes(final_norm_ops(one_pass))


def moments(ops: list[Op], waiting: int, main_grads: MainGradMemory) -> list[Moment]:
    """Of a forward and a backward pass, while `waiting` other micro-batches wait for theirs."""
    held = waiting * kept_bytes(ops)
    return [*forward_moments(ops, held, main_grads), *backward_moments(ops, held, main_grads)]


def test_moments() -> None:
    """Catches memory freed too early, a step's first gradients counted before they exist, a shared weight's gradient
    counted twice, and a missing fp32 copy, with which a CPU accumulates a bf16 gradient after it has freed the
    operation's tensors."""
    ops = [
        Op("a", kept=3, forward=5, backward=7, gradient=4, shared=True),
        Op("b", kept=20, forward=1, backward=2, gradient=4),
    ]
    first = moments(ops, 1, MainGradMemory(lambda made: made, widening=2, cast=True))
    assert [m.total for m in first] == [23 + 3 + 5, 23 + 23 + 1, 8 + 23 + 23 + 2 + 4, 8 + 23 + 3 + 7 + 4 + (8 - 3)]
    later = moments(ops, 0, MainGradMemory(lambda _: 9, widening=2))
    assert [m.total for m in later] == [9 + 3 + 5, 9 + 23 + 1, 9 + 23 + 2 + 4, 9 + 3 + 7 + 4]


def test_moments_of_recomputed_operations() -> None:
    """Catches a plan in which recomputed tensors cost nothing, or stay until the end of the backward pass."""
    ops = [Op("a", kept=10, forward=5, backward=7), Op("b", kept=20, forward=9, backward=2)]
    again = recomputed(ops, inputs=4, arriving=3)
    found = [moment.total for moment in moments(again, 2, MainGradMemory(lambda _: 0))]
    assert found[2:] == [3 * 4 + 3 + (10 - 4) + 20 + 9, 3 * 4 + (10 - 4) + 7]


def test_sizes_worked_out_by_hand() -> None:
    """Catches a temporary that is missing, counted twice or of the wrong dtype, also where it does not set the peak.

    Six tokens of four bf16 numbers: a hidden tensor H is 48 bytes, queries, keys and values are 144, the MLP's
    activations 240, the logits 120. Each size is written as the sum of its tensors.
    """
    model = ModelConfig(num_layers=1, hidden_size=4, num_heads=2, vocab_size=10, ffn_size=20, max_seq_len=8)
    one_pass = BatchSizes(model, 1, 2, 3, 2)
    layers = dict.fromkeys(["embedding", "blocks.0", "final_norm", "head"], Recompute.none)
    ops = stage_ops(one_pass, layers, first=True, last=True)
    assert [(op.name, op.kept, op.forward, op.backward, op.gradient, op.deferred) for op in ops] == [
        # four int64 per token; the embeddings and their copy; the gradient in bf16 and an fp32 sum per token
        ("embedding", 6 * 4 * 8, 2 * 48, 48 + 6 * 4 * 4, 10 * 4 * 2, 0),
        ("embedding norm", 48 + 6 * 2 * 2, 48, 2 * 48, 0, 0),
        ("input norm", 72, 48, 3 * 48, 0, 0),
        ("qkv", 48, 144, 48 + 48 + 144, 12 * 4 * 2, 48 + 144),
        # an fp32 logsumexp of two heads; the gradients of the output, of the three inputs and of the residual
        ("attention", 144 + 48 + 6 * 2 * 4, 0, 48 + 48 + 144, 0, 0),
        ("attention output", 0, 2 * 48, 48 + 48, 4 * 4 * 2, 48 + 48),
        ("attention residual", 0, 2 * 48, 48, 0, 0),
        ("post-attention norm", 72, 48 + 48, 3 * 48, 0, 0),
        ("mlp up", 48, 48 + 240, 48 + 48 + 240, 20 * 4 * 2, 48 + 240),
        ("gelu", 240, 48 + 240, 48 + 2 * 240, 0, 0),
        ("mlp down", 240, 48 + 2 * 48, 48 + 240, 20 * 4 * 2, 240 + 48),
        ("mlp residual", 0, 48 + 2 * 48, 48, 0, 0),
        ("final norm", 72, 48, 2 * 48, 0, 0),
        ("head", 48, 120, 48 + 120, 10 * 4 * 2, 48 + 120),
        # fp32 probabilities and two int64 per token; temporaries of six fp32 numbers per token
        ("loss", 6 * 10 * 4 + 6 * 2 * 8, 120 + 6 * 6 * 4, 240 + 120 + 6 * 6 * 4, 0, 0),
    ]
    received, *_, sent = stage_ops(one_pass, {"blocks.0": Recompute.none}, first=False, last=False)
    assert (received.kept, received.forward, received.backward) == (48, 0, 48)
    # a boolean per element and the two masks that are combined into it
    assert (sent.kept, sent.forward, sent.backward) == (0, 48 + 3 * 6 * 4, 0)
    # Three tokens at a time: logits, and on a CPU the weight gradient with its fp32 copy; on a GPU fp32 probabilities
    # and six numbers per token are larger, with our own kernels only twelve numbers.
    chunks = replace(one_pass, loss_chunk=3)
    for changes, working in (
        ({}, 60 + 80 + 2 * 80),
        ({"cuda": True}, 60 + 3 * 10 * 4 + 6 * 3 * 4),
        ({"cuda": True, "fused": True}, 60 + 12 * 3 * 4),
    ):
        _, head = stage_ops(replace(chunks, **changes), {"head": Recompute.none}, first=False, last=True)
        assert (head.kept, head.forward, head.backward, head.gradient, head.early) == (48, 48 + working, 0, 0, 80)
    by_autograd = stage_ops(replace(chunks, fused_accumulation=False), {"head": Recompute.none}, first=True, last=True)[
        0
    ]
    assert (by_autograd.kept, by_autograd.gradient, by_autograd.early) == (48 + 160, 80, 0)


def test_sizes_of_other_blocks_worked_out_by_hand() -> None:
    """Catches gates counted once, and parallel branches counted as sharing a tensor that each has; sizes as above."""
    model = ModelConfig(num_layers=1, hidden_size=4, num_heads=2, vocab_size=10, ffn_size=20, max_seq_len=8)
    one_pass = BatchSizes(model, 1, 2, 3, 2)

    def sizes(p: BatchSizes) -> list[tuple[str, int, int, int, int, int]]:
        return [(op.name, op.kept, op.forward, op.backward, op.gradient, op.deferred) for op in block_ops(p)]

    gated = replace(one_pass, model=replace(model, mlp=MLPKind.swiglu))
    up, inner, down = sizes(gated)[-4:-1]
    assert up == ("mlp up", 48, 48 + 480, 48 + 48 + 480, 40 * 4 * 2, 48 + 480)
    # gate, value and silu(gate); the gradient of the output, and two copies of each of the two inputs'
    assert inner == ("swiglu", 3 * 240, 48 + 240, 48 + 5 * 240, 0, 0)
    assert down == sizes(one_pass)[-2] == ("mlp down", 240, 48 + 96, 48 + 240, 20 * 4 * 2, 240 + 48)
    assert sizes(replace(gated, fused=True))[-3] == ("swiglu", 2 * 240, 48 + 240, 48 + 3 * 240, 0, 0)
    assert sizes(replace(one_pass, model=replace(model, parallel_block=True))) == [
        ("input norm", 72, 48, 3 * 48, 0, 0),
        ("qkv and mlp up", 48 + 240, 144, 48 + 48 + 144 + 240, (12 + 20) * 4 * 2, 48 + 144 + 240),
        ("attention", 144 + 48 + 48, 0, 48 + 48 + 144 + 240, 0, 0),
        ("gelu", 0, 240, 48 + 2 * 240 + 48, 0, 0),
        ("attention output and mlp down", 240, 96, 48 + 48 + 240, (4 + 20) * 4 * 2, 48 + 240 + 48),
        ("residual", 0, 96, 48, 0, 0),
    ]
