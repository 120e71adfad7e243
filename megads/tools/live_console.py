"""Live console for terminals (logging.console=live): a panel at the bottom, drawn with rich, and events above it."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from megads.api import EVENTS_FILE, METRICS_FILE, Console, VisibleConsole, read_json_lines, render_duration
from megads.monitor.console import is_by_layer, is_validation, render_step, render_validation
from megads.monitor.eta import Intervals, RemainingTime
from megads.runtime.files import read_end
from megads.runtime.heartbeat import SLOW_PHASES
from megads.runtime.progress import leave
from megads.runtime.rich_console import LiveRegion, terminal_size

_HISTORY_STEPS = 256
_HISTORY_BYTES = 256 * 1024


@dataclass
class RunProgress:
    """Progress of a run, updated with the records of its files.

    Attributes:
        total_steps: planned number of steps; None if unknown.
        step: last finished step.
        record: metrics line of the last step; empty before the first step.
        losses: (step, loss) of the last steps, oldest first.
        remaining: remaining time.
        checkpoint_step: step of the last checkpoint; None if there is none.
        checkpoint_time: commit time of the last checkpoint, in seconds since 1970.
        validation: last validation line.
        skipped: number of skipped steps.
        layout: parallel layout, for example tp2 cp1 pp2 dp1.
        ended: whether the run has ended.
    """

    total_steps: int | None = None
    step: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_HISTORY_STEPS))
    remaining: RemainingTime = field(default_factory=RemainingTime)
    checkpoint_step: int | None = None
    checkpoint_time: float = 0.0
    validation: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0
    layout: str = ""
    ended: bool = False

    @classmethod
    def from_earlier_starts(
        cls, run_dir: Path, total_steps: int | None, intervals: Intervals | None = None
    ) -> RunProgress:
        """Returns the progress recorded by earlier starts of the run."""
        progress = cls(total_steps)
        for event in read_json_lines(run_dir / EVENTS_FILE):
            progress.add_event(event)
        for record in read_end(run_dir / METRICS_FILE, _HISTORY_BYTES):
            progress.add_metrics(record)
        progress.total_steps = total_steps
        progress.remaining = RemainingTime.from_earlier_starts(run_dir, intervals)
        progress.ended = False
        return progress

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the planned end; None if unknown."""
        return self.remaining.seconds(self.step, self.total_steps)

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Adds a line of events.jsonl."""
        name = event.get("event")
        self.remaining.add_event(event)
        if name == "start":
            self._start_from(int(event.get("step", 0)))
            self.total_steps = event.get("total_steps", self.total_steps)
            self.layout = str(event.get("layout", ""))
        elif name == "checkpoint_saved":
            self.checkpoint_step, self.checkpoint_time = event.get("step"), float(event.get("time", 0.0))
        elif name == "step_skipped":
            self.skipped += 1
        elif name == "exit":
            self.ended = True

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl."""
        if "loss" not in record:
            shown = is_validation(record) and not is_by_layer(record)
            self.validation = record if shown else self.validation
            return
        self.record, self.step = record, int(record.get("step", 0))
        self.losses.append((self.step, float(record["loss"])))
        self.remaining.add_metrics(record)

    def _start_from(self, step: int) -> None:
        """Discards the steps beyond the checkpoint from which the run continues."""
        self.step = step
        while self.losses and self.losses[-1][0] > step:
            self.losses.pop()
        if self.record.get("step", 0) > step:
            self.record = {}
        if self.validation.get("step", 0) > step:
            self.validation = {}
        self.ended = False


_MAX_WIDTH = 100
# On a smaller terminal, a single line is drawn instead of the panel.
_MIN_PANEL_WIDTH = 30
_MIN_PANEL_HEIGHT = 12
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-:=+*#"
_QUIET_AFTER_S = 10.0


@dataclass(frozen=True)
class TerminalTraits:
    """Capabilities of a terminal.

    Attributes:
        color: whether to use colors (NO_COLOR is not set).
        unicode: whether the stream's encoding has all Unicode characters.
    """

    color: bool = True
    unicode: bool = True


@dataclass(frozen=True)
class PanelState:
    """Content of a panel that is not from the run's records.

    Attributes:
        title: name of the run.
        now: current time, in seconds since 1970.
        elapsed_s: seconds since this start.
        silent_s: seconds since the last step, or since this start.
        phase: phase of rank 0 from its heartbeats; empty if unknown.
    """

    title: str
    now: float
    elapsed_s: float
    silent_s: float
    phase: str = ""

    @property
    def starting(self) -> str:
        """Text shown before the first step."""
        return f"starting ranks, {render_duration(self.elapsed_s)}"

    @property
    def slow_phase(self) -> str:
        """Current phase if it delays training, for example a save; else empty."""
        return self.phase if self.phase.startswith(SLOW_PHASES) else ""


def panel_lines(progress: RunProgress, moment: PanelState, width: int, height: int, look: TerminalTraits) -> list[str]:
    """Returns the panel's lines, each at most `width` cells, with color codes if enabled.

    Args:
        progress: progress of the run.
        moment: title, times and phase.
        width: columns of the terminal.
        height: rows of the terminal; a small terminal gets a single line.
        look: capabilities of the terminal.
    """
    width = min(width, _MAX_WIDTH)
    renderable: RenderableType
    if width < _MIN_PANEL_WIDTH or height < _MIN_PANEL_HEIGHT:
        renderable = Text(_one_line(progress, moment), no_wrap=True, overflow="crop")
    else:
        renderable = _panel(progress, moment, width, look)
    return _lines(renderable, width, look)


def _lines(renderable: RenderableType, width: int, look: TerminalTraits) -> list[str]:
    """Renders to text without reading colors and sizes from the environment."""
    console = VisibleConsole(
        width=width,
        height=100,
        force_terminal=True,
        legacy_windows=False,
        color_system="standard" if look.color else None,
        no_color=not look.color,
        _environ={},
    )
    lines = console.render_lines(renderable, console.options.update_width(width), pad=False)
    return [_ansi(line, look) for line in lines]


def _ansi(line: Sequence[Segment], look: TerminalTraits) -> str:
    if not look.color:
        return "".join(segment.text for segment in line)
    return "".join((segment.style or Style.null()).render(segment.text) for segment in line)


def _one_line(progress: RunProgress, moment: PanelState) -> str:
    if not progress.record:
        return f"{moment.title}: {moment.slow_phase or moment.starting}"
    if moment.slow_phase and not progress.ended:
        return f"step {progress.step}: {moment.slow_phase}"
    return render_step(progress.record, progress.total_steps, progress.eta_s)


def _panel(progress: RunProgress, moment: PanelState, width: int, look: TerminalTraits) -> Panel:
    inside = width - 4
    rows = Table.grid(padding=(0, 1), expand=True)
    rows.add_column(style="dim", no_wrap=True, width=10)
    # A value that is cut off without a sign would be read as another one.
    rows.add_column(no_wrap=True, overflow="ellipsis" if look.unicode else "crop", ratio=1)
    rows.add_row("loss", _loss(progress, inside - 11, look))
    rows.add_row("validation", _validation(progress))
    rows.add_row("speed", _speed(progress))
    rows.add_row("gradient", _gradient(progress))
    rows.add_row("checkpoint", _checkpoint(progress, moment.now))
    title = Text(moment.title, style="bold not dim", no_wrap=True, overflow="ellipsis")
    if progress.layout and width >= 60:
        title.append(f"  {progress.layout}", style="dim")
    return Panel(
        Group(_progress_line(progress, moment, inside, look), rows),
        title=title,
        title_align="left",
        border_style="dim",
        width=width,
        box=box.ROUNDED if look.unicode else box.ASCII,
    )


def _progress_line(progress: RunProgress, moment: PanelState, inside: int, look: TerminalTraits) -> Table:
    """Returns progress bar, step count, and remaining time or current phase."""
    total = progress.total_steps
    counts = f"{progress.step:,}/{total:,}" if total else f"{progress.step:,}"
    if moment.slow_phase and not progress.ended:
        time_text = moment.slow_phase
    elif not progress.record and not progress.ended:
        time_text = moment.starting
    elif progress.ended or progress.eta_s is None:
        time_text = render_duration(moment.elapsed_s)
    elif moment.silent_s > max(_QUIET_AFTER_S, 3 * (progress.remaining.step_s or 0.0)):
        time_text = f"last step {render_duration(moment.silent_s)} ago"
    else:
        time_text = f"ETA {render_duration(progress.eta_s)}"
    line = Table.grid(padding=(0, 1), expand=True)
    bar_width = inside - len(counts) - len(time_text) - 2
    if total and bar_width >= 8:
        line.add_column(no_wrap=True, width=bar_width)
        line.add_column(no_wrap=True, width=len(counts))
        line.add_column(no_wrap=True, width=len(time_text))
        line.add_row(_bar(progress.step / total, bar_width, look), counts, Text(time_text, style="dim"))
    else:
        line.add_column(no_wrap=True, overflow="crop")
        line.add_row(f"step {counts}  {time_text}")
    return line


def _bar(share: float, width: int, look: TerminalTraits) -> RenderableType:
    if look.unicode and look.color:
        return ProgressBar(total=1.0, completed=min(1.0, share), width=width, complete_style="cyan")
    done = round(min(1.0, share) * width)
    full, empty = ("█", "░") if look.unicode else ("#", ".")
    return Text(full * done + empty * (width - done))


def _loss(progress: RunProgress, width: int, look: TerminalTraits) -> Text:
    if not progress.record:
        return Text("no step yet", style="dim")
    text = Text(f"{progress.record['loss']:.4f}", style="bold")
    room = width - len(text) - 2
    if room >= 8:
        bars = sparkline([loss for _, loss in progress.losses][-min(room, 60) :], look.unicode)
        text.append(f"  {bars}", style="not bold cyan")
    return text


def sparkline(values: Sequence[float], unicode: bool = True) -> str:
    """Returns one bar character per value, from lowest to highest; "x" for a non-finite value."""
    bars = _BARS if unicode else _ASCII_BARS
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "x" * len(values)
    low, high = min(finite), max(finite)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] if math.isfinite(value) else "x" for value in values)


def _validation(progress: RunProgress) -> Text:
    record = progress.validation
    for key, loss in record.items():
        if key.startswith("valid/") and key.endswith("/loss"):
            text = Text(f"{loss:.4f}")
            perplexity = record.get(key.removesuffix("loss") + "ppl")
            unigram = record.get(key.removesuffix("loss") + "unigram_loss")
            details = f" at step {record.get('step', '?')}"
            details += "" if perplexity is None else f", ppl {perplexity:,.1f}"
            details += "" if unigram is None else f", unigram {unigram:.4f}"
            return text.append(details, style="dim")
    return Text("none yet", style="dim")


def _speed(progress: RunProgress) -> Text:
    record, parts = progress.record, []
    if record.get("tokens_per_s") is not None:
        parts.append(f"{record['tokens_per_s']:,.0f} tok/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.0f}%")
    if (step_s := progress.remaining.step_s) is not None:
        parts.append(f"{step_s:.3g} s/step")
    return Text(" | ".join(parts) or "-")


def _gradient(progress: RunProgress) -> Text:
    record, parts = progress.record, []
    if record.get("grad_norm") is not None:
        parts.append(Text(f"norm {record['grad_norm']:.2f}"))
    if record.get("lr") is not None:
        parts.append(Text(f"lr {record['lr']:.1e}"))
    skipped = Text(f"skipped {progress.skipped}", style="bold red" if progress.skipped else "")
    # A narrow terminal cuts off the end of the line.
    return Text(" | ").join([skipped, *parts] if progress.skipped else [*parts, skipped])


def _checkpoint(progress: RunProgress, now: float) -> Text:
    if progress.checkpoint_step is None:
        return Text("none yet", style="dim")
    age = render_duration(max(0.0, now - progress.checkpoint_time))
    return Text(f"step {progress.checkpoint_step:,}").append(f", {age} ago", style="dim")


_REFRESH_S = 0.25
_COLORS = {"debug": "2", "warning": "33", "error": "31"}


class LiveConsole(Console):
    """Shows steps in a panel and everything else as lines above it.

    Args:
        run_dir: run directory; the panel includes the progress of earlier starts.
        out: terminal.
        title: name of the run.
        level: lowest level of the lines above the panel.
        total_steps: planned number of steps; None if unknown.
        color: whether to use colors.
        size: returns the current terminal size, which may change at any time; None queries `out`.
        intervals: when the run validates and saves, for the remaining time.
    """

    def __init__(
        self,
        run_dir: Path,
        out: TextIO,
        title: str,
        level: str = "info",
        total_steps: int | None = None,
        color: bool = True,
        size: Callable[[], os.terminal_size] | None = None,
        intervals: Intervals | None = None,
    ):
        super().__init__(run_dir, out, level, total_steps=total_steps, intervals=intervals)
        self._progress = RunProgress.from_earlier_starts(run_dir, total_steps, intervals)
        self._title = title
        self._look = TerminalTraits(color, self._outlet.unicode)
        self._size = size or (lambda: terminal_size(out))
        self._region = LiveRegion()
        self._open, self._begun = True, False
        self._phase = ""
        self._begin = self._last_step = time.monotonic()
        self._next_draw = 0.0

    def poll(self) -> None:
        if not self._begun:
            leave()
            self._begun, self._begin = True, time.monotonic()
            self._last_step = self._begin
        super().poll()
        # A slow terminal skips frames, so that the next one it draws is current.
        if self._open and time.monotonic() >= self._next_draw and self._outlet.idle:
            self._draw()

    def show_phase(self, phase: str) -> None:
        self._phase = phase

    def close(self) -> None:
        """Draws the panel a last time and leaves it on the screen."""
        if self._open and self._begun:
            self._draw()
        self._open = False
        super().close()

    def _draw(self) -> None:
        now = time.monotonic()
        self._next_draw = now + _REFRESH_S
        width, height = self._size()
        moment = PanelState(self._title, time.time(), now - self._begin, now - self._last_step, self._phase)
        lines = panel_lines(self._progress, moment, width, height, self._look)
        self._outlet.write(self._region.update(lines, width))

    def _show_event(self, event: Mapping[str, Any]) -> None:
        self._progress.add_event(event)
        super()._show_event(event)

    def _show_metrics(self, record: Mapping[str, Any]) -> None:
        self._progress.add_metrics(record)
        if "loss" in record:
            self._last_step = time.monotonic()
        elif not is_by_layer(record):
            self.print_line(render_validation(record))

    def _print(self, line: str, level: str) -> None:
        if not self._open:
            super()._print(line, level)
            return
        for part in line.splitlines():
            clean = "".join(character if character.isprintable() else "?" for character in part.expandtabs())
            code = _COLORS.get(level) if self._look.color else None
            shown = f"\x1b[{code}m{clean}\x1b[0m" if code else clean
            if self._begun:
                self._region.print_above(shown)
            else:
                self._outlet.write(f"{shown}\n")
        self._next_draw = 0.0
