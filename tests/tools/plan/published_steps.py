"""Predicts every step of published_steps.yaml and prints it with the published value.

Half of the rows chose the constants of megads/tools/plan, the other half validates them, and blind rows were added to
the finished model; all are printed. Run it with

    python -m tests.tools.plan.published_steps [--parts] [rows whose names contain this]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megads.model.config import MLPKind, ModelConfig, Position
from megads.model.model_size import model_flops_per_token
from megads.model.moe_config import MoEConfig
from megads.parallel.config import ParallelConfig, Partition, Recompute
from megads.parallel.schedule import ScheduleName
from megads.tools.plan.devices import find_device
from megads.tools.plan.execution import Execution
from megads.tools.plan.step_estimate import StepEstimate, StepModel
from megads.tools.plan.workload import Workload

ROWS = Path(__file__).with_suffix(".yaml")
_ENUMS = {
    "position": Position,
    "mlp": MLPKind,
    "partition": Partition,
    "recompute": Recompute,
    "schedule": ScheduleName,
    "moe": lambda values: MoEConfig(**values),
}
_GPT = {"position": "learned", "hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_norm": False}


@dataclass(frozen=True)
class PublishedStep:
    """A published step time with its configuration.

    Attributes:
        name: starts with the source.
        half: fit, judge, blind, held_out or experts.
        seconds: step time, converted from the published value.
        model: the model's shape.
        parallel: the layout.
        shape: shape of the step.
        device: name of the device.
        nic_gigabytes_per_s: network bandwidth of each device, if not the default.
        execution: how the trainer executes the step.
    """

    name: str
    half: str
    seconds: float
    model: ModelConfig
    parallel: ParallelConfig
    shape: Workload
    device: str
    nic_gigabytes_per_s: float | None
    execution: Execution

    def planned(self) -> StepEstimate:
        """Predicted step."""
        device = find_device(self.device)
        if self.nic_gigabytes_per_s is not None:
            device = replace(device, nic_gigabytes_per_s=self.nic_gigabytes_per_s)
        return StepModel(self.model, self.parallel, self.shape, device, execution=self.execution).estimate()


@cache
def published_steps(path: Path = ROWS) -> tuple[PublishedStep, ...]:
    """Returns all rows of the file."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(_row(name, row, found) for name, row in found["rows"].items())


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _ENUMS[key](value) if key in _ENUMS else value for key, value in values.items()}


def _row(name: str, row: dict[str, Any], found: dict[str, Any]) -> PublishedStep:
    common = found["defaults"][name.split(maxsplit=1)[0]]
    model = ModelConfig(**_typed({**_GPT, **found["models"][row["model"]]}))
    parallel = ParallelConfig(**_typed({**common["parallel"], **row["parallel"]}))
    micro_batch_size, batch, seq_len = row["batch"]
    shape = Workload(seq_len, micro_batch_size, batch // (micro_batch_size * parallel.dp))
    assert shape.micro_batches * micro_batch_size * parallel.dp == batch, name
    execution = Execution(**found["executions"][row.get("execution", common["execution"])])
    seconds = _seconds(row["measured"], model, parallel.world_size, batch, seq_len)
    device = row.get("device", common["device"])
    nic = row.get("nic_gigabytes_per_s", common.get("nic_gigabytes_per_s"))
    return PublishedStep(name, row["half"], seconds, model, parallel, shape, device, nic, execution)


def _seconds(measured: dict[str, float], model: ModelConfig, devices: int, batch: int, seq_len: int) -> float:
    """Step time in seconds by the convention of the source."""
    ((kind, value),) = measured.items()
    tokens, layers, hidden = batch * seq_len, model.num_layers, model.hidden_size
    if kind == "step_s":
        return value
    if kind == "tokens_per_s":
        return tokens / devices / value
    if kind == "narayanan_tflops":
        shares = 1 + seq_len / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
        return 96 * tokens * layers * hidden**2 * shares / (value * 1e12 * devices)
    assert kind in ("palm_tflops", "causal_tflops"), kind
    hidden_by_causality = 6 * layers * model.attention_width * seq_len if kind == "causal_tflops" else 0
    return tokens * (model_flops_per_token(model, seq_len) - hidden_by_causality) / (value * 1e12 * devices)


def errors(rows: Iterable[PublishedStep]) -> dict[str, float]:
    """Relative errors of the predicted steps, by name."""
    return {row.name: row.planned().step_time_s / row.seconds - 1 for row in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and the summary of both halves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", action="store_true", help="print the parts of the predicted time")
    parser.add_argument("name", nargs="?", default="", help="only rows whose names contain this")
    asked = parser.parse_args(arguments)
    for half in ("fit", "judge", "blind", "held_out", "experts"):
        print(f"\n| {half} | published | planned | error |\n|---|---:|---:|---:|")
        wrong = []
        for row in published_steps():
            if row.half != half or asked.name not in row.name:
                continue
            plan = row.planned()
            wrong.append(plan.step_time_s / row.seconds - 1)
            print(f"| {row.name} | {row.seconds:.2f} s | {plan.step_time_s:.2f} s | {wrong[-1]:+.1%} |")
            if asked.parts:
                shares = sorted(plan.parts.items(), key=lambda part: -part[1])
                print("    " + ", ".join(f"{name} {seconds / plan.step_time_s:.1%}" for name, seconds in shares))
        if wrong:
            inside = sum(abs(error) <= 0.1 for error in wrong)
            print(f"\n{inside} of {len(wrong)} within 10%; mean {fmean(map(abs, wrong)):.1%}, bias {fmean(wrong):+.1%}")


if __name__ == "__main__":
    main()
