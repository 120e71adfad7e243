from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.data.sidecar import Sidecar, read_sidecar, write_sidecar
from megads.errors import DataError

SIDECAR = Sidecar("ab" * 32, 300, 299, 0, 5, 100, 400, 1, {"not JSON": 1}, ["a:1: not JSON"], ["a"])


def test_round_trip(tmp_path: Path) -> None:
    """Catches a field that is not written or not read."""
    assert read_sidecar(tmp_path / "d") is None
    write_sidecar(tmp_path / "d", SIDECAR)
    assert read_sidecar(tmp_path / "d") == SIDECAR


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    """Catches an added field making every older release refuse the dataset."""
    write_sidecar(tmp_path / "d", SIDECAR)
    content = json.loads((tmp_path / "d.json").read_text())
    (tmp_path / "d.json").write_text(json.dumps({**content, "new_field": 1}))
    assert read_sidecar(tmp_path / "d") == SIDECAR


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_file_that_is_no_sidecar_is_refused(tmp_path: Path, content: str) -> None:
    """Catches a traceback for a truncated sidecar, and an unknown version read as if known."""
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(DataError, match=r"d.json: is no sidecar"):
        read_sidecar(tmp_path / "d")
