"""Machine faults: the kernel's OOM killer kills a rank; a rank's clock is wrong and jumps."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command import (
    Command,
    StartCommand,
    checkpoint_of,
    checksums,
    events_of,
    finished_run,
    small_model,
    steps_of,
)
from tests.faults import CLOCK_JUMPED, FAULTY_RANK

pytestmark = pytest.mark.distributed
LIMIT_BYTES = 3 << 30
CGROUPS = Path("/sys/fs/cgroup")
SKEW_S = 86_400
# The clock of one rank: a day ahead at first, then a day behind. RANK is only in the environment of ranks.
WRONG_CLOCK = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static int (*real_clock)(clockid_t, struct timespec *);

static long skew(void) {{
    const char *rank = getenv("RANK");
    if (rank == NULL || strcmp(rank, "{FAULTY_RANK}")) return 0;
    return getenv("{CLOCK_JUMPED}") == NULL ? {SKEW_S} : -{SKEW_S};
}}

int clock_gettime(clockid_t clock, struct timespec *now) {{
    if (real_clock == NULL) *(void **)&real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real_clock(clock, now);
    if (code == 0 && clock == CLOCK_REALTIME) now->tv_sec += skew();
    return code;
}}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {{
    struct timespec precise;
    (void)zone;
    int code = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return code;
}}

time_t time(time_t *out) {{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out != NULL) *out = precise.tv_sec;
    return precise.tv_sec;
}}
"""


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup with a small limit for the total memory of its processes."""

    folder: Path

    def take(self, command: Command) -> None:
        """Moves a command and all its descendants into the cgroup.

        A child that a process starts before it is moved stays outside, so that one pass may miss it.
        """
        while missing := {process.pid for process in command.processes()} - self._members():
            for pid in missing:
                with suppress(ProcessLookupError):
                    (self.folder / "cgroup.procs").write_text(str(pid))

    def _members(self) -> set[int]:
        return {int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()}


@pytest.fixture
def memory_group() -> Iterator[MemoryGroup]:
    """A new cgroup; skips the test where none can be created."""
    version_1 = CGROUPS / "memory"
    parent, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (CGROUPS, "memory.max")
    folder = parent / f"megads_tests_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    yield MemoryGroup(folder)
    deadline = time.monotonic() + 120
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.rmdir()


@pytest.fixture(scope="module")
def reference(corpus: Path, module_megads: StartCommand) -> Path:
    """A run without faults; read only."""
    return finished_run(module_megads, "reference", overrides(corpus))


def overrides(corpus: Path) -> list[str]:
    return small_model(corpus, parallel__dp=2, train__steps=8, checkpoint__every_steps=2)


@pytest.mark.slow
@pytest.mark.fault(13)
def test_a_rank_killed_for_want_of_memory_is_named_and_restarted(
    corpus: Path, megads: StartCommand, reference: Path, memory_group: MemoryGroup
) -> None:
    """Catches an OOM kill that is not diagnosed as one, and a restart that computes different results."""
    run_dir = megads.folder / "run"
    arguments = [*overrides(corpus), f"run.dir={run_dir}", "cluster.max_restarts=1"]
    command = megads("train", *arguments, fault="take_all_memory_once")
    memory_group.take(command)
    ended = command.end()
    assert ended.code == 0, ended.err
    (diagnosis,) = events_of(run_dir, "diagnosis")
    assert diagnosis["cause"] == "host_oom_kill" and str(FAULTY_RANK) in str(diagnosis["culprit"]), diagnosis
    (restart,) = events_of(run_dir, "restart")
    assert f"rank {FAULTY_RANK} was killed by SIGKILL" in restart["cause"]
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 8)) == checksums(checkpoint_of(reference, 8))


@pytest.mark.slow
@pytest.mark.fault(19)
def test_a_wrong_and_jumping_clock_changes_nothing(corpus: Path, megads: StartCommand, reference: Path) -> None:
    """Catches heartbeats, phase timeouts and leases that compare wall clocks of different ranks, or rely on one."""
    source, library = megads.folder / "clock.c", megads.folder / "clock.so"
    source.write_text(WRONG_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    run_dir = megads.folder / "run"
    arguments = [*overrides(corpus), f"run.dir={run_dir}", "cluster.max_restarts=1", "cluster.heartbeat_timeout_s=20"]
    variables = {"LD_PRELOAD": str(library)}
    ended = megads("train", *arguments, fault="jump_in_time", variables=variables, anew=True).end()
    assert ended.code == 0, ended.err
    shown = [float(text) for text in (run_dir / "clocks").read_text().split()]
    assert [round((clock - time.time()) / SKEW_S) for clock in shown] == [1, -1]
    for name in ("heartbeat_lost", "hang_suspected", "restart"):
        assert events_of(run_dir, name) == []
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 8)) == checksums(checkpoint_of(reference, 8))
