"""Which mutations `make mutation` draws, and the tests that it runs for them."""

from __future__ import annotations

import pytest

from scripts.mutation_sample import ROOT, Mutation, draw, is_python, nearest_tests, runs_alike


@pytest.mark.parametrize(
    ("after", "valid", "alike"),
    [
        ("def f(a: str) -> int:\n    return {'x': a, **b}", True, True),
        ("def f(a: int) -> int:\n    return {'x': -a, **b}", True, False),
        ("def f(a: int) -> int:\n    return {'x': a, -**b}", False, False),
        ("def f(a: int) -> int:\n    continue", False, False),
    ],
)
def test_every_mutation_compiles_and_changes_the_code(after: str, valid: bool, alike: bool) -> None:
    """Catches a mutation that is no Python, which once ended the whole run (seed 7731) and is killed by any test, and
    one that no test can detect."""
    before = "def f(a: int) -> int:\n    return {'x': a, **b}"
    assert is_python(after) is valid
    assert not valid or runs_alike(before, after) is alike


def test_draws_are_repeatable() -> None:
    """Catches a draw that changes with the run, fewer mutations than requested, and two at the same place."""
    pytest.importorskip("cosmic_ray", reason="only make mutation installs cosmic-ray")
    files = [ROOT / "megads/runtime/files.py", ROOT / "megads/config/phases.py"]
    drawn = draw(files, 12, 3)
    assert drawn == draw(files, 12, 3) and len(drawn) == 14, "a control per ten, counted from the end"
    assert all(is_python(source) for _, source in drawn)


def test_a_mutations_tests_include_those_of_its_function() -> None:
    """Catches a survivor whose test was not run: behind those of other functions of the file, or in the package of the
    commands."""
    attention = "megads/ops/attention.py"
    around = Mutation(attention, "", 0, _line(attention, "k_bmse = torch.cat")).names
    assert around == {"augmented_attention"}
    assert "tests/ops/test_sdpa.py" in nearest_tests(attention, around)[:2]
    assert nearest_tests("megads/tools/plan/tables.py") == ["tests/tools/plan/test_tables.py", "tests/cli/test_plan.py"]
    assert nearest_tests("megads/tools/chaos.py")[0] == "tests/tools/test_chaos.py"


def _line(file: str, text: str) -> int:
    lines = (ROOT / file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
