from __future__ import annotations

import numpy as np
import pytest

from megads.data.samples import TrainSamples, ValidationSamples, split_documents
from megads.errors import DataError

from .conftest import MakeDataset

SEQ_LEN = 8


def read(samples: TrainSamples, number: int) -> list[int]:
    out = np.empty(SEQ_LEN + 1, np.int64)
    samples.read(number, out)
    return out.tolist()


def test_an_epoch_predicts_consecutive_tokens_of_whole_documents(make_dataset: MakeDataset) -> None:
    """Catches samples that skip or repeat tokens: put in order, an epoch's samples are its documents joined."""
    dataset = make_dataset([5, 0, 13, 1, 40, 8, 2])
    samples = TrainSamples(dataset, range(1, 7), SEQ_LEN, seed=3)
    assert samples.samples_per_epoch == (64 - 1) // SEQ_LEN
    for epoch in range(3):
        numbers = range(epoch * samples.samples_per_epoch, (epoch + 1) * samples.samples_per_epoch)
        by_row = {samples.dataset_sample(g)[1]: read(samples, g) for g in numbers}
        assert {samples.dataset_sample(g)[0] for g in numbers} == {epoch}
        joined = by_row[0][:1] + [token for row in range(samples.samples_per_epoch) for token in by_row[row][1:]]
        order = samples._epoch_map(epoch).document_order
        stream = [token for document in order for token in dataset.document_tokens(int(document)).tolist()]
        assert joined == stream[: len(joined)]


def test_the_order_does_not_depend_on_how_far_it_is_read(make_dataset: MakeDataset) -> None:
    """Catches an order that depends on the length of training, or on where reading starts."""
    dataset = make_dataset([30] * 20)
    forwards, backwards = (TrainSamples(dataset, range(20), SEQ_LEN, seed=3) for _ in range(2))
    count = 30 * forwards.samples_per_epoch
    seen = [forwards.dataset_sample(g) for g in range(count)]
    assert seen == [backwards.dataset_sample(g) for g in reversed(range(count))][::-1]
    assert forwards.dataset_samples(np.arange(count)).tolist() == [list(pair) for pair in seen]


def test_the_documents_position_of_a_token(make_dataset: MakeDataset) -> None:
    """Catches an error message that names the wrong document."""
    dataset = make_dataset(documents=[[document] * size for document, size in enumerate([5, 0, 13, 1, 40, 8, 2])])
    train = TrainSamples(dataset, range(7), SEQ_LEN, seed=3)
    for g in range(train.samples_per_epoch):
        assert [train.document_at(g, token) for token in range(SEQ_LEN + 1)] == read(train, g)
    valid = ValidationSamples(dataset, range(2, 7), SEQ_LEN)
    tokens, mask = np.empty(SEQ_LEN + 1, np.int64), np.empty(SEQ_LEN, np.float32)
    valid.read(1, tokens, mask)
    assert [valid.document_at(1, token) for token in range(SEQ_LEN + 1)] == tokens.tolist()


def starts_by_ends(tokens: list[int], end: int) -> list[int]:
    """Place at which each token's document starts, from the tokens alone: after every end of a document."""
    starts, start = [], 0
    for place, token in enumerate(tokens):
        starts.append(start)
        if token == end:
            start = place + 1
    return starts


def test_document_starts_are_where_documents_ended(make_dataset: MakeDataset) -> None:
    """Catches borders off by one, an end-of-document token in the next document, empty documents, samples that start in
    mid-document, and what follows the end of the validation stream."""
    end = 999
    dataset = make_dataset(documents=[[7] * (size - 1) + [end] * (size > 0) for size in [5, 0, 13, 1, 40, 8, 2, 0]])
    train, out = TrainSamples(dataset, range(8), SEQ_LEN, seed=3), np.full(SEQ_LEN, -7, np.int64)
    from_zero = 0
    for g in range(3 * train.samples_per_epoch):
        train.read_document_starts(g, out)
        assert out.tolist() == starts_by_ends(read(train, g)[:-1], end)
        from_zero += out.tolist() == [0] * SEQ_LEN
    assert 0 < from_zero < 3 * train.samples_per_epoch, "samples of one document and of several"
    valid = ValidationSamples(dataset, range(1, 8), SEQ_LEN)
    tokens, mask = np.empty(SEQ_LEN + 1, np.int64), np.empty(SEQ_LEN, np.float32)
    for window in range(len(valid)):
        valid.read(window, tokens, mask)
        valid.read_document_starts(window, out)
        inside = SEQ_LEN if mask.all() else int(mask.sum()) + 1
        assert out[:inside].tolist() == starts_by_ends(tokens[:inside].tolist(), end)
        assert set(out[inside:]) <= {int(out[inside - 1])}
    valid.read_document_starts(len(valid), out)
    assert out.tolist() == [0] * SEQ_LEN


@pytest.mark.parametrize("tokens,fits", [(SEQ_LEN, False), (SEQ_LEN + 1, True)])
def test_too_few_tokens(make_dataset: MakeDataset, tokens: int, fits: bool) -> None:
    """Catches a division by zero, or an off-by-one at the smallest dataset that works."""
    dataset = make_dataset([tokens, 100])
    if fits:
        assert TrainSamples(dataset, range(1), SEQ_LEN, 0).samples_per_epoch == 1
        return
    with pytest.raises(DataError, match=rf"have {tokens} tokens, one sample needs train.seq_len \+ 1 = 9; give more"):
        TrainSamples(dataset, range(1), SEQ_LEN, 0)


@pytest.mark.parametrize("total", [2, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 3 * SEQ_LEN + 1, 61])
def test_validation_predicts_every_token_once(make_dataset: MakeDataset, total: int) -> None:
    """Catches a dropped tail, a tail counted twice, and unmasked padding."""
    dataset = make_dataset([3, total // 2, total - total // 2])
    valid = ValidationSamples(dataset, range(1, 3), SEQ_LEN)
    predicted: list[int] = []
    for window in range(len(valid)):
        tokens, mask = np.full(SEQ_LEN + 1, -7, np.int64), np.full(SEQ_LEN, -7, np.float32)
        valid.read(window, tokens, mask)
        assert set(mask) <= {0, 1} and mask.any() and tokens.min() >= 0
        predicted += tokens[1:][mask == 1].tolist()
    assert predicted == dataset.stream(range(1, 3))[1:].tolist()
    assert valid.num_predicted_tokens == total - 1


def test_validation_needs_a_token_to_predict(make_dataset: MakeDataset) -> None:
    """Catches a validation set of no windows, whose loss would be 0/0."""
    with pytest.raises(DataError, match="validation needs at least 2"):
        ValidationSamples(make_dataset([9, 1]), range(1, 2), SEQ_LEN)


@pytest.mark.parametrize(
    "documents,shares,counts",
    [
        (100, [0.98, 0.02], [98, 2]),
        (10, [0.98, 0.02], [9, 1]),
        (2, [0.98, 0.02], [1, 1]),
        (7, [1, 0], [7, 0]),
        (7, [969, 30, 1], [5, 1, 1]),
        (10, [1, 1, 1], [4, 3, 3]),
    ],
)
def test_split(make_dataset: MakeDataset, documents: int, shares: list[float], counts: list[int]) -> None:
    """Catches shares that are lost to rounding, overlap, or leave documents out."""
    ranges = split_documents(make_dataset([2] * documents), shares)
    assert [len(part) for part in ranges] == counts
    assert [document for part in ranges for document in part] == list(range(documents))


def test_a_split_of_too_few_documents_is_refused(make_dataset: MakeDataset) -> None:
    """Catches a validation set that is silently empty."""
    with pytest.raises(DataError, match="1 documents of 50 tokens cannot be split"):
        split_documents(make_dataset([50]), [0.98, 0.02])
