"""The next epoch's index map is built while the current epoch is read."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from megads.data.sampling import index_maps, loader
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.blend import BalancedOrder, BlendedSamples
from megads.data.sampling.index_maps import EpochMapKey
from megads.data.sampling.loader import LoaderShare, TrainLoader
from megads.data.sampling.samples import TrainSamples
from megads.errors import ConfigError
from tests.data.conftest import VOCAB_SIZE, MakeDataset

SEQ_LEN, STEP = 8, 4
NOBODY = threading.Event()


@pytest.fixture(autouse=True)
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_maps, "SMALL_MAP_ENTRIES", 0)
    monkeypatch.setattr(loader, "LOOK_AHEAD_S", 0.01)


@pytest.fixture
def samples(make_dataset: MakeDataset, tmp_path: Path) -> TrainSamples:
    """Samples of a dataset with 100 samples per epoch."""
    return TrainSamples(make_dataset([81] * 9 + [72]), range(10), SEQ_LEN, 1, str(tmp_path / "maps"))


def epochs(folder: Path) -> list[str]:
    """Epochs whose maps are complete."""
    return sorted(path.stem[-5:] for path in folder.glob("*.json"))


def load(samples: TrainSamples, first: int, end: int | None = None) -> TrainLoader:
    return TrainLoader(
        samples, BatchSizeSchedule(STEP), LoaderShare(STEP, 0, 1, VOCAB_SIZE), first, prefetch_steps=1, end_sample=end
    )


def test_the_next_epochs_map_is_built_before_it_is_needed(
    samples: TrainSamples, make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches ranks that wait between two epochs while one builds the map, and an order changed by building ahead."""
    first = 100 - 3 * STEP
    with load(samples, first) as batches:
        found = [next(batches)]
        deadline = time.monotonic() + 60
        while epochs(tmp_path / "maps") != ["00000", "00001"]:
            assert time.monotonic() < deadline, epochs(tmp_path / "maps")
            time.sleep(0.01)
        monkeypatch.setattr(EpochMapKey, "write", lambda *_: pytest.fail("built when it was needed"))
        found += itertools.islice(batches, 4)
    monkeypatch.undo()
    plain = TrainSamples(samples.dataset, range(10), SEQ_LEN, 1)
    with load(plain, first) as batches:
        assert [batch.batch_hash for batch in itertools.islice(batches, 5)] == [batch.batch_hash for batch in found]


@pytest.mark.parametrize(
    "place,end,built",
    [(93, None, []), (94, None, [1]), (99, 100, []), (99, 101, [1]), (199, 200, []), (199, None, [2])],
)
def test_no_map_beyond_the_runs_end_is_built(
    samples: TrainSamples, tmp_path: Path, place: int, end: int | None, built: list[int]
) -> None:
    """Catches a run that ends with its epoch but builds gigabytes that are never read, and a map built too late."""
    samples.build_next_maps(place, end, NOBODY)
    assert epochs(tmp_path / "maps") == [f"{epoch:05d}" for epoch in built]


def test_a_blend_builds_maps_of_the_datasets_that_continue(make_dataset: MakeDataset, tmp_path: Path) -> None:
    """Catches a position in the blend used as a position in a dataset."""
    parts = [
        TrainSamples(make_dataset([81] * count, name=f"set_{count}"), range(count), SEQ_LEN, 1, str(tmp_path / "maps"))
        for count in (5, 10)
    ]
    blend = BlendedSamples(parts, BalancedOrder([1, 1]))
    blend.build_next_maps(98, 100, NOBODY)
    assert epochs(tmp_path / "maps") == []
    blend.build_next_maps(98, 103, NOBODY)
    assert epochs(tmp_path / "maps") == ["00001"], "that of the smaller one"


def test_an_unneeded_build_ends_with_the_run(samples: TrainSamples, tmp_path: Path) -> None:
    """Catches a run whose end waits for a map, and files that an interrupted build leaves behind."""
    stop = threading.Event()
    stop.set()
    samples.build_next_maps(99, None, stop)
    assert [path for path in (tmp_path / "maps").iterdir() if path.suffix != ".lock"] == []


def test_a_build_error_is_raised_when_the_map_is_needed(
    samples: TrainSamples, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a run that fails on a full disk an hour before it needs the map, and one that continues without a map."""
    samples.build_maps(1)
    shutil.rmtree(tmp_path / "maps")
    (tmp_path / "maps").touch()
    with caplog.at_level(logging.WARNING), load(samples, 100 - 3 * STEP) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while "could not be built ahead of time: data.cache_dir" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ConfigError, match=r"data.cache_dir = .*cannot write the index map"):
            list(itertools.islice(batches, 5))
