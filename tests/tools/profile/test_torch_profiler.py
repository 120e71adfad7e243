"""Profiles of steps: what is written in every engine, what is not when nobody asks, and what a failure leaves."""

from __future__ import annotations

import gzip
import json
import resource
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megads.model.config import HEAD
from megads.parallel.config import EngineKind, ParallelConfig
from megads.runtime.heartbeat import Heartbeat
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter
from megads.tools.profile.operators import read_operators
from megads.tools.profile.torch_profiler import ProfiledSteps, ProfileHook, model_ranges, part_of
from megads.tools.profile.trace_events import merged_trace
from megads.tools.profile.trace_files import METADATA, TraceFile, newest_traces
from tests.command import REPOSITORY, StartCommand, events_of, finished_run, small_model, steps_of
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with, step_batches
from tests.tools.profile.test_timeline import INFO


def _profile(scenario: Scenario, layout: ParallelConfig, folder: Path, steps: ProfiledSteps, begin: int = 0) -> int:
    """Trains to step 5, of which some are profiled; returns how many modules still have a forward of their own."""
    engine = build_engine(scenario, layout)
    hook = ProfileHook(engine, folder, EventWriter(folder), Heartbeat(), steps)
    hook.on_start(TrainState(step=begin))
    for step in range(begin + 1, 6):
        engine.step(step_batches(scenario, step, engine.grid.dp.rank, engine.grid.dp.size), scenario.lr)
        hook.on_step(replace(INFO, step=step, last=step == 5))
    return sum("forward" in module.__dict__ for _, layer in engine.layers() for module in layer.modules())


def read_trace(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def ranges_of(path: Path) -> list[str]:
    """Names of the ranges of a trace, in the order of their starts."""
    events = [event for event in read_trace(path)["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


NATIVE, DEEPSPEED = EngineKind.native, EngineKind.deepspeed
CASES = {
    "native pp2": (NATIVE, "pp2"),
    "native interleaved": (NATIVE, "pp2 interleaved"),
    "native tp2": (NATIVE, "tp2"),
    "deepspeed pp2": (DEEPSPEED, "pp2"),
    "zero2dp2": (DEEPSPEED, "zero2dp2"),
    "zero3dp2": (DEEPSPEED, "zero3dp2"),
}


@pytest.mark.quick("native pp2", "deepspeed pp2", "zero2dp2")
@pytest.mark.distributed
@pytest.mark.always("native pp2")
@pytest.mark.parametrize("case", CASES)
def test_every_engine_writes_a_trace_of_each_rank(case: str, tmp_path: Path) -> None:
    """Catches an engine whose steps have no ranges, a rank without a trace, steps outside of the range, and modules
    that stay changed after it."""
    (engine, name), layout = CASES[case], LAYOUTS[CASES[case][1]]
    scenario = scenario_with(global_batch_size=8, micro_batch_size=2, engine=engine)
    assert run_ranks(_profile, 2, scenario, layout, tmp_path, ProfiledSteps(2, 3)) == [0, 0]
    files = newest_traces(tmp_path)
    assert [(file.rank, file.first_step, file.last_step) for file in files] == [(0, 2, 3), (1, 2, 3)]
    for file in files:
        trace, ranges = read_trace(file.path), ranges_of(file.path)
        assert trace["megads"]["rank"] == file.rank and trace["megads"]["pp"] == file.stage
        assert ranges.count("optimizer step") == 2
        chunks = 2 if "interleaved" in name else 1
        assert sum(one.startswith("forward ") for one in ranges) == 2 * (8 // 2 // layout.dp) * chunks
        assert any(one.startswith("attention: blocks.") for one in ranges)
    table = read_operators(tmp_path)
    assert table is not None and not table.on_gpu and table.first_step == 2
    parts = table.parts()
    assert {"attention", "MLP", "norm", "head and loss", "optimizer", "communication"} <= set(parts)
    assert all(seconds >= 0 for seconds in parts.values())
    normed = [row.part for row in table.rows if "layer_norm_backward" in row.name]
    assert normed and set(normed) == {"norm"}
    backward = {row.part for row in table.rows if row.phase == "backward" and row.seconds}
    assert {"attention", "MLP", "head and loss"} <= backward, "gradients are counted to the part of their operator"


@pytest.mark.distributed
def test_steps_that_are_past_are_not_profiled(tmp_path: Path) -> None:
    """Catches a resumed run that profiles other steps than those asked for, or writes half a range as a whole one."""
    scenario = scenario_with(global_batch_size=4, micro_batch_size=2)
    run_ranks(_profile, 1, scenario, LAYOUTS["single"], tmp_path, ProfiledSteps(1, 2), 3)
    assert not (tmp_path / "traces").exists()
    run_ranks(_profile, 1, scenario, LAYOUTS["single"], tmp_path, ProfiledSteps(2, 4), 3)
    assert [(file.first_step, file.last_step) for file in newest_traces(tmp_path)] == [(4, 4)]


def _profile_on_a_full_disk(scenario: Scenario, folder: Path) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return _profile(scenario, LAYOUTS["single"], folder, ProfiledSteps(2, 3))


@pytest.mark.distributed
def test_a_full_disk_ends_neither_run_nor_leaves_a_torn_trace(tmp_path: Path) -> None:
    """Catches a run that fails because its trace does not fit on the disk, a cut trace that looks like a whole one
    (torch ignores errors when it writes), and an event that says where a missing trace is."""
    scenario = scenario_with(global_batch_size=4, micro_batch_size=2)
    assert run_ranks(_profile_on_a_full_disk, 1, scenario, tmp_path) == [0]
    assert list((tmp_path / "traces").iterdir()) == []
    assert "profiled" not in (tmp_path / "events.jsonl").read_text()


def test_parts_of_a_model_have_their_names() -> None:
    """Catches a norm counted to attention, and a block's own work counted to a part of it."""
    assert part_of("blocks.3", "attention") == "attention"
    assert part_of("blocks.3", "attention.q_norm") == part_of("final_norm", "") == part_of("blocks.0", "input_norm")
    assert part_of("blocks.3", "mlp") == "MLP" and part_of("blocks.3", "mlp.up") == ""
    assert part_of("blocks.3", "") == "block" and part_of(HEAD, "") == "head and loss"


def test_a_failure_inside_restores_the_modules() -> None:
    """Catches modules that keep the profiler's forward after an exception, and a lost forward of their own, as that of
    recomputed blocks."""
    block = nn.Module()
    block.attention = nn.Linear(2, 2)
    block.attention.forward = own = lambda x: x  # type: ignore[method-assign]
    with suppress(KeyError), model_ranges([("blocks.0", block)], inner=True):
        assert block.attention.forward is not own and block.attention(3) == 3
        raise KeyError
    assert block.attention.forward is own and "forward" not in block.__dict__


def test_ranges_inside_compiled_blocks_are_left_out() -> None:
    """Catches a compiled block that is compiled again because a module inside of it was changed."""
    block = nn.Module()
    block.attention = nn.Linear(2, 2)
    with model_ranges([("blocks.0", block)], inner=False):
        assert "forward" in block.__dict__ and "forward" not in block.attention.__dict__


@pytest.mark.distributed
def test_a_run_profiles_what_it_is_asked_for(corpus: Path, megads: StartCommand) -> None:
    """Catches a profile that changes what a run computes, a request to a running job that is not answered or answered
    twice, and a report without the table."""
    overrides = small_model(corpus, parallel__pp=2, train__steps=12, logging__straggler_every_steps="null")
    plain = finished_run(megads, "plain", overrides)
    run_dir = finished_run(megads, "profiled", [*overrides, "logging.profile_steps=[3,4]"])
    assert steps_of(run_dir) == steps_of(plain)
    assert [(event["first_step"], event["last_step"]) for event in events_of(run_dir, "profiled")] == [(3, 4)]
    (run_dir / "profile").write_text("2 memory\n")
    ended = megads("train", *overrides, f"run.dir={run_dir}", "train.steps=16").end()
    assert ended.code == 0, ended.err
    assert not (run_dir / "profile").exists()
    assert [(event["first_step"], event["last_step"]) for event in events_of(run_dir, "profiled")][1:] == [(13, 14)]
    assert "compute on the CPU" in (run_dir / "logs" / "rank_00000.log").read_text()
    assert len(list((run_dir / "traces").iterdir())) == 4
    assert megads("report", f"run={run_dir}", "output=page").end().code == 0
    page = (megads.folder / "page" / "report.html").read_text()
    assert "Longest operators, steps 13 to 14" in page and "attention" in page
    check_joined(read_trace(megads.folder / "page" / "report" / "profile.trace.json.gz")["traceEvents"])


def check_joined(events: list[dict[str, Any]]) -> None:
    """Checks the trace of two stages, whose passes depend on each other, for one clock."""
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {"rank 0 (pipeline rank 0)", "rank 1 (pipeline rank 1)"}
    ranges = sorted((event["ts"], event) for event in events if event["name"] in ("forward 0", "backward 0"))
    passes = [event for _, event in ranges]
    assert [(event["name"], event["pid"] // 1000) for event in passes[:4]] == [
        ("forward 0", 0),
        ("forward 0", 1),
        ("backward 0", 1),
        ("backward 0", 0),
    ]
    # torch converts processor ticks to a time in each process: passes that follow each other may overlap a little.
    ends = [event["ts"] + event["dur"] for event in passes[:4]]
    assert ends == sorted(ends)


def test_a_suspended_process_does_not_shift_its_trace(tmp_path: Path) -> None:
    """Catches traces joined by one reading of the clocks, between which a busy machine may suspend the process."""
    files = []
    for rank, delays_us in enumerate([(3.0, 2.0, 900.0), (50_000.0, 2.0, 40.0)]):
        # The clock of the trace is 7 s ahead on rank 0 and 5 s on rank 1; a step begins at 30 s on the common one.
        ahead_us = 1e6 * (7 - 2 * rank)
        readings = [
            {"name": f"monotonic {20 + number / 10:.9f}", "pid": 1, "ts": 1e6 * (20 + number / 10) + ahead_us + delay}
            for number, delay in enumerate(delays_us)
        ]
        events = [*readings, {"name": "step", "pid": 1, "ts": 30e6 + ahead_us}]
        path = tmp_path / f"{rank}.gz"
        path.write_bytes(gzip.compress(json.dumps({METADATA: {"clock_offset_s": 0.0}, "traceEvents": events}).encode()))
        files.append(TraceFile(3, 3, rank, rank, path))
    begun = [event["ts"] for event in merged_trace(files)["traceEvents"] if event["name"] == "step"]
    assert begun[0] == pytest.approx(begun[1], abs=0.01)


@pytest.mark.parametrize("steps", ["[0,3]", "[4,3]", "[3]", "[2,9]"])
def test_a_range_that_cannot_be_profiled_is_refused(steps: str, corpus: Path, megads: StartCommand) -> None:
    """Catches a run that trains to its end without ever reaching the steps to profile."""
    overrides = small_model(corpus, train__steps=8, logging__profile_steps=steps)
    ended = megads("train", *overrides, "run.dry_run=true").end()
    assert ended.code == 2 and "logging.profile_steps" in ended.err


def test_memory_snapshots_need_a_gpu(corpus: Path, megads: StartCommand) -> None:
    """Catches a run on a CPU that promises a snapshot and writes none."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ended = megads("train", *small_model(corpus, train__steps=2, logging__memory_snapshot=True)).end()
    assert ended.code == 2 and "logging.memory_snapshot" in ended.err


@pytest.mark.distributed
def test_a_run_that_is_not_profiled_has_no_profiler(corpus: Path, megads: StartCommand) -> None:
    """Catches a profiler, ranges of the model or a history of allocations in a run that asks for none, and a hook whose
    only work is to look whether it has any."""
    (megads.folder / "unprofiled.py").write_text(UNPROFILED)
    overrides = small_model(corpus, train__steps=2)
    words = ["plugins=[unprofiled]", "hooks.unprofiled={}", f"run.dir={megads.folder / 'run'}"]
    ended = megads(
        "train", *overrides, *words, variables={"PYTHONPATH": f"{REPOSITORY}:{megads.folder}"}, anew=True
    ).end()
    assert ended.code == 0, ended.err
    [event] = events_of(megads.folder / "run", "loaded")
    assert event["modules"] == [] and event["profilers"] == 0 and event["changed"] == 0


UNPROFILED = """\
import gc
import sys

import torch

import megads


@megads.register_hook("unprofiled")
class Unprofiled:
    def __init__(self, options, context):
        self.context = context

    def on_start(self, state):
        pass

    def on_step(self, info):
        pass

    def on_end(self, state):
        wanted = ("torch_profiler", "memory_snapshot", "operators", "trace_files")
        modules = [name for name in sys.modules if name.startswith("megads.tools.profile.") and name.endswith(wanted)]
        gc.unfreeze()
        profilers = sum(isinstance(one, torch.autograd.profiler.profile) for one in gc.get_objects())
        blocks = [layer for name, layer in self.context.engine.layers() if name.startswith("blocks.")]
        changed = sum("forward" in module.__dict__ for block in blocks for module in block.modules())
        self.context.events.write("loaded", modules=modules, profilers=profilers, changed=changed)
"""
