"""The longest sequence that fits into the memory of a device."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megads.cli.main import run
from megads.config.root import RootConfig
from megads.config.train import Precision, TrainConfig
from megads.launch.layout import Machine
from megads.model.config import ModelConfig, Position
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import ContextParallelKind, Offload, ParallelConfig, Recompute
from megads.tools.plan.longest_sequence import (
    GRANULE,
    WAYS,
    longest_json,
    longest_sequence,
    longest_sequences,
)
from megads.tools.plan.run_plan import memory_need, plan_of

MODEL = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, vocab_size=512, attention=AttentionKind.flex)
"""Without an attention kernel that masks by itself, context parallelism needs a mask of all pairs of tokens."""
GPU = Machine(24 * 2**30, per_gpu=True)


def config_of(parallel: ParallelConfig, model: ModelConfig = MODEL) -> RootConfig:
    return RootConfig(
        model=model,
        parallel=parallel,
        train=TrainConfig(seq_len=512, global_batch_size=8, micro_batch_size=1, precision=Precision.bf16),
    )


@pytest.mark.parametrize("parallel", [ParallelConfig(dp=2), ParallelConfig(cp=2, tp=2, sequence_parallel=True)])
def test_the_next_length_does_not_fit(parallel: ParallelConfig) -> None:
    """Catches a length that the plan of a run refuses, and one that could be longer."""
    config = config_of(parallel)
    found = longest_sequence(config, GPU)
    assert found.tokens > 4 * GRANULE and found.tokens % (GRANULE * parallel.cp) == 0

    def fits(tokens: int) -> bool:
        longer = replace(config, train=replace(config.train, seq_len=tokens))
        return memory_need(GPU, plan_of(longer, cuda=True)).fits

    assert fits(found.tokens) and not fits(found.tokens + GRANULE * parallel.cp)


def test_context_parallelism_and_recomputation_make_room_with_as_many_ranks() -> None:
    """Catches layouts with more GPUs than the user has, which would make any length fit."""
    found = longest_sequences(config_of(ParallelConfig(dp=4)), GPU)
    kinds = ContextParallelKind
    assert [(one.parallel.cp, one.parallel.cp_kind, one.parallel.dp) for one in found[:: len(WAYS)]] == [
        *((1, kinds.allgather, 4), (2, kinds.allgather, 2), (2, kinds.ulysses, 2)),
        *((4, kinds.allgather, 1), (4, kinds.ulysses, 1)),
    ]
    assert {one.parallel.world_size for one in found} == {4}
    plain = [one for one in found if one.parallel.offload is Offload.none and one.mlp_chunk is None]
    by_mode = {(one.parallel.cp, one.parallel.recompute): one.tokens for one in plain}
    assert by_mode[1, Recompute.none] < by_mode[1, Recompute.full] < by_mode[4, Recompute.full]
    assert by_mode[1, Recompute.none] < by_mode[4, Recompute.none]
    part = found[0]
    assert part.part == "activations in flight" and 0 < part.part_bytes < part.need.needed


def test_layouts_that_a_run_refuses_are_left_out() -> None:
    """Catches a length for a layout in which the attention kernel, or the number of heads, is refused."""
    flash = replace(MODEL, attention=AttentionKind.flash, num_heads=2)
    found = longest_sequences(config_of(ParallelConfig(dp=4), flash), GPU)
    assert {(one.parallel.cp, one.parallel.cp_kind) for one in found if one.parallel.cp > 1} == {
        (2, ContextParallelKind.ulysses)
    }
    plain = replace(MODEL, attention=AttentionKind.sdpa, num_heads=7, hidden_size=252)
    found = longest_sequences(config_of(ParallelConfig(dp=2), plain), GPU)
    kinds = {one.parallel.cp_kind for one in found if one.parallel.cp == 2}
    assert kinds == {ContextParallelKind.allgather, ContextParallelKind.ring}


def test_a_device_that_is_too_small_says_so() -> None:
    """Catches a shortest length that is printed as fitting when the weights alone do not fit."""
    found = longest_sequence(config_of(ParallelConfig()), Machine(2**20, per_gpu=True))
    assert found.tokens == 0 and not found.need.fits
    assert longest_json([found])[0]["tokens"] is None


def test_learned_positions_grow_with_the_sequence() -> None:
    """Catches a length beyond model.max_seq_len for a table of positions that is too short for it."""
    model = replace(MODEL, position=Position.learned, max_seq_len=512)
    learned, rope = (longest_sequence(config_of(ParallelConfig(), one), GPU) for one in (model, MODEL))
    assert model.max_seq_len < learned.tokens <= rope.tokens


def test_offloading_and_chunks_make_room() -> None:
    """Catches a way to save memory that is tried but not planned, and a host that is not said to hold anything."""
    model = replace(MODEL, num_layers=16)
    found = {
        (one.parallel.recompute, one.parallel.offload, one.mlp_chunk is not None): one
        for one in longest_sequences(config_of(ParallelConfig(), model), GPU)
    }
    assert set(found) == set(WAYS)
    tokens = {way: one.tokens for way, one in found.items()}
    none, full, here, away = Recompute.none, Recompute.full, Offload.none, Offload.activations
    assert tokens[none, here, False] < tokens[none, away, False]
    assert tokens[full, here, False] < tokens[full, away, False] < tokens[full, away, True]
    assert tokens[full, here, False] < tokens[full, here, True]
    assert all((one.host_bytes > 0) is (one.parallel.offload is away) for one in found.values())
    whole = found[full, away, False]
    assert whole.host_bytes == 15 * whole.tokens * model.hidden_size * 2


def test_the_verb_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a key that does nothing, and an answer for a GPU whose memory is not known."""
    overrides = ["model=tiny", "model.vocab_size=512", "train.global_batch_size=4", "longest_sequence=true"]
    assert run(["plan", *overrides, "device=h100", "json=true"]) == 0
    printed = json.loads(capsys.readouterr().out)["longest_sequences"]
    ways = [(one["recompute"], one["offload"], one["mlp_chunk"] is not None) for one in printed]
    assert ways == [(mode.value, offload.value, chunked) for mode, offload, chunked in WAYS]
    assert [one["copies"] is not None for one in printed] == [one["offload"] == "activations" for one in printed]
    assert run(["plan", *overrides, "device=h100"]) == 0
    shown = capsys.readouterr().out
    assert "longest sequence that fits" in shown and "copies hidden" in shown
    assert run(["plan", *overrides, "device=cuda"]) == 2
    assert "name a device (device=h100)" in capsys.readouterr().err
