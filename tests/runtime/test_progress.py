"""Tests the progress line of a command, on real pseudo-terminals and without a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from megads.runtime.progress import Progress
from tests.monitor.screen import REPOSITORY, ProgramOnTerminal

PROGRAM = """
import sys, time
from megads.runtime import progress
from megads.runtime.terminal_text import escape_terminal_output
escape_terminal_output(progress.cleared_line)
progress.enter("planning")
time.sleep(0.6)
with progress.Progress("a phase that is too short to be seen"):
    pass
try:
    with progress.Progress("tokenizing", 1_000_000) as shown:
        shown.update(500_000, "5 \x1b[2J tokens")
        time.sleep(0.6)
        print("a line of output")
        time.sleep(0.6)
        raise KeyboardInterrupt
finally:
    progress.leave()
    print("interrupted", file=sys.stderr)
    sys.exit(3)
"""
PLAIN = """
import math, time
from megads.runtime import progress
progress.SAID_AFTER_S, progress.SAID_AGAIN_S = 0.2, 0.4
progress.enter("planning")
with progress.Progress("a short phase"):
    pass
with progress.Progress("tokenizing", 4_000_000) as shown:
    shown.update(1_000_000, "5 \x1b[2J tokens")
    said, end_s = set(), time.monotonic() + 60
    while len(said) < 2 and time.monotonic() < end_s:
        said |= {shown.say_at_s} if shown.said else set()
        time.sleep(0.01)
    # However slow the machine, a third line is not due.
    shown.say_at_s = math.inf
    time.sleep(0.1)
progress.leave()
"""
PHASES = """
import sys, time
from megads.runtime import progress
for _ in range(2):
    with progress.Progress("tokenizing"):
        time.sleep(0.6)
open(sys.argv[1], "w").close()
"""


def test_a_phase_is_shown_and_leaves_nothing_behind() -> None:
    """Catches a progress line that is not erased, a short phase that flickers, output or a message appended to a
    partial line, and text from a file that controls the terminal."""
    program = ProgramOnTerminal(("-c", PROGRAM), 80, 24)
    assert program.read_to_end() == 3
    assert "planning" in program.text and "tokenizing: 50% of 1.0 MB, " in program.text
    assert " left, 5 \\x1b[2J tokens" in program.text and "too short" not in program.text
    assert program.screen.everything == ["a line of output", "interrupted"] and program.screen.clean


def test_a_progress_line_fits_a_narrow_terminal() -> None:
    """Catches a line that wraps, of which only the last row is erased."""
    program = ProgramOnTerminal(("-c", PROGRAM), 20, 24)
    assert program.read_to_end() == 3
    assert "tokenizing: 50% of " in program.text
    assert program.screen.everything == ["a line of output", "interrupted"] and program.screen.clean


def test_a_stalled_terminal_holds_up_no_phase(tmp_path: Path) -> None:
    """Catches Ctrl-S that blocks the work because its progress cannot be drawn."""
    program = ProgramOnTerminal(("-c", PHASES, str(tmp_path / "done")), 80, 24)
    program.read_until(lambda: "tokenizing" in program.text)
    termios.tcflow(program.master, termios.TCOOFF)
    program.process.wait(timeout=60)
    assert (tmp_path / "done").exists() and program.process.returncode == 0
    program.close()


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"CI": "true"}, {}])
def test_progress_is_plain_lines_without_a_terminal(variables: dict[str, str]) -> None:
    """Catches control characters in a log file, in a CI job with a terminal or on a dumb terminal, a line for a phase
    that ended at once, and a phase that is reported too often."""
    if variables:
        program = ProgramOnTerminal(("-c", PLAIN), 80, 24, **variables)
        assert program.read_to_end() == 0
        text = program.text.replace("\r\n", "\n")
    else:
        command = [sys.executable, "-c", PLAIN]
        text = subprocess.run(command, cwd=REPOSITORY, stderr=subprocess.PIPE, check=True).stderr.decode()
    said, again, *more = text.splitlines()
    assert said == "tokenizing, 4.0 MB" and more == []
    assert again.startswith("tokenizing: 25% of 4.0 MB, ") and again.endswith(" left, 5 \\x1b[2J tokens")
    assert "\x1b" not in text and "\r" not in text


def test_progress_goes_where_the_log_is() -> None:
    """Catches messages on standard error where the command's log is on standard output, and lines although quiet is
    set."""
    for quiet, said in ((False, 2), (True, 0)):
        setup = f"progress.configure(quiet={quiet}, plain_on_stdout=True)"
        program = PLAIN.replace("progress.enter", f"{setup}\nprogress.enter", 1).replace("60", "2" if quiet else "60")
        done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, check=True)
        assert (done.stdout.count(b"tokenizing"), done.stdout.count(b"\n"), done.stderr) == (said, said, b"")


def test_ctrl_c_during_an_exec_returns_the_exit_code(tmp_path: Path) -> None:
    """Catches a `python -m` that dies of SIGINT instead of returning its exit code, if the interrupt hit an exec()."""
    program = """
from megads.cli import main
def run(_):
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return 130
main.run = run
main.main()
"""
    (tmp_path / "program.py").write_text(program)
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path, env=variables, check=False)
    assert done.returncode == 130


@pytest.mark.slow
def test_ctrl_c_during_planning_leaves_a_clean_line(tmp_path: Path) -> None:
    """Catches a traceback, and a progress line left before the message or below it."""
    (tmp_path / "text.txt").write_text("a few words of text " * 5000)
    arguments = ("-m", "megads.cli.main", "train", "data.raw=text.txt", "train.steps=2")
    program = ProgramOnTerminal(arguments, 80, 24, tmp_path, PYTHONPATH=str(REPOSITORY))
    program.read_until(lambda: "planning the run" in program.text)
    program.type("\x03")
    assert program.read_to_end() == 130
    assert [line.replace("^C", "") for line in program.screen.everything] == ["megads train: interrupted"]
    assert program.screen.clean


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_on_a_terminal_shows_its_phases(tmp_path: Path) -> None:
    """Catches a phase that is not shown or not erased, lines delayed until the panel appears, and printed escape
    codes."""
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(100_000)))
    arguments = ("-m", "megads.cli.main", "train", "data.raw=text.txt", "train.steps=2", "cluster.peak_tflops=1")
    program = ProgramOnTerminal(arguments, 100, 40, tmp_path, PYTHONPATH=str(REPOSITORY))
    assert program.read_to_end() == 0, program.text
    for phase in (
        "reading the config",
        "planning the run",
        "training the tokenizer",
        "tokenizing",
        "validating, batch ",
    ):
        assert phase in program.text, phase
    begin, panel = program.text.index("data: making "), program.text.index("╭")
    assert begin < program.text.index("training the tokenizer") < panel and "data: made 2" in program.text[:panel]
    shown = [line for line in program.screen.everything if "│" not in line]
    left = ("planning", "training", "tokenizing", "checking", "starting", "validating", "saving", "reading")
    assert not [line for line in shown if line.startswith(left)], shown
    assert "\\x1b" not in program.text and program.screen.clean


def test_a_phase_shows_share_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a division by zero in an empty phase, a share of an unknown size, and a wrong rate or remaining time."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    empty, piped, whole = Progress("a"), Progress("b"), Progress("c", 8_000_000)
    whole.update(0)
    assert [str(empty), str(whole), whole.title] == ["a", "c", "c, 8.0 MB"]
    monkeypatch.setattr(time, "monotonic", lambda: now + 2)
    piped.update(3_000_000, "7 tokens")
    whole.update(2_000_000)
    assert [str(empty), str(piped)] == ["a: 2s", "b: 3.0 MB, 1.5 MB/s, 7 tokens"]
    assert str(whole) == "c: 25% of 8.0 MB, 1.0 MB/s, 6s left"
    whole.update(8_000_000)
    assert str(whole) == "c: 2s"
