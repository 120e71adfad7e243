"""The loop of generation against the full forward pass."""

from __future__ import annotations

import pytest
import torch

from megads.batch import BatchInfo
from megads.errors import ConfigError, NumericalError
from megads.evaluate.generation import Limits, Stop, check_length, generate
from megads.evaluate.sampling import Sampling
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT
from megads.model.kv_cache import CachedGPT
from tests.model.test_gpt import hot_value

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8]]


def config(position: Position = Position.alibi) -> ModelConfig:
    return ModelConfig(num_layers=2, hidden_size=24, num_heads=6, vocab_size=50, max_seq_len=19, position=position)


def incremental(model_config: ModelConfig) -> CachedGPT:
    return CachedGPT(GPT(model_config, 0, hot_value))


def completions(
    prompts: list[list[int]], sampling: Sampling, limits: Limits, numbers: list[int] | None = None
) -> list[list[int]]:
    """The new tokens of every prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    for new in generate(incremental(config()), prompts, numbers or list(range(len(prompts))), sampling, limits):
        found[new.row].append(new.token)
    return found


@torch.no_grad()
def greedy_by_full_forward(model_config: ModelConfig, prompt: list[int], count: int) -> list[int]:
    model = GPT(model_config, 0, hot_value).eval()
    sequence = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([sequence]), BatchInfo(sample_ids=torch.tensor([0])))
        sequence.append(int(logits[0, -1].argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("position", Position)
def test_greedy_is_the_argmax_of_the_full_forward(position: Position) -> None:
    """Catches a batch whose rows disturb each other, and a token that is read twice or not at all."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for new in generate(incremental(config(position)), PROMPTS, [0, 1, 2], GREEDY, Limits(12)):
        found[new.row].append(new.token)
    assert found == [greedy_by_full_forward(config(position), prompt, 12) for prompt in PROMPTS]


def test_samples_depend_on_seed_and_number_only() -> None:
    """Catches draws that depend on the batch or on how long other rows go on, and seeds without effect."""
    sampling, limits = Sampling(temperature=1.0, top_p=0.9, seed=5), Limits(20, end_ids=[1, 2, 3, 4])
    together = completions(PROMPTS, sampling, limits)
    assert together == completions(PROMPTS, sampling, limits)
    assert len({len(tokens) for tokens in together}) > 1, "no row ended early: the test tests less than it says"
    for number, prompt in enumerate(PROMPTS):
        assert completions([prompt], sampling, limits, [number]) == [together[number]]
    assert together != completions(PROMPTS, Sampling(temperature=1.0, top_p=0.9, seed=6), limits)
    assert len(set(map(tuple, completions([PROMPTS[1]] * 4, sampling, limits)))) > 1


def test_a_row_ends_at_the_end_of_document() -> None:
    """Catches rows that go on, are cut one token early, or stop their neighbours."""
    free = completions(PROMPTS, GREEDY, Limits(12))
    end = free[1][4]
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in free]
    news = list(generate(incremental(config()), PROMPTS, [0, 1, 2], GREEDY, Limits(12, end_ids=[end])))
    for row, tokens in enumerate(expected):
        own = [new for new in news if new.row == row]
        assert [new.token for new in own] == tokens
        assert [new.stop for new in own[:-1]] == [None] * (len(tokens) - 1)
        assert own[-1].stop is (Stop.end_of_document if tokens[-1] == end else Stop.length)


def test_tokens_without_text_never_come() -> None:
    """Catches an id beyond the tokenizer, which a model with a rounded vocabulary can choose."""
    free = completions(PROMPTS, Sampling(temperature=2.0), Limits(40))
    assert max(map(max, free)) >= 20
    limited = completions(PROMPTS, Sampling(temperature=2.0), Limits(40, vocab_size=20))
    assert max(map(max, limited)) == 19


def test_a_model_of_nan_is_named() -> None:
    """Catches token 0 for ever, or a failing gather, from a run that diverged."""
    model = incremental(config())
    with torch.no_grad():
        model.model.stages[0].word.weight[7] = torch.nan
    with pytest.raises(NumericalError, match="computes NaN"):
        list(generate(model, [[7]], [0], GREEDY, Limits(2)))


def test_learned_positions_end() -> None:
    """Catches an index error on the last token, and a refusal of what fits."""
    learned = config(Position.learned)
    check_length(learned, 8, 12)
    assert len(list(generate(incremental(learned), [PROMPTS[0]], [0], GREEDY, Limits(12)))) == 12
    with pytest.raises(ConfigError, match=r"8 tokens and max_new_tokens = 13 need 20 .* learned 19 .*=12 or less"):
        check_length(learned, 8, 13)
    with pytest.raises(ConfigError, match="give a shorter prompt"):
        check_length(learned, 20, 1)
    check_length(config(), 1000, 1000)
