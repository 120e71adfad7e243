from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from megads.data.batches import Packing, assemble
from megads.data.blend_config import DatasetConfig
from megads.data.config import DataConfig
from megads.data.datasets import open_dataset
from megads.data.indexed import IndexedDataset, IndexedDatasetWriter, IntArray
from megads.data.recorded import record_data
from megads.data.runs import Runs, SampleSource, blended_runs, token_at
from megads.data.samples import TrainSamples, ValidationSamples
from megads.errors import DataError
from megads.frozen_config import load_frozen
from megads.model.gpt import GPT
from tests.command import StartCommand, small_model, steps_of

from .conftest import VOCAB_SIZE, MakeDataset
from .one_sample import documents_of, starts_of, tokens_of

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
    for ids_b, batch in zip(ids, batches, strict=True):
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        assert batch.info.document_starts is not None
        for row, sample in enumerate(ids_b.tolist()):
            tokens = tokens_of(samples, sample)
            assert batch.tokens_bs[row].tolist() == tokens[:-1]
            assert batch.labels_bs[row].tolist() == tokens[1:]
            assert batch.info.document_starts[row].tolist() == starts_of(samples, sample)
            counted = [float(one == other) for one, other in itertools.pairwise(documents_of(samples, sample))]
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


class Blend:
    """A source of two, dealt by the remainder of the sample's number."""

    seq_len = SEQ_LEN

    def __init__(self, parts: list[SampleSource]) -> None:
        self.parts = parts

    def runs(self, samples: IntArray) -> list[Runs]:
        return blended_runs(self.parts, samples % 2, samples // 2)


def test_samples_of_several_datasets_share_a_batch(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches rows or loss masks that are given to another dataset's samples, tokens squeezed into the narrower dtype,
    and an error message that blames the wrong file."""
    wide = make_dataset(documents=[[70000 + i for i in range(40)], [80000 + i for i in range(30)]], name="wide")
    with IndexedDatasetWriter(tmp_path / "narrow", np.uint16) as writer:
        writer.append(range(50))
        writer.append([*range(50, 60), 999])
    narrow = IndexedDataset(tmp_path / "narrow")
    blend = Blend([TrainSamples(wide, range(2), SEQ_LEN, 0), ValidationSamples(narrow, range(2), SEQ_LEN)])
    ids = np.array([5, 0, 15, 3, 2, 14])
    packing = Packing(document_mask=True)
    together = assemble(blend, ids[None], 100_000, True, packing)[0]
    for row, number in enumerate(ids.tolist()):
        alone = assemble(blend.parts[number % 2], np.array([[number // 2]]), 100_000, True, packing)[0]
        for name in ("tokens_bs", "labels_bs", "loss_mask_bs"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0]), name
        assert together.info.document_starts is not None and alone.info.document_starts is not None
        assert torch.equal(together.info.document_starts[row], alone.info.document_starts[0])
    with pytest.raises(DataError, match="narrow: document 1 holds token 999"):
        assemble(blend, np.array([[1, 15]]), 900, True, packing)


@pytest.mark.distributed
def test_masked_ends_of_documents_in_a_run(corpus: Path, megads: StartCommand) -> None:
    """Catches data.mask_eod that does not reach the loss, or is lost where samples are cut."""
    run_dir = megads.folder / "run"
    ended = megads(
        "train",
        *small_model(
            corpus, data__mask_eod="true", evaluation__at_end="false", model__init_std=0.2, parallel__cp=2,
            train__steps=1, run__dir=run_dir,
        ),
    ).end()  # fmt: skip
    assert ended.code == 0, ended.err
    config = load_frozen(run_dir / "config.yaml")
    samples = TrainSamples(IndexedDataset(corpus), range(144), 16, config.train.seed)
    [batch] = assemble(samples, np.arange(12)[None], 509, True, Packing(mask_eod=True))
    assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
    with torch.no_grad():
        logits = GPT(config.model, config.train.seed).eval()(batch.tokens_bs, batch.info)[..., :509].double()
    losses_bs = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.labels_bs, reduction="none")
    [step] = steps_of(run_dir)
    assert step["tokens"] == int(batch.loss_mask_bs.sum()) < 12 * 16
    assert step["loss"] == pytest.approx(float(losses_bs[batch.loss_mask_bs == 1].mean()), rel=1e-6)
    assert step["loss"] != pytest.approx(float(losses_bs.mean()), rel=1e-4)


def test_data_edited_under_a_run(make_dataset: MakeDataset) -> None:
    """Catches an edit in place, of tokens that are in the vocabulary, on which a run goes on to train; and a file that
    is replaced or removed, of which the run still has the old one, that ends it."""
    path = Path(f"{make_dataset([40, 40]).prefix}.bin")
    os.utime(path, (1e9, 1e9))  # the clock of files ticks a few times in a hundredth of a second
    samples = ValidationSamples(IndexedDataset(path.with_suffix("")), range(2), SEQ_LEN)

    def read() -> list[int]:
        [batch] = assemble(samples, np.arange(2)[None], VOCAB_SIZE, True, Packing())
        assert batch.tokens_bs is not None
        return batch.tokens_bs.flatten().tolist()

    before = read()
    content = path.read_bytes()
    path.rename(path.with_suffix(".away"))
    assert read() == before
    path.write_bytes(content)
    assert read() == before
    path.with_suffix(".away").replace(path)
    with path.open("r+b") as file:
        file.write(content[2:4])
    with pytest.raises(DataError, match=rf"{path}: something wrote to it after.*dataset check input="):
        read()


def test_data_touched_under_a_run(make_dataset: MakeDataset) -> None:
    """Catches a run that ends because somebody touched its files, lest they be purged, and edits that pass for that."""
    prefix = make_dataset([40, 40]).prefix
    config = DataConfig(train=[DatasetConfig(prefix)])
    samples = ValidationSamples(open_dataset(config, prefix, record_data(config)), range(2), SEQ_LEN)

    def read() -> None:
        assemble(samples, np.arange(2)[None], VOCAB_SIZE, True, Packing())

    for ending in (".bin", ".idx"):
        os.utime(f"{prefix}{ending}", (1e9, 1e9))
        read()
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.write(bytes([1, 0]))
    with pytest.raises(DataError, match="something wrote to it after"):
        read()
