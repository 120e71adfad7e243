"""Chooses how a run is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from megads.errors import ConfigError
from megads.monitor.console import Console
from megads.runtime import environment
from megads.runtime.config import ConsoleKind, LoggingConfig


def open_console(
    run_dir: Path, out: TextIO, config: LoggingConfig, title: str, total_steps: int | None = None
) -> Console:
    """Returns the console that logging.console asks for; use it in a `with` block.

    Args:
        run_dir: the run directory.
        out: standard output.
        config: how much is shown, and how.
        title: the run's name.
        total_steps: planned length, or None when unknown.

    Raises:
        ConfigError: live is asked for where there is no terminal.
    """
    kind = config.console
    if kind is ConsoleKind.auto:
        kind = ConsoleKind.live if out.isatty() and not environment.terminal_is_dumb() else ConsoleKind.plain
    if kind is ConsoleKind.live:
        if not out.isatty():
            raise ConfigError(
                "logging.console = live needs a terminal, but the output goes to a file or a pipe: use "
                "logging.console=auto, which shows plain lines there"
            )
        # rich is imported here: a run without a terminal does without it.
        from megads.monitor.live_console import LiveConsole

        return LiveConsole(run_dir, out, title, config.level, total_steps, color=not environment.no_color())
    level = config.level
    if kind is ConsoleKind.quiet and level in ("debug", "info"):
        level = "warning"
    return Console(run_dir, out, level, config.every_steps, total_steps)
