"""Points as processes of this machine, side by side on equal shares of its cores or GPUs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megads.errors import ConfigError
from megads.runtime.lease import in_use
from megads.runtime.process import signal_child, start_child
from megads.tools.sweep.launcher import PointEnd
from megads.tools.sweep.points import Point

_POLL_S = 0.5
_FREED_WITHIN_S = 120.0
"""A point whose sweep was killed saves before it ends; so long its run directory may stay in use."""
_REASON_BYTES = 4096


@dataclass(frozen=True)
class Share:
    """What one point at a time has to itself.

    Attributes:
        cores: it may run on; empty for all.
        variables: of its environment, such as the GPUs that it sees.
    """

    cores: tuple[int, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def shares_of(cores: Sequence[int], gpus: Sequence[str], parallel: int) -> list[Share]:
    """Equal shares of a machine, one for each point that runs at the same time.

    Args:
        cores: that this process may use.
        gpus: that it sees, as CUDA_VISIBLE_DEVICES names them.
        parallel: points at once, at most as many as there are cores, and GPUs where there are any.
    """
    if parallel == 1:
        return [Share()]
    width, gpu_width = len(cores) // parallel, len(gpus) // parallel
    return [
        Share(
            tuple(cores[place * width : (place + 1) * width]),
            (("CUDA_VISIBLE_DEVICES", ",".join(gpus[place * gpu_width : (place + 1) * gpu_width])),) if gpus else (),
        )
        for place in range(parallel)
    ]


class LocalLauncher:
    """Starts points as processes.

    Args:
        folder: the sweep's; what point 3 prints goes to points/0003.log.
        command: arguments after the Python interpreter, before a point's overrides.
        shares: of the machine; as many points run at once.
        poll_s: seconds between two looks; None is half a second.
    """

    def __init__(self, folder: Path, command: Sequence[str], shares: Sequence[Share], poll_s: float | None):
        self.poll_s = poll_s or _POLL_S
        self._folder = folder
        self._command = tuple(command)
        self._free = list(shares)
        self._running: dict[int, tuple[subprocess.Popen[bytes], Share]] = {}

    def has_room(self) -> bool:
        """Whether a share is free."""
        return bool(self._free)

    def start(self, point: Point) -> None:
        """Starts a point on the first free share."""
        share = self._free.pop(0)
        try:
            process = start_child(
                [*self._command, *point.overrides], self.log(point.number), share.cores, dict(share.variables)
            )
        except OSError as error:
            self._free.insert(0, share)
            raise ConfigError(f"point {point.number} cannot be started: {error}") from error
        self._running[point.number] = process, share

    def find(self, point: Point) -> bool:
        """Waits until a point whose sweep was killed has saved and ended; never finds it running."""
        deadline = time.monotonic() + _FREED_WITHIN_S
        while in_use(Path(point.run_dir)) and time.monotonic() < deadline:
            time.sleep(self.poll_s)
        return False

    def ended(self) -> list[PointEnd]:
        """The processes that ended since the last call."""
        found = []
        for number, (process, share) in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[number]
            self._free.append(share)
            found.append(PointEnd(number, code, _last_words(self.log(number)) if code else ""))
        return found

    def stop(self, point: Point) -> None:
        """Sends SIGINT, of which the first saves and ends the run and the second kills it."""
        if point.number in self._running:
            signal_child(self._running[point.number][0], signal.SIGINT)

    def log(self, number: int) -> Path:
        """The file with what a point printed."""
        return self._folder / "points" / f"{number:04d}.log"


def _last_words(log: Path) -> str:
    """The last line in which megads said what went wrong; nothing where there is none."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _REASON_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("megads")]
    return said[-1].partition(": ")[2] if said else ""
