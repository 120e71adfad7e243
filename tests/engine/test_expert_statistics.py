"""What a step reports about its experts: their load and the router's losses in every layout, and broken experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megads.engine.interface import StepResult
from megads.engine.native_engine import NativeEngine
from megads.model.config import MLPKind, ModelConfig, NormKind
from megads.model.gpt import GPT
from megads.model.moe import Router
from megads.model.moe_config import MoEConfig, RouterScore
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from megads.parallel.sharding import placement_of
from megads.runtime.hooks import ExpertStatistics
from megads.tools.verify.layout import rank_batches
from megads.tools.verify.scenario import Scenario, initial_weights, step_batches
from tests import parity
from tests.distributed import run_ranks
from tests.parity import MODEL, build_engine, scenario_with

pytestmark = pytest.mark.distributed

EXPERTS = MoEConfig(num_experts=8, top_k=2, expert_ffn_size=24)
MODELS = {
    "softmax": replace(EXPERTS, global_loss=0.02, z_loss=0.01),
    "sigmoid": replace(EXPERTS, top_k=3, score=RouterScore.sigmoid, sequence_loss=0.1, bias_rate=0.01, first_dense=1),
}
LAYOUTS = {
    "single": ParallelConfig(),
    "pp2": ParallelConfig(pp=2),
    "ep2pp2": ParallelConfig(pp=2, dp=2, ep=2),
    "tp2sp": ParallelConfig(tp=2, sequence_parallel=True),
    "tp2": ParallelConfig(tp=2),
    "cp2": ParallelConfig(cp=2),
    "zb_v": ParallelConfig(pp=2, schedule=ScheduleName.zb_v),
    "dp2 recompute": ParallelConfig(dp=2, recompute=Recompute.full),
}


def with_experts(moe: MoEConfig) -> ModelConfig:
    return replace(MODEL, moe=moe, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, bias=False)


def scenario(name: str) -> Scenario:
    return scenario_with(masked=True, model=with_experts(MODELS[name]))


@functools.cache
def expected(name: str) -> ExpertStatistics:
    """Statistics of the unsharded model in the first step, from the inputs and choices of its routers."""
    given = scenario(name)
    model, moe, rows = GPT(given.model, given.seed, initial_weights(given)), given.model.moe, dict[str, Tensor]()

    def note(path: str, router: Router, inputs: tuple[Tensor, Any], output: tuple[Tensor, Tensor]) -> None:
        logits_bse = inputs[0].double() @ router.weight.double().T
        scores_bse = logits_bse.softmax(-1) if moe.score is RouterScore.softmax else logits_bse.sigmoid()
        shares_bse = scores_bse / scores_bse.sum(-1, keepdim=True)
        counts_be = nn.functional.one_hot(output[1], moe.num_experts).sum((1, 2)).double()
        loads_be = counts_be * moe.num_experts / (moe.top_k * output[1].shape[1])
        balance = moe.sequence_loss * (shares_bse.sum(1) * loads_be).sum()
        if router.expert_load is not None:
            balance += moe.global_loss * (shares_bse * router.expert_load).sum()
        z_loss = moe.z_loss * logits_bse.logsumexp(-1).square().sum()
        entropy = -torch.special.xlogy(shares_bse, shares_bse).sum()
        own = torch.cat((counts_be.sum(0), torch.stack((balance, z_loss, entropy))))
        rows[path] = rows.get(path, 0.0) + own

    for path, module in model.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(functools.partial(note, path))
    with torch.no_grad():
        for batch in step_batches(given, 0):
            assert batch.tokens_bs is not None
            model(batch.tokens_bs, batch.info)
    layers = [layer for layer in range(given.model.num_layers) if moe.holds(layer)]
    assert len(rows) == len(layers)
    return ExpertStatistics.from_sums(layers, moe.top_k, [row.tolist() for row in rows.values()])


def _first_step(name: str, layout: str) -> StepResult:
    given = parity.fitted(scenario(name), LAYOUTS[layout])
    engine = build_engine(given, LAYOUTS[layout])
    return engine.step(rank_batches(given, 0, engine.grid), given.lr)


@pytest.mark.quick("softmax-ep2pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_reports_the_experts_of_all_layers(name: str, layout: str) -> None:
    """Catches layers of another pipeline stage that are missing or in another order, counts of one rank's tokens, of a
    tensor-parallel rank counted twice or of a recomputed pass, and a balance loss within the language loss."""
    truth = expected(name)
    single = run_ranks(_first_step, 1, name, "single")[0]
    for result in run_ranks(_first_step, LAYOUTS[layout].world_size, name, layout):
        found = result.experts
        assert (found.layers, found.counts) == (truth.layers, truth.counts)
        for key in ("balance_loss", "z_loss", "entropy"):
            assert getattr(found, key) == pytest.approx(getattr(truth, key), rel=1e-5), key
        assert result.loss == pytest.approx(single.loss, rel=1e-6)


def test_statistics_are_those_of_the_step() -> None:
    """Catches a load that is not relative to the mean, an expert with tokens that counts as dead, sums in place of
    means over tokens, and entropies that are added over layers."""
    rows = [[6.0, 0.0, 2.0, 0.0, 0.8, 0.4, 4.0], [2.0, 2.0, 2.0, 2.0, 0.0, 0.4, 2.0]]
    found = ExpertStatistics.from_sums([1, 3], 2, rows)  # of 4 tokens
    assert found.max_loads == [3.0, 1.0] and found.dead == [[1, 3], []]
    assert found.summary() == {
        "moe/max_load": 3.0,
        "moe/dead_experts": 2,
        "moe/router_entropy": 0.75,
        "moe/balance_loss": pytest.approx(0.2),
        "moe/z_loss": pytest.approx(0.2),
    }


GATE_UP, DOWN = "blocks.1.mlp.experts.gate_up.weight", "blocks.1.mlp.experts.down.weight"


def _with_a_broken_expert(layout: str) -> StepResult:
    """A step with an infinite weight in expert 5."""
    given = parity.fitted(scenario("softmax"), LAYOUTS[layout])
    hot = parity.hot_weights(given.seed)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        full = hot(name, shape)
        if name == DOWN:
            full.view(8, -1)[5, 3] = torch.inf
        return full

    engine = build_engine(given, LAYOUTS[layout], value)
    return engine.step(rank_batches(given, 0, engine.grid), given.lr)


def _with_broken_gradients(layout: str) -> StepResult:
    """A step with NaN gradients of the experts 4 and 6, as a defect of a kernel would cause them."""
    given = parity.fitted(scenario("softmax"), LAYOUTS[layout])
    engine = build_engine(given, LAYOUTS[layout])
    assert isinstance(engine, NativeEngine)
    for parameter in engine.optimizer.parameters:
        place = placement_of(parameter)
        if place.key == GATE_UP:
            parameter.register_hook(
                functools.partial(
                    _broken, [place.experts.index(e) for e in (4, 6) if e in place.experts], len(place.experts)
                )
            )
    return engine.step(rank_batches(given, 0, engine.grid), given.lr)


def _broken(places: list[int], experts: int, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.view(experts, -1)[places, 0] = torch.nan
    return gradient


@pytest.mark.parametrize("layout", ["single", "tp2", "ep2pp2"])
@pytest.mark.parametrize(
    ("step", "where", "names"),
    [
        (_with_a_broken_expert, "weights", (f"{DOWN}[expert 5]",)),
        (_with_broken_gradients, "backward", (f"{GATE_UP}[experts 4, 6]",)),
    ],
    ids=["weights", "gradients"],
)
def test_a_nonfinite_step_names_layer_and_expert(
    step: Callable[[str], StepResult], where: str, names: tuple[str, ...], layout: str
) -> None:
    """Catches a culprit without the expert's number, or with its number among the experts of a rank."""
    for result in run_ranks(step, LAYOUTS[layout].world_size, layout):
        assert result.skipped and result.culprit is not None
        assert (result.culprit.where, result.culprit.parameters) == (where, names)
