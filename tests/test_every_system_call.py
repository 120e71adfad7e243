"""Kills each process of a run with SIGKILL right before each system call that changes the run directory.

tests.system_calls traces launcher, ranks and writers, so that every write, fsync, rename and change of shared memory is
a point. The same command must then end as an undisturbed run does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from megads.errors import RankKilled
from tests.command import Ended, StartCommand, checkpoint_of, checksums, small_model, steps_of
from tests.faults import TRACED, Traced
from tests.system_calls import NO_POINT, Point, first_and_last, needs_ptrace, open_files, read_points

pytestmark = [pytest.mark.distributed, needs_ptrace]

STEPS = 6
_TRIES = 3
ROLES = ("launcher", "rank 0", "rank 1", "writer 0", "writer 1")
# Ranks are killed when their launcher dies; a busy machine takes a moment.
_GONE_S = 10.0


class Runs:
    """Runs of one config: two ranks that save every step asynchronously, and synchronously at the end."""

    def __init__(self, corpus: Path, megads: StartCommand) -> None:
        self._megads, self._folder, self._started = megads, megads.folder, 0
        self._overrides = small_model(
            corpus, train__steps=STEPS, checkpoint__every_steps=1, checkpoint__keep=1, checkpoint__async_save=True,
            parallel__dp=2, model__num_layers=1, cluster__max_restarts=0,
        )  # fmt: skip
        self.reference = self._folder / "reference"
        ended = self.continued(self.reference)
        assert ended.code == 0, ended.err

    def traced(self, role: str, point: Point = NO_POINT) -> tuple[Path, list[Point], Ended]:
        """Starts a run in a new folder, kills one process at a point, and returns the points that it reached."""
        self._started += 1
        run_dir, log = self._folder / f"run-{self._started}", self._folder / f"calls-{self._started}"
        traced = Traced(role, str(run_dir), str(log), point.label, point.number)
        variables = {TRACED: json.dumps(asdict(traced))}
        command = self._megads(
            "train", *self._overrides, f"run.dir={run_dir}", fault="die_at_a_call", variables=variables
        )
        ended = command.end()
        return run_dir, read_points(log), ended

    def continued(self, run_dir: Path) -> Ended:
        """Runs the same command untouched."""
        return self._megads("train", *self._overrides, f"run.dir={run_dir}").end()

    def fault(self, role: str, point: Point) -> str | None:
        """What is wrong after a kill at a point; empty if nothing is, None if the run never reached it."""
        run_dir, points, cut_off = self.traced(role, point)
        if not points or points[-1] != point:
            return None if cut_off.code == 0 else f"exit {cut_off.code} without a kill: {cut_off.err[-500:]}"
        wanted = {"launcher": (-9,), "rank": (RankKilled.exit_code,), "writer": (0,)}[role.partition(" ")[0]]
        if cut_off.code not in wanted or "Traceback" in cut_off.err:
            return f"exit {cut_off.code}: {cut_off.err[-500:]}"
        deadline = time.monotonic() + _GONE_S
        while left := open_files(run_dir):
            if time.monotonic() > deadline:
                return f"processes are left: {left}"
            time.sleep(0.01)
        again = self.continued(run_dir)
        if again.code:
            return f"the same command: exit {again.code}: {again.err[-500:]}"
        return self._difference(run_dir)

    def _difference(self, run_dir: Path) -> str:
        """How a continued run differs from the undisturbed one; empty if it does not."""
        if steps_of(run_dir) != steps_of(self.reference):
            return "another ledger"
        if checksums(checkpoint_of(run_dir, STEPS)) != checksums(checkpoint_of(self.reference, STEPS)):
            return "another checkpoint"
        if (run_dir / "checkpoints" / "latest").read_text() != f"{checkpoint_of(run_dir, STEPS).name}\n":
            return "latest names another checkpoint"
        names = [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
        # A folder whose deletion was interrupted during the last save is removed by the next save.
        hidden = [name for name in names if not name.endswith(".removed")]
        return f"leftovers: {hidden}" if hidden else ""


@pytest.fixture(scope="module")
def runs(corpus: Path, module_megads: StartCommand) -> Runs:
    return Runs(corpus, module_megads)


def kill_at_each(runs: Runs, role: str, points: Sequence[Point]) -> None:
    wrong, missed = [], []
    for point in points:
        tries = (runs.fault(role, point) for _ in range(_TRIES if point.number == 1 else 1))
        found = next((told for told in tries if told is not None), None)
        print(f"{role}: {point}: {'not reached' if found is None else found or 'as if undisturbed'}", flush=True)
        if found:
            wrong.append(f"{point}: {found}")
        if found is None:
            missed.append(point)
    assert not wrong, "\n".join(wrong)
    # Other processes may change how often a label occurs, but not whether it does, except for messages. On a busy
    # machine a writer may write only one checkpoint, which rank 0 then deletes at the end.
    by_chance = ("socket", "pipe", *((".removed",) if role == "writer 0" else ()))
    assert not [point for point in missed if point.number == 1 and not any(word in point.label for word in by_chance)]


@pytest.mark.fault(5)
@pytest.mark.parametrize("stride", [pytest.param(6, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.attack)])
@pytest.mark.parametrize("role", ROLES)
def test_a_kill_at_every_system_call_loses_nothing(role: str, stride: int, runs: Runs) -> None:
    """Catches a point at which a kill loses a checkpoint, changes the ledger, locks the run out, or leaves ranks
    behind: before the first and the last call of each kind on each file; every sixth of these in CI."""
    _, points, ended = runs.traced(role)
    assert ended.code == 0, ended.err
    # Writers make the same calls for every save, and the number of their saves varies.
    chosen = [point for point in points if point.number == 1] if "writer" in role else first_and_last(points)
    print(f"{role}: {len(points)} calls, {len(chosen)} points")
    kill_at_each(runs, role, chosen[::stride])


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("role", "label"),
    [
        pytest.param("launcher", "rename .data_record.json.*.partial data_record.json", marks=pytest.mark.slow),
        ("rank 0", "rename checkpoints/.latest.*.partial checkpoints/latest"),
    ],
)
def test_a_kill_at_sampled_system_calls_loses_nothing(role: str, label: str, runs: Runs) -> None:
    """Catches the same while a start or a checkpoint is partially recorded, and a tracer that kills no process."""
    kill_at_each(runs, role, [Point(label, 1)])
