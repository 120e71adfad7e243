"""Text generation: device and dtype of a trained model, sampling of the next token, and streaming of completions.

Shape suffixes: b = batch, v = vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from megads.data.indexed.sidecar import FoundTokenizer, tokenizing
from megads.errors import ConfigError, DataError, NumericalError
from megads.evaluate.config import WeightPrecision
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT
from megads.model.kv_cache import CachedGPT, RecomputingGPT, with_cache


def choose_device(name: str) -> torch.device:
    """Returns the device for a config value.

    Args:
        name: auto, cpu, cuda or cuda:<number>.

    Raises:
        ConfigError: there is no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name}: must be auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(f"device = {name}: torch sees {gpus} GPUs here; device=auto takes what there is")
    return device


def choose_dtype(precision: WeightPrecision, device: torch.device) -> torch.dtype:
    """Returns the dtype for a config value; with auto fp32 on CPUs and bf16 on GPUs, which are faster there."""
    if precision is WeightPrecision.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision is WeightPrecision.bf16 else torch.float32


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: divisor of the logits; 0 is greedy decoding.
        top_p: sample from the smallest set of most likely tokens whose probabilities sum to at least this (nucleus
            sampling, Holtzman et al. 2020).
        top_k: sample from this many of the most likely tokens; 0 samples from all.
        seed: sampling seed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


def draws(seed: int, sequences: Sequence[int], place: int) -> Tensor:
    """Returns uniform random numbers in [0, 1), fp64 [b]: a pure function of seed, sequence and position.

    So a prompt's completion depends neither on the other prompts of its batch nor on when they end.

    Args:
        seed: the user's seed.
        sequences: index of every row's sequence.
        place: position of the token in its completion.
    """
    messages = [struct.pack("<qqq", seed, place, sequence) + b"generate" for sequence in sequences]
    words = [int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") for message in messages]
    return torch.tensor([(word >> 11) / 2.0**53 for word in words], dtype=torch.float64)


def next_tokens(logits_bv: Tensor, draws_b: Tensor, sampling: Sampling) -> Tensor:
    """Samples a token for every row, int64 [b].

    Tokens are sorted by probability, and the random number is looked up in their cumulative sum. top_p applies to the
    distribution after temperature and before top_k.

    Args:
        logits_bv: logits of any floating-point dtype.
        draws_b: random number in [0, 1) for every row, fp64; unused at temperature 0.
        sampling: sampling parameters.
    """
    if sampling.temperature == 0.0:
        return logits_bv.argmax(dim=-1)
    # Subtracted before the division, so that the largest score is 0 and no temperature gives infinities.
    scores_bv = logits_bv.double()
    scores_bv = (scores_bv - scores_bv.amax(dim=-1, keepdim=True)) / sampling.temperature
    ranked_bv, tokens_bv = torch.softmax(scores_bv, dim=-1).sort(dim=-1, descending=True, stable=True)
    cumulative_bv = ranked_bv.cumsum(dim=-1)
    # A token is kept if the sum before it is below top_p; the most likely one is always kept.
    kept_b = (cumulative_bv - ranked_bv < sampling.top_p).sum(dim=-1)
    if sampling.top_k:
        kept_b = kept_b.clamp(max=sampling.top_k)
    total_b1 = cumulative_bv.gather(-1, kept_b[:, None] - 1)
    place_b1 = torch.searchsorted(cumulative_bv, draws_b.to(logits_bv.device)[:, None] * total_b1, right=True)
    return tokens_bv.gather(-1, torch.minimum(place_b1, kept_b[:, None] - 1))[:, 0]


class Stop(StrEnum):
    """Why a completion ended."""

    end_of_document = "end_of_document"
    length = "length"


@dataclass(frozen=True)
class NewToken:
    """One new token of a completion.

    Attributes:
        row: index of the prompt in its batch.
        token: token id.
        stop: reason for the end, set on the last token.
    """

    row: int
    token: int
    stop: Stop | None


@dataclass(frozen=True)
class Limits:
    """Limits of generation.

    Attributes:
        max_new_tokens: maximum length of a completion.
        end_ids: tokens that end a completion.
        vocab_size: ids from this on have no text and are never sampled; None for the model's size.
    """

    max_new_tokens: int
    end_ids: Collection[int] = ()
    vocab_size: int | None = None


def check_length(config: ModelConfig, prompt_tokens: int, max_new_tokens: int) -> None:
    """Checks that prompt and completion fit the learned positions; ALiBi has no limit.

    Raises:
        ConfigError: they need more positions than the model has learned.
    """
    # The last new token is not fed to the model.
    needed = prompt_tokens + max_new_tokens - 1
    if config.position is not Position.learned or needed <= config.max_seq_len:
        return
    room = config.max_seq_len - prompt_tokens + 1
    remedy = f"give max_new_tokens={room} or less, or a shorter prompt" if room > 0 else "give a shorter prompt"
    raise ConfigError(
        f"a prompt of {prompt_tokens} tokens and max_new_tokens = {max_new_tokens} need {needed} positions, but the "
        f"model has learned {config.max_seq_len} (model.max_seq_len) and knows none beyond: {remedy}"
    )


def generate(
    model: CachedGPT | RecomputingGPT,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    sampling: Sampling,
    limits: Limits,
) -> Iterator[NewToken]:
    """Continues a batch of prompts.

    Args:
        model: the model; its previous sequences are discarded.
        prompts: token ids, at least one per prompt; lengths may differ.
        numbers: index of every prompt among all prompts, which seeds its sampling.
        sampling: sampling parameters.
        limits: limits of generation.

    Yields:
        The tokens as they are generated, those of one step in row order; a finished row leaves the batch.

    Raises:
        NumericalError: the model's output is NaN.
    """
    rows = list(range(len(prompts)))
    pieces = list(prompts)
    model.start(len(rows))
    for place in range(limits.max_new_tokens):
        logits_bv = model.append(pieces)[:, : limits.vocab_size]
        draws_b = draws(sampling.seed, [numbers[row] for row in rows], place)
        if bool(torch.isnan(logits_bv).any()):
            raise NumericalError(
                "the model computes NaN: its weights are damaged or not finite; try another checkpoint"
            )
        tokens: list[int] = next_tokens(logits_bv, draws_b, sampling).tolist()
        going = []
        for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            stop = None
            if token in limits.end_ids:
                stop = Stop.end_of_document
            elif place + 1 == limits.max_new_tokens:
                stop = Stop.length
            if stop is None:
                going.append(index)
            yield NewToken(row, token, stop)
        if not going:
            return
        if len(going) < len(rows):
            model.select_rows(going)
        rows, pieces = [rows[index] for index in going], [[tokens[index]] for index in going]


DEFAULT_END = "<|endoftext|>"
_BROKEN = "\ufffd"


class TextStream:
    """Decodes tokens to text incrementally; a character that spans several tokens is returned once it is complete.

    Args:
        tokenizer: the tokenizer.
        prompt_ids: tokens of the prompt; a token's text may depend on them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._ids: list[int] = []
        self._shown = 0
        self._stream = DecodeStream(ids=self._prompt_ids, skip_special_tokens=False)

    def push(self, token: int) -> str:
        """Adds a token; returns the text that it completes, which is often empty."""
        self._ids.append(token)
        text: str = self._stream.step(self._tokenizer, token) or ""
        self._shown += len(text)
        return text

    def end(self) -> str:
        """Returns the remaining text, without the bytes of an incomplete character."""
        before = self._tokenizer.decode(self._prompt_ids, skip_special_tokens=False)
        whole: str = self._tokenizer.decode([*self._prompt_ids, *self._ids], skip_special_tokens=False)
        return whole[len(before) + self._shown :].rstrip(_BROKEN)


@dataclass
class GenerationSpeed:
    """Speed of a generation; times are measured from the construction of this object.

    Attributes:
        prompt_tokens: number of prompt tokens.
        new_tokens: number of generated tokens.
        first_token_s: time to the first generated token.
        seconds: time to the last generated token.
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
    """The completion of one prompt, updated as tokens are generated.

    Attributes:
        prompt: the prompt.
        text: the completion so far, without the token that ended it.
        tokens: number of tokens so far, including that one.
        stop: reason for the end; None if it has not ended.
    """

    prompt: str
    text: str = ""
    tokens: int = 0
    stop: Stop | None = None


@dataclass(frozen=True)
class Prompt:
    """A valid prompt for the model.

    Attributes:
        text: text of the prompt.
        ids: its token ids; for an empty text the end-of-document token, after which a new document begins.
    """

    text: str
    ids: list[int]


class TextGenerator:
    """Continues texts.

    Args:
        model: the model, which is modified.
        found: its tokenizer.
        sampling: sampling parameters.
        max_new_tokens: maximum length of a completion in tokens.
        end_of_document: "auto" for the dataset's token, "none", or a token of the tokenizer.
        as_prompt: converts a given text, for example a message, to the text of a prompt.

    Raises:
        ConfigError: end_of_document is not a token of the tokenizer.
        DataError: the tokenizer has more tokens than the model.
    """

    def __init__(
        self,
        model: GPT,
        found: FoundTokenizer,
        sampling: Sampling,
        max_new_tokens: int,
        end_of_document: str = "auto",
        as_prompt: Callable[[str], str] = str,
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
        self._as_prompt = as_prompt
        self._end_id = _end_id(found, end_of_document)
        ends = [] if self._end_id is None else [self._end_id]
        ends += found.end_ids if end_of_document == "auto" else ()
        self._limits = Limits(max_new_tokens, ends, found.vocab_size)

    def prompt(self, text: str) -> Prompt:
        """Encodes a prompt; text that spells a special token is treated as in training.

        Raises:
            ConfigError: the text is invalid, too long for learned positions, or empty without an end-of-document token.
            DataError: the tokenizer fails on the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the prompt {text!a} is not valid UTF-8 at character {error.start}") from error
        text = self._as_prompt(text)
        with tokenizing(self._found.path):
            ids = self._found.encode(text)
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
            prompts: results of `prompt`.
            numbers: index of every prompt among all prompts, which seeds its sampling.
            speed: counts tokens and time.

        Yields:
            Index of the prompt, new text (may be empty) and the completion so far, for every token.
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
        """Continues any number of prompts in batches of `batch_size`; yields the completions in the order of the
        prompts."""
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
