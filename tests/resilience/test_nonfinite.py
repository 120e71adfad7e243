"""Non-finite steps: recorded one by one, survived up to a number in a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.errors import NumericalError
from megads.resilience.nonfinite import NonFiniteHook
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE


def step(number: int, skipped: bool) -> StepInfo:
    return StepInfo(
        step=number, samples=number, tokens=number, loss=1.0, grad_norm=1.0, lr=0.1, global_batch_size=1, seq_len=1,
        step_time_s=0.1, data_time_s=0.0, skipped=skipped, culprit="rank 1 in its forward" * skipped, batch_hash="",
    )  # fmt: skip


def hook(run_dir: Path, most: int) -> NonFiniteHook:
    made = NonFiniteHook(EventWriter(run_dir), most, lambda step: run_dir / str(step))
    made.on_start(TrainState())
    return made


def test_each_skipped_step_is_an_event(tmp_path: Path) -> None:
    """Catches a skip that nobody hears of, and one without its culprit."""
    watch = hook(tmp_path, 5)
    for number, skipped in enumerate([False, True, False, True, True], start=1):
        watch.on_step(step(number, skipped))
    events = list(read_json_lines(tmp_path / EVENTS_FILE))
    assert [(e["event"], e["step"], e["culprit"]) for e in events] == [
        ("step_skipped", number, "rank 1 in its forward") for number in (2, 4, 5)
    ]


def test_one_more_than_the_cap_in_a_row_ends_the_run(tmp_path: Path) -> None:
    """Catches a cap that is off by one, and a message that does not say what to do."""
    watch = hook(tmp_path, 2)
    watch.on_step(step(1, True))
    watch.on_step(step(2, True))
    with pytest.raises(
        NumericalError, match=r"3 non-finite steps in a row, up to step 3 .*rank 1 .*optim\.lr.*checkpoint\.load=.*/0"
    ):
        watch.on_step(step(3, True))
    assert NumericalError.exit_code == 7
    assert len(list(read_json_lines(tmp_path / EVENTS_FILE))) == 3


def test_a_good_step_starts_the_count_again(tmp_path: Path) -> None:
    """Catches skips that add up over weeks until a healthy run dies."""
    watch = hook(tmp_path, 2)
    for number in range(1, 31):
        watch.on_step(step(number, skipped=number % 3 != 0))


def test_every_rank_counts_but_only_one_writes(tmp_path: Path) -> None:
    """Catches ranks that go on after rank 0 has given up."""
    watch = NonFiniteHook(EventWriter(tmp_path, enabled=False), 0)
    with pytest.raises(NumericalError):
        watch.on_step(step(1, True))
    assert not (tmp_path / EVENTS_FILE).exists()
