"""docs/api.md lists what megads.api declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megads.api

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.always
def test_the_page_lists_every_name_with_what_it_is() -> None:
    """Catches a name that was added or moved without `make docs`, and one without documentation."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "docs" / "api.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    rows = [
        line.split(" | ") for line in (REPOSITORY / "docs" / "api.md").read_text().splitlines() if line[:3] == "| `"
    ]
    assert sorted(name.strip("| `") for name, _ in rows) == dir(megads.api)
    assert [name for name, text in rows if len(text.strip(" |")) < 2] == []
