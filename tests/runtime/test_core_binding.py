"""Which cores a rank keeps to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megads.runtime.core_binding import share_of
from megads.runtime.environment import available_core_numbers


def machine(folder: Path, sockets: int, cores: int) -> list[int]:
    """Describes a machine of two threads a core as the kernel does: the second threads come after all first ones."""
    count = sockets * cores
    for number in range(2 * count):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        place = number % count
        (topology / "physical_package_id").write_text(f"{place // cores}\n")
        (topology / "core_id").write_text(f"{place % cores}\n")
    return list(range(2 * count))


def test_the_threads_of_a_core_belong_to_one_rank(tmp_path: Path) -> None:
    """Catches two ranks on every core, and a rank over two sockets."""
    cores = machine(tmp_path, sockets=2, cores=4)
    assert [share_of(cores, rank, 4, tmp_path) for rank in range(4)] == [
        [0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15],
    ]  # fmt: skip


def test_shares_are_equal_and_apart(tmp_path: Path) -> None:
    """Catches a rank with more threads than the others, and one without cores that is bound to none."""
    cores = machine(tmp_path, sockets=1, cores=4)[1:]
    shares = [share_of(cores, rank, 3, tmp_path) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2] and len({core for share in shares for core in share}) == 6
    assert share_of(cores, 0, 8, tmp_path) == []


@pytest.mark.skipif(len(available_core_numbers()) < 2, reason="one core cannot be shared")
def test_threads_old_and_new_are_bound() -> None:
    """Catches a thread pool that was there before and goes on over all cores."""
    code = """
import os, threading
from megads.runtime.core_binding import bind_to_share
leave = threading.Event()
old = threading.Thread(target=leave.wait)
old.start()
own = bind_to_share(1, 2)
tasks = {int(name) for name in os.listdir("/proc/self/task")}
assert len(tasks) == 2 and all(sorted(os.sched_getaffinity(task)) == own for task in tasks), own
new = []
thread = threading.Thread(target=lambda: new.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join(); leave.set()
assert new == [own], new
print(*own)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(map(int, done.stdout.split())) < os.sched_getaffinity(0)
