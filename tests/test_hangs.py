"""Ranks that hang in a real run: detected within seconds, named with their stack and collective, and restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.tools.diagnose.inputs import main_thread_stack
from tests.command import StartCommand, events_of, finished_run, small_model, steps_of
from tests.faults import HANG_STEP, HANG_WAY

pytestmark = pytest.mark.distributed
# `Command.end` fails long before cluster.timeout_s, 600 s, at which collectives end by themselves.


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, module_megads: StartCommand) -> Path:
    return finished_run(module_megads, "undisturbed", hanging_run(corpus))


def hanging_run(corpus: Path) -> list[str]:
    """Overrides for enough steps, each long enough, that a monitor polling twice a second can learn from them."""
    return small_model(corpus, parallel__dp=2, train__steps=240, cluster__hang_min_s=1, checkpoint__every_steps=50)


@pytest.mark.fault(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["hook", "collective", "interpreter", "stop"])
def test_a_hung_rank_is_named_and_started_again(
    way: str, corpus: Path, undisturbed: Path, megads: StartCommand
) -> None:
    """Catches a hang that lasts until a timeout, blame on the rank that waits, missing evidence, a stopped process that
    survives, and a restart that changes the results."""
    run_dir = megads.folder / "run"
    variables = {HANG_WAY: way, HANG_STEP: "220"}
    overrides = [*hanging_run(corpus), f"run.dir={run_dir}", "cluster.max_restarts=1"]
    ended = megads("train", *overrides, fault="hang_once", variables=variables).end()
    assert ended.code == 0, ended.err
    assert steps_of(run_dir) == steps_of(undisturbed)
    (found,) = events_of(run_dir, "hang_suspected")
    assert (found["rank"], found["killed"]) == (1, True), found
    assert "rank 1: hung:" in ended.err
    (folder,) = (run_dir / "evidence").iterdir()
    assert found["evidence"] == [str(folder)]
    waits = main_thread_stack(folder, 0)
    assert waits and "tests/faults.py" not in waits[0], "it waits in a collective"
    if way == "stop":
        assert "T (stopped)" in (folder / "node.json").read_text()
    else:
        assert any("tests/faults.py" in frame and "hang" in frame for frame in main_thread_stack(folder, 1))
    if way == "collective":
        assert "rank 1 did not enter gloo:" in found["message"]
    (restart,) = events_of(run_dir, "restart")
    assert restart["from_step"] == 200


@pytest.mark.slow
@pytest.mark.parametrize("detected", [True, False])
def test_a_rank_that_hangs_before_the_first_step_is_named(detected: bool, corpus: Path, megads: StartCommand) -> None:
    """Catches a start that hangs until its collectives time out although one rank is behind all others, and rank 0
    blamed for it then."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=3, run__dir=run_dir)
    if detected:
        overrides += ["cluster.hang_min_s=1", "cluster.max_restarts=1", "cluster.timeout_s=600"]
    else:
        overrides += ["cluster.hang_action=ignore", "cluster.timeout_s=15"]
    ended = megads("train", *overrides, fault="hang_at_the_start").end()
    assert "rank 1: hung: opening the data for" in ended.err
    if detected:
        assert ended.code == 0 and len(steps_of(run_dir)) == 3
        assert len(events_of(run_dir, "restart")) == 1
        assert [found["rank"] for found in events_of(run_dir, "hang_suspected")] == [1], "not by a time-out"
    else:
        assert ended.code == 9, ended.err
