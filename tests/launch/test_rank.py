"""A rank's log, and its record of how it ended, on disks that cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megads.launch.rank_outcome import clear_records, read_exits, read_failures
from megads.runtime.run_dir import exit_path, failure_path, rank_log_path, spare_path

RANK = """
import sys
from pathlib import Path
from megads.errors import DataError
from megads.launch.rank import run_rank
def fail():
    raise DataError("no such file")
run_rank(Path(sys.argv[1]), fail if sys.argv[2] == "fail" else lambda: 5)
"""
LOG = """
import ctypes, os, resource, sys
from pathlib import Path
from megads.launch.rank import redirect_output
redirect_output(Path(sys.argv[1]))
print("na\\u00efve \\U0001f680 \\udcff")
sys.stderr.write("to stderr\\n")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), hard))
libc = ctypes.CDLL(None, use_errno=True)
for line in range(1000):
    print(f"line {line}")
    sys.stderr.write(f"error {line}\\n")
    libc.dprintf(2, b"from C %d\\n", line)
    libc.printf(b"buffered in C %d\\n", line)
libc.fflush(None)
sys.stdout.flush()
"""
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def end_of(program: str, *arguments: object, **environment: str) -> int:
    """Runs a program whose stdout is discarded; returns its exit code."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | ENVIRONMENT | environment, stdout=subprocess.DEVNULL, timeout=60, check=False
    ).returncode


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Path]:
    """The folder of spare records of the run in tmp_path."""
    folder = spare_path(exit_path(tmp_path, 0)).parent
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def no_logs(run_dir: Path) -> None:
    """Leaves the logs folder missing."""


def logs_are_a_file(run_dir: Path) -> None:
    (run_dir / "logs").write_text("a file")


@pytest.mark.parametrize("prepare", [no_logs, logs_are_a_file])
def test_an_exit_record_falls_back_to_a_spare_folder(
    tmp_path: Path, spare: Path, prepare: Callable[[Path], None]
) -> None:
    """Catches a rank whose failure or exit is not recorded because the run's disk cannot be written, and a record of an
    earlier start that is used for this one."""
    prepare(tmp_path)
    assert end_of(RANK, tmp_path, "fail") == 3
    (failure,) = read_failures(tmp_path, range(2))
    assert (failure.rank, failure.exit_code, failure.message) == (0, 3, "no such file")
    assert end_of(RANK, tmp_path, "return") == 0
    assert read_exits(tmp_path, range(2)) == {0: 5}
    assert {path.name for path in spare.iterdir()} == {failure_path(tmp_path, 0).name, exit_path(tmp_path, 0).name}
    assert spare.stat().st_mode & 0o777 == 0o700
    clear_records(tmp_path)
    assert list(spare.iterdir()) == []
    assert (read_failures(tmp_path, range(2)), read_exits(tmp_path, range(2))) == ([], {})


def test_the_record_in_the_runs_folder_takes_precedence(tmp_path: Path, spare: Path) -> None:
    """Catches a spare record in the temporary folder, of any start, that hides the one in the run's folder."""
    assert end_of(RANK, tmp_path, "return") == 0
    (tmp_path / "logs").mkdir()
    exit_path(tmp_path, 0).write_text('{"rank": 0, "exit_code": 6}')
    assert read_exits(tmp_path, range(1)) == {0: 6}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rank": 0}', '{"rank": "x", "exit_code": []}', "\x00" * 40])
def test_a_damaged_exit_record_is_ignored(text: str, tmp_path: Path, spare: Path) -> None:
    """Catches a launcher that ends in a traceback if a rank's record is truncated, by a full disk for instance."""
    (tmp_path / "logs").mkdir()
    for path in (failure_path(tmp_path, 0), exit_path(tmp_path, 0)):
        path.write_text(text)
    assert (read_failures(tmp_path, range(1)), read_exits(tmp_path, range(1))) == ([], {})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_exit_record_is_ignored(tmp_path: Path, spare: Path) -> None:
    """Catches another user of the node whose records end a run, or make a failed one look finished."""
    assert end_of(RANK, tmp_path, "return") == 0 and end_of(RANK, tmp_path, "fail") == 3
    os.chown(spare, 12345, -1)
    assert (read_failures(tmp_path, range(1)), read_exits(tmp_path, range(1))) == ([], {})


@pytest.mark.parametrize("room", [0, 4096])
def test_a_full_disk_costs_only_log_lines(tmp_path: Path, room: int) -> None:
    """Catches a rank that ends because the disk of its log is full, or an ASCII locale cannot encode a character."""
    log = rank_log_path(tmp_path, 0)
    assert end_of(LOG, log, room, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == 0
    text = log.read_text()
    assert text.startswith("naïve 🚀 \\udcff\nto stderr\n")
    assert len(log.read_bytes()) == max(room, len(text.encode()))
    assert ("line 0\nerror 0\nfrom C 0\n" in text) == bool(room)
