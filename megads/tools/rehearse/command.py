"""`megads rehearse -- sbatch ...`: runs a user's batch script, scaled down, on a private SLURM and reports findings."""

from __future__ import annotations

import argparse
import dataclasses
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megads.api import (
    EVENTS_FILE,
    EXIT_KILLED,
    EXIT_OK,
    METRICS_FILE,
    ConfigError,
    IndexedDatasetWriter,
    MegadsError,
    Preempted,
    child_environment,
    read_json_lines,
)
from megads.runtime.environment import REHEARSAL_VARIABLE, without_commands
from megads.tools.doctor.finding import Finding, Status, ok, problem, show
from megads.tools.rehearse.notes import (
    OUTPUT_FILE,
    VOCAB_SIZE,
    Orders,
    RehearsedStart,
    read_starts,
    write_orders,
)
from megads.tools.rehearse.paper import (
    check_options,
    check_output,
    check_requeue,
    check_signal,
    check_site,
    of_this_machine,
    refused_options,
)
from megads.tools.rehearse.private_slurm import ClusterSize, PrivateSlurm, SlurmUnavailableError, unavailable_reason
from megads.tools.rehearse.request import Request, UnknownOptionError, read_request

_SEPARATOR = "--"
_TIMEOUT_S = 900.0
# Resources that each node of the private cluster claims: large enough that no job waits for them.
_CPUS, _MEMORY_MIB = 1024, 4_000_000
# More steps than any rehearsal trains before its signal.
_NO_LAST_STEP = 1_000_000
_DOCUMENTS, _DOCUMENT_TOKENS = 64, 400
_DESCRIPTION = """\
Runs your batch script, scaled down, on a private SLURM on this machine, before it waits for days in a real queue.

It reads the #SBATCH lines and the options of your command and checks the requested layout without running it (sizes,
ranks against nodes x GPUs, memory, data, folders). It then submits the script: a few processes on at most two nodes
train a tiny model with the same kind of layout. They receive the signal that the script asks for and must save a
checkpoint, exit with code 6, be requeued and resume. A table lists the findings and what to do about them."""
_EPILOG = """\
examples:
  megads rehearse -- sbatch scripts/slurm/train.sbatch experiment=bloom_176b parallel.tp=4
  megads rehearse --gpu-memory-gib 80 -- sbatch --nodes=8 --gpus-per-node=8 my.sbatch model=bloom_7b1
  megads rehearse --elsewhere --without module -- sbatch my.sbatch          (on a laptop)

It needs SLURM's programs (install as root: scripts/install_slurm.sh). It does not touch your cluster's queue or your
runs. Exit codes: 0 no problem; 2 a problem was found, or the command cannot be rehearsed; 1 a bug; 130 interrupted."""


def run(arguments: Sequence[str]) -> int:
    """Rehearses and returns the exit code.

    Args:
        arguments: options, two dashes, the user's command.
    """
    options, command = _split(list(arguments))
    try:
        asked = _parser().parse_args(options)
    except SystemExit as stop:
        # argparse has already printed the help or the error.
        return EXIT_OK if stop.code == 0 else ConfigError.exit_code
    start = time.monotonic()
    # Handled like Ctrl-C, so that the private cluster is stopped.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        findings = rehearse(command, asked)
    except MegadsError as error:
        print(f"megads rehearse: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("megads rehearse: interrupted; the private SLURM is stopped", file=sys.stderr)
        return EXIT_KILLED
    finally:
        signal.signal(signal.SIGTERM, before)
    print()
    show(findings)
    print(_summary(findings, time.monotonic() - start))
    return ConfigError.exit_code if _problems(findings) else EXIT_OK


def rehearse(command: Sequence[str], asked: argparse.Namespace) -> list[Finding]:
    """Rehearses a command.

    Args:
        command: the user's command, beginning with sbatch.
        asked: options of megads rehearse.

    Returns:
        The findings, in the order of the checks.

    Raises:
        ConfigError: the command cannot be rehearsed, or --keep names a folder that cannot be created.
        SlurmUnavailableError: SLURM is not installed on this machine, or does not start.
    """
    try:
        request = read_request(command)
    except UnknownOptionError as error:
        return [refused_options(error)]
    if reason := unavailable_reason():
        raise SlurmUnavailableError(reason)
    nodes = min(2, request.nodes)
    gpus = max(1, asked.ranks // nodes) if request.gpus_per_node else 0
    size = ClusterSize(nodes, _CPUS, _MEMORY_MIB, max(gpus, request.gpus_per_node), request.partitions)
    begin = time.monotonic()

    def print_line(text: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {text}", flush=True)

    with _folder(asked.keep) as folder, PrivateSlurm(size) as cluster:
        print_line(f"private SLURM with {nodes} node{'s' * (nodes > 1)} is running")
        script = folder / "script" / request.script.name
        script.parent.mkdir()
        request.write_script(script)
        findings = [
            check_options(request, cluster, script),
            *check_site(request, list(command[1:]), asked.elsewhere),
            check_signal(request),
            check_requeue(request),
            check_output(request, Path.cwd()),
        ]
        if asked.elsewhere:
            findings = of_this_machine(findings)
        if findings[0].status is Status.problem:
            return findings
        orders = Orders(
            nodes=request.nodes,
            gpus_per_node=request.gpus_per_node,
            gpu_memory_gib=asked.gpu_memory_gib,
            scaled_nodes=nodes,
            max_ranks=asked.ranks,
            data=str(_write_data(folder / "data")),
            last_step=_NO_LAST_STEP,
            elsewhere=asked.elsewhere,
            refused=_problems(findings) > 0,
        )
        write_orders(folder, orders)
        words = request.scaled_words(nodes, gpus, folder / OUTPUT_FILE, {REHEARSAL_VARIABLE: str(folder)})
        try:
            with child_environment(without_commands(asked.without)):
                submitted = cluster.command("sbatch", "--parsable", *words, str(script), *request.arguments)
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                f"the job cannot be scaled down: sbatch {' '.join(words)}: {error.stderr.strip()}; use --nodes, "
                "--gpus-per-node and --ntasks-per-node=1"
            ) from error
        job = _RehearsedJob(cluster, submitted.partition(";")[0], request, folder, orders, print_line, asked.timeout_s)
        print_line(f"job {job.id} is submitted to {nodes} nodes")
        return findings + job.rehearse()


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the options of megads rehearse and the user's command; the `--` between them may be missing."""
    for place, word in enumerate(words):
        if word == _SEPARATOR:
            return words[:place], words[place + 1 :]
        if Path(word).name == "sbatch":
            return words[:place], words[place:]
    return words, []


@contextmanager
def _folder(kept: str | None) -> Iterator[Path]:
    """Yields the folder of the rehearsal; it is removed at the end unless it is given by --keep."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="megads-rehearsal-") as name:
            yield Path(name)
        return
    folder = Path(kept).absolute()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep {kept}: cannot be created ({error.strerror}): name a new folder") from error
    yield folder


def _write_data(prefix: Path) -> Path:
    """Writes a dataset of random tokens and returns its prefix."""
    draws = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(_DOCUMENTS):
            writer.append(draws.integers(0, VOCAB_SIZE, _DOCUMENT_TOKENS, dtype=np.uint16))
    return prefix


def _problems(findings: Sequence[Finding]) -> int:
    return sum(finding.status is Status.problem for finding in findings)


def _summary(findings: Sequence[Finding], seconds: float) -> str:
    problems, last = _problems(findings), findings[-1].check
    if not problems:
        return f"No problem found ({seconds:.0f} s)."
    what = "1 problem" if problems == 1 else f"{problems} problems"
    then = "" if last == "resumed" else "; later checks were not run"
    return f"{what} found{then} ({seconds:.0f} s)."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads rehearse",
        usage="megads rehearse [options] -- sbatch [options of sbatch] script.sbatch [overrides]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=_ranks, default=4, help="most ranks of the scaled layout: 2, 4 or 8 (4)")
    parser.add_argument(
        "--gpu-memory-gib", type=float, help="memory of one GPU of your cluster (default: cluster.gpu_memory_gib)"
    )
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help=f"longest wait for each step: the start, training, the save, the next start ({_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a command that only the cluster has, such as module: it does nothing here; may be repeated",
    )
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="this machine is not the cluster: its SLURM is not asked, and missing data and folders are only notes",
    )
    parser.add_argument("--keep", metavar="FOLDER", help="new folder in which the job's output and its run are kept")
    return parser


def _ranks(text: str) -> int:
    if text not in ("2", "4", "8"):
        raise argparse.ArgumentTypeError(f"{text}: want 2, 4 or 8")
    return int(text)


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text}: want a number of seconds above 0")
    return float(text)


STEPS_BEFORE_SIGNAL = 2
STEPS_AFTER_RESUME = 3
# The launcher records a signal within a second. A run that trains on for longer than both limits did not receive it; on
# a busy machine the steps are the longer limit.
_NOTICE_S, _NOTICE_STEPS = 8.0, 5
# For a job without a signal: whole minutes until its limit, which the launcher asks for every minute, and later again.
_MINUTES_LEFT, _MINUTES_AGAIN = 3, 60
_POLL_S = 0.2
_LIVING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED")
# Errors that the shell prints about the script, and errors of the two implementations of `module` for a missing module.
_SHELL_ERROR = re.compile(r"slurm_script: line \d+: .*|.*Lmod has detected.*|.*Unable to locate a modulefile.*")
_UNKNOWN_OVERRIDE = re.compile(r"^megads \w+: (?:unknown key|cannot read the override|.*there is no such option).*")
_SCRIPT_COST = "the job would fail in the same way on the cluster, after waiting in the queue"


@dataclass
class _RehearsedJob:
    """A job that has been submitted.

    Attributes:
        cluster: the private SLURM that runs the job.
        id: id of the job.
        request: the user's request.
        folder: the rehearsal's folder, see `notes`.
        orders: instructions for the job's `megads train`.
        print_line: prints a line of progress.
        timeout_s: longest wait for each step of the rehearsal, in seconds.
    """

    cluster: PrivateSlurm
    id: str
    request: Request
    folder: Path
    orders: Orders
    print_line: Callable[[str], None]
    timeout_s: float

    def rehearse(self) -> list[Finding]:
        """Follows the job to the first failed check or to its end."""
        if not self._wait(lambda: bool(read_starts(self.folder))):
            return [self._never_started()]
        start = read_starts(self.folder)[0]
        findings = [*start.findings, *self._script_errors()]
        if self.orders.refused or _problems(findings):
            return findings
        self.print_line(f"megads train has started; scaled layout: {start.layout}")
        if not self._wait(lambda: len(self._steps(start)) >= STEPS_BEFORE_SIGNAL):
            return [*findings, self._failed("training", "no step was trained")]
        findings.append(ok("training", f"{start.layout} trains on {self.orders.scaled_nodes} nodes"))
        asked = self.request.signal
        if asked is None:
            what = "the time limit"
            self.print_line(f"shortening the time limit to {_MINUTES_LEFT} minutes from now, as megads train asks")
            self._set_limit(_MINUTES_LEFT)
        else:
            # As slurmctld would send it.
            batch = ["--batch"] if asked.to_script else []
            what = f"{asked.name}{' to the script' if batch else ' to the steps'}"
            self.print_line(f"sending {asked.name} {'to the script' if batch else 'to the steps that srun started'}")
            self.cluster.command("scancel", *batch, f"--signal={asked.name}", self.id)
        remedy = "in the script: exec megads train ..., trap '' USR1 before it, and --signal=B:USR1@300"
        lost = "steps since the last checkpoint are lost at the time limit and at every preemption"
        if not self._noticed(start, at_once=asked is not None):
            reason = (
                f" ended the job {self._exit()}, without a save"
                if self._ended()
                else ": megads train did not receive it"
            )
            return [*findings, problem("signal handled", what + reason, lost, remedy)]
        self._wait(lambda: self._exit_codes(start) != [])
        saved = [event["step"] for event in self._events(start) if event["event"] == "checkpoint_saved"]
        codes = self._exit_codes(start)
        if not saved or codes[-1:] != [Preempted.exit_code]:
            found = f"{what}: checkpoints of steps {saved}, exit codes {codes}"
            return [*findings, problem("signal handled", found, lost, remedy)]
        self.orders = dataclasses.replace(self.orders, last_step=saved[-1] + STEPS_AFTER_RESUME)
        write_orders(self.folder, self.orders)
        if asked is None:
            self._set_limit(_MINUTES_AGAIN)
        self.print_line(f"saved at step {saved[-1]}, exit code 6")
        lines = list(read_json_lines(Path(start.scaled_run) / METRICS_FILE))
        findings.append(ok("signal handled", f"{what}: saved at step {saved[-1]}, exit code 6"))
        return findings + self._second_start(start, lines)

    def _set_limit(self, minutes: int) -> None:
        """Sets the job's time limit to a number of minutes from now."""
        started = max(task["RunTime"] for task in self._tasks())
        hours, minute, _ = (int(part) for part in started.rpartition("-")[2].split(":"))
        self.cluster.command("scontrol", "update", f"JobId={self.id}", f"TimeLimit={60 * hours + minute + minutes}")

    def _noticed(self, start: RehearsedStart, at_once: bool) -> bool:
        """Waits until the launcher records a request to stop; returns False if the run trains on without one.

        Args:
            start: the start.
            at_once: whether the launcher gets a signal; otherwise it asks for the time limit every minute.
        """
        sent, trained = time.monotonic(), len(self._steps(start))

        def happened() -> bool:
            return any(line["event"] == "stop_requested" for line in self._events(start))

        def trains_on() -> bool:
            return at_once and time.monotonic() - sent > _NOTICE_S and len(self._steps(start)) > trained + _NOTICE_STEPS

        self._wait(lambda: happened() or trains_on())
        return happened()

    def _second_start(self, first: RehearsedStart, lines: list[dict[str, Any]]) -> list[Finding]:
        """Checks requeue and resume; `lines` are those of metrics.jsonl when the checkpoint was saved."""
        if not self._wait(lambda: len(read_starts(self.folder)) > 1):
            said = [line for line in self._output().splitlines() if "requeue" in line]
            found = f"the job ended {self._exit()} and did not start again{': ' + said[-1] if said else ''}"
            cost = "the run stops at the first preemption or time limit"
            remedy = "#SBATCH --requeue and cluster=slurm, which requeues the job on exit 6 (or an array chain)"
            return [problem("requeued", found, cost, remedy)]
        self.print_line("the job has started again")
        second = read_starts(self.folder)[1]
        who = "the next job of the array" if self.request.value("array") else "the job"
        requeued = ok("requeued", f"after exit 6 {who} started by itself")
        cost = "every restart loses what was trained before"
        if second.scaled_run != first.scaled_run:
            found = f"the second start writes to {second.run}, the first wrote to {first.run}"
            remedy = "set run.id and run.dir without times or changing numbers; the default run.id does not change"
            return [requeued, problem("resumed", found, cost, remedy)]
        self._wait(lambda: len(self._exit_codes(first)) > 1)
        self._wait(self._ended)
        saved, last = lines[-1]["step"], self.orders.last_step
        if not any(event["event"] == "resume" and event["step"] == saved for event in self._events(first)):
            remedy = "set checkpoint.load=auto, and do not remove checkpoints in the script"
            return [requeued, problem("resumed", f"the second start did not resume from step {saved}", cost, remedy)]
        steps = self._steps(first)
        after = list(read_json_lines(Path(first.scaled_run) / METRICS_FILE))
        if after[: len(lines)] != lines or steps != list(range(1, last + 1)):
            found = f"{METRICS_FILE} has steps {steps}; expected 1 to {last} in order, the first {saved} unchanged"
            return [requeued, problem("resumed", found, cost, "set run.dir to a folder that no other job writes to")]
        if self._exit() != "with exit code 0" or self._exit_codes(first)[-1:] != [0]:
            return [requeued, self._failed("resumed", "the resumed job failed")]
        self.print_line(f"resumed and finished at step {last}")
        found = f"after step {saved}; steps 1 to {last} without a gap or a repetition, exit code 0"
        return [requeued, ok("resumed", found)]

    def _never_started(self) -> Finding:
        """Returns the finding for a script that did not reach a valid `megads train` command."""
        lines = self._output().splitlines()
        composed = [line for line in lines if _UNKNOWN_OVERRIDE.match(line)]
        if composed:
            return problem("overrides", composed[-1], "the job would end with exit code 2", "correct the override")
        return next(iter(self._script_errors()), self._failed("script", "megads train did not start"))

    def _script_errors(self) -> list[Finding]:
        """Returns errors that the shell printed, whether or not the script continued."""
        said = [
            match.group().partition("slurm_script: ")[2] or line
            for line in self._output().splitlines()
            if (match := _SHELL_ERROR.match(line.strip()) or _SHELL_ERROR.search(line))
        ]
        if not said:
            return []
        remedy = (
            f"correct that line of {self.request.script}; if only the cluster has the command (module), rehearse on "
            "its login node or with --without <command>"
        )
        return [problem("script", "; ".join(dict.fromkeys(said)), _SCRIPT_COST, remedy)]

    def _failed(self, check: str, what: str) -> Finding:
        """Returns a finding that quotes the last lines of the job's output."""
        lines = [line for line in self._output().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"megads( \w+)?: ", line)]
        last = "; ".join(errors[-1:] or lines[-3:]) or "it printed nothing"
        state = (
            f"it ended {self._exit()}"
            if self._ended()
            else (f"it was still running after {self.timeout_s:g} s (--timeout-s)")
        )
        return problem(check, f"{what}, {state}: {last}", _SCRIPT_COST, "see the message, and start it by hand")

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Waits for a condition, at most until the job ends or the timeout passes; returns whether it holds."""
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            if time.monotonic() > deadline or self._ended():
                return condition()
            time.sleep(_POLL_S)
        return True

    def _tasks(self) -> list[dict[str, str]]:
        """Returns scontrol's fields of the job, one entry per array task."""
        lines = self.cluster.command("scontrol", "--oneliner", "show", "job", self.id).splitlines()
        return [dict(word.partition("=")[::2] for word in line.split()) for line in lines]

    def _ended(self) -> bool:
        try:
            return not any(task["JobState"] in _LIVING for task in self._tasks())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            # The controller may be busy; the caller polls again.
            return False

    def _exit(self) -> str:
        """Returns how the job, or the array task that started last, ended."""
        started = [task for task in self._tasks() if task["StartTime"] != "Unknown"]
        code, _, signal = max(started, key=lambda task: task["StartTime"])["ExitCode"].partition(":")
        return f"with exit code {code}" if signal == "0" else f"by signal {signal}"

    def _steps(self, start: RehearsedStart) -> list[int]:
        lines = read_json_lines(Path(start.scaled_run) / METRICS_FILE)
        return [line["step"] for line in lines if "loss" in line]

    def _events(self, start: RehearsedStart) -> list[dict[str, Any]]:
        return list(read_json_lines(Path(start.scaled_run) / EVENTS_FILE))

    def _exit_codes(self, start: RehearsedStart) -> list[int]:
        """Returns the exit codes of the run's starts so far."""
        return [event["exit_code"] for event in self._events(start) if event["event"] == "exit"]

    def _output(self) -> str:
        path = self.folder / OUTPUT_FILE
        return path.read_text(errors="replace") if path.exists() else ""
