#!/usr/bin/env python3
"""Runs the tests that need a GPU and counts those that passed; on a CPU they report that they are skipped.

    python -m scripts.bench.gpu_tests [--device cuda] [--limit-s 170] [--append bench.jsonl]

Each test function runs in a separate pytest, concurrently with the others, because most of their time goes into
starting processes and compiling FlexAttention, not into the GPU. Tests are shown as they finish. When the time is over,
those that have finished are counted, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from scripts.bench.gpu_lines import add_line_options, appender

TESTS = Path(__file__).parents[2] / "tests"
NOTHING_SELECTED = 5
"""Pytest's exit code for no tests."""
STACKS_S = 5.0
"""Time for a killed pytest to print its stacks."""
_OUTCOME = re.compile(r"(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")


def parts(device: str) -> list[str]:
    """Returns the test functions for GPUs by file, because collecting all other tests takes longer than running these.

    On a CPU whole files: skipped tests do not need to run concurrently.
    """
    files = sorted(path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text())
    if device == "cpu":
        return [str(path.relative_to(TESTS.parent)) for path in files]
    return [
        f"{path.relative_to(TESTS.parent)}::{name}"
        for path in files
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]


class Run:
    """Pytest on one part; its output is shown immediately.

    Attributes:
        outcomes: outcomes of finished tests, by name.
    """

    def __init__(self, part: str) -> None:
        self.name = part.rpartition("::")[2]
        options = ["-v", "-m", "gpu", "--durations=5", "-p", "no:cacheprovider"]
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "pytest", *options, part],
            cwd=TESTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
        )  # fmt: skip
        self.outcomes: dict[str, str] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stdout.write(f"{self.name}: {line.rstrip()[:300]}\n")  # a single write, as others write too
            if found := _OUTCOME.match(line):
                self.outcomes[found[1]] = found[2]

    def end(self, left_s: float) -> int | None:
        """Waits until the deadline; returns the exit code, None if it was killed."""
        code: int | None = None
        try:
            code = self.process.wait(max(left_s, 0.1))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            try:
                self.process.wait(STACKS_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._reader.join(STACKS_S)
        return code


def verdict(outcomes: dict[str, str], unfinished: list[str]) -> str:
    """Returns the summary of all tests.

    Args:
        outcomes: outcomes of finished tests, by name.
        unfinished: parts with unfinished tests.
    """
    counts = Counter(outcomes.values())
    said = ", ".join(f"{count} {outcome.lower()}" for outcome, count in sorted(counts.items())) or "no test ended"
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    said += f"; failed: {', '.join(failed)}" if failed else ""
    return said + (f"; not finished: {', '.join(unfinished)}" if unfinished else "")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--limit-s", type=float, default=170.0, help="stop the tests that are unfinished after this time"
    )
    add_line_options(parser)
    arguments = parser.parse_args()
    end_s = time.monotonic() + arguments.limit_s
    runs = [Run(part) for part in parts(arguments.device)]
    codes = [run.end(end_s - time.monotonic()) for run in runs]
    outcomes = {name: outcome for run in runs for name, outcome in run.outcomes.items()}
    text = verdict(outcomes, [run.name for run, code in zip(runs, codes, strict=True) if code is None])
    print(text)
    appender(arguments, "gpu_tests")({"name": "GPU tests", "verdict": text, "exit_codes": codes})
    return int(any(code not in (0, NOTHING_SELECTED) for code in codes))


if __name__ == "__main__":
    raise SystemExit(main())
