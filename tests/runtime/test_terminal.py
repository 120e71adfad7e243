"""Escaping of hostile text at every output to a terminal: streams, console lines, panel and tables."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from megads.monitor.console import Console
from megads.runtime.metrics import EventWriter
from megads.runtime.rich_console import VisibleConsole
from megads.runtime.terminal_text import visible
from megads.tools.live_console import PanelState, RunProgress, TerminalTraits, panel_lines
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer

HOSTILE = "a\x1b[2Jb\x07\x9b8mc\rd\u202ee\u2066f\x7f\ttab"
HARMLESS = r"a\x1b[2Jb\x07\x9b8mc\x0dd\u202ee\u2066f\x7f"


def steers(character: str) -> bool:
    """Whether a character is a control, by Unicode's tables."""
    steering = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
    bidi = unicodedata.bidirectional(character) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return (steering and character not in "\n\t") or bidi or character in "\u200e\u200f\u061c"


@given(st.text(st.characters()))
def test_control_characters_are_escaped_and_letters_are_not(text: str) -> None:
    """Catches a control character that is not escaped, and letters of any script that are."""
    assert not any(map(steers, visible(text)))
    assert visible("".join(c for c in text if not steers(c))) == "".join(c for c in text if not steers(c))


def test_every_control_character_is_escaped() -> None:
    """Catches a range that ends one too early."""
    everything = [chr(code) for code in range(sys.maxunicode + 1)]
    assert [c for c in everything if steers(c) != (visible(c) != c)] == []


def test_console_lines_are_escaped(tmp_path: Path) -> None:
    """Catches an event of a rank, or a line of the launcher, that clears the screen."""
    out = io.StringIO()
    with Console(tmp_path, out) as console:
        EventWriter(tmp_path).write("attention", message=HOSTILE)
        console.poll()
        console.print_line(HOSTILE)
    assert out.getvalue().count(HARMLESS) == 2 and not any(map(steers, out.getvalue()))


def test_the_panel_is_escaped() -> None:
    """Catches a run's name, or a layout in a record, that changes the window title."""
    progress = RunProgress(10)
    progress.add_event({"event": "start", "step": 0, "total_steps": 10, "layout": "tp1\x1b]0;x\x07"})
    for columns in (100, 40, 20):
        lines = panel_lines(progress, PanelState("run\x1b[2J", 0.0, 1.0, 1.0), columns, 30, TerminalTraits(color=False))
        assert "run\\x1b[2J" in "".join(lines) or columns == 20
        assert not any(map(steers, "".join(lines)))


def test_cells_are_escaped_and_tables_keep_their_colors() -> None:
    """Catches a cell that controls the terminal, and escaping of rich's own codes."""
    out = io.StringIO()
    console = VisibleConsole(file=out, force_terminal=True, color_system="standard", width=100, highlight=False)
    table = Table("title", style="red")
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE)
    assert out.getvalue().count("\\x1b[2J") == 2 and "\x1b[31m" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue() and "\u202e" not in out.getvalue()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": HOSTILE}) + "\n")
    tokenizer = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "a.jsonl")], output=tokenizer, vocab_size=257))
    preprocess(
        PreprocessConfig(input=[str(tmp_path / "a.jsonl")], tokenizer=tokenizer, output=str(tmp_path / "corpus"))
    )
    return tmp_path


MEGADS = ("-m", "megads.cli.main")
STYLED = """
from megads.runtime.terminal_text import escape_terminal_output
from megads.runtime.rich_console import VisibleConsole
escape_terminal_output()
VisibleConsole(highlight=False).print("styled\x1b[2J", style="red")
print("plain\x1b[2J")
"""


def on_terminal(folder: Path, *arguments: str) -> str:
    """Output of a Python program to a terminal, both streams."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    # CI turns off the progress line, which controls the terminal on purpose (test_progress).
    environment |= {"TERM": "xterm-256color", "CI": "true"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the last holder has closed it
        pass
    process.wait(timeout=60)
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def test_results_are_escaped_on_a_terminal_and_not_in_a_pipe(corpus: Path) -> None:
    """Catches a document that controls the terminal, and one that is escaped in a pipe."""
    arguments = ("dataset", "inspect", "input=corpus")
    shown = on_terminal(corpus, *MEGADS, *arguments)
    assert HARMLESS in shown and not any(map(steers, shown))
    command = [sys.executable, *MEGADS, *arguments]
    assert HOSTILE in subprocess.run(command, cwd=corpus, stdout=subprocess.PIPE, check=True).stdout.decode()


def test_richs_own_colors_are_kept(tmp_path: Path) -> None:
    """Catches streams that escape rich's own codes."""
    assert on_terminal(tmp_path, "-c", STYLED).splitlines() == ["\x1b[31mstyled\\x1b[2J\x1b[0m", "plain\\x1b[2J"]


def test_messages_on_a_terminal_are_escaped(tmp_path: Path) -> None:
    """Catches a value that is not escaped in a message, whichever code writes the message."""
    for arguments in ((f"tr{HOSTILE}",), ("dataset", "stats", "input='no\x1b[2J'"), ("train", "experiment='x\x1b[2J'")):
        shown = on_terminal(tmp_path, *MEGADS, *arguments)
        assert "\\x1b[2J" in shown and not any(map(steers, shown)), shown


def test_messages_in_a_pipe_are_escaped(tmp_path: Path) -> None:
    """Catches unescaped messages in a job's log, which would be shown on its reader's terminal."""
    done = subprocess.run([sys.executable, *MEGADS, f"tr{HOSTILE}"], cwd=tmp_path, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2 and HARMLESS in done.stderr.decode() and not any(map(steers, done.stderr.decode()))
