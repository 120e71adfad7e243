"""Runs the probe beside the other checks and collects what it said, however it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class TrialResult:
    """What the probe said.

    Attributes:
        results: what each probe that worked found.
        errors: the exception of each that failed.
        interrupted: the one that it was at when it died or was stopped; those after it were not tried.
        ending: how it died or was stopped.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None
    ending: str = ""

    @property
    def slow(self) -> bool:
        """It was stopped because it took too long."""
        return self.ending.startswith("took")


class Trial:
    """A probe that runs from entering the block on.

    Args:
        timeout_s: longest time that it may run.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s

    def __enter__(self) -> Trial:
        self._deadline = time.monotonic() + self._timeout_s
        self._output = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megads.tools.doctor.probe"],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
            # Its forked ranks are ended with it.
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._output.close()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def outcome(self) -> TrialResult:
        """Waits for the probe, to its deadline, and returns what it said."""
        try:
            code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        except subprocess.TimeoutExpired:
            self._end()
            ending = f"took longer than {self._timeout_s:.0f} s"
        self._output.seek(0)
        return read_outcome(self._output.read(), ending)


def read_outcome(text: str, ending: str) -> TrialResult:
    """Reads the probe's lines.

    Args:
        text: what it wrote; the last line may be cut.
        ending: how it ended.
    """
    outcome = TrialResult()
    begun: str | None = None
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            break
        begun = said.get("begin")
        if "result" in said:
            outcome.results[said["end"]] = said["result"]
        elif "error" in said:
            outcome.errors[said["end"]] = said["error"]
    if begun is None and (outcome.results or outcome.errors):
        return outcome
    return TrialResult(outcome.results, outcome.errors, begun or "start", ending)
