"""Tests the key numbers at the top of a report."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from megads.config.frozen import freeze
from megads.data.config import DatasetConfig
from megads.monitor.accounting import Accounting, Activity, Period
from megads.runtime.lease import claimed
from megads.runtime.run_dir import CONFIG_FILE
from megads.tools.report.history import read_history
from megads.tools.report.summary import facts, key_numbers, short, size, status
from tests.tools.report.written_runs import (
    BEGIN,
    write_config,
    write_eventful_run,
    write_events,
    write_start,
    write_steps,
    write_validation,
)


def test_an_eventful_run(tmp_path: Path) -> None:
    """Catches the last loss shown as the best one, and a number without its reference value."""
    write_eventful_run(tmp_path)
    write_validation(tmp_path, 301, 5.0)
    history = read_history(tmp_path)
    shown = {item.label: (item.value, item.note) for item in key_numbers(history)}
    assert shown["validation loss"] == ("5.0000", "best 4.3000 at step 300, unigram 6.2000")
    assert shown["perplexity"] == ("148.4", "of validation at step 301")
    assert shown["train loss"][1] == "mean of the last 10 steps; 1 of all not finite"
    assert shown["tokens"] == ("307.2 k", "2,400 samples")
    assert shown["running time"][0] == "2m51s", "55 s, 62 s and 54 s"
    assert status(history) == ("stopped on request", "open")
    rows = dict(facts(history))
    assert rows["steps"] == "300 of 1,000 planned"
    assert (rows["parameters"], rows["layout"], rows["skipped steps"], rows["starts"]) == (
        "624,512",
        "tp2 pp2 dp1",
        "2",
        "3",
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, ("finished", "good")),
        (7, ("numerical failure, exit 7", "bad")),
        (1, ("failed, exit 1", "bad")),
        (10, ("a rank was killed, exit 10", "bad")),
    ],
)
def test_status(tmp_path: Path, code: int, expected: tuple[str, str]) -> None:
    """Catches a failed run that looks finished."""
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 1)
    assert status(read_history(tmp_path)) == ("ended without a record: killed, or its node was lost", "bad")
    with claimed(tmp_path):
        assert status(read_history(tmp_path)) == ("in progress", "open")
    write_events(tmp_path, ("exit", {"exit_code": code}))
    assert status(read_history(tmp_path)) == expected


def test_a_run_that_ended_after_it_was_read(tmp_path: Path) -> None:
    """Catches a live page that reports a run as killed which has just finished."""
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 1)
    history = read_history(tmp_path)
    write_events(tmp_path, ("exit", {"exit_code": 0}))
    assert status(history) == ("in progress", "open")


def test_nothing_but_steps(tmp_path: Path) -> None:
    """Catches a summary that needs a config, events or finite losses."""
    write_steps(tmp_path, 1, 2, loss=lambda step: math.nan)
    history = read_history(tmp_path)
    assert next(item for item in key_numbers(history) if item.label == "train loss").value == "not finite"
    assert dict(facts(history))["steps"] == "2"


def test_a_changed_layout_and_engine_are_shown(tmp_path: Path) -> None:
    """Catches a resumed run that shows only its last layout or engine."""
    write_config(tmp_path, "moved")
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 2)
    assert "engine" not in dict(facts(read_history(tmp_path)))
    write_events(tmp_path, *(("start", {"layout": "tp1 pp1 dp4", "engine": name}) for name in ("native", "deepspeed")))
    shown = dict(facts(read_history(tmp_path)))
    assert (shown["layout"], shown["engine"]) == ("tp2 pp2 dp1 -> tp1 pp1 dp4", "native -> deepspeed")


def test_the_share_of_effective_time_names_its_whole(tmp_path: Path) -> None:
    """Catches a share of another time than the one beside it: the command starts before its ranks."""
    write_config(tmp_path, "timed")
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 20)
    history = read_history(tmp_path)
    accounting = Accounting(
        (Period(0, 60_000_000, Activity.start), Period(60_000_000, 100_000_000, Activity.train)), ()
    )
    timed = {item.label: item for item in key_numbers(dataclasses.replace(history, accounting=accounting))}
    assert (
        timed["effective time"].value == "40.0%"
        and "of 1m40s from the first command on" in timed["effective time"].note
    )
    assert "wall time" not in timed


def test_datasets_are_shown_by_their_paths(tmp_path: Path) -> None:
    """Catches `tokens` as the data of every run that prepared its text itself."""
    config = write_config(tmp_path, "run")
    config.data.train = [DatasetConfig(path="runs/data-cache/4a1b/tokens"), DatasetConfig(path="notes/data")]
    freeze(config, tmp_path / CONFIG_FILE)
    write_steps(tmp_path, 1, 2)
    assert dict(facts(read_history(tmp_path)))["data"] == "runs/data-cache/4a1b/tokens, notes/data"


def test_numbers_are_short() -> None:
    """Catches a unit off by a thousand."""
    assert [short(value) for value in (7, 12_345, 2.5e9, math.inf)] == ["7", "12.35 k", "2.5 B", "not finite"]
    assert [size(value) for value in (10, 5 * 2**20, 3.5 * 2**40)] == ["10 B", "5 MiB", "3.5 TiB"]
