"""Tab completion in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megads.cli.main import COMMANDS, SHELLS, VERBS, complete, script
from tests.cli.terminal import Terminal

REPOSITORY = Path(__file__).parents[2]
# The text before the cursor, and what the tab key must complete it to.
TYPED = [
    ("megads tra", "megads train"),
    ("megads train expe", "megads train experiment="),
    ("megads train model=bloom_17", "megads train model=bloom_176b"),
    ("megads train train.see", "megads train train.seed="),
    ("megads train train.precision=b", "megads train train.precision=bf16"),
    ("megads train model=tiny +parallel.d", "megads train model=tiny +parallel.dp="),
    ("megads train data.valid=no", "megads train data.valid=notes.txt"),
    ("megads completion fi", "megads completion fish"),
]


def offered(*words: str) -> list[str]:
    return [text for text, _ in complete(words)]


def environment(folder: Path) -> dict[str, str]:
    """A PATH whose megads is this checkout's, and a file to complete."""
    command = folder / "bin" / "megads"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megads.cli.main "$@"\n')
    command.chmod(0o755)
    (folder / "notes.txt").touch()
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_in_an_interactive_shell(tmp_path: Path, shell: str) -> None:
    """Catches a script that a shell cannot parse, words split at `=`, and a space after `key=`."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    with Terminal(shell, environment(tmp_path), tmp_path) as terminal:
        assert [terminal.after_tab(typed) for typed, _ in TYPED] == [expected for _, expected in TYPED]


def test_fish_completes_like_bash(tmp_path: Path) -> None:
    """Catches the same in fish, which lists its candidates without a terminal."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    asked = "; ".join(f"complete --do-complete '{typed}'; echo END" for typed, _ in TYPED)
    result = subprocess.run(
        ["fish", "--no-config", "-c", f"megads completion fish | source; {asked}"],
        env={**environment(tmp_path), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for (typed, expected), answer in zip(TYPED, result.stdout.split("END\n"), strict=False):
        words = [line.partition("\t")[0] for line in answer.splitlines()]
        whole = [f"{typed.rpartition(' ')[0]} {word}" for word in words]
        assert expected in whole, answer


def test_bash_lists_every_candidate(tmp_path: Path) -> None:
    """Catches candidates with the part before `=` if readline splits words at `=`, or without it if it does not."""
    ask = "COMP_LINE='megads train model=bl' COMP_POINT=21; _megads_complete megads; printf '%s\\n' \"${COMPREPLY[@]}\""
    found = environment(tmp_path)
    for breaks, prefix in ((" =:", ""), (" ", "model=")):
        result = subprocess.run(
            ["bash", "-c", f"{script('bash')}\nCOMP_WORDBREAKS='{breaks}'; {ask}"],
            env=found,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert result.stdout.splitlines()[:2] == [f"{prefix}bloom_560m", f"{prefix}bloom_1b1"]


def test_every_level_of_the_command_line_has_candidates() -> None:
    """Catches a level of the command line without candidates."""
    assert set(VERBS) | set(COMMANDS) <= set(offered(""))
    assert {"model=", "experiment=", "model.", "train."} <= set(offered("train", ""))
    assert offered("train", "train.se") == ["train.seq_len=", "train.seed="]
    assert offered("train", "train.batch_ramp.s") == ["train.batch_ramp.start=", "train.batch_ramp.samples="]
    assert offered("train", "run.dry_run=") == ["run.dry_run=true", "run.dry_run=false"]
    assert offered("train", "-m", "train.precision=bf16,f") == ["train.precision=bf16,fp32"]
    assert offered("train", "--cfg", "j") == ["job"]
    assert offered("train", "data.train[0]") == offered("nonsense", "") == []


def test_configs_of_the_users_folder_are_completed(tmp_path: Path) -> None:
    """Catches a user's own experiment that --config-dir makes known to Hydra but not to tab completion."""
    (tmp_path / "experiment" / "team").mkdir(parents=True)
    (tmp_path / "experiment" / "team" / "mine.yaml").write_text("# @package _global_\n# My own.\n")
    given = ("train", "--config-dir", str(tmp_path), "experiment=team")
    assert complete(given) == [("experiment=team/mine", "My own.")]


@pytest.mark.quick("train", "evaluate", "plan", "report")
@pytest.mark.parametrize("verb", VERBS)
def test_completion_imports_nothing_heavy(verb: str) -> None:
    """Catches a command whose module imports torch or Hydra at its top: every completion would take seconds."""
    code = (
        "import sys; from megads.cli.main import run; run(['__complete', sys.argv[1], '']);"
        "print({'torch', 'deepspeed', 'hydra', 'tokenizers', 'rich', 'numpy'} & set(sys.modules) or 'nothing heavy')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, verb],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "nothing heavy"


def test_every_shell_has_a_script_in_the_package() -> None:
    """Catches a supported shell without a script."""
    for shell in SHELLS:
        assert "__complete" in script(shell)
