"""Tests the trial that selects the attention implementation, with real implementations that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megads.ops.attention import attention, document_block_mask, flex_attention
from megads.ops.dropout import DropoutMask
from megads.tools.autotune import attention_trials
from megads.tools.autotune.attention_trials import AttentionProblem, AttentionTrial, plain_attention, sampled_queries
from megads.tools.autotune.benchmark import TuningResult, compare, examine_candidate, fastest
from tests.ops.test_attention import inputs

SLOPES = torch.linspace(0.5, 0.01, 6)
STARTS = torch.stack([torch.arange(150) // 37 * 37, torch.arange(150) // 90 * 90])


def problem_of(dtype: torch.dtype = torch.float32, starts: Tensor | None = STARTS) -> AttentionProblem:
    return AttentionProblem(*inputs(150, 150, 16, dtype, heads=6, key_heads=2), SLOPES, None, starts)


def plainly(
    problem: AttentionProblem, **changes: Tensor | DropoutMask | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Plain torch attention on this problem, or on a slightly changed one."""
    other = replace(problem, **changes)
    return lambda q, k, v: plain_attention(q, k, v, other.slopes_n, other.places_s, other.starts_bs, other.mask)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_exact_implementations_are_timed(dtype: torch.dtype) -> None:
    """Catches an exact implementation left out, a wrong one selected, and one that cannot run and ends the trial."""
    problem = problem_of(dtype)
    mask = document_block_mask(150, 150, torch.device("cpu"), starts_bs=STARTS)
    outcomes = compare(
        {
            "kernel": lambda q, k, v: attention(q, k, v, SLOPES, None, STARTS),
            "flex": lambda q, k, v: flex_attention(q, k, v, mask, SLOPES),
            "of other heads": plainly(problem, slopes_n=SLOPES.flip(0)),
            "across documents": plainly(problem, starts_bs=None),
            "plain": plainly(problem),
        },
        AttentionTrial(problem),
        rounds=1,
    )
    timed = {name for name, found in outcomes.items() if found.time_ms is not None}
    assert timed == {"kernel", "plain"} and fastest(outcomes) in timed
    assert outcomes["plain"].error == 1.0 and outcomes["plain"].repeats
    assert outcomes["flex"].reason.startswith("NotImplementedError: FlexAttention does not support backward on CPU")
    for name in ("of other heads", "across documents"):
        assert "times that of plain torch" in outcomes[name].reason


@pytest.mark.parametrize("wrong", range(3))
def test_a_wrong_gradient_fails_the_trial(wrong: int) -> None:
    """Catches a trial that checks only the output, or only one gradient."""
    problem = problem_of()

    def attend(*tensors: Tensor) -> Tensor:
        scaled = [
            x * 1.01 - (0.01 * x).detach() if index == wrong else x for index, x in enumerate(tensors)
        ]  # the same value, another gradient
        return plainly(problem)(*scaled)

    assert "times that of plain torch" in examine_candidate("tried", attend, AttentionTrial(problem)).reason


@pytest.mark.usefixtures("kernels")
def test_a_wrong_dropout_mask_fails_the_trial() -> None:
    """Catches a trial that accepts the dropout mask of another sample, head or RNG key, or no dropout."""
    mask = DropoutMask(key=7, threshold=2**13, samples_b=torch.tensor([4, 9]), first_head=2)
    problem = replace(problem_of(), mask=mask)

    def of(mask: DropoutMask | None) -> TuningResult:
        return examine_candidate(
            "tried", lambda q, k, v: attention(q, k, v, SLOPES, None, STARTS, mask), AttentionTrial(problem)
        )

    assert not of(mask).reason
    wrong = [None, replace(mask, first_head=3), replace(mask, samples_b=torch.tensor([4, 8])), replace(mask, key=8)]
    assert all("times that of plain torch" in of(other).reason for other in wrong)


def test_deterministic_gradients_are_preferred() -> None:
    """Catches preferring nondeterministic gradients, with which a resume is not bit-exact, to deterministic ones."""
    problem = problem_of()
    generator = torch.Generator().manual_seed(0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = plainly(problem)(q, k, v)
        return out + torch.randn(out.shape, generator=generator) * 6e-8 * out.detach().abs()

    found = examine_candidate("tried", attend, AttentionTrial(problem))
    assert not found.reason and not found.repeats
    steady = TuningResult(error=1.0, repeats=True, time_ms=2.0)
    assert fastest({"a": replace(found, time_ms=1.0), "b": steady}) == "b"
    assert fastest({"a": replace(found, time_ms=1.0), "b": steady}, deterministic=False) == "a"
    assert fastest({"a": replace(found, time_ms=1.0)}) == "a"
    assert fastest({"a": TuningResult(reason="too old")}) is None


@pytest.mark.parametrize("name", ["early", "late"])
def test_a_trial_of_few_queries_finds_wrong_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trial of the first queries only, which misses wrong keys of later ones, and an exact implementation
    that is refused unless all queries are tried."""
    monkeypatch.setattr(attention_trials, "MOST_TRIED", 20)
    problem = problem_of(starts=torch.zeros(2, 150, dtype=torch.int64))
    assert sampled_queries(problem).tolist()[::19] == [0, 149]
    changed = torch.zeros(2, 150, dtype=torch.int64)
    changed[1, 20 : 40 if name == "early" else None] = 10
    assert not examine_candidate("tried", plainly(problem), AttentionTrial(problem)).reason
    assert examine_candidate("tried", plainly(problem, starts_bs=changed), AttentionTrial(problem)).reason


def test_a_trial_of_one_token_is_valid() -> None:
    """Catches a division by the error of gradients that consist of rounding errors only."""
    problem = AttentionProblem(*inputs(1, 1, 16, torch.bfloat16, heads=2), torch.tensor([0.5, 0.1]))
    assert not examine_candidate("tried", plainly(problem), AttentionTrial(problem)).reason
