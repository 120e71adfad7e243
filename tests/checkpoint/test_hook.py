"""When checkpoints are saved, and what a failed save means for the run."""

from __future__ import annotations

import itertools
import math
import resource
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from megads.checkpoint import hook as hook_module
from megads.checkpoint.config import CheckpointConfig, list_checkpoints
from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.store import SaveError
from megads.engine.interface import Shard
from megads.errors import CheckpointError, Fenced
from megads.parallel.grid import single_rank_grid
from megads.runtime.distributed import open_control_plane
from megads.runtime.heartbeat import Heartbeat
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.lease import Fence, claimed
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from megads.runtime.slurm import SlurmJob
from tests.checkpoint.random_layouts import global_tensors, random_layout, run_record, shards_of
from tests.distributed import run_ranks


class OneRankEngine:
    """The part of an engine that saving calls, over fixed tensors."""

    optimizer_steps, grid = 0, single_rank_grid()

    def named_shards(self, owned: bool = True) -> list[Shard]:
        return shards_of(random_layout(1, 1)[0], global_tensors(1))


def run(
    run_dir: Path,
    steps: int,
    every_steps: int,
    full_disk_at: Collection[int] = (),
    loaded_step: int = 0,
    keep: int = 0,
    skipped: Collection[int] = (),
    to_the_end: bool = True,
    losses: Mapping[int, float] = MappingProxyType({}),
    fence: Fence | None = None,
    **options: Any,
) -> None:
    """A loop of `steps` steps that counts and calls the hook; to_the_end=False is a kill after the last step.

    Losses are written after the hook, as ValidationHook does. Options are those of CheckpointConfig.
    """
    state = TrainState(loaded_step, 8 * loaded_step, 80 * loaded_step)
    events = EventWriter(run_dir, enabled=open_control_plane().rank == 0)
    config = CheckpointConfig(every_steps=every_steps, keep=keep, **options)
    engine: Any = OneRankEngine()
    metrics, key = MetricsWriter(run_dir, enabled=open_control_plane().rank == 0), "valid/held_out/loss"
    loss_key = key if config.keep_best else None
    hook = CheckpointHook(engine, run_dir, config, run_record(0), state, events, fence, metrics, loss_key=loss_key)
    hook.on_start(state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(loaded_step + 1, steps + 1):
        state.step, state.samples, state.tokens = step, 8 * step, 80 * step
        if step in full_disk_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2500, limits[1]))
        try:
            hook.on_step(info(state, step == steps, step in skipped, hook.is_time()))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if step in losses:
            metrics.write({"step": step, key: losses[step], "valid/other/loss": -losses[step]})
    if to_the_end:
        hook.on_end(state)


def test_heartbeats_say_when_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """Catches a save without its own heartbeat phase, which looks like a hung step, and the phase at other steps."""
    said: list[tuple[int, str]] = []
    state, beats, engine = TrainState(), Heartbeat(), cast(Any, OneRankEngine())
    beats.enter = lambda phase, step=None: said.append((state.step, phase))  # type: ignore[method-assign]
    config, events = CheckpointConfig(every_steps=2), EventWriter(tmp_path)
    hook = CheckpointHook(engine, tmp_path, config, run_record(0), state, events, beats=beats)
    for state.step in (1, 2, 3):
        hook.on_step(info(state, last=False, skipped=False))
    assert said == [(2, "saving"), (2, "saving, training waits")]


@pytest.mark.parametrize(
    ("config", "save_s", "interval_s"),
    [
        (CheckpointConfig(), 0.1, 120.0),
        (CheckpointConfig(), 9.0, 900.0),
        (CheckpointConfig(every_steps=5), 0.1, math.inf),
        (CheckpointConfig(every_minutes=0), 0.1, math.inf),
        (CheckpointConfig(every_minutes=1.5, every_steps=5), 9.0, 90.0),
    ],
)
def test_interval(config: CheckpointConfig, save_s: float, interval_s: float) -> None:
    """Catches slow saves at the default interval, which would take more than 1% of the time, and a longer interval than
    was asked for."""
    assert config.interval_s(save_s) == pytest.approx(interval_s)


def test_saves_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run of hours without checkpoint.every_steps that a kill loses, and a save after every step once the
    first interval is over; a due save waits for a finite step."""
    seconds = itertools.count(0, 30)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter, sleep=time.sleep)
    monkeypatch.setattr(hook_module, "time", clock)
    run(tmp_path, 20, 0, skipped={6, 7, 8}, every_minutes=2)
    # Every look at the clock takes half a minute: one a step, two a save.
    assert list(list_checkpoints(tmp_path)) == [4, 9, 13, 17, 20]


def test_an_asynchronous_save_counts_its_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches saves that hold up training for more than 1% of the time, most of it in the step after them."""
    seconds = iter([0, 899, 901])
    monkeypatch.setattr(hook_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    engine, state = cast(Any, OneRankEngine()), TrainState()
    hook = CheckpointHook(engine, tmp_path, CheckpointConfig(), run_record(0), state, EventWriter(tmp_path))
    hook._background.waited_s = 9.0
    assert [hook.is_time(), hook.is_time()] == [False, True]


def info(state: TrainState, last: bool, skipped: bool, due: bool = False) -> StepInfo:
    return StepInfo(
        step=state.step, samples=state.samples, tokens=state.tokens, loss=1.0, grad_norm=1.0, lr=1e-3,
        global_batch_size=8, seq_len=10, step_time_s=0.1, data_time_s=0.0, skipped=skipped, culprit="", batch_hash="",
        last=last, save_due=due,
    )  # fmt: skip


def events_of(run_dir: Path) -> list[tuple[str, int]]:
    return [(line["event"], line.get("step", 0)) for line in read_json_lines(run_dir / EVENTS_FILE)]


@pytest.mark.parametrize(("every_steps", "saved"), [(2, [2, 4, 5]), (5, [5]), (0, [5])])
def test_when(every_steps: int, saved: list[int], tmp_path: Path) -> None:
    """Catches a missing last checkpoint, or one saved twice (at the interval, at the end, after the loop)."""
    run(tmp_path, 5, every_steps)
    assert list(list_checkpoints(tmp_path)) == saved
    assert events_of(tmp_path) == [("checkpoint_saved", step) for step in saved]


@pytest.mark.parametrize(
    ("skipped", "saved", "put_off"),
    [
        ([4], [2, 5, 6, 7], 4),
        ([3, 4, 5, 6], [2, 7], 4),
        ([1, 2], [3, 4, 6, 7], 2),
        ([6, 7], [2, 4, 5], 6),
        (range(1, 8), [], 2),
    ],
)
def test_nothing_is_saved_inside_a_streak(
    skipped: Collection[int], saved: list[int], put_off: int, tmp_path: Path
) -> None:
    """Catches a checkpoint of weights that may have caused the skipped steps, a due one that is never saved later, and
    a stop among skipped steps that loses the steps before them or counts the skipped ones."""
    run(tmp_path, 7, 2, skipped=skipped)
    assert list(list_checkpoints(tmp_path)) == saved
    assert [read_manifest(folder).run.state["step"] for folder in list_checkpoints(tmp_path).values()] == saved
    assert [step for event, step in events_of(tmp_path) if event == "checkpoint_put_off"] == [put_off]


@pytest.mark.parametrize(
    ("steps", "skipped", "saved"), [(5, [], [2, 4, 5]), (6, [6], [2, 4, 5]), (6, [4, 5, 6], [2, 3])]
)
def test_the_last_step_saves(steps: int, skipped: list[int], saved: list[int], tmp_path: Path) -> None:
    """Catches a last checkpoint that is saved only after the last validation, so that a kill in between loses steps,
    and a save that is reported as postponed although it is made."""
    run(tmp_path, steps, 2, skipped=skipped, to_the_end=False)
    assert list(list_checkpoints(tmp_path)) == saved
    put_off = [step for event, step in events_of(tmp_path) if event == "checkpoint_put_off"]
    assert put_off == ([4] if 4 in skipped else [])


@pytest.mark.parametrize(("steps", "skipped", "left"), [(4, [], [3, 4]), (6, [5], [4, 6]), (3, [3], [1, 2])])
def test_the_state_before_an_unproven_one_stays(
    steps: int, skipped: list[int], left: list[int], tmp_path: Path
) -> None:
    """Catches the deletion of the last proven checkpoint for a newer one that no finite step has followed."""
    run(tmp_path, steps, 1, keep=1, skipped=skipped)
    assert list(list_checkpoints(tmp_path)) == left


def test_a_skipped_step_ends_a_training_phase(tmp_path: Path) -> None:
    """Catches a stage that ends with a skipped step and saves the counters before it: the next start would train that
    step again, skip it again, and never reach the next stage."""
    state, engine = TrainState(), cast(Any, OneRankEngine())
    hook = CheckpointHook(engine, tmp_path, CheckpointConfig(), run_record(0), state, EventWriter(tmp_path))
    for state.step in (1, 2):
        state.samples = 8 * state.step
        last = state.step == 2
        hook.on_step(replace(info(state, last=last, skipped=last), ends_phase=last))
    hook.on_end(state)
    (folder,) = list_checkpoints(tmp_path).values()
    assert read_manifest(folder).run.state["samples"] == 16


def test_finished_run_started_again(tmp_path: Path) -> None:
    """Catches a start of a finished run that rewrites the checkpoint."""
    run(tmp_path, 5, 0, loaded_step=5)
    assert list(list_checkpoints(tmp_path)) == []


def outcome(run_dir: Path, full_disk_at: Collection[int], steps: int = 4) -> str:
    try:
        run(run_dir, steps, 1, full_disk_at)
    except SaveError as error:
        return f"stopped, {error.previous} left: {error}"
    return "finished"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("full_disk_at", "end", "saved"),
    [(2, "finished", [1, 3, 4]), (1, "stopped, None left", []), (4, "stopped, step_00000003 left", [1, 2, 3])],
)
def test_full_disk(full_disk_at: int, end: str, saved: list[int], tmp_path: Path) -> None:
    """Catches a run that one failed save ends, that continues without any checkpoint or succeeds without its last."""
    [ended] = run_ranks(outcome, 1, tmp_path, [full_disk_at])
    assert ended.startswith(end)
    assert list(list_checkpoints(tmp_path)) == saved
    events = {step: event for event, step in events_of(tmp_path)}
    assert events[full_disk_at] == "checkpoint_failed"


@pytest.mark.distributed
def test_saves_fail_only_so_often(tmp_path: Path) -> None:
    """Catches a run that continues although all its saves fail, until the last save ends it."""
    [ended] = run_ranks(outcome, 1, tmp_path, [2, 3, 5, 6, 7, 8, 9], 20)
    assert ended.startswith("stopped, step_00000004 left: 4 saves in a row failed (checkpoint.max_failed_saves = 3); ")
    assert [step for event, step in events_of(tmp_path) if event == "checkpoint_failed"] == [2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("options", "losses", "left"),
    [
        ({"keep": 1, "keep_every": 4}, {}, [4, 8, 9, 10]),
        ({"keep": 1, "keep_best": 2}, {2: 3.0, 3: 1.0, 5: 2.0, 6: 9.0, 8: 4.0}, [3, 5, 9, 10]),
        ({"keep": 2, "keep_best": 1}, {number: 1 / number for number in range(1, 11)}, [9, 10]),
        ({"keep": 2, "keep_best": 2}, {1: float("nan"), 3: float("inf"), 5: 7.0, 7: 8.0}, [5, 7, 9, 10]),
        ({"keep": 3, "keep_every": 5, "keep_best": 1}, {1: 1.0, 5: 2.0}, [1, 5, 8, 9, 10]),
    ],
)
def test_what_is_kept(options: dict[str, int], losses: dict[int, float], left: list[int], tmp_path: Path) -> None:
    """Catches a best checkpoint, or one of keep_every, that is deleted with the old ones or before its loss is known, a
    comparison by another validation set or by non-finite losses, and old checkpoints that are not deleted."""
    run(tmp_path, 10, 1, losses=losses, **options)  # type: ignore[arg-type]
    assert list(list_checkpoints(tmp_path)) == left


def test_the_best_of_earlier_starts_stay(tmp_path: Path) -> None:
    """Catches a start that ignores the losses of earlier starts, and, after a return to an earlier step, the deletion
    of checkpoints after that step, or their losses counted among the best."""
    run(tmp_path, 6, 1, keep=2, keep_best=1, losses={2: 1.0, 6: 0.5})
    assert list(list_checkpoints(tmp_path)) == [2, 5, 6]
    # As a start that continues from step 2 does.
    ledger = MetricsWriter(tmp_path, enabled=True)
    ledger.drop_after(2)
    ledger.close()
    run(tmp_path, 5, 1, loaded_step=2, keep=2, keep_best=1)
    assert list(list_checkpoints(tmp_path)) == [2, 4, 5, 6]


def with_a_full_disk(run_dir: Path, needed: int) -> list[str]:
    """Fills the disk at step 5 until `needed` checkpoints are deleted; returns them, and '' if none may be deleted."""
    limits, room, gone = resource.getrlimit(resource.RLIMIT_FSIZE), hook_module.make_room, list[str]()

    def make_room(*arguments: Any, **options: Any) -> str:
        gone.append(room(*arguments, **options))
        if len(gone) == needed:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return gone[-1]

    hook_module.make_room = make_room
    run(run_dir, 6, 1, full_disk_at=[5], keep=3, keep_every=2)
    return gone


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("needed", "gone", "left"), [(1, [3], [2, 4, 5, 6]), (2, [3, 2], [4, 5, 6]), (9, [3, 2], [4, 6])]
)
def test_room_is_made(needed: int, gone: list[int], left: list[int], tmp_path: Path) -> None:
    """Catches a disk without space for one more checkpoint on which every save fails, a kept checkpoint deleted before
    others or the newest deleted, and a run that a full disk ends although there are checkpoints to delete."""
    names = [f"step_{step:08d}" for step in gone]
    assert run_ranks(with_a_full_disk, 1, tmp_path, needed) == [[*names, ""] if needed > 2 else names]
    assert list(list_checkpoints(tmp_path)) == left
    removed = [line for line in read_json_lines(tmp_path / EVENTS_FILE) if line["event"] == "checkpoint_removed"]
    assert [(line["step"], line["folders"]) for line in removed] == [(5, [name]) for name in names]


def small_disk(run_dir: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: float) -> int:
    """Limits the run's disk to the given number of checkpoints; returns the bytes of one."""
    engine: Any = OneRankEngine()
    size = sum(shard.tensor.nbytes for shard in engine.named_shards())

    def disk_usage(path: Path) -> SimpleNamespace:
        # Counts each file as the bytes of its tensors, since the header of so small a file is larger.
        return SimpleNamespace(free=int(checkpoints * size) - size * len(list(run_dir.rglob("*.safetensors"))))

    monkeypatch.setattr(hook_module.shutil, "disk_usage", disk_usage)
    return size


def test_room_is_made_before_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a save that starts without enough disk space, deletion although there is space, and deletion of the
    newest checkpoint, or of one of keep_every, before a save has failed."""
    small_disk(tmp_path, monkeypatch, 3.5)
    run(tmp_path, 6, 1, keep=3, keep_every=2)
    assert list(list_checkpoints(tmp_path)) == [2, 4, 5, 6]
    removed = [line for line in read_json_lines(tmp_path / EVENTS_FILE) if line["event"] == "checkpoint_removed"]
    assert [(line["step"], line["folders"]) for line in removed] == [(4, ["step_00000001"]), (5, ["step_00000003"])]
    assert "GiB free, a checkpoint takes" in removed[0]["reason"]


def test_leftovers_go_before_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a checkpoint that is deleted while partial files of a killed start take up space."""
    run(tmp_path, 2, 1, keep=3)
    size = small_disk(tmp_path, monkeypatch, 3.5)
    leftover = tmp_path / "checkpoints" / ".step_00000009.partial"
    leftover.mkdir()
    (leftover / "rank_00000.safetensors").write_bytes(bytes(size))
    run(tmp_path, 3, 1, loaded_step=2, keep=3)
    assert list(list_checkpoints(tmp_path)) == [1, 2, 3] and not leftover.exists()


def test_an_orphan_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rank of an earlier start that deletes checkpoints, or the partial files of the new start."""
    run(tmp_path, 3, 1, keep=3)
    small_disk(tmp_path, monkeypatch, 3.5)
    being_written = tmp_path / "checkpoints" / ".step_00000004.partial"
    being_written.mkdir()
    first, second = SlurmJob("1", 0, "c"), SlurmJob("1", 1, "c")
    with claimed(tmp_path, first) as orphan, claimed(tmp_path, second), pytest.raises(Fenced):
        run(tmp_path, 4, 1, loaded_step=3, keep=3, fence=Fence(tmp_path, orphan.number))
    assert list(list_checkpoints(tmp_path)) == [1, 2, 3] and being_written.exists()


def test_a_disk_without_room_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that shows only at the first save, and a run with a checkpoint that is refused."""
    monkeypatch.setattr(hook_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"the disk of .* has 0\.00 GiB free, .* run\.dir"):
        run(tmp_path, 3, 1)
    assert not list(read_json_lines(tmp_path / EVENTS_FILE))
    monkeypatch.undo()
    run(tmp_path, 3, 1)
    monkeypatch.setattr(hook_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    run(tmp_path, 4, 1, loaded_step=3)
    assert [line["event"] for line in read_json_lines(tmp_path / EVENTS_FILE)].count("disk_space") == 1
