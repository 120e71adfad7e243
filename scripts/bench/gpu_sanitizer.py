#!/usr/bin/env python3
"""Runs every kernel once on small tensors under compute-sanitizer: memory accesses, races, barriers.

    python -m scripts.bench.gpu_sanitizer --tool memcheck|racecheck|synccheck [--device cuda] [--append bench.jsonl]

Every tensor is a separate allocation, because torch's caching allocator would hide small out-of-bounds accesses.
Without the tool the kernels run by themselves, so that a CPU can check the command. Exit 1: it found something, or the
kernels failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys

from scripts.bench.gpu_items import SANITIZERS
from scripts.bench.gpu_lines import add_line_options, appender

PROGRAM = "compute-sanitizer"
ERROR_CODE = 86
"""Exit code of the tool for findings."""
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitizer_command(tool: str, path: str, device: str) -> list[str]:
    """Returns the command that runs all kernels under a tool.

    Args:
        tool: one of SANITIZERS.
        path: path of compute-sanitizer; empty runs the kernels without it.
        device: cuda or cpu.
    """
    kernels = [sys.executable, "-m", "scripts.bench.gpu_kernels", "--once", "--device", device]
    if not path:
        return kernels
    options = ["--tool", tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "20"]
    return [path, *options, "--target-processes", "application-only", *kernels]


def findings(output: str) -> str:
    """Returns the tool's summary and first finding; empty without a summary."""
    told = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(told) if re.search(r"(ERROR|RACECHECK) SUMMARY", line)), "")
    first = next((line for line in told if re.match(r"(Invalid|Error|Barrier|Race|Program hit|.*[Hh]azard)", line)), "")
    return "; first: ".join(text for text in (summary, first) if text)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=SANITIZERS, required=True)
    add_line_options(parser)
    arguments = parser.parse_args()
    path = (shutil.which(PROGRAM) or "") if arguments.device == "cuda" else ""
    command = sanitizer_command(arguments.tool, path, arguments.device)
    done = subprocess.run(command, env=os.environ | UNCACHED, capture_output=True, text=True, check=False)
    print(done.stdout[-20000:], done.stderr[-8000:])
    found = findings(done.stdout) if path else f"{PROGRAM} is not on the path; the kernels ran without it"
    verdict = f"{found or 'no summary'}{f', exit code {done.returncode}' if done.returncode else ''}"
    appender(arguments, "gpu_sanitizer")({"name": f"sanitizer, {arguments.tool}", "verdict": verdict})
    print(verdict)
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
