"""The tracker process with a fake tracker; tests/monitor/test_trackers.py starts the real ones next to runs."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.monitor.trackers import RunDescription
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.runtime.registry import TRACKERS
from megads.tools.trackers import process as tracker


@dataclass
class Options:
    """No options."""


class ToFile:
    """Writes the calls it receives to a file of the run; fails as often as another file says."""

    rewinds = True
    first_step: int | None = None

    def __init__(self, options: Options, run: RunDescription, step: int) -> None:
        self._path = run.run_dir / "told"
        left = run.run_dir / "failures"
        if left.exists() and int(left.read_text()):
            left.write_text(str(int(left.read_text()) - 1))
            raise ConnectionError("no route to the server\nand more")
        self._say("open", step)

    def _say(self, *words: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def rewind(self, step: int) -> None:
        self._say("rewind", step)

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        self._say("metrics", record["step"])

    def add_event(self, event: Mapping[str, Any]) -> None:
        self._say("event", event["event"])

    def flush(self) -> None:
        pass

    def finish(self, table: Mapping[str, int | float], events: Sequence[Mapping[str, Any]]) -> None:
        self._say("finish", dict(table), len(events))


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Directory of a finished run: one start with two steps, and its exit."""
    TRACKERS.register("to_file", Options)(ToFile)
    (tmp_path / "logs").mkdir()
    metrics, events = MetricsWriter(tmp_path, True), EventWriter(tmp_path)
    events.write("launch", time=100.0)
    events.write("start", time=101.0, step=0)
    for step in (1, 2):
        metrics.write({"step": step, "samples": 8 * step, "loss": 3.0 - step})
    events.write("exit", time=112.5, exit_code=0)
    yield tmp_path
    TRACKERS._parts.pop("to_file")
    assert not multiprocessing.active_children()


def in_a_process(function: Callable[..., int], *arguments: Any) -> int:
    """Calls a function in a process of its own, which holds the lock until it exits; returns its result."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(function(*arguments)))
    process.start()
    process.join()
    return int(process.exitcode or 0)


def track(run_dir: Path) -> int:
    config = LoggingConfig(trackers={"to_file": {}})
    run = RunDescription("mine", run_dir, {})
    return in_a_process(tracker._track, run, config, {"to_file": WandbMode.offline})


def told(run_dir: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (run_dir / "told").read_text().splitlines()]


def events_of(run_dir: Path) -> list[tuple[str, str]]:
    found = read_json_lines(run_dir / "events.jsonl")
    return [(event["event"], event["message"]) for event in found if "tracker" in event["event"]]


@pytest.mark.always
def test_a_tracker_started_by_hand_sends_every_record_once(run_dir: Path) -> None:
    """Catches a record that is lost or sent twice, and a final table without a known value."""
    assert track(run_dir) == 0
    table = {"steps": 2, "samples": 16, "loss": 1.0, "skipped_steps": 0, "checkpoints": 0, "starts": 1}
    assert told(run_dir) == [
        ["open", 0],
        ["metrics", 1],
        ["metrics", 2],
        ["event", "launch"],
        ["event", "start"],
        ["event", "exit"],
        ["finish", table | {"wall_s": 12.5, "exit_code": 0}, 3],
    ]
    assert track(run_dir) == 0
    assert told(run_dir)[7:] == [["open", 2], ["finish", table | {"wall_s": 12.5, "exit_code": 0}, 3]]
    assert events_of(run_dir) == []


def test_a_tracker_started_by_hand_reports_a_failure(run_dir: Path) -> None:
    """Catches a failure with exit code 0, or without a one-line message that names its cause."""
    (run_dir / "failures").write_text("1")
    assert track(run_dir) == 1
    [(event, message)] = events_of(run_dir)
    assert event == "tracker_failed"
    assert message.startswith(
        "to_file: ConnectionError: no route to the server; python -m megads.tools.trackers.process "
    )
    assert message.endswith(f"{run_dir} sends what is missing")
    assert track(run_dir) == 0 and told(run_dir)[0] == ["open", 0]


def test_only_one_process_tracks_a_run(run_dir: Path) -> None:
    """Catches two processes that send everything twice."""

    def locks_twice() -> int:
        tracker._lock(run_dir, None, 0.0)
        with pytest.raises(ConfigError, match="another tracker process is at work"):
            tracker._lock(run_dir, None, 0.0)
        return 0

    assert in_a_process(locks_twice) == 0


def test_the_final_table_describes_the_last_start() -> None:
    """Catches a count of the wrong event, the exit code or wall time of an earlier start, and rows without a value."""
    names = [
        "launch",
        "start",
        "checkpoint_saved",
        "exit",
        "launch",
        "start",
        "step_skipped",
        "exit",
        "checkpoint_saved",
    ]
    events: list[dict[str, Any]] = [{"event": name, "time": 10.0 * at} for at, name in enumerate(names)]
    events[3]["exit_code"], events[7]["exit_code"] = 10, 5
    step = {"step": 7, "tokens": 70, "samples": 14, "loss": 2.5, "mfu": 0.25, "tokens_per_s": 9.0, "lr": 1.0}
    found = tracker._final_table(step, {"step": 5, "valid/a/loss": 3.5, "valid/a/ppl": 33.1}, events)
    assert found == {
        "steps": 7, "samples": 14, "tokens": 70, "loss": 2.5, "valid/a/loss": 3.5, "valid/a/ppl": 33.1,
        "tokens_per_s": 9.0, "mfu": 0.25, "skipped_steps": 1, "checkpoints": 2, "starts": 2, "wall_s": 40.0,
        "exit_code": 5,
    }  # fmt: skip
    assert tracker._final_table({}, {}, []) == {"skipped_steps": 0, "checkpoints": 0, "starts": 0}


@pytest.mark.parametrize(
    ("trackers", "code", "said"),
    [({}, 0, "no tracker is switched on"), ({"other": {}}, 2, "the tracker other is of a plugin")],
)
def test_tracking_without_a_known_tracker_says_so(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trackers: dict[str, dict[str, Any]],
    code: int,
    said: str,
) -> None:
    """Catches a traceback where no tracker is configured, or where the plugin of a tracker is not given."""
    config = RootConfig()
    config.run.id, config.run.dir, config.logging.trackers = "mine", str(run_dir), trackers
    config.logging.wandb.mode = WandbMode.disabled
    freeze(config, run_dir / "config.yaml")
    monkeypatch.setattr("sys.argv", ["tracker", str(run_dir)])
    assert tracker.main() == code
    out, err = capsys.readouterr()
    assert said in out + err
