"""Text generation: device and dtype, sampling, the generation loop, and streamed text."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from megads.batch import BatchInfo
from megads.data.indexed.sidecar import FoundTokenizer, find_tokenizer
from megads.errors import ConfigError, DataError, NumericalError
from megads.evaluate.config import WeightPrecision
from megads.evaluate.generation import (
    Completion,
    GenerationSpeed,
    Limits,
    Sampling,
    Stop,
    TextGenerator,
    TextStream,
    check_length,
    choose_device,
    choose_dtype,
    draws,
    generate,
    next_tokens,
)
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT
from megads.model.kv_cache import CachedGPT
from tests.model.test_gpt import hot_value
from tests.small_run import hot_model, model_config, write_dataset


def test_device() -> None:
    """Catches torch's own error for a device that does not exist."""
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")
    for name, message in (("gpu", "must be auto, cpu"), ("meta", "must be auto, cpu"), ("cuda:99", "torch sees")):
        with pytest.raises(ConfigError, match=f"device = {name}: {message}"):
            choose_device(name)


def test_dtype() -> None:
    """Catches bf16 as the default on a CPU, where it is slow."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (choose_dtype(WeightPrecision.auto, cpu), choose_dtype(WeightPrecision.auto, gpu)) == (
        torch.float32,
        torch.bfloat16,
    )
    assert choose_dtype(WeightPrecision.bf16, cpu) is torch.bfloat16
    assert choose_dtype(WeightPrecision.fp32, gpu) is torch.float32


PROBABILITIES = torch.tensor([0.02, 0.4, 0.08, 0.3, 0.2], dtype=torch.float64)
DRAWS = 20_000


def frequencies(sampling: Sampling) -> torch.Tensor:
    """Relative frequency of each token over DRAWS rows."""
    logits = PROBABILITIES.log().expand(DRAWS, -1)
    tokens = next_tokens(logits, draws(3, range(DRAWS), 0), sampling)
    return torch.bincount(tokens, minlength=len(PROBABILITIES)).double() / DRAWS


def chi_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    possible = expected > 0
    assert bool((found[~possible] == 0).all()), "a token was drawn that cannot be"
    return float(DRAWS * ((found - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4]),
        (Sampling(temperature=3.0), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_k=50), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.65), [1, 3]),
        (Sampling(top_p=0.75), [1, 3, 4]),
        (Sampling(top_p=0.01), [1]),
        (Sampling(top_p=0.95, top_k=3, temperature=1.5), [1, 3, 4]),
    ],
)
def test_distribution(sampling: Sampling, kept: list[int]) -> None:
    """Catches a temperature that multiplies, a nucleus without the token that reaches top_p, and probabilities that are
    not renormalised. The bound is the 0.999 quantile of chi-square with 4 degrees of freedom."""
    expected = torch.zeros_like(PROBABILITIES)
    expected[kept] = PROBABILITIES[kept] ** (1.0 / sampling.temperature)
    assert chi_square(frequencies(sampling), expected / expected.sum()) < 18.5


def test_the_test_of_the_distribution_can_fail() -> None:
    """Catches a statistic that accepts anything: one percent moved between two tokens must be detected."""
    moved = PROBABILITIES + torch.tensor([0.01, -0.01, 0.0, 0.0, 0.0])
    assert chi_square(frequencies(Sampling()), moved) > 18.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_likeliest(dtype: torch.dtype) -> None:
    """Catches a division by temperature 0, and sampling in greedy decoding."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(next_tokens(logits, torch.rand(6).double(), Sampling(temperature=0.0)), logits.argmax(-1))


def test_extreme_temperatures() -> None:
    """Catches NaN from infinities: almost 0 must be greedy, and masked tokens must never be sampled."""
    logits = torch.tensor([[30.0, 29.0, -torch.inf, 31.0]]).repeat(500, 1)
    uniform = draws(0, range(500), 0)
    assert set(next_tokens(logits, uniform, Sampling(temperature=1e-300)).tolist()) == {3}
    assert set(next_tokens(logits, uniform, Sampling(temperature=1e6)).tolist()) == {0, 1, 3}


def test_the_last_token_of_the_nucleus_is_the_last() -> None:
    """Catches rounding of the cumulative sum that selects a token outside the nucleus."""
    logits = PROBABILITIES.log()[None]
    almost_one = torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)
    assert next_tokens(logits, almost_one, Sampling()).item() == 0
    assert next_tokens(logits, almost_one, Sampling(top_p=0.65)).item() == 3


def test_draws_are_a_function_of_seed_sequence_and_place() -> None:
    """Catches random streams that repeat in other rows, positions or seeds, and rows that depend on other rows."""
    assert torch.equal(draws(1, [4, 9], 2)[1:], draws(1, [9], 2))
    others = [draws(s, [q], p).item() for s in range(3) for q in range(3) for p in range(3)]
    assert len(set(others)) == 27
    many = torch.cat([draws(0, range(1000), place) for place in range(10)])
    assert many.min() >= 0.0 and many.max() < 1.0
    assert abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.003


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
    """Catches rows of a batch that affect each other, and a token that is read twice or not at all."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for new in generate(incremental(config(position)), PROMPTS, [0, 1, 2], GREEDY, Limits(12)):
        found[new.row].append(new.token)
    assert found == [greedy_by_full_forward(config(position), prompt, 12) for prompt in PROMPTS]


def test_samples_depend_on_seed_and_number_only() -> None:
    """Catches samples that depend on the batch or on the length of other rows, and a seed without effect."""
    sampling, limits = Sampling(temperature=1.0, top_p=0.9, seed=5), Limits(20, end_ids=[1, 2, 3, 4])
    together = completions(PROMPTS, sampling, limits)
    assert together == completions(PROMPTS, sampling, limits)
    assert len({len(tokens) for tokens in together}) > 1, "no row ended early: the test tests less than it says"
    for number, prompt in enumerate(PROMPTS):
        assert completions([prompt], sampling, limits, [number]) == [together[number]]
    assert together != completions(PROMPTS, Sampling(temperature=1.0, top_p=0.9, seed=6), limits)
    assert len(set(map(tuple, completions([PROMPTS[1]] * 4, sampling, limits)))) > 1


def test_a_row_ends_at_the_end_of_document() -> None:
    """Catches rows that continue, lose their last token, or stop other rows."""
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
    """Catches an id beyond the tokenizer, which a model with a padded vocabulary can sample."""
    free = completions(PROMPTS, Sampling(temperature=2.0), Limits(40))
    assert max(map(max, free)) >= 20
    limited = completions(PROMPTS, Sampling(temperature=2.0), Limits(40, vocab_size=20))
    assert max(map(max, limited)) == 19


def test_a_model_of_nan_is_named() -> None:
    """Catches token 0 forever, or a failing gather, from the weights of a diverged run."""
    model = incremental(config())
    with torch.no_grad():
        model.model.layers[0].word.weight[7] = torch.nan
    with pytest.raises(NumericalError, match="computes NaN"):
        list(generate(model, [[7]], [0], GREEDY, Limits(2)))


def test_learned_positions_end() -> None:
    """Catches an index error on the last token, and a length that fits but is refused."""
    learned = config(Position.learned)
    check_length(learned, 8, 12)
    assert len(list(generate(incremental(learned), [PROMPTS[0]], [0], GREEDY, Limits(12)))) == 12
    with pytest.raises(ConfigError, match=r"8 tokens and max_new_tokens = 13 need 20 .* learned 19 .*=12 or less"):
        check_length(learned, 8, 13)
    with pytest.raises(ConfigError, match="give a shorter prompt"):
        check_length(learned, 20, 1)
    check_length(config(), 1000, 1000)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FoundTokenizer:
    return find_tokenizer([write_dataset(tmp_path_factory.mktemp("data"))], None)


def generator(
    found: FoundTokenizer, sampling: Sampling = GREEDY, max_new_tokens: int = 20, end: str = "auto"
) -> TextGenerator:
    return TextGenerator(hot_model(model_config()), found, sampling, max_new_tokens, end)


def all_of(made: TextGenerator, prompts: list[str], batch_size: int = 8) -> list[Completion]:
    return list(made.complete_all([made.prompt(prompt) for prompt in prompts], batch_size, GenerationSpeed()))


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of single bytes, as from an untrained vocabulary."""
    return [tokenizer.token_to_id(_byte_symbol(byte)) for byte in text.encode()]


def _byte_symbol(byte: int) -> str:
    # GPT-2's table: printable bytes map to themselves, the others to 256 and above in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


@pytest.mark.parametrize("text", ["é", "漢", "🚀", "a🚀b漢"])
def test_a_character_is_shown_once_it_is_whole(text: str, found: FoundTokenizer) -> None:
    """Catches broken UTF-8 in streamed text, and characters that are lost when their last byte arrives."""
    ids = byte_ids(found.tokenizer, text)
    assert len(ids) == len(text.encode())
    stream = TextStream(found.tokenizer, found.tokenizer.encode("x = ").ids)
    pieces = [stream.push(token) for token in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1] == text[-1] and stream.end() == ""


def test_a_character_that_never_becomes_whole_is_left_out(found: FoundTokenizer) -> None:
    """Catches the replacement character at the end of a text that the length limit cut."""
    stream = TextStream(found.tokenizer, [])
    shown = "".join(stream.push(token) for token in byte_ids(found.tokenizer, "ok 🚀")[:-1])
    assert shown + stream.end() == "ok "


def test_any_tokens_give_the_text_of_the_whole(found: FoundTokenizer) -> None:
    """Catches text that is lost, duplicated or reordered if a model generates bytes that are not valid UTF-8."""
    draw = random.Random(0)
    for _ in range(300):
        prompt = found.tokenizer.encode("".join(draw.choices("aé漢🚀 \n", k=draw.randrange(8)))).ids
        ids = [draw.randrange(found.vocab_size) for _ in range(draw.randrange(1, 30))]
        stream = TextStream(found.tokenizer, prompt)
        shown = "".join(stream.push(token) for token in ids) + stream.end()
        whole = found.tokenizer.decode([*prompt, *ids], skip_special_tokens=False)
        before = found.tokenizer.decode(prompt, skip_special_tokens=False)
        assert (before + shown).rstrip("\ufffd") == whole.rstrip("\ufffd")


def test_completions_come_in_order_whatever_the_batch(found: FoundTokenizer) -> None:
    """Catches completions in the order in which they end, and ones that depend on the batch size."""
    prompts = ["def", "", "return softmax(query", "x", "🚀"]
    sampling = Sampling(temperature=1.0, seed=3)
    together = all_of(generator(found, sampling, 40), prompts)
    assert [done.prompt for done in together] == prompts
    for batch_size in (1, 2):
        assert all_of(generator(found, sampling, 40), prompts, batch_size) == together


def test_streamed_text_is_the_completion(found: FoundTokenizer) -> None:
    """Catches streamed text that differs from batched completions, and a speed that counts other tokens."""
    made, speed = generator(found), GenerationSpeed()
    steps = list(made.complete([made.prompt("def attention")], [0], speed))
    done = steps[-1][2]
    assert "".join(text for _, text, _ in steps) == done.text
    assert [done] == all_of(generator(found), ["def attention"])
    assert speed.new_tokens == done.tokens == len(steps) and 0 < speed.first_token_s <= speed.seconds
    assert f"{done.tokens} tokens after" in str(speed)


def test_the_end_of_document_is_not_text(found: FoundTokenizer) -> None:
    """Catches the end token in the text, an end token that the tokenizer lacks, and `none` that still stops."""
    free = all_of(generator(found, end="none"), ["def"])[0]
    assert free.stop is Stop.length and free.tokens == 20
    ids = found.tokenizer.encode(free.text, add_special_tokens=False).ids
    end = next(token for token in map(found.tokenizer.id_to_token, ids) if len(token) == 1)
    ended = all_of(generator(found, end=end), ["def"])[0]
    assert ended.stop is Stop.end_of_document
    assert free.text.startswith(ended.text) and not ended.text.endswith(end)
    with pytest.raises(ConfigError, match="end_of_document = </s>: not a token of"):
        generator(found, end="</s>")


def test_a_prompt_begins_as_the_documents_of_the_training(found: FoundTokenizer) -> None:
    """Catches a prompt without the token that began the documents, and one that gets it twice."""
    begun = dataclasses.replace(found, begin_of_document_id=0)
    made, plain = generator(begun), generator(found).prompt("def").ids
    assert made.prompt("def").ids == [0, *plain]
    begun.tokenizer.encode_special_tokens = False
    assert made.prompt("<|endoftext|>def").ids == [0, *plain]
    assert made.prompt("").ids == [0]


def test_empty_prompt_begins_a_document(found: FoundTokenizer) -> None:
    """Catches a crash on an empty prompt: a document follows another's end token."""
    made = generator(found)
    assert made.prompt("").ids == [0]
    assert all_of(made, [""])[0].tokens > 0
    with pytest.raises(ConfigError, match="the prompt is empty"):
        generator(found, end="none").prompt("")


def test_prompts_that_cannot_be_read(found: FoundTokenizer) -> None:
    """Catches tracebacks for invalid UTF-8 and for prompts longer than the learned positions."""
    with pytest.raises(ConfigError, match="is not valid UTF-8 at character 1"):
        generator(found).prompt("a\udcff")
    learned = TextGenerator(hot_model(model_config(Position.learned)), found, GREEDY, 20)
    with pytest.raises(ConfigError, match="has learned 32"):
        learned.prompt("漢" * 32)


def test_a_tokenizer_larger_than_the_model_is_refused(found: FoundTokenizer, tmp_path: Path) -> None:
    """Catches an index error on the first token that the model lacks."""
    larger = find_tokenizer([write_dataset(tmp_path, vocab_size=305)], None)
    with pytest.raises(DataError, match="has 305 tokens and the model 302"):
        generator(larger)
