"""Tests what a rank reads of a sample, against results worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megads.data.sampling.runs import DocumentSpan, SampleOrigin, sample_origins
from megads.data.sampling.samples import TrainSamples
from tests.data.conftest import MakeDataset

# Six inputs and the last label, of two documents: positions 0 to 3 and 4 to 6.
FIRST = DocumentSpan("a", 1, 100, 500, 0, np.array([10, 11, 12, 13]), np.array([False, True, True, True]))
SECOND = DocumentSpan("b", 2, 0, 3, 4, np.array([20, 21, 22]), np.array([False, True, True]))
SAMPLE = SampleOrigin(7, (0, 3), (FIRST, SECOND))
Part = tuple[str, int, int, list[int], list[bool]]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([range(6)], [("a", 100, 0, [10, 11, 12, 13], [0, 1, 1, 1]), ("b", 0, 4, [20, 21, 22], [0, 1, 1])]),
        ([range(2, 4)], [("a", 102, 2, [12, 13], [0, 1]), ("b", 0, 4, [20], [0])]),
        ([range(4)], [("a", 100, 0, [10, 11, 12, 13], [0, 1, 1, 1]), ("b", 0, 4, [20], [0])]),
        ([range(1), range(5, 6)], [("a", 100, 0, [10, 11], [0, 1]), ("b", 1, 5, [21, 22], [0, 1])]),
        ([range(3, 4)], [("a", 103, 3, [13], [0]), ("b", 0, 4, [20], [0])]),
        ([range(4, 6)], [("b", 0, 4, [20, 21, 22], [0, 1, 1])]),
    ],
)
def test_context_ranks_read_their_inputs_and_one_label_more(ranges: list[range], expected: list[Part]) -> None:
    """Catches a part that ends before its last label or begins after its first input, a loss that two ranks count at
    their boundary, and documents of which a rank has nothing."""
    cut = SAMPLE.cut(ranges)
    assert (cut.sample, cut.key) == (7, (0, 3))
    assert [
        (part.dataset, part.offset, part.place, part.tokens.tolist(), part.counted.astype(int).tolist())
        for part in cut.stretches
    ] == expected
    assert FIRST.counted.tolist() == [False, True, True, True], "the whole sample is left as it is"


@pytest.mark.parametrize("mask_eod", [False, True])
def test_losses_are_shown_at_the_tokens_where_they_count(make_dataset: MakeDataset, mask_eod: bool) -> None:
    """Catches losses shown one position before or after the one at which they count: on every token that another one of
    its sample predicts, and with mask_eod on none that begins a document."""
    dataset = make_dataset([5, 3, 13, 1, 40, 8, 2])
    source = TrainSamples(dataset, range(7), 8, seed=3)
    origins = sample_origins(source, np.arange(source.samples_per_epoch), mask_eod)
    begun = 0
    for origin in origins:
        assert origin.stretches[0].place == 0
        assert sum(part.tokens.size for part in origin.stretches) == 8 + 1
        for part in origin.stretches:
            begins = [part.offset + at == 0 for at in range(part.tokens.size)]
            begun += sum(begins)
            assert part.counted.tolist() == [
                part.place + at > 0 and not (mask_eod and begins[at]) for at in range(part.tokens.size)
            ]
            document = dataset.document_tokens(part.document)
            assert document[part.offset :][: part.tokens.size].tolist() == part.tokens.tolist()
            assert document.size == part.document_tokens
    assert begun >= 7
