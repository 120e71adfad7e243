from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from megads.data import progress
from megads.data.progress import ByteProgress

PROGRAM = """
from megads.data.progress import ByteProgress
with ByteProgress("reading", 2_000_000) as progress:
    progress.update(1_000_000, "5 tokens")
    progress.update(2_000_000, "9 tokens")
"""


def test_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches control characters of a bar in a log file, and a division by zero in an empty pass."""
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    with ByteProgress("reading", 0) as empty:
        empty.update(0)
    with ByteProgress("reading", 4_000_000) as shown:
        shown.update(1_000_000, "5 tokens")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("reading: 25% of 4.0 MB, ") and lines[0].endswith(" s left, 5 tokens")
    assert "\x1b" not in lines[0]


def test_a_bar_on_a_terminal() -> None:
    """Catches a bar that fails on a real terminal, which no captured test sees."""
    ours, theirs = pty.openpty()
    process = subprocess.run([sys.executable, "-c", PROGRAM], stderr=theirs, check=False)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert process.returncode == 0, shown
    assert "reading" in shown and "9 tokens" in shown
