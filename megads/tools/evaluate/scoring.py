"""Scores rows of tokens by their likelihood: batched by length, distributed over the ranks of any layout.

The first rank has the requests. The others serve it: they wait for work, and all ranks compute it together.

Shape suffixes: b = batch, s = tokens of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megads.api import (
    GPT,
    BatchInfo,
    ConfigError,
    MicroBatch,
    ModelConfig,
    NumericalError,
    ParallelGrid,
    Position,
    Sampling,
    micro_batch_ids,
    single_rank_grid,
    token_losses,
)
from megads.evaluate.generation import draws, next_tokens
from megads.model.kv_cache import with_cache
from megads.parallel.token_scores import RowScores

_LAYOUT_MICRO_BATCHES = 8
"""Micro-batches per call on several ranks: enough to fill a pipeline, few enough for memory."""


class ScoringEngine(Protocol):
    """Engine that scores; see `megads.engine.interface.TrainEngine` for the methods."""

    device: torch.device

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor: ...

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores: ...


class ModelScoringEngine:
    """The unsharded model in one process.

    Args:
        model: the model, in evaluation mode.

    Attributes:
        model: the model.
        device: device of its weights.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        """See TrainEngine.losses_by_position."""
        sums_2p = torch.zeros(2, positions, dtype=torch.float64)
        for batch in (batch.to(self.device) for batch in micro_batches):
            assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
            losses_bs = token_losses(self.model(batch.tokens_bs, batch.info), batch.labels_bs)
            places_bs = batch.info.positions(losses_bs.shape[1], self.device).expand_as(batch.labels_bs)
            counted_bs = batch.loss_mask_bs.double()
            for row, values_bs in zip(sums_2p, (losses_bs.double() * counted_bs, counted_bs), strict=True):
                row.index_add_(0, places_bs.flatten().cpu(), values_bs.flatten().cpu())
        return sums_2p

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        """See TrainEngine.score."""
        found = []
        for batch in (batch.to(self.device) for batch in micro_batches):
            assert batch.tokens_bs is not None and batch.labels_bs is not None
            logits_bsv = self.model(batch.tokens_bs, batch.info)
            losses_bs = token_losses(logits_bsv, batch.labels_bs)
            found.append((-losses_bs.double().cpu(), logits_bsv.argmax(dim=-1).cpu()))
        log_likelihoods, likeliest = zip(*found, strict=True)
        return RowScores(torch.cat(log_likelihoods)[:num_rows], torch.cat(likeliest)[:num_rows])


class TokenCounter:
    """Engine that counts the tokens of forward passes without computing them.

    Args:
        rows_at_once: returns the number of rows of a given length that all ranks read at a time.

    Attributes:
        device: CPU; unused.
        tokens: number of tokens that all ranks would have read so far, including padding.
    """

    device = torch.device("cpu")

    def __init__(self, rows_at_once: Callable[[int], int]) -> None:
        self._rows_at_once, self.tokens = rows_at_once, 0

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        """Not supported."""
        raise NotImplementedError

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        """Counts tokens; returns zeros and an id that no tokenizer has."""
        tokens_bs = micro_batches[0].tokens_bs
        assert tokens_bs is not None
        length = tokens_bs.shape[1]
        rows = self._rows_at_once(length)
        self.tokens += -(-num_rows // rows) * rows * length
        nothing_nl = torch.zeros(num_rows, length, dtype=torch.float64)
        # No tokenizer has this id, so no generated text ends early.
        return RowScores(nothing_nl, torch.full((num_rows, length), 2**31 - 1))


@dataclass(frozen=True)
class TokenRow:
    """A row of tokens, of which the last ones are scored.

    Attributes:
        ids: all token ids, at least two.
        counted: number of scored tokens; the first token has no context and cannot be scored.
    """

    ids: list[int]
    counted: int

    @property
    def places(self) -> slice:
        """Positions of the scored labels; the label of a position is the next token."""
        return slice(len(self.ids) - 1 - self.counted, len(self.ids) - 1)


def rolling_rows(ids: Sequence[int], prefix: int, max_length: int) -> list[TokenRow]:
    """Splits a text into windows that score every token once; the last window has as much context as the model reads.

    Args:
        ids: token ids of the text.
        prefix: token that precedes the text.
        max_length: maximum number of tokens that the model reads.
    """
    rows, text = [], [prefix, *ids]
    for start in range(1, len(text), max_length):
        end = min(start + max_length, len(text))
        rows.append(TokenRow(text[max(0, end - max_length - 1) : end], end - start))
    return rows


@dataclass(frozen=True)
class ScoredRow:
    """Scores of a row.

    Attributes:
        log_likelihood: total log likelihood of its counted tokens, in nats.
        likeliest: the most likely token at the position of each counted one.
        by_token: log likelihood of each counted token, in nats.
    """

    log_likelihood: float
    likeliest: list[int]
    by_token: list[float] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Batching:
    """How rows are batched.

    Attributes:
        micro_batch_size: rows in one forward pass of one rank; with `lengths`, of rows of the largest length, and
            proportionally more shorter rows, so that every pass has the same number of tokens.
        max_length: maximum number of tokens of a row that the model reads.
        unit: row lengths are multiples of this, as the layout requires.
        lengths: the allowed lengths of rows, ascending; empty for any.
    """

    micro_batch_size: int
    max_length: int
    unit: int = 1
    lengths: tuple[int, ...] = ()

    def rows(self, length: int) -> int:
        """Returns the number of rows of a given length in one forward pass of one rank."""
        return self.micro_batch_size * (self.lengths[-1] // length if self.lengths else 1)

    def padded(self, tokens: int) -> int:
        """Returns the padded length of rows of which the longest has this many tokens."""
        if self.lengths:
            return next(length for length in self.lengths if length >= tokens)
        return -(-tokens // self.unit) * self.unit


class Scorer:
    """Scores rows on all ranks; the first rank has the requests, the others serve it.

    Args:
        engine: engine of this rank.
        model: model config.
        batching: how rows are batched.
        grid: process grid; None for one process.

    Attributes:
        grid: process grid.
    """

    def __init__(
        self, engine: ScoringEngine, model: ModelConfig, batching: Batching, grid: ParallelGrid | None = None
    ) -> None:
        self.engine, self.model, self.batching = engine, model, batching
        self.grid = grid or single_rank_grid()
        self._dp = self.grid.dp.size
        self._micro_batches = 1 if self.grid.world_size == 1 else _LAYOUT_MICRO_BATCHES

    def counting(self) -> tuple[Scorer, TokenCounter]:
        """Returns a single-process scorer that only counts, and the counter of the tokens that this scorer would
        read."""
        alone, dp = copy.copy(self), self._dp
        counter = TokenCounter(lambda length: self.batching.rows(length) * dp)
        alone.engine, alone.grid, alone._dp = counter, single_rank_grid(), 1
        alone.batching = replace(self.batching, micro_batch_size=self.batching.micro_batch_size * dp)
        return alone, counter

    def score(self, rows: Sequence[TokenRow], progress: Callable[[int], None] | None = None) -> list[ScoredRow]:
        """Scores rows, the longest first, so that running out of memory happens at once; only on the first rank.

        Args:
            rows: rows to score.
            progress: called after every batch with the number of finished rows.

        Raises:
            NumericalError: the model computes NaN.
        """
        found = self.score_batches(rows, self.batches(rows), progress)
        return [found[index] for index in range(len(rows))]

    def batches(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        """Returns the indices of the rows of each batch, the longest rows first."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index].ids), reverse=True)
        batches, start = list[list[int]](), 0
        while start < len(order):
            length = self.batching.padded(len(rows[order[start]].ids) - 1)
            batches.append(order[start : start + self.batching.rows(length) * self._dp * self._micro_batches])
            start += len(batches[-1])
        return batches

    def score_batches(
        self, rows: Sequence[TokenRow], batches: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None
    ) -> dict[int, ScoredRow]:
        """Scores some batches of rows; see `score`."""
        found: dict[int, ScoredRow] = {}
        for batch in batches:
            found |= zip(batch, self._ask([rows[index] for index in batch]), strict=True)
            if progress is not None:
                progress(len(found))
        return found

    @contextmanager
    def served(self) -> Iterator[bool]:
        """Yields whether this rank has the requests; the others serve in the meantime, and all ranks leave together."""
        control = self.grid.control
        if control.rank:
            # An empty list marks the end.
            while rows := control.broadcast(list[TokenRow](), list[TokenRow]):
                self._compute(rows)
            yield False
            return
        try:
            yield True
        finally:
            control.broadcast([], list[TokenRow])

    def _ask(self, rows: list[TokenRow]) -> Iterator[ScoredRow]:
        # A scorer that counts is alone in a world of several ranks.
        shared = rows if self.grid.world_size == 1 else self.grid.control.broadcast(rows, list[TokenRow])
        scores = self._compute(shared)
        for index, row in enumerate(rows):
            by_token = scores.log_likelihoods_nl[index, row.places]
            log_likelihood = float(by_token.sum())
            if log_likelihood != log_likelihood:
                raise NumericalError(
                    "the model computes NaN: its weights are damaged or not finite; try another checkpoint"
                )
            yield ScoredRow(log_likelihood, scores.likeliest_nl[index, row.places].tolist(), by_token.tolist())

    def _compute(self, rows: Sequence[TokenRow]) -> RowScores:
        """Computes scores; collective over all ranks."""
        length, dp = self.batching.padded(max(len(row.ids) for row in rows) - 1), self._dp
        micro = self.batching.rows(length)
        filled = -(-len(rows) // (micro * dp)) * micro * dp
        if self.grid.world_size == 1:
            # A single process need not pad the batch to equal micro-batches on all ranks.
            filled, micro = len(rows), min(micro, len(rows))
            numbers = [list(range(start, min(start + micro, filled))) for start in range(0, filled, micro)]
        else:
            numbers = micro_batch_ids(0, filled, micro, self.grid.dp.rank, dp).tolist()
        return self.engine.score([self._micro_batch(rows, ids, length) for ids in numbers], len(rows))

    def _micro_batch(self, rows: Sequence[TokenRow], numbers: Sequence[int], length: int) -> MicroBatch:
        tokens_bs, labels_bs = torch.zeros(2, len(numbers), length, dtype=torch.int64).unbind()
        mask_bs = torch.zeros(len(numbers), length)
        for place, number in enumerate(numbers):
            if number < len(rows):
                ids = torch.tensor(rows[number].ids)
                tokens_bs[place, : len(ids) - 1], labels_bs[place, : len(ids) - 1] = ids[:-1], ids[1:]
                mask_bs[place, rows[number].places] = 1.0
        positions_bs = None
        if self.model.position is Position.learned and length > self.model.max_seq_len:
            # Padding exceeds the learned positions.
            positions_s = torch.arange(length).clamp(max=self.model.max_seq_len - 1)
            positions_bs = positions_s.expand(len(numbers), -1).contiguous()
        row_lengths = None
        if self.model.length_dependent_layers():
            row_lengths = tuple(len(rows[number].ids) - 1 if number < len(rows) else length for number in numbers)
        info = BatchInfo(torch.tensor(numbers), positions_bs, row_lengths=row_lengths)
        return MicroBatch(info, tokens_bs, labels_bs, mask_bs)

    def continuation(self, sampling: Sampling, numbers: Sequence[int]) -> Continuation:
        """Returns a continuation of some sequences: with a KV cache in one process, else by scoring them again.

        Args:
            sampling: sampling parameters.
            numbers: indices of the sequences, which seed their sampling.
        """
        if isinstance(self.engine, ModelScoringEngine):
            return CachedContinuation(self.engine.model, sampling, numbers)
        return RescoredContinuation(self, sampling)


class Continuation(Protocol):
    """Reads sequences and returns their next tokens."""

    def start(self, num_rows: int) -> None:
        """Discards all sequences and begins this many empty ones."""
        ...

    def append(self, pieces: Sequence[Sequence[int]]) -> list[int]:
        """Reads the next tokens of every row; returns the token after each."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows."""
        ...


class CachedContinuation:
    """Continuation in one process, with a KV cache.

    Args:
        model: the model; it is not modified, and its weights are shared.
        sampling: sampling parameters.
        numbers: indices of all sequences, which seed their sampling.
    """

    def __init__(self, model: GPT, sampling: Sampling, numbers: Sequence[int]) -> None:
        shared = {id(weight): weight for weight in model.parameters()}
        # A copy, because a KV cache replaces the attention cores.
        self._model = with_cache(copy.deepcopy(model, dict[int, Any](shared)))
        self._sampling, self._numbers = sampling, list(numbers)
        self._place = 0

    def start(self, num_rows: int) -> None:
        assert num_rows == len(self._numbers)
        self._model.start(num_rows)

    def append(self, pieces: Sequence[Sequence[int]]) -> list[int]:
        """See Continuation.append; raises NumericalError if the model computes NaN."""
        logits_bv = self._model.append(pieces)
        if bool(torch.isnan(logits_bv).any()):
            raise NumericalError(
                "the model computes NaN: its weights are damaged or not finite; try another checkpoint"
            )
        draws_b = draws(self._sampling.seed, self._numbers, self._place)
        self._place += 1
        tokens: list[int] = next_tokens(logits_bv, draws_b, self._sampling).tolist()
        return tokens

    def keep(self, rows: Sequence[int]) -> None:
        self._model.select_rows(rows)
        self._numbers = [self._numbers[row] for row in rows]


class RescoredContinuation:
    """Continuation by a scorer of any layout, which reads every sequence again for each token.

    Args:
        scorer: the scorer.
        sampling: sampling parameters.

    Raises:
        ConfigError: the temperature is above 0, which would need the probabilities of all tokens.
    """

    def __init__(self, scorer: Scorer, sampling: Sampling) -> None:
        if sampling.temperature:
            raise ConfigError(
                f"a task samples at temperature {sampling.temperature}: several ranks only support greedy decoding; "
                "evaluate it with layout.tp, pp, cp, dp and ep at 1"
            )
        self._scorer, self._rows = scorer, list[list[int]]()

    def start(self, num_rows: int) -> None:
        self._rows = [[] for _ in range(num_rows)]

    def append(self, pieces: Sequence[Sequence[int]]) -> list[int]:
        for row, piece in zip(self._rows, pieces, strict=True):
            row.extend(piece)
        # The last token is a placeholder for the next one; its id does not matter.
        return [scored.likeliest[0] for scored in self._scorer.score([TokenRow([*row, 0], 1) for row in self._rows])]

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
