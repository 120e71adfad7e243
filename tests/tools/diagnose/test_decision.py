"""Root cause over all ranks: causes before consequences, earlier before later, and the culprit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megads.tools.diagnose.causes import Cause, Domain
from megads.tools.diagnose.decision import CauseBasis, Diagnosis, DiagnosisOutcome, decide
from megads.tools.diagnose.evidence import Survey, survey_log
from tests.tools.diagnose.failing import WAYS


def log(name: str, text: str, rank: int | None = None) -> Survey:
    return survey_log(name, [text.encode()], rank)


def test_the_cause_is_not_the_loudest_line() -> None:
    """Catches the many lines of the surviving ranks taken for the root cause."""
    lost = "2026-01-01 00:00:01 RuntimeError: Connection closed by peer [10.0.0.2]:31022\n"
    watchdog = "2026-01-01 00:00:02 [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\n" * 20
    oom = "2026-01-01 00:00:09 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    found = decide([log("rank_0", lost + watchdog, 0), log("rank_1", watchdog, 1), log("rank_2", oom, 2)])
    assert (found.cause, found.culprit, found.domain, found.restartable) == (
        Cause.cuda_oom,
        "rank 2",
        Domain.framework,
        False,
    )
    assert found.evidence[0].file == "rank_2" and found.evidence[0].line == 1
    assert found.candidates == (Cause.nccl_timeout_hang, Cause.nccl_remote_or_network)


def test_of_equal_messages_the_first_in_time_counts() -> None:
    """Catches the lowest rank blamed although another rank failed first."""
    early, late = "2026-01-01 00:00:05 KeyError: 'a'\n", "2026-01-01 00:00:06 IndexError: b\n"
    assert decide([log("a", late, 0), log("b", early, 1)]).culprit == "rank 1"
    assert decide([log("a", early, 0), log("b", late, 1)]).culprit == "rank 0"
    assert decide([log("a", "IndexError: b\n", 0), log("b", early, 1)]).culprit == "rank 0", "no time: by order"


def test_what_training_survived_comes_after_what_ended_it() -> None:
    """Catches a handled error named as the root cause of another one days later."""
    steps = "".join(f"step {i} loss 2.5\n" for i in range(200))
    found = decide(
        [log("a", f"torch.OutOfMemoryError: CUDA out of memory\n{steps}OSError: [Errno 28] No space left on device\n")]
    )
    assert found.cause == Cause.disk_full


def test_exit_codes_of_torchrun() -> None:
    """Catches a killed rank hidden by the signals that torchrun's agent sends to the others."""
    text = (
        "W0920 09:10:41.1 1 api.py:900] Sending process 8 closing signal SIGTERM\n"
        "E0920 09:10:42.1 1 api.py:869] failed (exitcode: -9) local_rank: 4 (pid: 9) of binary: python\n"
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 8)\n"
        "  traceback : Signal 15 (SIGTERM) received by PID 8\n"
    )
    found = decide([log("a", text)])
    assert (found.cause, found.culprit, found.restartable) == (Cause.process_killed_unknown, "rank 4", True)


def test_torchruns_first_failed_rank_is_blamed_for_an_exception_of_none() -> None:
    """Catches a culprit that is missed because only torchrun's agent names it."""
    text = (
        "IndexError: 3\nERROR:torch.distributed.elastic:failed (exitcode: 1) local_rank: 2 (pid: 9) of binary: python\n"
    )
    found = decide([log("a", text)])
    assert (found.cause, found.culprit) == (Cause.user_code_exception, "rank 2")


@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("May 19 07:08:57 node07 kernel: NVRM: Xid (PCI:0000:10:1c): 79, pid=1, GPU has fallen off the bus.", "node07"),
        ("slurmstepd: error: *** JOB 7 ON node12 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME LIMIT ***", "node12"),
        ("Warning: NCCL EP timeout for dispatch receive, rank 2, local_expert_idx 7, src_rank 3", "rank 3"),
        ("RuntimeError: CUDA out of memory", ""),
    ],
)
def test_whom_a_line_blames(line: str, culprit: str) -> None:
    """Catches a node or rank that the message names but the diagnosis misses."""
    assert decide([log("a", line)]).culprit == culprit


def test_hardware_has_the_last_word() -> None:
    """Catches the program's error named instead of the hardware fault that the kernel reports a second later."""
    program = "2026-01-01 00:00:01 RuntimeError: CUDA error: an illegal memory access was encountered\n"
    kernel = (
        "Jan  1 00:00:02 n3 kernel: NVRM: Xid (PCI:0000:4f:00): 48, pid=1, An uncorrectable double bit error (DBE)\n"
    )
    found = decide([log("rank_0", program, 0), log("kern.log", kernel)])
    assert (found.cause, found.culprit) == (Cause.cuda_ecc_or_xid, "n3")


def test_a_tracker_that_fails_at_the_end_is_not_the_cause() -> None:
    """Catches an error of a tracker during shutdown taken for the root cause."""
    text = (
        "Traceback (most recent call last):\nKeyError: 'x'\nwandb: ERROR Problem finishing run\n"
        "Error in atexit._run_exitfuncs:\nTraceback (most recent call last):\n"
        "ConnectionRefusedError: [Errno 111] Connection refused\n"
    )
    assert decide([log("a", text)]).cause == Cause.user_code_exception


def test_an_exception_that_introduces_another() -> None:
    """Catches the wrapper taken for the cause where the next line names it, and the wrapper ignored where none does."""
    wrapper = "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n"
    inner = "RuntimeError: Triton Error [CUDA]: device kernel image is invalid\n"
    assert decide([log("a", wrapper + inner)]).cause == Cause.driver_mismatch_or_no_gpu
    found = decide([log("a", wrapper + "AttributeError: 'int' object has no attribute 'meta'\n")])
    assert found.cause == Cause.import_or_build_error


def test_that_a_program_was_aborted_says_less_than_what_it_threw() -> None:
    """Catches the abort taken for the cause because it came first, and no cause where only the abort is logged."""
    aborted = "terminate called after throwing an instance of 'gloo::IoException'\nFatal Python error: Aborted\n"
    thrown = "  what():  [gloo/transport/tcp/pair.cc:9] Connection closed by peer [10.0.0.1]:5\n"
    assert decide([log("a", aborted + thrown)]).cause == Cause.nccl_remote_or_network
    assert decide([log("a", aborted)]).cause == Cause.process_killed_unknown
    crashed = decide([log("a", "Fatal Python error: Segmentation fault\n" + thrown)])
    assert crashed.cause == Cause.process_killed_unknown


@pytest.mark.parametrize("error", ["ConnectionResetError(104, 'Connection reset by peer')", "EOFError()"])
def test_a_traceback_cut_short_by_the_handler_of_dead_workers(error: str) -> None:
    """Catches a dataloader worker's death taken for an error in user code where a signal interrupted the traceback."""
    name = error.split("(", maxsplit=1)[0]
    printed = f"object refcount : 2\nobject type name: {name}\nobject repr     : {error}\nlost sys.stderr\n"
    found = decide([log("a", "Traceback (most recent call last):\n" + printed)])
    assert (found.cause, found.basis) == (Cause.dataloader_worker_killed, CauseBasis.signature)


def test_what_slurm_ends_because_a_task_left_is_no_preemption() -> None:
    """Catches a cancelled step taken for a failed task's cause, and an external cancellation taken for a failure."""
    cancelled = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2024-05-01T10:00:00 ***\n"
    killed = "srun: error: n1: tasks 1-35: Killed\n"
    left = "srun: error: n1: task 0: Exited with exit code 1\n"
    assert decide([log("a", cancelled + killed)]).cause == Cause.preempted_or_time_limit
    found = decide([log("a", left + cancelled + killed)])
    assert (found.cause, found.restartable) == (Cause.process_killed_unknown, False)
    assert decide([log("a", left + cancelled.replace(" ***\n", " DUE TO TIME LIMIT ***\n"))]).restartable


def test_silence() -> None:
    """Catches a cause named for a log that ends without a message, or its last lines not shown."""
    found = decide([log("a", "step 1\nstep 2\nhello\n")])
    assert (found.outcome, found.cause, found.confidence) == (DiagnosisOutcome.no_cause, None, 0.0)
    assert [evidence.text for evidence in found.evidence] == ["hello"]


HEALTHY = """\
Loading checkpoint shards: 100%
optimizer state loaded
tokenizer vocab size 50257
moving model to cuda device
Port 29500 chosen for rendezvous
Waiting for all ranks at barrier
compiling the model with inductor, this takes a while
Saving model checkpoint to out/checkpoint-500
"""


def test_what_a_healthy_run_says_is_no_cause() -> None:
    """Catches a run killed without a message whose last normal line is taken for the cause."""
    lines = HEALTHY.splitlines(keepends=True)
    for end in range(1, len(lines) + 1):
        found = decide([log("a", "".join(lines[:end]))])
        assert (found.cause, found.basis) == (None, CauseBasis.nothing)


def test_json_has_the_documented_keys() -> None:
    """Catches a renamed or missing key that programs rely on."""
    content = decide([log("a", "KeyError: 1\n")]).as_json()
    assert list(content)[:6] == ["cause", "domain", "restartable", "culprit", "evidence", "advice"]
    assert content["evidence"] == [{"file": "a", "line": 1, "text": "KeyError: 1"}]


CAUSES = {
    "crash": Cause.process_killed_unknown,
    "port_in_use": Cause.port_or_rendezvous,
    "no_room": Cause.disk_full,
    "no_memory": Cause.host_oom_kill,
    "truncated_checkpoint": Cause.checkpoint_corrupt_or_mismatch,
    "other_model": Cause.checkpoint_corrupt_or_mismatch,
    "truncated_safetensors": Cause.checkpoint_corrupt_or_mismatch,
    "missing_module": Cause.import_or_build_error,
    "wrong_shape": Cause.config_or_shape_error,
    "token_out_of_range": Cause.config_or_shape_error,
    "not_a_number": Cause.nan_or_loss_divergence,
    "damaged_archive": Cause.data_corrupt,
    "worker_killed": Cause.dataloader_worker_killed,
    "wrong_argument": Cause.config_or_shape_error,
    "missing_key": Cause.user_code_exception,
    "one_rank_killed": Cause.process_killed_unknown,
    "one_rank_raises": Cause.user_code_exception,
}
UNDER_TORCHRUN = ("one_rank_killed", "one_rank_raises")


def really_failed(way: str) -> Diagnosis:
    module = ["tests.tools.diagnose.failing", way]
    command = ["-m", *module]
    if way in UNDER_TORCHRUN:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *module]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, *command], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    return decide([log(way, done.stdout + done.stderr)])


@pytest.mark.parametrize("way", ["crash", "missing_module", "damaged_archive", "wrong_argument", "missing_key"])
def test_what_really_failed(way: str) -> None:
    """Catches a signature that differs from the real message."""
    assert really_failed(way).cause == CAUSES[way]


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way not in UNDER_TORCHRUN])
def test_what_really_failed_in_torch(way: str) -> None:
    """Catches a message that a new version of torch words differently."""
    assert really_failed(way).cause == CAUSES[way]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("way", UNDER_TORCHRUN)
def test_what_really_failed_under_torchrun(way: str) -> None:
    """Catches a peer blamed instead of the rank that failed."""
    found = really_failed(way)
    assert (found.cause, found.culprit) == (CAUSES[way], "rank 1")
