"""What the checks come to: one row a guarantee, as people and machines read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megads.parallel.config import ParallelConfig
from megads.verify import checks
from megads.verify.checks import EXACT, Deviation, Measure
from megads.verify.run import Run


@dataclass(frozen=True)
class Guarantee:
    """One check of the numerics contract.

    Attributes:
        name: N1 to N10.
        what: what is compared.
        measure: how.
    """

    name: str
    what: str
    measure: Measure


FP32 = (
    Guarantee("N1", "initial weights", checks.measure_initial_weights),
    Guarantee("N2", "samples, documents and their order", checks.measure_samples),
    Guarantee("N3", "reports of all ranks", checks.measure_agreement),
    Guarantee("N9", "tokens that count, with masks", checks.measure_tokens),
    Guarantee("N3", "loss of step 1", checks.measure_first_loss),
    Guarantee("N3", "gradient norm of step 1", checks.measure_first_norm),
    Guarantee("N3", "every gradient of step 1", checks.measure_gradients),
    Guarantee("N3", "loss of every step", checks.measure_losses),
    Guarantee("N3", "gradient norm of every step", checks.measure_norms),
    Guarantee("N3", "every weight in the end", checks.measure_weights),
    Guarantee("N10", "validation loss", checks.measure_validation),
    Guarantee("N7", "dtype of gradient reductions", checks.measure_reduction_dtype),
    Guarantee("N8", "copies of masters and moments", checks.measure_replicas),
)
BF16 = (
    Guarantee("N1", "initial weights", checks.measure_initial_weights),
    Guarantee("N4", "loss of step 1", checks.measure_bf16_loss),
    Guarantee("N7", "dtype of gradient reductions", checks.measure_reduction_dtype),
    Guarantee("N8", "copies of masters and moments", checks.measure_replicas),
)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        guarantee: N1 to N10.
        what: what was compared.
        precision: fp32 or bf16.
        compared: how many quantities.
        bound: largest allowed deviation, relative; 0 is bitwise equality.
        found: the largest; for bitwise bounds how many quantities differ.
        passed: the verdict.
        faults: what exceeds the bound.
    """

    guarantee: str
    what: str
    precision: str
    compared: int
    bound: float
    found: float
    passed: bool
    faults: tuple[str, ...]


def rows(
    guarantees: Sequence[Guarantee], precision: str, run: Run, reference: Run, parallel: ParallelConfig, tied: bool
) -> list[Row]:
    """The verdicts on one run.

    Args:
        guarantees: FP32 or BF16.
        precision: fp32 or bf16.
        run: the layout's.
        reference: of the same scenario.
        parallel: the layout.
        tied: the model's embedding is its head too.
    """
    found = []
    for guarantee in guarantees:
        deviations = guarantee.measure(run, reference)
        found.append(_row(guarantee, precision, deviations, _must_compare(guarantee, parallel, tied)))
    return found


def _must_compare(guarantee: Guarantee, parallel: ParallelConfig, tied: bool) -> bool:
    """Whether a check without anything to compare has failed: only where ranks share weights are there copies."""
    first, last = parallel.placement.ends
    tied_copies = tied and first != last
    if guarantee.name == "N7":
        return parallel.dp * parallel.cp > 1 or tied_copies
    return guarantee.name != "N8" or parallel.tp > 1 or tied_copies


def _row(guarantee: Guarantee, precision: str, deviations: Sequence[Deviation], must_compare: bool) -> Row:
    exceeding = [deviation for deviation in deviations if deviation.exceeds]
    faults = [str(deviation) for deviation in exceeding]
    if not deviations and must_compare:
        faults = [f"{guarantee.what}: none was seen, and this layout must have some"]
    bound = max((deviation.bound for deviation in deviations), default=EXACT)
    largest = max((deviation.found for deviation in deviations if deviation.bound > EXACT), default=0.0)
    return Row(
        guarantee=guarantee.name,
        what=guarantee.what,
        precision=precision,
        compared=len(deviations),
        bound=bound,
        found=largest if bound > EXACT else float(len(exceeding)),
        passed=not faults,
        faults=tuple(faults),
    )
