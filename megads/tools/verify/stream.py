"""The real data path on a small dataset: which samples, tokens and documents each rank is given."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
from torch import Tensor

from megads.batch import MicroBatch
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.loader import Packing, TrainLoader
from megads.data.sampling.samples import TrainSamples
from megads.tools.verify.run import Stream
from megads.tools.verify.scenario import Scenario

_DOCUMENTS = 48
_PACKING = Packing(document_mask=True, reset_positions=True)


def write_corpus(prefix: Path, scenario: Scenario) -> None:
    """Writes documents of unequal length, so that samples start in mid-document; a run reads them in several epochs."""
    random = np.random.default_rng(scenario.seed)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for _ in range(_DOCUMENTS):
            size = int(random.integers(1, 3 * scenario.seq_len))
            writer.append(random.integers(0, scenario.model.vocabulary, size))


def read_stream(prefix: Path, scenario: Scenario, dp_rank: int = 0, dp: int = 1, needs_tokens: bool = True) -> Stream:
    """What a rank's loader yields over the scenario's steps.

    Args:
        prefix: the dataset that `write_corpus` wrote.
        scenario: its batches, sequence length and steps.
        dp_rank: the rank's place among the data-parallel ranks.
        dp: data-parallel ranks.
        needs_tokens: False on pipeline stages in the middle.
    """
    dataset = IndexedDataset(prefix)
    samples = TrainSamples(dataset, range(dataset.num_documents), scenario.seq_len, scenario.seed)
    schedule = BatchSizeSchedule(scenario.global_batch_size)
    stream = Stream()
    with TrainLoader(
        samples,
        schedule,
        scenario.micro_batch_size,
        dp_rank,
        dp,
        scenario.model.vocabulary,
        needs_tokens=needs_tokens,
        packing=_PACKING,
    ) as loader:
        for step in itertools.islice(loader, scenario.steps):
            stream.hashes.append(step.batch_hash)
            for batch in step.micro_batches:
                _add(stream, batch)
    return stream


def _add(stream: Stream, batch: MicroBatch) -> None:
    parts = {
        "tokens": batch.tokens_bs,
        "labels": batch.labels_bs,
        "document starts": batch.info.document_starts,
        "positions": batch.info.position_ids_bs,
    }
    for name, rows in parts.items():
        if rows is not None:
            for sample, row in zip(batch.info.sample_ids.tolist(), rows, strict=True):
                stream.contents[f"{name} of sample {sample}"] = _digest(row)


def _digest(row: Tensor) -> str:
    return hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()[:16]
