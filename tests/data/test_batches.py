from __future__ import annotations

import itertools

import numpy as np
import pytest

from megads.data.batches import Packing, assemble
from megads.data.runs import SampleSource, token_at
from megads.data.samples import TrainSamples, ValidationSamples

from .conftest import VOCAB_SIZE, MakeDataset

SEQ_LEN = 8


@pytest.mark.parametrize("seed", range(6))
def test_batches_are_what_single_reads_give(make_dataset: MakeDataset, seed: int) -> None:
    """Catches gathers that lose, shift or mix tokens or borders: over epochs, empty documents, documents longer than
    samples and single tokens, with micro-batches of several epochs; and an end-of-document mask that is off by one."""
    random = np.random.default_rng(seed)
    sizes = np.where(random.random(40) < 0.3, 0, random.integers(1, 25, 40))
    dataset = make_dataset(sizes.tolist())
    samples = TrainSamples(dataset, range(3, 38), SEQ_LEN, seed)
    ids = random.integers(0, 3 * samples.samples_per_epoch, (5, 4))
    batches = assemble(samples, ids, VOCAB_SIZE, True, Packing(document_mask=True, mask_eod=True))
    tokens, starts = np.empty(SEQ_LEN + 1, np.int64), np.empty(SEQ_LEN, np.int64)
    for ids_b, batch in zip(ids, batches, strict=True):
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        assert batch.info.document_starts is not None
        for row, sample in enumerate(ids_b.tolist()):
            samples.read(sample, tokens)
            samples.read_document_starts(sample, starts)
            assert batch.tokens_bs[row].tolist() == tokens[:-1].tolist()
            assert batch.labels_bs[row].tolist() == tokens[1:].tolist()
            assert batch.info.document_starts[row].tolist() == starts.tolist()
            documents = [samples.document_at(sample, place) for place in range(SEQ_LEN + 1)]
            counted = [float(one == other) for one, other in itertools.pairwise(documents)]
            assert batch.loss_mask_bs[row].tolist() == counted


def test_the_place_of_a_token_is_found_again(make_dataset: MakeDataset) -> None:
    """Catches an error message that blames another document or offset than the one that holds the bad token."""
    dataset = make_dataset([5, 0, 9, 30, 1, 14])
    sources: list[SampleSource] = [
        TrainSamples(dataset, range(6), SEQ_LEN, 2),
        ValidationSamples(dataset, range(1, 6), SEQ_LEN),
    ]
    for source in sources:
        ids = np.arange(4)
        [batch] = assemble(source, ids[None], VOCAB_SIZE, True, Packing())
        assert batch.tokens_bs is not None
        for row in range(ids.size):
            for place in range(SEQ_LEN):
                found, document, offset = token_at(source.runs(ids), row, place)
                assert found.document_tokens(document)[offset] == batch.tokens_bs[row, place]
