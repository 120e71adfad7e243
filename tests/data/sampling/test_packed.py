from __future__ import annotations

import hashlib
import itertools
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megads.batch import BatchInfo
from megads.config.frozen import load_frozen
from megads.data.config import DataConfig, DatasetConfig, PackingMode
from megads.data.indexed.dataset import IndexedDataset, IntArray
from megads.data.indexed.writer import TurnWriter
from megads.data.sampling import packed as module
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.datasets import open_datasets
from megads.data.sampling.loader import LoaderShare, Packing, TrainLoader, assemble, validation_batches
from megads.data.sampling.packed import PackedSamples, PackedValidation, best_fit_decreasing
from megads.errors import ConfigError, DataError
from megads.model.gpt import GPT
from tests.command import Ended, StartCommand, events_of, small_model, steps_of, validations_of

SEQ_LEN = 16
VOCAB_SIZE = 500
BORDERS = Packing(document_mask=True, reset_positions=True)
Pair = tuple[list[int], list[int]]


def random_pairs(count: int, seed: int = 0, longest: int = 7) -> list[Pair]:
    """Returns distinct pairs: every document starts with its number; prompts may be empty."""
    random = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        tokens = [number, *random.integers(0, VOCAB_SIZE, int(random.integers(1, 2 * longest))).tolist()]
        cut = int(random.integers(0, len(tokens)))
        pairs.append((tokens[:cut], tokens[cut:]))
    return pairs


def write_pairs(prefix: Path, pairs: list[Pair]) -> IndexedDataset:
    with TurnWriter(prefix, np.uint16) as writer:
        for prompt, response in pairs:
            writer.append_turns(prompt, response)
    return IndexedDataset(prefix)


def documents_of(source: PackedSamples, ids: range) -> list[tuple[list[int], list[int], list[int]]]:
    """Returns (tokens, indices of the predicted tokens, positions) of every document of samples, from their batches."""
    found = []
    [batch] = assemble(source, np.array(ids)[None], VOCAB_SIZE, True, BORDERS)
    assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
    assert batch.info.position_ids_bs is not None
    for row, [runs] in enumerate(source.runs(np.array([i])) for i in ids):
        whole = [*batch.tokens_bs[row].tolist(), int(batch.labels_bs[row, -1])]
        mask, positions = [*batch.loss_mask_bs[row].tolist(), 0.0], [*batch.info.position_ids_bs[row].tolist(), -1]
        assert sum(mask[int(runs.lengths.sum()) :]) == 0, "padding is learnt"
        for place, length in zip(runs.places.tolist(), runs.lengths.tolist(), strict=True):
            span = slice(place, place + length)
            assert mask[place + length - 1] == 0, "the first token of a document is learnt from the one before"
            learnt = [at + 1 for at, counts in enumerate(mask[span]) if counts]
            found.append((whole[span], learnt, positions[span][: SEQ_LEN - place]))
    return found


def test_every_pair_is_read_whole_once_per_epoch(tmp_path: Path) -> None:
    """Catches pairs that are lost, cut or duplicated, a loss on prompts, responses without a loss, positions that do
    not restart, and epochs in the same order or of unequal length."""
    pairs = random_pairs(150)
    source = PackedSamples(write_pairs(tmp_path / "pairs", pairs), range(150), SEQ_LEN, seed=3)
    size, orders = source.samples_per_epoch, []
    for epoch in range(3):
        found = documents_of(source, range(epoch * size, (epoch + 1) * size))
        orders.append([tokens[0] for tokens, _, _ in found])
        assert sorted(orders[-1]) == list(range(150))
        for tokens, learnt, positions in found:
            prompt, response = pairs[tokens[0]]
            assert tokens == prompt + response
            assert learnt == list(range(max(len(prompt), 1), len(tokens)))
            assert positions == list(range(len(positions)))
    assert len({tuple(order) for order in orders}) == 3
    again = PackedSamples(source.dataset, range(150), SEQ_LEN, seed=3)
    other = PackedSamples(source.dataset, range(150), SEQ_LEN, seed=4)
    numbers = np.arange(2 * size)
    assert np.array_equal(again.sample_keys(numbers)[::-1], source.sample_keys(numbers[::-1]))
    assert not np.array_equal(other.sample_keys(numbers), source.sample_keys(numbers))
    assert source.counts.fill > 0.9, source.counts


def test_pairs_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """Catches a long pair that stops the run or is dropped without being counted, a pair without a token to train on,
    and a conversation of which only the first answer, or a question, has a loss."""
    pairs: list[Pair] = [([0] * 10, [1] * 20), ([0] * 17, [1] * 3), ([0] * 5, []), ([], [1]), ([0] * 3, [1] * 3)]
    source = PackedSamples(write_pairs(tmp_path / "pairs", pairs), range(5), SEQ_LEN, seed=0)
    assert (source.counts.truncated, source.counts.dropped, source.counts.samples) == (1, 3, 2)
    found = sorted(documents_of(source, range(2)), key=lambda document: len(document[0]))
    assert [(len(tokens), learnt) for tokens, learnt, _ in found] == [(6, [3, 4, 5]), (17, list(range(10, 17)))]
    with pytest.raises(DataError, match="none of documents 1 to 3 has a token to learn"):
        PackedValidation(source.dataset, range(1, 4), SEQ_LEN)
    with TurnWriter(tmp_path / "mixed", np.uint16) as writer:
        writer.append_turns([7, 8, 9])
        writer.append_turns([3], [4], [5, 5], [6], [2])
    mixed = PackedSamples(IndexedDataset(tmp_path / "mixed"), range(2), SEQ_LEN, seed=0)
    assert documents_of(mixed, range(1)) == [
        ([3, 4, 5, 5, 6, 2], [1, 4], [0, 1, 2, 3, 4, 5]),
        ([7, 8, 9], [1, 2], [0, 1, 2]),
    ]


def test_long_documents_are_trained_to_their_end(tmp_path: Path) -> None:
    """Catches document tails that are never trained on, tokens that are predicted twice or never where a document is
    split, and counts that omit the tokens that are left out."""
    random = np.random.default_rng(0)
    documents = [list(range(size)) for size in [*random.lognormal(2.5, 1.2, 80).astype(int) + 1, 16, 17, 18, 33, 34]]
    with TurnWriter(tmp_path / "texts", np.uint16) as writer:
        for document in documents:
            writer.append_turns(document)
        writer.append_turns([5] * 10, [6] * 20)
    dataset = IndexedDataset(tmp_path / "texts")
    source = PackedSamples(dataset, range(len(documents) + 1), SEQ_LEN, seed=0)
    learnt = []
    for tokens, places, positions in documents_of(source, range(source.samples_per_epoch)):
        if tokens[0] != 5 or tokens[-1] != 6:
            learnt += [tokens[place] for place in places]
        assert positions == list(range(len(positions))) and len(tokens) <= SEQ_LEN + 1
    assert sorted(learnt) == sorted(token for document in documents for token in document[1:])
    counts, total = source.counts, sum(map(len, documents)) + 30
    single = sum(len(document) == 1 for document in documents)
    assert counts.tokens == total and counts.dropped == single
    assert counts.split == sum(len(document) > SEQ_LEN + 1 for document in documents)
    assert counts.truncated == 1 and counts.left_out_tokens == 30 - (SEQ_LEN + 1) + single
    valid = PackedValidation(dataset, range(len(documents)), SEQ_LEN)
    batches = itertools.chain(*validation_batches(valid, LoaderShare(3, 0, 1, VOCAB_SIZE, packing=BORDERS), 2))
    masks = [float(batch.loss_mask_bs.sum()) for batch in batches if batch.loss_mask_bs is not None]
    assert sum(masks) == len(learnt)


def test_packed_batches_do_not_depend_on_layout_or_resume(tmp_path: Path) -> None:
    """Catches packed batches that depend on dp, the micro-batch size or the sample at which a run resumes (N2)."""
    source = PackedSamples(write_pairs(tmp_path / "pairs", random_pairs(60)), range(60), SEQ_LEN, seed=1)
    seen = []
    for dp, micro, start in ((1, 6, 0), (2, 3, 0), (3, 1, 0), (1, 2, 12)):
        rows: dict[int, tuple[list[int], list[float]]] = {}
        hashes: list[str] = []
        for rank in range(dp):
            schedule = BatchSizeSchedule(12)
            with TrainLoader(
                source, schedule, LoaderShare(micro, rank, dp, VOCAB_SIZE, packing=BORDERS), start
            ) as loader:
                steps = list(itertools.islice(loader, 4 - start // 12))
            hashes = [step.batch_hash for step in steps]
            for batch in itertools.chain(*(step.micro_batches for step in steps)):
                assert batch.tokens_bs is not None and batch.loss_mask_bs is not None
                columns = (batch.info.sample_ids.tolist(), batch.tokens_bs.tolist(), batch.loss_mask_bs.tolist())
                rows |= {sample: (tokens, mask) for sample, tokens, mask in zip(*columns, strict=True)}
        seen.append((hashes, rows))
    assert seen[0] == seen[1] == seen[2]
    assert seen[3][0] == seen[0][0][1:] and seen[3][1].items() <= seen[0][1].items()


def test_validation_predicts_every_response_once(tmp_path: Path) -> None:
    """Catches a layout that drops or repeats packed windows, and a loss mask that is not exactly the response
    tokens."""
    pairs = random_pairs(40)
    valid = PackedValidation(write_pairs(tmp_path / "pairs", pairs), range(7, 40), SEQ_LEN)
    expected = sorted(token for prompt, response in pairs[7:] for token in response[0 if prompt else 1 :])
    for dp, micro in ((1, 3), (2, 2), (3, 4)):
        learnt: list[int] = []
        for rank in range(dp):
            for batch in itertools.chain(
                *validation_batches(valid, LoaderShare(micro, rank, dp, VOCAB_SIZE, packing=BORDERS), 2)
            ):
                assert batch.labels_bs is not None and batch.loss_mask_bs is not None
                learnt += batch.labels_bs[batch.loss_mask_bs == 1].tolist()
        assert sorted(learnt) == expected


def loss_of_pairs_alone(model: GPT, pairs: list[Pair]) -> tuple[float, int]:
    """Returns the mean loss over response tokens with one pair per sample, and the number of those tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, response in pairs:
        tokens = torch.tensor([prompt + response])
        with torch.no_grad():
            logits = model(tokens[:, :-1], BatchInfo(torch.tensor([0])))[0].double()
        losses = torch.nn.functional.cross_entropy(logits[:, :VOCAB_SIZE], tokens[0, 1:], reduction="none")
        total += losses[max(len(prompt) - 1, 0) :].sum()
        count += len(tokens[0]) - max(len(prompt), 1)
    return float(total) / count, count


def train_pairs(megads: StartCommand, prefix: Path, name: str, **changes: int | Path) -> Ended:
    overrides = small_model(
        prefix, data__packing="best_fit", data__document_mask="true", data__reset_positions="true",
        data__split="[0.8, 0.2]", model__position="learned", model__init_std=0.2, model__vocab_size=VOCAB_SIZE,
        train__seq_len=SEQ_LEN, train__steps=3, run__dir=name, **changes,
    )  # fmt: skip
    return megads("train", *overrides).end()


@pytest.mark.slow
@pytest.mark.distributed
def test_pairs_train_as_if_each_were_alone(tmp_path: Path, megads: StartCommand) -> None:
    """Catches a loss on prompts or padding, pairs that attend to each other, positions that do not restart, a mean that
    is not over the response tokens of the global batch, and layouts that differ in any of it (N9)."""
    pairs = random_pairs(150)
    dataset = write_pairs(tmp_path / "pairs", pairs)
    four: dict[str, int | Path] = {"parallel__dp": 2, "parallel__pp": 2, "data__stage_to": tmp_path / "local"}
    for name, changes in (("one", {}), ("four", four)):
        ended = train_pairs(megads, tmp_path / "pairs", name, **changes)
        assert ended.code == 0, ended.err
    config = load_frozen(tmp_path / "one" / "config.yaml")
    source = PackedSamples(dataset, range(120), SEQ_LEN, config.train.seed)
    first_step = [pairs[tokens[0]] for tokens, _, _ in documents_of(source, range(12))]
    loss, count = loss_of_pairs_alone(GPT(config.model, config.train.seed).eval(), first_step)
    one, other = steps_of(tmp_path / "one"), steps_of(tmp_path / "four")
    assert one[0]["tokens"] == count and one[0]["loss"] == pytest.approx(loss, rel=1e-6)
    assert events_of(tmp_path / "one", "packed")[0]["documents"] == 120
    for ours, theirs in zip(one, other, strict=True):
        assert (ours["tokens"], ours["batch_hash"]) == (theirs["tokens"], theirs["batch_hash"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert len(list((tmp_path / "local").glob("*.bin"))) == 1, "ranks of a node copied twice, or read the original"
    held_out = [validations_of(tmp_path / name)[-1]["valid/held_out/loss"] for name in ("one", "four")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)


DOCUMENTS = range(3, 390)


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    """400 documents of one to four sequences, some of them empty and some longer than a sample."""
    random = np.random.default_rng(5)
    with TurnWriter(tmp_path / "mixed", np.uint16) as writer:
        for _ in range(400):
            turns = range(int(random.integers(1, 5)))
            sizes = (int(random.lognormal(2.0, 1.3)) for _ in turns)
            writer.append_turns(*(random.integers(0, VOCAB_SIZE, size).tolist() for size in sizes))
    return IndexedDataset(tmp_path / "mixed")


@pytest.fixture
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_MAP_ENTRIES", 0)


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("best_fit_decreasing", "_longest_first", "permutation"):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("packed again"))


def digest(source: PackedSamples | PackedValidation, samples: IntArray) -> str:
    """Hashes the position of every token in every sample, and which tokens have a loss."""
    found = hashlib.sha256()
    for runs in source.runs(samples):
        assert runs.counted is not None
        for part in (runs.documents, runs.starts, runs.lengths, runs.rows, runs.places, runs.counted):
            assert part.dtype == np.int64
            found.update(np.ascontiguousarray(part, "<i8").data)
    return found.hexdigest()[:16]


def both_digests(dataset: IndexedDataset, seq_len: int = SEQ_LEN, cache_dir: str | None = None) -> tuple[str, str]:
    """Returns the digests of three epochs of training and of the validation."""
    train = PackedSamples(dataset, DOCUMENTS, seq_len, 7, cache_dir)
    valid = PackedValidation(dataset, DOCUMENTS, seq_len, cache_dir)
    return digest(train, np.arange(3 * train.samples_per_epoch)), digest(valid, np.arange(len(valid)))


GOLDEN = {16: ("5df50d6ddd538947", "519204ea16681235"), 100: ("f53fdb91267c4410", "47b25c5c5db7ee81")}
"""Digests by seq_len, from the first version, which packed in memory at every start."""


@pytest.mark.parametrize("seq_len", GOLDEN)
@pytest.mark.parametrize("changes", [{}, {"SMALL_MAP_ENTRIES": 0}, {"CHUNK": 7}])
def test_packed_samples_are_pinned(
    dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch, seq_len: int, changes: dict[str, int]
) -> None:
    """Catches an edit, another NumPy version, a cached array or a chunk boundary that changes the samples of a run."""
    for name, value in changes.items():
        monkeypatch.setattr(module, name, value)
    assert both_digests(dataset, seq_len) == GOLDEN[seq_len]


def test_no_document_is_packed_twice(
    dataset: IndexedDataset, always_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches ranks that repeat the packing that one of them has done, maps that `run.prepare_only` does not build, and
    arrays that are copied to private memory instead of memory-mapped."""
    first = PackedSamples(dataset, DOCUMENTS, SEQ_LEN, 7)
    assert first.build_maps(3 * first.samples_per_epoch) == 3
    PackedValidation(dataset, DOCUMENTS, SEQ_LEN)
    forbid_packing(monkeypatch)
    assert both_digests(dataset) == GOLDEN[SEQ_LEN]
    again = PackedSamples(dataset, DOCUMENTS, SEQ_LEN, 7)
    assert again.counts == first.counts
    assert not any(array.flags.owndata for array in [*vars(again._bins._bins).values(), *again._epoch(0)])


@pytest.mark.parametrize("name", ["bins-sizes.npy", "bins-slots.npy", "bins-totals.npy", "epoch00001-pieces.npy"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_cached_bins_are_packed_again(
    dataset: IndexedDataset, always_cached: None, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    """Catches a damaged cache that silently changes the samples of a run."""
    both_digests(dataset)
    [path] = Path(f"{dataset.prefix}.cache").glob(f"*-packed-{name}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(content), "truncate": bytes(content[:-5])}[damage])
    assert both_digests(dataset) == GOLDEN[SEQ_LEN]
    assert "the cached packing is damaged" in caplog.text
    caplog.clear()
    assert both_digests(dataset) == GOLDEN[SEQ_LEN]
    assert not caplog.text


def test_every_input_of_the_packing_changes_its_cache_name(
    dataset: IndexedDataset, always_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches cached bins of another range, length, seed, dataset or packing version that are reused."""
    folder = Path(f"{dataset.prefix}.cache")

    def made(seq_len: int = SEQ_LEN, seed: int = 7, documents: range = DOCUMENTS) -> int:
        """Counts the cache entries that are written for the first epoch."""
        before = set(folder.glob("*.json"))
        PackedSamples(IndexedDataset(dataset.prefix), documents, seq_len, seed).build_maps(1)
        return len(set(folder.glob("*.json")) - before)

    assert [made(), made(), made(seed=8), made(seq_len=SEQ_LEN - 1)] == [2, 0, 1, 2]
    assert [made(documents=range(4, 390)), made(documents=range(3, 389))] == [2, 2]
    monkeypatch.setattr(module, "FORMAT_VERSION", module.FORMAT_VERSION + 1)
    assert made() == 2
    with TurnWriter(dataset.prefix, np.uint16) as writer:
        for number in range(400):
            writer.append_turns([number] * 5)
    assert made() == 2


def test_a_read_only_dataset_folder_falls_back_to_the_users_cache(
    dataset: IndexedDataset, always_cached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a read-only disk that stops a run, or makes every rank pack."""
    # A file at this path prevents the folder even for root.
    Path(f"{dataset.prefix}.cache").write_text("in the way")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert both_digests(dataset) == GOLDEN[SEQ_LEN]
    assert len(list((tmp_path / "cache").rglob("*-packed-*.json"))) == 5
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert both_digests(dataset) == GOLDEN[SEQ_LEN]


def test_a_given_cache_folder_is_used_or_refused(
    dataset: IndexedDataset, always_cached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a `data.cache_dir` that training or validation ignores, or that is not writable and raises no error."""
    config = DataConfig(
        train=[DatasetConfig(dataset.prefix)], packing=PackingMode.best_fit, document_mask=True, reset_positions=True
    )
    config.cache_dir = str(tmp_path / "maps")
    open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)
    assert len(list((tmp_path / "maps").glob("*.json"))) == 3 and not Path(f"{dataset.prefix}.cache").exists()
    forbid_packing(monkeypatch)
    open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)
    monkeypatch.undo()
    monkeypatch.setattr(module, "SMALL_MAP_ENTRIES", 0)
    config.cache_dir = f"{dataset.prefix}.bin"
    with pytest.raises(ConfigError, match=r"data\.cache_dir = .*cannot write the packing there"):
        open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)


def test_a_dataset_without_trained_tokens_is_refused_also_from_the_cache(tmp_path: Path, always_cached: None) -> None:
    """Catches empty arrays, which cannot be memory-mapped, reported as an error of the cache."""
    with TurnWriter(tmp_path / "prompts", np.uint16) as writer:
        for _ in range(5):
            writer.append_turns([1, 2], [])
    for _ in range(2):
        with pytest.raises(DataError, match="none of documents 0 to 4 has a token to learn"):
            PackedSamples(IndexedDataset(tmp_path / "prompts"), range(5), SEQ_LEN, 0)


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Returns the bin of each item by textbook best-fit decreasing; among bins of equal room, the one that waited
    longest."""
    waiting: list[deque[int]] = [deque() for _ in range(capacity + 1)]
    bins, opened = [], 0
    for size in sizes:
        room = next((room for room in range(size, capacity) if waiting[room]), capacity)
        if room == capacity:
            waiting[room].append(opened)
            opened += 1
        chosen = waiting[room].popleft()
        bins.append(chosen)
        waiting[room - size].append(chosen)
    return bins


@given(st.integers(1, 40).flatmap(lambda top: st.tuples(st.just(top), st.lists(st.integers(1, top), max_size=150))))
def test_bins_equal_those_of_filling_one_item_at_a_time(packed: tuple[int, list[int]]) -> None:
    """Catches overfull bins, lost or duplicated items, a bin forgotten when its size class is used up, a worse fit, and
    an edit that moves any item to another bin: it would change the samples of existing runs."""
    capacity, items = packed
    sizes = sorted(items, reverse=True)
    assert best_fit_decreasing(np.array(sizes, np.int64), capacity).tolist() == one_by_one(sizes, capacity)


def test_a_million_items_are_packed_without_overflow_or_waste() -> None:
    """Catches bins that overflow, or waste room, where many items share a size and many are small."""
    sizes = np.sort(np.random.default_rng(0).geometric(0.004, 1_000_000).clip(1, 2049))[::-1].astype(np.int64)
    filled = np.bincount(best_fit_decreasing(sizes, 2049), sizes)
    assert filled.max() <= 2049 and filled.sum() == sizes.sum() and filled.mean() > 0.9999 * 2049
