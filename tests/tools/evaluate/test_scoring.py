"""Scoring of token rows on training engines against the unsharded model, and the count of tokens read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megads.batch import BatchInfo
from megads.errors import NumericalError
from megads.evaluate.generation import Sampling
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.parallel.config import ParallelConfig, ScheduleName
from megads.parallel.grid import Axis, build_grid
from megads.parallel.token_scores import argmax_tokens
from megads.tools.evaluate.scoring import (
    Batching,
    CachedContinuation,
    ModelScoringEngine,
    RescoredContinuation,
    ScoredRow,
    Scorer,
    TokenRow,
)
from megads.tools.verify.layout import build_engine
from megads.tools.verify.scenario import Scenario, hot_weights
from tests.distributed import run_ranks

SCENARIO = Scenario(
    # Two ranks do not divide this vocabulary evenly: one of them holds a padding row.
    model=ModelConfig(
        num_layers=4, hidden_size=32, num_heads=4, vocab_size=37, max_seq_len=16, position=Position.learned
    ),
    micro_batch_size=2,
    seq_len=16,
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
    "context": {"cp": 2},
    "interleaved": {"pp": 2, "schedule": ScheduleName.interleaved, "virtual_stages": 2},
    "a V": {"pp": 2, "schedule": ScheduleName.dualpipe_v},
    "ZeRO-3": {"dp": 2, "zero_stage": 3},
    "ZeRO-2": {"dp": 2, "zero_stage": 2},
}


def rows(lengths: tuple[int, ...] = (17, 3, 9, 2, 17, 5, 12)) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(37, (length,), generator=generator).tolist() for length in lengths]
    return [TokenRow(ids, 1 + number % (len(ids) - 1)) for number, ids in enumerate(made)]


def model() -> GPT:
    return GPT(SCENARIO.model, SCENARIO.seed, hot_weights(SCENARIO.seed)).eval()


def one_by_one() -> list[ScoredRow]:
    """The unsharded model on each row alone."""
    return [Scorer(ModelScoringEngine(model()), SCENARIO.model, Batching(1, 16)).score([row])[0] for row in rows()]


def score_in(layouts: dict[str, dict[str, Any]]) -> dict[str, list[ScoredRow]]:
    """Scores the rows in each layout; returns scores on the first rank only."""
    found = {}
    for name, sizes in layouts.items():
        parallel = ParallelConfig(**{"zero_stage": 1, "bucket_elements": 4096, **sizes})
        engine = build_engine(SCENARIO, parallel, hot_weights(SCENARIO.seed))
        scorer = Scorer(engine, SCENARIO.model, Batching(2, 16, lengths=(8, 16)), engine.grid)
        with scorer.served() as asks:
            if asks:
                found[name] = scorer.score(rows())
                # Twice, to catch state left over from the first pass.
                assert scorer.score(rows()) == found[name]
                # Alone, although the other ranks are in the world, too.
                alone, counter = scorer.counting()
                alone.score(rows())
                assert counter.tokens > 0
        del engine
    return found


@pytest.mark.distributed
def test_engines_that_train_score_as_the_unsharded_model() -> None:
    """Catches scores of only one chunk, stage or vocabulary shard, rows of another rank, and a lost mask."""
    first, second = run_ranks(score_in, 2, LAYOUTS)
    assert second == {} and set(first) == set(LAYOUTS)
    for name, scores in first.items():
        for ours, wanted in zip(scores, one_by_one(), strict=True):
            assert ours.log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-4), name
            assert ours.likeliest == wanted.likeliest, name


def test_batches_change_nothing() -> None:
    """Catches scored padding, rows in the wrong order, and labels that are off by one."""
    for batching in (Batching(3, 16), Batching(2, 16, unit=4), Batching(1, 16, lengths=(4, 8, 16))):
        found = Scorer(ModelScoringEngine(model()), SCENARIO.model, batching).score(rows())
        for ours, wanted in zip(found, one_by_one(), strict=True):
            assert ours.log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-5)
            assert ours.likeliest == wanted.likeliest


@pytest.mark.parametrize("kind", [RopeScaling.longrope, RopeScaling.dynamic])
def test_rope_scaling_by_length_takes_each_rows_own_length(kind: RopeScaling) -> None:
    """Catches rows that are rotated for the length of their batch or of its padding."""
    pairs = [1.5, 2.0, 3.0, 4.0] if kind is RopeScaling.longrope else []
    scaling = RopeScalingConfig(
        kind, factor=4.0, original_max_seq_len=8, short_factor=[1.0 for _ in pairs], long_factor=pairs
    )
    config = replace(SCENARIO.model, position=Position.rope, rope_scaling=scaling, rope_theta=50.0)
    scaled = GPT(config, SCENARIO.seed, hot_weights(SCENARIO.seed)).eval()
    found = Scorer(ModelScoringEngine(scaled), config, Batching(3, 16, lengths=(8, 16))).score(rows())
    for row, ours in zip(rows(), found, strict=True):
        tokens_bs = torch.tensor([row.ids])
        with torch.no_grad():
            scores_sv = scaled(tokens_bs[:, :-1], BatchInfo(torch.arange(1)))[0].log_softmax(-1)
        wanted_s = scores_sv.gather(-1, tokens_bs[0, 1:, None])[row.places]
        assert ours.log_likelihood == pytest.approx(float(wanted_s.sum()), abs=1e-4)


def test_damaged_weights_are_told() -> None:
    """Catches NaN weights that are not reported as an error."""
    broken = model()
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(float("nan"))
    with pytest.raises(NumericalError, match="computes NaN"):
        Scorer(ModelScoringEngine(broken), SCENARIO.model, Batching(2, 16)).score(rows())


def test_continuations_agree() -> None:
    """Catches a stale KV cache, and a row that continues with the cache of another one that ended."""
    prompts = [row.ids[:5] for row in rows((7, 9, 8))]
    scorer = Scorer(ModelScoringEngine(model()), SCENARIO.model, Batching(2, 16))
    greedy = Sampling(temperature=0.0)
    said = []
    for continuation in (
        CachedContinuation(scorer.engine.model, greedy, range(3)),
        RescoredContinuation(scorer, greedy),
    ):  # type: ignore[attr-defined]
        continuation.start(3)
        tokens = [continuation.append(prompts)]
        continuation.keep([0, 2])
        for _ in range(3):
            last = tokens[-1] if len(tokens[-1]) == 2 else [tokens[-1][0], tokens[-1][2]]
            tokens.append(continuation.append([[token] for token in last]))
        said.append(tokens)
    assert said[0] == said[1]


@pytest.mark.parametrize("lengths", [(), (8, 16)])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_counter_counts_what_is_read(lengths: tuple[int, ...], dp: int) -> None:
    """Catches padding that is not counted, so that an evaluation takes longer than planned."""
    read: list[int] = []

    class Watched(ModelScoringEngine):
        def score(self, micro_batches: Any, num_rows: int) -> Any:
            read.extend(batch.tokens_bs.numel() for batch in micro_batches)
            return super().score(micro_batches, num_rows)

    scorer = Scorer(Watched(model()), SCENARIO.model, Batching(2, 16, lengths=lengths))
    # As on one of several ranks, each with the same number of rows.
    scorer._dp = dp
    alone, counter = scorer.counting()
    alone.score(rows())
    assert counter.tokens % dp == 0
    if dp == 1:
        scorer.score(rows())
        # A single process does not pad its last pass.
        assert 0 <= counter.tokens - sum(read) < 2 * 16 * (2 if lengths else 1)


def likeliest_on_ranks(logits: torch.Tensor) -> list[int]:
    grid = build_grid(ParallelConfig(tp=2), dist.get_rank(), dist.get_world_size())
    share = logits.shape[-1] // 2
    own = logits[..., grid.tp.rank * share : (grid.tp.rank + 1) * share].contiguous()
    return argmax_tokens(own, 3, grid.tp)[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.distributed
def test_the_first_of_equally_likely_tokens_counts() -> None:
    """Catches padding chosen as a token, and ranks that each return a different token."""
    # Two rows of the vocabulary per rank; the last row is padding.
    logits = torch.tensor([[[1.0, 2.0, 2.0, 9.0], [0.0, 0.0, 3.0, 9.0], [5.0, 5.0, 5.0, 9.0]]])
    assert run_ranks(likeliest_on_ranks, 2, logits) == [[1, 2, 0]] * 2
    assert argmax_tokens(logits, 3, Axis(0, (0,), None))[0].tolist() == [1, 2, 0]
