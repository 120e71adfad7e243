"""Tests `megads plan life=true` and `megads plan budget_hours=...`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megads.cli.main import run
from megads.tools.plan.budget import _size, _trained
from megads.tools.plan.life_output import _duration
from tests.command import REPOSITORY

FEW = ["lifetime.runs=8", "lifetime.days=10"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def life(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, object]:
    assert run(["plan", "life=true", "json=true", *FEW, *overrides]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_life_plan_as_a_table_is_complete_and_leaves_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a table that lacks a part of the answer, and files that a plan leaves behind."""
    assert run(["plan", "life=true", "gpus=16384", "lifetime.tokens_per_s=1e6", *FEW]) == 0
    out = capsys.readouterr().out
    for part in (
        "16,384 GPUs for 10 days: 77.6 failures expected, one in 3.1 h",
        "The Llama 3 Herd of Models (arXiv 2407.21783), Table 5",
        "effective training time 9",
        "network switch or cable",
        "Young 1974",
        "best simulated",
        "within 0.1%",
        "tokens at 1,000,000 tokens/s",
        "Sensitivity: each parameter halved",
        "by formula at the interval in use",
    ):
        assert part in out, part
    assert not list(Path().iterdir())


@pytest.mark.always
def test_a_life_plan_as_json_accounts_for_all_of_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches parts that do not add up: training, waiting for saves and the cost of each cause are all of the time."""
    found = life(
        capsys, "gpus=16384", "lifetime.memory_every_s=60", "lifetime.memory_copies=true", "lifetime.spares=16"
    )
    causes = found["causes"]
    assert isinstance(causes, list) and len(causes) == 18
    lost = sum(sum(cause["hours"].values()) for cause in causes) + found["stall_hours"]
    assert found["effective_share"] * 240 + lost == pytest.approx(240)
    assert found["gpu_hours_lost"] == pytest.approx(lost * 16_384)
    assert sum(cause["expected_failures"] for cause in causes) == pytest.approx(found["expected_failures"])
    low, high = found["effective_share_of_95_percent_of_runs"]
    assert 0.95 < low < found["effective_share"] < high < 1
    assert found["effective_share_by_formula"] is None and found["memory"]["formulas_s"]["daly"] > 0
    alone = life(capsys, "gpus=16384")
    assert alone["memory"] is None and alone["effective_share"] < found["effective_share"]
    assert alone["effective_share"] == pytest.approx(alone["effective_share_by_formula"], abs=0.03)


def test_a_life_plan_follows_the_runs_config(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan that ignores the run's checkpoint interval, layout or step time."""
    bloom = ["experiment=bloom_176b", "lifetime.step_time_s=105", "checkpoint.local_every_steps=2"]
    found = life(capsys, *bloom)
    assert found["gpus"] == 384 and found["disk"]["every_s"] == 10_500 and found["memory"]["every_s"] == 210
    hang = next(cause for cause in found["causes"] if cause["sign"] == "hang" and cause["simulated_failures"])
    assert hang["hours"]["detect"] * 3600 / hang["simulated_failures"] == pytest.approx(15 * 105 + 1, rel=0.05)
    assert life(capsys, *bloom, "lifetime.save_every_s=900")["disk"]["every_s"] == 900


def test_life_and_budget_use_the_planned_step_of_a_named_device(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a named device whose planned step neither life nor budget uses: BLOOM's took 105 s, at 149 TFLOPs per
    GPU, a quarter of them recomputation, which is no progress."""
    bloom = ["experiment=bloom_176b", "device=a100_80gb"]
    found = life(capsys, *bloom)
    assert found["step_time_s"] == pytest.approx(105, rel=0.1)
    assert found["disk"]["every_s"] == pytest.approx(100 * found["step_time_s"])
    tokens = 2048 * 2048 / found["step_time_s"] * found["effective_share"] * 10 * 86_400
    assert found["tokens"] == pytest.approx(tokens)
    assert life(capsys, *bloom, "gpus=1024", "lifetime.save_every_s=900")["step_time_s"] is None, "another layout"
    assert run(["plan", *bloom, "budget_hours=24", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["device_tflops"] == pytest.approx(149 / 1.327, rel=0.1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lifetime.days=0"], "lifetime.days = 0.0: must be positive"),
        (["lifetime.restart_s=-1"], "lifetime.restart_s = -1.0: must not be negative"),
        (["lifetime.days=inf"], "lifetime.days = inf: must be a finite number"),
        (["lifetime.crash_s=nan"], "lifetime.crash_s = nan"),
        (["lifetime.runs=1"], "must lie between 2 and 1,000"),
        (["lifetime.save_every_s=30"], "is shorter than lifetime.save_write_s = 60"),
        (["gpus=0"], "gpus = 0: must be at least 1"),
        (["gpus=100000000"], "are too many to simulate"),
        (["budget_hours=1"], "are two plans"),
        (["lifetime.failures=google"], "llama3, acme, rsc1, rsc2"),
    ],
)
def test_an_impossible_life_is_refused(capsys: pytest.CaptureFixture[str], overrides: list[str], expected: str) -> None:
    """Catches a traceback, or a meaningless share, for a user's mistake."""
    assert run(["plan", "life=true", *overrides]) == 2
    assert expected in capsys.readouterr().err


def test_planning_a_life_needs_no_torch() -> None:
    """Catches a life plan that loads torch: two seconds, and a library that a login node may lack."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import megads.tools.plan.life, megads.model.model_size, megads.tools.plan.config"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "asked",
    [
        ["experiment=bloom_176b", "device=a100_80gb", "ranks=true"],
        ["model=bloom_560m", "model.vocab_size=50304", "parallel.pp=2", "schedules=true"],
        ["model=llama3_8b", "device=h100", "search=true", "gpus=2", "train.global_batch_size=8", "json=true"],
    ],
    ids=["step", "schedules", "search"],
)
def test_planning_needs_no_torch(asked: list[str]) -> None:
    """Catches an import anywhere in a plan that loads torch: it took half of the command's time."""
    program = (
        "import sys\nfrom megads.cli.main import run; code = run(sys.argv[1:])\n"
        "assert not {'torch', 'deepspeed', 'numpy', 'matplotlib'} & set(sys.modules), 'heavy'\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "plan", *asked]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def budget(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, object]:
    assert run(["plan", "budget_hours=168", "gpus=64", "device_tflops=400", "json=true", *overrides]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_budget_of_a_week_on_64_gpus_is_near_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches hours that are read as days, presets far from the optimum, and wrong prices."""
    prices = ["cost.gpu_hour_price=2", "cost.gpu_watts=1000", "cost.kwh_price=0.1", "cost.pue=1.25"]
    found = budget(capsys, *prices)
    assert found["flops"] == pytest.approx(64 * 400e12 * 168 * 3600)
    best, *presets = found["trainings"]
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(found["flops"])
    assert best["tokens_over_best"] == pytest.approx(1) and best["compute_over_best"] == pytest.approx(1)
    assert best["gpu_hours"] == pytest.approx(64 * 168) and best["gpu_price"] == pytest.approx(2 * 64 * 168)
    assert best["energy_kwh"] == pytest.approx(64 * 168 * 1.25)
    assert best["energy_price"] == pytest.approx(0.1 * best["energy_kwh"])
    assert len(presets) == 4 and [item["parameters"] for item in presets] == sorted(i["parameters"] for i in presets)
    assert all(0.3 < item["parameters"] / best["parameters"] < 3 for item in presets)
    assert all(item["loss"] > best["loss"] for item in presets)
    assert budget(capsys, "cost.effective_time=0.5")["flops"] == pytest.approx(found["flops"] / 2)


def test_a_given_run_is_judged_against_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a length in samples that is read as tokens, and an inverted verdict: BLOOM 176B had too few tokens, Llama
    3 8B too many."""
    bloom = budget(capsys, "experiment=bloom_176b")["trainings"][-1]
    assert bloom["name"] == "this run" and bloom["tokens"] == pytest.approx(220e6 * 2048, rel=1e-4)
    assert bloom["tokens_over_best"] < 0.2 and bloom["compute_over_best"] > 1.2
    llama = budget(capsys, "model=llama3_8b", "train.tokens=15T")["trainings"][-1]
    assert llama["tokens_over_best"] > 50 and llama["tokens_per_parameter"] == pytest.approx(1868, rel=0.01)


def test_a_budget_as_a_table_has_its_caveat_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a prediction without its caveat or source."""
    week = ["plan", "budget_hours=168", "gpus=64"]
    assert run([*week, "model=bloom_7b1", "device_tflops=400", "cost.gpu_hour_price=2"]) == 0
    out = capsys.readouterr().out
    for part in (
        "1.55e+22 FLOPs",
        "arXiv 2404.10102",
        "this model",
        "price of GPUs",
        "Losses are the scaling law's",
        "times the",
    ):
        assert part in out, part
    assert run([*week, "rank_tflops=400", "cost.law=hoffmann2022"]) == 0
    assert "arXiv 2203.15556" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "budget_hours needs device_tflops"),
        (["device_tflops=-1"], "device_tflops = -1.0: must be positive"),
        (["device_tflops=400", "cost.effective_time=1.5"], "must be above 0 and at most 1"),
        (["device_tflops=400", "cost.kwh_price=0.2"], "cost.kwh_price needs cost.gpu_watts"),
        (["device_tflops=400", "cost.pue=0.5"], "must be at least 1"),
    ],
)
def test_an_impossible_budget_is_refused(
    capsys: pytest.CaptureFixture[str], overrides: list[str], expected: str
) -> None:
    """Catches a traceback for a user's mistake."""
    assert run(["plan", "budget_hours=168", *overrides]) == 2
    assert expected in capsys.readouterr().err


def test_counts_and_durations_are_written_in_the_right_unit() -> None:
    """Catches a count or duration in the wrong unit, and words for the wrong side of the optimum."""
    durations = (42.0, 119.0, 120.0, 7199.0, 7200.0, 172799.0, 172800.0)
    texts = ["42 s", "119 s", "2.0 min", "120.0 min", "2.0 h", "48.0 h", "2.0 days"]
    assert [_duration(seconds) for seconds in durations] == texts
    counts = (8.03e9, 1.5e13, 7e6, 1e3, 999.0)
    assert [_size(count) for count in counts] == ["8.03 B", "15 T", "7 M", "1 k", "999"]
    shares = (0.9, 1.1, 0.89, 1.11, 25.04)
    words = ["optimal", "optimal", "under, 0.89 x", "over, 1.1 x", "over, 25.0 x"]
    assert [_trained(share) for share in shares] == words
