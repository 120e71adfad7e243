#!/usr/bin/env python3
"""The tests that need a GPU, and how many of them passed; on a CPU they say that they skip.

python -m scripts.bench.gpu_tests [--device cuda] [--append bench.jsonl]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.bench.gpu_lines import add_line_options, appender

TESTS = Path(__file__).parents[2] / "tests"
NOTHING_SELECTED = 5
"""Pytest's exit code where there is no test."""


def files() -> list[Path]:
    """Those with tests for GPUs: to collect all of the others takes longer than these take."""
    return sorted(path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--durations=5", "-p", "no:cacheprovider"]
    command += [str(path.relative_to(TESTS.parent)) for path in files()]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    print(done.stdout[-20000:], done.stderr[-4000:])
    summary = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1].strip("= ")
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = f"; failed: {', '.join(names)}" if names else ""
    appender(arguments, "gpu_tests")({"name": "GPU tests", "verdict": summary + failed, "exit_code": done.returncode})
    return 0 if done.returncode in (0, NOTHING_SELECTED) else 1


if __name__ == "__main__":
    raise SystemExit(main())
