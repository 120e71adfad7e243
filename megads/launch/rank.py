"""One rank of a run: `python -m megads.launch.rank <run_dir> --digest <sha256>`, started by the launcher only.

Its log, its tie to the launcher, and the record that it leaves of a failure. Imports nothing heavy: the log must be in
place before torch is loaded.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megads.errors import DISK_FULL, EXIT_BUG, CheckpointError, MegadsError, RollBack
from megads.runtime.environment import RankEnvironment, launcher_pid, node_name, rank_environment, slurm_job
from megads.runtime.process import die_with_parent
from megads.runtime.rank_evidence import answer_requests
from megads.runtime.run_dir import exit_path, failure_path, rank_log_path, spare_path

_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "connection was closed",
    "broken pipe",
    "socket timeout",
    "recvbytes",
    "sendbytes",
    "timed out waiting",
    "application timeout caused pair closure",
    "remote process exited",
    "nccl communicator was aborted",
)


def start_rank(run_dir: Path) -> RankEnvironment:
    """Ties this process to its launcher and its log; the first thing a rank does."""
    environment = rank_environment()
    die_with_launcher(launcher_pid())
    leave_signals_to_the_launcher()
    redirect_output(rank_log_path(run_dir, environment.rank))
    faulthandler.enable()
    answer_requests(environment.heartbeats, environment.rank)
    sys.stdout.write(
        f"--- rank {environment.rank} of {environment.world_size}, pid {os.getpid()}, {time.strftime('%F %T%z')}, "
        f"node {node_name()}\n"
    )
    return environment


def leave_signals_to_the_launcher() -> None:
    """Ignores what SLURM sends to every process of a job that is to end: the launcher answers, and saves in time."""
    if slurm_job() is not None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


def run_rank(run_dir: Path, body: Callable[[], int]) -> NoReturn:
    """Runs the rank's work and leaves the process; never returns.

    A returned code is recorded and the process exits 0, so that the agent does not kill peers that are still leaving.
    An exception is recorded and the process ends at once: no further collectives, no interpreter shutdown, which could
    hang in a library's exit handler.
    """
    environment = rank_environment()
    rank = environment.rank
    try:
        code = _code_of(body)
        _write_json(exit_path(run_dir, rank, environment.lease), {"rank": rank, "exit_code": code})
        _leave(0)
    except BaseException as error:
        _fail(run_dir, environment, error)


def _code_of(body: Callable[[], int]) -> int:
    """A rollback is a decision of all ranks, which events.jsonl records, and no failure of one."""
    try:
        return body()
    except RollBack as decided:
        sys.stdout.write(f"{decided}\n")
        return decided.exit_code


def is_lost_peer(error: BaseException) -> bool:
    """Tells whether an error only says that another rank is gone, so that the cause is to be found there."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MegadsError):
            return False
        names = {cls.__name__ for cls in type(seen).__mro__}
        text = str(seen).lower()
        if names & _LOST_PEER_TYPES:
            return True
        if isinstance(seen, RuntimeError | OSError) and any(part in text for part in _LOST_PEER_TEXTS):
            return True
        seen = seen.__cause__
    return False


def _fail(run_dir: Path, environment: RankEnvironment, error: BaseException) -> NoReturn:
    """Records why this rank failed, then ends it."""
    full = isinstance(error, OSError) and error.errno in DISK_FULL
    code = error.exit_code if isinstance(error, MegadsError) else CheckpointError.exit_code if full else EXIT_BUG
    record = {
        "rank": environment.rank,
        "exit_code": code,
        "kind": type(error).__name__,
        "user_error": full or isinstance(error, MegadsError),
        "message": str(error),
        "monotonic_s": time.monotonic(),
        "time_s": time.time(),
        "consequence": is_lost_peer(error),
    }
    try:
        _write_json(failure_path(run_dir, environment.rank, environment.lease), record)
        traceback.print_exception(error)
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process without the interpreter's shutdown, in which a thread of a process group may still abort."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _write_json(path: Path, record: dict[str, object]) -> None:
    """Writes a small file that appears whole or not at all; beside the node's temporary files if the disk is full."""
    try:
        _replace(path, json.dumps(record) + "\n")
    except OSError:
        spare = spare_path(path)
        spare.parent.mkdir(mode=0o700, exist_ok=True)
        _replace(spare, json.dumps(record) + "\n")


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def die_with_launcher(parent: int | None) -> None:
    """Asks the kernel to kill this process when the launcher dies, even by SIGKILL.

    Ranks have sessions of their own, so no terminal signal reaches an orphan. The launcher of a forked rank is the
    server that forked it, which dies with the launcher.

    Args:
        parent: pid of the launcher; None where there is none to die with.
    """
    if parent is not None:
        die_with_parent(parent, signal.SIGKILL)


def redirect_output(path: Path) -> None:
    """Sends file descriptors 1 and 2, and so C++ libraries too, to the end of a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = map(_log_stream, (1, 2))


def _log_stream(descriptor: int) -> io.TextIOWrapper:
    """Whatever the locale, no character is a reason to fail."""
    binary = io.BufferedWriter(_Log(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _Log(io.FileIO):
    """A rank's log: what a full disk does not take is lost, and no reason to end the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            return len(memoryview(data).cast("B"))


def main() -> NoReturn:
    """Reads the frozen config of the run directory and trains."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.rank")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--digest", required=True, help="sha256 that the frozen config must have")
    parser.add_argument("--entry", default="megads.train:train", help="module:function to run; tests name their own")
    arguments = parser.parse_args()
    start_rank(arguments.run_dir)
    run_rank(arguments.run_dir, lambda: _train(arguments.run_dir, arguments.digest, arguments.entry))


def _train(run_dir: Path, digest: str, entry: str) -> int:
    """Checks that this rank reads the config that the launcher froze, then runs the entry."""
    # Imported after the log is open, so that a failing import is in it.
    from megads.errors import ConfigError
    from megads.frozen_config import config_digest, load_frozen
    from megads.runtime.run_dir import CONFIG_FILE

    config = load_frozen(run_dir / CONFIG_FILE)
    found = config_digest(config)
    if found != digest:
        raise ConfigError(
            f"{run_dir / CONFIG_FILE} has digest {found[:8]}, the launcher froze {digest[:8]}: "
            "the file changed during the start, or the ranks see another file system; start again"
        )
    # Only now: this is the config that the user's own command line froze.
    config.settle_plugins()
    module, function = entry.split(":")
    return int(getattr(importlib.import_module(module), function)(config, run_dir))


if __name__ == "__main__":
    main()
