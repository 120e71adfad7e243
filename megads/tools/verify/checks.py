"""Checks: deviations of a layout's run from the reference run, against the bounds of the numerics contract.

Each `measure_` function returns all deviations with their bounds, including those within bounds. Each `check_` function
returns the violations only, for assertions in tests and mutants. `rows` summarizes the deviations, one row per check.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.api import TIED_PARAMETER, ModelConfig, ParallelConfig
from megads.tools.verify.run import Run

Array = npt.NDArray[Any]
EXACT = 0.0


@dataclass(frozen=True)
class Deviation:
    """Deviation of one quantity from the reference.

    Attributes:
        what: name of the quantity.
        found: relative deviation; for exact bounds the number of elements that differ.
        bound: maximum allowed value of `found`.
        values: measured and expected values as text; may be empty.
    """

    what: str
    found: float
    bound: float
    values: str = ""

    @property
    def exceeds(self) -> bool:
        # Not `>`, so that NaN exceeds the bound.
        return not self.found <= self.bound

    def __str__(self) -> str:
        off = f"{self.found:.0f} differ" if self.bound == EXACT else f"off by {self.found:.1e}, bound {self.bound:.0e}"
        return f"{self.what}: {off}" + (f" ({self.values})" if self.values else "")


Measure = Callable[[Run, Run], list[Deviation]]


def faults(measures: Sequence[Measure], run: Run, reference: Run) -> list[str]:
    """Descriptions of all deviations that exceed their bounds."""
    return [str(found) for measure in measures for found in measure(run, reference) if found.exceeds]


def relative(value: Array, reference: Array) -> float:
    """||value - reference|| / ||reference||, in fp64."""
    wanted = reference.astype(np.float64)
    return float(np.linalg.norm(value.astype(np.float64) - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))


def drop_key_biases(name: str, values: Array, model: ModelConfig) -> Array:
    """Removes the key biases: softmax is invariant to them, so their gradient is rounding noise that Adam amplifies."""
    if not name.endswith("attention.qkv.bias"):
        return values
    queries = model.queries_per_kv
    return np.delete(values.reshape(model.kv_heads, queries + 2, -1), queries, axis=1)


def _scalar(what: str, found: float, wanted: float, bound: float) -> Deviation:
    off = abs(found / wanted - 1) if wanted else abs(found)
    return Deviation(what, off, bound, f"{found!r}, reference {wanted!r}")


def measure_initial_weights(run: Run, reference: Run) -> list[Deviation]:
    """N1: the same seed gives bitwise identical full weights."""
    assert run.initial.keys() == reference.initial.keys()
    return [
        Deviation(name, float(np.count_nonzero(run.initial[name].view(np.int32) != values.view(np.int32))), EXACT)
        for name, values in reference.initial.items()
    ]


def measure_samples(run: Run, reference: Run) -> list[Deviation]:
    """N2: the same samples in the same order, with the same tokens and documents, on every rank."""
    ours, theirs = run.stream, reference.stream
    steps = enumerate(itertools.zip_longest(ours.hashes, theirs.hashes), start=1)
    found = [Deviation(f"batch hash of step {step}", float(a != b), EXACT) for step, (a, b) in steps]
    names = sorted(ours.contents.keys() | theirs.contents.keys())
    return found + [Deviation(n, float(ours.contents.get(n) != theirs.contents.get(n)), EXACT) for n in names]


def measure_agreement(run: Run, reference: Run) -> list[Deviation]:
    """N3: losses, norms, tokens and validation are global values, so every rank must report the same."""
    del reference
    count = Deviation("values that differ between ranks", len(run.disagreements), EXACT)
    return [count, *(Deviation(what, 1, EXACT) for what in run.disagreements)]


def measure_tokens(run: Run, reference: Run) -> list[Deviation]:
    """N9: the number of tokens over which the loss of a step is averaged."""
    pairs = enumerate(zip(run.tokens, reference.tokens, strict=True), start=1)
    return [
        Deviation(f"tokens of step {step}", abs(ours - theirs), EXACT, f"{ours}, reference {theirs}")
        for step, (ours, theirs) in pairs
    ]


def measure_first_loss(run: Run, reference: Run) -> list[Deviation]:
    """N3: the loss of the first step."""
    return [_scalar("loss of step 1", run.losses[0], reference.losses[0], 1e-6)]


def measure_first_norm(run: Run, reference: Run) -> list[Deviation]:
    """N3: the gradient norm of the first step."""
    return [_scalar("gradient norm of step 1", run.norms[0], reference.norms[0], 1e-5)]


def measure_gradients(run: Run, reference: Run) -> list[Deviation]:
    """N3: every gradient of the first step, relative to its norm.

    The gradient of a parameter with a single element, which no model here has, can be a sum whose terms cancel: with
    one gain per norm, correct layouts differed by up to 1e-4 of it, 4e-9 of the norm of all gradients.
    """
    assert run.gradients.keys() <= reference.gradients.keys()
    return [
        Deviation(f"gradient of {name}", relative(run.gradients[name], gradient), 1e-5)
        if name in run.gradients
        else Deviation(f"gradient of {name}", math.nan, 1e-5, "no rank has it")
        for name, gradient in reference.gradients.items()
    ]


def measure_losses(run: Run, reference: Run) -> list[Deviation]:
    """N3: the loss of every step."""
    pairs = enumerate(zip(run.losses, reference.losses, strict=True), start=1)
    return [_scalar(f"loss of step {step}", ours, theirs, 1e-5) for step, (ours, theirs) in pairs]


def measure_norms(run: Run, reference: Run) -> list[Deviation]:
    """N3: the gradient norm at every step."""
    pairs = enumerate(zip(run.norms, reference.norms, strict=True), start=1)
    return [_scalar(f"gradient norm of step {step}", ours, theirs, 1e-4) for step, (ours, theirs) in pairs]


def measure_weights(run: Run, reference: Run) -> list[Deviation]:
    """N3: every weight after the last step, relative to its norm, without key biases."""
    model = reference.model
    return [
        Deviation(
            name,
            relative(drop_key_biases(name, run.weights[name], model), drop_key_biases(name, weight, model)),
            reference.weight_bound,
        )
        for name, weight in reference.weights.items()
    ]


def measure_averages(run: Run, reference: Run) -> list[Deviation]:
    """N3: every running average after the last step, relative to its norm, without key biases."""
    model = reference.model
    return [
        Deviation(
            f"average of {name}",
            relative(drop_key_biases(name, run.averages[name], model), drop_key_biases(name, average, model))
            if name in run.averages
            else math.nan,
            reference.weight_bound,
        )
        for name, average in reference.averages.items()
    ]


def measure_float8_loss(run: Run, reference: Run) -> list[Deviation]:
    """N11: the loss of the first step in FP8, in fp64: scales of parts of groups changed it by 5e-12 and more."""
    if not reference.float8:
        return []
    return [_scalar("loss of step 1 in FP8", run.losses[0], reference.losses[0], 1e-13)]


def measure_bf16_loss(run: Run, reference: Run) -> list[Deviation]:
    """N4: the first loss in bf16, over enough tokens that rounding errors average out."""
    return [_scalar("loss of step 1", run.losses[0], reference.losses[0], 2e-4)]


def measure_bf16_norm(run: Run, reference: Run) -> list[Deviation]:
    """N4: the gradient norm of step 1 in bf16: a gradient that is lost in bf16 only changes no loss of that step."""
    return [_scalar("gradient norm of step 1", run.norms[0], reference.norms[0], 5e-3)]


def measure_reduction_dtype(run: Run, reference: Run) -> list[Deviation]:
    """N7: every gradient reduction is in fp32; the token count and the loss are reduced in fp64."""
    del reference
    exact = ("torch.float32", "torch.float64")
    return [
        Deviation(f"{dtype} reduction of {numel} elements", float(dtype not in exact), EXACT)
        for dtype, numel in sorted(run.reductions)
    ]


def measure_replicas(run: Run, reference: Run) -> list[Deviation]:
    """N8: replicas of a master weight or moment are bitwise equal on all ranks."""
    del reference
    return [Deviation(name, float(differ), EXACT) for name, differ in sorted(run.replicas.items())]


def measure_validation(run: Run, reference: Run) -> list[Deviation]:
    """N10: the token mean over the whole validation set, including its incomplete last batch."""
    (loss, tokens), (expected, expected_tokens) = run.validation, reference.validation
    counted = Deviation("validation tokens", abs(tokens - expected_tokens), EXACT, f"{tokens} of {expected_tokens}")
    return [_scalar("validation loss", loss, expected, 1e-6), counted]


def check_initial_weights(run: Run, reference: Run) -> list[str]:
    """N1: initial weights."""
    return faults([measure_initial_weights], run, reference)


def check_first_step(run: Run, reference: Run) -> list[str]:
    """N3 and N9: agreement of ranks, tokens, loss (1e-6), gradient norm (1e-5), every gradient (1e-5 of its norm)."""
    return faults(
        [measure_agreement, measure_tokens, measure_first_loss, measure_first_norm, measure_gradients], run, reference
    )


def check_curve(run: Run, reference: Run) -> list[str]:
    """N3: loss (1e-5) and gradient norm (1e-4) of all steps; every weight and running average after the last step
    (1e-4, Lion 1e-3). All bounds are relative."""
    return faults([measure_losses, measure_norms, measure_weights, measure_averages], run, reference)


def check_replicas(run: Run, reference: Run) -> list[str]:
    """N8: replicas of masters and moments."""
    return faults([measure_replicas], run, reference)


def check_reduction_dtype(run: Run, reference: Run) -> list[str]:
    """N7: dtype of gradient reductions."""
    return faults([measure_reduction_dtype], run, reference)


def check_float8(run: Run, reference: Run) -> list[str]:
    """N11: the loss of the first step in FP8."""
    return faults([measure_float8_loss], run, reference)


def check_validation(run: Run, reference: Run) -> list[str]:
    """N10: validation loss."""
    return faults([measure_validation], run, reference)


@dataclass(frozen=True)
class Guarantee:
    """One check of the numerics contract.

    Attributes:
        name: guarantee, N1 to N11.
        what: quantity that is compared.
        measure: function that computes the deviations.
        optional: whether the check is left out if there is nothing to compare.
    """

    name: str
    what: str
    measure: Measure
    optional: bool = False


MEANINGS = {
    "N1": "one seed gives the same full weights in every layout",
    "N2": "the same samples in the same order in every layout",
    "N3": "in fp32: losses, gradient norms, every gradient and weight as on one process",
    "N4": "in bf16: the first loss and gradient norm as on one process",
    "N5": "a run that was killed continues bit for bit",
    "N6": "a run that continues in another layout has the same first loss",
    "N7": "gradients accumulate and reduce in fp32",
    "N8": "copies of a parameter on several ranks stay equal",
    "N9": "the loss is the mean over the unmasked tokens of the global batch",
    "N10": "validation is the token mean over the whole set",
    "N11": "in FP8: the same scales in every layout",
    "N12": "every token reaches all its experts; their balance is that of the global batch",
}
"""One line for each guarantee of docs/numerics.md."""


def legend(names: Iterable[str]) -> list[str]:
    """Returns one line for each guarantee, in the order of their numbers.

    Args:
        names: names from N1 to N12, possibly repeated.
    """
    wanted = set(names)
    return [f"{name:<3} {meaning}" for name, meaning in MEANINGS.items() if name in wanted]


_AVERAGES = "every running average at the end"
FP32 = (
    Guarantee("N1", "initial weights", measure_initial_weights),
    Guarantee("N2", "samples, documents and their order", measure_samples),
    Guarantee("N3", "agreement of all ranks", measure_agreement),
    Guarantee("N9", "unmasked tokens of every step", measure_tokens),
    Guarantee("N3", "loss of step 1", measure_first_loss),
    Guarantee("N11", "loss of step 1 in FP8", measure_float8_loss, optional=True),
    Guarantee("N3", "gradient norm of step 1", measure_first_norm),
    Guarantee("N3", "every gradient of step 1", measure_gradients),
    Guarantee("N3", "loss of every step", measure_losses),
    Guarantee("N3", "gradient norm of every step", measure_norms),
    Guarantee("N3", "every weight at the end", measure_weights),
    Guarantee("N3", _AVERAGES, measure_averages, optional=True),
    Guarantee("N10", "validation loss", measure_validation),
    Guarantee("N7", "dtype of gradient reductions", measure_reduction_dtype),
    Guarantee("N8", "copies of masters and moments", measure_replicas),
)
BF16 = (
    Guarantee("N1", "initial weights", measure_initial_weights),
    Guarantee("N4", "loss of step 1", measure_bf16_loss),
    Guarantee("N4", "gradient norm of step 1", measure_bf16_norm),
    Guarantee("N7", "dtype of gradient reductions", measure_reduction_dtype),
    Guarantee("N8", "copies of masters and moments", measure_replicas),
)


@dataclass(frozen=True)
class Row:
    """Result of one check, a row of the table.

    Attributes:
        guarantee: guarantee, N1 to N11.
        what: quantity that was compared.
        precision: fp32 or bf16.
        compared: number of quantities compared.
        bound: maximum allowed relative deviation; 0 requires bitwise equality.
        found: largest deviation; for bitwise bounds the number of quantities that differ.
        passed: whether the check passed.
        faults: descriptions of the deviations that exceed the bound.
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
    """Checks one run and returns one row per check.

    Args:
        guarantees: checks to run, FP32 or BF16.
        precision: fp32 or bf16.
        run: run of the layout.
        reference: reference run of the same scenario.
        parallel: parallel layout.
        tied: whether the model ties embedding and head.
    """
    found = []
    for guarantee in guarantees:
        deviations = guarantee.measure(run, reference)
        if guarantee.optional and not deviations:
            continue
        found.append(_row(guarantee, precision, deviations, _must_compare(guarantee, parallel, tied, reference)))
    return found


def _must_compare(guarantee: Guarantee, parallel: ParallelConfig, tied: bool, reference: Run) -> bool:
    """Whether a check fails if it compared nothing: N7 and N8 only in layouts where ranks share weights."""
    first, last = parallel.placement.ends
    tied_copies = tied and first != last
    if guarantee.name == "N7":
        return parallel.dp * parallel.cp > 1 or tied_copies
    # With norm_affine=false and no biases, tensor-parallel ranks share no weight.
    copied = parallel.tp > 1 and any(name.endswith(_COPIED_OVER_TP) for name in reference.weights)
    return guarantee.name != "N8" or copied or tied_copies


def _row(guarantee: Guarantee, precision: str, deviations: Sequence[Deviation], must_compare: bool) -> Row:
    exceeding = [deviation for deviation in deviations if deviation.exceeds]
    faults = [str(deviation) for deviation in exceeding]
    if not deviations and must_compare:
        faults = [f"{guarantee.what}: none was seen, but this layout must have some"]
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
"""Relative tolerance for the test that all gradients differ from the reference by one common factor."""
_COPIED_OVER_TP = ("norm.weight", "norm.bias", "dense.bias", "down.bias", "position.weight")


def likely_cause(failed: Sequence[Row], run: Run, reference: Run, parallel: ParallelConfig) -> str:
    """Suggests the likely cause of a failure.

    Args:
        failed: rows that did not pass, fp32 first.
        run: fp32 run of the layout.
        reference: reference run of the same scenario.
        parallel: parallel layout.
    """
    what = {row.what for row in failed if row.precision == "fp32"}
    if "initial weights" in what:
        return "weights are initialized or sharded differently on some rank; other deviations may follow from that"
    if "samples, documents and their order" in what:
        return "ranks read different samples than one process does: the sampler, the dataloader or document boundaries"
    if any(row.guarantee == "N7" for row in failed):
        return "gradients are not reduced in fp32: communication_data_type, or a reduction that bypasses it"
    if "every gradient of step 1" in what:
        return _cause_of_gradients(run, reference, parallel, forward="loss of step 1" in what)
    if "agreement of all ranks" in what and len(what) == 1:
        return "the model is right, but ranks report different values: the groups that all-reduce losses and norms"
    if "loss of step 1" in what or "unmasked tokens of every step" in what:
        return "gradients are right and the loss is not: how ranks reduce their losses and count their tokens"
    if "gradient norm of step 1" in what:
        return (
            "every gradient is right and their norm is not: a parameter is counted on several ranks or on none "
            "(its tensor_model_parallel and ds_pipe_replicated flags), or the squares are summed over the wrong group"
        )
    if what & {"loss of every step", "gradient norm of every step", "every weight at the end"}:
        return "gradients of the first step are right: clipping, the weight decay groups, Adam's moments or the update"
    if _AVERAGES in what:
        return "the weights are right and their running average is not: when it is updated, or its decay"
    if "copies of masters and moments" in what:
        return "gradients of replicas differ in their last bits: the order of reduction, or clipping"
    if "validation loss" in what:
        return "training is right: padding and masks of the incomplete last batch, or dropout in evaluation"
    return "fp32 is right and bf16 is not: a reduction, a softmax or a loss that is computed in bf16"


def _cause_of_gradients(run: Run, reference: Run, parallel: ParallelConfig, forward: bool) -> str:
    factors = _factors(run, reference)
    alike = factors and max(factors) - min(factors) <= _SAME_FACTOR * abs(max(factors))
    if alike and abs(factors[0] - 1) > _SAME_FACTOR:
        return (
            f"every gradient is {np.mean(factors):.4g} times the reference's: divided by the wrong number of "
            "micro-batches, data-parallel ranks or tokens"
        )
    if not run.gradients:
        return "no rank reports gradients: the engine reduces them on a path that watch_gradients does not cover"
    names = list(reference.gradients)
    wrong = [name for name, d in zip(names, measure_gradients(run, reference), strict=True) if d.exceeds]
    if wrong == [TIED_PARAMETER]:
        return "only the word embedding is off: the all-reduce of its copies on first and last stage, or its row sums"
    if forward and parallel.tp == parallel.cp == 1:
        return "the loss differs: how micro-batches and replicas average it over unmasked tokens, or masks"
    if forward:
        return (
            "the forward pass differs: a layer or the loss that is sharded over tp (biases, vocabulary padding, ALiBi "
            "slopes of a rank's heads), attention over cp, or masks"
        )
    last = wrong[-1]
    if parallel.tp > 1 and all(name.endswith(_COPIED_OVER_TP) for name in wrong):
        return "only parameters with copies on tensor-parallel ranks are off: their gradients are not summed over tp"
    return (
        f"the forward pass is right; in backward order the first wrong gradient is that of {last}: look at the "
        "backward pass there (a missing reduction of its input or output gradient)"
    )


def _factors(run: Run, reference: Run) -> list[float]:
    """Ratio of every gradient to the reference's; empty if their directions differ."""
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
