"""What operations keep for backward, against autograd's own hooks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo, MicroBatch
from megads.model.config import ModelConfig, Position
from megads.model.initialise import initial_value
from megads.model.sharding import SHARDING
from megads.model.stages import Block, Embedding, FinalNorm
from megads.parallel.config import ParallelConfig
from megads.parallel.context import cut_micro_batch, gather_in_cores
from megads.parallel.grid import Axis, build_grid
from megads.parallel.sharding import materialise, shard_stage
from megads.plan.activations import FP32, Pass, block_ops, embedding_ops, final_norm_ops
from megads.plan.tape import Op, kept_bytes, moments
from tests.distributed import run_ranks

MODEL = ModelConfig(num_layers=1, hidden_size=96, num_heads=6, vocab_size=320, max_seq_len=64, ffn_size=168)
BATCH, SEQ_LEN = 2, 32


def saved_bytes(stage: torch.nn.Module, inputs: Tensor, info: BatchInfo | None = None) -> int:
    """Bytes of the storages that a forward pass saves for backward, parameters left out."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    info = info or BatchInfo(torch.arange(BATCH))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = stage(inputs, info)
    kept = {p.untyped_storage().data_ptr() for p in stage.parameters()}
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
    """Catches an operation of the block that saves more, or less, than the plan says; to the byte.

    Tensor parallelism is one rank's share, whose collectives save nothing and are left out.
    """
    model = replace(MODEL, hidden_dropout=hidden, attention_dropout=attention, position=position)
    with torch.device("meta"):
        unsharded = Block(model, 0, 0)
    block, placements = shard_stage(unsharded, "blocks.0", SHARDING, Axis(0, tuple(range(tp)), None))
    materialise(block, placements, initial_value(model, 0), torch.device("cpu"))
    for module in block.modules():
        if hasattr(module, "axis"):
            module.axis = Axis(0, (0,), None)
    inputs = torch.randn(BATCH, SEQ_LEN, model.hidden_size, dtype=dtype, requires_grad=True)
    one_pass = Pass(model, tp, BATCH, SEQ_LEN, dtype.itemsize)
    explicit = attention > 0
    # The kernel saves the cached mask too, which the plan counts once for all blocks.
    mask = one_pass.rotary_tables + (0 if explicit else one_pass.bias_table * 4)
    assert saved_bytes(block.to(dtype), inputs) - mask == kept_bytes(block_ops(one_pass))


def saved_and_planned_of_a_context_rank(attention_dropout: float, position: Position) -> tuple[int, int]:
    """Bytes that a block keeps on one of two context ranks, and what the plan says; the cached mask in both."""
    grid = build_grid(ParallelConfig(cp=2), torch.distributed.get_rank(), 2)
    model = replace(MODEL, attention_dropout=attention_dropout, position=position)
    with torch.device("meta"):
        block, placements = shard_stage(Block(model, 0, 0), "blocks.0", SHARDING, grid.tp)
    gather_in_cores(block, "blocks.0", SHARDING, grid.cp)
    materialise(block, placements, initial_value(model, 0), torch.device("cpu"))
    whole = MicroBatch(BatchInfo(torch.arange(BATCH), seq_len=SEQ_LEN))
    info = cut_micro_batch(whole, grid.cp, torch.device("cpu")).info
    inputs = torch.randn(BATCH, SEQ_LEN // 2, model.hidden_size, requires_grad=True)
    one_pass = Pass(model, 1, BATCH, SEQ_LEN, FP32, cp=2)
    tables = one_pass.rotary_tables + (0 if attention_dropout else one_pass.bias_table * FP32)
    return saved_bytes(block, inputs, info), kept_bytes(block_ops(one_pass)) + tables


@pytest.mark.distributed
def test_a_block_of_a_context_rank() -> None:
    """Catches gathered keys and values beside which their parts, or the whole QKV projection, are kept; to the byte."""
    for dropout, position in ((0.0, Position.alibi), (0.1, Position.alibi), (0.0, Position.rope)):
        for saved, expected in run_ranks(saved_and_planned_of_a_context_rank, 2, dropout, position):
            assert saved == expected, (dropout, position)


@pytest.mark.parametrize("norm", [True, False])
def test_ends(norm: bool) -> None:
    """Catches an embedding or a final norm that saves more than the plan says, token ids beside it left out."""
    model = replace(MODEL, embedding_norm=norm, hidden_dropout=0.1)
    one_pass = Pass(model, 1, BATCH, SEQ_LEN, 4)
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    ids = embedding_ops(one_pass)[0].kept
    saved = saved_bytes(Embedding(model, 0), tokens) - tokens.nbytes
    assert 0 <= kept_bytes(embedding_ops(one_pass)) - saved <= ids
    hidden = torch.randn(BATCH, SEQ_LEN, model.hidden_size, requires_grad=True)
    assert saved_bytes(FinalNorm(model.hidden_size), hidden) == kept_bytes(final_norm_ops(one_pass))


def test_moments() -> None:
    """Catches a replay that frees too early, or counts a step's first gradients as there before they are made."""
    ops = [Op("a", kept=10, forward=5, backward=7, gradient=3), Op("b", kept=20, forward=1, backward=2, gradient=4)]
    first = [moment.total for moment in moments(ops, waiting=1, gradients=None)]
    assert first == [30 + 10 + 5, 30 + 30 + 1, 30 + 30 + 2 + 4, 30 + 10 + 7 + 3 + 4]
    later = [moment.total for moment in moments(ops, waiting=0, gradients=7)]
    assert later == [7 + 10 + 5, 7 + 30 + 1, 7 + 30 + 2 + 4, 7 + 10 + 7 + 3]
