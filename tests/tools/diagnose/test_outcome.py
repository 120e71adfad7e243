"""Whether a log shows a failure at all, and what a verdict says about restarts and culprits."""

from __future__ import annotations

import pytest

from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.decision import Diagnosis, DiagnosisOutcome, decide
from megads.tools.diagnose.evidence import survey_log
from tests.tools.diagnose.healthy_logs import FINISHED, TRAINING


def of(text: str) -> Diagnosis:
    return decide([survey_log("job.log", [text.encode()])])


@pytest.mark.parametrize("steps", [3, 200])
@pytest.mark.parametrize("trainer", TRAINING)
def test_a_log_that_ends_while_it_trains(trainer: str, steps: int) -> None:
    """Catches a warning of a healthy run named as the reason of its end."""
    found = of(TRAINING[trainer](steps))
    assert (found.outcome, found.cause) == (DiagnosisOutcome.no_cause, None)
    assert found.restartable and "last checkpoint" in found.advice


@pytest.mark.parametrize("steps", [3, 200])
@pytest.mark.parametrize("trainer", FINISHED)
def test_a_log_whose_end_says_that_training_is_over(trainer: str, steps: int) -> None:
    """Catches a finished run for which a restart or a change is advised."""
    found = of(FINISHED[trainer](steps))
    assert (found.outcome, found.cause, found.culprit) == (DiagnosisOutcome.no_failure, None, "")


@pytest.mark.parametrize("trainer", TRAINING)
def test_every_start_of_a_healthy_log(trainer: str) -> None:
    """Catches a warning that is a verdict as long as few lines follow it."""
    lines = TRAINING[trainer](2).splitlines(keepends=True)
    for end in range(1, len(lines) + 1):
        found = of("".join(lines[:end]))
        assert found.cause is None, lines[:end][-1]


def test_a_failure_after_the_training_is_still_one() -> None:
    """Catches a crash at the end of a finished run passed over, and the usual noise of its end taken for one."""
    log = FINISHED["torchtitan"](20)
    crash = "Fatal Python error: Segmentation fault\n"
    assert of(log + crash).cause is Cause.process_killed_unknown
    noise = "[rank3]:[W612] Connection closed by peer\n"
    assert of(log + noise).outcome is DiagnosisOutcome.no_failure


def test_an_error_that_nobody_knows_is_shown() -> None:
    """Catches a harmless last line shown instead of a line that is marked as an error."""
    found = of("step 3 loss 2.5\nERROR the flux of %CFS-7 is out of phase\nbye\n")
    assert (found.outcome, found.cause) == (DiagnosisOutcome.no_cause, None)
    assert "flux" in found.evidence[0].text and "marked as errors" in found.advice


def test_a_failure_that_training_survived_is_no_verdict() -> None:
    """Catches an error of hours ago named as the reason why a log ends."""
    steps = "".join(f"step {i} loss 2.5\n" for i in range(200))
    found = of(f"step 0 loss 2.5\nOSError: [Errno 5] Input/output error: '/data/x'\n{steps}")
    assert (found.outcome, found.cause, found.candidates) == (DiagnosisOutcome.no_cause, None, (Cause.filesystem_io,))


@pytest.mark.parametrize(
    ("line", "cause", "restartable"),
    [
        ("[rank3]:[E ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=8, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
         Cause.nccl_timeout_hang, True),
        ("n1:577:5902 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<33092> with "
         "error 12, opcode 0, len 0, vendor err 129 (Recv)", Cause.nccl_remote_or_network, True),
        ("mlx5_core 0000:86:00.0: mlx5_2: Port: 1 Link DOWN", Cause.nccl_remote_or_network, True),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect "
         "to (node01, 29500).", Cause.port_or_rendezvous, True),
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", Cause.port_or_rendezvous, True),
        # What a configuration or a program gets wrong, it gets wrong again.
        ("n1:5:5 [0] bootstrap.cc:39 NCCL WARN Bootstrap : no socket interface found", Cause.nccl_remote_or_network,
         False),
        ("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR "
         "expected, but not set", Cause.port_or_rendezvous, False),
        ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
         "CollectiveFingerPrint(OpType=ALLREDUCE, TensorShape=[4]), but Rank 1 is running collective: BROADCAST",
         Cause.nccl_timeout_hang, False),
    ],
)  # fmt: skip
def test_whether_a_restart_helps(line: str, cause: Cause, restartable: bool) -> None:
    """Catches "does not help" for a passing fault, and "is enough" for one that comes again."""
    found = of(line + "\n")
    assert (found.cause, found.restartable) == (cause, restartable)


ROOT_CAUSE = """\
RuntimeError: CUDA error: uncorrectable ECC error encountered
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2024-05-01_10:00:03
  host      : worker-116
  rank      : 7 (local_rank: 7)
  exitcode  : -6 (pid: 43)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 43
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2024-05-01_10:00:01
  host      : worker-116
  rank      : 6 (local_rank: 6)
  exitcode  : 1 (pid: 42)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(
    ("log", "cause", "culprit"),
    [
        (ROOT_CAUSE, Cause.cuda_ecc_or_xid, "rank 6"),
        # torchrun killed rank 0, which did not end, after the failure of rank 6.
        ("Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 7)\n  error_file: <N/A>\n"
         "  traceback : Signal 9 (SIGKILL) received by PID 7\n" + ROOT_CAUSE[ROOT_CAUSE.index("Root Cause"):],
         Cause.process_killed_unknown, "rank 6"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]:   File \"/w/train.py\", line 3, in main\n"
         "[rank1]: KeyError: 'x'\n", Cause.user_code_exception, "rank 1"),
        ("[rank0]: step 3\n[rank1]: Traceback (most recent call last):\n[rank1]:   File \"/w/a.py\", line 3, in main\n"
         "[rank1]:     raise ValueError(\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 G\n",
         Cause.cuda_oom, "rank 1"),
        ("srun: error: node01: task 0: Out Of Memory\n", Cause.host_oom_kill, "node01"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
         "srun: error: node01: task 0: Out Of Memory\n", Cause.host_oom_kill, "node01"),
        ("slurmstepd: error: *** STEP 7.0 ON node01 CANCELLED AT 2024-05-01T10:00:00 DUE TO NODE FAILURE, SEE "
         "SLURMCTLD LOG FOR DETAILS ***\n", Cause.preempted_or_time_limit, "node01"),
        ("slurmstepd: error: *** JOB 7 ON node01 CANCELLED AT 2024-05-01T10:00:00 ***\n",
         Cause.preempted_or_time_limit, "node01"),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
         "slurmstepd: error: *** STEP 7.0 ON node01 CANCELLED AT 2024-05-01T10:00:00 ***\n",
         Cause.preempted_or_time_limit, "node01"),
        ("(worker-116) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n", Cause.cuda_oom,
         "worker-116"),
        ("worker-116: RuntimeError: CUDA error: uncorrectable ECC error encountered\n", Cause.cuda_ecc_or_xid,
         "worker-116"),
        ("worker-116:577:5902 [3] misc/strongstream.cc:424 NCCL WARN Cuda failure 'uncorrectable ECC error'\n",
         Cause.cuda_ecc_or_xid, "worker-116"),
        # Either end of a connection may be at fault.
        ("worker-116:577:5902 [3] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<33092> "
         "with error 12, opcode 0, len 0, vendor err 129\n", Cause.nccl_remote_or_network, ""),
    ],
)  # fmt: skip
def test_culprits_that_a_log_names(log: str, cause: Cause, culprit: str) -> None:
    """Catches a rank or node that is in the log but not in the verdict."""
    found = of(log)
    assert (found.cause, found.culprit) == (cause, culprit)


def test_a_loss_that_diverged() -> None:
    """Catches a run whose loss rose and stayed high, read as killed; a spike that passed is none."""
    calm = "".join(f"step {i} | loss {3 - i / 200:.3f} | lr 1e-3\n" for i in range(200))
    high = "".join(f"step {i} | loss {7.5 + i % 3 / 10:.3f} | lr 1e-3\n" for i in range(200, 240))
    found = of(calm + high)
    assert (found.cause, found.evidence[0].line) == (Cause.nan_or_loss_divergence, 201)
    assert of(calm + high + calm).cause is None
    assert of(calm + "step 201 | loss nan | lr 1e-3\nstep 202 | loss nan | lr 1e-3\n").cause is (
        Cause.nan_or_loss_divergence
    )


def test_a_job_that_fell_silent() -> None:
    """Catches hours without a step before the scheduler ended a job, read as killed or as a usual time limit."""
    steps = "".join(f"2024-05-01 10:{i // 6:02d}:{i % 6 * 10:02d} step {i} loss 2.5\n" for i in range(300))
    end = "slurmstepd: error: *** JOB 7 ON node01 CANCELLED AT 2024-05-01T{} DUE TO TIME LIMIT ***\n"
    found = of(steps + end.format("16:00:00"))
    assert (found.cause, found.restartable) == (Cause.nccl_timeout_hang, True)
    assert "no step" in found.evidence[0].text
    assert of(steps + end.format("10:50:20")).cause is Cause.preempted_or_time_limit
    assert of(f"{steps}2024-05-01 16:00:00 no output of the job for 300 minutes\n").cause is Cause.nccl_timeout_hang
