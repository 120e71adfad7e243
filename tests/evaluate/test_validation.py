"""When and how a run validates, with a real bigram model behind the engine's interface."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megads.batch import BatchInfo, MicroBatch
from megads.engine.interface import EvaluationResult
from megads.errors import DataError
from megads.evaluate.config import EvaluationConfig
from megads.evaluate.validation import ValidationHook, perplexity, position_losses
from megads.parallel.grid import single_rank_grid
from megads.runtime.distributed import open_control_plane
from megads.runtime.heartbeat import Heartbeat
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import MetricsWriter, read_json_lines
from megads.runtime.run_dir import METRICS_FILE
from tests.distributed import run_ranks


class BigramEngine:
    """Predicts the next token from a table of logits; implements only the part of an engine that validation calls."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.grid = replace(single_rank_grid(), control=open_control_plane())
        self.logits_vv = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self.logits_vv = self.logits_vv / 2
        yield
        self.logits_vv = self.logits_vv * 2

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        total, tokens = 0.0, 0
        for batch in micro_batches:
            assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
            losses = F.cross_entropy(self.logits_vv[batch.tokens_bs].transpose(1, 2), batch.labels_bs, reduction="none")
            total += float((losses * batch.loss_mask_bs).sum())
            tokens += int(batch.loss_mask_bs.sum())
        return EvaluationResult(total, tokens)


def micro_batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for index, size in enumerate((3, 3, 1)):
        tokens = torch.randint(8, (2, size, 5), generator=generator)
        mask = (torch.rand(size, 5, generator=generator) < 0.2 + 0.3 * index).float()
        made.append(MicroBatch(BatchInfo(torch.arange(size)), tokens[0], tokens[1], mask))
    return made


def passes() -> Iterator[list[MicroBatch]]:
    first, second, rest = micro_batches()
    yield [first, second]
    yield [rest]


def info(step: int) -> StepInfo:
    return StepInfo(
        step=step, samples=8 * step, tokens=40 * step, loss=2.0, grad_norm=1.0, lr=1e-3, global_batch_size=8, seq_len=5,
        step_time_s=0.1, data_time_s=0.0, skipped=False, culprit="", batch_hash="",
    )  # fmt: skip


def hook(run_dir: Path, every_steps: int = 0, at_end: bool = True, total_steps: int = 5) -> ValidationHook:
    config, metrics = EvaluationConfig(every_steps=every_steps, at_end=at_end), MetricsWriter(run_dir, enabled=True)
    return ValidationHook(BigramEngine(), passes, "main", lambda: 2.5, config, total_steps, metrics)  # type: ignore[arg-type]


def validated_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_json_lines(run_dir / METRICS_FILE) if "valid/main/loss" in line]


def test_loss_is_the_token_mean_of_the_whole_set(tmp_path: Path) -> None:
    """Catches a mean of batch means, and an incomplete last batch that is left out (N10)."""
    hook(tmp_path, total_steps=4).on_step(info(4))
    whole = BigramEngine().evaluate(micro_batches())
    [line] = read_json_lines(tmp_path / METRICS_FILE)
    assert line["valid/main/loss"] == pytest.approx(whole.loss_sum / whole.tokens, rel=1e-6)
    assert line["valid/main/ppl"] == pytest.approx(math.exp(whole.loss_sum / whole.tokens), rel=1e-6)
    assert {key: line[key] for key in ("step", "samples", "tokens")} == {"step": 4, "samples": 32, "tokens": 160}
    assert (line["valid/main/unigram_loss"], line["valid/main/tokens"]) == (2.5, whole.tokens)


def test_the_average_has_a_loss_of_its_own(tmp_path: Path) -> None:
    """Catches a loss of the current weights reported as that of their average, and an average loss that was not
    requested."""
    config, metrics = EvaluationConfig(average=True), MetricsWriter(tmp_path, enabled=True)
    engine: Any = BigramEngine()
    ValidationHook(engine, passes, "main", lambda: 2.5, config, 4, metrics).on_step(info(4))
    hook(tmp_path, total_steps=4).on_step(info(4))
    with_it, without = read_json_lines(tmp_path / METRICS_FILE)
    whole = BigramEngine()
    assert with_it["valid/main/loss"] == without["valid/main/loss"]
    whole.logits_vv /= 2
    found = whole.evaluate(micro_batches())
    assert with_it["valid/main/average_loss"] == pytest.approx(found.loss_sum / found.tokens, rel=1e-6)
    assert with_it.keys() - without.keys() == {"valid/main/average_loss"}


def test_heartbeats_say_which_batch_is_validated(tmp_path: Path) -> None:
    """Catches a long validation that looks like a hung step."""
    said: list[str] = []
    beats = Heartbeat()
    beats.enter = lambda phase, step=None: said.append(phase)  # type: ignore[method-assign]
    config, metrics = EvaluationConfig(), MetricsWriter(tmp_path, enabled=True)
    engine: Any = BigramEngine()
    ValidationHook(engine, passes, "main", lambda: 2.5, config, 5, metrics, 2, beats).on_step(info(5))
    assert said == ["validating, batch 1/2", "validating, batch 2/2"]


@pytest.mark.parametrize(
    ("every_steps", "at_end", "total_steps", "steps"),
    [(2, True, 5, [2, 4, 5]), (2, False, 5, [2, 4]), (0, True, 5, [5]), (2, True, 9, [2, 4])],
)
def test_when(every_steps: int, at_end: bool, total_steps: int, steps: list[int], tmp_path: Path) -> None:
    """Catches a validation at the wrong step, and an extra one when a run of 9 steps stops early to be resumed."""
    validation = hook(tmp_path, every_steps, at_end, total_steps)
    for step in range(1, 6):
        validation.on_step(info(step))
    assert validated_steps(tmp_path) == steps


def test_the_next_phase_validates_where_one_ends(tmp_path: Path) -> None:
    """Catches a step that is validated twice: by the phase that ends with it, and by the next one at its start."""
    validation = hook(tmp_path, every_steps=2)
    validation.on_step(replace(info(2), ends_phase=True))
    assert validated_steps(tmp_path) == []


@pytest.mark.distributed
def test_a_validation_that_a_kill_prevented_is_made_up_for(tmp_path: Path) -> None:
    """Catches a missing metrics line, one written twice, and ranks that disagree: only one reads the metrics."""
    assert run_ranks(_resume_at_steps, 2, tmp_path) == [[], []]
    assert validated_steps(tmp_path) == [2, 5]


def _resume_at_steps(run_dir: Path) -> list[str]:
    metrics = MetricsWriter(run_dir, enabled=dist.get_rank() == 0)
    config = EvaluationConfig(every_steps=2)
    validation = ValidationHook(BigramEngine(), passes, "main", lambda: 2.5, config, 5, metrics)  # type: ignore[arg-type]
    passes_made, faults = 0, []
    validate = validation.validate

    def counted() -> tuple[float, int]:
        nonlocal passes_made
        passes_made += 1
        return validate()

    validation.validate = counted  # type: ignore[method-assign]
    for step, wanted in ((0, 0), (2, 1), (2, 1), (3, 1), (5, 2), (5, 2)):
        metrics.write({"step": step, "loss": 1.0})
        validation.on_start(TrainState(step, 8 * step, 40 * step))
        if passes_made != wanted:
            faults.append(f"{passes_made} validations after a start at step {step}")
    return faults


def test_empty_set_is_refused(tmp_path: Path) -> None:
    """Catches a division by zero in place of an error message."""
    metrics = MetricsWriter(tmp_path, enabled=True)
    validation = ValidationHook(BigramEngine(), lambda: iter([]), "main", lambda: 2.5, EvaluationConfig(), 5, metrics)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="'main' has no token"):
        validation.validate()


def test_perplexity_of_a_huge_loss() -> None:
    """Catches an overflow at exp(1000) that crashes a diverged run."""
    assert perplexity(1000.0) == math.inf


def test_ranges_of_positions() -> None:
    """Catches a position that is in two ranges or in none, a range without tokens, and a mean of means."""
    sums_2p = torch.tensor([[1.0, 4.0, 6.0, 12.0, 5.0, 0.0], [1, 2, 1, 3, 5, 0]], dtype=torch.float64)
    assert position_losses(sums_2p) == {0: 1.0, 1: 2.0, 2: 18 / 4, 4: 1.0}
    assert position_losses(sums_2p[:, 5:]) == {}


def test_losses_by_position_are_written(tmp_path: Path) -> None:
    """Catches a validation loss that changes if losses by position are requested."""

    class Positions(BigramEngine):
        def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> torch.Tensor:
            whole = self.evaluate(micro_batches)
            sums_2p = torch.zeros(2, positions, dtype=torch.float64)
            sums_2p[0, 3], sums_2p[1, 3] = whole.loss_sum, whole.tokens
            return sums_2p

    metrics, engine = MetricsWriter(tmp_path, enabled=True), Positions()
    config = EvaluationConfig(by_position=True)
    hooked: Any = engine
    ValidationHook(hooked, passes, "main", lambda: 2.5, config, 4, metrics, seq_len=5).on_step(info(4))
    [line] = read_json_lines(tmp_path / METRICS_FILE)
    whole = engine.evaluate(micro_batches())
    assert line["valid/main/position_2"] == line["valid/main/loss"] == pytest.approx(whole.loss_sum / whole.tokens)
    assert [key for key in line if "position" in key] == ["valid/main/position_2"]
