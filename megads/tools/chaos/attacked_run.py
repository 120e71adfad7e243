"""The run into which faults are injected: its command, its processes, and its files."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from megads.api import (
    EVENTS_FILE,
    METRICS_FILE,
    CheckpointError,
    list_checkpoints,
    rank_log_path,
    read_json_lines,
    read_manifest,
    start_child,
)
from megads.checkpoint.local_files import node_folder

COMPUTED = ("step", "samples", "tokens", "loss", "grad_norm", "lr", "global_batch_size", "skipped", "batch_hash")
"""Keys of a step line in metrics.jsonl that must be equal to the reference run; the others are times and memory."""
POLL_S = 0.02


class AttackedRun:
    """A run directory and the `megads train` command that trains in it.

    Args:
        run_dir: run directory.
        overrides: overrides of `megads train`.
        local_folder: checkpoint.local_folder of the run.
        local_ranks: number of ranks on this machine.
    """

    def __init__(self, run_dir: Path, overrides: Sequence[str], local_folder: Path, local_ranks: int):
        self.run_dir, self.num_ranks = run_dir, local_ranks
        self._overrides, self._local_folder = list(overrides), local_folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *further: str) -> None:
        """Starts the command with further overrides."""
        self._process = self.give_command(*further)

    def give_command(self, *further: str) -> subprocess.Popen[bytes]:
        """Starts another process of the command, even while one is running."""
        words = ("train", *self._overrides, f"run.dir={self.run_dir}", *further)
        return start_child(("-m", "megads.cli.main", *words), self.command_log)

    @property
    def command_log(self) -> Path:
        """Path of the output of all commands."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """Process of the command that was started last."""
        assert self._process is not None
        return self._process

    @property
    def running(self) -> bool:
        """Whether the command is running."""
        return self._process is not None and self._process.poll() is None

    def end(self, timeout_s: float) -> int | None:
        """Waits for the end of the command; returns its exit code, or None on timeout."""
        with suppress(subprocess.TimeoutExpired):
            return self.launcher.wait(timeout_s)
        return None

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, *, running: bool = True) -> bool:
        """Waits for a condition; returns whether it became true in time, and before the command ended if `running`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or (running and not self.running):
                return condition()
            time.sleep(POLL_S)
        return True

    def kill_everything(self) -> None:
        """Sends SIGKILL to the command and all of its descendants, to simulate a power failure."""
        if self._process is None:
            return
        try:
            launcher = psutil.Process(self._process.pid)
            processes = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        # Ranks exit shortly after the launcher; the next command must not find them.
        psutil.wait_procs(processes, timeout=10)

    def rank(self, rank: int) -> psutil.Process | None:
        """Returns the process of a rank, found by the pid in its log; None if it is not running."""
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            text = rank_log_path(self.run_dir, rank).read_text(errors="replace")
            process = psutil.Process(int(text.rpartition(", pid ")[2].partition(",")[0]))
            return process if process.status() != psutil.STATUS_ZOMBIE else None
        return None

    def writers(self) -> list[psutil.Process]:
        """Returns the checkpoint writers: the child processes of the ranks."""
        found: list[psutil.Process] = []
        for number in range(self.num_ranks):
            rank = self.rank(number)
            with suppress(psutil.NoSuchProcess):
                found += rank.children() if rank is not None else []
        return found

    @property
    def processes(self) -> list[psutil.Process]:
        """The process of the command and all of its descendants."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launcher.pid)
            return [launcher, *launcher.children(recursive=True)]
        return []

    @property
    def memory(self) -> Path:
        """Folder of the run's in-memory local checkpoints on this machine."""
        return node_folder(self._local_folder, self.run_dir)

    def checkpoints(self) -> list[Path]:
        """Returns the committed checkpoints on disk, oldest first."""
        return [folder for folder in list_checkpoints(self.run_dir).values() if (folder / "manifest.json").exists()]

    def steps(self) -> list[dict[str, Any]]:
        """Returns the computed values of each step in metrics.jsonl, without times and memory."""
        lines = read_json_lines(self.run_dir / METRICS_FILE)
        return [{key: line.get(key) for key in COMPUTED} for line in lines if "batch_hash" in line]

    def validations(self) -> list[dict[str, Any]]:
        """Returns the validation lines of metrics.jsonl, without times."""
        lines = read_json_lines(self.run_dir / METRICS_FILE)
        return [
            {key: value for key, value in line.items() if not key.endswith("_s")}
            for line in lines
            if "batch_hash" not in line
        ]

    def step_times(self) -> list[float]:
        """Returns the time of each step, in seconds."""
        lines = read_json_lines(self.run_dir / METRICS_FILE)
        return [float(line["step_time_s"]) for line in lines if "step_time_s" in line]

    @property
    def last_step(self) -> int:
        """Last step in metrics.jsonl; 0 if there is none."""
        return max((int(line["step"]) for line in self.steps()), default=0)

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Returns the events with a name, or all events if it is empty."""
        return [event for event in read_json_lines(self.run_dir / EVENTS_FILE) if name in ("", event.get("event"))]

    def state_checksums(self) -> dict[str, str]:
        """Returns the checksums of all tensor shards of the newest checkpoint; empty if none can be read."""
        try:
            folder = self.checkpoints()[-1]
            manifest = read_manifest(folder)
            stored = [tensor for name in manifest.files for tensor in manifest.stored_in(folder, name)]
        except (IndexError, CheckpointError):
            return {}
        return {f"{tensor} of {list(tensor.shape)}": tensor.checksum for tensor in stored}
