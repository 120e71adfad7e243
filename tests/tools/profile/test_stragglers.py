"""Straggler detection: slow ranks are named within a few timed steps, and healthy ones never are."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megads.runtime.hooks import Span
from megads.tools.profile.stragglers import WINDOW, StragglerDetector, compute_seconds
from tests.command import StartCommand, events_of, small_model, steps_of

STEPS_OF_A_DAY = 8640
"""Timed steps: every tenth step, at a second per step."""


def judge(times: np.ndarray, peers: list[int] | None = None) -> list[tuple[int, int, bool]]:
    """Returns what the detector finds in times [steps, ranks]: step index, rank, whether the slowdown is over."""
    detector = StragglerDetector(peers or [0] * times.shape[1])
    return [
        (index, found.rank, found.over)
        for index, row in enumerate(times)
        for found in detector.add(detector.relative(row))
    ]


@pytest.mark.quick("heavy tails-3", "bursts-2")
@pytest.mark.fault(24)
@pytest.mark.parametrize("ranks", [2, 3, 256])
@pytest.mark.parametrize("noise", ["normal", "heavy tails", "bursts"])
def test_healthy_ranks_are_not_named_in_a_day(ranks: int, noise: str) -> None:
    """Catches healthy ranks that are named: with 1% noise, heavy tails, single steps that take ten times as long, and
    steps in which all ranks are slow."""
    draw = np.random.default_rng(ranks)
    times = 1 + 0.01 * draw.standard_normal((STEPS_OF_A_DAY, ranks))
    if noise == "heavy tails":
        times += 0.01 * np.abs(draw.standard_t(2, times.shape))
    if noise == "bursts":
        times[draw.random(times.shape) < 0.002] *= 10
        times *= 1 + 3 * (draw.random((STEPS_OF_A_DAY, 1)) < 0.01)
    assert judge(times) == []


@pytest.mark.fault(24)
@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
@pytest.mark.parametrize("slowdown", [0.15, 0.5, 3.0])
def test_a_slow_rank_is_named_in_time(ranks: int, slowdown: float) -> None:
    """Catches a slow rank that is named after less than half a window or more than one, and another rank named."""
    times = 1 + 0.01 * np.random.default_rng(ranks).standard_normal((60, ranks))
    times[20:40, ranks - 1] *= 1 + slowdown
    begin, end = judge(times)
    assert (begin[1:], end[1:]) == ((ranks - 1, False), (ranks - 1, True))
    assert 20 + WINDOW // 2 <= begin[0] < 20 + WINDOW and 40 < end[0] < 40 + WINDOW


def test_stages_are_not_compared_with_each_other() -> None:
    """Catches a last pipeline stage that is named for its larger work, and a rank alone in its stage that is named."""
    draw = np.random.default_rng(0)
    times = (1 + 0.01 * draw.standard_normal((40, 5))) * [1.0, 1.0, 2.5, 2.5, 9.0]
    assert judge(times, [0, 0, 1, 1, 2]) == []
    times[10:, 3] *= 1.5
    assert [rank for _, rank, _ in judge(times, [0, 0, 1, 1, 2])] == [3]


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    """Catches a median that includes the rank's own time: of two ranks, a slow one would look half as slow."""
    detector = StragglerDetector([0] * 4)
    assert detector.relative(np.array([1.0, 2.0, 4.0, 8.0])).tolist() == [1 / 4 - 1, 2 / 4 - 1, 1.0, 3.0]
    detector = StragglerDetector([0] * 3)
    assert detector.relative(np.array([3.0, 1.0, 2.0])).tolist() == [1.0, 1 / 2.5 - 1, 0.0]
    assert StragglerDetector([0, 0]).relative(np.array([1.0, 1.5])).tolist() == [1 / 1.5 - 1, 0.5]


def test_noise_hides_what_it_can_make() -> None:
    """Catches ranks that are named for a slowdown of 15% although their step times vary by a third anyway."""
    draw = np.random.default_rng(3)
    assert judge(np.exp(0.33 * draw.standard_normal((4000, 2)))) == []


def test_waits_are_not_counted_as_work() -> None:
    """Catches receives and reductions in a rank's compute time: the fast ranks' waits would hide the straggler."""
    kinds = ("forward", "receive_activation", "backward_input", "backward_weight", "backward", "reduce_gradients")
    spans = [Span(kind, 0, 0, 10.0 * place, 10.0 * place + 2**place) for place, kind in enumerate(kinds)]
    assert math.isclose(compute_seconds(spans), 1 + 4 + 8 + 16)


def stragglers_of(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    """Returns the straggler events that name a rank."""
    return [event for event in events_of(run_dir, "straggler") if event["rank"] == rank]


@pytest.mark.slow
@pytest.mark.fault(24)
@pytest.mark.distributed
def test_a_rank_stopped_half_of_its_time_is_named(corpus: Path, megads: StartCommand) -> None:
    """Catches a slow rank that is not named, and a slowdowns.jsonl that the report cannot draw."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=4000, logging__straggler_every_steps=1)
    command = megads("train", *overrides, f"run.dir={run_dir}")
    command.wait_for(lambda: len(steps_of(run_dir)) > 4 * WINDOW)
    text = (run_dir / "logs" / "rank_00001.log").read_text()
    slow = psutil.Process(int(text.split("pid ")[-1].split(",")[0]))
    deadline = time.monotonic() + 60
    while not stragglers_of(run_dir, 1) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(slow.pid, number)
            time.sleep(0.004)
    named = stragglers_of(run_dir, 1)
    command.process.send_signal(signal.SIGTERM)
    command.end()
    # On a busy machine rank 0 may have been named, too, for a while.
    assert named and named[-1]["slowdown"] > 0.1
    assert len((run_dir / "slowdowns.jsonl").read_text().splitlines()) > WINDOW
    assert megads("report", f"run={run_dir}", "output=page").end().code == 0
    assert (megads.folder / "page" / "report" / "stragglers.png").is_file()
