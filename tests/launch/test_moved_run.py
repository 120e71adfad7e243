"""A run whose folders were moved: paths differ, the training does not."""

from __future__ import annotations

from typing import Any

import pytest

from megads.data.indexed.recorded import DataRecord, DatasetRecord
from megads.launch.acceptance import _without_moves


def changed(key: str, before: Any, after: Any) -> dict[str, Any]:
    return {"key": key, "before": before, "after": after, "class": "warn"}


@pytest.mark.parametrize(
    ("key", "before", "after", "expected"),
    [
        ("data.train", [{"path": "/a/x", "weight": 1.0}], [{"path": "/b/x", "weight": 1.0}], "safe"),
        ("data.train", [{"path": "/a/x", "weight": 1.0}], [{"path": "/b/x", "weight": 2.0}], "warn"),
        ("data.raw", "/a/notes", "/b/notes", "safe"),
        ("tokenizer.path", "/a/t.json", "/b/t.json", "safe"),
        ("optim.lr", 1e-3, 2e-3, "warn"),
    ],
)
def test_a_moved_path_does_not_change_the_training(key: str, before: Any, after: Any, expected: str) -> None:
    """Catches a moved run that says that it trains differently, and a changed weight that is not said."""
    assert [change["class"] for change in _without_moves([changed(key, before, after)])] == [expected]


def test_data_under_another_path_are_compared_by_content() -> None:
    """Catches data that are taken for the same by their number, and a moved dataset taken for another."""

    def record(path: str, content: str) -> DataRecord:
        return DataRecord((DatasetRecord(path, 1, 2, "index", content, None),))

    assert record("/a/x", "c").is_same_as(record("/b/x", "c"))
    assert not record("/a/x", "c").is_same_as(record("/b/x", "d"))
    assert not record("/a/x", "c").is_same_as(DataRecord(()))
