from __future__ import annotations

from pathlib import Path

import pytest

from megads.runtime.atomic_file import atomic_writer


def test_a_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    """Catches a writer that truncates the target first, or litters the folder."""
    path = tmp_path / "file"
    with atomic_writer(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), atomic_writer(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    """Catches temporaries with a shared name: the content would be a mixture."""
    path = tmp_path / "file"
    with atomic_writer(path) as first:
        first.write(b"first")
        with atomic_writer(path) as second:
            second.write(b"second, longer")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
