"""Text as it comes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megads.data.indexed.sidecar import FoundTokenizer, find_tokenizer
from megads.errors import ConfigError, DataError
from megads.evaluate.completion import Completion, GenerationSpeed, TextGenerator, TextStream
from megads.evaluate.generation import Stop
from megads.evaluate.sampling import Sampling
from megads.model.config import Position
from tests.small_run import hot_model, model_config, write_dataset

GREEDY = Sampling(temperature=0.0)


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
    """The tokens of single bytes, as an untrained vocabulary would have them."""
    return [tokenizer.token_to_id(_byte_symbol(byte)) for byte in text.encode()]


def _byte_symbol(byte: int) -> str:
    # GPT-2's table: printable bytes are themselves, the others follow from 256 on in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


@pytest.mark.parametrize("text", ["é", "漢", "🚀", "a🚀b漢"])
def test_a_character_is_shown_once_it_is_whole(text: str, found: FoundTokenizer) -> None:
    """Catches broken UTF-8 on the screen, and characters that are lost when their last byte comes."""
    ids = byte_ids(found.tokenizer, text)
    assert len(ids) == len(text.encode())
    stream = TextStream(found.tokenizer, found.tokenizer.encode("x = ").ids)
    pieces = [stream.push(token) for token in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1] == text[-1] and stream.end() == ""


def test_a_character_that_never_becomes_whole_is_left_out(found: FoundTokenizer) -> None:
    """Catches the replacement character at the end of a text that was cut by its length."""
    stream = TextStream(found.tokenizer, [])
    shown = "".join(stream.push(token) for token in byte_ids(found.tokenizer, "ok 🚀")[:-1])
    assert shown + stream.end() == "ok "


def test_any_tokens_give_the_text_of_the_whole(found: FoundTokenizer) -> None:
    """Catches text that is lost, doubled or reordered where a model writes bytes that are no characters."""
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
    """Catches completions in the order in which they end, and a batch size that changes them."""
    prompts = ["def", "", "return softmax(query", "x", "🚀"]
    sampling = Sampling(temperature=1.0, seed=3)
    together = all_of(generator(found, sampling, 40), prompts)
    assert [done.prompt for done in together] == prompts
    for batch_size in (1, 2):
        assert all_of(generator(found, sampling, 40), prompts, batch_size) == together


def test_streamed_text_is_the_completion(found: FoundTokenizer) -> None:
    """Catches pieces that differ from what a batch writes, and speed that counts something else."""
    made, speed = generator(found), GenerationSpeed()
    steps = list(made.complete([made.prompt("def attention")], [0], speed))
    done = steps[-1][2]
    assert "".join(text for _, text, _ in steps) == done.text
    assert [done] == all_of(generator(found), ["def attention"])
    assert speed.new_tokens == done.tokens == len(steps) and 0 < speed.first_token_s <= speed.seconds
    assert f"{done.tokens} tokens after" in str(speed)


def test_the_end_of_document_is_not_text(found: FoundTokenizer) -> None:
    """Catches the end token in the text, one that is not the dataset's, and `none` that still stops."""
    free = all_of(generator(found, end="none"), ["def"])[0]
    assert free.stop is Stop.length and free.tokens == 20
    ids = found.tokenizer.encode(free.text, add_special_tokens=False).ids
    end = next(token for token in map(found.tokenizer.id_to_token, ids) if len(token) == 1)
    ended = all_of(generator(found, end=end), ["def"])[0]
    assert ended.stop is Stop.end_of_document
    assert free.text.startswith(ended.text) and not ended.text.endswith(end)
    with pytest.raises(ConfigError, match="end_of_document = </s>: not a token of"):
        generator(found, end="</s>")


def test_empty_prompt_begins_a_document(found: FoundTokenizer) -> None:
    """Catches a crash on no tokens: a document begins after the end of another."""
    made = generator(found)
    assert made.prompt("").ids == [0]
    assert all_of(made, [""])[0].tokens > 0
    with pytest.raises(ConfigError, match="the prompt is empty"):
        generator(found, end="none").prompt("")


def test_prompts_that_cannot_be_read(found: FoundTokenizer) -> None:
    """Catches tracebacks for bytes that are no text and for prompts beyond learned positions."""
    with pytest.raises(ConfigError, match="is not valid UTF-8 at character 1"):
        generator(found).prompt("a\udcff")
    learned = TextGenerator(hot_model(model_config(Position.learned)), found, GREEDY, 20)
    with pytest.raises(ConfigError, match="has learned 32"):
        learned.prompt("漢" * 32)


def test_a_tokenizer_larger_than_the_model_is_refused(found: FoundTokenizer, tmp_path: Path) -> None:
    """Catches an index error on the first rare token."""
    larger = find_tokenizer([write_dataset(tmp_path, vocab_size=305)], None)
    with pytest.raises(DataError, match="has 305 tokens and the model 302"):
        generator(larger)
