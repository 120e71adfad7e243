"""Where the tokens of training samples came from: dataset, document and offset of each, and what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megads.data.indexed import IntArray
from megads.data.runs import TrainSource, loss_mask


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one document that stand together in a sample.

    Attributes:
        dataset: prefix of the dataset.
        document: number of the document in it.
        offset: of the first token in the document.
        document_tokens: that the whole document has.
        place: of the first token in the sample.
        tokens: int64 [n].
        counted: bool [n], whether the loss counts on the prediction of each; never on a sample's first token.
    """

    dataset: str
    document: int
    offset: int
    document_tokens: int
    place: int
    tokens: IntArray
    counted: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SampleOrigin:
    """Where one sample came from.

    Attributes:
        sample: its number in the run.
        key: what `batch_hash` is of: (epoch, row of its order), in a blend with the dataset's number before them.
        stretches: in the order of their places.
    """

    sample: int
    key: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    def cut(self, ranges: Sequence[range]) -> SampleOrigin:
        """Returns what a rank reads that holds some places of the sample: those inputs, and the label of the last.

        Args:
            ranges: of places; the first token of each is predicted by another rank.
        """
        parts = [_within(stretch, places) for places in ranges for stretch in self.stretches]
        return replace(self, stretches=tuple(part for part in parts if part.tokens.size))


def sample_origins(source: TrainSource, samples: IntArray, mask_eod: bool) -> list[SampleOrigin]:
    """Finds where samples came from, and reads their tokens.

    Args:
        source: the run's samples.
        samples: int64 [n], their numbers.
        mask_eod: as in `Packing`.
    """
    runs, keys = source.runs(samples), source.dataset_samples(samples)
    mask = loss_mask(runs, samples.size, source.seq_len, mask_eod)
    found: list[list[Stretch]] = [[] for _ in range(samples.size)]
    for part in runs:
        bounds = part.dataset.document_bounds(part.documents)
        for number in range(part.documents.size):
            row, place, length = (int(array[number]) for array in (part.rows, part.places, part.lengths))
            start, begin, end = (int(array[number]) for array in (part.starts, *bounds))
            # The label at a place is the token after it.
            counted = np.zeros(length, bool)
            predicted = max(place, 1)
            counted[predicted - place :] = mask[row, predicted - 1 : place + length - 1] > 0
            tokens = part.dataset.all_tokens[start : start + length].astype(np.int64)
            document = int(part.documents[number])
            found[row].append(
                Stretch(part.dataset.prefix, document, start - begin, end - begin, place, tokens, counted)
            )
    return [
        SampleOrigin(int(sample), tuple(key.tolist()), tuple(sorted(stretches, key=lambda stretch: stretch.place)))
        for sample, key, stretches in zip(samples, keys, found, strict=True)
    ]


def _within(stretch: Stretch, places: range) -> Stretch:
    """What of a stretch is in the inputs at some places, or the label of the last of them."""
    first = min(max(places.start - stretch.place, 0), stretch.tokens.size)
    end = min(max(places.stop + 1 - stretch.place, first), stretch.tokens.size)
    counted = stretch.counted[first:end].copy()
    if counted.size and stretch.place + first == places.start:
        counted[0] = False
    return replace(
        stretch,
        offset=stretch.offset + first,
        place=stretch.place + first,
        tokens=stretch.tokens[first:end],
        counted=counted,
    )
