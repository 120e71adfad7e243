"""What `megads plan budget_hours=...` prints: the best model for hours of some GPUs, presets near it, and a run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config import batch_size_schedule, planned_steps
from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.plan.model_size import model_flops_per_token, parameter_count
from megads.plan.scaling_law import FLOPS_PER_PARAMETER_AND_TOKEN, LAWS, ScalingLaw
from megads.runtime.visible_console import VisibleConsole
from megads.tools.plan.config import PlanConfig
from megads.tools.plan.cost_config import CostConfig
from megads.tools.plan.step import planned_step

_PRESETS_SHOWN = 4
_WIDTH = 150
_CAVEAT = (
    "Losses are the law's: nats per token of the data, vocabulary and recipe that it was fitted to. Another dataset or "
    "tokenizer has another loss; the differences between rows are what to go by."
)


@dataclass(frozen=True)
class Training:
    """A model trained on some tokens.

    Attributes:
        name: what it is.
        parameters: of the model, all of them.
        tokens: it is trained on.
        flops: model operations of that, attention included where the model's shape is known.
        experiment: published run of the same model, if there is one.
    """

    name: str
    parameters: float
    tokens: float
    flops: float
    experiment: str | None = None


@dataclass(frozen=True)
class Budget:
    """GPUs for a time.

    Attributes:
        gpus: how many.
        hours: for how long.
        device_tflops: what each achieves while it trains.
        cost: prices, power, law.
    """

    gpus: int
    hours: float
    device_tflops: float
    cost: CostConfig

    @property
    def flops_per_hour(self) -> float:
        """Operations of all GPUs in an hour, failures taken off."""
        return self.gpus * self.device_tflops * 1e12 * 3600 * self.cost.effective_time

    @property
    def flops(self) -> float:
        """Of the whole budget."""
        return self.flops_per_hour * self.hours

    def spending(self, flops: float) -> dict[str, float]:
        """Hours, GPU hours, energy and price of so many operations, as far as the config gives them."""
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
    """Prints what the budget can train.

    Args:
        asked: the config.
        conf: folder of the presets.

    Raises:
        ConfigError: what a GPU achieves is not said.
    """
    budget, law = budget_of(asked), LAWS[asked.cost.law.value]
    parameters, tokens = law.best(budget.flops)
    best = Training("compute-optimal", parameters, tokens, budget.flops)
    presets = nearest(presets_of(conf), parameters, budget)
    own = own_trainings(asked, budget)
    if asked.json:
        print(json.dumps(budget_json(budget, law, [best, *presets, *own]), indent=2))
        return
    console = VisibleConsole(highlight=False)
    console.width = max(console.width, _WIDTH)
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
    """The budget that the config gives.

    Raises:
        ConfigError: it lacks something, or gives what cannot be.
    """
    asked.cost.check()
    tflops = asked.device_tflops or asked.rank_tflops
    step = planned_step(asked) if tflops is None else None
    if step is not None:
        tflops = step.tflops_per_device
    assert asked.budget_hours is not None
    if tflops is None:
        raise ConfigError(
            "budget_hours needs device_tflops, what a GPU achieves while it trains (tflops_per_device in "
            "metrics.jsonl): set it, for example device_tflops=400, or a device whose step can be planned, device=h100"
        )
    return Budget(asked.gpus or asked.parallel.world_size, asked.budget_hours, tflops, asked.cost)


def presets_of(conf: Path) -> list[tuple[str, ModelConfig, int, str | None]]:
    """Name, shape, sequence length and experiment of every preset whose vocabulary is known."""
    experiments = _experiments(conf)
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


def _experiments(conf: Path) -> dict[str, str]:
    """The experiment that trains each model."""
    found = {}
    for path in sorted((conf / "experiment").glob("*.yaml")):
        for entry in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("defaults", []):
            if isinstance(entry, dict) and "override /model" in entry:
                found[str(entry["override /model"])] = path.stem
    return found


def nearest(
    presets: Sequence[tuple[str, ModelConfig, int, str | None]], parameters: float, budget: Budget
) -> list[Training]:
    """The presets nearest in size, each trained for the whole budget, from small to large."""
    sized = sorted(
        ((float(parameter_count(model)), name, model, seq_len, run) for name, model, seq_len, run in presets),
        key=lambda item: abs(math.log(item[0] / parameters)),
    )
    found = [
        Training(f"model={name}", size, budget.flops / model_flops_per_token(model, seq_len), budget.flops, run)
        for size, name, model, seq_len, run in sized[:_PRESETS_SHOWN]
    ]
    return sorted(found, key=lambda item: item.parameters)


def own_trainings(asked: PlanConfig, budget: Budget) -> list[Training]:
    """The config's own model, for the whole budget and, where the config says how long, for that."""
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
    """How far a training is from the best one.

    Returns:
        `tokens_over_best`: over those for which its size is the best one: above 1 it is over-trained. `loss` and
        `best_loss`, of the best size with as much compute, 6 * N * D. `compute_over_best`: compute over what the
        best size needs for the same loss.
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
    """The same as plain dicts."""
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
                "name": training.name,
                "experiment": training.experiment,
                "parameters": training.parameters,
                "tokens": training.tokens,
                "flops": training.flops,
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
    for name in ("parameters", "tokens", "tokens/parameter", "trained", "loss", "compute over best"):
        table.add_column(name, justify="right")
    for name in shown:
        table.add_column(_MONEY[name], justify="right")
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
    """Tokens over the best number for a size, in words."""
    if 0.9 <= over_best <= 1.1:
        return "as is best"
    return f"over, {over_best:,.1f} x" if over_best > 1 else f"under, {over_best:.2f} x"


def _size(count: float) -> str:
    """As 8.03 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
