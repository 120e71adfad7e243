"""Tests the environment variables of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from megads.errors import ConfigError
from megads.launch.node_ranks import lowest_compute_capability
from megads.runtime import environment
from megads.runtime.environment import (
    RankEnvironment,
    child_environment,
    meeting_variables,
    rank_environment,
    rank_numbers,
    rank_variables,
    shared_gpu_numbers,
    threads_of_rank,
    use_passive_openmp_wait,
    user_cache_dir,
)

REPOSITORY = Path(__file__).parents[2]


def test_a_process_started_by_hand_is_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a KeyError in a process without a launcher."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rank_environment() == RankEnvironment(0, 0, 1, 1)


def test_cpu_ranks_get_threads_accelerator_and_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches DeepSpeed looking for a GPU, and a user's allocator setting that is overwritten."""
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    variables = rank_variables(threads=3, cuda=False)
    assert (variables["OMP_NUM_THREADS"], variables["DS_ACCELERATOR"], variables["MALLOC_TOP_PAD_"]) == (
        "3",
        "cpu",
        "1",
    )
    assert variables["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "DS_ACCELERATOR" not in rank_variables(threads=3, cuda=True)


def test_one_hardware_queue_before_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches GEMMs that delay a collective on Hopper, too few hardware queues on Blackwell, and a user's setting that
    is overwritten."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    found = [rank_variables(1, cuda=True, capability=c).get(name) for c in ((8, 0), (9, 0), (10, 0), (12, 0), None)]
    assert found == ["1", "1", None, None, None]
    assert name not in rank_variables(1, cuda=False, capability=(9, 0))
    monkeypatch.setenv(name, "8")
    assert rank_variables(1, cuda=True, capability=(9, 0))[name] == "8"


@pytest.mark.parametrize(
    ("says", "found"), [("echo 10.0; echo 9.0", (9, 0)), ("echo '[N/A]'", None), ("exit 9", None), ("", None)]
)
def test_the_oldest_gpus_compute_capability_counts(
    says: str, found: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a driver without an answer that ends a run, and the newest GPU's capability used for a mixed node."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert lowest_compute_capability() == found


@pytest.mark.parametrize("theirs", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_memory_grows_in_place_unless_the_user_says_otherwise(
    theirs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches GPU memory lost to fragmentation, and a user's setting, also by its old name, that is overridden."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if theirs is not None:
        monkeypatch.setenv(theirs, "max_split_size_mb:512")
    wanted = {None: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}.get(theirs)
    assert rank_variables(threads=1, cuda=True).get("PYTORCH_ALLOC_CONF") == wanted
    assert "PYTORCH_ALLOC_CONF" not in rank_variables(threads=1, cuda=False)


def test_exported_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one point of a sweep that changes the threads of the next."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MEGADS_TEST_VARIABLE", raising=False)
    with child_environment({"OMP_NUM_THREADS": "1", "MEGADS_TEST_VARIABLE": "x"}):
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert "MEGADS_TEST_VARIABLE" not in os.environ


def test_ranks_get_equal_threads_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches zero threads when ranks outnumber cores, threads that a small model cannot use, an OMP_NUM_THREADS that
    is ignored, and one that overrides the config."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "available_cores", lambda: 8)
    assert [threads_of_rank(ranks) for ranks in (1, 3, 10_000)] == [8, 2, 1]
    assert [threads_of_rank(2, useful=useful) for useful in (0, 3, 9, None)] == [1, 3, 4, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "6,2")
    assert threads_of_rank(2, useful=1) == 6
    assert threads_of_rank(2, configured=5, useful=1) == 5
    for wrong in ("0", "two", "-1"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS = {wrong}: must be at least 1"):
            threads_of_rank(1)


def test_waiting_threads_sleep_instead_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches threads of a rank that spin beside another process, and a user's setting that is overwritten."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    variables = rank_variables(threads=2, cuda=False)
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE" and int(variables["GOMP_SPINCOUNT"]) <= 10_000
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    variables = rank_variables(threads=2, cuda=False)
    assert variables["OMP_WAIT_POLICY"] == "ACTIVE" and "GOMP_SPINCOUNT" not in variables
    use_passive_openmp_wait()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_ranks_of_one_machine_use_its_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches gloo and NCCL that listen on the interface of the host name, a user's interface that is ignored, and
    ranks of several machines that cannot reach each other."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    loopback = meeting_variables(tmp_path, "127.0.0.1", 1234, one_machine=True)["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in [found.address for found in psutil.net_if_addrs()[loopback]]
    assert meeting_variables(tmp_path, "127.0.0.1", 1234, one_machine=True)["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    assert not [name for name in meeting_variables(tmp_path, "127.0.0.1", 1234, one_machine=False) if "IFNAME" in name]
    several = meeting_variables(tmp_path, "10.0.0.1", 1234, one_machine=False, interface="eth0")
    assert several["GLOO_SOCKET_IFNAME"] == "eth0" and "NCCL_SOCKET_IFNAME" not in several
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert meeting_variables(tmp_path, "10.0.0.1", 1, False, interface="eth0")["GLOO_SOCKET_IFNAME"] == "ib0"
    assert meeting_variables(tmp_path, "127.0.0.1", 1234, one_machine=True)["GLOO_SOCKET_IFNAME"] == "ib0"


SHARED = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


def test_ranks_that_share_a_gpu_are_on_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches NCCL's refusal of two ranks on a device: one host for both, a transport between processes of a host, and
    a rank whose number on its machine, which others than DeepSpeed need, is lost or is taken for its GPU."""
    for name in ("NCCL_MAX_NCHANNELS", "NCCL_ALGO", "NCCL_PROTO", "MEGADS_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert shared_gpu_numbers(5, 1, 1) == {}
    found = [rank_numbers(rank, rank, 4, 4) | shared_gpu_numbers(rank, rank, 2) for rank in range(4)]
    assert found[3] == SHARED | {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "MEGADS_LOCAL_RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "NCCL_HOSTID": "megads-rank-3",
    }
    assert len({of_rank["NCCL_HOSTID"] for of_rank in found}) == 4
    with child_environment(found[3]):
        assert rank_environment() == RankEnvironment(3, 3, 4, 4, gpu=1)
    with child_environment(rank_numbers(6, 2, 8, 4)):
        assert rank_environment() == RankEnvironment(6, 2, 8, 4, gpu=2)
    # Deterministic training accepts the ring.
    with child_environment(found[0]):
        environment.fix_nccl_algorithms()
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert shared_gpu_numbers(0, 0, 2)["NCCL_ALGO"] == "Tree"


UNNAMED = 54321
"""A user id without a line in /etc/passwd."""


def as_unnamed_user(code: str, **variables: str) -> str:
    """Runs Python code as a user id without a name, and returns what it prints."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **variables}
    program = f"import os; os.setgroups([]); os.setgid({UNNAMED}); os.setuid({UNNAMED})\n{code}"
    modules = "import megads.runtime.environment as environment, tempfile, pathlib, sys"
    # Imported as root: the user cannot read a checkout or an environment in /root.
    done = subprocess.run(
        [sys.executable, "-c", f"{modules}\n{program}"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_name_and_home_can_run() -> None:
    """Catches a KeyError or RuntimeError in a container of `docker run --user`, and kernels that are never compiled."""
    assert as_unnamed_user("print(environment.user_name(), environment.home_dir())") == f"{UNNAMED} None"
    # Not tmp_path, which only root can enter.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        cache = folder / f"megads-cache-{UNNAMED}"
        assert as_unnamed_user("print(environment.user_cache_dir())", TMPDIR=name) == str(cache)
        assert cache.stat().st_mode & 0o777 == 0o700
        # A home directory that belongs to root, as HOME=/ in such a container.
        assert as_unnamed_user("print(environment.user_cache_dir())", TMPDIR=name, HOME="/usr") == str(cache)
        home = folder / "home"
        home.mkdir()
        home.chmod(0o777)
        assert as_unnamed_user("print(environment.user_cache_dir())", HOME=str(home)) == f"{home}/.cache/megads"


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches libraries loaded from a folder that another user prepared in the temporary folder."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"megads-cache-{os.getuid()}"
    assert user_cache_dir() == folder
    folder.chmod(0o777)
    assert user_cache_dir() != folder
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache_dir() == Path("/elsewhere/megads")


def test_the_cpus_of_a_slurm_job_limit_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches more threads than CPUs in a job of one CPU, at sites that do not bind a job to its cores."""
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "available_core_numbers", lambda: list(range(8)))
    assert environment.available_cores(Path("/nowhere")) == 8
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert environment.available_cores(Path("/nowhere")) == 1 and environment.threads_of_rank(1) == 1
