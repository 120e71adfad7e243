"""Evaluation during training: the loss per token over the whole validation set."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megads.batch import MicroBatch
from megads.engine.interface import TrainEngine
from megads.errors import DataError
from megads.evaluate.config import EvaluationConfig, loss_key
from megads.parallel.grid import ParallelGrid
from megads.runtime.heartbeat import VALIDATING, Heartbeat
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import MetricsWriter


class PeriodicEvaluation(ABC):
    """Evaluates at an interval of steps and after the last step; an evaluation missed because of a kill is done at
    start.

    The last step of an interrupted or preempted run is not its planned end, so it is not evaluated: the metrics of a
    resumed run equal those of an uninterrupted one. Register this hook after the checkpoint's, so that a preempted run
    saves first.

    Args:
        grid: the process grid.
        metrics: writer of metrics.jsonl.
        every_steps: interval in steps; 0 for never.
        last_step: step after which it always evaluates; None disables that.
    """

    def __init__(self, grid: ParallelGrid, metrics: MetricsWriter, every_steps: int, last_step: int | None) -> None:
        self._grid, self._metrics = grid, metrics
        self._every_steps, self._last_step = every_steps, last_step

    def on_start(self, state: TrainState) -> None:
        # A checkpoint is saved before its step is evaluated, so a kill in between leaves the evaluation missing.
        if state.step == 0 or not self._due(state.step):
            return
        if self._grid.control.any(self._metrics.lacks(state.step, self._key)):
            self._record(state.step, state.samples, state.tokens)

    def on_step(self, info: StepInfo) -> None:
        # The last step of a training phase is evaluated by the start of the next phase, as after a kill in between.
        if self._due(info.step) and not info.ends_phase:
            self._record(info.step, info.samples, info.tokens)

    def on_end(self, state: TrainState) -> None:  # noqa: B027
        pass

    def _due(self, step: int) -> bool:
        every = self._every_steps
        return (every > 0 and step % every == 0) or (self._last_step is not None and step >= self._last_step)

    @property
    @abstractmethod
    def _key(self) -> str:
        """Metric key that marks a line as evaluated."""

    @abstractmethod
    def _record(self, step: int, samples: int, tokens: int) -> None:
        """Evaluates and writes the metrics line; collective."""


class ValidationHook(PeriodicEvaluation):
    """Validates every evaluation.every_steps steps and after the last one.

    Args:
        engine: computes the loss.
        batches: starts a pass over the validation set; yields this rank's micro-batches of each global batch, the same
            number of batches on every rank.
        name: name of the set in the metrics.
        unigram_loss: computes the loss per token, in nats, of the best model that ignores context, as a baseline;
            called once, on rank 0.
        config: when to validate.
        total_steps: planned last step.
        metrics: writer of metrics.jsonl.
        num_batches: number of batches of a pass; 0 is unknown.
        beats: heartbeat of this rank; None sends none.
        seq_len: tokens per sample, for losses by position.
    """

    def __init__(
        self,
        engine: TrainEngine,
        batches: Callable[[], Iterator[list[MicroBatch]]],
        name: str,
        unigram_loss: Callable[[], float],
        config: EvaluationConfig,
        total_steps: int,
        metrics: MetricsWriter,
        num_batches: int = 0,
        beats: Heartbeat | None = None,
        seq_len: int = 0,
    ) -> None:
        super().__init__(engine.grid, metrics, config.every_steps, total_steps if config.at_end else None)
        self._engine = engine
        self._batches = batches
        self._name = name
        self._unigram_loss = functools.cache(unigram_loss)
        self._config = config
        self._num_batches = num_batches
        self._beats = beats or Heartbeat()
        self._seq_len, self._by_position = seq_len, dict[str, float]()

    @property
    def _key(self) -> str:
        return loss_key(self._name)

    def _record(self, step: int, samples: int, tokens: int) -> None:
        """Validates and writes the metrics line; collective."""
        loss, validated = self.validate()
        by_position = self._by_position
        averaged: dict[str, float] = {}
        if self._config.average:
            with self._engine.averaged_weights():
                averaged[f"valid/{self._name}/average_loss"] = self.validate()[0]
        if self._engine.grid.rank:
            return
        self._metrics.write(
            {
                "step": step,
                "samples": samples,
                "tokens": tokens,
                self._key: loss,
                **averaged,
                **by_position,
                f"valid/{self._name}/ppl": perplexity(loss),
                f"valid/{self._name}/unigram_loss": self._unigram_loss(),
                f"valid/{self._name}/tokens": validated,
            }
        )

    def validate(self) -> tuple[float, int]:
        """Returns the mean loss in nats over all unmasked tokens of the validation set, and their number; collective.

        Raises:
            DataError: the set has no unmasked token.
        """
        loss_sum, tokens = 0.0, 0
        sums_2p = torch.zeros(2, self._seq_len, dtype=torch.float64)
        for number, micro_batches in enumerate(self._batches(), 1):
            of = f"/{self._num_batches}" if self._num_batches else ""
            self._beats.enter(f"{VALIDATING}, batch {number}{of}")
            if self._config.by_position:
                sums_2p += self._engine.losses_by_position(micro_batches, self._seq_len)
                continue
            result = self._engine.evaluate(micro_batches)
            loss_sum += result.loss_sum
            tokens += result.tokens
        if self._config.by_position:
            loss_sum, tokens = float(sums_2p[0].sum()), int(sums_2p[1].sum())
            self._by_position = {
                f"valid/{self._name}/position_{first}": loss for first, loss in position_losses(sums_2p).items()
            }
        if not tokens:
            raise DataError(
                f"validation set {self._name!r} has no token for the loss: give a larger data.valid or data.split"
            )
        return loss_sum / tokens, tokens


def position_losses(sums_2p: Tensor) -> dict[int, float]:
    """Returns mean losses by the first position of a range; ranges are 0, 1, 2 to 3, 4 to 7 etc., without empty ones.

    Args:
        sums_2p: see TrainEngine.losses_by_position.
    """
    return {one["first"]: one["loss"] for one in loss_values(sums_2p)["by_position"]}


def loss_values(sums_2p: Tensor) -> dict[str, Any]:
    """Returns loss, perplexity and tokens, of all positions and, as `by_position`, of each range of `position_losses`
    with its `first` and `last` position.

    Args:
        sums_2p: see TrainEngine.losses_by_position.
    """
    ranges, first, stop, positions = list[dict[str, Any]](), 0, 1, sums_2p.shape[1]
    while first < positions:
        values = _mean_loss(sums_2p[:, first:stop])
        ranges += [{"first": first, "last": min(stop, positions) - 1, **values}] if values["tokens"] else []
        first, stop = stop, 2 * stop
    return {**_mean_loss(sums_2p), "by_position": ranges}


def _mean_loss(sums_2p: Tensor) -> dict[str, Any]:
    loss_sum, tokens = sums_2p.sum(1).tolist()
    loss = loss_sum / max(tokens, 1)
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": int(tokens)}


def perplexity(loss: float) -> float:
    """Returns exp(loss); infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
