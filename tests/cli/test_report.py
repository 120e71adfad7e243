"""Tests `megads report` with real processes and a trained run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megads.data.indexed.writer import IndexedDatasetWriter
from tests.command import REPOSITORY, StartCommand
from tests.tools.report.written_runs import write_config


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "run has no value: it must be set, for example run=<value>"),
        (("run=runs/nothing",), "run = runs/nothing: there is no such run directory, and no run of that id in runs/"),
        (("run=started",), "metrics.jsonl has no step yet"),
        (("run=[started,.]",), "set it, for example output=runs/comparison"),
        (("runs=started",), "unknown key runs: did you mean run?"),
    ],
)
def test_report_errors_are_one_readable_message(
    megads: StartCommand, arguments: tuple[str, ...], expected: str
) -> None:
    """Catches tracebacks and exit code 1 for a user's mistake, and files left by a failed report."""
    write_config(megads.folder / "started", "started")
    result = megads("report", *arguments).end()
    assert result.code == 2
    assert expected in result.err
    assert "Traceback" not in result.err
    assert [path.name for path in megads.folder.iterdir()] == ["started"]
    assert [path.name for path in (megads.folder / "started").iterdir()] == ["config.yaml"]


def test_report_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    """Catches a traceback if the extra is not installed, and an entry point that imports it."""
    program = (
        "import sys; sys.modules['matplotlib'] = None; from megads.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "report", "run=x"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "matplotlib is not installed: pip install 'megads[report]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.distributed
def test_report_help_explains_every_key(megads: StartCommand) -> None:
    """Catches a key that the help does not explain."""
    result = megads("report", "--help").end()
    assert result.code == 0
    assert all(part in result.out for part in ("run=<run directory>", "output=<folder>", "Exit codes: 0 finished"))


@pytest.mark.always
@pytest.mark.distributed
def test_report_reads_what_training_writes(megads: StartCommand, tmp_path: Path) -> None:
    """Catches metrics and events that training writes but the report cannot read."""
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    with IndexedDatasetWriter(tmp_path / "corpus", np.int32) as writer:
        for seed in range(40):
            writer.append(np.random.default_rng(seed).integers(0, 512, 200).tolist())
    trained = megads(
        "train", "model=tiny", "model.vocab_size=512", f"data.train=[{{path: {tmp_path}/corpus}}]",
        "data.split=[0.9,0.1]",
        "run.id=mine", "train.steps=4", "train.seq_len=32", "evaluation.every_steps=2", "cluster.peak_tflops=0.1",
        "cluster.threads_per_rank=1",
    ).end()  # fmt: skip
    assert trained.code == 0, trained.err
    result = megads("report", "run=mine").end()
    assert (result.code, result.err) == (0, "")
    assert result.out == "report:  runs/mine/report.html\npicture: runs/mine/report/loss.png\n"
    page = (tmp_path / "runs" / "mine" / "report.html").read_text()
    for part in (
        "mine",
        ">finished<",
        "validation loss",
        "unigram",
        "step_00000004",
        "4 of 4 planned",
        "checkpoint saved",
    ):
        assert part in page, part
    assert len(list((tmp_path / "runs" / "mine" / "report").glob("*.png"))) == 8
