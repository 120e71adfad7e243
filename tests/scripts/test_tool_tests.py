"""Which tests of tools `make test` runs."""

from __future__ import annotations

import pytest

from tests.tool_tests import REPOSITORY, Selection, sources_of


@pytest.mark.parametrize(
    ("test", "changed", "runs"),
    [
        ("tests/tools/report/test_page.py", "megads/tools/report/page.py", True),
        ("tests/tools/report/test_page.py", "tests/tools/report/written_runs.py", True),
        ("tests/tools/report/test_page.py", "megads/tools/reshard.py", False),
        ("tests/tools/test_chaos.py", "megads/tools/chaos/faults.py", True),
        ("tests/tools/remote/test_upload.py", "megads/checkpoint/store.py", True),
        ("tests/tools/test_generate.py", "megads/tools/report/page.py", False),
        ("tests/cli/test_why.py", "megads/tools/inspect/why.py", True),
        ("tests/tools/plan/test_memory.py", "megads/tools/plan/memory.py", True),
        ("tests/scripts/bench/test_ops.py", "scripts/bench/ops.py", True),
        ("tests/ops/cuda/test_softmax.py", "kernels/cuda/softmax.cu", True),
        ("tests/ops/cuda/test_softmax.py", "megads/tools/plan/memory.py", False),
    ],
)
def test_a_change_runs_its_tests(test: str, changed: str, runs: bool) -> None:
    """Catches a changed tool whose tests are left out, and one that runs the tests of others."""
    assert (REPOSITORY / test).is_file() and changed.startswith(sources_of(test)) is runs


@pytest.mark.parametrize("test", ["tests/engine/test_parity.py", "tests/cli/test_entry.py", "tests/ops/test_norm.py"])
def test_what_training_needs_is_always_tested(test: str) -> None:
    """Catches tests of the trainer that run only where something changed."""
    assert sources_of(test) == ()


def test_each_test_runs_in_one_of_both_targets(request: pytest.FixtureRequest) -> None:
    """Catches a test that `make test` and `make test-tools` both run, or neither."""
    item, mine = request.node, "tests/scripts/test_tool_tests.py"
    for files in ([], [mine], ["README.md"]):
        changed, unchanged = (Selection(which, files) for which in ("changed", "unchanged"))
        assert changed.keeps(item) is (mine in files) and unchanged.keeps(item) is (mine not in files)
        assert unchanged.keeps_file(item.path) is (mine not in files)
    item.add_marker(pytest.mark.always)
    assert Selection("changed", []).keeps(item) and not Selection("unchanged", []).keeps(item)
