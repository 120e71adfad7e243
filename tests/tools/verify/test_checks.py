"""Checks of `megads verify`: the likely cause of a failure, and failure without data."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.runtime.rich_console import VisibleConsole
from megads.tools.verify.checks import BF16, FP32, MEANINGS, Row, legend, likely_cause, rows
from megads.tools.verify.compare import show, train_reference
from megads.tools.verify.run import Run
from megads.tools.verify.scenario import Scenario

TP2 = ParallelConfig(tp=2)


@pytest.fixture(scope="module")
def reference() -> Run:
    return train_reference(Scenario(masked=True, optimizer=OptimConfig(ema_decay=0.6)))


def copy_of(reference: Run) -> Run:
    """A run that equals the reference."""
    return Run(
        list(reference.losses), list(reference.norms), list(reference.tokens), dict(reference.initial),
        dict(reference.weights), {n: g.copy() for n, g in reference.gradients.items()}, reference.validation,
        replicas={"weight/final_norm.bias": 0}, reductions={("torch.float32", 5)}, model=reference.model,
        averages={n: a.copy() for n, a in reference.averages.items()},
    )  # fmt: skip


def failed(run: Run, reference: Run, parallel: ParallelConfig = TP2) -> list[Row]:
    samples = [guarantee for guarantee in FP32 if guarantee.name != "N2"]
    return [row for row in rows(samples, "fp32", run, reference, parallel, tied=True) if not row.passed]


def scale_all(run: Run) -> None:
    for name in run.gradients:
        run.gradients[name] *= 3.0


def spoil_below_block_1(run: Run) -> None:
    for name in run.gradients:
        if name.startswith(("embedding", "blocks.0", "blocks.1.input_norm")):
            run.gradients[name] += np.float32(0.1)


def spoil_the_forward(run: Run) -> None:
    run.losses[0] += 0.1
    for name in run.gradients:
        run.gradients[name] += np.float32(0.1)


def spoil_norms(run: Run) -> None:
    for name in run.gradients:
        if name.endswith("norm.weight"):
            run.gradients[name] *= 0.5


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        (scale_all, "every gradient is 3 times the reference's"),
        (spoil_below_block_1, "the first wrong gradient is that of blocks.1.input_norm.bias"),
        (spoil_norms, "only parameters with copies on tensor-parallel ranks"),
        (lambda run: run.gradients["embedding.word.weight"].fill(0), "only the word embedding"),
        (lambda run: run.norms.__setitem__(0, 9.0), "every gradient is right and their norm is not"),
        (lambda run: run.weights.update({"final_norm.bias": np.ones(48, np.float32)}), "decay groups"),
        (lambda run: run.reductions.add(("torch.bfloat16", 7)), "gradients are not reduced in fp32"),
        (
            lambda run: run.replicas.update({"weight/final_norm.bias": 2}),
            "gradients of replicas differ in their last bits",
        ),
        (lambda run: run.tokens.__setitem__(0, 1), "count their tokens"),
        (spoil_the_forward, "a layer or the loss that is sharded over tp"),
        (lambda run: run.gradients.clear(), "no rank reports gradients"),
        (lambda run: run.averages["final_norm.weight"].fill(0), "their running average is not"),
        (lambda run: run.averages.pop("final_norm.weight"), "their running average is not"),
    ],
)
def test_the_cause_is_where_the_defect_is(defect: Callable[[Run], None], expected: str, reference: Run) -> None:
    """Catches a likely cause in the wrong component, and a deviation that no check detects."""
    run = copy_of(reference)
    assert failed(run, reference) == []
    defect(run)
    assert expected in likely_cause(failed(run, reference), run, reference, TP2)


def test_a_check_that_saw_nothing_fails_where_there_must_be_something(reference: Run) -> None:
    """Catches checks that pass because no reduction was recorded, or because ranks have no replicas."""
    run = copy_of(reference)
    run.reductions, run.replicas = set(), {}
    assert {row.guarantee for row in failed(run, reference)} == {"N8"}
    assert {row.guarantee for row in failed(run, reference, ParallelConfig(dp=2))} == {"N7"}
    assert {row.guarantee for row in failed(run, reference, ParallelConfig(pp=2))} == {"N7", "N8"}
    assert failed(run, reference, ParallelConfig()) == []


def test_ranks_that_share_no_weight_need_no_copies(reference: Run) -> None:
    """Catches OLMo 1, whose norms have no weights, failed under tensor parallelism because no copies were seen."""
    run, without = copy_of(reference), copy_of(reference)
    run.replicas = {}
    for some in (run, without):
        for values in (some.initial, some.weights, some.gradients, some.averages):
            for name in [name for name in values if "norm" in name or name.endswith("bias")]:
                values.pop(name)
    assert failed(run, without) == []
    assert {row.guarantee for row in failed(run, without, ParallelConfig(pp=2))} == {"N8"}


def test_bf16_is_held_to_its_own_bounds(reference: Run) -> None:
    """Catches a bf16 loss that is held to fp32's bound, or to none."""
    run = copy_of(reference)
    for off, passed in ((1e-4, True), (3e-4, False)):
        run.losses[0] = reference.losses[0] * (1 + off)
        found = {row.what: row.passed for row in rows(BF16, "bf16", run, reference, TP2, tied=True)}
        assert found["loss of step 1"] is passed


def test_what_a_guarantee_means_stands_below_the_table() -> None:
    """Catches a guarantee, such as N3, without its meaning below the table, and one that is not in docs/numerics.md."""
    row = Row("N3", "loss of step 1", "fp32", 1, 1e-6, 1e-8, True, ())
    out = io.StringIO()
    show(VisibleConsole(file=out, width=120), [row, row], "")
    [line] = legend(["N3", "N3"])
    assert line == f"N3  {MEANINGS['N3']}" and out.getvalue().count(line) == 1
    assert {guarantee.name for guarantee in FP32 + BF16} <= set(MEANINGS)
    page = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()
    guarantees, _, _ = page.partition("\n## ")
    assert re.findall(r"^\| (N\d+) ", guarantees, re.MULTILINE) == list(MEANINGS)
