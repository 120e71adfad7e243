"""The live panel on real pseudo-terminals: what the user sees, and that the terminal cannot affect a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.monitor.console import open_console
from megads.runtime.config import ConsoleKind, LoggingConfig, WandbMode
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.tools.live_console import RunProgress
from tests.monitor.screen import OnTerminal, TerminalFile, set_size


def frozen(run_dir: Path, steps: int) -> None:
    config = RootConfig()
    config.run.id, config.run.dir, config.train.steps = "my-run", str(run_dir), steps
    config.logging.wandb.mode = WandbMode.disabled
    run_dir.mkdir(exist_ok=True)
    freeze(config, run_dir / "config.yaml")


def steps_done(run_dir: Path) -> int:
    return sum("loss" in record for record in read_json_lines(run_dir / "metrics.jsonl"))


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., OnTerminal]]:
    opened: list[OnTerminal] = []

    def _open(steps: int) -> OnTerminal:
        frozen(tmp_path, steps)
        opened.append(OnTerminal(tmp_path, 100, 30))
        return opened[-1]

    yield _open
    for one in opened:
        one.kill()


def show_a_run(run_dir: Path, file: TerminalFile, kind: ConsoleKind = ConsoleKind.auto, steps: int = 40) -> str:
    """Shows a run from start to end, as the launcher does; returns everything that was written."""
    metrics, events = MetricsWriter(run_dir, enabled=True), EventWriter(run_dir)
    with open_console(run_dir, file.out, LoggingConfig(console=kind), "my-run", steps) as console:
        console.print_line("run my-run")
        events.write("start", step=0, total_steps=steps, layout="tp1 pp1 dp1")
        for step in range(1, steps + 1):
            metrics.write(
                {"step": step, "loss": 9.0 - step / 10, "grad_norm": 0.5, "lr": 1e-3, "step_time_s": 0.1}
                | {"tokens_per_s": 1234.5, "mfu": 0.31, "skipped": False}
            )
            if step % 10 == 0:
                events.write("checkpoint_saved", step=step, folder=f"step_{step:08d}")
                metrics.write({"step": step, "valid/held_out/loss": 8.5, "valid/held_out/ppl": 4914.8})
            console.poll()
            file.drain()
        events.write("step_skipped", level="warning", step=steps, cause="non-finite \x1b[2Jgradient")
        events.write("exit", exit_code=0, level="debug")
        console.poll()
        console.close()
        console.print_line("afterwards", "error")
    return file.read()


@pytest.fixture
def file(request: pytest.FixtureRequest) -> Iterator[TerminalFile]:
    made = TerminalFile(*getattr(request, "param", (80, 24)))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.parametrize("file", [(120, 40), (80, 24), (44, 16)], indirect=True)
def test_the_panel_stays_below_events(file: TerminalFile, tmp_path: Path) -> None:
    """Catches panels left behind in the scrollback, lines that wrap at the border, and lost events."""
    show_a_run(tmp_path, file)
    shown = file.screen.everything
    panels = [number for number, line in enumerate(shown) if "my-run" in line and line.startswith("╭")]
    assert panels == [len(shown) - 9], "one panel, and only what is said afterwards is below it"
    panel = shown[panels[0] : -1]
    assert all(len(line) == min(file.screen.columns, 100) for line in panel)
    assert [line[-1] for line in panel] == ["╮", *"││││││", "╯"]
    text = "\n".join(panel)
    for part in ("40/40", "loss       5.0000", "8.5000 at step 40", "1,234 tok/s | MFU 31%", "skipped 1 | norm 0.50"):
        assert part in text
    assert "checkpoint step 40, " in text and "█" in text
    above = "".join(shown[: panels[0]])
    assert all(f"checkpoint saved: step {step}," in above for step in (10, 20, 30, 40))
    assert "step skipped: step 40, cause non-finite \\x1b[2Jgradient" in above
    assert "step 7/40" not in above and "│" not in above and "━" not in above
    assert file.screen.clean and file.screen.colored and shown[-1] == "afterwards"


@pytest.mark.always
def test_lines_appear_before_the_ranks_start(file: TerminalFile, tmp_path: Path) -> None:
    """Catches messages of data preparation that are shown only when it is done, and a panel although no ranks start."""
    with open_console(tmp_path, file.out, LoggingConfig(), "my-run", 40) as console:
        console.print_line("making the data")
        console.print_line("it is damaged", "warning")
        file.read()
        assert file.screen.everything == ["making the data", "it is damaged"] and file.screen.colored
    file.read()
    assert file.screen.everything == ["making the data", "it is damaged"] and file.screen.clean


def test_the_panel_says_what_holds_up_the_steps(file: TerminalFile, tmp_path: Path) -> None:
    """Catches a validation or a save that looks like a hung step, or that is still shown after it has ended."""
    with open_console(tmp_path, file.out, LoggingConfig(), "my-run", 40) as console:
        for phase, shown in (
            ("building the engine", "starting ranks, 0s"),
            ("validating, batch 3/40", "validating, batch 3/40"),
            ("saving", "saving"),
        ):
            console.show_phase(phase)
            file.read_frame(console)
            assert shown in "".join(file.screen.lines)
        for step, step_time_s in ((1, 9.0), (2, 1.0)):
            MetricsWriter(tmp_path, enabled=True).write({"step": step, "loss": 2.0, "step_time_s": step_time_s})
        console.show_phase("engine step")
        file.read_frame(console)
        assert "ETA 38s" in "".join(file.screen.lines) and "saving" not in "".join(file.screen.lines)


@pytest.mark.parametrize("file", [(28, 10)], indirect=True)
def test_a_tiny_terminal_gets_one_line(file: TerminalFile, tmp_path: Path) -> None:
    """Catches a panel that fills a small terminal and pushes the lines above it off the screen."""
    text = show_a_run(tmp_path, file)
    assert file.screen.everything[-2] == "step 40/40 | loss 5.0000 | g"
    assert "╭" not in text and file.screen.clean


def test_no_color_and_ascii_terminals_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches colors although NO_COLOR is set, and characters that the terminal's encoding lacks."""
    monkeypatch.setenv("NO_COLOR", "1")
    file = TerminalFile(80, 24, encoding="ascii")
    text = show_a_run(tmp_path, file)
    file.close()
    assert not file.screen.colored and text.isascii()
    assert any(line.startswith("+- my-run") for line in file.screen.everything)
    assert any("####" in line and "40/40" in line for line in file.screen.everything)


def test_a_resumed_panel_shows_steps_up_to_the_resume(file: TerminalFile, tmp_path: Path) -> None:
    """Catches a panel that starts empty, or shows steps after the step that the run resumes from."""
    show_a_run(tmp_path, file)
    file.screen = type(file.screen)(80, 24)
    events = EventWriter(tmp_path)
    with open_console(tmp_path, file.out, LoggingConfig(), "my-run", 60) as console:
        events.write("start", step=30, total_steps=60)
        MetricsWriter(tmp_path, enabled=True).drop_after(30)
        console.poll()
        file.read()
    file.read()
    panel = "\n".join(file.screen.everything)
    assert "30/60" in panel and "checkpoint step 40" in panel and "loss       no step yet" in panel


def test_a_resumed_panel_shows_progress_of_earlier_starts(file: TerminalFile, tmp_path: Path) -> None:
    """Catches a resumed panel without the run's earlier losses, validation, checkpoint and skipped steps, and an ETA
    computed from steps of earlier starts."""
    show_a_run(tmp_path, file)
    progress = RunProgress.from_earlier_starts(tmp_path, 60)
    assert list(progress.losses) == [(step, pytest.approx(9 - step / 10)) for step in range(1, 41)]
    assert (progress.step, progress.total_steps, progress.checkpoint_step, progress.skipped) == (40, 60, 40, 1)
    assert progress.validation["valid/held_out/loss"] == 8.5 and progress.layout == "tp1 pp1 dp1"
    assert progress.eta_s is None and not progress.ended
    progress.add_metrics({"step": 41, "loss": 5.0, "step_time_s": 9.0})
    progress.add_metrics({"step": 42, "loss": 5.0, "step_time_s": 2.0})
    assert progress.eta_s == 18 * 2.0


def test_dumb_terminals_get_no_control_codes(
    file: TerminalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches control codes with console=plain or on a dumb terminal, and step lines with console=quiet."""
    plain = show_a_run(tmp_path, file, ConsoleKind.plain)
    assert "\x1b[?" not in plain and "step 40/40 | loss 5.0000" in plain
    quiet = show_a_run(tmp_path, file, ConsoleKind.quiet)
    assert [line.split(":")[0] for line in quiet.split("\r\n")] == ["step skipped", "afterwards", ""]
    monkeypatch.setenv("TERM", "dumb")
    assert "step 40/40 | loss 5.0000" in show_a_run(tmp_path, file)


@pytest.mark.slow
@pytest.mark.distributed
def test_resize_and_ctrl_c_leave_a_clean_terminal(terminal: Callable[..., OnTerminal]) -> None:
    """Catches a panel of the old width after a resize, and a terminal without cursor or prompt after Ctrl-C."""
    one = terminal(steps=2000)
    one.read_until(lambda: "checkpoint saved: step 10," in one.text)
    set_size(one.master, 60, 30)
    marker = len(one.raw)
    one.read_until(lambda: "╮" in one.raw[marker + 4096 :].decode(errors="replace"))
    panel = one.text[one.text.rindex("╭") :]
    assert panel[: panel.index("╮") + 1].count("─") < 60
    one.type("\x03")
    assert one.read_to_end() == 5
    assert "SIGINT: saving and stopping" in one.text
    assert one.screen.clean


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stalled_terminal_holds_up_nothing(terminal: Callable[..., OnTerminal], tmp_path: Path) -> None:
    """Catches a launcher that blocks on Ctrl-S or a stalled connection: it must end with its run."""
    one = terminal(steps=80)
    one.read_until(lambda: "my-run" in one.text)
    # Nothing reads from here on: the terminal's buffer of 4 KiB is soon full.
    one.process.wait(timeout=60)
    assert one.process.returncode == 0
    assert steps_done(tmp_path) == 80


@pytest.mark.slow
@pytest.mark.distributed
def test_a_closed_terminal_ends_the_run_as_asked(terminal: Callable[..., OnTerminal], tmp_path: Path) -> None:
    """Catches a lost connection that kills the run without saving: SIGHUP means save and stop."""
    one = terminal(steps=2000)
    one.read_until(lambda: "my-run" in one.text)
    deadline = time.monotonic() + 60
    while not steps_done(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    one.close()
    assert one.process.wait(timeout=60) == 5
    assert any(event["event"] == "checkpoint_saved" for event in read_json_lines(tmp_path / "events.jsonl"))


def test_console_live_without_a_terminal_is_refused(tmp_path: Path) -> None:
    """Catches control codes written to a file."""
    config = LoggingConfig(console=ConsoleKind.live)
    with (tmp_path / "out").open("w") as out, pytest.raises(ConfigError, match=r"logging\.console=auto"):
        open_console(tmp_path, out, config, "a")


def test_a_stalled_reader_is_told_how_many_lines_it_missed(tmp_path: Path) -> None:
    """Catches an outlet that buffers everything in memory, or drops lines without a message."""
    from megads.monitor.console import NonBlockingWriter

    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as out:
        outlet = NonBlockingWriter(out)
        # Nobody reads yet: a write that waited would not return.
        for number in range(40):
            outlet.write(f"{number:05d} {'x' * 65530}\n")
        assert not outlet.idle
        os.set_blocking(read_end, False)
        received = b""
        deadline = time.monotonic() + 240
        while not outlet.idle and time.monotonic() < deadline:
            try:
                received += os.read(read_end, 2**20)
            except BlockingIOError:
                time.sleep(0.01)
        outlet.write("the end\n")
        outlet.close()
        received += os.read(read_end, 2**20)
    os.close(read_end)
    assert received.startswith(b"00000 x")
    assert b"lines not shown: the terminal did not take them]\nthe end\n" in received
    assert len(received) < 2**21
