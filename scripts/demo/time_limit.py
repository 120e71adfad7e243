#!/usr/bin/env python3
"""Runs the demo and fails if it takes 1.5 times as long as its goal on such a processor; `.ci/run` calls it.

python3 scripts/demo/time_limit.py make demo

The time starts with the demo's first stage: installation is not part of it. A processor that other programs use, or
that the host takes away, says nothing about this one: where they had more than a tenth of the cores, the time is
printed and not judged. Needs the standard library only, as it starts before anything is installed.

Exit status: the command's, or 1 if it succeeded but took too long.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

FIRST_STAGE = "== 1/4"
MARGIN = 1.5
"""Time limit over the goal: on some days the same virtual machine takes twice as long for the same steps."""
OTHERS_SHARE = 0.1
"""Share of the cores' time used by others above which a time is not judged."""


def limit_s(flags: set[str], cores: int) -> int:
    """Returns the demo's time limit after installation: `MARGIN` times the goal.

    Args:
        flags: instruction sets of the processor.
        cores: cores that this process may use.
    """
    goal_s = 300 if cores == 1 else 120 if "avx512f" in flags else 180
    return int(MARGIN * goal_s)


def processor() -> tuple[str, set[str]]:
    """Returns the processor's name and its instruction sets, as the kernel writes them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = [line.partition(":") for line in lines]
    names = [value.strip() for name, _, value in fields if name.strip() in ("model name", "CPU part")]
    flags = {flag for name, _, value in fields if name.strip() in ("flags", "Features") for flag in value.split()}
    return names[0] if names else os.uname().machine, flags


def describe() -> str:
    """Returns processor, instruction sets that matter to matrix products, cores, memory and load."""
    name, flags = processor()
    shown = sorted(flag for flag in flags if re.match(r"avx2|avx512|avx_|amx|fma|f16c|neon|asimd|sve|bf16|i8mm", flag))
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    cores = len(os.sched_getaffinity(0))
    return f"processor: {name}; {cores} cores; {gib:.0f} GiB; load average {load}\ninstruction sets: {' '.join(shown)}"


def busy_s() -> float:
    """Returns the seconds that all cores together were in use since boot, with those that the host took (steal)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Returns the seconds that the ended children of this process used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(seconds: float, limit: int, others: float) -> tuple[bool, str]:
    """Returns whether a demo passed, and a line that says so.

    Args:
        seconds: its time after installation.
        limit: its time limit, in seconds.
        others: share of the cores' time that was not the demo's own.
    """
    line = f"demo: {seconds:.0f} s after installation, limit {limit} s; others used {others:.0%} of the cores"
    if seconds <= limit:
        return True, line
    if others > OTHERS_SHARE:
        return True, f"{line}: NOT JUDGED, the machine was busy"
    return False, f"{line}: TOO SLOW"


def main() -> int:
    """Runs the command given as arguments and returns its exit status, or 1 if it was too slow."""
    if not sys.argv[1:]:
        print(describe())
        return 0
    began, busy = time.monotonic(), busy_s()
    whole_began = began
    with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for output in process.stdout:
            if output.startswith(FIRST_STAGE.encode()):
                began = time.monotonic()
            sys.stdout.buffer.write(output)
            sys.stdout.buffer.flush()
    ended = time.monotonic()
    # The whole command's: what the installation used cannot be told from what the demo used.
    others = (busy_s() - busy - own_s()) / (len(os.sched_getaffinity(0)) * (ended - whole_began))
    passed, line = judge(ended - began, limit_s(processor()[1], len(os.sched_getaffinity(0))), max(0.0, others))
    print(line)
    return process.returncode or (0 if passed else 1)


if __name__ == "__main__":
    sys.exit(main())
