"""Per-layer norms equal those of the unsharded model in every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.model.gpt import GPT
from megads.monitor.hooks import LayerNormsHook, layer_names
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import MetricsWriter, read_json_lines
from megads.runtime.run_dir import METRICS_FILE
from megads.tools.verify.layout import evaluate, rank_batches
from megads.tools.verify.scenario import initial_weights, step_batches
from tests import parity
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, build_engine, scenario_with, train_reference

pytestmark = pytest.mark.distributed

SCENARIO = scenario_with(masked=True)
CASES = ("tp2pp2sp", "zero3dp2", "tp2", "pp2", "cp2", "pp2 interleaved", "zero2tp2dp2", "tp2pp2dp2")


def info(step: int, last: bool = False) -> StepInfo:
    return StepInfo(
        step=step, samples=12 * step, tokens=0, loss=2.0, grad_norm=1.0, lr=1e-3, global_batch_size=12, seq_len=24,
        step_time_s=0.1, data_time_s=0.0, skipped=False, culprit="", batch_hash="", last=last,
    )  # fmt: skip


@functools.cache
def expected() -> dict[str, float]:
    """Norms of the unsharded model in the first step."""
    model, found = GPT(SCENARIO.model, SCENARIO.seed, initial_weights(SCENARIO)), dict[str, float]()
    sums: dict[str, list[Tensor]] = {}

    def note(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        sums.setdefault(name, []).append(output.detach().double())

    for name, layer in zip(model.layer_names, model.layers, strict=True):
        if name != "head":
            layer.register_forward_hook(functools.partial(note, name))
    for batch in step_batches(SCENARIO, 0):
        assert batch.tokens_bs is not None
        model(batch.tokens_bs, batch.info)
    for name, outputs in sums.items():
        found[f"layers/{name}/activation_rms"] = float(torch.cat(outputs).square().mean().sqrt())
    for name in layer_names(SCENARIO.model):
        gradients = train_reference(SCENARIO).gradients.items()
        square = sum(float((g.astype("float64") ** 2).sum()) for key, g in gradients if key.startswith(f"{name}."))
        found[f"layers/{name}/grad_norm"] = square**0.5
    return found


def _measured(layout: str, folder: Path) -> list[str]:
    """Validates, trains three steps, measures the first and the third; returns the engine's type if a watch is left."""
    scenario = parity.fitted(SCENARIO, LAYOUTS[layout])
    engine = build_engine(scenario, LAYOUTS[layout])
    metrics = MetricsWriter(folder, enabled=dist.get_rank() == 0)
    hook = LayerNormsHook(engine, layer_names(scenario.model), 2, metrics)
    hook.on_start(TrainState(1, 0, 0))  # the next step is the second of the run
    evaluate(engine, scenario)
    for step in range(3):
        engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
        hook.on_step(info(step + 2, last=step == 2))
    return [type(engine).__name__] if engine._watched else []


@pytest.mark.quick("tp2pp2sp")
@pytest.mark.parametrize("layout", CASES)
def test_layer_norms_are_equal_in_every_layout(layout: str, tmp_path: Path) -> None:
    """Catches a gradient counted on two ranks or none, one shard's activations reported for all, a validation measured
    as a step, and a watch that is never removed."""
    assert run_ranks(_measured, LAYOUTS[layout].world_size, layout, tmp_path) == [[]] * LAYOUTS[layout].world_size
    first, third = read_json_lines(tmp_path / METRICS_FILE)
    assert (first["step"], third["step"]) == (2, 4)
    assert {key for key in first if key.startswith("layers/")} == expected().keys()
    for key, value in expected().items():
        assert first[key] == pytest.approx(value, rel=1e-5), key
    assert all(third[key] != first[key] for key in expected())
