from __future__ import annotations

import os
from pathlib import Path

import pytest

from megads.data import content_digest
from megads.data.content_digest import ContentDigests, file_state, require_unchanged
from megads.errors import DataError


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A memory that trusts the times of files at once."""
    monkeypatch.setattr(content_digest, "SETTLED_NS", -1)
    return tmp_path / "memory.json"


def digest(memory: Path, path: Path) -> str:
    digests = ContentDigests(memory)
    [(_, found)] = digests.of([path])
    digests.save()
    return found


def forge(memory: Path, old: str, new: str) -> None:
    """Changes what is remembered, so that an answer from memory shows."""
    memory.write_text(memory.read_text().replace(old, new))


def test_an_unchanged_file_is_not_read_again(memory: Path, tmp_path: Path) -> None:
    """Catches a second start that reads a terabyte to find that nothing changed."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = digest(memory, path)
    assert digest(memory, path) == first
    forge(memory, first, "remembered")
    assert digest(memory, path) == "remembered"


def test_content_decides_where_times_changed(memory: Path, tmp_path: Path) -> None:
    """Catches a touched file that is tokenized again, and a change hidden by its old time and size."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = digest(memory, path)
    os.utime(path, (1, 1))
    assert digest(memory, path) == first
    path.write_text("two")
    os.utime(path, (1, 1))
    assert digest(memory, path) != first


def test_a_file_just_written_is_not_trusted(tmp_path: Path) -> None:
    """Catches a second write within one tick of the clock, which leaves size and times as they were."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    digest(tmp_path / "memory.json", path)
    assert not (tmp_path / "memory.json").exists()


def test_damaged_memory_is_forgotten(memory: Path, tmp_path: Path) -> None:
    """Catches a start that fails because of a file that is only there to save time."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = digest(memory, path)
    for content in (b"", b"[]", b'{"a": 1}', b"\xff"):
        memory.write_bytes(content)
        assert digest(memory, path) == first


def test_a_file_that_changes_or_vanishes_is_refused(tmp_path: Path) -> None:
    """Catches tokens of one text under the hash of another."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    state = file_state(path)
    require_unchanged(path, state)
    path.write_text("more")
    with pytest.raises(DataError, match="changed while it was read"):
        require_unchanged(path, state)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        require_unchanged(path, state)
