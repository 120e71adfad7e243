"""`megads plan budget_hours=...`: the compute-optimal model of a GPU budget, presets near it, the own run.

Scaling laws predict the loss by model size and tokens, and the compute-optimal values of both. Approach 3 of Hoffmann
et al. (2022): L(N, D) = E + A / N^alpha + B / D^beta, with N parameters, D tokens and C = 6 * N * D FLOPs; the loss is
in nats per token of their data and vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.api import (
    ConfigError,
    ModelConfig,
    VisibleConsole,
    batch_size_schedule,
    output_width,
    parameter_count,
    planned_steps,
)
from megads.model.model_size import model_flops_per_token
from megads.tools.plan.config import CostConfig, PlanConfig
from megads.tools.plan.step import planned_step

_PRESETS_SHOWN = 4
_WIDTH = 150
_CAVEAT = (
    "Losses are the scaling law's: nats per token on the data, vocabulary and recipe it was fitted to. Another dataset "
    "or tokenizer gives other losses; compare the differences between rows."
)


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


@dataclass(frozen=True)
class Training:
    """A model size and the number of tokens it is trained on.

    Attributes:
        name: label of the table row.
        parameters: total number of parameters.
        tokens: number of training tokens.
        flops: model FLOPs of the training, including attention where the model's shape is known.
        experiment: experiment preset of the same model; None if there is none.
    """

    name: str
    parameters: float
    tokens: float
    flops: float
    experiment: str | None = None


@dataclass(frozen=True)
class Budget:
    """Compute budget: GPUs, hours and achieved throughput.

    Attributes:
        gpus: number of GPUs.
        hours: wall time in hours.
        device_tflops: achieved model TFLOPs per GPU during training.
        cost: prices, power and scaling law.
    """

    gpus: int
    hours: float
    device_tflops: float
    cost: CostConfig

    @property
    def flops_per_hour(self) -> float:
        """FLOPs of all GPUs per hour, scaled by `cost.effective_time`."""
        return self.gpus * self.device_tflops * 1e12 * 3600 * self.cost.effective_time

    @property
    def flops(self) -> float:
        """Total FLOPs of the budget."""
        return self.flops_per_hour * self.hours

    def spending(self, flops: float) -> dict[str, float]:
        """Hours, GPU hours, energy and price of `flops` FLOPs; items without a price or power are omitted."""
        hours, cost = flops / self.flops_per_hour, self.cost
        found = {"hours": hours, "gpu_hours": hours * self.gpus}
        if cost.gpu_hour_price is not None:
            found["gpu_price"] = found["gpu_hours"] * cost.gpu_hour_price
        if cost.gpu_watts is not None:
            found["energy_kwh"] = found["gpu_hours"] * cost.gpu_watts / 1000 * cost.pue
        if cost.kwh_price is not None:
            found["energy_price"] = found["energy_kwh"] * cost.kwh_price
        return found


def show_budget(asked: PlanConfig, conf: Path) -> None:
    """Prints what can be trained within the budget.

    Args:
        asked: the plan's config.
        conf: folder of the presets (`conf/`).

    Raises:
        ConfigError: The config is invalid, or does not give the achieved TFLOPs of a GPU.
    """
    budget, law = budget_of(asked), LAWS[asked.cost.law.value]
    parameters, tokens = law.best(budget.flops)
    best = Training("compute-optimal", parameters, tokens, budget.flops)
    presets = nearest(presets_with_known_size(conf), parameters, budget)
    own = configured_trainings(asked, budget)
    if asked.json:
        print(json.dumps(budget_json(budget, law, [best, *presets, *own]), indent=2))
        return
    console = VisibleConsole(highlight=False)
    console.width = output_width(_WIDTH)
    console.print(
        f"{budget.gpus:,} GPUs x {budget.hours:g} h x {budget.device_tflops:g} TFLOPs, {asked.cost.effective_time:.1%} "
        f"of the time effective: {budget.flops:.3g} FLOPs"
    )
    console.print(f"best: {_size(parameters)} parameters on {_size(tokens)} tokens, by {law.title}")
    if budget.flops > law.most_compute:
        console.print(
            f"that is {budget.flops / law.most_compute:,.1f} times the compute of the largest runs it was fitted to"
        )
    console.print(_table(budget, law, [best, *presets, *own]))
    console.print(_CAVEAT)


def budget_of(asked: PlanConfig) -> Budget:
    """Returns the budget that the config describes.

    Raises:
        ConfigError: A value is invalid, or the achieved TFLOPs of a GPU are not given.
    """
    asked.cost.check()
    tflops = asked.device_tflops or asked.rank_tflops
    step = planned_step(asked) if tflops is None else None
    if step is not None:
        tflops = step.tflops_per_device
    assert asked.budget_hours is not None
    if tflops is None:
        raise ConfigError(
            "budget_hours needs device_tflops, the TFLOPs that a GPU achieves in training (tflops_per_device in "
            "metrics.jsonl): set it, for example device_tflops=400, or name a device to plan a step on, device=h100"
        )
    return Budget(asked.gpus or asked.parallel.world_size, asked.budget_hours, tflops, asked.cost)


def presets_with_known_size(conf: Path) -> list[tuple[str, ModelConfig, int, str | None]]:
    """Name, config, sequence length and experiment of every model preset with a known vocabulary size."""
    experiments = {}
    for path in sorted((conf / "experiment").glob("*.yaml")):
        for entry in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("defaults", []):
            if isinstance(entry, dict) and "override /model" in entry:
                experiments[str(entry["override /model"])] = path.stem
    found = []
    for path in sorted((conf / "model").glob("*.yaml")):
        content = OmegaConf.load(path)
        given = OmegaConf.select(content, "model", default={})
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), given))
        assert isinstance(model, ModelConfig)
        if model.vocab_size is not None:
            seq_len = int(OmegaConf.select(content, "train.seq_len") or model.max_seq_len)
            found.append((path.stem, model, seq_len, experiments.get(path.stem)))
    return found


def nearest(
    presets: Sequence[tuple[str, ModelConfig, int, str | None]], parameters: float, budget: Budget
) -> list[Training]:
    """The presets nearest in size, each trained with the whole budget, in ascending size."""
    sized = sorted(
        ((float(parameter_count(model)), name, model, seq_len, run) for name, model, seq_len, run in presets),
        key=lambda item: abs(math.log(item[0] / parameters)),
    )
    found = [
        Training(f"model={name}", size, budget.flops / model_flops_per_token(model, seq_len), budget.flops, run)
        for size, name, model, seq_len, run in sized[:_PRESETS_SHOWN]
    ]
    return sorted(found, key=lambda item: item.parameters)


def configured_trainings(asked: PlanConfig, budget: Budget) -> list[Training]:
    """The config's own model, trained with the whole budget and, if the config gives a length, for that length."""
    if asked.model.vocab_size is None:
        return []
    size, flops = float(parameter_count(asked.model)), model_flops_per_token(asked.model, asked.train.seq_len)
    found = [Training("this model", size, budget.flops / flops, budget.flops)]
    train = asked.train
    given = any(value is not None for value in (train.steps, train.samples, train.tokens))
    if given and train.length_is_known:
        samples = batch_size_schedule(asked).samples_after(planned_steps(asked))
        tokens = float(samples * train.seq_len)
        found.append(Training("this run", size, tokens, tokens * flops))
    return found


def verdict(law: ScalingLaw, training: Training) -> dict[str, float]:
    """Compares a training with the compute-optimal one.

    Returns:
        `tokens_per_parameter`. `tokens_over_best`: tokens over those for which this size is compute-optimal; above 1
        the model is over-trained. `loss`: predicted loss. `best_loss`: predicted loss of the optimal size with the same
        compute, 6 * N * D. `compute_over_best`: compute over what the optimal size needs for the same loss.
    """
    loss = law.loss(training.parameters, training.tokens)
    compute = FLOPS_PER_PARAMETER_AND_TOKEN * training.parameters * training.tokens
    return {
        "tokens_per_parameter": training.tokens / training.parameters,
        "tokens_over_best": training.tokens / law.best_tokens(training.parameters),
        "loss": loss,
        "best_loss": law.loss(*law.best(compute)),
        "compute_over_best": compute / law.flops_of_loss(loss),
    }


def budget_json(budget: Budget, law: ScalingLaw, trainings: Sequence[Training]) -> dict[str, Any]:
    """The budget and its trainings as JSON-serializable values."""
    return {
        "gpus": budget.gpus,
        "hours": budget.hours,
        "device_tflops": budget.device_tflops,
        "effective_time": budget.cost.effective_time,
        "flops": budget.flops,
        "law": law.title,
        "compute_over_fitted": budget.flops / law.most_compute,
        "caveat": _CAVEAT,
        "trainings": [
            {
                **{key: getattr(training, key) for key in ("name", "experiment", "parameters", "tokens", "flops")},
                **verdict(law, training),
                **budget.spending(training.flops),
            }
            for training in trainings
        ],
    }


_MONEY = {
    "hours": "hours",
    "gpu_hours": "GPU hours",
    "energy_kwh": "kWh",
    "gpu_price": "price of GPUs",
    "energy_price": "price of energy",
}


def _table(budget: Budget, law: ScalingLaw, trainings: Sequence[Training]) -> Table:
    shown = [name for name in _MONEY if name in budget.spending(1.0)]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("training")
    numbers = ("parameters", "tokens", "tokens/parameter", "trained", "loss", "compute over best")
    for name in (*numbers, *(_MONEY[name] for name in shown)):
        table.add_column(name, justify="right")
    for training in trainings:
        found, spent = verdict(law, training), budget.spending(training.flops)
        name = training.name + (f" (experiment={training.experiment})" if training.experiment else "")
        table.add_row(
            name, _size(training.parameters), _size(training.tokens), f"{found['tokens_per_parameter']:,.1f}",
            _trained(found["tokens_over_best"]), f"{found['loss']:.3f}", f"{found['compute_over_best']:.2f} x",
            *(f"{spent[name]:,.0f}" for name in shown),
        )  # fmt: skip
    return table


def _trained(over_best: float) -> str:
    """Words for `tokens_over_best`; within 10% counts as optimal."""
    if 0.9 <= over_best <= 1.1:
        return "optimal"
    return f"over, {over_best:,.1f} x" if over_best > 1 else f"under, {over_best:.2f} x"


def _size(count: float) -> str:
    """Formats a count, for example 8.03 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
