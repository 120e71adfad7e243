"""Every pair of features trains as the unsharded reference does, because features may only fail in combination."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from megads.model.config import MLPKind, NormKind, Position
from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.parity import Scenario, scenario_with, train_layout

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Settings of each feature, and settings that it needs to have an effect unless another feature sets them.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {}),
    "tp3": ({"tp": 3}, {}),
    "sp": ({"sequence_parallel": True}, {"tp": 2}),
    "chunks": ({"tp_chunks": 3}, {"tp": 2}),
    "pp2": ({"pp": 2}, {}),
    "pp4": ({"pp": 4}, {}),
    "interleaved": ({"pp": 2, "schedule": ScheduleName.interleaved}, {}),
    "zb_v": ({"pp": 2, "schedule": ScheduleName.zb_v}, {}),
    "cp2": ({"cp": 2}, {}),
    "dp2": ({"dp": 2}, {}),
    "dp3": ({"dp": 3}, {}),
    "zero0": ({"zero_stage": 0}, {"dp": 2}),
    "zero2": ({"zero_stage": 2}, {"dp": 2}),
    "zero3": ({"zero_stage": 3}, {"dp": 2}),
    "hierarchical": ({"zero_stage": 3, "zero_shard_size": 2, "dp": 4}, {}),
    "selective": ({"recompute": "selective"}, {}),
    "full": ({"recompute": "full"}, {}),
    "documents": ({"documents": True}, {}),
    "model": ({"model": True}, {}),
}
# All model features that BLOOM lacks; six KV heads are divisible by two and three.
MODEL_FEATURES: dict[str, Any] = {
    "num_kv_heads": 6, "window": 5, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "parallel_block": True,
    "position": Position.rope, "num_heads": 12, "hidden_size": 96, "head_size": 10, "qk_norm": True,
}  # fmt: skip
OF_SCENARIO = ("documents", "model")
# 24 tokens are divisible by 2 * cp and by cp * tp, 12 samples by every dp.
SCENARIO = scenario_with(steps=3, masked=True, seq_len=24, micro_batch_size=1)
SCENARIO = replace(SCENARIO, model=replace(SCENARIO.model, num_layers=4))


MOST_RANKS = 8
ORDER = list(FEATURES).index


def joined(features: Sequence[str]) -> dict[str, Any] | None:
    """Settings with all of these features; None if some exclude each other, or need too many ranks."""
    asked: dict[str, Any] = {}
    for feature in features:
        for key, value in FEATURES[feature][0].items():
            if asked.setdefault(key, value) != value:
                return None
    settings = {key: value for feature in features for key, value in FEATURES[feature][1].items()} | asked
    if settings.get("zero_stage", 1) > 1 and settings.get("pp", 1) > 1:
        return None  # refused: see tests/parallel/test_config.py
    ranks = math.prod(settings.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    return settings if ranks <= MOST_RANKS or len(features) == 2 else None


def covering() -> list[tuple[str, ...]]:
    """Groups of features that cover every possible pair; greedy, so that they are few."""
    left = [pair for pair in combinations(FEATURES, 2) if joined(pair) is not None]
    groups = []
    while left:
        group = left[0]
        while True:
            more = [(*group, feature) for feature in FEATURES if feature not in group]
            more = [wider for wider in more if joined(wider) is not None]
            gains = [sum(pair in left for pair in combinations(sorted(wider, key=ORDER), 2)) for wider in more]
            if not gains or max(gains) == sum(pair in left for pair in combinations(sorted(group, key=ORDER), 2)):
                break
            group = more[gains.index(max(gains))]
        groups.append(group)
        left = [pair for pair in left if not set(pair) <= set(group)]
    return groups


def scenario(documents: bool, model: bool) -> Scenario:
    shape = replace(SCENARIO.model, **MODEL_FEATURES) if model else SCENARIO.model
    return replace(SCENARIO, documents=documents, model=shape)


@pytest.mark.parametrize("features", covering(), ids="-".join)
def test_every_pair_of_features_trains_the_reference_model(features: tuple[str, ...]) -> None:
    """Catches features that are right alone and wrong together (N1, N3, N7, N8, N9, N10)."""
    settings = joined(features)
    assert settings is not None
    whole = scenario(settings.get("documents", False), settings.get("model", False))
    layout = ParallelConfig(**{key: value for key, value in settings.items() if key not in OF_SCENARIO})
    assert parity.faults_of(train_layout(whole, layout), whole) == []
