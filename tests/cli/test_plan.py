"""`megads plan`, and the refusal of runs that do not fit."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import psutil
import pytest

from megads.cli.main import run
from megads.runtime.machine_memory import HEAP_SHARE, PROCESS_BYTES

DATA = "data.train=[{path: nowhere}]"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan that wants data or a length, and a table without a part of the answer."""
    assert run(["plan", "experiment=bloom_176b", "device=cuda"]) == 0
    out = capsys.readouterr().out
    for expected in ("176,247,271,424 parameters", "384 ranks", "256 micro-batches", "bubble 4.1%", "largest: rank 4"):
        assert expected in out
    assert len(re.findall(r"^ +\d+ +\d+,\d+", out, re.MULTILINE)) == 12, "one row a stage"
    assert not list(Path().iterdir())


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches output that machines cannot read, parts that do not add up to the peak, and a wrong sum over ranks."""
    overrides = [
        "model=demo",
        "model.vocab_size=8192",
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.dp=2",
        "train.seq_len=256",
        "device=cpu",
    ]
    assert run(["plan", *overrides, "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["ranks"], plan["micro_batches"], plan["tokens_per_step"]) == (8, 4, 2048)
    assert plan["flops_per_step"] == plan["flops_per_token"] * 2048
    for stage in plan["stages"]:
        parts = ("weights", "fp32_gradients", "masters", "adam_moments", "attention_bias", "pipeline_buffers")
        always = sum(stage[part] for part in parts)
        assert stage["permanent"] == always
        assert stage["peak"] == always + max(phase["bytes"] for phase in stage["phases"])
    assert plan["all_ranks_bytes"] == 4 * sum(stage["peak"] for stage in plan["stages"])
    machine = plan["machine"]
    assert machine["needed"] == pytest.approx(plan["all_ranks_bytes"] * HEAP_SHARE + 8 * PROCESS_BYTES, rel=1e-6)
    assert machine["fits"] and machine["available"] <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.tp=3"], "model.num_heads = 4 is not divisible by parallel.tp = 3"),
        (["train.global_batch_size=6", "train.micro_batch_size=4"], "train.global_batch_size"),
        (["train.seq_len=0"], "train.seq_len = 0: must be at least 1"),
        (["device=tpu"], "device"),
        (["ranks=true", "cluster.ranks_per_node=0"], "cluster.ranks_per_node = 0: must be at least 1"),
        (
            ["parallel.tp=4", "parallel.sequence_parallel=true", "train.seq_len=90"],
            "train.seq_len = 90 is not divisible by parallel.tp = 4",
        ),
        (["model.layers=3"], "model.layers"),
        (["model.position=learned", "train.seq_len=4096"], "model.max_seq_len = 2048"),
    ],
)
def test_errors(overrides: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or a plan of what cannot be built."""
    assert run(["plan", *overrides]) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error


def test_train_refuses_what_cannot_fit(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a laptop that is sent swapping for hours by BLOOM-176B, and a refusal that leaves a run behind."""
    start = time.perf_counter()
    assert run(["train", "experiment=bloom_176b"]) == 2
    assert time.perf_counter() - start < 10
    error = capsys.readouterr().err
    assert re.search(
        r"rank 4 needs 125\.\d GiB, 9\d\.\d GiB of it activations in flight, all 384 ranks together 4\d,\d{3}\.\d GiB; "
        r"this machine has [\d.]+ GiB available: lower .*run\.check_memory=false",
        error,
    ), error
    assert not list(elsewhere.iterdir())


def test_dry_run_shows_memory_and_refuses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a dry run that hides that the run would not start."""
    assert run(["train", "experiment=bloom_176b", "run.dry_run=true"]) == 0
    assert re.search(r"memory +at most 125\.\d GiB a rank \(rank 4\).*does not fit", capsys.readouterr().out)
    assert run(["train", "train.steps=1", "model.vocab_size=512", DATA, "run.dry_run=true"]) == 0
    assert re.search(r"memory .*: fits", capsys.readouterr().out)
