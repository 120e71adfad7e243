"""Output of `megads why` for one step, worked out by hand; tests/cli/test_why.py has trained runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megads.config.root import RootConfig
from megads.data.sampling.runs import DocumentSpan, SampleOrigin
from megads.errors import ConfigError
from megads.parallel.config import GridCoordinate, ParallelConfig, place_of
from megads.parallel.context import context_positions
from megads.tools.inspect.why import Explanation, RankShare, ShownSample, TrainedStep, _ids, _share
from megads.tools.inspect.why_output import as_json, as_text

# Two documents in a sample of four tokens and the one before them; the second's first token has no loss.
FIRST = DocumentSpan("data/a", 7, 10, 1300, 0, np.array([5, 6]), np.array([False, True]))
SECOND = DocumentSpan("data/b", 0, 0, 3, 2, np.array([1, 2, 3]), np.array([False, True, True]))
LOSSES = np.array([np.nan, 2.0, 9.0, 4.0, 6.0], np.float32)


def explanation(**changes: Any) -> Explanation:
    """Returns step 3, of four samples in two micro-batches, of which the third is shown."""
    config = RootConfig(parallel=ParallelConfig(dp=2))
    config.train.seq_len = 4
    line = {"step": 3, "samples": 12, "global_batch_size": 4, "batch_hash": "0123", "loss": 4.5}
    trained = TrainedStep(line, config, SimpleNamespace(), data_recorded=True)  # type: ignore[arg-type]
    sample = ShownSample(SampleOrigin(10, (1, 0, 2500), (FIRST, SECOND)), 1, LOSSES)
    plain = Explanation(Path("runs/mine"), trained, None, (sample,), 4, None, (), {})
    return replace(plain, **changes)


def weights(step: int) -> Any:
    return SimpleNamespace(folder=Path("runs/mine/checkpoints/step"), state={"step": step})


def test_the_heading() -> None:
    """Catches a range of samples off by one, weights of another step shown as the step's, a mean over tokens that do
    not count in the loss, and a skipped step shown as trained."""
    found = explanation(weights=weights(2), notes=("a note",))
    lines = as_text(found, 100, tokens=False).splitlines()
    assert lines[:4] == [
        "step 3 of runs/mine: samples 8 to 11 of the run, 4 x 4 tokens",
        "batch_hash 0123: recomputed, as in metrics.jsonl; its data as recorded",
        "losses by the weights after step 2 (those the step started from): mean 4.000000 over 3 tokens shown; "
        "metrics.jsonl has 4.500000 for the step",
        "a note",
    ]
    assert lines[5] == "sample 10 (micro-batch 1; dataset 1, epoch 0, row 2,500), mean loss 4.0000"
    assert lines[-1] == "3 more samples: count=<number> shows more, first=<number> others, json=true all"
    other = replace(found, weights=weights(3), num_samples=1)
    other = replace(
        other, trained=replace(other.trained, data_recorded=False, line=other.trained.line | {"skipped": 1})
    )
    lines = as_text(other, 100, tokens=False).splitlines()
    assert lines[1].endswith("its data not recorded; the step was skipped, no weight changed")
    assert "after step 3 (not those of step 2, which the step had)" in lines[2] and "more samples" not in lines[-1]
    without = [replace(sample, losses=None) for sample in found.samples]
    lines = as_text(replace(found, weights=None, notes=(), samples=tuple(without)), 100, tokens=False).splitlines()
    assert len(lines[: lines.index("")]) == 2 and lines[3].endswith("row 2,500)")


def test_the_share_of_a_rank() -> None:
    """Catches positions of another rank, and wrong coordinates of the rank."""
    share = RankShare(1, GridCoordinate(dp=1), (range(1), range(3, 4)))
    line = as_text(explanation(share=share), 100, tokens=False).splitlines()[2]
    assert line == "rank 1 (tp=0 cp=0 pp=0 dp=1): 4 samples, positions 0-0, 3-3 of each"


def test_the_positions_and_samples_of_a_rank() -> None:
    """Catches chunks and micro-batches other than those that the rank trained on, and a rank that is not there."""
    parallel = ParallelConfig(tp=2, cp=2, dp=2)
    config = RootConfig(parallel=parallel)
    config.train.seq_len, config.train.micro_batch_size = 24, 2
    trained = TrainedStep({"samples": 24, "global_batch_size": 16}, config, SimpleNamespace(), True)  # type: ignore[arg-type]
    for rank in range(8):
        share, place = _share(rank, config), place_of(rank, parallel)
        assert (share.rank, share.place) == (rank, place)
        held = [position for chunk in share.chunks for position in chunk]
        assert held == context_positions(24, place.cp, 2, torch.device("cpu")).tolist()
        expected = [[8, 9], [12, 13], [16, 17], [20, 21]] if place.dp == 0 else [[10, 11], [14, 15], [18, 19], [22, 23]]
        assert _ids(trained, share).tolist() == expected
    assert _ids(trained, None).tolist() == [[first + n for n in range(4)] for first in range(8, 24, 4)]
    assert _share(1, RootConfig(parallel=ParallelConfig(tp=2))).chunks == (range(RootConfig().train.seq_len),)
    with pytest.raises(ConfigError, match=r"rank = 8: the step was trained by 8 ranks, .*; the last is 7"):
        _share(8, config)


def test_a_row_for_each_document() -> None:
    """Catches positions or tokens off by one, the loss of tokens that do not count, text truncated without a mark, and
    control characters that reach the terminal."""
    lines = as_text(explanation(), 2, tokens=False).splitlines()
    rows = [line.split() for line in lines if line.split()[:1] in (["a"], ["b"])]
    assert rows == [
        ["a", "7", "10-11", "of", "1,300", "0-1", "2.000", "5", "..."],
        ["b", "0", "0-2", "of", "3", "2-4", "5.000", "1", "..."],
    ]
    decoder = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x\n\x1b" if 5 in ids else "")
    text = as_text(explanation(tokenizers={"data/a": decoder}, num_samples=1), 3, tokens=True)
    assert "x\\n\\x1b" in text and "x\\n\\x1b ..." not in text and "\x1b" not in text
    tokens = [line.split() for line in text.partition("offset")[2].splitlines() if line.strip()[:1].isdigit()]
    assert tokens == [
        ["0", "7", "10", "5", "-", "x\\n\\x1b"],
        ["1", "7", "11", "6", "2.0000"],
        ["2", "0", "0", "1", "-"],
        ["3", "0", "1", "2", "4.0000"],
        ["4", "0", "2", "3", "6.0000"],
    ]


def test_json() -> None:
    """Catches NaN, which is not JSON, a range that ends early, and values that differ between tables and JSON."""
    share = RankShare(1, GridCoordinate(dp=1), (range(4),))
    found = json.loads(as_json(explanation(weights=weights(2), share=share, notes=("a note",))))
    assert found["samples"] == [8, 12] and (found["step"], found["num_samples"]) == (3, 4)
    assert found["weights"] == {
        "checkpoint": "runs/mine/checkpoints/step", "after_step": 2, "mean_loss": 4.0, "tokens": 3
    }  # fmt: skip
    assert found["rank"] == {"rank": 1, "pp": 0, "dp": 1, "cp": 0, "tp": 0} and found["notes"] == ["a note"]
    [sample] = found["shown"]
    assert (sample["sample"], sample["micro_batch"], sample["key"]) == (10, 1, [1, 0, 2500])
    first, second = sample["documents"]
    assert first["losses"] == [None, 2.0] and second["losses"] == [9.0, 4.0, 6.0]
    assert second["loss_counts"] == [False, True, True] and second["tokens"] == [1, 2, 3] and second["text"] is None
    assert (first["dataset"], first["document"], first["offset"], first["document_tokens"]) == ("data/a", 7, 10, 1300)
    plain = explanation()
    plain = json.loads(as_json(replace(plain, samples=(replace(plain.samples[0], losses=None),))))
    assert plain["weights"] is None and plain["rank"] is None and plain["shown"][0]["documents"][0]["losses"] is None
