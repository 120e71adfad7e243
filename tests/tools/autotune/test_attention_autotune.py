"""Attention autotuning end to end, on a CPU with the kinds that run there.

The work says GPU, since nothing is measured for a CPU; kinds without a kernel report this when they are tried.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megads.errors import ConfigError
from megads.model.config import ModelConfig, Position
from megads.ops.attention_kinds import AttentionKind, AttentionWork
from megads.ops.config import Implementation
from megads.parallel.context import context_positions
from megads.tools.autotune import attention_trials
from megads.tools.autotune.attention_trials import (
    FOLDER,
    TunedAttention,
    attention_key,
    measure,
    plain_attention,
    random_problem,
    tune_attention,
    within_memory_plan,
)
from megads.tools.autotune.benchmark import TuningResult, cache_file, fastest

CPU = torch.device("cpu")
MODEL = ModelConfig(hidden_size=128, num_heads=8, num_kv_heads=4)


def work_of(model: ModelConfig, tp: int = 2, **changes: object) -> AttentionWork:
    known = {"bf16": True, "cuda": True, "impl": Implementation.fused, "seq_len": 96, "micro_batch_size": 2}
    return replace(model.attention_work(tp), **(known | changes))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("kernels")
def test_attention_is_measured_once_then_remembered_by_shape() -> None:
    """Catches a choice measured at every start, a cached choice reused for another shape, and a truncated cache file
    that ends a run or is used."""
    work = work_of(MODEL)
    first = tune_attention(MODEL, work, CPU, rounds=1)
    assert first.source == "measured" and first.outcomes is not None
    timed = {name for name, found in first.outcomes.items() if found.time_ms is not None}
    assert timed == {"sdpa", "augmented", "fused_softmax"} and first.kind.value in timed
    for kind in ("flex", "cudnn"):
        assert "there is no kernel for torch.bfloat16 on cpu" in first.outcomes[kind].reason
    assert "flash-attn" in first.outcomes["flash"].reason or "no kernel" in first.outcomes["flash"].reason
    assert all(f"{name} " in first.text for name in timed) and "flex: " in first.text
    again = tune_attention(MODEL, work, CPU, rounds=1)
    assert again == replace(first, source="measured before")
    longer = work_of(MODEL, seq_len=64)
    assert attention_key(longer, CPU) != first.key
    file = cache_file(FOLDER, first.key)
    file.write_text(file.read_text()[:-40])
    assert tune_attention(MODEL, work, CPU, rounds=1).source == "measured"
    file.unlink()
    assert tune_attention(MODEL, work, CPU, rounds=1).source == "measured"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("context", [1, 2])
def test_attention_with_dropout_is_measured_among_kinds_that_support_it(context: int) -> None:
    """Catches attention dropout that uses plain torch without autotuning, and kinds without dropout that are tried."""
    model = replace(MODEL, attention_dropout=0.1)
    places = None if context == 1 else context_positions(96, 1, 2, CPU)
    choice = tune_attention(model, work_of(model, context=context), CPU, places_s=places, rounds=1)
    assert choice.outcomes is not None and choice.source == "measured"
    timed = {name for name, found in choice.outcomes.items() if found.time_ms is not None}
    assert timed == {"sdpa", "fused_softmax"} and choice.kind.value in timed
    assert "attention_dropout = 0.1" in choice.outcomes["flex"].reason


def test_a_resumed_run_keeps_its_attention_kind() -> None:
    """Catches a resume that uses another kernel because the cache was removed or measured again: its losses would
    differ from those of an uninterrupted run."""
    work = work_of(MODEL, impl=Implementation.torch)
    key = attention_key(work, CPU)
    before = TunedAttention(AttentionKind.flex, "measured", key)
    asked: list[str] = []

    def earlier(wanted: str) -> TunedAttention | None:
        asked.append(wanted)
        return before

    found = tune_attention(MODEL, work, CPU, earlier=earlier)
    assert asked == [key] and found == replace(before, source="as in the run's earlier start")
    assert TunedAttention.from_dict(json.loads(json.dumps(before.to_dict()))) == replace(before, outcomes={})


@pytest.mark.parametrize(
    "model",
    [MODEL, replace(MODEL, window=20, position=Position.rope), replace(MODEL, num_kv_heads=8)],
    ids=["alibi", "window", "own keys"],
)
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("documents", [False, True])
def test_trials_use_the_models_mask_slopes_and_positions(model: ModelConfig, context: int, documents: bool) -> None:
    """Catches a trial whose mask, slopes or positions differ from those of the model's attention: every kind would be
    found wrong, or a wrong one correct."""
    work = work_of(model, context=context, documents=documents, bf16=False, impl=Implementation.torch)
    places = None if context == 1 else context_positions(96, 0, 2, CPU)
    choice = measure(model, work, CPU, (AttentionKind.sdpa,), places_s=places, rounds=1)
    assert choice.outcomes is not None and (choice.outcomes["sdpa"].error or 9.0) < 2.0
    problem, info = random_problem(model, work, CPU, places)
    assert problem.q_bnsd.shape == (2, 4, 96 // context, 16) and problem.k_bmtd.shape[1] == model.kv_heads // 2
    rest = (problem.slopes_n, problem.places_s, problem.starts_bs)
    assert documents == (info.document_starts is not None)
    if documents:
        whole = plain_attention(problem.q_bnsd, problem.k_bmtd, problem.v_bmtd, rest[0], rest[1], None)
        packed = plain_attention(problem.q_bnsd, problem.k_bmtd, problem.v_bmtd, *rest)
        assert not torch.allclose(whole, packed, atol=1e-2)


def test_a_requested_kind_is_used_without_measurement() -> None:
    """Catches a requested kind that is silently replaced, and measurements for a CPU."""
    asked = replace(MODEL, attention=AttentionKind.cudnn)
    work = work_of(MODEL, impl=Implementation.torch)
    with pytest.raises(ConfigError, match=r"model\.attention = cudnn does not run on cpu.*model\.attention=auto"):
        tune_attention(asked, work, CPU)
    kept = tune_attention(replace(MODEL, attention=AttentionKind.augmented), work, CPU)
    assert kept.kind is AttentionKind.augmented and kept.outcomes is not None
    with pytest.raises(ConfigError, match=r"auto finds no usable.*flex: RuntimeError: there is no kernel"):
        measure(MODEL, work, CPU, (AttentionKind.flex,))
    for model in (MODEL, asked):
        untried = tune_attention(model, replace(work, cuda=False), CPU)
        assert (
            untried == TunedAttention(model.attention, "nothing is measured")
            and not cache_file(FOLDER, "").parent.exists()
        )


@pytest.mark.parametrize(("deterministic", "taken"), [(True, "augmented"), (None, "augmented"), (False, "sdpa")])
def test_nondeterministic_kinds_are_chosen_only_without_determinism(
    deterministic: bool | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slower deterministic kind with train.deterministic=false, and a nondeterministic one otherwise: the
    default asks for determinism. The times are made up, as a GPU's."""
    found = {
        "sdpa": TuningResult(repeats=False, time_ms=1.0, kept_bytes=100),
        "augmented": TuningResult(repeats=True, time_ms=2.0, kept_bytes=100),
    }
    monkeypatch.setattr(attention_trials, "compare", lambda ways, trial, rounds: found)
    work = work_of(MODEL, deterministic=deterministic)
    assert measure(MODEL, work, CPU, (AttentionKind.sdpa, AttentionKind.augmented)).kind.value == taken


def test_a_kind_that_exceeds_planned_memory_is_not_chosen() -> None:
    """Catches auto choosing the fastest kind although it does not fit: auto's memory is planned with sdpa's."""
    found = {
        "sdpa": TuningResult(repeats=True, time_ms=3.0, kept_bytes=100),
        "augmented": TuningResult(repeats=True, time_ms=2.0, kept_bytes=450),
        "fused_softmax": TuningResult(repeats=True, time_ms=1.0, kept_bytes=2000),
        "flex": TuningResult(reason="too old"),
    }
    judged = within_memory_plan(found, inputs=300)
    assert "by which memory is planned" in judged["fused_softmax"].reason and fastest(judged) == "augmented"
    assert {name: judged[name] for name in ("sdpa", "augmented", "flex")} == {
        name: found[name] for name in ("sdpa", "augmented", "flex")
    }
    unknown = {name: replace(one, kept_bytes=None) for name, one in found.items()}
    assert within_memory_plan(unknown, inputs=300) == unknown
