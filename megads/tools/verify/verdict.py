"""What the checks come to: one row a guarantee, as people and machines read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megads.model.gpt import TIED_PARAMETER
from megads.parallel.config import ParallelConfig
from megads.tools.verify import checks
from megads.tools.verify.checks import EXACT, Deviation, Measure, measure_gradients, relative
from megads.tools.verify.run import Run


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


_SAME_FACTOR = 1e-3
"""Gradients that are all off by one factor are off by nothing else beyond this."""
_COPIED_OVER_TP = ("norm.weight", "norm.bias", "dense.bias", "down.bias", "position.weight")


def likely_cause(failed: Sequence[Row], run: Run, reference: Run, parallel: ParallelConfig) -> str:
    """Where to look first.

    Args:
        failed: the rows that did not pass, fp32 first.
        run: the layout's in fp32.
        reference: of the same scenario.
        parallel: the layout.
    """
    what = {row.what for row in failed if row.precision == "fp32"}
    if "initial weights" in what:
        return "weights are drawn or cut differently on some rank; whatever else is off may follow from that"
    if "samples, documents and their order" in what:
        return "ranks read other samples than one process would: the sampler, the loader, or the documents' borders"
    if any(row.guarantee == "N7" for row in failed):
        return "gradients lose bits on their way: communication_data_type, or a reduction that bypasses it"
    if "every gradient of step 1" in what:
        return _cause_of_gradients(run, reference, parallel, forward="loss of step 1" in what)
    if "reports of all ranks" in what and len(what) == 1:
        return "the model is right, but ranks are told different sums: over which group losses and norms are shared"
    if "loss of step 1" in what or "tokens that count, with masks" in what:
        return "gradients are right and the loss is not: how ranks sum their losses and count their tokens"
    if "gradient norm of step 1" in what:
        return (
            "every gradient is right and their norm is not: a parameter is counted on several ranks or on none "
            "(its tensor_model_parallel and ds_pipe_replicated marks), or the squares are summed over the wrong group"
        )
    if what & {"loss of every step", "gradient norm of every step", "every weight in the end"}:
        return "the first step's gradients are right: clipping, the weight decay groups, Adam's moments or the update"
    if "copies of masters and moments" in what:
        return "copies see gradients that differ in their last bits: the order of reduction, or clipping that differs"
    if "validation loss" in what:
        return "training is right: how the last, incomplete batch is filled and masked, or dropout in evaluation"
    return "fp32 is right and bf16 is not: a sum, a softmax or a loss that is computed in bf16"


def _cause_of_gradients(run: Run, reference: Run, parallel: ParallelConfig, forward: bool) -> str:
    factors = _factors(run, reference)
    alike = factors and max(factors) - min(factors) <= _SAME_FACTOR * abs(max(factors))
    if alike and abs(factors[0] - 1) > _SAME_FACTOR:
        return (
            f"every gradient is {np.mean(factors):.4g} times the reference's: divided by the wrong number of "
            "micro-batches, data-parallel ranks or tokens"
        )
    if not run.gradients:
        return "no rank shows gradients: the engine reduces them by a way that watch_gradients does not see"
    names = list(reference.gradients)
    wrong = [name for name, d in zip(names, measure_gradients(run, reference), strict=True) if d.exceeds]
    if wrong == [TIED_PARAMETER]:
        return "only the word embedding is off: the sum over its copies on the first and last stage, or over its rows"
    if forward and parallel.tp == parallel.cp == 1:
        return "the loss differs: how micro-batches and replicas average it over unmasked tokens, or how masks are read"
    if forward:
        return (
            "the forward pass differs: a layer or the loss that is cut over tp (biases, vocabulary padding, the slopes "
            "of a rank's heads), attention over cp, or masks"
        )
    last = wrong[-1]
    if parallel.tp > 1 and all(name.endswith(_COPIED_OVER_TP) for name in wrong):
        return "only parameters with copies on tensor-parallel ranks are off: their gradients are not summed over tp"
    return (
        f"the forward pass is right; from the head down the first wrong gradient is that of {last}: look at the "
        "backward pass there (a missing reduction of what enters or leaves it)"
    )


def _factors(run: Run, reference: Run) -> list[float]:
    """By which every gradient is longer than the reference's; empty where their directions differ."""
    factors = []
    for name, theirs in reference.gradients.items():
        if name not in run.gradients:
            return []
        ours, wanted = run.gradients[name].astype(np.float64), theirs.astype(np.float64)
        square = float((wanted * wanted).sum())
        if square == 0.0:
            continue
        factor = float((ours * wanted).sum()) / square
        if not factor or not relative(run.gradients[name] / factor, theirs) <= _SAME_FACTOR:
            return []
        factors.append(factor)
    return factors
