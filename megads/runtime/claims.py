"""Divides the parts of a job among processes of several nodes, through a folder that all of them share.

A process claims a part by creating a hard link, which is atomic on network file systems too, and touches a file of its
own for as long as it lives. The claims of a process that died are taken over. No result depends on a claim: two
processes that make the same part write the same bytes, each under a temporary name.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megads.runtime import environment
from megads.runtime.files import atomic_writer, read_json
from megads.runtime.lease import BEAT_S, machine_id, process_birth

_SILENT_S = 3.5 * BEAT_S
"""A process whose file is older than this is dead; long enough for a slow file system."""
_PARTICIPANTS, _CLAIMS, _FINISHED = "participants", "claims", "finished"


@dataclass(frozen=True)
class Participant:
    """A process that works on the job.

    Attributes:
        node: where it runs.
        pid: its process id there.
        machine: identifies the node's boot and PID namespace, in which the pid is unique.
        born: start time in the kernel's ticks: a pid may be reused.
    """

    node: str
    pid: int
    machine: str
    born: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node}"


class Claims:
    """Which parts of a job are claimed, by whom, and which are finished. A context manager.

    Args:
        folder: holds the claims; created if missing.
        parts: names of the parts.

    Attributes:
        identity: of this process, unique among all that ever worked on the job.

    Raises:
        OSError: as the system reports it; FileNotFoundError if the folder is removed at this moment.
    """

    def __init__(self, folder: Path, parts: Sequence[str]) -> None:
        self._folder = folder
        self._parts = parts
        self.identity = f"{environment.node_name()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._own: dict[str, int] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._dead: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> Self:
        me = Participant(
            environment.node_name(), os.getpid(), machine_id(), process_birth(os.getpid()) or 0
        )  # fmt: skip
        for name in (_PARTICIPANTS, _CLAIMS, _FINISHED):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        with atomic_writer(self._participant(self.identity)) as file:
            file.write(json.dumps(asdict(me)).encode())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        # The folder is removed when the job is done.
        with suppress(OSError):
            self._participant(self.identity).unlink()

    def take(self, part: str) -> bool:
        """Claims a part; False if it is finished, or if another live process has claimed it.

        Raises:
            FileNotFoundError: the folder is gone: the job is done.
        """
        if part in self.finished():
            return False
        number, holder = self._holder(part)
        if holder is not None and self._is_alive(holder):
            return False
        draft = self._folder / _CLAIMS / f".{self.identity}"
        draft.write_text(self.identity)
        try:
            os.link(draft, self._claim(part, number + 1))
        except FileExistsError:
            # Somebody was quicker.
            return False
        finally:
            draft.unlink()
        self._own[part] = number + 1
        return True

    def take_any(self, first: int) -> str | None:
        """Claims any part that is not finished and that no live process has claimed; None if there is none.

        Args:
            first: index of the part to try first: processes that start at different parts read different files.

        Raises:
            FileNotFoundError: the folder is gone: the job is done.
        """
        finished, taken = self.finished(), self._taken()
        order = [*self._parts[first:], *self._parts[:first]]
        free = [part for part in order if part not in finished and part not in taken]
        left = [part for part in order if part not in finished and part in taken and part not in self._own]
        return next((part for part in (*free, *left) if self.take(part)), None)

    def holds(self, part: str) -> bool:
        """Whether a part that this process claimed has not been taken over."""
        return self._taken().get(part) == self._own[part]

    def holder(self, part: str) -> str:
        """The process that claimed a part, for messages."""
        _, holder = self._holder(part)
        participant = None if holder is None else self._read(holder)
        return "another process" if participant is None else str(participant)

    def finish(self, part: str, record: dict[str, Any]) -> None:
        """Marks a part as finished, with a record of it.

        Raises:
            FileNotFoundError: the folder is gone: the job is done.
        """
        with atomic_writer(self._record(part)) as file:
            file.write(json.dumps(record).encode())

    def finished(self) -> dict[str, dict[str, Any]]:
        """Returns the records of the finished parts.

        Raises:
            FileNotFoundError: the folder is gone: the job is done.
        """
        names = {path.stem for path in (self._folder / _FINISHED).iterdir() if path.suffix == ".json"}
        for part in names - self._records.keys():
            # A damaged record counts as none.
            with suppress(ValueError):
                self._records[part] = read_json(self._record(part))
        return {part: record for part, record in self._records.items() if part in names}

    def forget(self, part: str) -> None:
        """Marks a part as unfinished: its result is damaged."""
        self._record(part).unlink(missing_ok=True)
        self._records.pop(part, None)

    def _taken(self) -> dict[str, int]:
        """The number of the latest claim on each claimed part."""
        taken: dict[str, int] = {}
        for path in (self._folder / _CLAIMS).iterdir():
            part, dot, number = path.name.rpartition(".")
            if part and dot and number.isdecimal():
                taken[part] = max(int(number), taken.get(part, 0))
        return taken

    def _holder(self, part: str) -> tuple[int, str | None]:
        """The number of the latest claim on a part, and the identity that made it; 0 and None if there is none."""
        number = self._taken().get(part, 0)
        return number, self._claim(part, number).read_text() if number else None

    def _is_alive(self, participant: str) -> bool:
        if participant == self.identity:
            return True
        if participant in self._dead:
            return False
        alive = _is_alive(self._participant(participant), self._participant(self.identity))
        if not alive:
            self._dead.add(participant)
        return alive

    def _read(self, participant: str) -> Participant | None:
        return _read_participant(self._participant(participant))

    def _participant(self, participant: str) -> Path:
        return self._folder / _PARTICIPANTS / participant

    def _claim(self, part: str, number: int) -> Path:
        return self._folder / _CLAIMS / f"{part}.{number}"

    def _record(self, part: str) -> Path:
        return self._folder / _FINISHED / f"{part}.json"

    def _beat(self) -> None:
        """Touches this process's file until the end; runs in a thread."""
        while not self._over.wait(BEAT_S):
            # A file system that does not respond now may do so at the next beat.
            with suppress(OSError):
                os.utime(self._participant(self.identity))


def living(folder: Path) -> str:
    """Names a live process that works on the job of a folder, for messages; empty if there is none."""
    for path in (folder / _PARTICIPANTS).glob("[!.]*"):
        probe = path.with_name(f".now-{environment.node_name()}-{os.getpid()}")
        try:
            probe.touch()
            if _is_alive(path, probe):
                return str(_read_participant(path) or "another process")
        except OSError:
            # The folder is removed when the job is done.
            continue
        finally:
            probe.unlink(missing_ok=True)
    return ""


def _is_alive(path: Path, own: Path) -> bool:
    """Whether a participant is alive: by its process on this machine, else by the age of its file.

    Args:
        path: the participant's file.
        own: a file that is touched now; only times of the file server are compared, never those of two clocks.
    """
    try:
        participant = _read_participant(path)
        if participant is not None and participant.machine == machine_id():
            return process_birth(participant.pid) == participant.born
        # Opened, not looked up: over NFS only an open asks the server.
        with path.open("rb") as file:
            beat_s = os.fstat(file.fileno()).st_mtime
        os.utime(own)
        return own.stat().st_mtime - beat_s <= _SILENT_S
    except FileNotFoundError:
        return False


def _read_participant(path: Path) -> Participant | None:
    """Reads a participant's file; None if it is missing or damaged."""
    try:
        return Participant(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None
