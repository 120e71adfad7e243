"""Needles in haystacks: a fact with a key and a number in unrelated text, and a question about it at the end.

Haystacks are a pure function of the settings, the tokenizer and the text. They have an exact number of tokens and are
never truncated. All depths of a length share text, keys and numbers, so that they differ in the place of the needle
only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from megads.api import ConfigError, DataError, FoundTokenizer, tokenizing
from megads.tools.evaluate.config import KEY, NUMBER, NeedleConfig
from megads.tools.evaluate.scoring import ScoredRow, Scorer, TokenRow
from megads.tools.prepare.small_files import whole_texts

_COLOURS = (
    *("amber", "azure", "beige", "bronze", "coral", "crimson", "emerald", "golden", "indigo", "ivory", "jade", "lilac"),
    *("maroon", "ochre", "olive", "pearl", "purple", "ruby", "scarlet", "silver", "teal", "topaz", "violet", "yellow"),
)
_THINGS = (
    *("anchor", "balloon", "basket", "bottle", "bucket", "candle", "carpet", "compass", "drum", "feather", "guitar"),
    *("hammer", "helmet", "kettle", "lantern", "mirror", "necklace", "pencil", "pillow", "saddle", "statue", "ticket"),
    *("umbrella", "whistle"),
)
_MOST_DRAWS = 1000


@dataclass(frozen=True)
class Haystack:
    """One haystack with its needle and answers.

    Attributes:
        length: tokens of prompt and answer together.
        depth: the asked depth of the needle: 0 is the beginning of the text, 1 its end, before the question.
        placed: its depth in the text, of whose sentences it follows one.
        needle: index of its first token in the prompt.
        key: what the question asks for.
        numbers: the right answer, then the wrong ones.
        prompt: token ids up to the answer.
        answers: token ids of every number, as many each.
    """

    length: int
    depth: float
    placed: float
    needle: int
    key: str
    numbers: tuple[str, ...]
    prompt: list[int]
    answers: list[list[int]]


@dataclass(frozen=True)
class FoundNeedle:
    """Scores of a haystack's answers.

    Attributes:
        rank: 1 plus the number of wrong answers that are at least as likely as the right one.
        exact_match: whether greedy generation gives the right answer.
        log_likelihoods: total log likelihood of every answer, in nats, the right one first.
    """

    rank: int
    exact_match: bool
    log_likelihoods: list[float]


class HaystackMaker:
    """Makes haystacks.

    Args:
        config: settings.
        found: tokenizer of the model.
        text_field: JSON field that holds the text of `config.text`.

    Raises:
        DataError: the text cannot be read, or has no sentence.
    """

    def __init__(self, config: NeedleConfig, found: FoundTokenizer, text_field: str = "text") -> None:
        self._config, self._found = config, found
        if config.text is None:
            self._text = resources.files(__package__).joinpath("haystack.txt").read_text(encoding="utf-8")
        elif Path(config.text).is_file():
            self._text = "\n".join(whole_texts(Path(config.text), text_field, "needle.text", "text_field"))
        else:
            raise DataError(f"needle.text = {config.text}: there is no such file")
        sentences = [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", self._text)]
        self._sentences = [ids for ids in (self._encoded(f" {part}") for part in sentences if part) if ids]
        if not self._sentences:
            raise DataError(f"needle.text = {config.text}: holds no text")
        self.digest = hashlib.sha256(self._text.encode()).hexdigest()

    def haystacks(self, length: int, sample: int) -> Iterator[Haystack]:
        """Yields the haystack of a length for every depth.

        Args:
            length: tokens of prompt and answer together.
            sample: index of the haystack among those of this length.

        Raises:
            ConfigError: needle and question do not fit into the length, or there are too few keys or numbers.
        """
        config = self._config
        chance = Random(f"{config.seed}/{length}/{sample}")
        numbers, answers = self._numbers(chance)
        keys = self._keys(chance)
        facts = [
            self._fact(key, answer) for key, answer in zip(keys, answers[: len(keys)], strict=True)
        ]  # the needle, then the decoys, whose numbers are wrong answers
        question = self._encoded(self._question(keys[0]))
        first = self._found.first_token_id
        begin = [] if first is None else [first]
        room = length - len(begin) - sum(map(len, facts)) - len(question) - len(answers[0])
        if room < 1:
            raise ConfigError(
                f"needle.lengths has {length}, but needles, question and answer have {length - room} tokens: give "
                f"lengths of more than {length - room}, or fewer needle.decoys"
            )
        order = self._text_of(room, chance)
        ends = [0, *accumulate(map(len, order))]
        text = [token for sentence in order for token in sentence]
        decoys = [_nearest(ends, chance.random() * room) for _ in facts[1:]]
        for depth in config.depths:
            place = _nearest(ends, depth * room)
            prompt, needle, done = list(begin), 0, 0
            # The needle precedes a decoy at the same place, except at the end, where it comes last.
            at_end = place == room
            for at, _, number in sorted(
                [(place, at_end, 0), *((at, not at_end, index) for index, at in enumerate(decoys, 1))]
            ):
                prompt += text[done:at]
                needle = len(prompt) if number == 0 else needle
                prompt += facts[number]
                done = at
            prompt += text[done:] + question
            yield Haystack(length, depth, place / room, needle, keys[0], numbers, prompt, answers)

    def _encoded(self, text: str) -> list[int]:
        with tokenizing(self._found.path):
            ids: list[int] = self._found.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _fact(self, key: str, answer: Sequence[int]) -> list[int]:
        """A statement in which the number has the tokens of the answer, whatever precedes and follows it."""
        before, _, after = self._config.statement.replace(KEY, key).partition(NUMBER)
        return [*self._encoded(f" {before.strip()}"), *answer, *(self._encoded(after) if after else ())]

    def _question(self, key: str) -> str:
        asked = self._config.question or self._config.statement.partition(NUMBER)[0]
        return f" {asked.replace(KEY, key).strip()}"

    def _keys(self, chance: Random) -> list[str]:
        """The key of the needle, then those of the decoys; none of them is in the text."""
        known = self._text.lower()
        keys = [key for key in (f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS) if key not in known]
        wanted = 1 + self._config.decoys
        if len(keys) < wanted:
            raise ConfigError(f"needle.text has all keys of the needles but {len(keys)}, {wanted} are needed")
        return chance.sample(keys, wanted)

    def _numbers(self, chance: Random) -> tuple[tuple[str, ...], list[list[int]]]:
        """Right and wrong answers, and their tokens: different numbers that are not in the text, with equally many
        tokens, as sums of more tokens' log likelihoods are lower."""
        found: dict[str, list[int]] = {}
        digits = self._config.digits
        for _ in range(_MOST_DRAWS):
            number = str(chance.randrange(10 ** (digits - 1), 10**digits))
            ids = self._encoded(f" {number}")
            if number not in self._text and (not found or len(ids) == len(next(iter(found.values())))):
                found.setdefault(number, ids)
            if len(found) == 1 + self._config.distractors:
                return tuple(found), list(found.values())
        raise ConfigError(
            f"needle.distractors = {self._config.distractors}: there are only {len(found)} numbers of needle.digits = "
            f"{digits} digits that the text does not have, with equally many tokens; lower it, or raise needle.digits"
        )

    def _text_of(self, tokens: int, chance: Random) -> list[list[int]]:
        """Sentences of the text in random order, all of them before one is repeated, with this many tokens; the last
        is cut."""
        order: list[list[int]] = []
        while tokens:
            for sentence in chance.sample(self._sentences, len(self._sentences)):
                if tokens:
                    order.append(sentence[:tokens])
                    tokens -= len(order[-1])
        return order


def _nearest(places: Sequence[int], wanted: float) -> int:
    return min(places, key=lambda place: abs(place - wanted))


def measure_needles(
    scorer: Scorer,
    found: FoundTokenizer,
    config: NeedleConfig,
    progress: Callable[[str, int, int], None],
    record: Callable[[Haystack, FoundNeedle], None] | None = None,
    text_field: str = "text",
) -> dict[str, Any]:
    """Evaluates needles on the first rank.

    Args:
        scorer: computes the log likelihoods.
        found: tokenizer of the model.
        config: settings.
        progress: callback for progress.
        record: called with every haystack and what was found.
        text_field: JSON field that holds the text of `config.text`.

    Returns:
        The settings, the sha256 of the text, and a cell for each length and depth: accuracy (share of haystacks whose
        right answer is the likeliest), exact match, mean rank, and mean depth of the needles in the text.

    Raises:
        ConfigError: a length exceeds what the model reads, or is too short.
        DataError: the text cannot be read.
    """
    if max(config.lengths) > scorer.batching.max_length:
        raise ConfigError(
            f"needle.lengths has {max(config.lengths)}, but the model reads {scorer.batching.max_length} tokens: lower "
            "it, or set seq_len (and rope_scaling)"
        )
    maker, cells, done = HaystackMaker(config, found, text_field), list[dict[str, Any]](), 0
    # The longest first, so that running out of memory happens at once.
    for length in sorted(config.lengths, reverse=True):
        by_depth: dict[float, list[tuple[Haystack, FoundNeedle]]] = {depth: [] for depth in config.depths}
        for sample in range(config.samples):
            for haystack in maker.haystacks(length, sample):
                scored = _found_needle(haystack, scorer)
                by_depth[haystack.depth].append((haystack, scored))
                done += 1
                progress("haystacks", done, len(config.lengths) * len(config.depths) * config.samples)
                if record is not None:
                    record(haystack, scored)
        for depth, pairs in by_depth.items():
            scores = [scored for _, scored in pairs]
            cells.append(
                {
                    "length": length,
                    "depth": depth,
                    "placed": _mean([haystack.placed for haystack, _ in pairs]),
                    "accuracy": _mean([one.rank == 1 for one in scores]),
                    "exact_match": _mean([one.exact_match for one in scores]),
                    "mean_rank": _mean([one.rank for one in scores]),
                }
            )
    cells.sort(key=lambda cell: (cell["length"], cell["depth"]))
    return {**asdict(config), "text_sha256": maker.digest, "cells": cells}


def _found_needle(haystack: Haystack, scorer: Scorer) -> FoundNeedle:
    rows = [TokenRow([*haystack.prompt, *answer], len(answer)) for answer in haystack.answers]
    scored: list[ScoredRow] = scorer.score(rows)
    likelihoods = [one.log_likelihood for one in scored]
    rank = 1 + sum(other >= likelihoods[0] for other in likelihoods[1:])
    # Greedy generation gives the answer if and only if each of its tokens is the likeliest after those before it.
    return FoundNeedle(rank, scored[0].likeliest == haystack.answers[0], likelihoods)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
