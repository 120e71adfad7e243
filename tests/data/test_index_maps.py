from __future__ import annotations

import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from megads.data import index_maps
from megads.data.index_maps import EpochMap, EpochMapCache, EpochMapKey, build_sample_index
from megads.data.indexed import IndexedDataset
from megads.errors import ConfigError

from .conftest import MakeDataset


def brute_force(sizes: list[int], seq_len: int) -> list[list[int]]:
    """Lists every token's place and takes each seq_len-th."""
    places = [[document, offset] for document, size in enumerate(sizes) for offset in range(size)]
    samples = max(len(places) - 1, 0) // seq_len
    return [places[sample * seq_len] for sample in range(samples + 1)]


def test_sample_index_vector() -> None:
    """Catches an index that differs from Megatron's on the known vector."""
    assert build_sample_index(np.array([5, 3, 7], np.int32), 4).tolist() == [[0, 0], [0, 4], [2, 0], [2, 4]]


def test_sample_index_against_brute_force() -> None:
    """Catches wrong borders: documents without tokens, samples over many documents, an exact fit."""
    random = np.random.default_rng(1)
    for _ in range(300):
        sizes = random.integers(0, random.integers(2, 12), random.integers(1, 20)).tolist()
        if sum(sizes) == 0:
            continue
        seq_len = int(random.integers(1, 15))
        assert build_sample_index(np.array(sizes, np.int32), seq_len).tolist() == brute_force(sizes, seq_len), sizes


def key_of(dataset: IndexedDataset, epoch: int = 0, seed: int = 7) -> EpochMapKey:
    return EpochMapKey(dataset.fingerprint(), 2, dataset.num_documents, 8, seed, epoch)


def assert_equal(first: EpochMap, second: EpochMap) -> None:
    for field in fields(EpochMap):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))


def test_an_epoch_is_a_permutation_of_its_own(make_dataset: MakeDataset) -> None:
    """Catches epochs that repeat one order, lose documents, or leave the range; and a seed that is ignored."""
    dataset = make_dataset(range(3, 60))
    maps = [key_of(dataset, epoch, seed).build(dataset) for epoch, seed in ((0, 7), (1, 7), (0, 8))]
    for found in maps:
        assert sorted(found.document_order) == list(range(2, dataset.num_documents))
        assert sorted(found.shuffle) == list(range(len(found.sample_index) - 1))
    orders = {tuple(found.document_order) for found in maps}
    assert len(orders) == 3
    assert_equal(maps[1], key_of(dataset, 1).build(dataset))


def test_the_order_is_this_one_for_ever(make_dataset: MakeDataset) -> None:
    """Catches a change of the order by an edit or by another NumPy: it would break every resumed run."""
    dataset = make_dataset([10] * 10)
    found = key_of(dataset).build(dataset)
    assert found.document_order.tolist() == [8, 5, 6, 2, 4, 9, 7, 3]
    assert found.shuffle.tolist() == [4, 3, 2, 5, 1, 6, 7, 0, 8]


def test_every_part_of_the_key_changes_the_name() -> None:
    """Catches a cache that serves the map of another dataset, range, length, seed or epoch."""
    key = EpochMapKey("abc", 0, 10, 8, 1, 0)
    others = [
        replace(key, fingerprint="abd"), replace(key, first_document=1), replace(key, end_document=9),
        replace(key, seq_len=16), replace(key, seed=2), replace(key, epoch=1),
    ]  # fmt: skip
    assert len({other.name() for other in [key, *others]}) == 7


@pytest.fixture
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_maps, "SMALL_MAP_ENTRIES", 0)


def test_cache_gives_back_what_was_built(make_dataset: MakeDataset, always_cached: None) -> None:
    """Catches files that are not found again, and maps that are copied into memory."""
    dataset = make_dataset(range(3, 60))
    built = EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))
    folder = Path(f"{dataset.prefix}.cache")
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))
    assert len(times) == 4
    assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert_equal(built, key_of(dataset).build(dataset))
    assert_equal(again, built)
    assert not again.sample_index.flags.owndata


@pytest.mark.parametrize("name", ["document_order.npy", "sample_index.npy", "shuffle.npy", ".json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_cache_is_rebuilt(make_dataset: MakeDataset, always_cached: None, name: str, damage: str) -> None:
    """Catches a flipped bit or a half-written file changing the data order without a word."""
    dataset = make_dataset(range(3, 60))
    cache = EpochMapCache(dataset.prefix)
    expected = key_of(dataset).build(dataset)
    cache.get(dataset, key_of(dataset))
    path = next(path for path in Path(f"{dataset.prefix}.cache").iterdir() if path.name.endswith(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(content), "truncate": bytes(content[:-5]), "empty": b""}[damage])
    assert_equal(cache.get(dataset, key_of(dataset)), expected)
    assert_equal(cache.get(dataset, key_of(dataset)), expected)


def test_concurrent_builders_are_harmless(make_dataset: MakeDataset, always_cached: None) -> None:
    """Catches ranks that build at once and read each other's half-written files."""
    dataset = make_dataset(range(3, 60))
    expected = key_of(dataset).build(dataset)
    found: list[EpochMap] = []
    builders = [
        threading.Thread(target=lambda: found.append(EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))))
        for _ in range(8)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(found) == 8
    for one in found:
        assert_equal(one, expected)
    assert not list(Path(f"{dataset.prefix}.cache").glob("*.partial"))


def test_an_unwritable_folder_falls_back_to_the_users_cache(
    make_dataset: MakeDataset, always_cached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a read-only dataset folder stopping a run."""
    dataset = make_dataset(range(3, 60))
    # A file in the way refuses a folder to root too.
    Path(f"{dataset.prefix}.cache").write_text("in the way")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))
    assert len(list((tmp_path / "home/.cache/megads").iterdir())) == 4


def test_a_given_cache_folder_must_work(make_dataset: MakeDataset, always_cached: None, tmp_path: Path) -> None:
    """Catches an explicit choice that is silently not taken."""
    dataset = make_dataset(range(3, 60))
    blocked = tmp_path / "blocked"
    blocked.write_text("in the way")
    with pytest.raises(ConfigError, match=r"data.cache_dir = .*blocked"):
        EpochMapCache(dataset.prefix, str(blocked)).get(dataset, key_of(dataset))
