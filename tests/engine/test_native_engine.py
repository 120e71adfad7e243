"""The native engine works without DeepSpeed, and holds the parameters in the order of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megads.model.gpt import GPT
from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from tests.command import REPOSITORY, Command, small_model, steps_of
from tests.distributed import run_ranks
from tests.parity import Scenario, build_engine
from tests.small_run import TOKENS, write_dataset

pytestmark = pytest.mark.distributed

PLACEMENTS = {
    "1f1b": [[0], [1]],
    "interleaved": [[0, 2], [1, 3]],
    "zb_v": [[0, 3], [1, 2]],
}
"""The virtual stages of the two pipeline ranks, in the order in which a rank builds them."""


def _parameters(parallel: ParallelConfig) -> tuple[list[int], list[tuple[str, str]]]:
    """The bounds of the stages, and the names of a rank's parameters, as in its module and as in the whole model."""
    engine: Any = build_engine(Scenario(), parallel)
    return engine.bounds, [(name, p.placement.key) for name, p in engine.module.named_parameters()]


@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_a_ranks_parameters_are_in_the_order_of_the_model(schedule: str) -> None:
    """Catches another order of a rank's parameters: buckets, and with them sums and checkpoint files, would differ."""
    model = GPT(Scenario().model, 0)
    of_layer = [[name for name, _ in layer.named_parameters()] for layer in model.layers]
    parallel = ParallelConfig(pp=2, schedule=ScheduleName(schedule))
    for (bounds, found), numbers in zip(run_ranks(_parameters, 2, parallel), PLACEMENTS[schedule], strict=True):
        held = [stage for number in numbers for stage in range(bounds[number], bounds[number + 1])]
        assert [name for name, _ in found] == [f"{stage}.{name}" for stage in held for name in of_layer[stage]]


@pytest.mark.slow
def test_a_native_run_imports_no_deepspeed(tmp_path: Path) -> None:
    """Catches an import of DeepSpeed by the launcher, the process that forks the ranks, a rank of a native run, and the
    ranks of an evaluation: none of them needs it, and each import takes 0.6 s of CPU time."""
    planted, imported = tmp_path / "planted", tmp_path / "imported"
    (planted / "deepspeed").mkdir(parents=True)
    text = f"open({str(imported)!r}, 'a').close()\nraise ImportError('DeepSpeed is not installed')\n"
    (planted / "deepspeed" / "__init__.py").write_text(text)
    prefix = write_dataset(tmp_path / "data")
    size = {"model__vocab_size": TOKENS + 2, "parallel__pp": 2, "train__steps": 1}
    train = small_model(prefix, **size, evaluation__at_end="false", run__dir="run")
    evaluate = ("run=run", "data=[valid]", "layout.pp=2", "device=cpu", "precision=fp32")
    for name, arguments in (("train", train), ("evaluate", evaluate)):
        variables = {"PYTHONPATH": f"{planted}:{REPOSITORY}"}
        ended = Command(tmp_path, (name, *arguments), variables=variables).end()
        assert ended.code == 0, ended.err
        assert not imported.exists(), name
    assert len(steps_of(tmp_path / "run")) == 1
