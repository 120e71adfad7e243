"""The loss of a model by published scaling laws.

Scaling laws predict the loss by model size and tokens, and the compute-optimal values of both. Approach 3 of Hoffmann
et al. (2022): L(N, D) = E + A / N^alpha + B / D^beta, with N parameters, D tokens and C = 6 * N * D FLOPs; the loss is
in nats per token of their data and vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Convention of the scaling laws: 2 in forward and 4 in backward; attention is not counted."""


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted scaling law.

    Attributes:
        title: source of the coefficients.
        irreducible: E, nats per token.
        parameter_factor: A.
        token_factor: B.
        parameter_exponent: alpha.
        token_exponent: beta.
        most_compute: FLOPs of the largest runs in the fit; above this, the law is an extrapolation.
    """

    title: str
    irreducible: float
    parameter_factor: float
    token_factor: float
    parameter_exponent: float
    token_exponent: float
    most_compute: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted loss in nats per token."""
        by_size = self.parameter_factor / parameters**self.parameter_exponent
        return self.irreducible + by_size + self.token_factor / tokens**self.token_exponent

    @property
    def size_exponent(self) -> float:
        """Exponent of compute in the optimal parameter count: a = beta / (alpha + beta)."""
        return self.token_exponent / (self.parameter_exponent + self.token_exponent)

    @property
    def _size_factor(self) -> float:
        """G = (alpha A / (beta B))^(1 / (alpha + beta))."""
        ratio = self.parameter_exponent * self.parameter_factor / (self.token_exponent * self.token_factor)
        return ratio ** (1 / (self.parameter_exponent + self.token_exponent))

    def best(self, flops: float) -> tuple[float, float]:
        """Compute-optimal (parameters, tokens) for `flops` FLOPs (Hoffmann et al. 2022, equation 4)."""
        pairs = flops / FLOPS_PER_PARAMETER_AND_TOKEN
        parameters = self._size_factor * pairs**self.size_exponent
        return parameters, pairs / parameters

    def best_tokens(self, parameters: float) -> float:
        """Number of tokens for which `parameters` is the compute-optimal size."""
        return float((parameters / self._size_factor) ** (1 / self.size_exponent) / parameters)

    def flops_of_loss(self, loss: float) -> float:
        """FLOPs at which the compute-optimal model reaches `loss`, which must exceed the irreducible loss.

        The reducible loss of compute-optimal models falls as C^-g with g = alpha beta / (alpha + beta), so one point
        determines the curve.
        """
        a, b = self.parameter_exponent, self.token_exponent
        above_one = self.loss(*self.best(1.0)) - self.irreducible
        return float(((loss - self.irreducible) / above_one) ** (-(a + b) / (a * b)))


LAWS: Mapping[str, ScalingLaw] = {
    "epoch2024": ScalingLaw(
        "Besiroglu et al. 2024 (Chinchilla Scaling: A replication attempt, arXiv 2404.10102, Table 1): approach 3 of "
        "Hoffmann et al., refitted",
        1.8172,
        482.01,
        2085.43,
        0.3478,
        0.3658,
        most_compute=3e21,
    ),
    "hoffmann2022": ScalingLaw(
        "Hoffmann et al. 2022 (Training Compute-Optimal Large Language Models, arXiv 2203.15556), approach 3, with the "
        "unrounded exponents of the paper's source",
        1.6934,
        406.4,
        410.7,
        0.3392,
        0.2849,
        most_compute=3e21,
    ),
}
"""Scaling laws by the name used in `megads plan`; the largest IsoFLOP runs have 3e21 FLOPs (Hoffmann, figure 3)."""
