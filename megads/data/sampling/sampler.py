"""Assigns sample ids to ranks and micro-batches, and converts them to stream indices, which data.skip shifts.

See `megads.data.sampling` for both numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megads.data.config import SkipConfig
from megads.data.indexed.dataset import IntArray
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.errors import ConfigError


def micro_batch_ids(
    first_sample: int, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp: int
) -> IntArray:
    """Returns the sample ids of one step for one data-parallel rank, in order.

    They have no gaps: a sample is left out by `Skips`, not here, where `batch_hash`, checkpoints and other ranks would
    still count it.

    Micro-batch m of rank r has the samples first_sample + m*micro*dp + r*micro + (0..micro-1), so the union over ranks
    is the same consecutive range of samples in every layout.

    Args:
        first_sample: samples consumed before the step.
        global_batch_size: samples in the step.
        micro_batch_size: samples in one forward pass of one rank.
        dp_rank: r, the data-parallel rank.
        dp: number of data-parallel ranks.

    Returns:
        int64 [micro-batches, micro_batch_size], sample ids.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
    """
    return ordered_ids(first_sample, global_batch_size, micro_batch_size, dp)[dp_rank]


def ordered_ids(first_sample: int, global_batch_size: int, micro_batch_size: int, dp: int) -> IntArray:
    """Returns int64 [dp, micro-batches, micro_batch_size], see `micro_batch_ids`, for every data-parallel rank.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
    """
    count = _micro_batches(global_batch_size, micro_batch_size, dp)
    samples = np.arange(first_sample, first_sample + global_batch_size, dtype=np.int64)
    return samples.reshape(count, dp, micro_batch_size).swapaxes(0, 1)


def balanced_ids(first_sample: int, costs_n: IntArray, micro_batch_size: int, dp: int) -> IntArray:
    """Returns the sample ids of one step for every data-parallel rank, with similar costs on all of them.

    The samples of the step are those of `micro_batch_ids`, and so are their numbers per rank and micro-batch. Which of
    them a rank gets depends on nothing but the costs. Within a rank, micro-batches have similar costs, and begin with
    the most expensive one, as on the other ranks.

    Args:
        first_sample: samples consumed before the step.
        costs_n: int64 [n], cost of each sample of the step.
        micro_batch_size: samples in one forward pass of one rank.
        dp: number of data-parallel ranks.

    Returns:
        int64 [dp, micro-batches, micro_batch_size], sample ids; in a micro-batch in ascending order.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
    """
    count = _micro_batches(costs_n.size, micro_batch_size, dp)
    found = np.empty((dp, count, micro_batch_size), np.int64)
    for rank, samples in enumerate(_deal(costs_n, dp)):
        batches = np.sort(samples[_deal(costs_n[samples], count)], axis=1)
        found[rank] = batches[np.argsort(-costs_n[batches].sum(1), kind="stable")]
    return first_sample + found


def _deal(costs_n: IntArray, hands: int) -> IntArray:
    """Distributes items in equal numbers, the most expensive ones first, each to the cheapest hand so far without one
    of this round; int64 [hands, n / hands], indices of items."""
    loads = np.zeros(hands, np.int64)
    rounds = np.argsort(-costs_n, kind="stable").reshape(-1, hands)
    found = np.empty(rounds.T.shape, np.int64)
    for number, items in enumerate(rounds):
        cheapest = np.argsort(loads, kind="stable")
        found[cheapest, number] = items
        loads[cheapest] += costs_n[items]
    return found


def _micro_batches(global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Returns the number of micro-batches of a rank.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
    """
    block = micro_batch_size * dp
    if global_batch_size % block:
        raise ConfigError(
            f"a global batch of {global_batch_size} samples is not a multiple of train.micro_batch_size * dp = "
            f"{micro_batch_size} * {dp} = {block}"
        )
    return global_batch_size // block


def batch_hash(keys: IntArray | Sequence[tuple[int, int]]) -> str:
    """Hashes a step's samples; the hash is the same in every layout and after a resume.

    Args:
        keys: integers [global batch size, k] in the order of the sample ids, see `TrainSource.sample_keys`.

    Returns:
        16 hex digits.
    """
    return hashlib.sha256(np.asarray(keys, dtype="<i8").tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Skips:
    """Skipped ranges of a stream; later samples move up, so no other sample is lost or repeated.

    Attributes:
        ranges: (first index, end) in the stream without the preceding ranges, in the order of data.skip.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def apply(self, samples: IntArray) -> IntArray:
        """Returns int64 [n], the stream indices of n sample ids: skipped ranges are counted in."""
        # The last range refers to the stream without all others, so it is undone first.
        for first, end in reversed(self.ranges):
            samples = samples + (samples >= first) * np.int64(end - first)
        return samples

    def left_out(self) -> list[tuple[int, int]]:
        """Returns (first index, end) of the skipped ranges in the whole stream, in order and without overlap."""
        found: list[tuple[int, int]] = []
        for place, (first, end) in enumerate(self.ranges):
            numbers = Skips(self.ranges[:place]).apply(np.arange(first, end, dtype=np.int64))
            breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
            found += [(int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, breaks)]
        return sorted(found)

    def skipped_before(self, samples: int) -> list[tuple[int, int]]:
        """Returns the ranges of `left_out` before the last of the run's first samples, with adjacent ranges joined."""
        end = int(self.apply(np.array([samples - 1]))[0]) if samples else 0
        found: list[tuple[int, int]] = []
        for first, last in self.left_out():
            if first >= end:
                continue
            joined = found.pop()[0] if found and found[-1][1] == first else first
            found.append((joined, last))
        return found


def require_same_skips(before: Skips, now: Skips, samples: int) -> None:
    """Checks that the skipped ranges among samples already trained on have not changed.

    Args:
        before: skipped ranges when the samples were trained on.
        now: skipped ranges of the config.
        samples: samples consumed so far.

    Raises:
        ConfigError: they have changed, so that later samples would be shifted.
    """
    left_out, wanted = before.skipped_before(samples), now.skipped_before(samples)
    if left_out != wanted:
        raise ConfigError(
            f"data.skip leaves out {_shown(wanted)} of the first samples, the {samples} that are trained already left "
            f"out {_shown(left_out)}: what follows would be shifted, some of it repeated or lost. Name ranges from "
            f"sample {samples} on, or go back: delete the checkpoints after the one that you want to continue from"
        )


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{first} to {end - 1}" for first, end in ranges) or "nothing"


def skips_of(config: Sequence[SkipConfig], schedule: BatchSizeSchedule) -> Skips:
    """Converts data.skip to ranges of samples.

    Args:
        config: data.skip, already checked.
        schedule: batch-size schedule, which maps steps to samples.
    """
    ranges = []
    for item in config:
        if item.steps is not None:
            ranges.append((schedule.samples_after(item.steps[0] - 1), schedule.samples_after(item.steps[1])))
        elif item.samples is not None:
            ranges.append((item.samples[0], item.samples[1]))
    return Skips(tuple(ranges))
