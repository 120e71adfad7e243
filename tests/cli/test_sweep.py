"""`megads train -m` up to the start of its first point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import run_megads as megads
from tests.command import small_model


def refused(folder: Path, corpus: Path, *overrides: str) -> str:
    """What a sweep says that starts nothing."""
    result = megads(folder, "train", "-m", *small_model(corpus, train__steps=5), *overrides)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    assert not list(folder.glob("runs/[!s]*")), "no point is started"
    return result.stdout + result.stderr


def test_points_that_cannot_run_are_dropped_with_the_reason(corpus: Path, tmp_path: Path) -> None:
    """Catches points that are found infeasible only once they run, for memory or for a layout that does not divide,
    and a sweep without a single point that calls itself finished."""
    said = refused(tmp_path, corpus, "model.hidden_size=600000,1200000", "parallel.tp=1,4")
    assert "point 0 is dropped, model.hidden_size=600000 parallel.tp=1: rank 0 needs" in said
    assert "point 3 is dropped, model.hidden_size=1200000 parallel.tp=4: model.num_heads = 6 is not divisible" in said
    assert "4 infeasible" in said and "no point has finished" in said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("optim.lr=1,2", "run.id=same"), "run.id=same is shared by several points of the sweep"),
        (("optim.lr=interval(1,2)",), "optim.lr is an interval, of which a grid has no end"),
        (("hparams_search=random", "sweep.trials=2"), "no key has several values"),
        (("optim.lr=1,2", "sweep.pruning.name=median"), "evaluation.every_steps = 0: set it"),
        (("optim.lr=1,2", "sweep.launcher=slurm", "sweep.sbatch=no.sbatch"), "sweep.sbatch = no.sbatch: there is no"),
        (("optim.lr=1,2", "sweep.prune=median"), "unknown key sweep.prune"),
        (("optim.lr=1,2", "--config-name=x"), "--config-name=x cannot stand beside -m"),
        (("optim.lr=1,2", "sweep.parallel=1000"), "sweep.parallel = 1000, but this machine has"),
    ],
)
def test_a_sweep_that_cannot_be_run(corpus: Path, tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    """Catches a mistake in the sweep itself that is told once for every point, or only after the first one."""
    assert expected in refused(tmp_path, corpus, *overrides)
