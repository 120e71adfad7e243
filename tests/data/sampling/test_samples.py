from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megads.data.indexed.dataset import HEADER, MAGIC, VERSION, IndexedDataset
from megads.data.sampling import samples as module
from megads.data.sampling.loader import PLAIN, assemble
from megads.data.sampling.runs import document_starts
from megads.data.sampling.samples import TrainSamples, ValidationSamples, WindowSubset, split_documents, unigram_entropy
from megads.errors import DataError
from megads.tools.megatron_order import MegatronSamples
from tests.data.conftest import VOCAB_SIZE, MakeDataset
from tests.data.one_sample import row_of, tokens_of

SEQ_LEN = 8


def test_an_epoch_predicts_consecutive_tokens_of_whole_documents(make_dataset: MakeDataset) -> None:
    """Catches samples that skip or repeat tokens: in order, an epoch's samples are its documents concatenated."""
    dataset = make_dataset([5, 0, 13, 1, 40, 8, 2])
    samples = TrainSamples(dataset, range(1, 7), SEQ_LEN, seed=3)
    assert samples.samples_per_epoch == (64 - 1) // SEQ_LEN
    for epoch in range(3):
        numbers = range(epoch * samples.samples_per_epoch, (epoch + 1) * samples.samples_per_epoch)
        by_row = {row_of(samples, g)[1]: tokens_of(samples, g) for g in numbers}
        assert {row_of(samples, g)[0] for g in numbers} == {epoch}
        joined = by_row[0][:1] + [token for row in range(samples.samples_per_epoch) for token in by_row[row][1:]]
        order = samples._epoch_map(epoch).document_order
        stream = [token for document in order for token in dataset.document_tokens(int(document)).tolist()]
        assert joined == stream[: len(joined)]


def test_the_order_does_not_depend_on_how_far_it_is_read(make_dataset: MakeDataset) -> None:
    """Catches an order that depends on the length of training, or on where reading starts."""
    dataset = make_dataset([30] * 20)
    forwards, backwards = (TrainSamples(dataset, range(20), SEQ_LEN, seed=3) for _ in range(2))
    count = 30 * forwards.samples_per_epoch
    seen = [tuple(forwards.sample_keys(np.array([g]))[0]) for g in range(count)]
    assert seen == [tuple(backwards.sample_keys(np.array([g]))[0]) for g in reversed(range(count))][::-1]
    assert forwards.sample_keys(np.arange(count)).tolist() == [list(pair) for pair in seen]


def starts_by_ends(tokens: list[int], end: int) -> list[int]:
    """Index at which each token's document starts, from the tokens alone: after every end-of-document token."""
    starts, start = [], 0
    for place, token in enumerate(tokens):
        starts.append(start)
        if token == end:
            start = place + 1
    return starts


def test_document_starts_are_where_documents_ended(make_dataset: MakeDataset) -> None:
    """Catches boundaries off by one, an end-of-document token counted to the next document, and errors at empty
    documents, at samples that start mid-document, and after the end of the validation stream."""
    end = 999
    dataset = make_dataset(documents=[[7] * (size - 1) + [end] * (size > 0) for size in [5, 0, 13, 1, 40, 8, 2, 0]])
    train, from_zero = TrainSamples(dataset, range(8), SEQ_LEN, seed=3), 0
    count = 3 * train.samples_per_epoch
    starts_bs = document_starts(train.runs(np.arange(count)), count, SEQ_LEN)
    for g, starts in enumerate(starts_bs.tolist()):
        assert starts == starts_by_ends(tokens_of(train, g)[:-1], end)
        from_zero += starts == [0] * SEQ_LEN
    assert 0 < from_zero < count, "samples of one document and of several"
    valid = ValidationSamples(dataset, range(1, 8), SEQ_LEN)
    starts_bs = document_starts(valid.runs(np.arange(len(valid) + 1)), len(valid) + 1, SEQ_LEN)
    for window, starts in enumerate(starts_bs.tolist()[:-1]):
        tokens = tokens_of(valid, window)[:SEQ_LEN]
        inside = len(tokens)
        assert starts[:inside] == starts_by_ends(tokens, end)
        assert set(starts[inside:]) <= {starts[inside - 1]}
    assert starts_bs[-1].tolist() == [0] * SEQ_LEN


def test_opening_a_dataset_copies_no_index(tmp_path: Path) -> None:
    """Catches ranks that each copy what the memory-mapped index holds: gigabytes at a billion documents."""
    sizes = np.zeros(500_000, "<i4")
    sizes[-2:] = 9, 40
    offsets = (np.cumsum(sizes, dtype="<i8") - sizes) * 2
    header = HEADER.pack(MAGIC, VERSION, 8, sizes.size, sizes.size + 1)
    content = [header, sizes.tobytes(), offsets.tobytes(), np.arange(sizes.size + 1, dtype="<i8").tobytes()]
    (tmp_path / "d.idx").write_bytes(b"".join(content))
    (tmp_path / "d.bin").write_bytes(bytes(2 * 49))
    dataset = IndexedDataset(tmp_path / "d")
    tracemalloc.start()
    train, held_out = split_documents(dataset, [0.5, 0.5])
    TrainSamples(dataset, range(held_out.stop), SEQ_LEN, 0)
    [runs] = ValidationSamples(dataset, range(train.stop, held_out.stop), SEQ_LEN).runs(np.arange(3))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert runs.documents.tolist() == [499_998, 499_998, 499_999, 499_999] and peak < 200_000


@pytest.mark.parametrize("tokens,fits", [(SEQ_LEN, False), (SEQ_LEN + 1, True)])
def test_a_dataset_of_too_few_tokens_is_refused(make_dataset: MakeDataset, tokens: int, fits: bool) -> None:
    """Catches a division by zero, or an off-by-one error at the smallest valid dataset."""
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
    windows = np.arange(len(valid))
    [batch] = assemble(valid, windows[None], VOCAB_SIZE, True, PLAIN)
    assert batch.labels_bs is not None and batch.tokens_bs is not None and batch.loss_mask_bs is not None
    assert set(batch.loss_mask_bs.unique().tolist()) <= {0, 1} and bool(batch.loss_mask_bs.any(1).all())
    for window, tokens in enumerate(batch.tokens_bs.tolist()):
        expected = tokens_of(valid, window)[:SEQ_LEN]
        assert tokens == expected + [0] * (SEQ_LEN - len(expected))
    predicted = batch.labels_bs[batch.loss_mask_bs == 1].tolist()
    assert predicted == dataset.stream(range(1, 3))[1:].tolist()
    assert valid.num_predicted_tokens == total - 1


@pytest.mark.parametrize(("max_tokens", "windows"), [(1, 1), (24, 3), (25, 4), (10**9, 13)])
def test_a_validation_subset_is_spread_over_the_set(make_dataset: MakeDataset, max_tokens: int, windows: int) -> None:
    """N10. Catches a subset that is only the beginning of the set, repeats or masks windows, or depends on how ranks
    request it."""
    dataset = make_dataset([101])
    whole = ValidationSamples(dataset, range(1), SEQ_LEN)
    subset = WindowSubset(whole, max_tokens)
    assert len(subset) == windows
    ids = np.arange(windows + 3)
    [found] = subset.runs(ids)
    chosen = found.starts // SEQ_LEN
    assert chosen.tolist() == [number * 13 // windows for number in range(windows)] == sorted(set(chosen.tolist()))
    [backwards] = subset.runs(ids[::-1])
    assert backwards.starts[np.argsort(backwards.rows)].tolist() == found.starts[::-1].tolist()


def test_validation_needs_a_token_to_predict(make_dataset: MakeDataset) -> None:
    """Catches a validation set without windows, whose loss would be 0/0."""
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
def test_splits_are_a_partition(
    make_dataset: MakeDataset, documents: int, shares: list[float], counts: list[int]
) -> None:
    """Catches splits that are empty by rounding, overlap, or leave documents out."""
    ranges = split_documents(make_dataset([2] * documents), shares)
    assert [len(part) for part in ranges] == counts
    assert [document for part in ranges for document in part] == list(range(documents))


def test_a_split_of_too_few_documents_is_refused(make_dataset: MakeDataset) -> None:
    """Catches a validation set that is silently empty."""
    with pytest.raises(DataError, match="1 documents of 50 tokens cannot be split"):
        split_documents(make_dataset([50]), [0.98, 0.02])


@pytest.mark.parametrize("longest", [3, 30, 200])
def test_lookups_of_few_samples_equal_lookups_of_many(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """Catches a lookup of few samples that differs from that of many at a boundary of documents or epochs, at empty
    documents, or for a sample of many documents."""
    random = np.random.default_rng(longest)
    sizes = [40, *random.integers(0, longest, 60).tolist()]
    dataset = make_dataset(sizes)
    for samples in (TrainSamples(dataset, range(1, 61), 20, 4), MegatronSamples(dataset, range(61), 20, 4, 30)):
        asked = random.integers(0, 3 * samples.samples_per_map, 8)
        found = {}
        for few in (0, 8):
            monkeypatch.setattr(module, "FEW_SAMPLES", few)
            runs = samples.runs(asked)
            columns = ("documents", "starts", "lengths", "rows", "places")
            table = np.concatenate([np.stack([getattr(part, name) for name in columns], 1) for part in runs])
            assert table.dtype == np.int64
            found[few] = sorted(table.tolist()), samples.sample_keys(asked).tolist()
        assert found[0] == found[8]


def brute_force_entropy(dataset: IndexedDataset, documents: range) -> float:
    labels = [token for document in documents for token in dataset.document_tokens(document).tolist()][1:]
    return -sum(count / len(labels) * math.log(count / len(labels)) for count in Counter(labels).values())


def test_unigram_entropy_is_exact_over_chunks(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches counting the first token, log base 2, and chunks that are lost or have a larger token range."""
    dataset = make_dataset([50, 100, 70])
    monkeypatch.setattr(module, "CHUNK_TOKENS", 13)
    expected = brute_force_entropy(dataset, range(1, 3))
    assert unigram_entropy(ValidationSamples(dataset, range(1, 3), SEQ_LEN)) == pytest.approx(expected, rel=1e-12)


def test_unigram_entropy_refuses_a_token_out_of_range(make_dataset: MakeDataset) -> None:
    """Catches a count array of 2^31 entries due to one flipped bit."""
    dataset = make_dataset(documents=[[1, 2], [3, 2**31 - 1]])
    with pytest.raises(DataError, match="document 1 holds token 2147483647"):
        unigram_entropy(ValidationSamples(dataset, range(2), SEQ_LEN))
