"""The KV cache: logits equal those of the full forward pass on the whole sequence."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.model import attention, rotary
from megads.model.config import MLPKind, ModelConfig, NormKind, NormPlacement, Position, QKNormWidth
from megads.model.gpt import GPT, use_kernels
from megads.model.kv_cache import PIECE, CachedGPT, RecomputingGPT
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.tools.notebook import LoadedModel
from tests.model import test_gpt
from tests.model.test_gpt import hot_value

VOCAB_SIZE = 50


def config(position: Position = Position.alibi, max_seq_len: int = 24, **changes: object) -> ModelConfig:
    return ModelConfig(
        num_layers=2, hidden_size=24, num_heads=6, vocab_size=VOCAB_SIZE, max_seq_len=max_seq_len, position=position,
        **changes,
    )  # fmt: skip


FEATURES = {
    "num_kv_heads": 2, "window": 4, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "parallel_block": True,
    "qk_norm": True, "head_size": 6,
}  # fmt: skip
CAPPED = {
    "attention_logit_softcap": 0.7,
    "attention_sinks": True,
    "final_logit_softcap": 1.5,
    "scale_embedding": True,
    "num_kv_heads": 2,
}
OLMO2 = {
    "num_kv_heads": 2, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "qk_norm": True,
    "qk_norm_width": QKNormWidth.full, "norm_placement": NormPlacement.output,
}  # fmt: skip


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def full_logits(model_config: ModelConfig, sequence: list[int]) -> Tensor:
    """Logits [s, v] of the full forward pass."""
    model = GPT(model_config, 0, hot_value).eval()
    with torch.no_grad():
        return model(torch.tensor([sequence]), BatchInfo(sample_ids=torch.tensor([0])))[0]


def incremental(model_config: ModelConfig) -> CachedGPT:
    return CachedGPT(GPT(model_config, 0, hot_value))


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@pytest.mark.quick(
    "1-alibi-plain", "1-rope-OLMo 2", "2-learned-capped", "2-alibi-features", "11-rope-features", "11-learned-plain"
)
@pytest.mark.parametrize("changes", [{}, FEATURES, OLMO2, CAPPED], ids=["plain", "features", "OLMo 2", "capped"])
@pytest.mark.parametrize("position", Position)
@pytest.mark.parametrize("prompt", [1, 2, 11])
def test_every_position_has_the_logits_of_the_full_forward(position: Position, prompt: int, changes: dict) -> None:
    """Catches a distance, mask, window, learned position or cache slot off by one, and a cache that grows wrongly."""
    sequence = tokens(24)
    expected = full_logits(config(position, **changes), sequence)
    model = incremental(config(position, **changes))
    model.start(1)
    found = [model.append([sequence[:prompt]])]
    found += [model.append([[token]]) for token in sequence[prompt:]]
    assert largest_error(torch.cat(found), expected[prompt - 1 :]) <= 1e-5


@pytest.mark.parametrize("changes", test_gpt.FEATURES.values(), ids=test_gpt.FEATURES)
def test_every_feature_has_the_logits_of_the_full_forward(changes: dict) -> None:
    """Catches a feature that the cached core leaves out, and one bias for layers of different windows or positions."""
    settings, sequence = test_gpt.model_config(**changes), tokens(9)
    expected, model = full_logits(settings, sequence), incremental(settings)
    model.start(1)
    found = [model.append([sequence[:4]]), *(model.append([[token]]) for token in sequence[4:])]
    assert largest_error(torch.cat(found), expected[3:]) <= 1e-5


@pytest.mark.parametrize("changes", [{}, FEATURES], ids=["plain", "features"])
@pytest.mark.parametrize("position", Position)
def test_rows_of_different_lengths_compute_what_each_computes_alone(position: Position, changes: dict) -> None:
    """Catches padding that is attended to, shifts positions, or remains when real tokens follow; wrong logits after
    finished rows leave the batch; and padding beyond the last learned position."""
    sequences = [tokens(24, seed=1), tokens(9, seed=2), tokens(17, seed=3)]
    expected = [full_logits(config(position, **changes), sequence) for sequence in sequences]
    model = incremental(config(position, **changes))
    model.start(3)
    # The second piece begins at another position in each row, and pads the first row far beyond its one token.
    for pieces in ([12, 1, 5], [1, 7, 12], [11, 1, None]):
        rows = [row for row, count in enumerate(pieces) if count is not None]
        if len(rows) < len(model.lengths):
            model.select_rows(rows)
        before = dict(zip(rows, model.lengths, strict=True))
        found = model.append([sequences[row][before[row] : before[row] + pieces[row]] for row in rows])
        for logits, row in zip(found, rows, strict=True):
            assert largest_error(logits, expected[row][before[row] + pieces[row] - 1]) <= 1e-5
    assert model.lengths == [24, 9]


LENGTH_DEPENDENT = {
    "dynamic": RopeScalingConfig(RopeScaling.dynamic, factor=3.0, original_max_seq_len=9),
    "longrope": RopeScalingConfig(
        RopeScaling.longrope, factor=4.0, original_max_seq_len=9, short_factor=[1.0, 1.2], long_factor=[1.7, 3.0]
    ),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["cached", "recomputed"])
@pytest.mark.parametrize("scaling", LENGTH_DEPENDENT.values(), ids=LENGTH_DEPENDENT)
def test_rope_scaling_by_length_rotates_each_row_by_its_own_length(scaling: RopeScalingConfig, recompute: bool) -> None:
    """Catches keys that stay rotated for a shorter sequence, frequencies of the longest row of the batch, and rows that
    are read again after others have left the batch."""
    settings = config(Position.rope, rope_scaling=scaling, rope_theta=50.0)
    model = (RecomputingGPT if recompute else CachedGPT)(GPT(settings, 0, hot_value))
    rows = [tokens(8, seed=1), tokens(3, seed=2), tokens(15, seed=3)]
    model.start(3)
    found = model.append(rows)
    for step in range(6):
        for row, logits in zip(rows, found, strict=True):
            assert largest_error(logits, full_logits(settings, row)[-1]) <= 1e-5
        if step == 3:
            model.select_rows([2, 0])
            rows = [rows[2], rows[0]]
        for index, row in enumerate(rows):
            row.append((7 * step + index) % VOCAB_SIZE)
        found = model.append([row[-1:] for row in rows])


def test_alibi_goes_on_beyond_the_training_length() -> None:
    """Catches a mask or cache limited to max_seq_len, and prompts of more than one piece that lose the first."""
    sequence = tokens(PIECE + 90)
    short = tokens(40, seed=4)
    expected = full_logits(config(), sequence)
    model = incremental(config())
    model.start(2)
    prompt = PIECE + 60
    found = model.append([sequence[:prompt], short])
    assert largest_error(found[1], full_logits(config(), short)[-1]) <= 1e-5
    rows = [found[0]] + [model.append([[token], [0]])[0] for token in sequence[prompt:]]
    assert largest_error(torch.stack(rows), expected[prompt - 1 :]) <= 1e-5


def test_a_window_bounds_the_cache() -> None:
    """Catches keys that are kept although no later token attends to them, and a short row's keys that are evicted with
    its neighbors': in the second piece of a long prompt, and when the row continues alone."""
    windowed = config(window=6, num_kv_heads=2)
    long, short = tokens(PIECE + 30), tokens(20, seed=1)
    model = incremental(windowed)
    model.start(2)
    expected = [full_logits(windowed, sequence) for sequence in (long, short)]
    found = model.append([long[: PIECE + 20], short[:9]])
    assert largest_error(found, torch.stack([expected[0][PIECE + 19], expected[1][8]])) <= 1e-5
    found = model.append([long[PIECE + 20 :], short[9:15]])
    assert largest_error(found, torch.stack([expected[0][-1], expected[1][14]])) <= 1e-5
    model.select_rows([1])
    for token in short[15:]:
        found = model.append([[token]])
    assert largest_error(found[0], expected[1][-1]) <= 1e-5
    model.start(1)
    expected = full_logits(windowed, tokens(200, seed=2))
    found = torch.cat([model.append([[token]]) for token in tokens(200, seed=2)])
    assert largest_error(found, expected) <= 1e-5
    for core in model._cores:
        _, slots, kv_heads, _ = core.keys_btmd.shape
        assert slots <= 2 * 6 and kv_heads == 2


def test_a_new_start_forgets() -> None:
    """Catches keys of the last prompt that remain for the next one."""
    model = incremental(config())
    model.start(2)
    model.append([tokens(20), tokens(15)])
    model.start(1)
    sequence = tokens(6, seed=5)
    assert largest_error(model.append([sequence])[0], full_logits(config(), sequence)[-1]) <= 1e-5


def test_bf16_error_is_that_of_bf16() -> None:
    """Catches a cache or mask in bf16 with more than twice the error of the full forward pass in bf16."""
    sequence = tokens(24)
    exact = full_logits(config(), sequence)[-1]
    model = GPT(config(), 0, hot_value).bfloat16().eval()
    with torch.no_grad():
        whole = model(torch.tensor([sequence]), BatchInfo(sample_ids=torch.tensor([0])))[0, -1].float()
    cached = CachedGPT(model)
    cached.start(1)
    cached.append([sequence[:12]])
    for token in sequence[12:-1]:
        cached.append([[token]])
    found = cached.append([sequence[-1:]])[0].float()
    assert (found - exact).norm() <= 2 * (whole - exact).norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("position", [Position.alibi, Position.rope])
def test_a_process_trains_after_it_has_generated(position: Position) -> None:
    """Catches ALiBi slopes or RoPE tables that are cached during generation and that autograd then cannot save."""
    for cached in (attention._slopes_of, rotary._place_tables, attention.causal_bias):
        cached.__wrapped__.cache_clear()  # type: ignore[attr-defined]
    model = GPT(config(position), 0, hot_value)
    use_kernels(model)
    sequence = torch.tensor([tokens(8)])
    LoadedModel.logits(cast(LoadedModel, SimpleNamespace(model=model, device=torch.device("cpu"))), sequence)
    generating = CachedGPT(copy.deepcopy(model))
    generating.start(1)
    generating.append([tokens(5)])
    model(sequence, BatchInfo(sample_ids=torch.tensor([0]))).sum().backward()
