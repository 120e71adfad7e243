"""Process of one rank: `python -m megads.launch.rank <run_dir> --digest <sha256>`, started only by the launcher.

Sets up the rank's log, ends the rank when the launcher dies, and records a failure. It imports nothing heavy, because
the log must be open before torch is imported.
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
from typing import TYPE_CHECKING, Any, NoReturn

from megads.errors import DISK_FULL, EXIT_BUG, CheckpointError, ConfigError, MegadsError, RollBack
from megads.runtime.environment import (
    RankEnvironment,
    launcher_pid,
    node_name,
    rank_environment,
    set_variables,
    slurm_job,
)
from megads.runtime.heartbeat import answer_requests
from megads.runtime.own_folder import make_own
from megads.runtime.process import die_with_parent
from megads.runtime.run_dir import exit_path, failure_path, rank_log_path, spare_path

if TYPE_CHECKING:
    from megads.runtime.config import ClusterConfig

TRAIN = "megads.train.loop:train"
"""What a rank runs, as module:function."""
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
    """Binds this process to the life of its launcher and opens its log; called first in a rank."""
    environment = rank_environment()
    die_with_launcher(launcher_pid())
    leave_signals_to_the_launcher()
    redirect_output(rank_log_path(run_dir, environment.rank))
    faulthandler.enable()
    if not set_variables("PYTHONBREAKPOINT"):
        sys.breakpointhook = _refuse_breakpoint
    answer_requests(environment.heartbeats, environment.rank)
    sys.stdout.write(
        f"--- rank {environment.rank} of {environment.world_size}, pid {os.getpid()}, {time.strftime('%F %T%z')}, "
        f"node {node_name()}\n"
    )
    return environment


def _refuse_breakpoint(*_args: Any, **_options: Any) -> NoReturn:
    """Replaces breakpoint(): pdb would read from the closed standard input, and end the rank without an explanation."""
    raise ConfigError(
        "breakpoint() in a rank, which has no terminal: use cluster.in_process=true for a run of one rank, or "
        "cluster.debug_rank=<rank> (docs/debugging.md)"
    )


def leave_signals_to_the_launcher() -> None:
    """Ignores the signals that SLURM sends to every process of an ending job; the launcher handles them and saves."""
    if slurm_job() is not None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


def run_rank(run_dir: Path, body: Callable[[], int]) -> NoReturn:
    """Runs the rank's work and exits the process; never returns.

    A returned exit code is recorded and the process exits with 0, so that the agent does not kill peers that are still
    exiting. An exception is recorded and the process exits immediately, without further collectives and without the
    interpreter's shutdown, which could hang in a library's exit handler.
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
    """Exit code of the body; a rollback is not a failure but a decision of all ranks, recorded in events.jsonl."""
    try:
        return body()
    except RollBack as decided:
        sys.stdout.write(f"{decided}\n")
        return decided.exit_code


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether an error only means that another rank is gone, which then is the root cause."""
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
    """Records why this rank failed, then exits."""
    record = failure_record(environment.rank, error)
    try:
        _write_json(failure_path(run_dir, environment.rank, environment.lease), record)
        traceback.print_exception(error)
    finally:
        _leave(record["exit_code"])


def failure_record(rank: int, error: BaseException) -> dict[str, Any]:
    """Returns the fields of `megads.launch.rank_outcome.FailureRecord` for an exception, with its notes."""
    full = isinstance(error, OSError) and error.errno in DISK_FULL
    code = error.exit_code if isinstance(error, MegadsError) else CheckpointError.exit_code if full else EXIT_BUG
    return {
        "rank": rank,
        "exit_code": code,
        "kind": type(error).__name__,
        "user_error": full or isinstance(error, MegadsError),
        "message": "\n  ".join([str(error), *getattr(error, "__notes__", ())]),
        "monotonic_s": time.monotonic(),
        "time_s": time.time(),
        "consequence": is_lost_peer(error),
    }


def _leave(code: int) -> NoReturn:
    """Exits without the interpreter's shutdown, during which a thread of a process group may abort."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _write_json(path: Path, record: dict[str, object]) -> None:
    """Writes a small file atomically; to the node's temporary folder if the disk is full."""
    try:
        _replace(path, json.dumps(record) + "\n")
    except OSError:
        spare = spare_path(path)
        make_own(spare.parent)
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

    Ranks have their own sessions, so no terminal signal reaches an orphan. For a forked rank the parent is the rank
    server, which dies with the launcher.

    Args:
        parent: pid of the launcher; None does nothing.
    """
    if parent is not None:
        die_with_parent(parent, signal.SIGKILL)


def redirect_output(path: Path) -> None:
    """Redirects file descriptors 1 and 2, which C++ libraries use too, to append to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = map(_log_stream, (1, 2))


def _log_stream(descriptor: int) -> io.TextIOWrapper:
    """Text stream on the log that encodes every character, whatever the locale."""
    binary = io.BufferedWriter(_Log(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _Log(io.FileIO):
    """A rank's log; output that does not fit on a full disk is dropped instead of ending the run."""

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
    parser.add_argument("--entry", default=TRAIN, help="module:function to run; overridden in tests")
    arguments = parser.parse_args()
    start_rank(arguments.run_dir)
    run_rank(arguments.run_dir, lambda: train_frozen(arguments.run_dir, arguments.digest, arguments.entry))


def train_frozen(run_dir: Path, digest: str, entry: str, between_steps: Callable[[], None] | None = None) -> int:
    """Checks that this rank reads the config that the launcher froze, then runs the entry.

    Args:
        run_dir: the run directory.
        digest: sha256 that the frozen config must have.
        entry: module:function to run.
        between_steps: what the function calls before the first and after every step; None in a process of its own.
    """
    # Imported after the log is open, so that a failing import is logged.
    from megads.config.frozen import config_digest, load_frozen
    from megads.runtime.run_dir import CONFIG_FILE

    config = load_frozen(run_dir / CONFIG_FILE)
    found = config_digest(config)
    if found != digest:
        raise ConfigError(
            f"{run_dir / CONFIG_FILE} has digest {found[:8]}, the launcher froze {digest[:8]}: "
            "the file changed during the start, or the ranks see another file system; start again"
        )
    # Only after the check: plugins come from the config that the user's own command line froze.
    config.resolve_plugins()
    if config.cluster.debug_rank is not None:
        _debug(config.cluster, run_dir)
    module, function = entry.split(":")
    more = {} if between_steps is None else {"between_steps": between_steps}
    return int(getattr(importlib.import_module(module), function)(config, run_dir, **more))


def _debug(cluster: ClusterConfig, run_dir: Path) -> None:
    """Lets this rank wait for a debugger if it is the one to debug."""
    from megads.runtime.optional_tools import require_tool

    debugger = require_tool("debug.debugger", f"cluster.debug_rank={cluster.debug_rank}")
    rank = rank_environment().rank
    if rank == cluster.debug_rank:
        debugger.wait_for_debugger(run_dir, rank, cluster.debug_port)
    else:
        debugger.ignore_breakpoints()


if __name__ == "__main__":
    main()
