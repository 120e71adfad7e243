"""Starts the real `megads` command in its own process, watches it and reads its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from megads.checkpoint.manifest import read_manifest
from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.runtime.metrics import read_json_lines
from tests.command_server import CommandServer, ForkedProcess
from tests.corpus import VOCAB_SIZE

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_S = 240.0
# What a run computes: bitwise equal after a resume. The other keys of a line are timings.
COMPUTED = ("step", "samples", "tokens", "loss", "grad_norm", "lr", "global_batch_size", "skipped", "batch_hash")


def small_model(corpus: Path, **changes: Any) -> list[str]:
    """Overrides of a model with six heads and a vocabulary size that no number of ranks divides; `__` means a dot."""
    values: dict[str, Any] = {
        "model.num_layers": 2,
        "model.hidden_size": 48,
        "model.num_heads": 6,
        "model.vocab_size": VOCAB_SIZE,
        "train.seq_len": 16,
        "train.global_batch_size": 12,
        "train.micro_batch_size": 2,
        "train.precision": "fp32",
        "optim.lr": 3e-4,
        "optim.min_lr": 0,
        "schedule.warmup_samples": 0,
        "model.max_seq_len": 2048,
        "data.train": f"[{{path: {corpus}}}]",
        "data.split": "[0.9, 0.1]",
        # Measuring the CPU takes seconds, and no test looks at MFU.
        "cluster.peak_tflops": 1,
        # Fault tests look at the first failure; restart tests allow restarts.
        "cluster.max_restarts": 0,
        # On a busy machine the threads of one rank wait for each other.
        "cluster.threads_per_rank": 1,
        # On a busy machine a test may take minutes.
        "checkpoint.every_minutes": 0,
        # 20 samples; tests/evaluate validates on whole sets.
        "evaluation.max_tokens": 320,
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


class Ended(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Command:
    """One process.

    Args:
        folder: its working directory.
        arguments: command line arguments.
        module: module whose main it runs.
        variables: added to the environment.
        server: forks it, which saves its imports; None: a new process.
        out: file for its standard output; None: a temporary one.
        program: beginning of the command line, before the module.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        module: str = "megads.cli.main",
        variables: Mapping[str, str] = {},
        server: CommandServer | None = None,
        out: Path | None = None,
        program: Sequence[str] = (sys.executable, "-m"),
    ):
        self.folder = folder
        # Files, not pipes: a full pipe would block the command. Not in its folder, where tests count its files.
        self._out, self._err = (tempfile.NamedTemporaryFile("w+", prefix=name) for name in ("out.", "err."))  # noqa: SIM115
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
        self.outputs = (out or Path(self._out.name), Path(self._err.name))
        """Files of its standard output and standard error."""
        self.process: ForkedProcess | subprocess.Popen[bytes]
        if server:
            self.process = server.start(folder, module, arguments, environment, *self.outputs)
        else:
            self.process = subprocess.Popen(
                [*program, module, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._out if out is None else out.open("w"),
                stderr=self._err,
            )

    def end(self, timeout_s: float = TIMEOUT_S) -> Ended:
        """Waits until the process ends; returns its exit code and output."""
        code = self.process.wait(timeout=timeout_s)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read())
        return Ended(code, *texts)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Waits until the condition holds; fails if the command ends before that."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            running = self.process.poll() is None
            assert running and time.monotonic() < deadline, f"never got there: {self.end(5) if not running else ''}"
            time.sleep(0.005)

    def processes(self) -> list[psutil.Process]:
        """Returns the launcher and all its descendants."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def kill_everything(self) -> None:
        """Sends SIGKILL to the launcher and all its ranks at once, like a power failure."""
        with suppress(psutil.NoSuchProcess):
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill_everything()
        self._out.close()
        self._err.close()


class StartCommand(Protocol):
    """Starts a `megads` command in `folder`, with `variables` added to its environment.

    `fault` is the name of a function of tests.faults, which every rank runs in place of megads.train.loop:train. `anew`
    starts a new process instead of a fork, so that its loader reads the environment; this takes seconds longer.
    """

    folder: Path

    def __call__(
        self, *arguments: str, fault: str = "", variables: Mapping[str, str] = {}, anew: bool = False
    ) -> Command: ...


def finished_run(start: StartCommand, name: str, arguments: Sequence[str]) -> Path:
    """Trains to the end in a folder of this name; returns the folder."""
    run_dir = start.folder / name
    ended = start("train", *arguments, f"run.dir={run_dir}").end()
    assert ended.code == 0, ended.err
    return run_dir


class _Starter:
    def __init__(self, folder: Path, server: CommandServer | None):
        self.folder, self._server = folder, server
        self.started: list[Command] = []

    def __call__(
        self, *arguments: str, fault: str = "", variables: Mapping[str, str] = {}, anew: bool = False
    ) -> Command:
        module, words = ("tests.faults", (fault, *arguments)) if fault else ("megads.cli.main", arguments)
        self.started.append(Command(self.folder, words, module, variables, None if anew else self._server))
        return self.started[-1]


@contextmanager
def commands_in(folder: Path, server: CommandServer | None = None) -> Iterator[StartCommand]:
    """Yields a starter of commands, as forks of a server's process or new ones; kills those still running."""
    starter = _Starter(folder, server)
    try:
        yield starter
    finally:
        for command in starter.started:
            command.close()


class Launched(Command):
    """A launcher with stand-in ranks, in its own process, to which signals can be sent.

    Args:
        server: forks it; None: a new process.
        run_dir: its run directory; is created.
        options: of tests.launch.small_launch.
        out: file for its standard output; None: a temporary one.
        config: what differs from the default config; `__` means a dot.
    """

    def __init__(self, server: CommandServer | None, run_dir: Path, *options: str, out: Path | None, **config: Any):
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        frozen = RootConfig()
        for name, value in config.items():
            section, key = name.split("__")
            setattr(getattr(frozen, section), key, value)
        freeze(frozen, run_dir / "config.yaml")
        words = (str(run_dir), *options)
        super().__init__(REPOSITORY, words, "tests.launch.small_launch", server=server, out=out)

    def rank_pids(self) -> list[int]:
        """Returns the pids of everything that it started."""
        return [process.pid for process in self.processes()[1:]]


class StartLauncher(Protocol):
    """Starts a launcher; `body` is a function of tests.launch.rank_bodies."""

    def __call__(
        self, body: str, *options: str, ranks: int = 2, out: Path | None = None, **config: Any
    ) -> Launched: ...


@contextmanager
def launchers_in(run_dir: Path, server: CommandServer | None = None) -> Iterator[StartLauncher]:
    """Yields a starter of launchers of one run; kills those still running."""
    started: list[Launched] = []

    def start(body: str, *options: str, ranks: int = 2, out: Path | None = None, **config: Any) -> Launched:
        started.append(Launched(server, run_dir, body, f"--ranks={ranks}", *options, out=out, **config))
        return started[-1]

    try:
        yield start
    finally:
        for launched in started:
            launched.close()


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns what the run computed, step by step."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    return [{key: line[key] for key in COMPUTED} for line in lines if "loss" in line]


def validations_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the validation lines."""
    return [line for line in read_json_lines(run_dir / "metrics.jsonl") if "loss" not in line]


def events_of(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Returns the run's events of one kind."""
    return [line for line in read_json_lines(run_dir / "events.jsonl") if line["event"] == event]


def checkpoint_of(run_dir: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint; it may not exist."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def checksums(checkpoint: Path) -> dict[str, str]:
    """Returns the checksum of every stored slice by tensor, offset and shape."""
    manifest = read_manifest(checkpoint)
    tensors = [tensor for name in manifest.files for tensor in manifest.stored_in(checkpoint, name)]
    return {f"{tensor} of {list(tensor.shape)}": tensor.checksum for tensor in tensors}
