"""Text after text: prompts in, completions out, as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from megads.data.indexed.sidecar import FoundTokenizer, tokenizing
from megads.errors import ConfigError, DataError
from megads.evaluate.generation import Limits, Stop, check_length, generate
from megads.evaluate.sampling import Sampling
from megads.model.gpt import GPT
from megads.model.kv_cache import with_cache

DEFAULT_END = "<|endoftext|>"
_BROKEN = "\ufffd"


class TextStream:
    """Turns tokens into text as they come; a character that is split over tokens is shown once it is whole.

    Args:
        tokenizer: decodes.
        prompt_ids: what stands before; a token's text may depend on it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._ids: list[int] = []
        self._shown = 0
        self._stream = DecodeStream(ids=self._prompt_ids, skip_special_tokens=False)

    def push(self, token: int) -> str:
        """Returns the text that a token completes; often nothing."""
        self._ids.append(token)
        text: str = self._stream.step(self._tokenizer, token) or ""
        self._shown += len(text)
        return text

    def end(self) -> str:
        """Returns what was held back, without the bytes of a character that never became whole."""
        before = self._tokenizer.decode(self._prompt_ids, skip_special_tokens=False)
        whole: str = self._tokenizer.decode([*self._prompt_ids, *self._ids], skip_special_tokens=False)
        return whole[len(before) + self._shown :].rstrip(_BROKEN)


@dataclass
class GenerationSpeed:
    """How fast a generation was; times are counted from its construction.

    Attributes:
        prompt_tokens: tokens read.
        new_tokens: tokens made.
        first_token_s: time to the first of them.
        seconds: time to the last of them.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_s: float = 0.0
    seconds: float = 0.0
    _start: float = field(default_factory=time.perf_counter)

    def tick(self) -> None:
        """Counts one new token."""
        self.seconds = time.perf_counter() - self._start
        self.new_tokens += 1
        if self.new_tokens == 1:
            self.first_token_s = self.seconds

    def __str__(self) -> str:
        rate = self.new_tokens / max(self.seconds, 1e-9)
        return (
            f"{self.new_tokens:,} tokens after {self.prompt_tokens:,} in {self.seconds:.2f} s: {rate:,.1f} tokens/s, "
            f"first token after {self.first_token_s * 1e3:.0f} ms"
        )


@dataclass
class Completion:
    """What follows one prompt; it grows as tokens come.

    Attributes:
        prompt: the prompt.
        text: the completion so far, without the token that ended it.
        tokens: tokens so far, that one included.
        stop: why it ended, None while it has not.
    """

    prompt: str
    text: str = ""
    tokens: int = 0
    stop: Stop | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt that fits the model.

    Attributes:
        text: as given.
        ids: its tokens; for an empty text the end-of-document token, after which a new document begins.
    """

    text: str
    ids: list[int]


class TextGenerator:
    """Continues texts.

    Args:
        model: taken over.
        found: its tokenizer.
        sampling: how to choose tokens.
        max_new_tokens: longest completion in tokens.
        end_of_document: "auto" for the dataset's token, "none", or a token of the tokenizer.

    Raises:
        ConfigError: end_of_document is no token of the tokenizer.
        DataError: the tokenizer has more tokens than the model.
    """

    def __init__(
        self, model: GPT, found: FoundTokenizer, sampling: Sampling, max_new_tokens: int, end_of_document: str = "auto"
    ) -> None:
        if found.vocab_size > model.config.vocabulary:
            raise DataError(
                f"{found.path} has {found.vocab_size} tokens and the model {model.config.vocabulary}: it is the "
                "tokenizer of another model; give tokenizer=<file> with the right one"
            )
        self._config = model.config
        self._model = with_cache(model)
        self._found = found
        self._tokenizer = found.tokenizer
        self._sampling = sampling
        self._end_id = _end_id(found, end_of_document)
        ends = () if self._end_id is None else (self._end_id,)
        self._limits = Limits(max_new_tokens, ends, found.vocab_size)

    def prompt(self, text: str) -> Prompt:
        """Encodes a prompt; text that spells a special token is treated as in training.

        Raises:
            ConfigError: it is no valid text, too long for learned positions, or empty where no token begins a document.
            DataError: the tokenizer fails on it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt {text!a} is not valid UTF-8 at character {error.start}") from error
        with tokenizing(self._found.path):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            if self._end_id is None:
                raise ConfigError(
                    "the prompt is empty, and no end-of-document token is known to begin with: give a text"
                )
            ids = [self._end_id]
        check_length(self._config, len(ids), self._limits.max_new_tokens)
        return Prompt(text, ids)

    def complete(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], speed: GenerationSpeed
    ) -> Iterator[tuple[int, str, Completion]]:
        """Continues a batch of prompts.

        Args:
            prompts: from `prompt`.
            numbers: number of every prompt among all, which seeds its draws.
            speed: counts tokens and time.

        Yields:
            Place of the prompt, new text (it may be empty) and the completion so far, whenever a token has come.
        """
        streams = [TextStream(self._tokenizer, prompt.ids) for prompt in prompts]
        completions = [Completion(prompt.text) for prompt in prompts]
        speed.prompt_tokens += sum(len(prompt.ids) for prompt in prompts)
        ids = [prompt.ids for prompt in prompts]
        for new in generate(self._model, ids, numbers, self._sampling, self._limits):
            speed.tick()
            stream, completion = streams[new.row], completions[new.row]
            with tokenizing(self._found.path):
                text = "" if new.stop is Stop.end_of_document else stream.push(new.token)
                text += stream.end() if new.stop else ""
            completion.text += text
            completion.tokens += 1
            completion.stop = new.stop
            yield new.row, text, completion

    def complete_all(self, prompts: Sequence[Prompt], batch_size: int, speed: GenerationSpeed) -> Iterator[Completion]:
        """Continues any number of prompts, `batch_size` together; yields the completions in the prompts' order."""
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            finished: dict[int, Completion] = {}
            turn = 0
            for row, _, completion in self.complete(batch, range(first, first + len(batch)), speed):
                if completion.stop:
                    finished[row] = completion
                while turn in finished:
                    yield finished.pop(turn)
                    turn += 1


def _end_id(found: FoundTokenizer, wanted: str) -> int | None:
    if wanted == "none":
        return None
    if wanted == "auto":
        known = found.end_of_document_id
        default: int | None = found.tokenizer.token_to_id(DEFAULT_END)
        return known if known is not None or found.verified else default
    end: int | None = found.tokenizer.token_to_id(wanted)
    if end is None:
        raise ConfigError(
            f"end_of_document = {wanted}: not a token of {found.path}; give one that it has, auto or none"
        )
    return end
