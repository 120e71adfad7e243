"""Budget, order and verdicts of scripts/bench/gpu.sh."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import psutil
import pytest

from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from scripts.bench.gpu_items import ALWAYS, STAGES, Item, chosen, items
from scripts.bench.gpu_resume import EQUAL, Training, verdict
from scripts.bench.gpu_stages import RESERVE_S, Clock, Runner
from scripts.bench.gpu_train import SEQ_LEN, SIZES, VOCABULARY, fit_of, quickest_attention
from scripts.bench.training_sides import TrainingWork
from tests.command import COMPUTED

TRAINING = Training((), vocabulary=512, steps=4, every=2, killed_after=3)


def test_a_budget_is_kept_and_nothing_is_left_running(tmp_path: Path) -> None:
    """Catches a script that outruns its time, an item that lives on after it, and one that is begun in vain."""
    arguments = argparse.Namespace(work=tmp_path, append=tmp_path / "bench.jsonl", run="now", device="cuda")
    runner = Runner(arguments, Clock(RESERVE_S + 3.0, 0.0))
    child = "import subprocess as s, sys; s.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    before = set(psutil.Process().children(recursive=True))
    begin = time.monotonic()
    runner.run(Item("kernels", "fails", ("-c", "raise SystemExit('too bad')"), 0.1, appends=False))
    runner.run(Item("kernels", "two GPUs", ("-c", ""), 0.1, devices=2, appends=False))
    runner.run(Item("kernels", "long", ("-c", child), 0.1, appends=False))
    runner.run(Item("kernels", "late", ("-c", ""), 1.0, appends=False))
    assert time.monotonic() - begin < RESERVE_S + 3.0
    assert set(psutil.Process().children(recursive=True)) <= before
    assert runner.failed
    assert [(line["name"], line["outcome"]) for line in read_json_lines(arguments.append)] == [
        ("fails", "failed"), ("two GPUs", "not run"), ("long", "ended for lack of time"), ("late", "not run"),
    ]  # fmt: skip


def test_stages_choose_items() -> None:
    """Catches a stage without items, one whose kernels nobody builds, and a check that leaves a stage out."""
    for check in (True, False):
        found = items(check, Path("work"), ["train.steps=6"])
        for stage in STAGES:
            assert {item.stage for item in chosen(found, [stage])} == {ALWAYS, stage}
        assert all("train.steps=6" in item.arguments for item in chosen(found, ["layouts"]) if item.stage != ALWAYS)
        assert len({(item.stage, item.name) for item in found}) == len(found)


@pytest.mark.parametrize("size", SIZES)
def test_a_micro_batch_fits(size: str) -> None:
    """Catches a size that is not trained at all, and memory that is left empty or overfilled by the plan."""
    work = TrainingWork(**SIZES[size], vocabulary=VOCABULARY, seq_len=SEQ_LEN, precision="bf16", device="cuda")
    large, small = (fit_of(work, True, free * 2**30) for free in (78, 26))
    assert large.recompute == "none" and large.planned_bytes < 74 * 2**30
    assert work.batch % large.micro_batch == 0 and small.planned_bytes < 26 * 2**30
    assert small.micro_batch < large.micro_batch or small == large


def test_recomputation_comes_last() -> None:
    """Catches recomputation where a smaller micro-batch would do, and none where nothing else does."""
    work = TrainingWork(**SIZES["1.3b"], vocabulary=VOCABULARY, seq_len=SEQ_LEN, precision="bf16", device="cuda")
    fits = [fit_of(work, True, free * 2**30) for free in (40, 26)]
    assert (fits[0].recompute, fits[0].micro_batch < 16) == ("none", True)
    assert fits[1].recompute != "none"


def test_trainings_take_the_quickest_attention() -> None:
    """Catches a kind that never repeats its bits, one without the kernels that it needs, one that failed, and none at
    all where nothing was measured."""
    measured = [
        {"bench": "gpu_attention", "kind": kind, "outcome": outcome, "us": us, "repeats": repeats}
        for kind, outcome, us, repeats in (
            ("cudnn", "left out", 1.0, True),
            ("flash", "done", 2.0, False),
            ("scores in memory, plain torch", "done", 3.0, True),
            ("fused_softmax", "done", 4.0, True),
            ("flex", "done", 5.0, True),
            ("sdpa", "done", 9.0, True),
        )
    ]
    assert quickest_attention(measured, kernels=True) == "fused_softmax"
    assert quickest_attention(measured, kernels=False) == "flex"
    assert quickest_attention([{"bench": "gpu_train", "kind": "flex"}], kernels=True) == "auto"


def run_of(folder: Path, losses: list[float], resumed: int | None = None, checksum: str = "ab") -> Path:
    """A run's ledger, events and last checkpoint."""
    metrics = MetricsWriter(folder, enabled=True)
    for step, loss in enumerate(losses, start=1):
        metrics.write(dict.fromkeys(COMPUTED, 0) | {"step": step, "loss": loss})
    EventWriter(folder).write("start", step=0)
    if resumed is not None:
        EventWriter(folder).write("resume", step=resumed)
    last = folder / "checkpoints" / f"step_{TRAINING.steps:08d}"
    last.mkdir(parents=True)
    tensors = [{"key": "weight", "offset": [0], "shape": [1], "checksum": checksum}]
    (last / "manifest.json").write_text(json.dumps({"tensors": tensors}))
    return folder


def test_a_resume_is_judged(tmp_path: Path) -> None:
    """Catches a verdict of equal over a run that was never resumed, over other losses or tensors, or without knowing
    whether the kill had to do with it."""
    reference = run_of(tmp_path / "reference", [4.0, 3.0, 2.0, 1.0])
    found = {
        name: verdict(reference, run_of(tmp_path / name, losses, resumed, checksum), TRAINING, 3)
        for name, losses, resumed, checksum in (
            ("same", [4.0, 3.0, 2.0, 1.0], 2, "ab"),
            ("after", [4.0, 3.0, 2.0, 1.5], 2, "ab"),
            ("before", [4.0, 3.5, 2.0, 1.0], 2, "ab"),
            ("tensors", [4.0, 3.0, 2.0, 1.0], 2, "cd"),
            ("short", [4.0, 3.0, 2.0], 2, "ab"),
            ("never", [4.0, 3.0, 2.0, 1.0], None, "ab"),
        )
    }
    assert found["same"].startswith(EQUAL) and "resumed from 2" in found["same"]
    assert found["after"] == "NOT EQUAL from step 4 (after the resume): loss"
    assert found["before"].startswith("NOT EQUAL from step 2 (before the kill")
    assert found["tensors"].endswith("other tensors in the last checkpoint")
    assert found["short"] == "NOT EQUAL: 3 steps instead of 4"
    assert found["never"].startswith("NOT JUDGED: resumed 0 times")
