"""Bins are packed once, cached and mapped; what they hold never changes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from megads.data import packed_bins
from megads.data.blend_config import DatasetConfig
from megads.data.config import DataConfig, PackingMode
from megads.data.datasets import open_datasets
from megads.data.indexed import IndexedDataset, IntArray
from megads.data.packed import PackedSamples, PackedValidation, TurnWriter
from megads.errors import ConfigError, DataError

SEQ_LEN, VOCAB_SIZE = 16, 500
DOCUMENTS = range(3, 390)


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    """400 documents of one to four sequences, empty ones and some longer than a sample among them."""
    random = np.random.default_rng(5)
    with TurnWriter(tmp_path / "mixed", np.uint16) as writer:
        for _ in range(400):
            turns = range(int(random.integers(1, 5)))
            sizes = (int(random.lognormal(2.0, 1.3)) for _ in turns)
            writer.append_turns(*(random.integers(0, VOCAB_SIZE, size).tolist() for size in sizes))
    return IndexedDataset(tmp_path / "mixed")


@pytest.fixture
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_bins, "SMALL_MAP_ENTRIES", 0)


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("best_fit_decreasing", "_longest_first", "permutation"):
        monkeypatch.setattr(packed_bins, name, lambda *_: pytest.fail("packed again"))


def digest(source: PackedSamples | PackedValidation, samples: IntArray) -> str:
    """Hash of every token's place in every sample, and of what is learnt."""
    found = hashlib.sha256()
    for runs in source.runs(samples):
        assert runs.counted is not None
        for part in (runs.documents, runs.starts, runs.lengths, runs.rows, runs.places, runs.counted):
            assert part.dtype == np.int64
            found.update(np.ascontiguousarray(part, "<i8").data)
    return found.hexdigest()[:16]


def both_digests(dataset: IndexedDataset, seq_len: int = SEQ_LEN, cache_dir: str | None = None) -> tuple[str, str]:
    """Of three epochs of training and of the validation."""
    train = PackedSamples(dataset, DOCUMENTS, seq_len, 7, cache_dir)
    valid = PackedValidation(dataset, DOCUMENTS, seq_len, cache_dir)
    return digest(train, np.arange(3 * train.samples_per_epoch)), digest(valid, np.arange(len(valid)))


GOLDEN = {16: ("5df50d6ddd538947", "519204ea16681235"), 100: ("f53fdb91267c4410", "47b25c5c5db7ee81")}
"""By seq_len; of the first version, which packed in memory at every start."""


@pytest.mark.parametrize("seq_len", GOLDEN)
@pytest.mark.parametrize("changes", [{}, {"SMALL_MAP_ENTRIES": 0}, {"CHUNK": 7}])
def test_the_samples_are_these_for_ever(
    dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch, seq_len: int, changes: dict[str, int]
) -> None:
    """Catches an edit, another NumPy, a cached array or a border between chunks that changes the samples of a run."""
    for name, value in changes.items():
        monkeypatch.setattr(packed_bins, name, value)
    assert both_digests(dataset, seq_len) == GOLDEN[seq_len]


def test_no_document_is_packed_twice(
    dataset: IndexedDataset, always_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches ranks that pack what one of them has packed, maps that `run.prepare_only` leaves to the job, and private
    copies of what is mapped."""
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
def test_damaged_bins_are_packed_anew(
    dataset: IndexedDataset, always_cached: None, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    """Catches a flipped bit that trains other samples than the run's without a word."""
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


def test_all_that_determines_bins_is_in_their_name(
    dataset: IndexedDataset, always_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches bins of another range, length, seed, dataset or version of the packing."""
    folder = Path(f"{dataset.prefix}.cache")

    def made(seq_len: int = SEQ_LEN, seed: int = 7, documents: range = DOCUMENTS) -> int:
        """Counts what is cached anew for the first epoch."""
        before = set(folder.glob("*.json"))
        PackedSamples(IndexedDataset(dataset.prefix), documents, seq_len, seed).build_maps(1)
        return len(set(folder.glob("*.json")) - before)

    assert [made(), made(), made(seed=8), made(seq_len=SEQ_LEN - 1)] == [2, 0, 1, 2]
    assert [made(documents=range(4, 390)), made(documents=range(3, 389))] == [2, 2]
    monkeypatch.setattr(packed_bins, "FORMAT_VERSION", packed_bins.FORMAT_VERSION + 1)
    assert made() == 2
    with TurnWriter(dataset.prefix, np.uint16) as writer:
        for number in range(400):
            writer.append_turns([number] * 5)
    assert made() == 2


def test_a_dataset_that_cannot_be_written_beside(
    dataset: IndexedDataset, always_cached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a read-only disk that stops a run, or has every rank pack."""
    # A file in the way refuses a folder to root too.
    Path(f"{dataset.prefix}.cache").write_text("in the way")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert both_digests(dataset) == GOLDEN[SEQ_LEN]
    assert len(list((tmp_path / "cache").rglob("*-packed-*.json"))) == 5
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert both_digests(dataset) == GOLDEN[SEQ_LEN]


def test_the_given_cache_folder_is_taken(
    dataset: IndexedDataset, always_cached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches `data.cache_dir` that is not heard, by training or by validation, or cannot be written and is passed
    over."""
    config = DataConfig(
        train=[DatasetConfig(dataset.prefix)], packing=PackingMode.best_fit, document_mask=True, reset_positions=True
    )
    config.cache_dir = str(tmp_path / "maps")
    open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)
    assert len(list((tmp_path / "maps").glob("*.json"))) == 3 and not Path(f"{dataset.prefix}.cache").exists()
    forbid_packing(monkeypatch)
    open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)
    monkeypatch.undo()
    monkeypatch.setattr(packed_bins, "SMALL_MAP_ENTRIES", 0)
    config.cache_dir = f"{dataset.prefix}.bin"
    with pytest.raises(ConfigError, match=r"data\.cache_dir = .*cannot write the packing there"):
        open_datasets(config, SEQ_LEN, 1, VOCAB_SIZE)


def test_nothing_to_learn_is_said_of_cached_bins_too(tmp_path: Path, always_cached: None) -> None:
    """Catches empty arrays, which cannot be mapped, and are no error of the cache."""
    with TurnWriter(tmp_path / "prompts", np.uint16) as writer:
        for _ in range(5):
            writer.append_turns([1, 2], [])
    for _ in range(2):
        with pytest.raises(DataError, match="none of documents 0 to 4 has a token to learn"):
            PackedSamples(IndexedDataset(tmp_path / "prompts"), range(5), SEQ_LEN, 0)
