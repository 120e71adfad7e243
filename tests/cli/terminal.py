"""An interactive shell on a pseudo-terminal, driven by keystrokes like a user's."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType

_INTERACTIVE = {
    "bash": ("bash", "--noprofile", "--norc", "-i"),
    "zsh": ("zsh", "-f", "-i"),
}
_SETUP = {
    # Bracketed paste and bells would only clutter the output.
    "bash": "bind 'set enable-bracketed-paste off'; PS1='ready> '",
    "zsh": "bindkey -e; unset zle_bracketed_paste; PS1='ready> '; autoload -U compinit; compinit -u -d $ZDOTDIR/dump",
}
_SOURCE = {
    "bash": 'eval "$(megads completion bash)"',
    "zsh": 'eval "$(megads completion zsh)"',
}


class Terminal:
    """A shell with megads completion; a context manager.

    Args:
        shell: bash or zsh; fish lists its completions without a terminal.
        environment: environment variables of the shell; PATH must contain megads.
        cwd: working directory.
    """

    def __init__(self, shell: str, environment: dict[str, str], cwd: Path):
        self._shell = shell
        self._environment = {**environment, "TERM": "dumb", "ZDOTDIR": str(cwd), "HOME": str(cwd), "COLUMNS": "200"}
        self._cwd = cwd

    def __enter__(self) -> Terminal:
        self._fd, child = pty.openpty()
        self._process = subprocess.Popen(
            _INTERACTIVE[self._shell],
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=self._cwd,
            env=self._environment,
            start_new_session=True,
        )
        os.close(child)
        for line in (_SETUP[self._shell], _SOURCE[self._shell]):
            self._run(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def after_tab(self, typed: str) -> str:
        """Types text and the tab key; returns the resulting command line."""
        os.write(self._fd, f"{typed}\t".encode())
        time.sleep(0.1)
        # Goes to the start of the line and makes the shell print the line instead of running it.
        return self._run("", b"\x01echo LINE \x05 END").rpartition("LINE ")[2].rpartition(" END")[0].strip()

    def _run(self, line: str, keys: bytes = b"") -> str:
        """Enters a line and returns what the shell wrote until it finished."""
        os.write(self._fd, keys + line.encode() + b"\r")
        marker = f"{time.monotonic_ns()}"
        os.write(self._fd, f"echo DONE-''{marker}\r".encode())
        return self._read_until(f"DONE-{marker}").rpartition("echo DONE")[0]

    def _read_until(self, marker: str, timeout_s: float = 240.0) -> str:
        text = ""
        deadline = time.monotonic() + timeout_s
        while marker not in text:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{self._shell} did not write {marker!r} within {timeout_s} s but {text!r}"
            text += os.read(self._fd, 4096).decode(errors="replace")
        return text
