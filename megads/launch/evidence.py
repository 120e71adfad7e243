"""Collects evidence of a hang or a failure on a node before its processes are killed.

Time and size are limited. What cannot be collected is noted in the evidence and delays nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from megads.runtime.heartbeat import RankPosition, ask_ranks, flight_path, stacks_path, wait_for_answers
from megads.runtime.machine_memory import may_have_gpus, memory_events, oom_kills
from megads.runtime.run_dir import evidence_path, rank_log_path

LIMIT_S = 3.0
"""Longest time that a collection takes."""
_ANSWER_TIMEOUT_S = 1.5
_TOOL_TIMEOUT_S = 1.0
_TAIL_BYTES = 32 << 10
_MAX_BYTES = 1 << 20
_STATUS = ("State", "VmRSS", "VmHWM", "VmSwap", "Threads", "SigBlk", "nonvoluntary_ctxt_switches")
_KERNEL_WORDS = ("oom", "killed process", "xid", "nvrm", "ecc", "mce", "i/o error", "hung_task", "blocked for more")
_GPU_FIELDS = (
    "index,name,uuid,temperature.gpu,memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total,"
    "ecc.errors.corrected.volatile.total,retired_pages.pending"
)


class EvidenceCollection:
    """Collects evidence in a separate thread, because what it reads may itself hang.

    Args:
        folder: folder to write to; created if missing.
        run_dir: the run directory.
        heartbeats: folder of the heartbeats of the node's ranks; None if there are none.
        pids: pids of the ranks that still run, by rank.
        positions: positions of all ranks of the node.
        reason: why the evidence is collected.
    """

    def __init__(
        self,
        folder: Path,
        run_dir: Path,
        heartbeats: Path | None,
        pids: Mapping[int, int],
        positions: Sequence[RankPosition],
        reason: str,
    ) -> None:
        self.folder = folder
        self._run_dir, self._heartbeats, self._pids = run_dir, heartbeats, dict(pids)
        self._positions, self._reason = list(positions), reason
        self._notes: list[str] = []
        self._deadline = time.monotonic() + LIMIT_S
        self._thread = threading.Thread(target=self._collect, name="evidence", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether the collection is complete or its time limit has passed."""
        return not self._thread.is_alive() or time.monotonic() >= self._deadline

    def wait(self) -> None:
        """Waits until the collection is finished."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))

    def _collect(self) -> None:
        """Body of the thread."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._heartbeats is not None:
                ask_ranks(self._heartbeats, self._pids)
            # Read while the ranks answer, the most informative first: the caller may kill them before the rest is read.
            processes = {rank: _process(pid) for rank, pid in self._pids.items()}
            if self._heartbeats is not None:
                wait_for_answers(self._heartbeats, self._pids, _ANSWER_TIMEOUT_S)
                self._take_answers(self._heartbeats)
            self._write("node.json", json.dumps(self._node(processes), indent=2).encode())
            for rank in self._pids:
                self._write(f"log_rank_{rank:05d}.txt", _tail(rank_log_path(self._run_dir, rank)))
            self._write("kernel.txt", _kernel_lines())
            if may_have_gpus():
                self._write("gpus.txt", _tool_output(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv"]))
            for rank in self._without_stacks():
                self._write(f"pyspy_rank_{rank:05d}.txt", _pyspy(self._pids[rank]))
        except Exception as error:  # Missing evidence must not stop the run or its restart.
            self._notes.append(f"{type(error).__name__}: {error}")
        if self._notes:
            with suppress(OSError):
                (self.folder / "notes.txt").write_text("\n".join(self._notes) + "\n")

    def _take_answers(self, heartbeats: Path) -> None:
        for rank in self._pids:
            for name, path in (("stacks", stacks_path(heartbeats, rank)), ("flight", flight_path(heartbeats, rank))):
                try:
                    content = path.read_bytes()[:_MAX_BYTES]
                except OSError:
                    content = b""
                suffix = "json" if name == "flight" else "txt"
                self._write(f"{name}_rank_{rank:05d}.{suffix}", content)

    def _without_stacks(self) -> list[int]:
        """Ranks that wrote no stack trace, as a stopped process cannot."""
        return [rank for rank in self._pids if not (self.folder / f"stacks_rank_{rank:05d}.txt").exists()]

    def _node(self, processes: Mapping[int, Mapping[str, str]]) -> dict[str, object]:
        return {
            "reason": self._reason,
            "time": time.time(),
            "positions": [asdict(position) for position in self._positions],
            "processes": {str(rank): dict(found) for rank, found in processes.items()},
            "oom_kills": oom_kills(),
            "cgroup_memory_events": memory_events(),
            "machine_memory": _fields(Path("/proc/meminfo"), ("MemTotal", "MemAvailable", "SwapFree", "Shmem")),
            "load": _line(Path("/proc/loadavg")),
        }

    def _write(self, name: str, content: bytes) -> None:
        """Writes a file of the evidence; none for empty content."""
        if not content:
            return
        try:
            (self.folder / name).write_bytes(content[:_MAX_BYTES])
        except OSError as error:
            self._notes.append(f"{name} cannot be written: {error}")


def _process(pid: int) -> dict[str, str]:
    """The kernel's information about a process."""
    folder = Path(f"/proc/{pid}")
    found = _fields(folder / "status", _STATUS)
    # The kernel stack and the system call are readable by root only, or by nobody.
    return found | {name: text for name in ("wchan", "syscall", "stack") if (text := _line(folder / name))}


def _fields(path: Path, names: Sequence[str]) -> dict[str, str]:
    try:
        lines = [line.partition(":") for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in lines if name in names}


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except OSError:
        return b""


def _kernel_lines() -> bytes:
    """The last lines of the kernel log about memory, devices and disks; empty if the log is not readable."""
    lines = _tool_output(["dmesg", "--ctime"]).decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if any(word in line.lower() for word in _KERNEL_WORDS)][-200:]).encode()


def _pyspy(pid: int) -> bytes:
    """Stack traces of a process that cannot write its own; empty if py-spy is not installed or not permitted."""
    return _tool_output(["py-spy", "dump", "--nonblocking", "--pid", str(pid)])


def _tool_output(command: Sequence[str]) -> bytes:
    """Output of a system tool; empty if the tool is missing, fails or times out."""
    if shutil.which(command[0]) is None:
        return b""
    try:
        done = subprocess.run(list(command), capture_output=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout if done.returncode == 0 else b""


def evidence_folders(run_dir: Path, start: int | None) -> list[Path]:
    """Returns the evidence folders of one start in chronological order."""
    return sorted(evidence_path(run_dir, start, "any").parent.glob(f"{evidence_path(run_dir, start, '*').name}"))
