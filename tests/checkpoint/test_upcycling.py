"""A mixture of experts that starts from the weights of a dense model: step-0 logits, layouts and refusals."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megads.train.resume
from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.initial import WeightSource, find_source, open_source, read_weights
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import save_checkpoint
from megads.config.root import RootConfig
from megads.engine.interface import Shard
from megads.errors import ConfigError
from megads.model.config import MLPKind, ModelConfig, NormKind
from megads.model.gpt import GPT, initial_value
from megads.model.moe_config import MoEConfig, RouterScore
from megads.parallel.config import ParallelConfig
from megads.runtime.distributed import ALONE
from megads.runtime.metrics import EventWriter
from tests.distributed import run_ranks
from tests.engine.test_moe import LAYOUTS
from tests.model.test_gpt import hot_value
from tests.parity import MODEL, assemble, build_engine, pieces, scenario_with, step_batches

DENSE = replace(MODEL, norm=NormKind.rmsnorm, bias=False, mlp=MLPKind.swiglu, ffn_size=40)
MOE = MoEConfig(num_experts=4, top_k=2, global_loss=0.01)


def save_dense(run_dir: Path, model: ModelConfig = DENSE) -> GPT:
    """Saves a checkpoint of a model in which every part affects the output."""
    gpt = GPT(model, 0, hot_value).eval()
    shards = [
        Shard(f"weight/{name}", tuple(weight.shape), (0,) * weight.dim(), weight.detach())
        for name, weight in gpt.parameters_by_name().items()
    ]
    known = json.loads(json.dumps(dataclasses.asdict(model)))
    save_checkpoint(run_dir, shards, RunRecord({"step": 3, "samples": 24, "tokens": 300}, 3, "digest", known, {}))
    return gpt


def upcycled(source: WeightSource, model: ModelConfig, seed: int = 0) -> GPT:
    gpt = GPT.empty(model, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        shards = [
            Shard(f"weight/{name}", tuple(weight.shape), (0,) * weight.dim(), weight)
            for name, weight in gpt.parameters_by_name().items()
        ]
        read_weights(source, shards, initial_value(model, seed))
    return gpt.eval()


@pytest.mark.parametrize(
    ("mlp", "moe"),
    [
        (MLPKind.swiglu, MOE),
        (MLPKind.gelu, replace(MOE, top_k=3)),
        (MLPKind.swiglu, replace(MOE, expert_ffn_size=40, score=RouterScore.sigmoid, bias_rate=0.1, interval=2)),
    ],
    ids=["swiglu", "gelu", "sigmoid"],
)
def test_the_first_logits_are_those_of_the_dense_model(mlp: MLPKind, moe: MoEConfig, tmp_path: Path) -> None:
    """Catches experts that are not copies: rows of gates and ups in another order, a down projection that is not
    transposed, experts that share one copy's rows; and routers that are all zeros, between whose experts only ties
    decide."""
    dense = save_dense(tmp_path, replace(DENSE, mlp=mlp))
    source = open_source(str(tmp_path), ALONE)
    model = replace(dense.config, moe=moe)
    assert source.check_model(model) == [
        f"model.moe.num_experts 0 -> {moe.num_experts}: experts start as copies of the MLPs, routers at random"
    ]
    gpt = upcycled(source, model)
    batch = step_batches(scenario_with(model=DENSE), 0)[0]
    with torch.no_grad():
        wanted, found = (each(batch.tokens_bs, batch.info) for each in (dense, gpt))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    routers = [w for name, w in gpt.parameters_by_name().items() if name.endswith("router.weight")]
    assert len(routers) == sum(map(moe.holds, range(model.num_layers)))
    assert all(w.std() > 0 for w in routers) and (len(routers) == 1 or not torch.equal(routers[0], routers[1]))
    states = {name: w for name, w in gpt.parameters_by_name().items() if not w.requires_grad or "expert_" in name}
    assert all((w == name.endswith("load")).all() for name, w in states.items() if "expert_" in name)


def _started(run_dir: Path, model: ModelConfig, parallel: ParallelConfig) -> list[Any]:
    engine = build_engine(scenario_with(model=model, seed=99), parallel)
    config = RootConfig(model=model, checkpoint=CheckpointConfig(init_from=str(run_dir)))
    events = EventWriter(run_dir / "new", enabled=engine.grid.rank == 0)
    megads.train.resume.load_initial_weights(open_source(str(run_dir), engine.grid.control), config, engine, events)
    return pieces(engine.named_shards())


@pytest.mark.distributed
@pytest.mark.quick("ep2dp2")
@pytest.mark.parametrize("layout", ["ep2dp2", "tp2ep2", "tp2ep2sp whole"])
def test_every_layout_starts_from_the_same_copies(layout: str, tmp_path: Path) -> None:
    """Catches a shard that is filled from another part of the dense MLP, and routers that depend on the layout (N1)."""
    save_dense(tmp_path)
    (tmp_path / "new").mkdir()
    model = replace(DENSE, moe=MOE)
    ranks = run_ranks(_started, LAYOUTS[layout].world_size, tmp_path, model, LAYOUTS[layout])
    found = assemble([part for rank in ranks for part in rank], "weight")
    gpt = upcycled(open_source(str(tmp_path), ALONE), model, RootConfig().train.seed)
    expected = {name: weight.detach().numpy() for name, weight in gpt.parameters_by_name().items()}
    assert found.keys() == expected.keys()
    assert [name for name, values in expected.items() if not np.array_equal(found[name], values)] == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"expert_ffn_size": 24}, "model.moe.expert_ffn_size = 24 must be their ffn_size = 40"),
        ({"shared_ffn_size": 8}, "model.moe.shared_ffn_size=0"),
    ],
)
def test_experts_that_cannot_be_copies_are_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Catches experts of another width, whose weights would be read from other rows."""
    save_dense(tmp_path)
    with pytest.raises(ConfigError) as refused:
        find_source(str(tmp_path)).check_model(replace(DENSE, moe=replace(MOE, **change)))
    assert named in str(refused.value)


def test_weights_of_experts_fit_experts_of_the_same_kind(tmp_path: Path) -> None:
    """Catches a start from weights of other experts, a balance that cannot change, and a bias that is lost silently."""
    biased = replace(DENSE, moe=replace(MOE, bias_rate=0.001))
    save_dense(tmp_path / "moe", biased)
    source = find_source(str(tmp_path / "moe"))
    tuned = replace(biased, moe=replace(biased.moe, global_loss=0.0, bias_rate=0.01, expert_ffn_size=40))
    assert source.check_model(tuned) == [
        "model.moe.bias_rate 0.001 -> 0.01",
        "model.moe.global_loss 0.01 -> 0.0",
    ]
    for change in ({"top_k": 1}, {"bias_rate": 0.0}, {"num_experts": 8}, {"expert_ffn_size": 24}):
        key, value = next(iter(change.items()))
        with pytest.raises(ConfigError, match=rf"model\.moe\.{key}: .* there, {value} here"):
            source.check_model(replace(biased, moe=replace(biased.moe, **change)))
    with pytest.raises(ConfigError, match=r"model\.moe\.num_experts: 4 there, 0 here"):
        source.check_model(DENSE)
    unbalanced = replace(DENSE, moe=replace(MOE, global_loss=0.0))
    save_dense(tmp_path / "without", unbalanced)
    begun = upcycled(find_source(str(tmp_path / "without")), biased).parameters_by_name()
    assert begun["blocks.0.mlp.router.expert_load"].eq(1).all() and begun["blocks.0.mlp.router.expert_bias"].eq(0).all()
