"""The run's ledger of metrics: exact values, complete lines, truncation on resume."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from megads.runtime.metrics import EventWriter, LedgerRecord, MetricHistory, MetricsWriter, read_json_lines
from tests.distributed import run_ranks


def steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_json_lines(run_dir / "metrics.jsonl")]


def test_floats_keep_every_digit(tmp_path: Path) -> None:
    """Catches rounding: resumed runs are compared bit for bit through this file."""
    writer = MetricsWriter(tmp_path, enabled=True)
    values = [0.1 + 0.2, 1 / 3, 5e-324, math.inf]
    writer.write({"step": 1, "values": values})
    assert next(read_json_lines(tmp_path / "metrics.jsonl"))["values"] == values


def test_lines_are_on_disk_at_once_and_only_when_enabled(tmp_path: Path) -> None:
    """Catches buffered lines lost with a kill -9, and every rank writing the file."""
    writer = MetricsWriter(tmp_path, enabled=True)
    MetricsWriter(tmp_path, enabled=False).write({"step": 7})
    writer.write({"step": 1})
    assert steps(tmp_path) == [1]


def test_threads_write_every_line_once(tmp_path: Path) -> None:
    """Catches event lines lost or repeated when threads write at once, such as a monitoring and the training thread."""
    writer, waiting = EventWriter(tmp_path, enabled=True), threading.Barrier(8)
    interval = sys.getswitchinterval()

    def write(thread: int) -> None:
        waiting.wait()
        for line in range(200):
            writer.write("line", thread=thread, line=line)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
    finally:
        sys.setswitchinterval(interval)
    found = [(record["thread"], record["line"]) for record in read_json_lines(tmp_path / "events.jsonl")]
    assert sorted(found) == list(product(range(8), range(200)))


def test_resume_drops_later_lines(tmp_path: Path) -> None:
    """Catches steps that occur twice after a resume from an older checkpoint, and an intact ledger called damaged."""
    writer = MetricsWriter(tmp_path, enabled=True)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.0})
        if step % 2 == 0:
            writer.write({"step": step, "valid/x/loss": 1.0})
    writer.close()
    resumed = MetricsWriter(tmp_path, enabled=True)
    assert resumed.drop_after(4) == "" and not (tmp_path / "metrics.1.jsonl").exists()
    resumed.write({"step": 5, "loss": 2.0})
    assert steps(tmp_path) == [1, 2, 2, 3, 4, 4, 5]
    assert list(read_json_lines(tmp_path / "metrics.jsonl"))[-1]["loss"] == 2.0
    resumed.drop_after(0)
    assert steps(tmp_path) == []


def written(run_dir: Path, last: int) -> tuple[MetricsWriter, LedgerRecord]:
    """A ledger of steps 1 to `last`, and its record after the step before `last`."""
    writer = MetricsWriter(run_dir, enabled=True)
    for step in range(1, last):
        writer.write({"step": step, "loss": 1.0 / step})
    known = writer.record()
    writer.write({"step": last, "loss": 1.0 / last})
    assert known is not None
    return writer, known


@pytest.mark.parametrize(
    ("change", "said", "left"),
    [
        (lambda text: text, "", [1, 2, 3, 4, 5, 6]),
        (lambda text: text + b'{"step": 8, "lo', "", [1, 2, 3, 4, 5, 6]),
        (lambda text: text.replace(b'"step": 3,', b'"step" 3,'), "1 of its lines cannot be read", [1, 2, 4, 5, 6]),
        (lambda text: text.replace(b"3,", b'"3",'), "1 of its lines cannot be read, steps missing: 3", [1, 2, 4, 5, 6]),
        (lambda text: text.replace(b'"step": 3,', b'"step": 9,'), "steps missing: 3", [1, 2, 4, 5, 6]),
        (lambda text: text.replace(b"0.25", b"0.75"), "it has changed since the checkpoint", [1, 2, 3, 4, 5, 6]),
        (lambda text: text[: text.index(b'{"step": 5')], "it ends at step 4 of 6", [1, 2, 3, 4]),
        (lambda text: b"", "it ends at step 0 of 6", []),
    ],
)  # fmt: skip
def test_a_damaged_ledger_is_repaired(
    change: Callable[[bytes], bytes], said: str, left: list[int], tmp_path: Path
) -> None:
    """Catches a flipped bit that truncates everything after it, a lost tail that is not reported, and a repair that
    keeps no copy of the damaged file."""
    _, known = written(tmp_path, 7)
    path = tmp_path / "metrics.jsonl"
    found = change(path.read_bytes())
    path.write_bytes(found)
    writer = MetricsWriter(tmp_path, enabled=True)
    note = writer.drop_after(6, known)
    assert steps(tmp_path) == left and said in note and bool(said) == bool(note)
    if said:
        assert "metrics.1.jsonl" in note and (tmp_path / "metrics.1.jsonl").read_bytes() == found
    writer.write({"step": 7})
    again = writer.record()
    assert MetricsWriter(tmp_path, enabled=True).drop_after(7, again) == "" and steps(tmp_path) == [*left, 7]


def test_a_damaged_ledger_without_a_record_keeps_its_tail(tmp_path: Path) -> None:
    """Catches a flipped bit that truncates everything after it when the checkpoint has no record of the ledger."""
    path = tmp_path / "metrics.jsonl"
    written(tmp_path, 7)
    path.write_bytes(path.read_bytes().replace(b'"step": 3,', b'"step" 3,'))
    assert "1 of its lines cannot be read" in MetricsWriter(tmp_path, enabled=True).drop_after(6)
    assert steps(tmp_path) == [1, 2, 4, 5, 6]


def test_a_line_out_of_order_is_cut_off_with_the_rest(tmp_path: Path) -> None:
    """Catches a truncation in the middle of a line, after an orphan of an earlier start has appended a line."""
    writer, known = written(tmp_path, 7)
    writer.write({"step": 5, "loss": 9.0})
    assert writer.drop_after(6, known) == ""
    lines = list(read_json_lines(tmp_path / "metrics.jsonl"))
    assert [(line["step"], line["loss"]) for line in lines] == [(step, 1.0 / step) for step in range(1, 7)]
    assert (tmp_path / "metrics.jsonl").stat().st_size == known.bytes


def test_replaced_lines_are_kept_in_a_copy(tmp_path: Path) -> None:
    """Catches a fresh start that keeps no copy of the old run's losses, and a resume that copies steps it repeats."""
    writer, known = written(tmp_path, 7)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert writer.drop_after(6, known) == "" and not (tmp_path / "metrics.1.jsonl").exists()
    writer.write({"step": 7, "loss": 1.0 / 7})
    assert "metrics.1.jsonl" in writer.drop_after(0, keep_copy=True)
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == before and steps(tmp_path) == []
    writer.write({"step": 1})
    assert "metrics.2.jsonl" in writer.drop_after(0, keep_copy=True)
    assert writer.drop_after(0, keep_copy=True) == ""


def test_a_partial_line_does_not_corrupt_the_next(tmp_path: Path) -> None:
    """Catches a partial line, left by a kill during a write, that corrupts the next line, too."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    writer = MetricsWriter(tmp_path, enabled=True)
    writer.write({"step": 2})
    assert steps(tmp_path) == [1, 2]
    writer.drop_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def on_a_full_disk(run_dir: Path) -> list[object]:
    """Writes lines while files are limited to 100 bytes, and after; returns the error, the size then, and a record."""
    writer, limits = MetricsWriter(run_dir, enabled=True), resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    for step in range(1, 20):
        writer.write({"step": step, "loss": 0.5})
    try:
        told: object = writer.record()
    except OSError as error:
        told = error.strerror
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    size = (run_dir / "metrics.jsonl").stat().st_size
    writer.write({"step": 20})
    return [told, size, writer.record()]


@pytest.mark.distributed
def test_a_full_disk_loses_no_ledger_line(tmp_path: Path) -> None:
    """Catches a run that fails, or lines that are lost or truncated, because the ledger's disk was full for a while."""
    [[told, size, after]] = run_ranks(on_a_full_disk, 1, tmp_path)
    assert (told, size) == ("No space left on device", 100)
    assert steps(tmp_path) == list(range(1, 21))
    assert MetricsWriter(tmp_path, enabled=True).record() == after


def test_two_writers_of_events_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """Catches launcher and rank 0 overwriting each other's events."""
    one, two = EventWriter(tmp_path), EventWriter(tmp_path)
    one.write("launch", ranks=2)
    two.write("start", step=0)
    one.write("exit", exit_code=0)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["launch", "start", "exit"]
    assert all(line["time"] > 1.7e9 for line in lines)


def test_finite_values_of_one_metric_are_read(tmp_path: Path) -> None:
    """Catches values of another metric, non-finite values, a line that is read while incomplete and then never again,
    and values of steps that were dropped."""
    history, metrics = MetricHistory(tmp_path, "valid/a/loss"), MetricsWriter(tmp_path, enabled=True)
    assert history.values() == {}
    for step, value in enumerate((3.0, math.nan, None, math.inf, 2), 1):
        metrics.write({"step": step, "loss": 0.5})
        metrics.write({"step": step, "valid/a/loss": value, "valid/b/loss": 1.0, "note": "valid/a/loss"})
    assert history.values() == {1: 3.0, 5: 2}
    line = json.dumps({"step": 6, "valid/a/loss": 1.5}) + "\n"
    path = tmp_path / "metrics.jsonl"
    for part in (line[:14], line[14:]):
        assert history.values() == {1: 3.0, 5: 2}
        with path.open("a") as file:
            file.write(part)
    assert history.values() == {1: 3.0, 5: 2, 6: 1.5}
    metrics.drop_after(4)
    assert history.values() == {1: 3.0}
