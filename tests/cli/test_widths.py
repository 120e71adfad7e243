"""Help and tables fit the terminal: no line is wider, and no number is cut."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.table import Table

from megads.cli.main import VERBS, run
from megads.runtime.rich_console import VisibleConsole
from tests.small_run import hot_model, model_config, write_dataset, write_run

WIDTHS = [80, 200]


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_help_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches help of hundreds of columns, which a terminal breaks within words and without indentation."""
    monkeypatch.setenv("COLUMNS", str(width))
    for verb in VERBS:
        lines = lines_of(capsys, verb, "--help")
        assert max(map(len, lines)) <= width, verb
        assert any("Usage: megads" in line for line in lines)
    assert max(map(len, lines_of(capsys, "--help"))) <= width
    text = " ".join(lines_of(capsys, "tokenizer", "--help"))
    words = re.sub(r"\s+", " ", text)
    assert "extensions=[txt, text, md, markdown" in words and "vocab_size=8192 Vocabulary size" in words


def test_an_example_of_help_can_be_pasted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a long command broken without a backslash, and prose broken with one."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = lines_of(capsys, "generate", "--help")
    broken = [line for line in lines if line.endswith("\\")]
    assert broken and all(line.startswith("  megads generate ") for line in broken)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", ["bloom_176b", "llama3_8b"])
def test_a_plan_fits_the_terminal(
    model: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a table of 165 columns on a terminal of 80, and numbers that are cut to fit."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = lines_of(capsys, "plan", f"experiment={model}")
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    assert model != "bloom_176b" or ("15,928,829,952  3,982,551,552" in text and "44.7" in text)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_dry_run_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches rows of a dry run that a terminal breaks within words."""
    monkeypatch.setenv("COLUMNS", str(width))
    words = ("model.vocab_size=512", "data.train=nowhere", "parallel.pp=2", "train.steps=5", "run.dry_run=true")
    assert max(map(len, lines_of(capsys, "train", *words))) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_a_list_of_checkpoints_fits_80_columns_with_whole_numbers(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches samples and tokens cut to `5,0…` in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    run_dir = write_run(tmp_path / "run", write_dataset(tmp_path), hot_model(model_config()))
    lines = lines_of(capsys, "checkpoint", "list", f"run={run_dir}")
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)


def printed(width: int) -> list[str]:
    table = Table()
    for name in ("step", "a long header of words", "text", "b", "c"):
        table.add_column(name, justify="left" if name == "text" else "right")
    for number in (1, 1234567):
        table.add_row(
            str(number), "12,345,678,901", "some words that may be wrapped " * 3, "1.5", f"{number * 10**9:,}"
        )
    out = io.StringIO()
    VisibleConsole(file=out, width=width).print(table)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_numbers_of_a_wide_table_stay_whole(width: int) -> None:
    """Catches a number that is shortened or folded, and a part of a table without its first column."""
    lines = printed(width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    for number in ("12,345,678,901", "1,234,567,000,000,000", "1.5"):
        assert re.search(rf"(?<!\S){re.escape(number)}(?!\S)", text), number
    parts = sum("step" in line for line in lines)
    assert sum(bool(re.search(r"(?<![\d,])1234567(?![\d,])", line)) for line in lines) == parts
