"""Selects the tests of tools and of CUDA kernels: `make test` runs a few of each, and all of what changed.

Training on this machine does not depend on the code that they test, and a change elsewhere rarely breaks it.
`make test-tools` runs exactly the others, so that CI, which runs both for every commit, runs each test once.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("tests/tools/plan", "tests/scripts", "tests/tools")
COMMANDS = {
    "compare": "tools/compare",
    "doctor": "tools/doctor",
    "plan": "tools/plan",
    "plan_cluster": "tools/plan",
    "report": "tools/report",
    "sweep": "tools/sweep",
    "verify_layout": "tools/verify",
    "why": "tools/inspect",
}
"""Test modules of tests/cli/ that test a tool, and its folder."""
OF_GPUS = (
    "ops/cuda/", "engine/test_fake_cuda.py", "engine/test_host_waits.py", "engine/test_launches.py",
    "engine/test_micro_batch_graphs.py", "engine/test_stream_order.py",
)  # fmt: skip
"""Tests that run CUDA kernels thread by thread on a CPU, or engines on a device that acts as a GPU."""
GPU_CODE = ("kernels/", "megads/engine/", "megads/ops/", "megads/parallel/")


def sources_of(test: str) -> tuple[str, ...]:
    """Returns the beginnings of the paths whose change makes `make test` run a test file; none: it always does.

    Args:
        test: test file, relative to the repository.
    """
    path = Path(test)
    package = path.parent.relative_to("tests").as_posix()
    name = path.stem.removeprefix("test_")
    if test.startswith(tuple(f"tests/{each}" for each in OF_GPUS)):
        return (*GPU_CODE, test)
    if package == "cli" and name in COMMANDS:
        return f"megads/{COMMANDS[name]}/", f"megads/cli/{name}.py", test
    if not test.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
        return ()
    if package == "tools/remote":  # it copies what the core writes, and reads datasets
        core = ("megads/checkpoint/", "megads/data/indexed/", "megads/launch/")
        return f"megads/{package}/", *core, f"tests/{package}/", "tests/checkpoint/"
    if package in ("tools/dataset", "tools/prepare"):  # they write datasets
        return f"megads/{package}/", "megads/data/", f"tests/{package}/"
    if package == "tools/autotune":
        return f"megads/{package}/", *GPU_CODE, f"tests/{package}/"
    if package == "tools/profile":
        return f"megads/{package}/", "megads/engine/", f"tests/{package}/"
    if package == "tools/rerun":  # it repeats what engines compute
        return f"megads/{package}/", "megads/engine/", "megads/parallel/", "megads/resilience/", f"tests/{package}/"
    if package in ("tools/evaluate", "tools/sweep"):
        return f"megads/{package}/", "megads/tools/jobs.py", f"tests/{package}/"
    if package in ("tools", "scripts"):
        return f"megads/{package}/{name}", f"megads/cli/{name}.py", f"{package}/{name}.py", test
    return f"megads/{package}/", f"{package}/", f"tests/{package}/"


def changed_files() -> set[str]:
    """Files that the last commit or the working tree changes, relative to the repository; none outside of git."""
    listings = (("diff", "--name-only", "HEAD"), ("diff", "--name-only", "HEAD~1", "HEAD"))
    found = set[str]()
    for command in (*listings, ("ls-files", "--others", "--exclude-standard")):
        try:
            done = subprocess.run(["git", *command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return set()
        # No repository, or a shallow clone without the commit before.
        found |= set(done.stdout.splitlines()) if done.returncode == 0 else set()
    return found


class Selection:
    """The tests to run.

    Args:
        which: all; changed: leaves out the tests of tools that did not change, except those marked `always`; unchanged:
            exactly those that `changed` leaves out.
        files: the changed files.
    """

    def __init__(self, which: str, files: Iterable[str]) -> None:
        self._which, self._files = which, frozenset(files)
        self._unchanged: dict[Path, bool] = {}

    def keeps_file(self, file: Path) -> bool:
        """Whether to collect a test file. One that is not collected imports nothing."""
        if self._which == "all":
            return True
        if self._which == "unchanged":
            return self._is_unchanged(file)
        return not self._is_unchanged(file) or "mark.always" in file.read_text()

    def keeps(self, item: pytest.Item) -> bool:
        """Whether to run a test of a collected file."""
        if self._which == "all":
            return True
        mark = item.get_closest_marker("always")
        always = mark is not None and (not mark.args or _case(item) in mark.args)
        is_left_out = self._is_unchanged(item.path) and not always
        return is_left_out is (self._which == "unchanged")

    def _is_unchanged(self, file: Path) -> bool:
        if file not in self._unchanged:
            paths = sources_of(_name(file))
            self._unchanged[file] = bool(paths) and not any(changed.startswith(paths) for changed in self._files)
        return self._unchanged[file]


def _name(file: Path) -> str:
    return file.relative_to(REPOSITORY).as_posix()


def _case(item: pytest.Item) -> str:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
