from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megads.batch import MicroBatch
from megads.config.frozen import load_frozen
from megads.data.config import DataConfig, DatasetConfig
from megads.data.indexed.dataset import IndexedDataset, IntArray
from megads.data.indexed.recorded import record_data
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.datasets import open_dataset
from megads.data.sampling.loader import (
    LoaderShare,
    Packing,
    StepBatch,
    TrainLoader,
    assemble,
    num_validation_batches,
    validation_batches,
)
from megads.data.sampling.runs import Runs, SampleSource, blended_runs, token_at
from megads.data.sampling.samples import TrainSamples, ValidationSamples
from megads.errors import ConfigError, DataError
from megads.model.gpt import GPT
from tests.command import StartCommand, small_model, steps_of
from tests.data.conftest import VOCAB_SIZE, MakeDataset
from tests.data.one_sample import documents_of, starts_of, tokens_of

SEQ_LEN = 8


@pytest.mark.parametrize("seed", range(6))
def test_batches_equal_samples_read_one_by_one(make_dataset: MakeDataset, seed: int) -> None:
    """Catches batches that lose, shift or mix tokens or document boundaries: over epochs, empty documents, documents
    longer than samples and single tokens, with micro-batches of several epochs; and an off-by-one end-of-document
    mask."""
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
    """Catches an error message that names another document or offset than that of the bad token."""
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
    """Alternates between two sources by the parity of the sample index."""

    seq_len = SEQ_LEN

    def __init__(self, parts: list[SampleSource]) -> None:
        self.parts = parts

    def runs(self, samples: IntArray) -> list[Runs]:
        return blended_runs(self.parts, samples % 2, samples // 2)


def test_a_batch_may_mix_samples_of_several_datasets(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches rows or loss masks assigned to another dataset's samples, tokens truncated to the narrower dtype, and an
    error message that names the wrong file."""
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
def test_mask_eod_masks_document_ends_in_a_run(corpus: Path, megads: StartCommand) -> None:
    """Catches data.mask_eod that does not reach the loss, or is lost where samples are split."""
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


def test_data_edited_during_a_run_ends_it(make_dataset: MakeDataset) -> None:
    """Catches an in-place edit, with tokens inside the vocabulary, after which a run continues to train; and a run that
    ends because a file that it holds open is replaced or removed."""
    path = Path(f"{make_dataset([40, 40]).prefix}.bin")
    os.utime(path, (1e9, 1e9))  # the resolution of file timestamps is a few milliseconds
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


def test_files_touched_during_a_run_do_not_end_it(make_dataset: MakeDataset) -> None:
    """Catches a run that ends because its files were touched to prevent a purge, and edits taken for a touch."""
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


LAYOUTS = [(1, 1), (1, 6), (2, 3), (3, 2), (4, 3)]


@pytest.fixture
def samples(make_dataset: MakeDataset) -> TrainSamples:
    return TrainSamples(make_dataset([17, 30, 5, 60, 44]), range(5), SEQ_LEN, seed=1)


def steps(loader: TrainLoader, count: int) -> list[StepBatch]:
    with loader:
        return list(itertools.islice(loader, count))


def in_global_order(by_rank: list[list[MicroBatch]]) -> list[tuple[int, list[int], list[int]]]:
    """Lists (sample id, tokens, labels), micro-batch by micro-batch, rank by rank."""
    rows = []
    for micro_batches in zip(*by_rank, strict=True):
        for batch in micro_batches:
            assert batch.tokens_bs is not None and batch.labels_bs is not None
            columns = (batch.info.sample_ids.tolist(), batch.tokens_bs.tolist(), batch.labels_bs.tolist())
            rows += list(zip(*columns, strict=True))
    return rows


def test_batches_and_hashes_do_not_depend_on_the_layout(samples: TrainSamples) -> None:
    """Catches tokens, ids or batch_hash that depend on dp or micro-batch size, across epochs and sizes (N2)."""
    schedule = BatchSizeSchedule(36, start=12, increment=12, ramp_samples=40)
    seen, hashes = [], []
    for dp, micro in LAYOUTS:
        by_rank = [
            steps(TrainLoader(samples, schedule, LoaderShare(micro, rank, dp, VOCAB_SIZE)), 4) for rank in range(dp)
        ]
        hashes += [[step.batch_hash for step in rank] for rank in by_rank]
        assert [step.first_sample for step in by_rank[0]] == [schedule.samples_after(step) for step in range(4)]
        seen.append([in_global_order([rank[step].micro_batches for rank in by_rank]) for step in range(4)])
    assert all(one == seen[0] for one in seen)
    assert all(one == hashes[0] for one in hashes)
    assert [row[0] for step in seen[0] for row in step] == list(range(schedule.samples_after(4)))


def test_balanced_ranks_read_the_same_samples(samples: TrainSamples) -> None:
    """Catches a sample that a balanced step loses or reads twice, another batch_hash, ranks that disagree about who
    reads a sample, pairs that are not those of the mask, and an assignment that a resume changes."""
    schedule = BatchSizeSchedule(12)
    plain, balanced = Packing(document_mask=True), Packing(document_mask=True, balanced=True)
    [alone] = [steps(TrainLoader(samples, schedule, LoaderShare(12, 0, 1, VOCAB_SIZE, packing=plain)), 3)]
    for needs_tokens in (True, False):
        by_rank = [
            steps(
                TrainLoader(
                    samples, schedule, LoaderShare(2, r, 2, VOCAB_SIZE, needs_tokens=needs_tokens, packing=balanced)
                ),
                3,
            )
            for r in range(2)
        ]
        for number, expected in enumerate(alone):
            assert {rank[number].batch_hash for rank in by_rank} == {expected.batch_hash}
            ids = [
                [i for batch in rank[number].micro_batches for i in batch.info.sample_ids.tolist()] for rank in by_rank
            ]
            assert sorted(ids[0] + ids[1]) == expected.micro_batches[0].info.sample_ids.tolist()
            starts_bs = expected.micro_batches[0].info.document_starts
            assert starts_bs is not None
            pairs_b = (torch.arange(SEQ_LEN) - starts_bs + 1).sum(1)
            loads = [int(pairs_b[torch.tensor(of_rank) - expected.first_sample].sum()) for of_rank in ids]
            assert abs(loads[0] - loads[1]) <= int(pairs_b.max() - pairs_b.min())
            if needs_tokens:
                rows = [row for rank in by_rank for row in in_global_order([rank[number].micro_batches])]
                assert sorted(rows) == in_global_order([expected.micro_batches])
        again = TrainLoader(
            samples, schedule, LoaderShare(2, 1, 2, VOCAB_SIZE, needs_tokens=needs_tokens, packing=balanced), 24
        )
        resumed, before = steps(again, 1)[0], by_rank[1][2]
        for one, other in zip(resumed.micro_batches, before.micro_batches, strict=True):
            assert one.info.sample_ids.tolist() == other.info.sample_ids.tolist()


@pytest.mark.distributed
def test_a_balanced_run_has_the_same_curve(corpus: Path, megads: StartCommand) -> None:
    """Catches data.balance_documents that does not reach the ranks, or changes what a step trains on (N2, N3)."""
    curves = []
    for name, changes in {
        "in order": {},
        "balanced": {"data__balance_documents": "true", "parallel__dp": 2, "train__micro_batch_size": 2},
    }.items():
        words = small_model(
            corpus,
            data__document_mask="true",
            train__steps=4,
            model__init_std=0.2,
            run__dir=megads.folder / name,
            **changes,
        )
        ended = megads("train", *words).end()
        assert ended.code == 0, ended.err
        curves.append(steps_of(megads.folder / name))
    for one, other in zip(*curves, strict=True):
        assert one["batch_hash"] == other["batch_hash"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    ended = megads("train", *small_model(corpus, data__balance_documents="true", train__steps=1)).end()
    assert ended.code == 2 and "data.document_mask=true" in ended.err


def test_batches_are_the_samples_shifted_by_one(samples: TrainSamples) -> None:
    """Catches labels that are not the next tokens, and wrong dtypes, shapes or masks."""
    batch = steps(TrainLoader(samples, BatchSizeSchedule(6), LoaderShare(3, 1, 2, VOCAB_SIZE)), 2)[1].micro_batches[0]
    assert batch.info.sample_ids.tolist() == [9, 10, 11]
    assert batch.info.position_ids_bs is None and batch.info.document_starts is None
    assert batch.info.seq_len == samples.seq_len, "a middle stage cuts samples whose tokens it never sees"
    assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
    for row, sample in enumerate([9, 10, 11]):
        expected = tokens_of(samples, sample)
        assert batch.tokens_bs[row].tolist() == expected[:-1]
        assert batch.labels_bs[row].tolist() == expected[1:]
    assert batch.tokens_bs.dtype == batch.labels_bs.dtype == batch.info.sample_ids.dtype == torch.int64
    assert batch.loss_mask_bs.dtype == torch.float32 and bool((batch.loss_mask_bs == 1).all())
    assert batch.tokens_bs.is_contiguous() and batch.labels_bs.is_contiguous()


def test_resume_gives_the_same_stream(samples: TrainSamples) -> None:
    """Catches loader state that a resume loses: everything follows from the number of consumed samples."""
    schedule = BatchSizeSchedule(8, start=4, increment=2, ramp_samples=20)
    whole = steps(TrainLoader(samples, schedule, LoaderShare(2, 0, 1, VOCAB_SIZE)), 8)
    rest = steps(
        TrainLoader(samples, schedule, LoaderShare(2, 0, 1, VOCAB_SIZE), start_sample=whole[3].first_sample), 5
    )
    for first, second in zip(whole[3:], rest, strict=True):
        assert (first.batch_hash, first.samples) == (second.batch_hash, second.samples)
        assert in_global_order([first.micro_batches]) == in_global_order([second.micro_batches])


def test_document_boundaries_reach_training_and_validation_batches(samples: TrainSamples) -> None:
    """Catches document boundaries of samples outside the micro-batch, positions that do not restart, one option that
    also switches the other, and boundaries that a resume changes."""
    packing = Packing(document_mask=True, reset_positions=True)
    loaded = steps(TrainLoader(samples, BatchSizeSchedule(6), LoaderShare(3, 1, 2, VOCAB_SIZE, packing=packing)), 3)
    again = TrainLoader(
        samples, BatchSizeSchedule(6), LoaderShare(3, 1, 2, VOCAB_SIZE, packing=packing), start_sample=12
    )
    valid = ValidationSamples(samples.dataset, range(5), SEQ_LEN)
    validated = list(itertools.chain(*validation_batches(valid, LoaderShare(3, 1, 2, VOCAB_SIZE, packing=packing), 4)))
    resumed = steps(again, 1)[0].micro_batches[0]
    trained = [step.micro_batches[0] for step in loaded]
    for source, batches in ((samples, [*trained, resumed]), (valid, validated)):
        for batch in batches:
            starts, positions = batch.info.document_starts, batch.info.position_ids_bs
            assert starts is not None and positions is not None and starts.dtype == positions.dtype == torch.int64
            for sample, row, position in zip(batch.info.sample_ids.tolist(), starts, positions, strict=True):
                expected = starts_of(source, sample)
                assert row.tolist() == expected
                assert position.tolist() == (np.arange(SEQ_LEN) - expected).tolist()
    assert resumed.info.sample_ids.tolist() == trained[2].info.sample_ids.tolist()
    masked, reset = (
        assemble(samples, np.arange(2)[None], VOCAB_SIZE, False, one)[0].info
        for one in (Packing(document_mask=True), Packing(reset_positions=True))
    )
    assert masked.position_ids_bs is None and masked.document_starts is not None
    assert reset.document_starts is None and reset.position_ids_bs is not None


def test_middle_stages_get_batch_info_without_tokens(samples: TrainSamples) -> None:
    """Catches a middle stage that reads tokens, or whose sample ids, document boundaries or hash differ."""
    schedule, packing = BatchSizeSchedule(6), Packing(document_mask=True, reset_positions=True)
    full = steps(TrainLoader(samples, schedule, LoaderShare(3, 0, 1, VOCAB_SIZE, packing=packing)), 2)
    bare = steps(
        TrainLoader(samples, schedule, LoaderShare(3, 0, 1, VOCAB_SIZE, needs_tokens=False, packing=packing)), 2
    )
    for with_tokens, without in zip(full, bare, strict=True):
        assert with_tokens.batch_hash == without.batch_hash
        for one, other in zip(with_tokens.micro_batches, without.micro_batches, strict=True):
            assert other.tokens_bs is None and other.labels_bs is None and other.loss_mask_bs is None
            for name in ("sample_ids", "position_ids_bs", "document_starts"):
                mine, theirs = getattr(one.info, name), getattr(other.info, name)
                assert mine is not None and torch.equal(mine, theirs), name


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1])
def test_a_token_outside_the_vocabulary_reaches_the_consumer(make_dataset: MakeDataset, token: int) -> None:
    """Catches an index error on a GPU, far from its cause, and an exception lost in the prefetch thread."""
    dataset = make_dataset(documents=[[1] * 40, [2] * 20 + [token] + [2] * 20])
    loader = TrainLoader(
        TrainSamples(dataset, range(2), SEQ_LEN, 0), BatchSizeSchedule(10), LoaderShare(1, 0, 1, VOCAB_SIZE)
    )
    with pytest.raises(DataError, match=f"corpus: document 1 holds token {token}, model.vocab_size is 1000"):
        next(loader)
    assert not any(thread.is_alive() for thread in loader._threads)
    with pytest.raises(StopIteration):
        next(loader)


def test_an_exception_of_any_type_is_passed_on(samples: TrainSamples) -> None:
    """Catches a consumer that hangs after the prefetch thread fails with a config error."""
    loader = TrainLoader(samples, BatchSizeSchedule(10), LoaderShare(4, 0, 1, VOCAB_SIZE))
    with pytest.raises(ConfigError, match="not a multiple"):
        next(loader)


def await_full(loader: TrainLoader) -> None:
    """Waits until the loader has prefetched what it may."""
    deadline_s = time.monotonic() + 240
    while not loader._queue.full():
        assert time.monotonic() < deadline_s, "nothing is prefetched"
        time.sleep(0.01)


def test_close_ends_the_prefetch_thread_wherever_it_waits(samples: TrainSamples) -> None:
    """Catches a thread that blocks forever on a full queue and keeps the process alive."""
    loader = TrainLoader(samples, BatchSizeSchedule(4), LoaderShare(2, 0, 1, VOCAB_SIZE), prefetch_steps=1)
    await_full(loader)
    assert all(thread.daemon for thread in loader._threads)
    loader.close()
    assert not set(loader._threads) & set(threading.enumerate())
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


def test_prefetch_is_bounded(samples: TrainSamples) -> None:
    """Catches a prefetch thread that reads the whole dataset into memory."""
    with TrainLoader(samples, BatchSizeSchedule(4), LoaderShare(2, 0, 1, VOCAB_SIZE), prefetch_steps=3) as loader:
        await_full(loader)
        time.sleep(0.3)
        assert loader._queue.qsize() == 3
        assert next(loader).first_sample == 0


@pytest.mark.parametrize("dp,micro,per_call", [(1, 1, 100), (1, 4, 1), (2, 3, 2), (4, 2, 1), (5, 7, 3)])
def test_validation_is_the_same_set_in_every_layout(
    make_dataset: MakeDataset, dp: int, micro: int, per_call: int
) -> None:
    """Catches a layout that drops or repeats the tail, or gives ranks different numbers of micro-batches (N10)."""
    dataset = make_dataset([17, 30, 5, 60, 44])
    valid = ValidationSamples(dataset, range(1, 5), SEQ_LEN)
    by_rank = [list(validation_batches(valid, LoaderShare(micro, r, dp, VOCAB_SIZE), per_call)) for r in range(dp)]
    bare = list(validation_batches(valid, LoaderShare(micro, 0, dp, VOCAB_SIZE, needs_tokens=False), per_call))
    assert num_validation_batches(len(valid), micro, dp, per_call) == len(bare)
    assert [[len(call) for call in rank] for rank in by_rank] == [[len(call) for call in bare]] * dp
    assert all(batch.tokens_bs is None for call in bare for batch in call)
    predicted: list[int] = []
    ids: list[int] = []
    for calls in zip(*by_rank, strict=True):
        for micro_batches in zip(*calls, strict=True):
            for batch in micro_batches:
                assert batch.labels_bs is not None and batch.loss_mask_bs is not None and batch.tokens_bs is not None
                assert batch.tokens_bs.shape == batch.loss_mask_bs.shape == (micro, SEQ_LEN)
                predicted += batch.labels_bs[batch.loss_mask_bs == 1].tolist()
                ids += batch.info.sample_ids.tolist()
    assert predicted == dataset.stream(range(1, 5))[1:].tolist()
    assert ids == list(range(len(ids)))


def test_validation_refuses_tokens_outside_the_vocabulary(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches validation data with tokens outside the model's vocabulary."""
    dataset = make_dataset(documents=[[1] * 20, [1] * 9 + [VOCAB_SIZE]])
    valid = ValidationSamples(dataset, range(2), SEQ_LEN)
    with pytest.raises(DataError, match="document 1 holds token 1000"):
        list(validation_batches(valid, LoaderShare(2, 0, 1, VOCAB_SIZE), 4))
