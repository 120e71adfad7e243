"""Runs that keep their best checkpoints: the real command."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.checkpoint.config import list_checkpoints
from megads.runtime.metrics import MetricHistory
from tests.command import StartCommand, small_model


@pytest.mark.quick("True")
@pytest.mark.distributed
@pytest.mark.parametrize("behind", [False, True])
def test_the_best_checkpoints_are_kept(behind: bool, corpus: Path, megads: StartCommand) -> None:
    """Catches losses that do not reach, under their name in metrics.jsonl, the ranks or writers that delete
    checkpoints, and a second start without the first one's losses."""
    run_dir = megads.folder / "run"
    # A learning rate at which the loss rises from the start, so that the best checkpoint is not one of the newest.
    overrides = small_model(
        corpus, optim__lr=1.0, optim__min_lr=1.0, checkpoint__every_steps=2, evaluation__every_steps=2,
        checkpoint__keep=1, parallel__dp=2,
        checkpoint__keep_best=2, checkpoint__keep_every=6, checkpoint__async_save=str(behind).lower(),
    )  # fmt: skip
    for steps in (8, 16):
        ended = megads("train", *overrides, f"train.steps={steps}", f"run.dir={run_dir}").end()
        assert ended.code == 0, ended.err
    losses = MetricHistory(run_dir, "valid/held_out/loss").values()
    assert sorted(losses) == [2, 4, 6, 8, 10, 12, 14, 16]
    best = sorted(losses, key=losses.__getitem__)[:2]
    assert set(best) - {6, 12, 14, 16}, "no step is kept for its loss alone: the rate is too low"
    assert list(list_checkpoints(run_dir)) == sorted({*best, 6, 12, 14, 16})
    # The disk plan names both settings.
    dry = megads("train", *overrides, "train.steps=60", f"run.dir={run_dir}", "run.dry_run=true").end()
    assert dry.code == 0 and "checkpoint.keep_best = 2, checkpoint.keep_every = 6 for good" in dry.out, dry.err
