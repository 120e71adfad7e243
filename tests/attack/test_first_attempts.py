"""What a newcomer types wrong is answered in words of megads, with the value and what to type."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

from tests.attack.command_lines import copy_template
from tests.attack.first_attempts import SETTINGS, Attempt, attempts
from tests.fork_server import ForkServer

QUICK_ATTEMPTS, ALL_ATTEMPTS = 38, 400
JARGON = (
    "Traceback", "ANTLR", "mismatched input", "token recognition", "extraneous input", "no viable alternative",
    "missing EQUAL", "<EOF>", "UNQUOTED", "Lexer", "omegaconf", "OmegaConf", "hydra.errors", "HydraException",
    "OverrideParse", "ListConfig", "DictConfig", "AnyNode", "NoneType", "in struct", "full_key", "object_type",
    "argparse", "unrecognized arguments", "usage:", "ambiguous option", "expected one argument", "invalid choice",
    "Config group override", "Interpolation", "do not compose", "HYDRA_FULL_ERROR", "KeyError", "TypeError",
)  # fmt: skip
"""What only the libraries' own messages contain."""
WHAT_TO_TYPE = re.compile(
    r"\w=|--\w|did you mean|runs here|lists|"
    r"\b(give|write|choose|must|expected|make|want|check|has|add|leave|correct|cd)\b",
    re.IGNORECASE,
)


def require_answer(attempt: Attempt, code: int, said: str) -> None:
    """Asserts that a wrong command line has a helpful answer."""
    line = f"megads {attempt.arguments} ({attempt.form}): exit {code}\n{said[-1500:]}"
    assert not [word for word in JARGON if word in said], line
    assert code in ((2,) if attempt.refused else (0, 2, 3, 4, 9)), line
    if code != 2:
        return
    words = [word for word in re.split(r"[\s=:\"'`,;\[\](){}+~-]+", attempt.wrong) if word]
    # What was typed may be valid, and another argument wrong: then that one is named.
    others = [part for text in attempt.arguments[1:] for part in text.split("=") if part and not attempt.refused]
    named = not words or any(word in said for word in [*words, *others]) or " has no value: it must be set" in said
    assert named, f"names nothing of {attempt.wrong!r}: {line}"
    assert WHAT_TO_TYPE.search(said), f"says nothing to type: {line}"
    assert not re.search(r"\bNone\b", said), line


def try_all(count: int, server: ForkServer, folder: Path) -> collections.Counter[tuple[str, int]]:
    """Runs that many command lines in one folder; returns how often each form ended with each exit code."""
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "config.yaml").write_text("train: {steps: 1}\n")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("a line of text\n" * 50)
    codes: collections.Counter[tuple[str, int]] = collections.Counter()
    wrong = []
    for number, attempt in enumerate(attempts(count)):
        outcome = server(copy_template(folder, folder.parent / "folder"), attempt.arguments, stub=True)
        codes[attempt.form, outcome.code] += 1
        try:
            require_answer(attempt, outcome.code, outcome.err + ("" if outcome.code == 0 else outcome.out))
        except AssertionError as error:
            wrong.append(f"{number}: {str(error).partition(chr(10) + 'assert')[0]}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n\n".join(wrong)
    return codes


def test_some_first_attempts(fork_server: ForkServer, tmp_path: Path) -> None:
    """Catches a library's message in place of an answer, for a few wrong lines of every command."""
    assert len(SETTINGS) * 2 == QUICK_ATTEMPTS
    (tmp_path / "template").mkdir()
    try_all(QUICK_ATTEMPTS, fork_server, tmp_path / "template")


@pytest.mark.slow
def test_many_first_attempts(fork_server: ForkServer, tmp_path: Path) -> None:
    """Catches the same in 400 lines: separators, quotes, flags of other tools, positional arguments, foreign keys."""
    (tmp_path / "template").mkdir()
    codes = try_all(ALL_ATTEMPTS, fork_server, tmp_path / "template")
    print(dict(sorted(codes.items())))
