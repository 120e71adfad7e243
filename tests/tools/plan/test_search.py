"""Tests the search for a layout: its bounds hold, and it prunes no better layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megads.config.root import RootConfig, TrainConfig
from megads.model.config import MLPKind, ModelConfig, Position
from megads.model.moe_config import MoEConfig
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import ContextParallelKind, EngineKind, Offload, ParallelConfig, Recompute
from megads.tools.plan import search as tools_search
from megads.tools.plan.devices import DEVICES
from megads.tools.plan.search import (
    Bounds,
    EvaluatedCandidate,
    LayoutCandidate,
    LayoutQuery,
    examined,
    layouts,
    neighbours,
    overrides,
    search,
)
from megads.tools.plan.search_output import layout_text, reasons

LLAMA = ModelConfig(
    num_layers=12,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=14336,
    vocab_size=32000,
    max_seq_len=4096,
    position=Position.rope,
    mlp=MLPKind.swiglu,
    bias=False,
    embedding_norm=False,
    tie_embeddings=False,
)
CONFIG = RootConfig(model=LLAMA, train=TrainConfig(global_batch_size=16, seq_len=4096))


def question(memory_gib: float, devices: int = 8) -> LayoutQuery:
    # Slow NICs between nodes of two devices, so that cross-node traffic matters.
    device = replace(DEVICES["h100"], ranks_per_node=2, nic_gigabytes_per_s=10.0, memory_gib=memory_gib)
    return LayoutQuery(CONFIG, devices, device, int(memory_gib * 2**30))


WIDE = replace(LLAMA, ffn_size=4 * 14336)


MIXTRAL = replace(LLAMA, moe=MoEConfig(num_experts=8, expert_ffn_size=7168))
DEEPSEEK = replace(
    LLAMA, ffn_size=8192, moe=MoEConfig(32, top_k=4, expert_ffn_size=1024, shared_ffn_size=1024, first_dense=2)
)


@pytest.mark.parametrize(
    "model",
    [LLAMA, WIDE, replace(WIDE, mlp=MLPKind.relu), MIXTRAL, DEEPSEEK],
    ids=["llama", "wide", "relu", "mixtral", "deepseek"],
)
def test_bounds_are_below_what_is_planned(model: ModelConfig) -> None:
    """Catches a bound that prunes what fits, or ends the search before the fastest layout."""
    asked = replace(question(1000.0), config=replace(CONFIG, model=model))
    bounds, every = Bounds(asked), list(layouts(asked))
    assert {one.parallel.world_size for one in every} == {8}
    checked, few = 0, 1 if not model.moe.enabled else 3
    for candidate in [*every[:: 23 * few], *[one for one in every if one.parallel.pp == 8][:: 3 * few]]:
        found = examined(asked, bounds.with_bound(candidate))
        if not found.refused:
            assert found.candidate.bound_s <= 1.001 * found.seconds, overrides(candidate)
            assert found.candidate.bound_bytes <= found.memory_bytes, overrides(candidate)
            checked += 1
    assert checked > 20


def test_an_engine_bounds_what_is_searched() -> None:
    """Catches a layout that the run's engine would refuse, and an engine without layouts."""
    asked = question(1000.0)
    seen = {
        engine: {
            (one.parallel.zero_stage, one.parallel.schedule.value)
            for one in layouts(replace(asked, config=replace(CONFIG, engine=engine)))
        }
        for engine in EngineKind
    }
    assert {stage for stage, _ in seen[EngineKind.native]} == {1}
    assert {schedule for _, schedule in seen[EngineKind.deepspeed]} == {"1f1b"}
    assert seen[EngineKind.native] | seen[EngineKind.deepspeed] == seen[EngineKind.auto]
    assert all(len(found) > 2 for found in seen.values())


@pytest.mark.slow
def test_the_search_finds_what_planning_everything_finds() -> None:
    """Catches candidates that are pruned although they fit and are faster."""
    asked = question(60.0, devices=4)
    every = [examined(asked, candidate) for candidate in layouts(asked)]
    fitting = [one for one in every if not one.refused and one.memory_bytes <= asked.memory_bytes]
    found = search(asked, lambda candidate: examined(asked, candidate))
    assert found.complete and found.considered == len(every)
    assert found.examined < 0.8 * len(every)
    assert [one.seconds for one in found.best] == pytest.approx(sorted(one.seconds for one in fitting)[:10])
    assert all(one.memory_bytes > asked.memory_bytes for one in found.unfit)


def test_every_candidate_is_examined_until_none_can_be_faster() -> None:
    """Catches a search that ends at the first candidate which is refused or does not fit, that returns other layouts
    than the fastest, and counts or a limit that are wrong. No clock: a busy machine finds what an idle one does."""
    asked = question(20.0)
    bounds = Bounds(asked)
    every = [bounds.with_bound(candidate) for candidate in layouts(asked)]
    possible = sorted((one for one in every if one.bound_bytes <= asked.memory_bytes), key=lambda one: one.bound_s)
    assert 10 < len(possible) < len(every)
    refused, too_large = possible[0], possible[1]
    # The later half by the bound takes twice as long as it, the earlier half six times.
    asked_for: list[LayoutCandidate] = []

    def seconds(candidate: LayoutCandidate) -> float:
        return (6 if possible.index(candidate) < len(possible) // 2 else 2) * candidate.bound_s

    def examine(candidate: LayoutCandidate) -> EvaluatedCandidate:
        asked_for.append(candidate)
        estimate = SimpleNamespace(step_time_s=seconds(candidate))
        memory = asked.memory_bytes + (candidate == too_large)
        return EvaluatedCandidate(candidate, "no" if candidate == refused else "", memory, estimate)  # type: ignore[arg-type]

    found = search(asked, examine, most=3)
    fitting = sorted((one for one in possible if one not in (refused, too_large)), key=seconds)
    assert [one.candidate for one in found.best] == fitting[:3]
    assert [one.candidate for one in found.unfit] == [too_large]
    assert (found.considered, found.pruned) == (len(every), len(every) - len(possible))
    needed = [one for one in possible if one.bound_s < seconds(fitting[2])]
    assert asked_for == needed and found.examined == len(needed) and found.complete
    asked_for.clear()
    cut = search(asked, examine, most=3, limit=4)
    # The two that are refused or do not fit are not counted.
    assert asked_for == possible[:6] and (cut.examined, cut.complete) == (6, False)
    assert [one.candidate for one in cut.best] == sorted(possible[2:6], key=seconds)[:3]


def test_losers_have_reasons() -> None:
    """Catches reasons that name another part than the one that grew, and neighbours equal to the best layout."""
    asked = question(60.0)
    best = search(asked, lambda candidate: examined(asked, candidate), most=1).best[0]
    others = dict(neighbours(asked, best.candidate))
    assert all(other != best.candidate for other in others.values())
    texts = {what: reasons(asked, examined(asked, other), best) for what, other in others.items()}
    wide = LayoutCandidate(replace(best.candidate.parallel, tp=8, pp=1, dp=1, virtual_stages=None), 1, 16)
    wide = replace(wide, parallel=replace(wide.parallel, schedule=ParallelConfig().schedule, zero_stage=1, cp=1))
    assert "tp over nodes" in reasons(asked, examined(asked, wide), best)
    if "recompute=full" in texts:
        assert "recompute" in texts["recompute=full"]
    small = replace(asked, memory_bytes=1 << 30)
    assert "does not fit by" in reasons(small, examined(small, wide), best)


def test_no_alternative_is_faster_than_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a "fastest" layout beside an alternative that fits and is faster, where the search has stopped early."""
    asked = question(60.0)
    monkeypatch.setattr(tools_search, "search", lambda asked, examine, most: search(asked, examine, most, limit=1))
    answer = tools_search.find_layouts(asked)
    fastest = answer.best[0]
    assert not answer.complete and len(answer.best) > 1
    for what, other in answer.others:
        if not other.refused and other.memory_bytes <= asked.memory_bytes:
            assert other.seconds >= fastest.seconds, what


def test_overrides_are_the_layout() -> None:
    """Catches a key that is missing from the overrides that people paste."""
    parallel = ParallelConfig(tp=2, pp=2, dp=2, sequence_parallel=True, recompute=Recompute.selective)
    words = dict(word.split("=") for word in overrides(LayoutCandidate(parallel, 4, 2)).split())
    for key in ("tp", "cp", "pp", "dp", "schedule", "sequence_parallel", "recompute", "zero_stage"):
        assert words[f"parallel.{key}"] == str(getattr(parallel, key)).lower()
    assert words["train.micro_batch_size"] == "4"


def test_kinds_of_context_parallelism_are_searched() -> None:
    """Catches a kind that is missing, that is searched without ranks to divide a sample over or with heads that do not
    divide over them, whose lower bound is the other's, and overrides without it."""
    train = replace(CONFIG.train, seq_len=16384)
    asked = replace(question(1000.0), config=replace(CONFIG, model=replace(LLAMA, max_seq_len=16384), train=train))
    every = list(layouts(asked))
    by_size = {cp: {one.parallel.cp_kind for one in every if one.parallel.cp == cp} for cp in (1, 2, 4)}
    kinds = [kind for kind in ContextParallelKind if kind is not ContextParallelKind.auto]
    assert by_size == {1: {ContextParallelKind.allgather}, 2: set(kinds), 4: set(kinds)}
    parallel = ParallelConfig(cp=2, dp=4)
    bounds, checked = Bounds(asked), []
    for kind in kinds:
        one = LayoutCandidate(replace(parallel, cp_kind=kind), 1, 4)
        found = examined(asked, bounds.with_bound(one))
        assert not found.refused and found.candidate.bound_s <= 1.001 * found.seconds
        assert f"parallel.cp_kind={kind}" in overrides(one).split()
        assert [what for what, _ in neighbours(asked, one) if "cp_kind" in what] == [
            f"cp_kind={other}" for other in kinds if other is not kind
        ]
        checked.append(found.candidate.bound_s)
    assert len(set(checked)) == 3
    # Two ranks of a node exchange heads, and those of two nodes keys and values.
    two_level = [one for one in every if one.parallel.cp_ulysses > 1]
    assert {(one.parallel.tp, one.parallel.cp, one.parallel.cp_ulysses) for one in two_level} == {(1, 4, 2)}
    assert {one.parallel.cp_kind for one in two_level} == {ContextParallelKind.allgather, ContextParallelKind.ring}
    one = LayoutCandidate(ParallelConfig(cp=4, dp=2, cp_ulysses=2), 1, 8)
    found, alone = (
        examined(asked, bounds.with_bound(replace(one, parallel=replace(one.parallel, cp_ulysses=size))))
        for size in (2, 1)
    )
    assert not found.refused and found.candidate.bound_s <= 1.001 * found.seconds
    assert found.seconds < alone.seconds, "fewer keys cross the nodes, of all ranks with their own ports"
    assert "parallel.cp_ulysses=2" in overrides(one).split() and "ulysses 2 x allgather 2" in layout_text(one)
    assert "cp_kind=ring, cp_ulysses=2" in dict(neighbours(asked, one))
    odd = replace(asked, config=replace(asked.config, model=replace(LLAMA, num_heads=6, num_kv_heads=2)))
    known = ContextParallelKind
    assert {one.parallel.cp_kind for one in layouts(odd) if one.parallel.cp == 4} == {known.allgather, known.ring}
    flex = replace(asked, config=replace(asked.config, model=replace(asked.model, attention=AttentionKind.flex)))
    assert {one.parallel.cp_kind for one in layouts(flex) if one.parallel.cp == 4} == {known.allgather, known.ulysses}


def test_where_nothing_fits_mlps_are_chunked_and_activations_offloaded() -> None:
    """Catches a search that ends with "none fits" although the same layouts with less memory fit, one that uses it
    although others fit, a memory bound of activations that are on the host, and overrides without the settings."""
    train = replace(CONFIG.train, seq_len=65536, global_batch_size=2)
    config = replace(CONFIG, model=replace(LLAMA, max_seq_len=65536), train=train)
    asked = replace(question(1000.0, devices=1), config=config)

    def settings(memory_bytes: int) -> tuple[bool, bool]:
        best = tools_search.find_layouts(replace(asked, memory_bytes=memory_bytes)).best
        assert all(one.memory_bytes <= memory_bytes for one in best)
        words = overrides(best[0].candidate).split() if best else []
        return "ops.mlp_chunk=8192" in words, "parallel.offload=activations" in words

    def least(**changes: object) -> int:
        ops = replace(config.ops, mlp_chunk=changes.get("mlp_chunk"))
        parallel = replace(config.parallel, offload=changes.get("offload", Offload.none))
        query = replace(asked, config=replace(config, ops=ops, parallel=parallel))
        bounds = Bounds(query)
        found = [examined(query, bounds.with_bound(one)) for one in layouts(query)]
        assert all(one.candidate.bound_bytes <= one.memory_bytes for one in found if not one.refused)
        return min(one.memory_bytes for one in found if not one.refused)

    plain, chunked, away = least(), least(mlp_chunk=8192), least(offload=Offload.activations)
    both = least(mlp_chunk=8192, offload=Offload.activations)
    assert both < min(chunked, away) and max(chunked, away) < plain
    assert settings(plain) == (False, False)
    assert settings(chunked) == (True, False)
    assert settings(both) == (True, True)
    assert settings(both - 1) == (False, False)


def test_expert_parallelism_is_searched() -> None:
    """Catches sizes of expert parallelism that are missing or do not divide experts and ranks, whole experts without
    sequence parallelism, and overrides without them."""
    asked = replace(question(1000.0), config=replace(CONFIG, model=DEEPSEEK))
    every = [one.parallel for one in layouts(asked)]
    assert {one.ep for one in every} == {1, 2, 4, 8}
    assert all(one.expert_domain % one.ep == 0 and one.zero_stage == 1 for one in every)
    whole = [one for one in every if not one.expert_tp]
    assert whole and all(one.sequence_parallel and one.tp > 1 for one in whole)
    assert any(one.ep > one.data_size for one in whole)
    for one in every:
        one.check()
    words = overrides(LayoutCandidate(replace(whole[-1], ep=2), 1, 1))
    assert "parallel.ep=2" in words and "parallel.expert_tp=false" in words
    assert {one.ep for one in (candidate.parallel for candidate in layouts(question(1000.0)))} == {1}
