"""Plugin hook of the run under test that makes a rank fail from inside when the campaign orders it."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from megads.api import EXIT_BUG, HookContext, StepInfo, TrainState, register_hook
from megads.runtime.registry import NoOptions

FOREVER_S = 3600


class InjectedFault(RuntimeError):
    """Represents any error in the code of a rank."""


def fault_order_path(run_dir: Path, rank: int) -> Path:
    """Returns the path of the file with an order to a rank; the rank removes it before it carries out the order."""
    return run_dir / f"chaos_rank_{rank:05d}"


@register_hook("chaos")
class ChaosHook:
    """Checks for an order after every step and carries it out."""

    def __init__(self, _options: NoOptions, context: HookContext) -> None:
        self._path = fault_order_path(context.run_dir, context.rank)

    def on_start(self, state: TrainState) -> None:
        pass

    def on_step(self, info: StepInfo) -> None:
        if not self._path.exists():
            return
        order = self._path.read_text().strip()
        self._path.unlink()
        match order:
            case "sleep":
                time.sleep(FOREVER_S)
            case "hold_gil":
                # Called through PyDLL, sleep holds the GIL: no other Python thread runs.
                ctypes.PyDLL(None).sleep(FOREVER_S)
            case "raise":
                raise InjectedFault(f"ordered after step {info.step}")
            case "exit":
                os._exit(EXIT_BUG)

    def on_end(self, state: TrainState) -> None:
        pass
