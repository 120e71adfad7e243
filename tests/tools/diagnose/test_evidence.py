"""Reading logs: line numbers, kinds of lines, times, ranks, and lines that are noise."""

from __future__ import annotations

import time

import pytest

from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.evidence import LogFinding, Survey, findings_by_wording, survey_log, time_of
from megads.tools.diagnose.message_model import message_model, template
from megads.tools.diagnose.signature import Strength

OOM = "RuntimeError: CUDA error: out of memory"


def survey(text: str, block_bytes: int = 1 << 20) -> Survey:
    content = text.encode()
    return survey_log("job.log", [content[i : i + block_bytes] for i in range(0, len(content), block_bytes)])


def only(text: str) -> LogFinding:
    (found,) = survey(text).findings
    return found


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_blocks_do_not_matter(block_bytes: int) -> None:
    """Catches a line split at the end of a block, a lost last line, and line numbers that restart."""
    text = "".join(f"iteration {i} loss 2.{i}\n" for i in range(50)) + f"{OOM}\nbye"
    found = survey(text, block_bytes)
    assert [(one.line, one.text) for one in found.findings] == [(51, OOM)]
    assert (found.lines, found.num_bytes) == (52, len(text) + 1), "the last line gets a line break"
    assert sum(kind.count for kind in found.kinds.values()) == 52
    assert found.last_progress == 50


def test_lines_that_differ_in_digits_are_one_kind_but_exit_codes_count() -> None:
    """Catches a second exit code that is merged with the first, and one kind of line per training step."""
    text = "".join(f"step {i}\n" for i in range(1000)) + "".join(
        f"failed (exitcode: {code}) local_rank: 0 (pid: 7) of binary: x\n" for code in (1, -15, -9)
    )
    found = survey(text)
    assert len(found.kinds) == 3
    assert [(one.line, one.signature.cause, one.strength) for one in found.findings] == [
        (1001, Cause.process_killed_unknown, Strength.teardown),
        (1002, Cause.preempted_or_time_limit, Strength.cascade),
        (1003, Cause.process_killed_unknown, Strength.failure),
    ]


def test_templates_count_kinds_of_line() -> None:
    """Catches addresses, times, paths, ids or numbers that split one template into many."""
    first = (
        "[2026-01-02 03:04:05,678] rank 3 at 10.1.2.3:4567 wrote /data/run/step_10.pt in 1.5e-3 s, 0x7f3a99 deadbeef01"
    )
    second = "[2026-11-12 13:14:15,000] rank 12 at 10.9.8.7:1 wrote /scratch/a/b/c.pt in 20 s, 0xabc12 0123456789abcdef"
    assert (
        template(first)
        == template(second)
        == ("[<time>] rank <number> at <address> wrote <path> in <number> s, <hex> <hex>")
    )
    assert template("\x1b[31mred\x1b[0m  text ") == "red text"
    assert survey(f"{first}\n{second}\n").templates().most_common() == [(template(first), 2)]


@pytest.mark.parametrize(
    "line",
    [
        f"WARNING: {OOM}",
        f"[W1123 10:00:00.1 x.cpp:1] {OOM}",
        f"[W socket.cpp:697] {OOM}",
        f"{OOM}, skipping this batch",
        f"{OOM}; retrying in 3 s",
        f"UserWarning: {OOM}",
    ],
)
def test_warnings_weigh_less(line: str) -> None:
    """Catches a warning long before the end that is taken for the root cause."""
    assert only(line).strength < Strength.failure


def test_words_of_settings_count_in_errors_only() -> None:
    """Catches a remark about a setting, long before the end, that is taken for the root cause."""
    assert only("Using the pad token, as none was set.").strength < Strength.failure
    assert only("ValueError: no pad token is set").strength >= Strength.root


def test_warnings_of_nccl_and_the_kernel_weigh_in_full() -> None:
    """Catches errors that NCCL or the kernel logs as warnings and that are treated as harmless."""
    assert (
        only("node1:5:6 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<1> with error 12").strength
        == Strength.root
    )
    assert only("kernel: nfs: server nas not responding, still trying").strength >= Strength.root


def test_an_exception_in_a_destructor_is_noise() -> None:
    """Catches messages of the interpreter's shutdown that are taken for a failure."""
    found = only("Exception ignored in: <function __del__>\nTraceback (most recent call last):\nKeyError: 'x'\n")
    assert found.strength == Strength.noise


def test_quoted_source_is_no_message() -> None:
    """Catches quoted source code that raises an error, or compares with its message, taken for the error."""
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n'
        '    raise RuntimeError("CUDA out of memory")\nKeyError: 3\n'
    )
    assert [one.signature.cause for one in survey(text).findings] == [Cause.user_code_exception]
    prefixed = '[rank1]:   File "a.py", line 3, in f\n[rank1]:     if "No space left on device" in text:\n'
    assert survey(prefixed).findings == []
    direct = '  File "a.py", line 3, in f\nRuntimeError: CUDA out of memory\n'
    assert [one.signature.cause for one in survey(direct).findings] == [Cause.cuda_oom]


def test_source_behind_its_number_is_no_message() -> None:
    """Catches source code quoted by IPython and rich, and C++ stack frames, taken for the error."""
    for quoted in (
        "--> 733         raise RuntimeError('CUDA out of memory')",
        "    732             raise RuntimeError('CUDA out of memory')",
        "│ ❱ 301 │   │   raise HfHubHTTPError(str(e), response=response) from e",
        "frame #1: c10d::TCPStore::wait(timeout) + 0x1e1 (0x7f in /usr/lib/libtorch_cpu.so)",
    ):
        assert survey(f"{quoted}\n").findings == []


READER = "site-packages/streaming/base/format/mds/reader.py"


@pytest.mark.parametrize(
    "frame",
    [
        f'  File "/x/{READER}", line 145, in get_sample_data\n    return at[index]\n',
        f"/x/{READER} in get_sample_data(self, idx)\n    144   ok\n--> 145   return at[index]\n",
        f"File ~/x/{READER}:145, in MDSReader.get_sample_data(self, idx)\n--> 145   return at[index]\n",
        f"│ /x/{READER}:145 in get_sample_data │\n│ ❱ 145 │   return at[index] │\n",
    ],
    ids=["python", "ipython 7", "ipython 8", "rich"],
)
def test_frames_of_python_ipython_and_rich(frame: str) -> None:
    """Catches a notebook traceback that is not parsed, so that the failure is not attributed to the data reader."""
    assert only(f"{frame}\nIndexError: 7\n").signature.cause == Cause.data_corrupt


def test_a_check_that_somebody_wrote_is_of_a_setting() -> None:
    """Catches an error that the program raises itself classified like one of Python's, and vice versa."""

    def cause(source: str, error: str) -> Cause:
        return only(f'  File "/data/mine/train.py", line 3, in build\n    {source}\n{error}\n').signature.cause

    assert cause('raise TypeError("these two differ")', "TypeError: these two differ") == Cause.config_or_shape_error
    assert cause("assert args.kind in kinds", "AssertionError") == Cause.config_or_shape_error
    assert cause("assert found, 'nothing'", "AssertionError: nothing") == Cause.config_or_shape_error
    assert cause("return found + 1", "TypeError: these two differ") == Cause.user_code_exception
    assert cause("raise ValueError(1) from error", "TypeError: these two differ") == Cause.user_code_exception


def test_a_message_of_several_lines() -> None:
    """Catches an error classified without its continuation lines."""
    text = (
        "[rank0]: OSError: The archive that was passed at\n"
        "[rank0]:     /models/a.safetensors\n[rank0]:     does not contain valid metadata\n"
    )
    assert only(text).signature.cause == Cause.checkpoint_corrupt_or_mismatch
    assert only("OSError: The archive that was passed at\n").signature.cause == Cause.user_code_exception


def test_wording_judges_only_what_no_signature_knows() -> None:
    """Catches a line that matches a signature and is classified a second time by its wording."""
    known = "Traceback: the process was killed, exited with exit code 1\n"
    unknown = "the disk of the node is full, quota reached, giving up\n"
    assert [one.text for one in findings_by_wording(survey(known + unknown), message_model())] == [unknown.strip()]


def test_commands_that_a_script_goes_on_after() -> None:
    """Catches a failed removal, after which the script continues, that is taken for the root cause."""
    assert only("rm: cannot remove '/usr/compat': Read-only file system\n").strength == Strength.cascade
    assert only("cp: cannot create '/out/a': Read-only file system\n").strength == Strength.root


def test_training_that_goes_on_weakens() -> None:
    """Catches an error that is taken for the root cause although training continued after it."""
    steps = "".join(f"step {i} loss 2.1\n" for i in range(100))
    assert survey(f"{OOM}\n{steps}").last_progress == 101
    assert survey(f"{steps}{OOM}\n").last_progress == 100


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (f"[rank3]: {OOM}", 3),
        (f"[default12]: {OOM}", 12),
        ("[E ProcessGroupNCCL.cpp:481] [Rank 65] Watchdog caught collective operation timeout", 65),
        ("[E x.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 7] Watchdog caught collective operation timeout", 7),
        ("srun: error: node3: task 4: Killed", 4),
        ("failed (exitcode: -9) local_rank: 2 (pid: 1) of binary: x", 2),
        (OOM, None),
    ],
)
def test_ranks_of_lines(line: str, rank: int | None) -> None:
    """Catches a rank that is missed or invented."""
    assert only(line).rank == rank


def test_the_table_of_torchrun_names_the_rank_above_the_exit_code() -> None:
    """Catches the exit code of one rank assigned to another."""
    text = (
        "Failures:\n[1]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 2)\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 3)\n"
    )
    assert [(one.rank, one.strength) for one in survey(text).findings] == [
        (2, Strength.teardown),
        (5, Strength.failure),
    ]


@pytest.mark.parametrize(
    ("line", "month_day"),
    [
        ("2026-03-02 01:02:03,5 x", (3, 2)),
        ("[rank7]:[E302 01:02:03.5 ProcessGroupNCCL.cpp:1]", (3, 2)),
        ("E0302 01:02:03.5 99 api.py", (3, 2)),
        ("[E1119 01:02:03.5 x]", (11, 19)),
    ],
)
def test_times(line: str, month_day: tuple[int, int]) -> None:
    """Catches a time format that is not parsed, so that the first rank to fail is not recognized."""
    month, day = month_day
    assert time_of(line) == ((month - 1) * 31 + day - 1) * 86400 + 3600 + 120 + 3.5


def test_times_of_syslog_and_none() -> None:
    """Catches a syslog time that is not parsed."""
    assert time_of("Mar  2 01:02:03 node1 kernel: x") == (2 * 31 + 1) * 86400 + 3723
    assert time_of("nothing 12:00") is None


def test_a_line_without_a_time_has_that_before_it() -> None:
    """Catches tracebacks, which carry no time, ordered before all other lines."""
    found = only(f"2026-01-01 00:00:10 step 1\nx\n{OOM}\n")
    assert found.time_s == 10


def test_times_and_tracebacks_reach_over_blocks() -> None:
    """Catches a traceback or a time that is lost at a block boundary."""
    text = (
        "2026-01-01 00:00:10 step 1\nTraceback (most recent call last):\n"
        '  File "torch/utils/data/dataloader.py", line 3, in get\n    x()\nConnectionResetError: peer\n'
    )
    for block_bytes in (10, 1000):
        (found,) = survey(text, block_bytes).findings
        assert (found.signature.cause, found.time_s) == (Cause.dataloader_worker_killed, 10)


def test_speculation_is_no_evidence() -> None:
    """Catches a list of possible causes taken for the cause."""
    found = survey(
        "The actor is dead because its worker process has died. Some common causes include: (1) the process was killed "
        "by the OOM killer due to high memory usage\n"
    )
    assert [one.signature.cause for one in found.findings] == [Cause.process_killed_unknown]


def test_a_progress_bar_of_megabytes() -> None:
    """Catches a progress bar on one line that hides the error after it, or that takes minutes to search."""
    bar = "\r".join(f"Epoch 0: {i}%| | {i}/99999 [1.3it/s]" for i in range(100_000))
    begin = time.process_time()
    found = only(f"{bar}\r{OOM}\n")
    assert found.signature.cause == Cause.cuda_oom and len(found.text) < 5000
    assert time.process_time() - begin < 30


def test_crowded_logs_keep_to_suspicious_lines() -> None:
    """Catches memory that grows with a log of random text, and an error that is not found in it."""
    words = [f"{a}{b}{c}" for a in "bcdfgh" for b in "jklmpq" for c in "rstvwx"]
    lines = [f"sample {words[i % 216]} {words[i // 216 % 216]} {chr(97 + i % 26)}" for i in range(60_000)]
    found = survey("\n".join(lines) + f"\nno error, out of memory or exception here\n{OOM}\n", 1 << 18)
    assert len(found.kinds) <= 30_002 and [one.line for one in found.findings] == [60_002]
    assert found.lines == 60_002


def test_bytes_that_are_no_utf8() -> None:
    """Catches a log with invalid UTF-8 that cannot be read."""
    found = survey_log("job.log", [b"\xff\xfe\x80 RuntimeError: CUDA out of memory\n"])
    assert found.findings[0].signature.cause == Cause.cuda_oom
