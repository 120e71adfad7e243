"""The exit codes are the same wherever they are listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megads.errors
from megads.cli.main import VERBS, run
from megads.errors import EXIT_CODES, MegadsError, exit_codes_text

ROOT = Path(__file__).parents[2]


def flowing(text: str) -> str:
    return " ".join(text.split())


def test_every_exit_code_is_documented() -> None:
    """Catches a new exit code that is not documented."""
    codes = {kind.exit_code for kind in vars(megads.errors).values()
             if isinstance(kind, type) and issubclass(kind, MegadsError)}  # fmt: skip
    assert codes < set(EXIT_CODES)


def test_help_readme_and_docs_show_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a list that was changed in only one of the places where it is shown."""
    assert run(["--help"]) == 0
    assert exit_codes_text() in flowing(capsys.readouterr().out)
    assert exit_codes_text()[:-1] in flowing((ROOT / "README.md").read_text())
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Messages")[0]
    shown = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE)}
    assert set(shown) == set(EXIT_CODES)
    for code, meaning in EXIT_CODES.items():
        assert re.match(rf"{re.escape(meaning)}($|[: ])", shown[code]), code
    assert "${megads.exit_codes:}" in (ROOT / "conf" / "train.yaml").read_text()


def test_lists_of_verbs_and_slurm_jobs_have_documented_codes_only() -> None:
    """Catches an unknown exit code in a verb's list or that of SLURM jobs, and a code that the latter lacks."""
    for verb in VERBS:
        listed = (ROOT / "conf" / f"{verb}.yaml").read_text().partition("Exit codes: ")[2]
        codes = {int(code) for code in re.findall(r"(?:^|; )(\d+) ", flowing(listed))}
        assert codes <= set(EXIT_CODES) and (codes or verb == "train"), verb
    table = (ROOT / "docs" / "slurm.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(", ")}
    assert codes == set(EXIT_CODES) - {megads.errors.EXIT_INTERRUPTED}
