"""Debuggers in ranks, with real ones: a rank in the process of the command, a rank that waits, and failing steps."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.command import REPOSITORY, TIMEOUT_S, StartCommand, events_of, finished_run, small_model, steps_of

PLUGIN = """\
import megads


@megads.register_hook("watch")
class Watch:
    def __init__(self, options, context):
        self.rank = context.rank

    def on_start(self, state):
        pass

    def on_step(self, info):
        seen = 100 * info.step
        {statement}
        print("hook after", seen, flush=True)

    def on_end(self, state):
        pass
"""
LINE = next(number for number, line in enumerate(PLUGIN.splitlines(), 1) if "{statement}" in line)
FAILING = '''\
import torch
import megads


@megads.register_hook("fail")
class Fail:
    """Makes the second step fail in the middle of the model."""

    def __init__(self, options, context):
        self.engine = context.engine

    def on_start(self, state):
        pass

    def on_step(self, info):
        mlp = dict(self.engine.layers())["blocks.1"].mlp
        mlp.down.weight.data = mlp.down.weight.data[:, :-1].contiguous()

    def on_end(self, state):
        pass
'''


def write_plugin(folder: Path, statement: str = "pass", text: str = PLUGIN) -> list[str]:
    """Writes a plugin; returns the overrides that use it."""
    (folder / "watching.py").write_text(text.replace("{statement}", statement))
    return ["plugins=[watching]", f"hooks.{'watch' if text is PLUGIN else 'fail'}={{}}"]


@contextmanager
def process(folder: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A Python process whose input, output and errors are pipes; killed at the end."""
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{folder}"}
    started = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def in_process(corpus: Path, folder: Path, *more: str, steps: int = 4) -> list[str]:
    overrides = small_model(corpus, train__steps=steps, cluster__in_process=True, logging__straggler_every_steps="null")
    return ["megads", "train", *overrides, f"run.dir={folder / 'run'}", *more]


@pytest.mark.distributed
def test_pdb_stops_in_a_plugin_and_the_run_goes_on(corpus: Path, tmp_path: Path, megads: StartCommand) -> None:
    """Catches a debugger that cannot reach the rank, output that it loses, and a run that computes something else or
    does not end with 0 under it."""
    words = [*write_plugin(tmp_path), "run.save_before_limit_s=null"]
    commands = f"b {tmp_path / 'watching.py'}:{LINE + 1}, info.step == 2\nc\np 'seen is', seen\nc\nq\n"
    with process(tmp_path, ["-m", "pdb", "-m", *in_process(corpus, tmp_path, *words)]) as command:
        out, _ = command.communicate(commands, timeout=TIMEOUT_S)
    assert "('seen is', 200)" in out and "hook after 400" in out and "Exit status: 0" in out, out
    assert command.returncode == 0
    assert len(events_of(tmp_path / "run", "checkpoint_saved")) == 1
    plain = finished_run(megads, "plain", small_model(corpus, train__steps=4))
    assert steps_of(tmp_path / "run") == steps_of(plain)


@pytest.mark.distributed
def test_breakpoint_reads_the_terminal_of_the_command(corpus: Path, tmp_path: Path) -> None:
    """Catches breakpoint() in a model that reads the end of a closed input, and a step that cannot be left."""
    words = write_plugin(tmp_path, "breakpoint()")
    with process(tmp_path, ["-m", *in_process(corpus, tmp_path, *words, steps=2)]) as command:
        out, _ = command.communicate("p 'first', seen\nc\np 'second', seen\nc\n", timeout=TIMEOUT_S)
    assert command.returncode == 0, out
    assert "('first', 100)" in out and "('second', 200)" in out


@pytest.mark.distributed
def test_quitting_the_debugger_ends_the_run(corpus: Path, tmp_path: Path) -> None:
    """Catches `quit` that is reported as a bug of the rank, and a run directory that stays locked after it."""
    words = write_plugin(tmp_path, "breakpoint()")
    with process(tmp_path, ["-m", *in_process(corpus, tmp_path, *words, steps=2)]) as command:
        out, _ = command.communicate("q\n", timeout=TIMEOUT_S)
    assert command.returncode == 130 and "Traceback" not in out, out
    with process(tmp_path, ["-m", *in_process(corpus, tmp_path, *write_plugin(tmp_path), steps=2)]) as command:
        assert "step 2/2" in command.communicate(timeout=TIMEOUT_S)[0]
    assert command.returncode == 0


@pytest.mark.distributed
def test_ctrl_c_saves_and_stops(corpus: Path, tmp_path: Path) -> None:
    """Catches a KeyboardInterrupt in the middle of a step instead of a save, and a second one that is not heard while a
    step takes for ever."""
    run_dir = tmp_path / "run"
    words = write_plugin(tmp_path, "import time; time.sleep(0.05)")
    with process(tmp_path, ["-m", *in_process(corpus, tmp_path, *words, steps=100_000)]) as command:
        wait_for(lambda: len(steps_of(run_dir)) > 2, command)
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 5 and "Traceback" not in out, out
    assert len(events_of(run_dir, "checkpoint_saved")) == 1
    words = write_plugin(tmp_path, "import time; time.sleep(600)")
    with process(tmp_path, ["-m", *in_process(corpus, tmp_path, *words, steps=100_000)]) as command:
        before = len(steps_of(run_dir))
        wait_for(lambda: len(steps_of(run_dir)) > before, command)
        for _ in range(2):
            command.send_signal(signal.SIGINT)
            time.sleep(0.5)
        out, _ = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 130, out


def wait_for(condition: Callable[[], object], command: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert command.poll() is None and time.monotonic() < deadline, command.communicate(timeout=1)
        time.sleep(0.02)


@pytest.mark.distributed
def test_a_failure_is_left_to_the_debugger(corpus: Path, tmp_path: Path) -> None:
    """Catches a failure that is turned into an exit code before a debugger sees its frames."""
    words = write_plugin(tmp_path, text=FAILING)
    with process(tmp_path, ["-m", "pdb", "-m", *in_process(corpus, tmp_path, *words)]) as command:
        out, _ = command.communicate("c\nw\nq\nq\n", timeout=TIMEOUT_S)
    assert "post mortem" in out, out
    assert [event["exit_code"] for event in events_of(tmp_path / "run", "failure")] == [1]
    with process(tmp_path, ["-m", *in_process(corpus, tmp_path, *words)]) as command:
        out, _ = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 1 and "Traceback" in out, out
    assert out.count("module blocks.1.mlp") == 2, "the message and the traceback name the module"


@pytest.mark.always
@pytest.mark.distributed
def test_a_failing_step_is_described(corpus: Path, megads: StartCommand) -> None:
    """Catches a failure whose message does not say where it happened: step, config, samples, documents, module and the
    shapes of its inputs."""
    words = write_plugin(megads.folder, text=FAILING)
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, train__steps=4, parallel__dp=2)
    variables = {"PYTHONPATH": f"{REPOSITORY}:{megads.folder}"}
    ended = megads("train", *overrides, f"run.dir={run_dir}", *words, variables=variables).end()
    assert ended.code == 1
    [failure] = events_of(run_dir, "failure")
    message = failure["message"]
    assert f"in step 2 of {run_dir}" in message and "config.yaml, sha256 " in message
    first = 12 if failure["rank"] == 0 else 14
    assert f"samples 12 to 23 of the run, of this rank {first} to {first + 1}, {first + 4}" in message
    assert re.search(rf"documents of {corpus} \d+", message)
    assert re.search(r"module blocks\.1\.mlp\S*, \w+, with \w+ float32 \[2, 16, \d+\] on cpu", message)
    log = (run_dir / "logs" / f"rank_{failure['rank']:05d}.log").read_text()
    assert "module blocks.1.mlp" in log
    assert message.splitlines()[1].strip() in ended.err


@pytest.mark.distributed
def test_breakpoint_in_another_process_is_refused(corpus: Path, megads: StartCommand) -> None:
    """Catches a rank that ends with BdbQuit, which says neither why nor what to do."""
    words = write_plugin(megads.folder, "breakpoint()")
    variables = {"PYTHONPATH": f"{REPOSITORY}:{megads.folder}"}
    ended = megads("train", *small_model(corpus, train__steps=2), *words, variables=variables).end()
    assert ended.code == 2 and "cluster.in_process=true" in ended.err and "cluster.debug_rank" in ended.err


REFUSED = {
    "several ranks": (["parallel.dp=2", "cluster.in_process=true"], "cluster.debug_rank=<rank>"),
    "slurm": (["cluster=slurm", "cluster.in_process=true"], "cluster=local"),
    "a live panel": (["cluster.in_process=true", "logging.console=live"], "logging.console=auto"),
    "both": (["cluster.in_process=true", "cluster.debug_rank=0"], "set one of them"),
    "no such rank": (["parallel.dp=2", "cluster.debug_rank=2"], "ranks 0 to 1"),
    "no port": (["cluster.debug_rank=0", "cluster.debug_port=70000"], "from 1 to 65535"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_debugged_is_refused(case: str, corpus: Path, megads: StartCommand) -> None:
    """Catches a debugging key that has no effect."""
    words, remedy = REFUSED[case]
    ended = megads("train", *small_model(corpus, train__steps=2), *words).end()
    assert ended.code == 2 and remedy in ended.err, ended.err


@pytest.mark.distributed
def test_one_of_two_ranks_waits_for_pdb(corpus: Path, tmp_path: Path) -> None:
    """Catches a rank that does not wait, peers that time out meanwhile or stop at the same breakpoint, a lost session
    that ends the run, and a socket that others could connect to."""
    run_dir = tmp_path / "run"
    # ipykernel brings debugpy, which would take the place of pdb.
    (tmp_path / "sitecustomize.py").write_text("import sys\n\nsys.modules['debugpy'] = None\n")
    words = write_plugin(tmp_path, "breakpoint()")
    overrides = small_model(
        corpus, parallel__dp=2, train__steps=3, cluster__timeout_s=5, cluster__heartbeat_timeout_s=10
    )
    overrides += [f"run.dir={run_dir}", "cluster.debug_rank=1", *words]
    with process(tmp_path, ["-m", "megads", "train", *overrides]) as command:
        wait_for(lambda: events_of(run_dir, "debugger"), command)
        [event] = events_of(run_dir, "debugger")
        assert event["rank"] == 1 and event["socket"] in event["message"]
        assert Path(event["socket"]).parent.stat().st_mode & 0o77 == 0
        time.sleep(6)  # longer than the timeout of collectives
        with process(tmp_path, ["-m", "megads.tools.debug.debugger", event["socket"]]) as client:
            assert client.stdin is not None and client.stdout is not None
            client.stdin.write("c\np 'seen', seen, self.rank\n")
            client.stdin.flush()
            read_until(client.stdout, "('seen', 100, 1)")
        # The client is gone: the rank waits for another at its next breakpoint.
        wait_for(lambda: len(events_of(run_dir, "debugger")) == 2, command)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(event["socket"])
            read = other.makefile("r")
            for number in (2, 3):
                other.sendall(b"p 'again', seen\nc\n")
                read_until(read, f"('again', {number}00)")
            out, _ = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 0, out
    assert "waits for a debugger" in out and len(steps_of(run_dir)) == 3


def read_until(stream: IO[str], end: str) -> None:
    text = ""
    while end not in text:
        line = stream.readline()
        assert line, text
        text += line


@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("debugpy") is None, reason="debugpy is not installed")
def test_one_of_two_ranks_waits_for_debugpy(corpus: Path, tmp_path: Path) -> None:
    """Catches a rank that does not listen on the port that it names."""
    from tests.distributed import free_port

    run_dir, port = tmp_path / "run", free_port()
    overrides = small_model(corpus, parallel__dp=2, train__steps=2, cluster__debug_rank=1, cluster__debug_port=port)
    with process(tmp_path, ["-m", "megads", "train", *overrides, f"run.dir={run_dir}"]) as command:
        wait_for(lambda: events_of(run_dir, "debugger"), command)
        assert f"127.0.0.1:{port}" in events_of(run_dir, "debugger")[0]["message"]
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
