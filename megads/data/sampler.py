"""Which samples each rank reads in a step: pure functions of the samples consumed so far."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megads.data.indexed import IntArray
from megads.errors import ConfigError


def micro_batch_ids(
    first_sample: int, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp: int
) -> IntArray:
    """Deals the samples of one step to one data-parallel rank.

    Micro-batch m of rank r holds first_sample + m*micro*dp + r*micro + (0..micro-1): the union over ranks is the same
    consecutive run of samples in every layout.

    Args:
        first_sample: samples consumed before the step.
        global_batch_size: samples in the step.
        micro_batch_size: samples in one forward pass of one rank.
        dp_rank: r, the rank that asks.
        dp: data-parallel ranks.

    Returns:
        int64 [micro-batches, micro_batch_size], numbers of samples in the run's global order.

    Raises:
        ConfigError: the batch does not divide into micro-batches.
    """
    block = micro_batch_size * dp
    if global_batch_size % block:
        raise ConfigError(
            f"a global batch of {global_batch_size} samples is no multiple of train.micro_batch_size * dp = "
            f"{micro_batch_size} * {dp} = {block}"
        )
    first_of_micro_batch = np.arange(global_batch_size // block, dtype=np.int64)[:, None] * block
    return first_sample + dp_rank * micro_batch_size + first_of_micro_batch + np.arange(micro_batch_size)


def batch_hash(dataset_samples: IntArray | Sequence[tuple[int, int]]) -> str:
    """Hashes a step's samples; equal across layouts and across a resume.

    Args:
        dataset_samples: integers [global batch size, 2], (epoch, row of the sample index) in global order.

    Returns:
        16 hex digits.
    """
    return hashlib.sha256(np.asarray(dataset_samples, dtype="<i8").tobytes()).hexdigest()[:16]
