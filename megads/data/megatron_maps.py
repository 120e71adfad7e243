"""Megatron-LM's own order of samples, bit for bit, for those who continue a run of it.

It depends on the number of samples that the run is planned for: another length is another order. NumPy's RandomState is
frozen, so its shuffles stay what they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.data.index_maps import FORMAT_VERSION, EpochMap, build_sample_index
from megads.data.indexed import IndexedDataset
from megads.data.samples import TrainSamples

SURPLUS = 1.005
"""Megatron builds so many more samples of each dataset of a blend than its share."""


@dataclass(frozen=True)
class MegatronMapKey:
    """All that determines Megatron's map, of all epochs at once."""

    fingerprint: str
    """Of the dataset."""
    first_document: int
    """Start of the range of documents."""
    end_document: int
    """End of the range of documents, exclusive."""
    seq_len: int
    """Tokens that a sample predicts."""
    seed: int
    """Seed of numpy.random.RandomState."""
    samples: int
    """Samples wanted."""
    theta: float
    """The last epoch is shuffled apart when it gives fewer than this share of an epoch's samples."""

    def name(self) -> str:
        """Returns a file name that differs wherever the map may."""
        content = json.dumps(asdict(self) | {"format": FORMAT_VERSION, "order": "megatron"}, sort_keys=True)
        return f"{hashlib.sha256(content.encode()).hexdigest()[:16]}-megatron"

    def build(self, dataset: IndexedDataset) -> EpochMap:
        """Computes the map; it holds at least the samples wanted."""
        documents = range(self.first_document, self.end_document)
        sizes = dataset.document_sizes(documents)
        epochs, apart_from = epochs_for(int(sizes.sum()), self.seq_len, self.samples, self.theta)
        random = np.random.RandomState(self.seed)
        order = _document_order(np.arange(len(documents), dtype=np.int32), epochs, apart_from is not None, random)
        sample_index = build_sample_index(sizes[order], self.seq_len)
        total = len(sample_index) - 1
        parts = (0, total) if apart_from is None else (0, apart_from, total)
        return EpochMap(order + np.int32(self.first_document), sample_index, _shuffle(parts, random))


def epochs_for(tokens: int, seq_len: int, samples: int, theta: float) -> tuple[int, int | None]:
    """Decides how many epochs Megatron lays end to end.

    Args:
        tokens: of one epoch.
        seq_len: tokens that a sample predicts.
        samples: wanted.
        theta: see `MegatronMapKey`.

    Returns:
        The fewest epochs that give the samples, and the first sample of the last epoch where that is shuffled apart,
        else None.
    """
    epochs = max(1, -(-(samples * seq_len + 1) // tokens))
    if epochs == 1:
        return 1, None
    before_last = ((epochs - 1) * tokens - 1) // seq_len
    apart = samples - before_last < int(theta * ((tokens - 1) // seq_len))
    return epochs, before_last if apart else None


def _document_order(
    documents: npt.NDArray[np.int32], epochs: int, last_apart: bool, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    parts = [np.tile(documents, epochs - 1), documents.copy()] if last_apart else [np.tile(documents, epochs)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def _shuffle(borders: Sequence[int], random: np.random.RandomState) -> npt.NDArray[np.integer[Any]]:
    # Megatron's limit. The dtype does not change the order, but half the memory counts.
    dtype: type[np.integer[Any]] = np.uint32 if borders[-1] < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(begin, end, dtype=dtype) for begin, end in itertools.pairwise(borders)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


class MegatronSamples(TrainSamples):
    """The samples of Megatron's GPTDataset; what the loader reads ahead beyond the planned end wraps around.

    Args:
        dataset: where the tokens are.
        documents: the documents to train on.
        seq_len: S, tokens that a sample predicts.
        seed: Megatron's --seed.
        samples: wanted; the order depends on it.
        theta: see `MegatronMapKey`.
        cache_dir: where index maps are cached; None is beside the dataset.

    Raises:
        DataError: the documents have too few tokens for one sample.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        seq_len: int,
        seed: int,
        samples: int,
        theta: float = 0.80,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(dataset, documents, seq_len, seed, cache_dir)
        self._wanted = MegatronMapKey(
            self._fingerprint, documents.start, documents.stop, seq_len, seed, max(samples, 1), theta
        )
        tokens = dataset.stream(documents).size
        epochs, _ = epochs_for(tokens, seq_len, max(samples, 1), theta)
        self.samples_per_map = (epochs * tokens - 1) // seq_len

    def _map_key(self, turn: int) -> MegatronMapKey:
        return self._wanted


def megatron_share(samples: int, weight: float) -> int:
    """Samples that Megatron-LM builds of a dataset with that share of a blend."""
    return math.ceil(math.ceil(samples * weight) * SURPLUS)
