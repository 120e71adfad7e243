"""The printed table of which rank holds what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.cli.main import run
from megads.cli.rank_table import layer_names, rank_text, spans
from megads.config import RootConfig
from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig

LAYOUT = ["model=demo", "model.vocab_size=8191", "parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "device=cpu"]


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]


def test_plan_prints_every_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a table that is not printed, or not for machines, and two forms that disagree."""
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *LAYOUT]) == 0
    assert "which rank holds what" not in capsys.readouterr().out
    assert run(["plan", *LAYOUT, "ranks=true", "cluster.ranks_per_node=4"]) == 0
    printed = rows(capsys.readouterr().out.partition("which rank holds what")[2])
    assert run(["plan", *LAYOUT, "ranks=true", "cluster.ranks_per_node=4", "json=true"]) == 0
    places = json.loads(capsys.readouterr().out)["places"]
    assert len(printed) == len(places) == 8
    for row, place in zip(printed, places, strict=True):
        assert [int(cell) for cell in row[:6]] == [place[key] for key in ("rank", "node", "tp", "cp", "pp", "dp")]
        assert row[-2] == f"{place['heads'][0]}-{place['heads'][1] - 1}"
        assert row[-1] == f"{place['vocabulary'][0]:,}-{place['vocabulary'][1] - 1:,}"
    assert places[-1]["vocabulary"] == [4096, 8191], "padding is no row of the vocabulary"


def test_many_ranks_share_rows() -> None:
    """Catches a table of thousands of lines, and ranks lost where they are folded."""
    config = RootConfig(
        model=ModelConfig(num_layers=8, num_heads=4, vocab_size=None), parallel=ParallelConfig(tp=4, pp=4, dp=64)
    )
    text = rank_text(config, 120)
    assert len(rows(text)) == 16 and "the tokenizer's" in text
    assert text.count("(64)") == 16 and text.count("0-63") == 16
    assert max(map(len, text.splitlines())) <= 120


def test_dry_run_shows_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a dry run that leaves the layout to be guessed, and a table of a single rank."""
    monkeypatch.chdir(tmp_path)
    command = ["train", "train.steps=1", "data.train=[{path: nowhere}]", "run.dry_run=true"]
    assert run([*command, "parallel.tp=2"]) == 0
    assert len(rows(capsys.readouterr().out.partition("which rank holds what")[2])) == 2
    assert run(command) == 0
    assert "which rank holds what" not in capsys.readouterr().out


def test_words() -> None:
    """Catches spans that swallow a gap, and blocks counted one by one."""
    assert spans([3, 0, 1, 2]) == "0-3"
    assert spans([5]) == "5"
    assert spans([0, 1, 4, 5, 9]) == "0-1, 4-5, 9"
    assert spans(range(0, 400, 48)) == "0, 48 .. 384 (9)"
    assert layer_names(("embedding", "blocks.0", "blocks.1")) == "embedding, blocks 0-1"
    assert layer_names(("blocks.7", "final_norm", "head")) == "block 7, final norm, head"
