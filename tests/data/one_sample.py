"""Reads samples one at a time, document by document: the reference for whole batches assembled at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megads.data.sampling.samples import TrainSamples, ValidationSamples

Samples = TrainSamples | ValidationSamples


def row_of(samples: TrainSamples, sample: int) -> tuple[int, int]:
    """Returns (epoch, row of that epoch's sample index) of a sample."""
    epoch, position = divmod(sample, samples.samples_per_map)
    return epoch, int(samples._epoch_map(epoch).shuffle[position])


def parts(samples: Samples, sample: int, count: int) -> Iterator[tuple[int, list[int], int]]:
    """Yields (document, its tokens there, position) of what fills a sample's first `count` positions, in order."""
    dataset, place = samples.dataset, 0
    if isinstance(samples, TrainSamples):
        epoch, row = row_of(samples, sample)
        order = samples._epoch_map(epoch).document_order.tolist()
        position, offset = samples._epoch_map(epoch).sample_index[row].tolist()
    else:
        order, position, offset = list(samples.documents), 0, sample * samples.seq_len
    while place < count and position < len(order):
        tokens = dataset.document_tokens(order[position]).tolist()[offset:][: count - place]
        if tokens:
            yield order[position], tokens, place
        offset = max(offset - dataset.document_tokens(order[position]).size, 0)
        position, place = position + 1, place + len(tokens)


def tokens_of(samples: Samples, sample: int) -> list[int]:
    """Returns the S + 1 tokens of a sample; fewer at the end of validation."""
    return [token for _, tokens, _ in parts(samples, sample, samples.seq_len + 1) for token in tokens]


def documents_of(samples: Samples, sample: int) -> list[int]:
    """Returns the document of each of a sample's tokens."""
    found = parts(samples, sample, samples.seq_len + 1)
    return [document for document, tokens, _ in found for _ in tokens]


def starts_of(samples: Samples, sample: int) -> list[int]:
    """Returns where the document of each of S input tokens starts; positions past the end continue the last one."""
    out: npt.NDArray[np.int64] = np.zeros(samples.seq_len, np.int64)
    for _, _, place in parts(samples, sample, samples.seq_len):
        out[place:] = place
    return out.tolist()
