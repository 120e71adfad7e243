"""Reference optimizers: the formulas of the papers, in fp64 on full parameters in one process.

Written from the papers and independent of `megads.optim`, whose results in every layout are compared with these.
Parameters are not flattened, sharded, gathered or batched. Only the settings are shared.
"""

from __future__ import annotations

import fnmatch
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.api import ConfigError, ModelConfig, OptimConfig
from megads.optim.config import QKVSplit

Array = npt.NDArray[np.float64]


class ReferenceOptimizer(ABC):
    """One optimizer over named fp64 parameters.

    Attributes:
        weights: fp64 weights by parameter name.
    """

    def __init__(self, weights: Mapping[str, npt.NDArray[Any]], optim: OptimConfig, model: ModelConfig) -> None:
        """Copies the weights.

        Args:
            weights: full weights by parameter name.
            optim: optimizer settings.
            model: config of the model.
        """
        self.weights: dict[str, Array] = {name: value.astype(np.float64) for name, value in weights.items()}
        self.optim, self.model, self.steps = optim, model, 0
        self._memory: dict[str, dict[str, Array]] = {name: {} for name in weights}

    def step(self, gradients: Mapping[str, npt.NDArray[Any]], lr: float) -> None:
        """Updates every weight.

        Args:
            gradients: clipped full gradients by parameter name.
            lr: learning rate.
        """
        self.steps += 1
        for name, gradient in gradients.items():
            self._update(name, gradient.astype(np.float64), lr * self._lr_factor(name))

    @abstractmethod
    def _update(self, name: str, gradient: Array, lr: float) -> None:
        """Updates one weight with its own learning rate."""

    def _of_groups(self, name: str, key: str) -> float | None:
        """Value of `key` in the last matching entry of optim.groups that sets it; None if there is none."""
        found = [
            getattr(group, key)
            for group in self.optim.groups
            if re.match(fnmatch.translate(group.pattern), name) and getattr(group, key) is not None
        ]
        return found[-1] if found else None

    def _lr_factor(self, name: str) -> float:
        factor = self._of_groups(name, "lr_scale")
        return (1.0 if factor is None else factor) * self._width_factor(name)

    def _width_factor(self, name: str) -> float:
        """muP learning rate factor (Yang and Hu et al. 2022, table 8, "Adam LR"): hidden weights 1 / fan_in, else 1.

        Muon's updates have a spectral norm of 0.2 sqrt(max(fan_out, fan_in)), which must stay as at the base width
        (Yang, Simon and Bernstein 2023, arXiv 2310.17813, condition 1).
        """
        base = self.model.mup.base_width
        if base is None or not name.startswith("blocks.") or self.weights[name].ndim < 2:
            return 1.0
        wider = self.model.hidden_size / base
        return 1 / math.sqrt(wider) if self.optim.name == "muon" else 1 / wider

    def decays(self, name: str) -> bool:
        """Whether weight decay applies: not to biases, norms and attention sinks."""
        return not name.endswith(".bias") and "norm" not in name and "sinks" not in name

    def _decay(self, name: str) -> float:
        decay = self._of_groups(name, "weight_decay")
        if decay is None:
            decay = self.optim.weight_decay if self.decays(name) else 0.0
        # lr times weight decay, the relative shrinkage per step, is the same at every width.
        return decay / self._width_factor(name)

    def _stacked(self, name: str) -> list[slice]:
        """Rows of the parameters that a weight stacks: each expert's, else all."""
        rows = len(self.weights[name])
        count = self.model.moe.num_experts if ".mlp.experts." in name else 1
        return [slice(rows * part // count, rows * (part + 1) // count) for part in range(count)]

    def _remembered(self, name: str, kind: str) -> Array:
        return self._memory[name].setdefault(kind, np.zeros_like(self.weights[name]))

    def _adam(self, name: str, gradient: Array) -> Array:
        """m / (sqrt(v) + eps) with bias correction (Kingma and Ba 2015, algorithm 1)."""
        beta1, beta2 = self.optim.betas
        m = beta1 * self._remembered(name, "m") + (1 - beta1) * gradient
        v = beta2 * self._remembered(name, "v") + (1 - beta2) * gradient**2
        self._memory[name].update(m=m, v=v)
        m_hat, v_hat = m / (1 - beta1**self.steps), v / (1 - beta2**self.steps)
        direction: Array = m_hat / (np.sqrt(v_hat) + self.optim.eps)
        return direction


class ReferenceAdamW(ReferenceOptimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    def _update(self, name: str, gradient: Array, lr: float) -> None:
        weight = self.weights[name]
        self.weights[name] = weight - lr * (self._adam(name, gradient) + self._decay(name) * weight)


class ReferenceLamb(ReferenceOptimizer):
    """LAMB (You et al. 2020, algorithm 2), with phi the identity and the trust ratio limited to `max_ratio`.

    Each expert's matrix has its own trust ratio.
    """

    def _update(self, name: str, gradient: Array, lr: float) -> None:
        weight = self.weights[name]
        direction = self._adam(name, gradient) + self._decay(name) * weight
        step = np.zeros_like(weight)
        for rows in self._stacked(name):
            step[rows] = self._ratio(name, weight[rows], direction[rows]) * direction[rows]
        self.weights[name] = weight - lr * step

    def _ratio(self, name: str, weight: Array, direction: Array) -> float:
        options = self.optim.typed_options
        long, short = float(np.linalg.norm(weight)), float(np.linalg.norm(direction))
        ratio = long / short if long > 0 and short > 0 and (options.adapt_all or self.decays(name)) else 1.0
        if options.max_ratio is not None and (options.adapt_all or self.decays(name)):
            ratio = min(ratio, options.max_ratio)
        return ratio


class ReferenceLion(ReferenceOptimizer):
    """Lion (Chen et al. 2023, algorithm 2)."""

    def _update(self, name: str, gradient: Array, lr: float) -> None:
        options, weight, m = self.optim.typed_options, self.weights[name], self._remembered(name, "m")
        sign = np.sign(options.beta1 * m + (1 - options.beta1) * gradient)
        self.weights[name] = weight - lr * (sign + self._decay(name) * weight)
        self._memory[name]["m"] = options.beta2 * m + (1 - options.beta2) * gradient


class ReferenceMuon(ReferenceAdamW):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon).

    Scaled as by Liu et al. 2025, Moonlight, section 2.2. Applies to the weight matrices of blocks, one by one, each
    expert's too; AdamW updates embeddings, output projection, norms, biases, routers and gates of shared experts.
    """

    def _update(self, name: str, gradient: Array, lr: float) -> None:
        chooses = name.endswith((".router.weight", ".shared_gate.weight"))
        if not name.startswith("blocks.") or gradient.ndim != 2 or chooses:
            super()._update(name, gradient, lr)
            return
        options, weight = self.optim.typed_options, self.weights[name]
        beta = options.momentum
        m = beta * self._remembered(name, "m") + (1 - beta) * gradient
        self._memory[name]["m"] = m
        direction = beta * m + (1 - beta) * gradient if options.nesterov else m
        step = np.zeros_like(weight)
        for rows in self._matrices(name, len(weight), options.qkv):
            matrix = direction[rows]
            step[rows] = 0.2 * math.sqrt(max(matrix.shape)) * orthogonalised(matrix, options.steps)
        self.weights[name] = (1 - lr * self._decay(name)) * weight - lr * step

    def _matrices(self, name: str, rows: int, split: QKVSplit) -> list[list[int]]:
        """Row indices of each matrix in a parameter."""
        model = self.model
        if not name.endswith("attention.qkv.weight"):
            every = list(range(rows))
            halves = (every[0::2], every[1::2]) if name.endswith(".gate_up.weight") else (every,)
            return [
                [row for row in half if row in range(*of.indices(rows))]
                for of in self._stacked(name)
                for half in halves
            ]
        # Each KV group holds its query heads, its key head and its value head.
        heads = rows // model.head_dim
        of_group = ["q"] * model.queries_per_kv + ["k", "v"]
        kinds = [of_group[head % len(of_group)] for head in range(heads)]
        chosen: Sequence[Sequence[int]] = [[head] for head in range(heads)]
        if split is QKVSplit.projection:
            chosen = [[head for head in range(heads) if kinds[head] == kind] for kind in "qkv"]
        size = model.head_dim
        return [[head * size + i for head in heads_of for i in range(size)] for heads_of in chosen]


def orthogonalised(matrix: Array, steps: int) -> Array:
    """Jordan's quintic iteration, p(x) = 3.4445 x - 4.775 x^3 + 2.0315 x^5, on the singular values of an SVD."""
    norm = float(np.linalg.norm(matrix))
    u, values, vt = np.linalg.svd(matrix, full_matrices=False)
    values = values / max(norm, 1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    found: Array = (u * values) @ vt
    return found


_REFERENCES: dict[str, type[ReferenceOptimizer]] = {
    "adamw": ReferenceAdamW,
    "lamb": ReferenceLamb,
    "lion": ReferenceLion,
    "muon": ReferenceMuon,
}


def reference_optimizer(
    weights: Mapping[str, npt.NDArray[Any]], optim: OptimConfig, model: ModelConfig
) -> ReferenceOptimizer:
    """Creates the reference of a built-in optimizer.

    Args:
        weights: full weights by parameter name.
        optim: name and settings of the optimizer.
        model: config of the model.

    Raises:
        ConfigError: the optimizer has no reference, for example one of a plugin.
    """
    make = _REFERENCES.get(optim.name)
    if make is None:
        raise ConfigError(f"optim.name = {optim.name} has no reference: it is one of {', '.join(_REFERENCES)}")
    return make(weights, optim, model)
