"""The checks: how far a layout's run is from the reference's, against the bounds of the numerics contract.

Each `measure` returns deviations with their bounds, those within them too; each `check_` says what is wrong, so that a
test can assert that nothing is and a mutant that something is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.model.config import ModelConfig
from megads.tools.verify.run import Run

Array = npt.NDArray[Any]
EXACT = 0.0


@dataclass(frozen=True)
class Deviation:
    """How far one quantity is off.

    Attributes:
        what: the quantity.
        found: relative deviation, or for exact bounds the number of elements that differ.
        bound: largest allowed.
        values: what was found and what was wanted, in words.
    """

    what: str
    found: float
    bound: float
    values: str = ""

    @property
    def exceeds(self) -> bool:
        # Not `>`, so that a NaN is a fault.
        return not self.found <= self.bound

    def __str__(self) -> str:
        off = f"{self.found:.0f} differ" if self.bound == EXACT else f"off by {self.found:.1e}, bound {self.bound:.0e}"
        return f"{self.what}: {off}" + (f" ({self.values})" if self.values else "")


Measure = Callable[[Run, Run], list[Deviation]]


def faults(measures: Sequence[Measure], run: Run, reference: Run) -> list[str]:
    """What exceeds its bound."""
    return [str(found) for measure in measures for found in measure(run, reference) if found.exceeds]


def relative(value: Array, reference: Array) -> float:
    """||value - reference|| / ||reference||, in fp64."""
    wanted = reference.astype(np.float64)
    return float(np.linalg.norm(value.astype(np.float64) - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))


def without_key_bias(name: str, values: Array, model: ModelConfig) -> Array:
    """Leaves out the key biases: softmax does not feel them, their gradient is rounding noise that Adam blows up."""
    if not name.endswith("attention.qkv.bias"):
        return values
    queries = model.queries_per_kv
    return np.delete(values.reshape(model.kv_heads, queries + 2, -1), queries, axis=1)


def _scalar(what: str, found: float, wanted: float, bound: float) -> Deviation:
    off = abs(found / wanted - 1) if wanted else abs(found)
    return Deviation(what, off, bound, f"{found!r}, reference {wanted!r}")


def measure_initial_weights(run: Run, reference: Run) -> list[Deviation]:
    """N1: the same seed gives bitwise the same full weights."""
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
    """N3: losses, norms, tokens and validation are the whole run's, so every rank must report the same."""
    del reference
    count = Deviation("figures that ranks report differently", len(run.disagreements), EXACT)
    return [count, *(Deviation(what, 1, EXACT) for what in run.disagreements)]


def measure_tokens(run: Run, reference: Run) -> list[Deviation]:
    """N9: the tokens over which a step's loss is the mean."""
    pairs = enumerate(zip(run.tokens, reference.tokens, strict=True), start=1)
    return [
        Deviation(f"tokens of step {step}", abs(ours - theirs), EXACT, f"{ours}, reference {theirs}")
        for step, (ours, theirs) in pairs
    ]


def measure_first_loss(run: Run, reference: Run) -> list[Deviation]:
    """N3."""
    return [_scalar("loss of step 1", run.losses[0], reference.losses[0], 1e-6)]


def measure_first_norm(run: Run, reference: Run) -> list[Deviation]:
    """N3."""
    return [_scalar("gradient norm of step 1", run.norms[0], reference.norms[0], 1e-5)]


def measure_gradients(run: Run, reference: Run) -> list[Deviation]:
    """N3: every gradient of the first step, relative to its norm."""
    assert run.gradients.keys() <= reference.gradients.keys()
    return [
        Deviation(f"gradient of {name}", relative(run.gradients[name], gradient), 1e-5)
        if name in run.gradients
        else Deviation(f"gradient of {name}", math.nan, 1e-5, "no rank has it")
        for name, gradient in reference.gradients.items()
    ]


def measure_losses(run: Run, reference: Run) -> list[Deviation]:
    """N3: the curve."""
    pairs = enumerate(zip(run.losses, reference.losses, strict=True), start=1)
    return [_scalar(f"loss of step {step}", ours, theirs, 1e-5) for step, (ours, theirs) in pairs]


def measure_norms(run: Run, reference: Run) -> list[Deviation]:
    """N3: the gradient norm at every step."""
    pairs = enumerate(zip(run.norms, reference.norms, strict=True), start=1)
    return [_scalar(f"gradient norm of step {step}", ours, theirs, 1e-4) for step, (ours, theirs) in pairs]


def measure_weights(run: Run, reference: Run) -> list[Deviation]:
    """N3: every weight after the last step, relative to its norm; key biases excepted."""
    model = reference.model
    return [
        Deviation(
            name,
            relative(without_key_bias(name, run.weights[name], model), without_key_bias(name, weight, model)),
            1e-4,
        )
        for name, weight in reference.weights.items()
    ]


def measure_bf16_loss(run: Run, reference: Run) -> list[Deviation]:
    """N4: the first loss in bf16, over enough tokens for rounding to average out."""
    return [_scalar("loss of step 1", run.losses[0], reference.losses[0], 2e-4)]


def measure_reduction_dtype(run: Run, reference: Run) -> list[Deviation]:
    """N7: every gradient reduction carries fp32; the token count and the loss travel in fp64."""
    del reference
    exact = ("torch.float32", "torch.float64")
    return [
        Deviation(f"{dtype} reduction of {numel} elements", float(dtype not in exact), EXACT)
        for dtype, numel in sorted(run.reductions)
    ]


def measure_replicas(run: Run, reference: Run) -> list[Deviation]:
    """N8: copies of one master weight or moment are bitwise equal on all ranks that hold it."""
    del reference
    return [Deviation(name, float(differ), EXACT) for name, differ in sorted(run.replicas.items())]


def measure_validation(run: Run, reference: Run) -> list[Deviation]:
    """N10: the token mean over the whole validation set, its incomplete last batch included."""
    (loss, tokens), (expected, expected_tokens) = run.validation, reference.validation
    counted = Deviation("validation tokens", abs(tokens - expected_tokens), EXACT, f"{tokens} of {expected_tokens}")
    return [_scalar("validation loss", loss, expected, 1e-6), counted]


def check_initial_weights(run: Run, reference: Run) -> list[str]:
    """N1."""
    return faults([measure_initial_weights], run, reference)


def check_first_step(run: Run, reference: Run) -> list[str]:
    """N3 and N9: the same on every rank; tokens, loss 1e-6, grad norm 1e-5, every gradient 1e-5 of its norm."""
    return faults(
        [measure_agreement, measure_tokens, measure_first_loss, measure_first_norm, measure_gradients], run, reference
    )


def check_curve(run: Run, reference: Run) -> list[str]:
    """N3: over all steps loss 1e-5 and grad norm 1e-4; in the end every weight 1e-4. All relative."""
    return faults([measure_losses, measure_norms, measure_weights], run, reference)


def check_replicas(run: Run, reference: Run) -> list[str]:
    """N8."""
    return faults([measure_replicas], run, reference)


def check_reduction_dtype(run: Run, reference: Run) -> list[str]:
    """N7."""
    return faults([measure_reduction_dtype], run, reference)


def check_validation(run: Run, reference: Run) -> list[str]:
    """N10."""
    return faults([measure_validation], run, reference)
