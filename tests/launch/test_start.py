"""Tests how a run starts: its directory, its launch, what changed since, whether it is finished or stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megads.cli.train import VERB
from megads.cli.verb import Invocation
from megads.config.frozen import config_digest, freeze
from megads.config.root import RootConfig, TrainConfig
from megads.data.indexed.recorded import DataRecord
from megads.errors import ConfigError, StopRequested
from megads.launch import start
from megads.launch.acceptance import AcceptedStart, changes_since_last_start, is_finished
from megads.launch.attempts import launch_spec, wait_for_restart
from megads.launch.layout import Machine, resolve_auto
from megads.launch.preflight import PlannedData, ResolvedRun, chosen_kernels, place, refuse_stopped_run
from megads.model.config import AttentionKind
from megads.ops.config import Implementation
from megads.parallel.config import EngineKind
from megads.runtime.config import RunConfig
from megads.runtime.lease import Lease, claimed
from megads.runtime.metrics import EventWriter
from megads.runtime.stop import PREEMPTED, request_stop, stop_path
from tests.command import StartCommand, events_of, small_model, steps_of
from tests.test_conf import compose_train


def config(run_dir: Path, kill_switch: Path | None = None, steps: int = 5) -> RootConfig:
    run = RunConfig(id="x", dir=str(run_dir), kill_switch=str(kill_switch) if kill_switch else None)
    return RootConfig(train=TrainConfig(steps=steps), run=run)


def test_a_stopped_run_does_not_start(tmp_path: Path) -> None:
    """Catches a kill switch that the next start ignores, and a launcher's own old request mistaken for one."""
    refuse_stopped_run(config(tmp_path))
    request_stop(tmp_path, PREEMPTED)
    refuse_stopped_run(config(tmp_path))
    stop_path(tmp_path).unlink()
    stop_path(tmp_path).touch()
    with pytest.raises(StopRequested, match=r"stopped by .*/stop, nothing was started: remove the file"):
        refuse_stopped_run(config(tmp_path))


def test_any_member_of_the_group_can_reach_the_kill_switch(tmp_path: Path) -> None:
    """Catches a kill switch in a folder that only the run's owner can write to, and an impossible path that is
    accepted."""
    switch = tmp_path / "group" / "switches" / "stop"
    refuse_stopped_run(config(tmp_path / "run", switch))
    assert stat.S_IMODE(switch.parent.stat().st_mode) == 0o2775
    switch.touch()
    with pytest.raises(StopRequested, match="switches/stop"):
        refuse_stopped_run(config(tmp_path / "run", switch))
    with pytest.raises(ConfigError, match=r"run.kill_switch: the folder .* cannot be created"):
        refuse_stopped_run(config(tmp_path / "run", switch / "below" / "a file"))


def test_only_a_run_with_its_planned_end_is_finished(tmp_path: Path) -> None:
    """Catches a job chain that ends early after a preemption, and one that trains a finished run again."""
    now, events = config(tmp_path), EventWriter(tmp_path)
    assert not is_finished(now)
    freeze(now, tmp_path / "config.yaml")
    events.write("launch")
    events.write("end", step=3, stopped="preempted")
    events.write("exit", exit_code=6)
    assert not is_finished(now)
    events.write("launch")
    events.write("end", step=5, stopped="")
    events.write("exit", exit_code=0)
    assert is_finished(now)
    assert is_finished(dataclasses.replace(now, run=dataclasses.replace(now.run, exit_after="1h")))
    assert not is_finished(config(tmp_path, steps=6))
    other = dataclasses.replace(now, checkpoint=dataclasses.replace(now.checkpoint, load="none"))
    assert not is_finished(other)
    events.write("launch")
    assert not is_finished(now)


def test_a_run_is_named_after_experiment_then_model() -> None:
    """Catches two experiments of one model that share a name, and an experiment in a folder whose name becomes a
    path."""
    config = RootConfig()
    assert str(place(config, {"experiment": "demo", "model": "tiny"}).run.id).startswith("demo-")
    assert str(place(config, {"experiment": None, "model": "tiny"}).run.id).startswith("tiny-")
    assert str(place(config, {"experiment": "team/a", "model": "tiny"}).run.id).startswith("team-a-")


def test_given_id_and_dir_win() -> None:
    """Catches a run.dir that is ignored when run.id is given."""
    config = RootConfig()
    config.run.id, config.run.dir = "mine", "/somewhere/else"
    placed = place(config, {})
    assert (placed.run.id, placed.run.dir) == ("mine", "/somewhere/else")
    config.run.dir = None
    assert place(config, {}).run.dir == "runs/mine"


def test_ranks_get_the_digest_of_the_frozen_config() -> None:
    """Catches a digest taken before run.id and run.dir are filled in."""
    placed = place(RootConfig(), {"model": "tiny"})
    assert config_digest(placed) in launch_spec(placed).command


def test_changed_keys_are_reported_at_a_resume(tmp_path: Path) -> None:
    """Catches a resumed run whose learning rate changed without a message."""
    config = RootConfig(run=RunConfig(dir=str(tmp_path)))
    freeze(config, tmp_path / "config.yaml")
    assert changes_since_last_start(config) == []
    config.optim.lr = 1e-3
    assert changes_since_last_start(config) == [{"key": "optim.lr", "before": 0.0003, "after": 0.001, "class": "warn"}]


def test_a_removed_option_is_reported_at_a_resume(tmp_path: Path) -> None:
    """Catches an optimizer that goes on without an option that the run had, without a message."""
    config = RootConfig(run=RunConfig(dir=str(tmp_path)))
    config.optim.options = {"momentum": 0.9}
    freeze(config, tmp_path / "config.yaml")
    config.optim.options = {}
    change = {"key": "optim.options.momentum", "before": 0.9, "after": None, "class": "warn"}
    assert changes_since_last_start(config) == [change]


@pytest.mark.parametrize(
    ("asked", "before", "after"), [("auto", "native", "deepspeed"), ("deepspeed", "deepspeed", "native")]
)
def test_a_change_of_the_engine_is_recorded_with_one_warning(
    tmp_path: Path, asked: str, before: str, after: str
) -> None:
    """Catches an engine that changes without a word, a change in the name only, and the wrong consequence."""
    started = RootConfig(engine=EngineKind(asked), run=RunConfig(dir=str(tmp_path)), train=TrainConfig(steps=3))
    config, _ = resolve_auto(started, None)
    assert config.engine == before
    freeze(config, tmp_path / "config.yaml")
    same, _ = resolve_auto(dataclasses.replace(config, engine=EngineKind(before)), None)
    assert changes_since_last_start(same) == []
    config = dataclasses.replace(config, engine=EngineKind(after))
    changes = changes_since_last_start(config)
    assert changes == [{"key": "engine", "before": before, "after": after, "class": "warn"}]
    said: list[tuple[str, str]] = []
    resolved = ResolvedRun(config, config, PlannedData("text"), Machine(1, per_gpu=False))
    start = AcceptedStart(resolved, None, DataRecord(()), None, (), tuple(changes))
    start.print_changes(lambda text, level: said.append((level, text)))
    text = f"changed since the last start: engine {before} -> {after}; its steps agree with the other engine's within"
    assert [(level, line.startswith(text)) for level, line in said] == [("warning", True)]
    start.record()
    (event,) = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["level"], event["changes"]) == ("config_changed", "warning", changes)


def test_the_engine_does_not_rename_a_run() -> None:
    """Catches a run that the other engine would start over instead of continuing."""
    names = {place(RootConfig(engine=engine), {"model": "tiny"}).run.id for engine in EngineKind}
    assert len(names) == 1


def test_every_point_of_a_sweep_is_tracked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two points in one wandb run: the tracker gets the run directory and reads the id there."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    places = []
    for lr in (1e-3, 3e-4):
        config = RootConfig()
        config.optim.lr = lr
        placed = place(config, {"model": "tiny"})
        assert launch_spec(placed).side_command == ("-m", "megads.tools.trackers.process", placed.run.dir, "--follow")
        places.append((placed.run.id, placed.run.dir))
    assert len({run_id for run_id, _ in places}) == len({run_dir for _, run_dir in places}) == 2
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert launch_spec(placed).side_command == ()


def test_cpu_attention_kernels_are_refused_on_gpus() -> None:
    """Catches an explicit attention kernel that is silently dropped on GPUs."""
    config = RootConfig()
    config.ops.impl, config.model.attention = Implementation.fused, AttentionKind.fused
    with pytest.raises(ConfigError, match=r"model\.attention = fused is for CPUs"):
        chosen_kernels(config, Machine(2**30, per_gpu=True))
    config.ops.impl, config.model.attention = Implementation.auto, AttentionKind.auto
    assert chosen_kernels(config, Machine(2**30, per_gpu=True)).model is not Implementation.fused


@pytest.mark.parametrize("kind", [AttentionKind.flash, AttentionKind.flex, AttentionKind.cudnn])
def test_gpu_attention_kernels_are_refused_on_a_cpu(kind: AttentionKind) -> None:
    """Catches an explicit attention kernel with which ranks start on a CPU and which is silently dropped there."""
    config = RootConfig()
    config.model.attention = kind
    with pytest.raises(ConfigError, match=rf"model\.attention = {kind} .* CPU.*: use model\.attention=auto"):
        chosen_kernels(config, Machine(2**30, per_gpu=False))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 6), (signal.SIGINT, 5)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_wait_for_a_restart(number: signal.Signals, code: int) -> None:
    """Catches a job that is terminated while it waits for a restart and exits without the code that requeues it."""
    before = signal.getsignal(number)
    sender = threading.Timer(0.3, os.kill, (os.getpid(), number))
    sender.start()
    begin = time.monotonic()
    assert wait_for_restart(1000.0) == code
    assert time.monotonic() - begin < 900 and signal.getsignal(number) == before


def test_a_wait_without_a_signal_ends_in_a_restart() -> None:
    """Catches a wait that does not end in a restart."""
    assert wait_for_restart(0.0) is None and wait_for_restart(0.2) is None


@pytest.mark.distributed
def test_a_start_prepares_again_after_another_trained_the_run(
    corpus: Path, megads: StartCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a takeover after which nobody trains: while the lease of a stopped launcher expired it trained on, so
    that the start that took over had been prepared for an earlier checkpoint."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, run__dir=run_dir, ops__impl="torch", schedule__name="constant")

    @contextmanager
    def after_the_other(*arguments: Any) -> Iterator[Lease]:
        ended = megads("train", *overrides, "train.steps=2").end()
        assert ended.code == 0, ended.err
        with claimed(*arguments) as lease:
            yield lease

    monkeypatch.setattr(start, "claimed", after_the_other)
    config = compose_train(*overrides, "train.steps=3")
    assert VERB.run(config, Invocation({}, set())) == 0
    assert [line["step"] for line in steps_of(run_dir)] == [1, 2, 3]
    assert [event["step"] for event in events_of(run_dir, "resume")] == [2]


def test_suspicious_resources_are_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a job of two nodes of which one trains, a job of one CPU for several ranks, an OMP_NUM_THREADS without
    effect, and threads that wait for each other on a busy machine, all without a word."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_ON_NODE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    asked = config(tmp_path)
    asked.cluster.threads_per_rank = 1
    here: Any = SimpleNamespace(config=asked, placement=None, meeting=None, machine=Machine(1, per_gpu=False))
    assert list(start._hints(here)) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert list(start._hints(here)) == [
        "OMP_NUM_THREADS = 4 has no effect: cluster.threads_per_rank = 1 takes precedence"
    ]
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "this SLURM job has 2 nodes, but the run uses only this one: cluster=slurm" in next(start._hints(here))
    on_slurm: Any = SimpleNamespace(**{**vars(here), "placement": SimpleNamespace(ranks_per_node=8)})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert "the job has 1 CPUs on this node for 8 ranks" in next(start._hints(on_slurm))
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_CPUS_ON_NODE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name)
    asked.cluster.threads_per_rank = None
    monkeypatch.setattr(start.environment, "available_cores", lambda: 8)
    monkeypatch.setattr(start, "useful_threads", lambda config: 4)
    monkeypatch.setattr(start.os, "getloadavg", lambda: (6.0, 6.0, 6.0))
    assert "this machine is busy (load 6.0 on 8 cores)" in next(start._hints(here))
    monkeypatch.setattr(start.os, "getloadavg", lambda: (1.0, 6.0, 6.0))
    assert list(start._hints(here)) == []
