"""Child processes, core binding, determinism and garbage collection of a rank, with real processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.runtime.environment import available_core_numbers, fix_nccl_algorithms
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.process import (
    GarbageCollectionHook,
    cores_of_rank,
    disable_reduced_precision_sums,
    make_deterministic,
    start_child,
)
from tests.command import REPOSITORY
from tests.distributed import run_ranks
from tests.parity import build_engine, scenario_with, step_batches

PARENT = """
import sys, time
from pathlib import Path
from megads.runtime.process import start_child
program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True))); " \
          "print('ready', flush=True); time.sleep(60)"
print(start_child(["-c", program], Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def wait_for_text(log: Path, text: str) -> None:
    for _ in range(600):
        if log.exists() and text in log.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came: {log.read_text() if log.exists() else 'no log'}")


def test_a_child_is_told_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Catches sweep points that keep training after their sweep was killed, so that the next sweep is refused."""
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for_text(log, "ready")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    child.wait(30)
    wait_for_text(log, "saved")


def test_a_child_keeps_to_its_cores_and_variables(tmp_path: Path) -> None:
    """Catches parallel sweep points that share cores, and a CUDA_VISIBLE_DEVICES that is not passed on."""
    core = min(os.sched_getaffinity(0))
    program = (
        "import os; print(os.sched_getaffinity(0), os.environ['CUDA_VISIBLE_DEVICES'], os.getpgid(0) == os.getpid())"
    )
    log = tmp_path / "deep" / "log"
    assert start_child(["-c", program], log, [core], {"CUDA_VISIBLE_DEVICES": "7"}).wait(60) == 0
    assert log.read_text() == f"{{{core}}} 7 True\n", "in a session of its own, out of the terminal's reach"


def machine(folder: Path, sockets: int, cores: int) -> list[int]:
    """Describes a machine with two threads per core as the kernel does: second threads come after all first ones."""
    count = sockets * cores
    for number in range(2 * count):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        place = number % count
        (topology / "physical_package_id").write_text(f"{place // cores}\n")
        (topology / "core_id").write_text(f"{place % cores}\n")
    return list(range(2 * count))


def test_the_threads_of_a_core_belong_to_one_rank(tmp_path: Path) -> None:
    """Catches cores that two ranks share, and a rank that spans two sockets."""
    cores = machine(tmp_path, sockets=2, cores=4)
    assert [cores_of_rank(cores, rank, 4, tmp_path) for rank in range(4)] == [
        [0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15],
    ]  # fmt: skip


def test_shares_are_equal_and_apart(tmp_path: Path) -> None:
    """Catches ranks with unequal or overlapping shares, and a binding where there are more ranks than cores."""
    cores = machine(tmp_path, sockets=1, cores=4)[1:]
    shares = [cores_of_rank(cores, rank, 3, tmp_path) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2] and len({core for share in shares for core in share}) == 6
    assert cores_of_rank(cores, 0, 8, tmp_path) == []


@pytest.mark.skipif(len(available_core_numbers()) < 2, reason="one core cannot be shared")
def test_existing_and_new_threads_are_bound() -> None:
    """Catches a thread pool that was started before the binding and still runs on all cores."""
    code = """
import os, threading
from megads.runtime.process import bind_to_own_cores
leave = threading.Event()
old = threading.Thread(target=leave.wait, daemon=True)
old.start()
own = bind_to_own_cores(1, 2)
tasks = {int(name) for name in os.listdir("/proc/self/task")}
assert len(tasks) >= 2 and all(sorted(os.sched_getaffinity(task)) == own for task in tasks), own
new = []
thread = threading.Thread(target=lambda: new.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join(); leave.set()
assert new == [own], new
print(*own)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(map(int, done.stdout.split())) < os.sched_getaffinity(0)


@pytest.mark.parametrize("theirs", [None, ":16:8"])
def test_deterministic_settings_apply_to_gpus_only(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a CPU run whose bits the setting changes, cuBLAS without a fixed workspace, a user's own workspace
    setting that is overwritten, and uninitialized memory that is filled."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", theirs or "")
    if theirs is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        make_deterministic(torch.device("cpu"))
        assert not torch.are_deterministic_algorithms_enabled()
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == theirs
        make_deterministic(torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (theirs or ":4096:8")
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("theirs", [None, ":16:8"])
def test_the_cublas_workspace_is_read_at_one_gemm(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a workspace setting that PyTorch parses at every GEMM, one that is removed before the first GEMM, and a
    user's own setting that is removed."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", theirs or "")
    if theirs is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seen: list[str | None] = []
    ones, fills = torch.ones, torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *sizes, **_: ones(*sizes))  # there is no GPU here
    monkeypatch.setattr(torch, "mm", lambda left, right: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    try:
        make_deterministic(torch.device("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == theirs
    assert seen == ([":4096:8"] if theirs is None else [])


@pytest.mark.parametrize(
    ("theirs", "allowed"),
    [(None, True), ("^NVLS", True), ("Ring,Tree", True), ("^Tree", False), ("Ring,NVLSTree", False)],
)
def test_nccl_does_not_sum_in_the_switch(theirs: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches gradients whose bits differ between runs on NVLink switches, and a user's NCCL_ALGO replaced."""
    monkeypatch.setenv("NCCL_ALGO", theirs or "")
    if theirs is None:
        monkeypatch.delenv("NCCL_ALGO")
    if allowed:
        fix_nccl_algorithms()
        assert os.environ["NCCL_ALGO"] == (theirs or "^NVLS,NVLSTree")
    else:
        with pytest.raises(ConfigError, match=r"NCCL_ALGO = .*train\.deterministic"):
            fix_nccl_algorithms()


def test_gemms_do_not_reduce_in_bf16() -> None:
    """Catches PyTorch's default, which lets cuBLAS round the partial sums of a split-K GEMM to bf16 or fp16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        disable_reduced_precision_sums()
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations of all collections so far."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()
    gc.unfreeze()


def step(number: int) -> StepInfo:
    return StepInfo(number, number, number, 1.0, 1.0, 1e-3, 1, 1, 1.0, 0.0, skipped=False, culprit="", batch_hash="")


class Cycle:
    """Reference cycle that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_at_fixed_steps(collections: list[int]) -> None:
    """Catches a rank that collects at steps of its own, so that the others wait, and a collector that stays off."""
    hook = GarbageCollectionHook(4)
    hook.on_start(TrainState())
    collections.clear()
    for number in range(3, 13):
        garbage = [Cycle() for _ in range(2000)]
        del garbage
        hook.on_step(step(number))
    assert collections == [1, 1, 1]
    hook.on_end(TrainState())
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_gc_null_leaves_collection_to_python(collections: list[int]) -> None:
    """Catches a collector that is off although the user asked for Python's default."""
    hook = GarbageCollectionHook(None)
    hook.on_start(TrainState())
    hook.on_step(step(50))
    assert gc.isenabled() and collections.count(2) == 0


def tensors_in_cycles(parallel: ParallelConfig, documents: bool) -> list[str]:
    """Returns the shapes of the tensors that three steps leave in reference cycles on this rank."""
    scenario = scenario_with(steps=6, masked=True, documents=documents, micro_batch_size=2)
    engine = build_engine(scenario, parallel)

    def train(steps: range) -> None:
        for number in steps:
            engine.step(step_batches(scenario, number, engine.grid.dp.rank, parallel.dp), scenario.lr)

    train(range(3))
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    train(range(3, 6))
    gc.collect()
    return [str(tuple(found.shape)) for found in gc.garbage if isinstance(found, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, sequence_parallel=True, recompute=Recompute.selective),
        ParallelConfig(pp=2, schedule=ScheduleName.zb_h1),
        ParallelConfig(dp=2, zero_stage=3, recompute=Recompute.full),
    ],
    ids=["tp2sp", "zb_h1", "zero3"],
)
def test_a_step_leaves_no_tensor_in_a_cycle(parallel: ParallelConfig) -> None:
    """Catches activations in reference cycles, which stay in memory until the next collection, 50 steps later."""
    assert run_ranks(tensors_in_cycles, 2, parallel, True) == [[], []]
