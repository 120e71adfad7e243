"""Distributes the parts of a job among processes on several nodes, through a shared folder.

A process claims a part by creating a hard link, which is atomic on network file systems too, and touches its own file
while it lives. Claims of dead processes are taken over. Results do not depend on claims: two processes that work on the
same part write the same bytes, each under a temporary name.

In `Claims` a part is either finished or not. `Presence`, `live_members`, `link_claim` and `latest_claims`, its
parts, also serve queues whose parts can fail and have a limited number of attempts.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from megads.runtime import environment
from megads.runtime.files import atomic_writer, create_once, read_json
from megads.runtime.lease import BEAT_S, Beats, machine_id, process_birth

_SILENT_S = 3.5 * BEAT_S
"""A process whose file is older than this is dead; large enough for a slow file system."""
_PARTICIPANTS, _CLAIMS, _FINISHED = "participants", "claims", "finished"


@dataclass(frozen=True)
class Participant:
    """A process that works on the job.

    Attributes:
        node: node of the process.
        pid: process id.
        machine: id of the node's boot and PID namespace, within which the pid is unique.
        born: start time in kernel ticks, as pids are reused.
    """

    node: str
    pid: int
    machine: str
    born: int

    @classmethod
    def of_this_process(cls, **more: Any) -> Self:
        """Returns this process, with the fields that a subclass adds."""
        pid = os.getpid()
        return cls(node=environment.node_name(), pid=pid, machine=machine_id(), born=process_birth(pid) or 0, **more)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node}"


AnyParticipant = TypeVar("AnyParticipant", bound=Participant)


class Presence(Generic[AnyParticipant]):
    """Context manager: a file that shows other processes that this one participates and is alive.

    Args:
        path: path of the file, in an existing folder.
        participant: initial content.

    Attributes:
        participant: current content.
    """

    def __init__(self, path: Path, participant: AnyParticipant) -> None:
        self._path, self.participant = path, participant

    def __enter__(self) -> Self:
        self._write()
        self._beats = Beats("presence", self._beat, BEAT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beats.end()
        # The folder may have been removed.
        with suppress(OSError):
            self._path.unlink()

    def change(self, **fields: Any) -> None:
        """Changes fields of the participant and updates the file."""
        self.participant = replace(self.participant, **fields)
        self._write()

    def _write(self) -> None:
        with atomic_writer(self._path) as file:
            file.write(json.dumps(asdict(self.participant)).encode())

    def _beat(self) -> None:
        try:
            os.utime(self._path)
        except FileNotFoundError:
            # Another process considered this one dead.
            self._write()


def live_members(folder: Path, kind: type[AnyParticipant]) -> Iterator[AnyParticipant | None]:
    """Yields the live participants of a folder of presence files; None for one whose file is damaged.

    Args:
        folder: folder of the files of `Presence`.
        kind: class of the participants.
    """
    clock = _ServerClock(folder)
    for path in folder.glob("[!.]*"):
        participant = _read_participant(path, kind)
        if _is_alive(path, participant, clock):
            yield participant


def link_claim(path: Path, identity: str) -> bool:
    """Creates a claim file that contains its owner; returns False if it exists.

    Args:
        path: path of the file.
        identity: unique id of this process.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    return create_once(path, identity.encode())


def latest_claims(folder: Path) -> dict[str, int]:
    """Returns the number of the latest claim by part, from the names of files: <part>.<number>, perhaps with .json."""
    latest: dict[str, int] = {}
    for path in folder.iterdir():
        part, _, number = path.name.removesuffix(".json").rpartition(".")
        if part and number.isdecimal():
            latest[part] = max(int(number), latest.get(part, 0))
    return latest


class Claims:
    """Context manager: claims and finished parts of a job.

    Args:
        folder: folder of the claims; created if missing.
        parts: names of the parts.

    Attributes:
        identity: id of this process, unique among all that ever worked on the job.

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
        self._presence = Presence(self._participant(self.identity), Participant.of_this_process())

    def __enter__(self) -> Self:
        for name in (_PARTICIPANTS, _CLAIMS, _FINISHED):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._presence.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._presence.__exit__(kind, error, trace)

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
        if not link_claim(self._claim(part, number + 1), self.identity):
            # Another process claimed it first.
            return False
        self._own[part] = number + 1
        return True

    def take_any(self, first: int) -> str | None:
        """Claims any part that is not finished and that no live process has claimed; None if there is none.

        Args:
            first: index of the part to try first; processes that start at different parts read different files.

        Raises:
            FileNotFoundError: the folder is gone: the job is done.
        """
        finished, taken = self.finished(), latest_claims(self._folder / _CLAIMS)
        order = [*self._parts[first:], *self._parts[:first]]
        free = [part for part in order if part not in finished and part not in taken]
        left = [part for part in order if part not in finished and part in taken and part not in self._own]
        return next((part for part in (*free, *left) if self.take(part)), None)

    def holds(self, part: str) -> bool:
        """Whether a part that this process claimed has not been taken over."""
        return latest_claims(self._folder / _CLAIMS).get(part) == self._own[part]

    def holder(self, part: str) -> str:
        """Returns the process that claimed a part, for messages."""
        _, holder = self._holder(part)
        participant = None if holder is None else _read_participant(self._participant(holder), Participant)
        return "another process" if participant is None else str(participant)

    def finish(self, part: str, record: dict[str, Any]) -> None:
        """Marks a part as finished and stores its record.

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
            # A part with a damaged record is not finished.
            with suppress(ValueError):
                self._records[part] = read_json(self._record(part))
        return {part: record for part, record in self._records.items() if part in names}

    def forget(self, part: str) -> None:
        """Marks a part as unfinished, because its result is damaged."""
        self._record(part).unlink(missing_ok=True)
        self._records.pop(part, None)

    def _holder(self, part: str) -> tuple[int, str | None]:
        """Returns the number of the latest claim on a part and its owner; 0 and None if there is none."""
        number = latest_claims(self._folder / _CLAIMS).get(part, 0)
        return number, self._claim(part, number).read_text() if number else None

    def _is_alive(self, participant: str) -> bool:
        if participant == self.identity:
            return True
        if participant in self._dead:
            return False
        path = self._participant(participant)
        alive = _is_alive(path, _read_participant(path, Participant), _ServerClock(path.parent))
        if not alive:
            self._dead.add(participant)
        return alive

    def _participant(self, participant: str) -> Path:
        return self._folder / _PARTICIPANTS / participant

    def _claim(self, part: str, number: int) -> Path:
        return self._folder / _CLAIMS / f"{part}.{number}"

    def _record(self, part: str) -> Path:
        return self._folder / _FINISHED / f"{part}.json"


def participants(folder: Path) -> Iterator[Participant | None]:
    """Yields the live participants of a folder of `Claims`; see `live_members`."""
    return live_members(folder / _PARTICIPANTS, Participant)


class _ServerClock:
    """The clock of the file server, read once: only its times are compared, never two clocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now_s: float | None = None

    def now_s(self) -> float:
        if self._now_s is None:
            probe = self._folder / f".now.{uuid.uuid4().hex}"
            try:
                probe.touch()
                self._now_s = probe.stat().st_mtime
            finally:
                probe.unlink(missing_ok=True)
        return self._now_s


def _is_alive(path: Path, participant: Participant | None, clock: _ServerClock) -> bool:
    """Whether a participant is alive: by its pid on this machine, else by the age of its file."""
    if participant is not None and participant.machine == machine_id():
        return process_birth(participant.pid) == participant.born
    try:
        # open() instead of stat(): on NFS only an open asks the server.
        with path.open("rb") as file:
            beat_s = os.fstat(file.fileno()).st_mtime
        return clock.now_s() - beat_s <= _SILENT_S
    except FileNotFoundError:
        # It has left, or the folder is gone because the job is done.
        return False


def _read_participant(path: Path, kind: type[AnyParticipant]) -> AnyParticipant | None:
    """Reads a participant's file; None if it is gone or damaged."""
    try:
        return kind(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None
