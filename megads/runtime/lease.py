"""Who may write a run directory: one start of the run at a time, by a lease in the directory that any node can read.

A file lock does not reach over nodes on every file system, and outlives its holder when a node is lost. So each start
takes the next number: <run_dir>/lease/00000007.json appears by a hard link, which is atomic on network file systems
too, says who holds it, and is touched every ten seconds. The holder is the highest number. Whoever finds a live holder
is refused; the same SLURM job, requeued, takes over whatever is left of its earlier start, whose ranks find their
number gone before the next step and before they commit a checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megads.errors import ConfigError, Fenced
from megads.runtime import environment
from megads.runtime.files import atomic_writer
from megads.runtime.run_dir import create
from megads.runtime.slurm import SlurmJob, ask_job

BEAT_S = 10.0
# A holder that is silent for so long is gone; a slow file system must not make it look so.
_SILENT_S = 3.5 * BEAT_S
_POLL_S = 0.5
_GONE_STATES = ("", "PENDING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
                "DEADLINE", "OUT_OF_MEMORY", "REQUEUED", "REVOKED")  # fmt: skip


@dataclass(frozen=True)
class Holder:
    """Who holds a run directory.

    Attributes:
        number: of the start, from 1.
        node: where the launcher runs.
        pid: the launcher.
        machine: names the node's boot and process space; only there the pid means something.
        born: when the launcher's process started, in the kernel's ticks: a pid may be given out again.
        job: the SLURM job, None outside of SLURM.
        released: the start is over.
        readable: False where its file says nothing of it but the number.
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
            return f"a start whose file {self.number:08d}.json in the folder lease cannot be read, but is kept up"
        if self.job is not None:
            return f"SLURM job {self.job.id} (restart {self.job.restarts}, process {self.pid} on {self.node})"
        return f"process {self.pid}" + ("" if self.machine == machine_id() else f" on {self.node}")

    @property
    def remedy(self) -> str:
        """The command that ends it."""
        if not self.readable:
            return "find it on the nodes that share the folder"
        return f"kill {self.pid}" if self.job is None else f"scancel {self.job.id}"


class Lease:
    """A launcher's hold on a run directory, kept up by a thread.

    Args:
        run_dir: the run directory.
        job: the SLURM job that this process is part of.

    Attributes:
        number: of this start of the ranks.

    Raises:
        ConfigError: a live launcher holds it.
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
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Takes the next number, for another start of the ranks: those of the last one may live on a lost node.

        Raises:
            ConfigError: another launcher was quicker.
        """
        self.release()
        self._take()

    def check(self) -> None:
        """Raises Fenced when another start took over, as far as the last beat saw."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Lets go of the run directory; the number stays, so that it is never given again."""
        self._over.set()
        self._thread.join()
        with suppress(OSError, Fenced):
            self._fence.check()
            _write(self._path, Holder(**{**self._holder.__dict__, "released": True}))

    def _beat(self) -> None:
        """Body of the thread."""
        while not self._over.wait(BEAT_S):
            # A file system that does not answer now may do so at the next beat.
            with suppress(OSError):
                try:
                    self._fence.check()
                    os.utime(self._path)
                except Fenced as error:
                    self._lost = error
                    return


class Fence:
    """Tells a rank whether the start that it belongs to still holds the run directory.

    Args:
        run_dir: the run directory.
        number: of the start; None for a process that belongs to none and is never fenced.
    """

    def __init__(self, run_dir: Path, number: int | None):
        self._run_dir, self._number = run_dir, number

    def check(self) -> None:
        """Raises Fenced when another start took over."""
        if self._number is None:
            return
        try:
            # Opened, not looked up: over NFS only an open asks the server.
            os.close(os.open(_path(self._run_dir, self._number), os.O_RDONLY))
        except FileNotFoundError:
            holder = current_holder(self._run_dir)
            if holder is not None and holder.number > self._number:
                raise Fenced(
                    f"start {self._number} of the run lost {self._run_dir} to start {holder.number}, {holder}: "
                    "this start ends without writing anything more"
                ) from None

    def reason(self) -> str:
        """Why this start must end; empty while it holds the run directory."""
        try:
            self.check()
        except Fenced as error:
            return str(error)
        return ""


@contextmanager
def claimed(run_dir: Path, job: SlurmJob | None = None) -> Iterator[Lease]:
    """Creates a run directory and holds it; lost when the process dies, however it dies.

    Args:
        run_dir: the run directory.
        job: the SLURM job that this process is part of.

    Raises:
        ConfigError: it cannot be written to, or a live launcher holds it.
    """
    create(run_dir)
    lease = Lease(run_dir, job)
    try:
        yield lease
    finally:
        lease.release()


def current_holder(run_dir: Path) -> Holder | None:
    """Returns who holds, or last held, a run directory; None when nobody ever did.

    Raises:
        ConfigError: what has a holder's name is no file, so that nobody can tell who held it.
    """
    while (numbers := _numbers(run_dir)) != []:
        path = _path(run_dir, numbers[-1])
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise ConfigError(f"{path} is no file: if nothing runs in {run_dir}, remove it and start again")
            content = path.read_bytes()
        except FileNotFoundError:
            # Taken over between the listing and the reading.
            continue
        return _holder(numbers[-1], content)
    return None


def _holder(number: int, content: bytes) -> Holder:
    """What a file says; of a damaged one no more than its number is known."""
    try:
        fields = json.loads(content)
        job = fields.pop("job")
        holder = Holder(**fields, job=SlurmJob(**job) if job else None)
        if not (holder.number == number and isinstance(holder.pid, int) and isinstance(holder.machine, str)):
            raise ValueError("not of the types that are written")
        return holder
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Holder(number, "", 0, "", 0, readable=False)


def in_use(run_dir: Path) -> bool:
    """Tells whether a live launcher holds a run directory."""
    holder = current_holder(run_dir)
    return holder is not None and _is_alive(run_dir, holder, None)


def refuse_in_use(run_dir: Path, job: SlurmJob | None = None) -> None:
    """Refuses a run directory that is in use, before any work is done for it; it need not exist.

    Args:
        run_dir: the run directory.
        job: the SLURM job that this process is part of.

    Raises:
        ConfigError: a live launcher holds it.
    """
    _refuse_alive(run_dir, current_holder(run_dir), job)


def _refuse_alive(run_dir: Path, holder: Holder | None, job: SlurmJob | None) -> None:
    if holder is not None and _is_alive(run_dir, holder, job):
        raise ConfigError(
            f"the run directory {run_dir} is in use by {holder}: wait for it, stop it ({holder.remedy}), or start "
            "another run with run.id=<name>"
        )


def _claim(run_dir: Path, job: SlurmJob | None) -> Holder:
    """Takes the next number.

    Raises:
        ConfigError: a live launcher holds the last one, or what lies there cannot be a holder's.
    """
    while True:
        holder = current_holder(run_dir)
        _refuse_alive(run_dir, holder, job)
        number = holder.number + 1 if holder else 1
        mine = Holder(number, environment.node_name(), os.getpid(), machine_id(), process_birth(os.getpid()) or 0, job)
        draft = run_dir / "lease" / f".{number}.{mine.node}.{mine.pid}"
        try:
            _write(draft, mine)
        except FileExistsError as error:
            raise ConfigError(f"{draft.parent} is no folder: remove it and start again") from error
        try:
            os.link(draft, _path(run_dir, number))
        except FileExistsError:
            # Somebody was quicker: look who.
            continue
        finally:
            draft.unlink()
        for old in _numbers(run_dir):
            if old < number:
                with suppress(OSError):  # litter that is no file
                    _path(run_dir, old).unlink()
        return mine


def _is_alive(run_dir: Path, holder: Holder, job: SlurmJob | None) -> bool:
    """Tells whether a holder is still at work, by the best witness that there is."""
    if holder.released:
        return False
    if not holder.readable:
        return _beats(_path(run_dir, holder.number))
    if holder.job is not None and job is not None and holder.job.cluster == job.cluster:
        if holder.job.id == job.id and holder.job.restarts < job.restarts:
            return False
        # A controller that does not answer leaves the question to the next witness.
        with suppress(ConfigError):
            state, restarts = ask_job(holder.job.id)
            if state in _GONE_STATES or restarts > holder.job.restarts:
                return False
    if holder.machine == machine_id():
        return process_birth(holder.pid) == holder.born
    return _beats(_path(run_dir, holder.number))


def _beats(path: Path) -> bool:
    """Watches a holder of which only its file is known; compares times of the file server only, never two clocks."""
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
        # Taken over meanwhile; the next look tells by whom.
        return False
    finally:
        probe.unlink(missing_ok=True)


def _numbers(run_dir: Path) -> list[int]:
    """Returns the numbers that are there, the holder's last."""
    stems = (path.stem for path in (run_dir / "lease").glob("[0-9]*.json"))
    return sorted(int(stem) for stem in stems if len(stem) >= 8 and stem.isascii() and stem.isdigit())


def _path(run_dir: Path, number: int) -> Path:
    return run_dir / "lease" / f"{number:08d}.json"


def _write(path: Path, holder: Holder) -> None:
    """Writes the file, whole or not at all, and waits until it is on disk."""
    path.parent.mkdir(exist_ok=True)
    with atomic_writer(path) as file:
        file.write(json.dumps(asdict(holder)).encode() + b"\n")


def machine_id() -> str:
    """Names this boot of this machine and its process space."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def process_birth(pid: int) -> int | None:
    """Returns when a process of this machine started, in the kernel's ticks; None where none lives."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else int(words[19])
