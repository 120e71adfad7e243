"""Tests the comparison of a timed step with its plan: its phases, the sentence about it, and a real run."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.config.train import TrainConfig
from megads.model.config import ModelConfig
from megads.ops.config import OpsConfig
from megads.runtime.hooks import Span
from megads.runtime.metrics import read_json_lines
from megads.tools.plan.step_estimate import PHASES
from megads.tools.plan.step_time import RankTrace
from megads.tools.report.history import TIMELINE_FOLDER, read_history
from megads.tools.report.planned_step import StepComparison, compare_step, measured_phases
from tests.command import StartCommand
from tests.tools.report.written_runs import write_events, write_steps

DEVICE = """
like: h100
name: here
on_cpu: true
peak_tflops: 0.1
fp32_tflops: 0.1
memory_gigabytes_per_s: 5.0
node_gigabytes_per_s: 1.0
node_latency_us: 300.0
kernel_us: 20.0
"""


def trace(rank: int, *bars: tuple[str, float, float]) -> RankTrace:
    return RankTrace(rank, rank, (), tuple(Span(kind, 0, rank, start, end) for kind, start, end in bars))


def test_a_step_is_that_of_the_rank_that_computes_most() -> None:
    """Catches another rank's phases, waits counted as passes, and phases that do not add up to the step."""
    light = trace(0, ("forward", 0.0, 1.0), ("receive_gradient", 1.0, 6.0), ("backward", 6.0, 7.0))
    busy = trace(
        1,
        ("receive_activation", 0.0, 1.0),
        ("forward", 1.0, 2.5),
        ("backward_input", 2.5, 5.0),
        ("backward_weight", 5.5, 6.0),
        ("reduce_gradients", 7.0, 7.25),
        ("optimizer_step", 7.25, 8.0),
    )
    found = measured_phases([light, busy], 9.0)
    assert list(found) == list(PHASES)
    assert list(found.values()) == pytest.approx([1.5, 3.0, 1.5, 0.25, 0.75, 2.0])


def compared(planned: list[float], measured: list[float]) -> str:
    sides = [dict(zip(PHASES, seconds, strict=True)) for seconds in (measured, planned)]
    return StepComparison(7, *sides).sentence


def test_the_part_that_makes_the_difference_is_named() -> None:
    """Catches the largest phase named instead of the one that grew, and a faster step that is called slow."""
    plan = [2.0, 4.0, 1.0, 0.5, 0.5, 0.0]
    slow = compared(plan, [2.0, 4.1, 1.0, 2.5, 0.5, 0.0])
    assert slow.startswith("step 7 took 10.1 s, 8 s were planned: 26% slower, mostly due to gradient reduction")
    assert slow.endswith("2.5 s instead of 0.5 s")
    quick = compared(plan, [2.0, 2.0, 1.1, 0.5, 0.5, 0.0])
    assert "24% faster, mostly due to backward passes, 2 s instead of 4 s" in quick
    same = compared(plan, [2.0, 4.2, 1.0, 0.5, 0.5, 0.0])
    assert "as planned (+2%); the part that differs most is backward passes" in same


def test_a_run_without_timed_steps_has_no_comparison(tmp_path: Path) -> None:
    """Catches an empty section in the report of a run without timed steps."""
    write_steps(tmp_path, 1, 3)
    assert compare_step(read_history(tmp_path), None) is None


def test_the_plan_is_that_of_the_graphs_that_a_run_has_chosen(tmp_path: Path) -> None:
    """Catches a run with captured micro-batches that is compared with a plan of eager mode, or the reverse."""
    model = ModelConfig(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50304, max_seq_len=1024)
    train = TrainConfig(steps=9, seq_len=1024, global_batch_size=4, micro_batch_size=1)
    planned = {}
    for given, captured in ((True, None), (False, True), ("auto", True), ("auto", False)):
        run = tmp_path / f"{given}_{captured}"
        (run / TIMELINE_FOLDER).mkdir(parents=True)
        freeze(RootConfig(model=model, train=train, ops=OpsConfig(cuda_graphs=given)), run / "config.yaml")
        write_steps(run, 1, 3)
        write_events(run, *([("cuda_graphs", {"captured": captured})] if captured is not None else []))
        spans = [{"kind": "forward", "micro_batch": number, "start_s": 0.0, "end_s": 0.01} for number in range(4)]
        (run / TIMELINE_FOLDER / "step_2.rank_0.json").write_text(json.dumps({"rank": 0, "spans": spans}))
        compared = compare_step(read_history(run), "h200")
        assert compared is not None and compared.planned_s is not None, compared
        planned[given, captured] = sum(compared.planned_s.values())
    assert planned["auto", True] == planned[True, None] < planned["auto", False] == planned[False, True]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_real_run_beside_its_plan(megads: StartCommand) -> None:
    """Catches spans or a config of a real run that the comparison cannot read, and phases that do not add up."""
    (megads.folder / "here.yaml").write_text(DEVICE)
    (megads.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    command = [
        *("train", "model=tiny", "data.raw=text.txt", "tokenizer.vocab_size=262", "train.steps=6", "run.id=timed"),
        *("train.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=1", "train.precision=fp32"),
        *("parallel.pp=2", "parallel.dp=1", "logging.timeline_every_steps=2", "cluster.threads_per_rank=1"),
    ]
    ended = megads(*command).end()
    assert ended.code == 0, ended.err
    run = megads.folder / "runs" / "timed"
    reported = megads("report", "run=timed", "device=here.yaml").end()
    assert reported.code == 0, reported.err
    said = re.search(r"plan: +(step [46] took .* were planned: .*)", reported.out)
    assert said is not None, reported.out
    page = (run / "report.html").read_text()
    assert html.escape(said[1]) in page and (run / "report" / "planned_step.png").is_file()
    rows = re.findall(r"<tr><td>([a-z0-9 ]+)</td>" + r'<td class="number">([\d.]*)</td>' * 3 + "<td>", page)
    by_name = {name: (float(planned), float(measured)) for name, planned, measured, _ in rows}
    assert set(by_name) == {*PHASES, "step"}
    for side in (0, 1):
        parts = sum(by_name[name][side] for name in PHASES)
        assert parts == pytest.approx(by_name["step"][side], abs=4e-4)
    step = int(said[1].split()[1])
    lines = {line["step"]: line for line in read_json_lines(run / "metrics.jsonl") if "step_time_s" in line}
    assert by_name["step"][1] == pytest.approx(lines[step]["step_time_s"], rel=0.02)
    assert megads("report", "run=timed").end().code == 0
    assert "megads calibrate out=device.yaml ranks=2" in (run / "report.html").read_text()
    refused = megads("report", "run=timed", "device=gpu9000").end()
    assert refused.code == 2 and "device = gpu9000" in refused.err
