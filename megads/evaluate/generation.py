"""Tokens after tokens: the loop of generation, without text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from megads.errors import ConfigError, NumericalError
from megads.evaluate.sampling import Sampling, draws, next_tokens
from megads.model.config import ModelConfig, Position
from megads.model.kv_cache import CachedGPT, RecomputingGPT


class Stop(StrEnum):
    """Why a completion ended."""

    end_of_document = "end_of_document"
    length = "length"


@dataclass(frozen=True)
class NewToken:
    """One token of one completion.

    Attributes:
        row: the prompt's place in its batch.
        token: its id.
        stop: set on the last one.
    """

    row: int
    token: int
    stop: Stop | None


@dataclass(frozen=True)
class Limits:
    """What generation may do.

    Attributes:
        max_new_tokens: longest completion.
        end_ids: tokens that end a completion.
        vocab_size: tokens from here on have no text and never come; None for the model's size.
    """

    max_new_tokens: int
    end_ids: Collection[int] = ()
    vocab_size: int | None = None


def check_length(config: ModelConfig, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuses what learned positions cannot reach; ALiBi has no end.

    Raises:
        ConfigError: prompt and completion need more positions than the model has learned.
    """
    # The last new token is never read.
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
        model: its sequences so far are forgotten.
        prompts: token ids, at least one each; lengths may differ.
        numbers: number of every prompt among all, which seeds its draws.
        sampling: how to choose.
        limits: when to stop.

    Yields:
        The tokens as they come, those of one step in the order of rows; a row that has ended leaves the batch.

    Raises:
        NumericalError: the model's output is not a number.
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
            model.keep(going)
        rows, pieces = [rows[index] for index in going], [[tokens[index]] for index in going]
