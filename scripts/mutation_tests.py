"""Runs the tests of one mutation after another, each time in a process forked from one that has imported torch.

Started by scripts.mutation_sample in a copy of the tree, with the seconds after which no further test of a mutation
starts; the mutation has then survived the tests that ran. Each line of the input is a JSON list of test files, each
line of the output their outcome. The end of the input, even while tests run, kills them and their child processes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest

HANGS_S = 200
"""A test that still runs this many seconds after that counts as hung."""
IMPORTED = ("deepspeed.runtime.pipe.engine", "hydra", "hypothesis", "matplotlib.figure")
"""Modules that most tests import."""
PR_SET_CHILD_SUBREAPER = 36
NO_TESTS_COLLECTED = 5
# Fixtures that start a megads command or compile the kernels.
SLOW_FIXTURES = {"megads", "module_megads", "command_server", "fork_server", "kernels"}


class _Tests:
    """Orders the tests, fast ones first, and records which one failed."""

    def __init__(self, files: Sequence[str], budget_s: float) -> None:
        self.files, self.budget_s = list(files), budget_s
        self.start = time.monotonic()
        self.passed = 0
        self.failed = ""
        self.out_of_time = False

    def _key(self, item: pytest.Item) -> tuple[bool, int]:
        slow = item.get_closest_marker("distributed") or SLOW_FIXTURES & set(getattr(item, "fixturenames", ()))
        return bool(slow), self.files.index(item.nodeid.partition("::")[0])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=self._key)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_runtest_logfinish(self) -> None:
        self.out_of_time = time.monotonic() - self.start > self.budget_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if self.out_of_time else None

    def outcome(self, code: int) -> dict[str, Any]:
        if code in (0, NO_TESTS_COLLECTED):
            return {"outcome": "survived" if self.passed else "untested"}
        if code == pytest.ExitCode.INTERNAL_ERROR:
            return {"outcome": "untested", "by": "an error of pytest"}
        return {"outcome": "killed", "by": self.failed or "the import"}


def _run(files: Sequence[str], budget_s: float, output: int) -> None:
    """The forked process: runs the tests and writes the outcome."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    tests = _Tests(files, budget_s)
    selected = "not slow and not slurm and not attack"
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", selected, *files], plugins=[tests])
    os.write(output, json.dumps(tests.outcome(code)).encode())
    os._exit(0)


def _kill_children() -> None:
    """Kills the tests and their orphans: as a subreaper, this process is their parent."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=10)


def _try(files: Sequence[str], budget_s: float) -> dict[str, Any] | None:
    """Returns the outcome of the tests; None if the input ended first."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(files, budget_s, writer)
    os.close(writer)
    ended = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([0, ended], [], [], budget_s + HANGS_S)
        if 0 in ready:
            return None
        if not ready:
            return {"outcome": "hung"}
        words = os.read(reader, 1 << 16)
        return json.loads(words) if words else {"outcome": "killed", "by": "a dead process"}
    finally:
        os.close(ended)
        _kill_children()
        os.close(reader)


def main() -> None:
    """Serves requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # DeepSpeed prints to the standard output when it is imported.
    output = os.dup(1)
    os.dup2(2, 1)
    for name in IMPORTED:
        importlib.import_module(name)
    with open(0, "rb", buffering=0, closefd=False) as requests, os.fdopen(output, "w") as answers:
        while line := requests.readline():
            result = _try(json.loads(line), float(sys.argv[1]))
            if result is None:
                return
            print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
