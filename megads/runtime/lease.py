"""Lease of a run directory: only one start of the run may write to it at a time.

File locks do not work across nodes on every file system, and outlive their holder if a node is lost. So each start
takes the next number: <run_dir>/lease/00000007.json is created by a hard link, which is atomic on network file systems
too, names its holder, and is touched every ten seconds. The highest number holds the lease. A launcher that finds a
live holder is refused. A requeued SLURM job takes the lease over from its earlier start, whose ranks find their file
gone before the next step and before they commit a checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megads.errors import ConfigError, Fenced
from megads.runtime import environment
from megads.runtime.files import atomic_writer, create_once
from megads.runtime.run_dir import create
from megads.runtime.slurm import SlurmJob, ask_job

BEAT_S = 10.0
# A holder whose file is not touched for this long is dead; large enough for a slow file system.
_SILENT_S = 3.5 * BEAT_S
_POLL_S = 0.5
_GONE_STATES = ("", "PENDING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
                "DEADLINE", "OUT_OF_MEMORY", "REQUEUED", "REVOKED")  # fmt: skip


@dataclass(frozen=True)
class Holder:
    """Holder of the lease of a run directory.

    Attributes:
        number: number of the start, from 1.
        node: node of the launcher.
        pid: process id of the launcher.
        machine: id of the node's boot and PID namespace, within which the pid is unique.
        born: start time of the launcher's process in kernel ticks, as pids are reused.
        job: SLURM job; None outside of SLURM.
        released: whether the start is over.
        readable: False if the file is damaged and only its number is known.
    """

    number: int
    node: str
    pid: int
    machine: str
    born: int
    job: SlurmJob | None = None
    released: bool = False
    readable: bool = True

    def __str__(self) -> str:
        if not self.readable:
            return f"a start whose file {self.number:08d}.json in the folder lease cannot be read, but is still updated"
        if self.job is not None:
            return f"SLURM job {self.job.id} (restart {self.job.restarts}, process {self.pid} on {self.node})"
        return f"process {self.pid}" + ("" if self.machine == machine_id() else f" on {self.node}")

    @property
    def remedy(self) -> str:
        """The command that ends the holder."""
        if not self.readable:
            return "find it on the nodes that share the folder"
        return f"kill {self.pid}" if self.job is None else f"scancel {self.job.id}"


class Beats:
    """A thread that calls `beat` at intervals, so that other processes see that this one lives.

    An OSError is ignored: the file system may respond at the next beat.

    Args:
        name: name of the thread.
        beat: called by the thread.
        every_s: interval in seconds.
    """

    def __init__(self, name: str, beat: Callable[[], None], every_s: float) -> None:
        self._beat, self._every_s, self._over = beat, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            with suppress(OSError):
                self._beat()

    def end(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join()


class Lease:
    """The lease of a run directory that this launcher holds, renewed by a thread.

    Args:
        run_dir: run directory.
        job: SLURM job of this process.

    Attributes:
        number: number of the current start of the ranks.

    Raises:
        ConfigError: another live launcher holds the lease.
    """

    def __init__(self, run_dir: Path, job: SlurmJob | None):
        self._run_dir, self._job = run_dir, job
        self._take()

    def _take(self) -> None:
        self._holder = _claim(self._run_dir, self._job)
        self.number = self._holder.number
        self._path = _path(self._run_dir, self.number)
        self._fence = Fence(self._run_dir, self.number)
        self._lost: Fenced | None = None
        self._beats = Beats("lease", self._beat, BEAT_S)

    def renew(self) -> None:
        """Takes the next number for a restart: ranks of the last start may still run on a lost node.

        Raises:
            ConfigError: another launcher has taken the lease meanwhile.
        """
        self.release()
        self._take()

    def check(self) -> None:
        """Raises Fenced if another start had taken the lease over by the last beat."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Releases the lease; the file stays, so that the number is never reused."""
        self._beats.end()
        with suppress(OSError, Fenced):
            self._fence.check()
            with atomic_writer(self._path) as file:
                file.write(_encode(replace(self._holder, released=True)))

    def _beat(self) -> None:
        if self._lost is None:
            try:
                self._fence.check()
                os.utime(self._path)
            except Fenced as error:
                self._lost = error


class Fence:
    """Checks whether a start still holds the lease of its run directory.

    Args:
        run_dir: run directory.
        number: number of the start; None for a process started by hand, which is never fenced.
    """

    def __init__(self, run_dir: Path, number: int | None):
        self._run_dir, self._number = run_dir, number

    def check(self) -> None:
        """Raises Fenced if another start has taken the lease over."""
        if self._number is None:
            return
        try:
            # open() instead of stat(): on NFS only an open asks the server.
            os.close(os.open(_path(self._run_dir, self._number), os.O_RDONLY))
        except FileNotFoundError:
            holder = current_holder(self._run_dir)
            if holder is not None and holder.number > self._number:
                raise Fenced(
                    f"start {self._number} of the run lost {self._run_dir} to start {holder.number}, {holder}: "
                    "this start ends without further writes"
                ) from None

    def reason(self) -> str:
        """Returns why this start must end; empty while it holds the lease."""
        try:
            self.check()
        except Fenced as error:
            return str(error)
        return ""


@contextmanager
def claimed(run_dir: Path, job: SlurmJob | None = None) -> Iterator[Lease]:
    """Creates a run directory and holds its lease during the block; the lease expires if the process dies.

    Args:
        run_dir: run directory.
        job: SLURM job of this process.

    Raises:
        ConfigError: the directory is not writable, or another live launcher holds the lease.
    """
    create(run_dir)
    lease = Lease(run_dir, job)
    try:
        yield lease
    finally:
        lease.release()


def current_holder(run_dir: Path) -> Holder | None:
    """Returns the current or last holder of a run directory's lease; None if there was none.

    Raises:
        ConfigError: a lease path is not a file, so its holder is unknown.
    """
    while (numbers := _numbers(run_dir)) != []:
        path = _path(run_dir, numbers[-1])
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise ConfigError(f"{path} is not a file: if nothing runs in {run_dir}, remove it and start again")
            content = path.read_bytes()
        except FileNotFoundError:
            # Taken over between listing and reading.
            continue
        return _holder(numbers[-1], content)
    return None


def _holder(number: int, content: bytes) -> Holder:
    """Parses a lease file; a damaged one gives a holder that is not readable."""
    try:
        fields = json.loads(content)
        job = fields.pop("job")
        holder = Holder(**fields, job=SlurmJob(**job) if job else None)
        if not (holder.number == number and isinstance(holder.pid, int) and isinstance(holder.machine, str)):
            raise ValueError("unexpected types")
        return holder
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Holder(number, "", 0, "", 0, readable=False)


def is_in_use(run_dir: Path) -> bool:
    """Whether a live launcher holds the lease of a run directory."""
    holder = current_holder(run_dir)
    return holder is not None and _is_alive(run_dir, holder, None)


def refuse_in_use(run_dir: Path, job: SlurmJob | None = None) -> None:
    """Refuses a run directory that is in use, before any work is done for it.

    Args:
        run_dir: run directory; it need not exist.
        job: SLURM job of this process.

    Raises:
        ConfigError: a live launcher holds the lease.
    """
    _refuse_alive(run_dir, current_holder(run_dir), job)


def _refuse_alive(run_dir: Path, holder: Holder | None, job: SlurmJob | None) -> None:
    if holder is not None and _is_alive(run_dir, holder, job):
        raise ConfigError(
            f"the run directory {run_dir} is in use by {holder}: wait for it, stop it ({holder.remedy}), or start "
            "another run with run.id=<name>"
        )


def _claim(run_dir: Path, job: SlurmJob | None) -> Holder:
    """Takes the lease under the next number.

    Raises:
        ConfigError: a live launcher holds the lease, or the lease folder or its newest entry is of the wrong type.
    """
    while True:
        holder = current_holder(run_dir)
        _refuse_alive(run_dir, holder, job)
        number = holder.number + 1 if holder else 1
        mine = Holder(number, environment.node_name(), os.getpid(), machine_id(), process_birth(os.getpid()) or 0, job)
        path = _path(run_dir, number)
        try:
            path.parent.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(f"{path.parent} is not a folder: remove it and start again") from error
        if not create_once(path, _encode(mine)):
            # Another launcher took the number first: check again.
            continue
        for old in _numbers(run_dir):
            if old < number:
                with suppress(OSError):  # it may not be a file
                    _path(run_dir, old).unlink()
        return mine


def _is_alive(run_dir: Path, holder: Holder, job: SlurmJob | None) -> bool:
    """Whether a holder is alive: by SLURM's state of its job, its pid on this machine, or else its file's mtime."""
    if holder.released:
        return False
    if not holder.readable:
        return _beats(_path(run_dir, holder.number))
    if holder.job is not None and job is not None and holder.job.cluster == job.cluster:
        if holder.job.id == job.id and holder.job.restarts < job.restarts:
            return False
        # If the controller does not answer, the checks below decide.
        with suppress(ConfigError):
            state, restarts = ask_job(holder.job.id)
            if state in _GONE_STATES or restarts > holder.job.restarts:
                return False
    if holder.machine == machine_id():
        return process_birth(holder.pid) == holder.born
    return _beats(_path(run_dir, holder.number))


def _beats(path: Path) -> bool:
    """Whether a lease file is still touched; only times of the file server are compared, never two clocks."""
    probe = path.with_name(f".now.{environment.node_name()}.{os.getpid()}")
    try:
        first = path.stat().st_mtime
        probe.touch()
        if probe.stat().st_mtime - first > _SILENT_S:
            return False
        deadline = time.monotonic() + _SILENT_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_mtime != first:
                    return True
        return False
    except FileNotFoundError:
        # Taken over meanwhile; the caller checks the new holder.
        return False
    finally:
        probe.unlink(missing_ok=True)


def _numbers(run_dir: Path) -> list[int]:
    """Returns all lease numbers in ascending order, the holder's last."""
    stems = (path.stem for path in (run_dir / "lease").glob("[0-9]*.json"))
    return sorted(int(stem) for stem in stems if len(stem) >= 8 and stem.isascii() and stem.isdigit())


def _path(run_dir: Path, number: int) -> Path:
    return run_dir / "lease" / f"{number:08d}.json"


def _encode(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode() + b"\n"


def machine_id() -> str:
    """Returns an id of this machine's boot and PID namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def process_birth(pid: int) -> int | None:
    """Returns the start time of a process of this machine in kernel ticks; None if it does not run."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else int(words[19])
