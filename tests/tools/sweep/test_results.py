"""The table, files and page of a sweep, from recorded points."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.tools.jobs import exclusive
from megads.tools.sweep.config import Choice, Direction, Interval, Space, SweepConfig
from megads.tools.sweep.points import Point, PointBook, PointState, read_points
from megads.tools.sweep.results import (
    best_command,
    make_record,
    points_to_repeat,
    ranking,
    read_record,
    summary,
    write_record,
    write_results,
)
from tests.command import StartCommand


def point(number: int, objective: float | None, repeats: int | None = None, state: str = "finished") -> Point:
    return Point(number, {"x": str(number)}, state=PointState(state), objective=objective, repeats=repeats)


def test_only_what_finished_can_win() -> None:
    """Catches a best point that was pruned, failed or diverged."""
    points = [
        point(0, 3.0),
        point(1, 1.0, state="pruned"),
        point(2, 1.0, state="failed"),
        point(3, None),
        point(4, 2.0),
    ]
    assert [ranked.point.number for ranked in ranking(points, Direction.minimize)] == [4, 0]
    assert [ranked.point.number for ranked in ranking(points, Direction.maximize)] == [0, 4]


def test_a_mean_over_seeds_beats_a_lucky_single_training() -> None:
    """Catches a best point that is best for one seed only, and a wrong spread."""
    points = [point(0, 1.0), point(1, 1.1), point(2, 1.2), point(3, 1.6, 0), point(4, 1.12, 1), point(5, 1.14, 1)]
    best, other, single = ranking(points, Direction.minimize)
    assert (best.point.number, other.point.number, single.point.number) == (1, 0, 2)
    assert best.mean == pytest.approx(1.12) and best.spread == pytest.approx(0.02)
    assert single.spread is None


def test_the_best_are_repeated_by_their_own_objective() -> None:
    """Catches repetitions that are themselves repeated."""
    points = [point(0, 2.0), point(1, 1.0), point(2, 3.0), point(3, 0.1, 0)]
    assert [p.number for p in points_to_repeat(points, Direction.minimize, 2)] == [1, 0]


SPACE: Space = {"optim.lr": Interval(1e-4, 1e-1, log=True), "model": Choice(("tiny", "demo"))}
FIXED = ("data.train=[{path: a b}]", "train.steps=9")


def write_sweep(folder: Path) -> list[Point]:
    """Writes points in every state, each with the validations of its run."""
    states = ["finished", "infeasible", "failed", "finished", "pruned", "killed"]
    book = PointBook(folder)
    for number, state in enumerate(states):
        run_dir = folder / f"run-{number}"
        point = Point(number, {"optim.lr": f"{0.001 * (number + 1):g}", "model": "demo" if number % 2 else "tiny"})
        book.record(point)
        if state != "infeasible":
            run_dir.mkdir()
            lines = [{"step": step, "valid/x/loss": 5 - number / 10 - step / 10} for step in (2, 4)]
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (run_dir / "config.yaml").write_text("run: {id: old}\noptim: {lr: 0.1}\n")
            point.run_dir, point.run_id, point.step = str(run_dir), f"run-{number}", 4
            point.overrides = [*FIXED, f"optim.lr={point.assignment['optim.lr']}", f"run.id=run-{number}"]
            point.objective = 5 - number / 10 - 0.4
        point.state, point.reason = PointState(state), "too large" if state == "infeasible" else ""
        point.exit_code = {"finished": 0, "failed": 7, "pruned": 5, "killed": -9}.get(state)
        book.record(point)
    book.close()
    return read_points(folder)


def test_the_book_survives_a_line_cut_short(tmp_path: Path) -> None:
    """Catches a sweep that cannot resume because it was killed during a write."""
    before = write_sweep(tmp_path)
    with (tmp_path / "points.jsonl").open("a") as file:
        file.write('{"number": 0, "state": "run')
    assert read_points(tmp_path) == before
    book = PointBook(tmp_path)
    book.record(Point(6, {"optim.lr": "1", "model": "tiny"}))
    book.close()
    assert [point.number for point in read_points(tmp_path)] == list(range(7))


def test_the_table_the_files_and_the_winner(tmp_path: Path) -> None:
    """Catches a lost count, value or reason, and a command for the best point that cannot be run."""
    points = write_sweep(tmp_path)
    record = make_record("tiny", FIXED, SPACE, SweepConfig())
    write_results(tmp_path, record, points)
    text = summary(record, points, 150)
    assert "1 infeasible, 2 finished, 1 pruned, 1 failed, 1 killed" in text
    assert "too large" in text and "best: point 3, loss 4.3: optim.lr=0.004 model=demo" in text
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["state"] for row in rows] == [str(point.state) for point in points]
    assert [row["optim.lr"] for row in rows] == [f"{0.001 * (number + 1):g}" for number in range(6)]
    content = json.loads((tmp_path / "results.json").read_text())
    assert [row["point"] for row in content["ranking"]] == [3, 0]
    command = shlex.split(content["best_command"])
    assert command == best_command(points[3], record)
    assert FIXED[0] in command and "run.id=run-3" not in command and command[-1] == f"run.name={record.name}-best"
    assert content["best_command"] in (tmp_path / "best.sh").read_text()
    best = (tmp_path / "experiment" / "best.yaml").read_text()
    assert best.startswith("# @package _global_\n") and "lr: 0.1" in best and "old" not in best


@pytest.mark.parametrize(
    "text",
    [
        "optim: {lr: 0.1}\nlogging: {note: '${oc.env:HOME}'}\n",
        "a: &a [x]\nb: [*a, *a]\n",
        "optim: [",
        "",
        "7",
        "\udcff",
    ],
)
def test_the_winners_config_is_no_program(tmp_path: Path, text: str) -> None:
    """Catches a config planted in a run, whose ${...} the next training would resolve: it would write environment
    variables of its user into its own config."""
    points = write_sweep(tmp_path)
    (tmp_path / "run-3" / "config.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"run-3/config.yaml: .*megads did not write this file"):
        write_results(tmp_path, make_record("tiny", FIXED, SPACE, SweepConfig()), points)
    assert not (tmp_path / "experiment" / "best.yaml").exists() and (tmp_path / "best.sh").exists()


@pytest.mark.distributed
def test_the_page_shows_every_point_and_chart(megads: StartCommand, tmp_path: Path) -> None:
    """Catches a chart that fails for a point without a value, and markup in a user's text."""
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    from megads.tools.sweep.page import write_page

    write_sweep(tmp_path)
    record = make_record("<tiny>", FIXED, SPACE, SweepConfig())
    write_record(tmp_path, record)
    page = write_page(tmp_path).read_text()
    assert "<tiny>" not in page and "&lt;tiny&gt;" in page and "too large" in page
    linked = [point for point in read_points(tmp_path) if point.run_dir and Path(point.run_dir).is_dir()]
    assert len(linked) > 1 and all(f'href="{Path(point.run_dir).name}/"' in page for point in linked)
    assert "xlink:href" in page, "the points in the charts lead to their runs, too"
    shown = megads("report", f"run={tmp_path}").end()
    assert shown.code == 0 and "best: point 3" in shown.out and "report.html" in shown.out, shown
    pictures = sorted(path.stem for path in (tmp_path / "report").glob("*.png"))
    assert pictures == ["curves", "history", "parallel", "parameter_0", "parameter_1"]


@pytest.mark.parametrize(
    ("key", "values", "logarithmic"),
    [
        ("optim.lr", [1e-3, 2e-3, 4e-3], True),
        ("optim.lr", [0.0, 1e-3], False),
        ("optim.weight_decay", [0.01, 0.1], True),
        ("model.hidden_size", [64, 128, 256], False),
        ("train.global_batch_size", [8, 64, 512], True),
    ],
)
def test_which_axes_are_logarithmic(key: str, values: list[float], logarithmic: bool) -> None:
    """Catches learning rates on a linear axis, where the smaller ones cannot be told apart."""
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    from megads.tools.sweep.page import is_logarithmic

    assert is_logarithmic(key, values) is logarithmic


def test_a_sweep_is_named_after_what_is_asked(tmp_path: Path) -> None:
    """Catches the same command starting anew, and a different one continuing another sweep's points."""
    record = make_record("tiny", FIXED, SPACE, SweepConfig())
    assert record.name == make_record("tiny", FIXED[::-1], SPACE, SweepConfig(parallel=2, retry_failed=True)).name
    assert record.name != make_record("tiny", FIXED[:1], SPACE, SweepConfig()).name
    assert record.name != make_record("tiny", FIXED, {"optim.lr": Choice(("1",))}, SweepConfig()).name
    write_record(tmp_path, record)
    write_record(tmp_path, make_record("tiny", FIXED, SPACE, SweepConfig(parallel=2)))
    assert read_record(tmp_path).settings["parallel"] == 2
    with pytest.raises(ConfigError, match="holds another sweep: its fixed is"):
        write_record(tmp_path, make_record("tiny", FIXED[:1], SPACE, SweepConfig()))


def test_a_sweep_in_progress_is_left_alone(tmp_path: Path) -> None:
    """Catches two commands that train the same points."""
    refused = pytest.raises(ConfigError, match=r"is in use by process \d+: .* or choose another folder with sweep.dir=")
    with exclusive(tmp_path, "sweep.dir"), refused, exclusive(tmp_path, "sweep.dir"):
        pass
    with exclusive(tmp_path, "sweep.dir"):
        pass
