"""Watches a rehearsed job through its life: start, training, signal, requeue, resume, end."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megads.errors import ConfigError, Preempted
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE
from megads.tools.doctor.finding import Finding, Status, ok, problem
from megads.tools.rehearse.notes import OUTPUT_FILE, RehearsedStart, read_orders, read_starts, write_orders
from megads.tools.rehearse.private_slurm import PrivateSlurm
from megads.tools.rehearse.request import AskedSignal, Request

STEPS_BEFORE_SIGNAL = 2
STEPS_AFTER_RESUME = 3
_START_TIMEOUT_S = 180.0
_TRAIN_TIMEOUT_S = 240.0
# The launcher notes a signal within a second. A run that trains on for so long, and so many steps, did not get it; on a
# machine that does other things the steps are what takes long.
_NOTICE_S, _NOTICE_STEPS = 8.0, 5
_NOTICE_TIMEOUT_S = 120.0
_SAVE_TIMEOUT_S = 120.0
_POLL_S = 0.2
_LIVING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED")
# What a shell says of its own script, and what the two programs behind `module` say of a missing one.
_SHELL_ERROR = re.compile(r"slurm_script: line \d+: .*|.*Lmod has detected.*|.*Unable to locate a modulefile.*")
_UNKNOWN_OVERRIDE = re.compile(r"^megads \w+: (?:unknown key|cannot read the override|.*there is no such option).*")
_SCRIPT_COST = "the job would end like that on the cluster, after its wait in the queue"


class Life:
    """One rehearsed job.

    Args:
        cluster: where it runs.
        request: the user's.
        folder: of the rehearsal, see `notes`.
        say: shows a line of progress.
    """

    def __init__(self, cluster: PrivateSlurm, request: Request, folder: Path, say: Callable[[str], None]):
        self._cluster = cluster
        self._request = request
        self._folder = folder
        self._say = say
        self._job = ""
        # Lines of metrics.jsonl when the job had saved.
        self._ledger: list[dict[str, Any]] = []

    def submit(self, words: list[str]) -> None:
        """Submits the job.

        Args:
            words: what follows `sbatch`: options, script and arguments.

        Raises:
            ConfigError: the scaled options are refused, though the user's are not.
        """
        try:
            self._job = self._cluster.command("sbatch", "--parsable", *words).partition(";")[0]
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                f"the job cannot be scaled down: sbatch {' '.join(words[:-1])}: {error.stderr.strip()}; ask with "
                "--nodes, --gpus-per-node and --ntasks-per-node=1"
            ) from error
        self._say(f"job {self._job} of {read_orders(self._folder).scaled_nodes} nodes is submitted")

    def rehearse(self) -> list[Finding]:
        """Sees the job through to the first thing that fails, or to its end."""
        if not self._wait(lambda: bool(read_starts(self._folder)), _START_TIMEOUT_S):
            return [self._never_started()]
        start = read_starts(self._folder)[0]
        findings = [*start.findings, *self._script_errors()]
        if start.refused or any(finding.status is Status.problem for finding in findings):
            return findings
        self._say(f"megads train is reached; the scaled layout is {start.layout}")
        if not self._wait(lambda: len(self._steps(start)) >= STEPS_BEFORE_SIGNAL, _TRAIN_TIMEOUT_S):
            return [*findings, self._failed("training", "no step was trained")]
        findings.append(ok("training", f"{start.layout} trains on {read_orders(self._folder).scaled_nodes} nodes"))
        asked = self._request.signal
        assert asked is not None, "a job without a signal is refused on paper"
        handled = self._signal(asked, start)
        findings.append(handled)
        if handled.status is Status.problem:
            return findings
        return findings + self._second_start(start)

    def _signal(self, asked: AskedSignal, start: RehearsedStart) -> Finding:
        """Sends the signal as slurmctld would and judges what the job makes of it."""
        batch = ["--batch"] if asked.to_script else []
        self._say(f"sending {asked.name} {'to the script' if batch else 'to the steps that srun started'}")
        self._cluster.command("scancel", *batch, f"--signal={asked.name}", self._job)
        what = f"{asked.name}{' to the script' if batch else ' to the steps'}"
        remedy = "in the script: exec megads train ..., trap '' USR1 before it, and --signal=B:USR1@300"
        lost = "what was not saved is lost at the time limit and at every preemption"
        if not self._noticed(start):
            if self._ended():
                return problem("signal handled", f"{what} ended the job {self._exit()} without a save", lost, remedy)
            return problem("signal handled", f"{what}: megads train never noticed it and trains on", lost, remedy)
        self._wait(lambda: self._exit_codes(start) != [], _SAVE_TIMEOUT_S)
        saved = [event["step"] for event in self._events(start) if event["event"] == "checkpoint_saved"]
        codes = self._exit_codes(start)
        if not saved or codes[-1:] != [Preempted.exit_code]:
            return problem("signal handled", f"{what}: saved steps {saved}, exit codes {codes}", lost, remedy)
        write_orders(
            self._folder,
            dataclasses.replace(read_orders(self._folder), last_step=saved[-1] + STEPS_AFTER_RESUME),
        )
        self._say(f"saved at step {saved[-1]}, exit 6")
        self._ledger = list(read_json_lines(Path(start.scaled_run) / METRICS_FILE))
        return ok("signal handled", f"{what}: saved at step {saved[-1]}, exit 6")

    def _noticed(self, start: RehearsedStart) -> bool:
        """Waits until the launcher has noted a signal; a run that trains on regardless has not got it."""
        sent, trained = time.monotonic(), len(self._steps(start))

        def happened() -> bool:
            return any(line["event"] == "stop_requested" for line in self._events(start))

        def trains_on() -> bool:
            return time.monotonic() - sent > _NOTICE_S and len(self._steps(start)) > trained + _NOTICE_STEPS

        self._wait(lambda: happened() or trains_on(), _NOTICE_TIMEOUT_S)
        return happened()

    def _second_start(self, first: RehearsedStart) -> list[Finding]:
        """Judges requeue and resume."""
        if not self._wait(lambda: len(read_starts(self._folder)) > 1, _START_TIMEOUT_S):
            said = [line for line in self._output().splitlines() if "requeue" in line]
            return [
                problem(
                    "requeued",
                    f"the job ended {self._exit()} and did not come back{': ' + said[-1] if said else ''}",
                    "the run stops at the first preemption or time limit",
                    "#SBATCH --requeue, and cluster=slurm, whose exit 6 asks for it (or an array chain)",
                )
            ]
        self._say("the job is back")
        second = read_starts(self._folder)[1]
        who = "the next job of the array" if self._request.value("array") else "the job"
        requeued = ok("requeued", f"after exit 6 {who} started by itself")
        cost = "every restart throws away what was trained before"
        if second.scaled_run != first.scaled_run:
            found = f"the second start writes to {second.run}, the first wrote to {first.run}"
            remedy = "name run.id and run.dir without times or numbers that change; left out, run.id stays the same"
            return [requeued, problem("resumed", found, cost, remedy)]
        self._wait(lambda: len(self._exit_codes(first)) > 1, _TRAIN_TIMEOUT_S)
        self._wait(self._ended, _START_TIMEOUT_S)
        return [requeued, self._resumed(first, cost)]

    def _resumed(self, start: RehearsedStart, cost: str) -> Finding:
        """Compares the ledger of the whole run with what was saved."""
        saved, last = self._ledger[-1]["step"], read_orders(self._folder).last_step
        if not any(event["event"] == "resume" and event["step"] == saved for event in self._events(start)):
            remedy = "checkpoint.load=auto, and nothing in the script that removes checkpoints"
            return problem("resumed", f"the second start did not continue from the save at step {saved}", cost, remedy)
        lines = list(read_json_lines(Path(start.scaled_run) / METRICS_FILE))
        steps = self._steps(start)
        if lines[: len(self._ledger)] != self._ledger or steps != list(range(1, last + 1)):
            found = f"the ledger has steps {steps}, where 1 to {last} in order, the first {saved} untouched, are right"
            return problem("resumed", found, cost, "give the run a folder that nothing else writes to")
        if self._exit() != "with exit code 0" or self._exit_codes(start)[-1:] != [0]:
            return self._failed("resumed", "the resumed job did not end well")
        self._say(f"resumed and finished at step {last}")
        return ok("resumed", f"after step {saved}; steps 1 to {last} without a gap or a repetition, then exit 0")

    def _never_started(self) -> Finding:
        """The script did not get as far as a config that composes."""
        lines = self._output().splitlines()
        composed = [line for line in lines if _UNKNOWN_OVERRIDE.match(line)]
        if composed:
            return problem("overrides", composed[-1], "the job would end with exit 2", "correct the override")
        return next(iter(self._script_errors()), self._failed("script", "megads train was never reached"))

    def _script_errors(self) -> list[Finding]:
        """What the shell complains of, whether the script went on or not."""
        said = [
            match.group().partition("slurm_script: ")[2] or line
            for line in self._output().splitlines()
            if (match := _SHELL_ERROR.match(line.strip()) or _SHELL_ERROR.search(line))
        ]
        if not said:
            return []
        remedy = (
            f"correct that line of {self._request.script}; a command that only the cluster has (module): rehearse on "
            "its login node, or with --without <command>"
        )
        return [problem("script", "; ".join(dict.fromkeys(said)), _SCRIPT_COST, remedy)]

    def _failed(self, check: str, what: str) -> Finding:
        """A failure of which the job's last words are the best account."""
        lines = [line for line in self._output().splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"megads( \w+)?: ", line)]
        last = "; ".join(errors[-1:] or lines[-3:]) or "it printed nothing"
        state = f"it ended {self._exit()}" if self._ended() else "it still ran when the rehearsal gave up"
        return problem(check, f"{what}, {state}: {last}", _SCRIPT_COST, "see what it says, and start it by hand")

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for a condition; the job's end or the time's is the end of waiting."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or self._ended():
                return condition()
            time.sleep(_POLL_S)
        return True

    def _tasks(self) -> list[dict[str, str]]:
        """Returns what SLURM knows of the job, one entry a task of an array."""
        lines = self._cluster.command("scontrol", "--oneliner", "show", "job", self._job).splitlines()
        return [dict(word.partition("=")[::2] for word in line.split()) for line in lines]

    def _ended(self) -> bool:
        try:
            return not any(task["JobState"] in _LIVING for task in self._tasks())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            # A busy controller is asked again.
            return False

    def _exit(self) -> str:
        """Returns how the job, or the last task of an array that started, ended."""
        started = [task for task in self._tasks() if task["StartTime"] != "Unknown"]
        code, _, signal = max(started, key=lambda task: task["StartTime"])["ExitCode"].partition(":")
        return f"with exit code {code}" if signal == "0" else f"by signal {signal}"

    def _steps(self, start: RehearsedStart) -> list[int]:
        lines = read_json_lines(Path(start.scaled_run) / METRICS_FILE)
        return [line["step"] for line in lines if "loss" in line]

    def _events(self, start: RehearsedStart) -> list[dict[str, Any]]:
        return list(read_json_lines(Path(start.scaled_run) / EVENTS_FILE))

    def _exit_codes(self, start: RehearsedStart) -> list[int]:
        """Exit codes of the run's starts so far."""
        return [event["exit_code"] for event in self._events(start) if event["event"] == "exit"]

    def _output(self) -> str:
        path = self._folder / OUTPUT_FILE
        return path.read_text(errors="replace") if path.exists() else ""
