"""Inference engine for scoring: forward passes over tensor-, context-, pipeline- and data-parallel ranks.

It has no optimizer and no gradients: a rank holds one copy of its shard of the weights, in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megads.batch import MicroBatch, copy_to
from megads.engine.interface import EngineSpec, Shard
from megads.engine.stage_pipeline import StagePipeline
from megads.engine.train_engine import parameter_shards, scoring_row_length
from megads.parallel.context import shard_micro_batch
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.sharding import placement_of
from megads.parallel.token_scores import PositionLosses, RowScores, ScoreRecorder


class LayoutScoringEngine:
    """Scoring engine of one rank, with one stage per pipeline rank; see `TrainEngine`. Call `load_weights` first.

    Args:
        spec: specification of the engine; only the axis sizes of `parallel` are used. Weights are not initialized.

    Attributes:
        device: device of this rank.
        grid: the ranks.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.device, self.grid, self._ulysses = spec.device, spec.grid, spec.parallel.ulysses_size
        self._loss = TokenMeanLoss(spec.model.vocabulary, spec.grid, spec.kernels)
        self._stages = StagePipeline(spec, self._loss).to(spec.precision).eval().requires_grad_(False)
        self._last = spec.parallel.pp - 1
        self._hidden_size, self._precision = spec.model.hidden_size, spec.precision

    def load_weights(self, fill: Callable[[list[Shard]], object]) -> None:
        """Calls `fill` to write every weight that this rank holds."""
        shards: list[Shard] = []
        for parameter in self._stages.parameters():
            place, flat = placement_of(parameter), parameter.data.view(-1)
            shards += parameter_shards("weight", place, tuple(parameter.shape), 0, flat)
        fill(shards)

    @torch.no_grad()
    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        """See TrainEngine.losses_by_position."""
        recorder = PositionLosses(self._loss.vocab_size, self.grid.tp, positions, self.device)
        self._run(micro_batches, recorder)
        return recorder.sums(self.grid, self._last)

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        """See TrainEngine.score."""
        recorder = ScoreRecorder(self._loss.vocab_size, self.grid.tp)
        self._run(micro_batches, recorder)
        return recorder.share(num_rows, scoring_row_length(micro_batches), self.grid, self._last, self.device)

    def _run(self, micro_batches: Sequence[MicroBatch], recorder: ScoreRecorder) -> None:
        """Runs this rank's stage on the micro-batches in order; pipeline ranks work on different ones concurrently."""
        pp = self.grid.pp
        own_parts = (shard_micro_batch(batch, self.grid.cp, self.device, self._ulysses) for batch in micro_batches)
        with self._loss.recorded_by(recorder):
            for batch in own_parts:
                assert batch.tokens_bs is not None
                info = batch.info.to(self.device)
                if pp.is_first:
                    hidden = copy_to(batch.tokens_bs, self.device)
                else:
                    shape = (*batch.tokens_bs.shape, self._hidden_size)
                    hidden = torch.empty(shape, dtype=self._precision, device=self.device)
                    dist.recv(hidden, src=pp.ranks[pp.rank - 1], group=pp.group)
                if pp.is_last:
                    self._stages.loss(hidden, info, batch.targets_on(self.device))
                else:
                    output = self._stages(pp.rank, hidden, info).contiguous()
                    dist.send(output, dst=pp.ranks[pp.rank + 1], group=pp.group)
