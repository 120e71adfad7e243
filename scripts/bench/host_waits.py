"""Plugin that counts where the host waits for the GPU in steps of `megads train`: CUDA reports each such call.

    megads train ... plugins=[scripts.bench.host_waits] hooks.host_waits.after=6

Every rank writes `host_waits_<rank>.json` to the run directory: the calls per step by file and line. Each wait delays
all launches behind it. One wait per step is intended: the engine reads loss and gradient norm.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, TextIO

import torch

import megads

SYNCHRONIZING = "called a synchronizing CUDA operation"
"""Part of the warning of `torch.cuda.set_sync_debug_mode`."""


@dataclass
class HostWaitsOptions:
    """Steps in which waits are counted.

    Attributes:
        after: last step before them; the first steps fill caches.
        steps: number of steps.
    """

    after: int = 3
    steps: int = 2


@megads.register_hook("host_waits", HostWaitsOptions)
class HostWaits(megads.Hook):
    """Counts waits of the host in some steps.

    Args:
        options: the steps.
        context: run directory and rank.
    """

    def __init__(self, options: HostWaitsOptions, context: megads.HookContext) -> None:
        self._options, self._context = options, context
        self._found: Counter[str] = Counter()
        self._before: Any = None

    def on_step(self, info: megads.StepInfo) -> None:
        """Starts or ends the counting."""
        if info.step == self._options.after:
            self._before = warnings.showwarning
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            self._set_mode("warn")
        elif info.step == self._options.after + self._options.steps:
            self._set_mode("default")
            warnings.showwarning = self._before
            content = {where: count / self._options.steps for where, count in self._found.items()}
            path = self._context.run_dir / f"host_waits_{self._context.rank}.json"
            path.write_text(json.dumps(content) + "\n")

    def _set_mode(self, mode: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)

    def _note(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if SYNCHRONIZING in str(message):
            self._found[f"{filename.rpartition('/')[2]}:{lineno}"] += 1
        else:
            self._before(message, category, filename, lineno, file, line)
