from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megads.data.config import DataConfig, DatasetConfig, MixConfig
from megads.data.indexed.dataset import bin_path, idx_path
from megads.data.indexed.recorded import (
    WHOLE_BYTES,
    DataRecord,
    content_digest,
    read_record,
    record_data,
    require_recorded,
    unverified_data,
    with_former,
    write_record,
    written_checksums,
)
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.indexed.sidecar import Sidecar, read_sidecar, sidecar_path, write_sidecar
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.errors import DataError
from megads.runtime.run_dir import DATA_FILE
from megads.tools.dataset.actions import merge


def write(prefix: Path, sizes: list[int], first: int = 0) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number, size in enumerate(sizes):
            writer.append(np.arange(size) + first + number)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "grown": (lambda prefix: write(prefix, [9, 5, 7, 4]), "had 3 documents of 21 tokens, now 4 of 25"),
    "cut elsewhere": (lambda prefix: write(prefix, [5, 9, 7]), "has other document lengths than before"),
    "other tokens": (lambda prefix: write(prefix, [9, 5, 7], 1), "holds other tokens than before"),
}


@pytest.mark.fault(15)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_data_is_reported_and_named(tmp_path: Path, change: str) -> None:
    """Catches a run that continues with changed data, and a message that does not say what changed."""
    prefix = tmp_path / "data"
    config = DataConfig(train=[DatasetConfig(str(prefix))], valid={"same": str(prefix)})
    write(prefix, [9, 5, 7])
    write_record(tmp_path, record_data(config))
    write(prefix, [9, 5, 7])
    require_recorded(tmp_path, record_data(config))
    make, expected = CHANGES[change]
    make(prefix)
    with pytest.raises(DataError, match=f"is not what its launcher saw: {prefix}.*{expected}") as caught:
        require_recorded(tmp_path, record_data(config))
    assert caught.value.exit_code == 3


def test_changed_text_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    """Catches a run with a fixed run.id that continues with other text: its dataset has a name of its own, so no
    dataset changed. Another data.raw is intended, and the same text processed again elsewhere is no change."""
    records = []
    for name, raw in (("a", "my"), ("b", "my"), ("b", "other"), ("c", "my")):
        write(tmp_path / name, [9, 5], first=int(name == "b"))
        records.append(record_data(DataConfig(train=[DatasetConfig(str(tmp_path / name))]), [raw]))
    [change] = records[0].changes(records[1])
    assert change.startswith(f"data.raw = my gives {tmp_path / 'b'}, before it gave {tmp_path / 'a'}")
    assert records[0].changes(records[2]) == records[0].changes(records[3]) == []
    # After an earlier mix: the dataset of data.raw is known by its position, the first.
    mixed = DataConfig(train=[DatasetConfig(str(tmp_path / "b"))], history=[MixConfig(0, {str(tmp_path / "a"): 1.0})])
    after = with_former(records[1], mixed)
    assert len(after.datasets) == 2 and after.changes(records[1]) == []


def test_a_record_is_kept_for_the_checkpoints_of_its_start(tmp_path: Path) -> None:
    """Catches a checkpoint compared with the data of a later start, and a tokenizer that the record loses."""
    write(tmp_path / "a", [9, 5])
    config, known = DataConfig(train=[DatasetConfig(str(tmp_path / "a"))]), TokenizerRecord("ab" * 32, 300, 0, "ignore")
    first = record_data(config, tokenizer=known)
    write_record(tmp_path, first)
    write(tmp_path / "a", [9, 6])
    write_record(tmp_path, record_data(config))
    assert read_record(tmp_path, first.digest) == first and first.tokenizer_sha256 == "ab" * 32
    assert read_record(tmp_path) == read_record(tmp_path, "never kept") == record_data(config)


def flip(prefix: Path) -> None:
    with bin_path(prefix).open("r+b") as file:
        file.seek(11)
        file.write(b"\xff")


def swap_halves(prefix: Path) -> None:
    content = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes(content[16:] + content[:16])


def move_boundaries(prefix: Path) -> None:
    write(prefix.with_name("other"), [9, 3, 4])
    idx_path(prefix).write_bytes(idx_path(prefix.with_name("other")).read_bytes())


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(("damage", "ending"), [(flip, "bin"), (swap_halves, "bin"), (move_boundaries, "idx")])
def test_a_dataset_that_differs_from_its_checksums_is_refused(
    damage: Callable[[Path], None], ending: str, older: bool, tmp_path: Path
) -> None:
    """Catches a new run that trains on bytes that preprocess did not write, although their checksums are known."""
    first, prefix = tmp_path / "first", tmp_path / "data"
    write(first, [4, 5])
    write_sidecar(first, Sidecar("ab", 999, 998, 0, 2, 9, 9, 0, {}, [], []))
    write_sidecar(tmp_path / "second", Sidecar("ab", 999, 998, 0, 1, 7, 9, 0, {}, [], []))
    write(tmp_path / "second", [7])
    merge([str(first), str(tmp_path / "second")], str(prefix))
    if older:
        made = read_sidecar(prefix)
        assert made is not None
        write_sidecar(prefix, replace(made, index=None, content=None))
    config = DataConfig(train=[DatasetConfig(str(prefix))])
    assert record_data(config).datasets[0].tokens == 16 and not unverified_data(config)
    damage(prefix)
    with pytest.raises(DataError, match=rf"data.{ending}: its checksum is .* is not the one that was written"):
        record_data(config)
    sidecar_path(prefix).unlink()
    record_data(config)


def test_a_start_reports_that_a_large_dataset_was_only_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a start that does not say that it read only a part of its data."""
    write(tmp_path / "data", [9, 5, 7])
    checksums = written_checksums(tmp_path / "data")
    write_sidecar(tmp_path / "data", Sidecar("ab", 999, 998, 0, 3, 21, 9, 0, {}, [], [], **checksums))
    monkeypatch.setattr("megads.data.indexed.recorded.WHOLE_BYTES", 8)
    said = unverified_data(DataConfig(train=[DatasetConfig(str(tmp_path / "data"))]))
    assert "256 pieces of 64 KiB" in said and "megads dataset check" in said


def test_the_sampled_digest_covers_a_large_file_from_end_to_end(tmp_path: Path) -> None:
    """Catches a digest that covers only the beginning of a large file."""
    path = bin_path(tmp_path / "large")
    with path.open("wb") as file:
        file.truncate(WHOLE_BYTES + 12345)
    seen = {content_digest(path)}
    for position in (0, 263_000, WHOLE_BYTES + 12344):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        seen.add(content_digest(path))
    assert len(seen) == 4


def test_a_missing_record_is_accepted_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    """Catches refusing a run of an earlier version, which has no record, and a partial record read as none."""
    assert read_record(tmp_path) is None
    require_recorded(tmp_path, DataRecord(()))
    (tmp_path / DATA_FILE).write_text('{"datasets": [{"path": "a"}], "raw": []}')
    with pytest.raises(DataError, match="is not a data record"):
        read_record(tmp_path)
