"""Sample lengths that change in the middle of a run, without training on text twice or losing text unnoticed.

The unit is the longest length of the run: concatenated documents are cut into units, which are shuffled like samples of
that length (`TrainSamples`). A shorter sample is a part of a unit, and the parts of a unit are consecutive. So the
consumed part of a dataset is always a prefix of one token stream, and samples of another length continue from that
position, rounded up to a multiple of the new length. Only the tokens in between are lost, less than one sample per
dataset, which is reported in events.jsonl.

Shape suffixes as in `runs`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from megads.data.indexed.dataset import IntArray
from megads.data.sampling.runs import Runs, ragged_arange
from megads.data.sampling.samples import TrainSamples


@dataclass(frozen=True)
class SampleLengths:
    """The sample lengths of a run.

    Attributes:
        starts: (index in the training stream of the first sample, sample length in tokens) of every stage, in order.
        place: index of the selected stage.
    """

    starts: tuple[tuple[int, int], ...]
    place: int

    @property
    def unit(self) -> int:
        """The longest length, which all others divide."""
        return max(length for _, length in self.starts)


class PartSamples:
    """The infinite stream of samples that are parts of longer ones.

    Args:
        units: the longer samples.
        seq_len: number of predicted tokens per sample; divides that of the units.
    """

    def __init__(self, units: TrainSamples, seq_len: int) -> None:
        assert units.seq_len % seq_len == 0
        self.dataset = units.dataset
        self.seq_len = seq_len
        self._units = units
        self._parts = units.seq_len // seq_len
        self.samples_per_epoch = units.samples_per_epoch * self._parts
        """Samples in one pass over the documents."""

    def dataset_samples(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, 2], (epoch, row of that epoch's sample index if it were cut to this length)."""
        found = self._units.dataset_samples(samples // self._parts)
        found[:, 1] = found[:, 1] * self._parts + samples % self._parts
        return found

    def build_maps(self, samples: int) -> int:
        """See `TrainSource`."""
        return self._units.build_maps(-(-samples // self._parts))

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`."""
        self._units.build_next_maps(samples // self._parts, None if end is None else -(-end // self._parts), stop)

    def runs(self, samples: IntArray) -> list[Runs]:
        """Returns the locations of samples' tokens, see `SampleSource`."""
        units, unit_of = np.unique(samples // self._parts, return_inverse=True)
        counts = np.bincount(unit_of, minlength=units.size)
        first, by_unit = np.cumsum(counts) - counts, np.argsort(unit_of, kind="stable")
        begins = samples % self._parts * self.seq_len
        return [self._cut(runs, counts, first, by_unit, begins) for runs in self._units.runs(units)]

    def _cut(self, runs: Runs, counts: IntArray, first: IntArray, by_unit: IntArray, begins: IntArray) -> Runs:
        """Cuts the runs of units, indexed by `runs.rows`, to the samples within them.

        Args:
            runs: runs of units.
            counts: number of samples of each unit.
            first: index into `by_unit` of each unit's first sample.
            by_unit: rows of the batch, sorted by unit.
            begins: position in its unit of each sample's first token.
        """
        times = counts[runs.rows]
        run = np.repeat(np.arange(runs.rows.size), times)
        row = by_unit[first[runs.rows][run] + ragged_arange(times)]
        begin = np.maximum(runs.places[run], begins[row])
        # A sample's last token is the first one of the next sample.
        end = np.minimum(runs.places[run] + runs.lengths[run], begins[row] + self.seq_len + 1)
        kept = end > begin
        run, row, begin, end = run[kept], row[kept], begin[kept], end[kept]
        starts = runs.starts[run] + begin - runs.places[run]
        return Runs(runs.dataset, runs.documents[run], starts, end - begin, row, begin - begins[row])
