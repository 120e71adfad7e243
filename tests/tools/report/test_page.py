"""The pages and charts of a report, from a run's files."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the extra [report] is not installed")

from megads.errors import ConfigError
from megads.runtime.run_dir import find_run
from megads.tools.report.config import ReportConfig
from megads.tools.report.history import read_history
from megads.tools.report.page import run_body, write_report
from tests.tools.report.written_runs import (
    BEGIN,
    write_config,
    write_eventful_run,
    write_events,
    write_start,
    write_steps,
)

VOID = {"meta", "link", "br", "img"}


class Balance(HTMLParser):
    """Fails on a tag that is never closed, or closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_self_contained(page: str) -> None:
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?\s*(?:https?:)?//""", page, re.IGNORECASE)
    assert not re.search(r"<(?:script|iframe|object|embed|img|link(?! rel=\"icon\" href=\"data:,\"))\b", page)
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    assert "default-src 'none'" in page
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


CHARTS = ("loss", "learning_rate", "grad_norm", "throughput", "step_time", "memory")


def test_one_run(tmp_path: Path) -> None:
    """Catches a missing chart, a page that loads external resources, and a message that is not escaped."""
    write_eventful_run(tmp_path)
    written = write_report(ReportConfig(run=str(tmp_path)))
    assert written.page == tmp_path / "report.html"
    assert [path.name for path in written.pictures] == [f"{name}.png" for name in (*CHARTS, "timeline", "activities")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.pictures) and written.traces == ()
    page = written.page.read_text()
    assert_self_contained(page)
    for part in (
        "eventful", "stopped on request", "624,512", "tp2 pp2 dp1", "4.3000", "step skipped", "rank 3, backward",
        "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co", "<summary>config.yaml</summary>", "restart (2)", "unigram",
    ):  # fmt: skip
        assert part in page, part
    assert len(page) < 1_000_000
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_again_and_elsewhere(tmp_path: Path) -> None:
    """Catches a report that must write into the run directory, and one that cannot replace an earlier report."""
    run_dir = tmp_path / "run"
    write_start(run_dir, 0, BEGIN)
    write_steps(run_dir, 1, 3)
    before = sorted(run_dir.iterdir())
    for name in ("report.html", "report/loss.png"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("of last time")
    written = write_report(ReportConfig(run=str(run_dir), output=str(tmp_path / "out")))
    assert written.page == tmp_path / "out" / "report.html"
    assert sorted(run_dir.iterdir()) == before
    assert written.pictures[0].read_bytes().startswith(b"\x89PNG")
    assert_self_contained(written.page.read_text())


def test_a_comparison(tmp_path: Path) -> None:
    """Catches a run that is missing from the table, and equal config keys that are listed."""
    for name in ("small", "_large"):
        write_eventful_run(tmp_path / name, name)
    config = (tmp_path / "small" / "config.yaml").read_text()
    (tmp_path / "small" / "config.yaml").write_text(config.replace("lr: 0.0003", "lr: 0.001"))
    runs = [str(tmp_path / "small"), str(tmp_path / "_large")]
    written = write_report(ReportConfig(run=runs, output=str(tmp_path / "out")))
    assert [path.name for path in written.pictures] == ["loss.png", "loss_over_steps.png", "throughput.png"]
    page = written.page.read_text()
    assert_self_contained(page)
    assert "<td>optim.lr</td><td>0.001</td><td>0.0003</td>" in page
    assert "train.seq_len" not in page
    assert page.count("_large</text>") == 4, "in the legend of every chart"


def test_each_phase_has_its_length_tokens_and_speed(tmp_path: Path) -> None:
    """Catches a step that counts for the phase before or after it, and a mean over phases of different lengths."""
    write_config(tmp_path, "growing")
    write_start(tmp_path, 0, BEGIN)
    for phase, (first, length) in enumerate(((0, 128), (3, 256)), 1):
        write_events(tmp_path, ("training_phase", {"step": first, "phase": phase, "seq_len": length}))
        write_steps(tmp_path, first + 1, first + 3, length=length, step_time_s=lambda step: 1.0 if step <= 3 else 4.0)
    page = "".join(run_body(read_history(tmp_path), []))
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("<h2>Training phases</h2>") :])
    assert cells[:7] == ["1", "1 to 3", "128", "8", "1,024", "3,072", "1,024"]
    assert cells[9:16] == ["2", "4 to 6", "256", "8", "2,048", "3,072", "512"]


def test_many_events_make_a_short_table(tmp_path: Path) -> None:
    """Catches a page of a million rows, and a failure hidden among checkpoints."""
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 3)
    write_events(tmp_path, ("failure", {"level": "error", "message": "the needle"}))
    write_events(tmp_path, *[("checkpoint_saved", {"step": step}) for step in range(500)])
    page = "".join(run_body(read_history(tmp_path), []))
    assert "the needle" in page and "more in events.jsonl" in page
    write_events(tmp_path, *[("step_skipped", {"step": step}) for step in range(500)])
    assert "".join(run_body(read_history(tmp_path), [])).count("<tr class=") == 200


def test_a_run_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run id, which the terminal shows, that is found only with its folder."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "runs" / "mine-01234567", "mine-01234567")
    assert find_run("mine-01234567") == Path("runs/mine-01234567")
    with pytest.raises(ConfigError, match=r"run = mine-0: there is no such .* runs here: runs/mine-01234567"):
        find_run("mine-0")
    shutil.rmtree("runs")
    with pytest.raises(ConfigError, match="megads train prints the id"):
        find_run("mine-0")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """Catches a traceback for a folder that cannot be written to."""
    write_steps(tmp_path, 1, 1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/x cannot be written to .*output=<folder>"):
        write_report(ReportConfig(run=str(tmp_path), output=str(tmp_path / "file" / "x")))


def test_where_the_time_went(tmp_path: Path) -> None:
    """Catches activities that the page omits, shares of something other than the wall time, and times shown for a run
    of an earlier version, which recorded none."""
    write_start(tmp_path, 0, BEGIN)
    lines = (f'{{"step": {n}, "loss": 3.0, "time": {BEGIN + 4 + n}, "step_time_s": 1.0}}\n' for n in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    write_events(
        tmp_path,
        ("failure", {"time": BEGIN + 10, "first_sign": BEGIN + 9.5, "exit_code": 10}),
        ("exit", {"time": BEGIN + 10, "exit_code": 10}),
    )
    page = "".join(run_body(read_history(tmp_path), []))
    for row in (
        '<td>train</td><td class="number">5.0</td><td class="number">50.00%</td>',
        '<td>start</td><td class="number">4.0</td><td class="number">40.00%</td>',
        '<td>lost work</td><td class="number">0.5</td><td class="number">5.00%</td>',
        '<td>stopped</td><td class="number">0.0</td>',
        '<td>wall time</td><td class="number">10.0</td><td class="number">100.00%</td>',
        "detected in 0.5 s, not recovered since, on average",
    ):
        assert row in page, row
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "step_time_s": 1.0}\n')
    assert "Where the time went" not in "".join(run_body(read_history(tmp_path), []))
