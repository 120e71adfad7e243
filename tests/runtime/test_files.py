"""Files that other processes may write, replace or leave incomplete."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megads.config.frozen import config_of_start, load_frozen
from megads.data.indexed.recorded import read_record
from megads.data.indexed.sidecar import read_sidecar
from megads.errors import ConfigError, DataError
from megads.runtime.files import atomic_writer, is_readable, parse_json, read_regular
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.stop import read_stop
from megads.tools.generate import dataset_prefixes
from megads.tools.report.history import read_steps
from megads.tools.sweep.results import read_record as read_sweep


def test_a_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    """Catches a writer that truncates the target first, or leaves temporary files."""
    path = tmp_path / "file"
    with atomic_writer(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), atomic_writer(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    """Catches temporary files with a shared name: the content would be a mixture."""
    path = tmp_path / "file"
    with atomic_writer(path) as first:
        first.write(b"first")
        with atomic_writer(path) as second:
            second.write(b"second, longer")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


NESTED = "[" * 200_000


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Kills a reader that waits for a writer, so that the test fails."""
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_fifos_and_devices_are_not_read(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Catches a reader that hangs on a FIFO without a writer, and a device that is read until memory is full."""
    path = tmp_path / "file"
    make(path)
    with pytest.raises(OSError, match="file"):
        read_regular(path)
    with pytest.raises(ConfigError, match=r"events\.jsonl is no regular file: remove it"):
        path.rename(tmp_path / "events.jsonl")
        EventWriter(tmp_path)
    with pytest.raises(ConfigError, match=r"events\.jsonl is no regular file"):
        list(read_json_lines(tmp_path / "events.jsonl"))


def test_endless_nesting_is_a_value_error() -> None:
    """Catches a parser that overflows the stack and raises an error other than ValueError, which no handler catches."""
    with pytest.raises(ValueError, match="nested without end"):
        parse_json(NESTED)


def test_readers_of_a_run_survive_anything_in_its_place(tmp_path: Path) -> None:
    """Catches a reader that ends in a traceback."""
    names = ("corpus.json", "data_record.json", "sweep.yaml", "config.yaml", "events.jsonl", "stop")
    (tmp_path / "timeline").mkdir()
    for content in (NESTED, "7", "null", "[]", '"text"', "{}", "NaN", "1" * 5000, "\ufffd"):
        for name in (*names, "timeline/step_00000002.rank_00000.json"):
            (tmp_path / name).write_text(content)
        for read, folder, error in (
            (read_sidecar, tmp_path / "corpus", DataError),
            (read_record, tmp_path, DataError),
            (read_sweep, tmp_path, ConfigError),
            (load_frozen, tmp_path / "config.yaml", ConfigError),
        ):
            with pytest.raises(error):
                read(folder)
        assert read_stop(tmp_path) and config_of_start(tmp_path, "0" * 64) is None
        assert dataset_prefixes(tmp_path) == [] and read_steps(tmp_path) == {}
        assert all(isinstance(event, dict) for event in read_json_lines(tmp_path / "events.jsonl"))


def test_a_file_that_appears_meanwhile_is_read(tmp_path: Path) -> None:
    """Catches two checks of a file that race with the run that creates it: the file was then rejected."""
    path, over = tmp_path / "metrics.jsonl", threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            path.touch()
            path.unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {is_readable(path) for _ in range(20_000)} == {True, False}
    finally:
        over.set()
        thread.join()


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """Catches a folder, a pipe on which a read hangs, and a symbolic link that is broken or points to itself."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "nowhere", "loop", "."):
        with pytest.raises(ConfigError, match="is no regular file"):
            is_readable(tmp_path / name)
    assert is_readable(tmp_path / "link")
    assert not is_readable(tmp_path / "gone") and not is_readable(tmp_path / "file" / "in a file")
