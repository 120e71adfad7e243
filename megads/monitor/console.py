"""Console of the launcher: shows metrics.jsonl and events.jsonl of a run, one readable line per record.

On a terminal `megads.tools.live_console` shows the same as a panel.

The ranks print nothing to the terminal. The launcher reads their files, so a slow terminal never slows down a step.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from megads.errors import ConfigError
from megads.monitor.eta import Intervals, RemainingTime
from megads.runtime import environment
from megads.runtime.config import ConsoleKind, LoggingConfig
from megads.runtime.files import Tail
from megads.runtime.heartbeat import SLOW_PHASES
from megads.runtime.optional_tools import find_tool, require_tool
from megads.runtime.progress import cleared_line, enter, leave, render_duration
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE
from megads.runtime.terminal_text import visible

_BACKLOG_CHARACTERS = 2**20
_DRAIN_S = 2.0


class NonBlockingWriter:
    """Non-blocking writer: buffers text, and a background thread writes it as fast as the reader accepts it.

    If the reader stops reading (Ctrl-S, a stalled connection), lines beyond a backlog of 1 MiB are dropped; if it
    closes the stream, all later lines are dropped. Neither is an error. A stream without a file descriptor is written
    to directly.

    Args:
        out: output stream; it must have no other writer until `close`.
    """

    def __init__(self, out: TextIO):
        self._out = out
        self._encoding = out.encoding or "utf-8"
        self._descriptor = _descriptor(out)
        self._texts: deque[str] = deque()
        self._backlog = 0
        self._dropped_texts = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """True when everything has been written, so that the next frame may be drawn."""
        return self._backlog == 0

    @property
    def unicode(self) -> bool:
        """True if the stream's encoding has all Unicode characters."""
        return self._encoding.lower().replace("-", "").startswith("utf")

    def write(self, text: str) -> None:
        """Buffers a text; returns immediately."""
        if self._descriptor is None:
            self._out.write(text)
            self._out.flush()
            return
        with self._changed:
            if self._backlog + len(text) > _BACKLOG_CHARACTERS:
                self._dropped_texts += 1
                return
            if self._dropped_texts:
                text = f"[{self._dropped_texts} lines not shown: the terminal did not take them]\n{text}"
                self._dropped_texts = 0
            self._backlog += len(text)
            self._texts.append(text)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits up to two seconds until the buffer is written; later writes still work."""
        if self._descriptor is None:
            return
        deadline = time.monotonic() + _DRAIN_S
        with self._changed:
            while self._backlog and self._changed.wait(max(0.0, deadline - time.monotonic())):
                continue

    def _run(self) -> None:
        """Runs the background thread."""
        while True:
            with self._changed:
                while not self._texts:
                    self._changed.wait()
                text = "".join(self._texts)
                self._texts.clear()
            try:
                with cleared_line():
                    self._write_all(text.encode(self._encoding, errors="replace"))
            except OSError:
                self._give_up()
            with self._changed:
                self._backlog -= len(text)
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> None:
        assert self._descriptor is not None
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])

    def _give_up(self) -> None:
        """Discards further output: a closed pipe or a lost connection must not end the training.

        The descriptor is redirected to the null device, so that Python's flush at exit does not fail and change the
        exit code.
        """
        assert self._descriptor is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._descriptor)
        os.close(nowhere)


def _descriptor(out: TextIO) -> int | None:
    """Flushes a stream and returns its file descriptor; None if it has none."""
    try:
        descriptor = out.fileno()
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        out.flush()
    return descriptor


_LEVELS = ("debug", "info", "warning", "error")
_OPENING_EVENTS = ("launch", "attention", "operators", "resume", "init_from", "start", "training_phase")
# The launcher prints these itself.
_PRINTED_BY_LAUNCHER = ("failure", "config_changed", "data")
_SLOW_PHASE_SAID_AFTER_S = 10.0


class Console:
    """Shows the records that are added to a run's files after its construction.

    Args:
        run_dir: run directory.
        out: output stream.
        level: lowest level shown; steps and ordinary events are "info".
        every_steps: interval of step lines in steps; the last step is always shown.
        total_steps: planned number of steps; None if unknown. An event with `total_steps` sets it, too.
        intervals: when the run validates and saves, for the remaining time.
    """

    def __init__(
        self,
        run_dir: Path,
        out: TextIO,
        level: str = "info",
        every_steps: int = 1,
        total_steps: int | None = None,
        intervals: Intervals | None = None,
    ):
        self._metrics = Tail(run_dir / METRICS_FILE)
        self._events = Tail(run_dir / EVENTS_FILE)
        self._outlet = NonBlockingWriter(out)
        self._level = level
        self._every_steps = every_steps
        self._total_steps = total_steps
        self._remaining = RemainingTime.from_earlier_starts(run_dir, intervals)
        self._started = False
        self._position = ""

    def poll(self) -> None:
        """Shows the records added since the last call."""
        # The two files are not merged by time, so the order within one poll is a guess: events of a start come before
        # the steps, all other events after the step that caused them.
        events = self._events.read()
        opening = [event for event in events if event.get("event") in _OPENING_EVENTS]
        for event in opening:
            self._show_event(event)
        for record in self._metrics.read():
            self._show_metrics(record)
        for event in events:
            if event not in opening:
                self._show_event(event)

    def _show_event(self, event: Mapping[str, Any]) -> None:
        self._total_steps = event.get("total_steps", self._total_steps)
        self._remaining.add_event(event)
        self._started |= event.get("event") == "start"
        if event.get("event") not in _PRINTED_BY_LAUNCHER:
            self.print_line(render_event(event), str(event.get("level", "info")))

    def print_line(self, line: str, level: str = "info") -> None:
        """Shows one line, unless its level is below the configured one."""
        if self._shows(level):
            self._print(visible(line), level)

    def show_phase(self, phase: str) -> None:
        """Shows the current phase of the ranks.

        Args:
            phase: phase of rank 0 from its heartbeats; empty if unknown.
        """
        if not self._shows("info"):
            return
        if self._started and phase.startswith(SLOW_PHASES):
            label, _, note = phase.partition(", ")
            enter(label, note, said_after_s=_SLOW_PHASE_SAID_AFTER_S)
        elif self._started:
            enter("training", self._position, said_after_s=math.inf)
        else:
            enter("starting ranks", phase)

    def close(self) -> None:
        """Ends the progress display and waits up to two seconds for the output; later lines are plain ones."""
        leave()
        self._outlet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shows(self, level: str) -> bool:
        return _LEVELS.index(level if level in _LEVELS else "info") >= _LEVELS.index(self._level)

    def _print(self, line: str, level: str) -> None:
        self._outlet.write(f"{line}\n")

    def _show_metrics(self, record: Mapping[str, Any]) -> None:
        if "loss" not in record:
            if not is_by_layer(record):
                self.print_line(render_validation(record))
            return
        self._remaining.add_metrics(record)
        step = int(record.get("step", 0))
        self._position = f"step {step}/{self._total_steps}" if self._total_steps else f"step {step}"
        if step % self._every_steps == 0 or step == self._total_steps or record.get("skipped"):
            self.print_line(render_step(record, self._total_steps, self._remaining.seconds(step, self._total_steps)))


def render_step(record: Mapping[str, Any], total_steps: int | None, eta_s: float | None) -> str:
    """Returns one line for a step; missing keys are left out."""
    step = f"step {record.get('step', '?')}" + (f"/{total_steps}" if total_steps else "")
    parts = [step]
    for key, template in (
        ("loss", "loss {:.4f}"),
        ("grad_norm", "grad {:.2f}"),
        ("lr", "lr {:.1e}"),
        ("tokens_per_s", "{:,.0f} tok/s"),
    ):
        if record.get(key) is not None:
            parts.append(template.format(record[key]))
    if record.get("moe/max_load") is not None:
        parts.append(f"load {record['moe/max_load']:.2f}")
    if record.get("moe/dead_experts"):
        parts.append(f"dead experts {record['moe/dead_experts']}")
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.0f}%")
    if eta_s is not None:
        parts.append(f"ETA {render_duration(eta_s)}")
    if record.get("skipped") is not None:
        parts.append(f"skipped {int(record['skipped'])}")
    return " | ".join(parts)


def render_validation(record: Mapping[str, Any]) -> str:
    """Returns one line for a validation, with loss, perplexity and unigram loss of every set, or for task metrics."""
    if not is_validation(record):
        metrics = (f"{key.removeprefix('eval/')} {value:.4g}" for key, value in record.items() if _is_task_value(key))
        return " | ".join([f"tasks at step {record.get('step', '?')}", *metrics])
    parts = [f"validation at step {record.get('step', '?')}"]
    for key, loss in record.items():
        if not (key.startswith("valid/") and key.endswith("/loss")):
            continue
        name = key.split("/")[1]
        perplexity = record.get(f"valid/{name}/ppl", math.exp(min(loss, 700.0)))
        part = f"{name}: loss {loss:.4f} | ppl {perplexity:,.1f}"
        unigram = record.get(f"valid/{name}/unigram_loss")
        parts.append(part if unigram is None else f"{part} | unigram loss {unigram:.4f}")
        average = record.get(f"valid/{name}/average_loss")
        parts += [] if average is None else [f"running average {average:.4f}"]
    return " | ".join(parts)


def is_validation(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl that is not a step is a validation, not evaluation tasks."""
    return any(key.startswith("valid/") for key in record) or not any(key.startswith("eval/") for key in record)


def is_by_layer(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has values of layers, which the console does not show."""
    return any(key.startswith("layers/") for key in record)


def _is_task_value(key: str) -> bool:
    return key.startswith("eval/") and not key.endswith(("_stderr", "/documents"))


def render_event(event: Mapping[str, Any]) -> str:
    """Returns one line for an event: its message, or its fields if it has none."""
    name = str(event.get("event", "event")).replace("_", " ")
    if event.get("message"):
        return f"{name}: {event['message']}"
    fields = [
        f"{key} {_render_value(key, value)}"
        for key, value in event.items()
        if key not in ("time", "event", "level") and value not in (None, "", [], {})
    ]
    return f"{name}: {', '.join(fields)}" if fields else name


def _render_value(key: str, value: Any) -> str:
    if isinstance(value, float):
        return _render_number(key, value)
    return str(value)[:8] if key.endswith("digest") else str(value)


_LEAST_DATE_S = 1e9


def _render_number(key: str, value: float) -> str:
    """Returns a number as text, and seconds since 1970 as a date."""
    if key.endswith("time") and _LEAST_DATE_S < value < _LEAST_DATE_S * 10:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    return f"{value:.4g}"


def open_console(
    run_dir: Path,
    out: TextIO,
    config: LoggingConfig,
    title: str,
    total_steps: int | None = None,
    intervals: Intervals | None = None,
) -> Console:
    """Returns the console that logging.console selects; use it in a `with` block. auto is plain lines without the tool.

    Args:
        run_dir: run directory.
        out: standard output.
        config: logging settings.
        title: name of the run.
        total_steps: planned number of steps; None if unknown.
        intervals: when the run validates and saves, for the remaining time.

    Raises:
        ConfigError: logging.console is live, but `out` is not a terminal, or the tool is not installed.
    """
    kind = config.console
    live = find_tool("live_console") if kind is ConsoleKind.auto and environment.can_redraw(out) else None
    if kind is ConsoleKind.live:
        if not out.isatty():
            raise ConfigError(
                "logging.console = live needs a terminal, but the output goes to a file or a pipe: use "
                "logging.console=auto, which shows plain lines there"
            )
        live = require_tool("live_console", "logging.console=live")
    if live is not None:
        color = not environment.no_color()
        console: Console = live.LiveConsole(run_dir, out, title, config.level, total_steps, color, intervals=intervals)
        return console
    level = config.level
    if kind is ConsoleKind.quiet and level in ("debug", "info"):
        level = "warning"
    return Console(run_dir, out, level, config.every_steps, total_steps, intervals)
