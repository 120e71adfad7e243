"""The passes that load kernels before the first message of a pipeline change nothing and communicate nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from megads.engine.p2p import P2PCommunicator
from megads.engine.warm_up import WarmUp
from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from tests.distributed import run_ranks
from tests.parity import MODEL, build_engine, scenario_with, step_batches

pytestmark = pytest.mark.distributed

WITH_DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1, tie_embeddings=True)
SCENARIO = scenario_with(global_batch_size=8, micro_batch_size=1, model=WITH_DROPOUT)


def _steps(parallel: ParallelConfig, warms_up: bool) -> tuple[list[Any], list[str], str]:
    """Losses and gradient norms of an evaluation, two steps and a larger one; warm passes and messages in order; and
    what was printed."""
    events: list[str] = []

    def noted(owner: type, method: str, event: str) -> None:
        inner = getattr(owner, method)

        def note(*args: Any) -> Any:
            events.append(event)
            return inner(*args)

        setattr(owner, method, note)

    noted(WarmUp, "_run_pass", "warm")
    noted(P2PCommunicator, "post", "message")
    noted(P2PCommunicator, "send", "message")
    sys.stdout, printed = StringIO(), sys.stdout
    engine = build_engine(SCENARIO, parallel)
    engine.warm_up.enabled = warms_up
    found: list[Any] = [engine.evaluate(step_batches(SCENARIO, 0))]
    for step, scenario in enumerate((SCENARIO, SCENARIO, replace(SCENARIO, global_batch_size=12))):
        events.append("step")
        result = engine.step(step_batches(scenario, step), SCENARIO.lr)
        found.append((result.loss, result.grad_norm))
    output, sys.stdout = sys.stdout.getvalue(), printed
    return found, events, output


@pytest.mark.quick("dualpipe_v")
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "dualpipe_v"])
def test_warm_up_passes_change_nothing(name: str) -> None:
    """Catches warm passes that leave gradients or draw random numbers, that run after a message, again for a shape that
    is warm, or not for every stage and kind of backward pass; dropout and tied embeddings are on."""
    parallel = ParallelConfig(pp=2, schedule=ScheduleName(name))
    stages = 1 if name in ("1f1b", "zb_h1") else 2
    kinds = 2 if name == "dualpipe_v" else 1
    plain = run_ranks(_steps, 2, parallel, False)
    for (found, events, output), (expected, without, _) in zip(
        run_ranks(_steps, 2, parallel, True), plain, strict=True
    ):
        assert found == expected
        assert [event for event in events if event != "warm"] == without
        first_step = events.index("step")
        assert events[:stages] == ["warm"] * stages and events[stages:first_step].count("warm") == 0
        passes = stages * kinds
        assert events[first_step + 1 : first_step + 1 + passes] == ["warm"] * passes
        assert events.count("warm") == stages + passes
        assert output.count("warmed up the passes of training for activations of 1x") == 1
        assert output.count("warmed up the passes of evaluation") == 1
