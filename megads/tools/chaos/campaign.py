"""Fault injection campaign: one run after another, with faults at random times; a scorecard of the results.

The scorecard is a table, Markdown and JSON.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.api import EXIT_OK, ConfigError, IndexedDatasetWriter, VisibleConsole
from megads.tools.chaos.attacked_run import AttackedRun
from megads.tools.chaos.config import ChaosConfig
from megads.tools.chaos.faults import FAULTS, Consequence, Fault, Injected, Target

_VOCABULARY = 509
_DOCUMENTS = 4000
_STEPS_BETWEEN = (2, 7)
_LAST_STEPS = 4
"""No fault is injected in this number of steps before the end: the run could finish first."""
_MOST_FRUITLESS = 3
"""Runs in a row into which no fault could be injected, after which a campaign ends."""
_LONGEST_RUN_S = 3600.0
_LOCAL_FOLDER = Path("/dev/shm")
_SMALL_RUN = {
    "model.num_layers": "2",
    "model.hidden_size": "96",
    "model.num_heads": "6",
    "model.vocab_size": str(_VOCABULARY),
    "model.max_seq_len": "64",
    "parallel.dp": "2",
    "train.seq_len": "64",
    "train.global_batch_size": "24",
    "train.micro_batch_size": "2",
    "train.precision": "fp32",
    "schedule.warmup_samples": "0",
    "data.split": "[0.9, 0.1]",
    "evaluation.every_steps": "20",
    "checkpoint.every_steps": "5",
    "checkpoint.async_save": "true",
    "checkpoint.local_every_steps": "2",
    # With steps this short, a disk that is full for seconds fails as many saves as hours of a real run would have.
    "checkpoint.max_failed_saves": "1000",
    "cluster.max_restarts": "10",
    "cluster.heartbeat_timeout_s": "10",
    "cluster.hang_min_s": "5",
    "cluster.timeout_s": "30",
    "cluster.peak_tflops": "1",
    "cluster.threads_per_rank": "1",
    "run.stop_timeout_s": "30",
}


@dataclass
class FaultResult:
    """Result of one fault.

    Attributes:
        kind: name of the fault.
        where: target of the fault, in words.
        run: number of the run.
        step: last step in metrics.jsonl at the time of the fault.
        detected_s: seconds to the run's first warning or error event; None if there was none.
        recovered_s: seconds to the first new step; None if there was none.
        lost_steps: number of steps that were repeated.
        problem: reason why the fault was not survived; empty if it was.
    """

    kind: str
    where: str
    run: int
    step: int
    detected_s: float | None = None
    recovered_s: float | None = None
    lost_steps: int = 0
    problem: str = ""


@dataclass
class CampaignResult:
    """Result of a campaign.

    Attributes:
        folder: folder of the campaign.
        seconds: duration of the campaign.
        runs: number of runs with injected faults.
        step_s: median step time of the reference run, in seconds.
        results: results of the faults, in order.
        asked: number of faults that were asked for.
    """

    folder: Path
    seconds: float = 0.0
    runs: int = 0
    step_s: float = 0.0
    results: list[FaultResult] = field(default_factory=list)
    asked: int = 0

    @property
    def missing(self) -> int:
        """Number of faults that were asked for but not injected."""
        return max(0, self.asked - len(self.results))

    @property
    def failed(self) -> list[FaultResult]:
        """Faults that were not survived."""
        return [result for result in self.results if result.problem]


class Campaign:
    """Injects faults into runs until the number of faults or the time limit is reached.

    Args:
        config: settings of the campaign.
        tell: called with each line of progress.

    Raises:
        ConfigError: A kind of fault is unknown.
    """

    def __init__(self, config: ChaosConfig, tell: Callable[[str], None]):
        self._config, self._tell = config, tell
        self._random = random.Random(config.seed)
        self._kinds = self._shuffled(select_faults(config))
        self._next: Fault = next(self._kinds)
        name = time.strftime("%Y-%m-%d_%H-%M-%S")
        self._folder = Path(config.dir or f"runs/chaos/{name}").absolute()
        self._dataset = self._folder / "corpus"
        self._overrides = _SMALL_RUN | config.overrides
        self._local_folder = Path(self._overrides.get("checkpoint.local_folder", str(_LOCAL_FOLDER)))
        self._reference: AttackedRun | None = None
        self._deadline = math.inf
        self.result = CampaignResult(self._folder, asked=config.faults)

    def run(self) -> CampaignResult:
        """Trains a reference run without faults, then injects faults into others.

        Raises:
            ConfigError: The folder is not empty, or the reference run fails.
        """
        if self._folder.exists() and any(self._folder.iterdir()):
            raise ConfigError(f"dir = {self._folder} is not empty: choose another folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        self._write_corpus()
        self._reference = self._train_reference()
        fruitless = 0
        while self._goes_on() and fruitless < _MOST_FRUITLESS:
            self.result.runs += 1
            before = len(self.result.results)
            self._attack(self._new_run(f"run_{self.result.runs:03d}"))
            fruitless = 0 if len(self.result.results) > before else fruitless + 1
        self.result.seconds = time.monotonic() - begin
        if not self.result.failed:
            self._remove(self._reference)
        return self.result

    def _goes_on(self) -> bool:
        """Whether another fault is to be injected; the time counts from the first one."""
        return len(self.result.results) < self._config.faults and time.monotonic() < self._deadline

    def _shuffled(self, faults: Sequence[Fault]) -> Iterator[Fault]:
        """Yields faults in random order, every kind once before any is repeated."""
        while True:
            yield from self._random.sample(faults, len(faults))

    def _write_corpus(self) -> None:
        draw = np.random.default_rng(self._config.seed)
        with IndexedDatasetWriter(self._dataset, np.int32) as writer:
            for _ in range(_DOCUMENTS):
                writer.append(draw.integers(0, _VOCABULARY, int(draw.integers(8, 200))))

    def _new_run(self, name: str) -> AttackedRun:
        overrides = [f"{key}={value}" for key, value in self._overrides.items()]
        overrides += [
            f"data.train=[{{path: {self._dataset}}}]",
            f"train.steps={self._config.steps}",
            "plugins=[megads.tools.chaos.hook]",
            "hooks.chaos={}",
        ]
        sizes = [int(self._overrides.get(f"parallel.{axis}", 1)) for axis in ("tp", "cp", "pp", "dp")]
        return AttackedRun(self._folder / name, overrides, self._local_folder, int(np.prod(sizes)))

    def _train_reference(self) -> AttackedRun:
        self._tell(f"training an undisturbed run of {self._config.steps} steps as the reference")
        run = self._new_run("undisturbed")
        run.start()
        try:
            code = run.end(_LONGEST_RUN_S)
        finally:
            run.kill_everything()
        if code != EXIT_OK:
            text = run.command_log.read_text(errors="replace").strip()[-2000:]
            raise ConfigError(f"the run fails even without faults (exit code {code}):\n{text}")
        self.result.step_s = statistics.median(run.step_times())
        return run

    def _attack(self, run: AttackedRun) -> None:
        """Trains one run to its end while faults are injected, and verifies its final state."""
        results: list[FaultResult] = []
        run.start()
        try:
            while self._goes_on():
                if not self._wait_for_moment(run):
                    break
                fault, begin = self._next, time.monotonic()
                result = self._inject(run, fault)
                if result is None:
                    break
                self._deadline = min(self._deadline, begin + 60 * self._config.minutes)
                self._next = next(self._kinds)
                results.append(result)
                self.result.results.append(result)
                self._print_line(result)
                if result.problem:
                    break
            problem = "" if results and results[-1].problem else self._verify_end(run)
        finally:
            run.kill_everything()
            shutil.rmtree(run.memory, ignore_errors=True)
        for result in results:
            result.problem = result.problem or problem
        if problem:
            self._tell(f"{run.run_dir.name}: {problem}")
        if not any(result.problem for result in results):
            self._remove(run)

    def _wait_for_moment(self, run: AttackedRun) -> bool:
        """Waits a random number of steps and a fraction of a step; returns False if no fault can follow."""
        step = run.last_step + self._random.randint(*_STEPS_BETWEEN)
        if step > self._config.steps - _LAST_STEPS:
            return False
        reached = run.wait_until(lambda: run.last_step >= step, self._config.recover_s)
        time.sleep(self._random.uniform(0, self.result.step_s))
        return reached and run.running

    def _inject(self, run: AttackedRun, fault: Fault) -> FaultResult | None:
        """Injects one fault and waits for recovery; returns None if it could not be injected."""
        step, since, begin, restarts = run.last_step, time.time(), time.monotonic(), len(run.events("restart"))
        limit_s = self._config.recover_s
        injected = fault.inject(Target(run, self._dataset, self._random))
        if injected is None:
            return None
        result = FaultResult(fault.name, injected.where, self.result.runs, step)
        result.problem = self._follow(run, fault.consequence, injected, restarts)
        if not result.problem:
            # After a restart, wait for its first step: ranks that live on may train one more after the fault.
            again = fault.consequence is not Consequence.unharmed
            if run.wait_until(lambda: _trains_again(run, since) if again else run.last_step > step, limit_s):
                result.recovered_s = time.monotonic() - begin
            else:
                result.problem = f"no new step within {limit_s:.0f} s"
        if not result.problem and fault.consequence is Consequence.unharmed and len(run.events("restart")) > restarts:
            result.problem = "the ranks were started again"
        self._evaluate(run, result, injected, since)
        return result

    def _follow(self, run: AttackedRun, consequence: Consequence, injected: Injected, restarts: int) -> str:
        """Waits for the expected consequence, and restarts the command where a user or scheduler would.

        Returns the problem; empty if there is none.
        """
        limit_s = self._config.recover_s
        if consequence is Consequence.in_place:
            restarted = run.wait_until(lambda: len(run.events("restart")) > restarts, limit_s)
            return "" if restarted else f"no restart in place within {limit_s:.0f} s"
        if consequence is Consequence.unharmed:
            return "a second start was not refused" if injected.codes == (EXIT_OK,) else ""
        if consequence is Consequence.refused:
            return self._refused(run, injected)
        code = run.end(limit_s)
        if code is None:
            return f"the command did not end within {limit_s:.0f} s"
        if injected.codes and code not in injected.codes:
            return f"exit code {code}, expected {' or '.join(map(str, injected.codes))}"
        run.start()
        return ""

    def _refused(self, run: AttackedRun, injected: Injected) -> str:
        """Starts the command, which must be refused, repairs the fault and restarts it; returns the problem or ""."""
        steps = run.steps()
        run.start(*injected.further)
        code = run.end(self._config.recover_s)
        run.kill_everything()
        injected.mend()
        if code not in injected.codes:
            return f"exit code {code}, expected {' or '.join(map(str, injected.codes))}"
        if run.steps() != steps:
            return "a refused start changed the steps in metrics.jsonl"
        run.start()
        return ""

    def _evaluate(self, run: AttackedRun, result: FaultResult, injected: Injected, since: float) -> None:
        """Adds time to detection and lost steps to the result, and compares the steps with the reference run."""
        assert self._reference is not None
        events = [event for event in run.events() if event.get("time", 0.0) >= since]
        noticed = [event["time"] for event in events if event.get("level") in ("warning", "error")]
        if noticed:
            result.detected_s = max(0.0, min(noticed) - since)
        resumed = [event for event in events if event.get("event") in ("resume", "fresh_start")]
        if resumed:
            result.lost_steps = max(0, result.step - min(int(event["step"]) for event in resumed))
        if injected.skips_checkpoint and not any(event.get("passed_by") for event in resumed):
            result.problem = result.problem or "the damage was not named by the next start"
        result.problem = result.problem or difference(run, self._reference)

    def _verify_end(self, run: AttackedRun) -> str:
        """Trains to the end; returns what differs from the reference run, or an empty string."""
        assert self._reference is not None
        code = run.end(_LONGEST_RUN_S)
        if code != EXIT_OK:
            return f"the run ended with exit code {code}"
        if found := difference(run, self._reference, whole=True):
            return found
        if run.validations() != self._reference.validations():
            return "validations differ from the undisturbed run's"
        if run.state_checksums() != self._reference.state_checksums():
            return "the last checkpoint differs from the undisturbed run's"
        return ""

    def _print_line(self, result: FaultResult) -> None:
        seconds = f"recovered in {result.recovered_s:.1f} s" if result.recovered_s is not None else "lost"
        if result.detected_s is not None:
            seconds = f"noticed after {result.detected_s:.1f} s, {seconds}"
        told = f"; {result.problem}" if result.problem else ""
        number = len(self.result.results)
        self._tell(
            f"{number}/{self._config.faults} {result.kind}: {result.where}, after step {result.step}: {seconds}, "
            f"{result.lost_steps} steps trained again{told}"
        )

    def _remove(self, run: AttackedRun) -> None:
        shutil.rmtree(run.run_dir, ignore_errors=True)
        shutil.rmtree(run.memory, ignore_errors=True)
        run.command_log.unlink(missing_ok=True)


def _trains_again(run: AttackedRun, since: float) -> bool:
    """Whether a start of the run has finished its first step after a time."""
    return any(event.get("time", 0.0) > since for event in run.events("first_step"))


def select_faults(config: ChaosConfig) -> list[Fault]:
    """Returns the kinds of faults from which a campaign chooses.

    Raises:
        ConfigError: A kind of fault is unknown.
    """
    wanted = config.wanted_kinds or list(FAULTS)
    unknown = [name for name in wanted if name not in FAULTS]
    if unknown:
        raise ConfigError(f"kinds: there is no fault {unknown[0]!r}; kinds are {', '.join(FAULTS)}")
    return [FAULTS[name] for name in wanted]


def difference(run: AttackedRun, reference: AttackedRun, *, whole: bool = False) -> str:
    """Compares the steps of a run with those of the reference run, bit for bit; returns a difference or "".

    Args:
        run: run with injected faults.
        reference: run without faults.
        whole: whether the run has finished, so that the number of steps must be equal, too.
    """
    found, wanted = run.steps(), reference.steps()
    for ours, theirs in zip(found, wanted, strict=False):
        if ours != theirs:
            keys = ", ".join(key for key in theirs if ours.get(key) != theirs[key])
            return f"the ledger differs from the undisturbed run's in step {theirs['step']}: {keys}"
    if whole and len(found) != len(wanted):
        return f"the ledger has {len(found)} steps, the undisturbed run's {len(wanted)}"
    return ""


SCORECARD_FILE = "scorecard.md"
JSON_FILE = "scorecard.json"
_COLUMNS = ("fault", "what must follow", "injected", "survived", "noticed after", "recovered in", "steps again")
_PIPE_WIDTH = 160


def list_faults(faults: Iterable[Fault]) -> None:
    """Prints the kinds of faults with their required consequences."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("fault", "what happens", "what must follow"):
        table.add_column(name)
    for fault in faults:
        table.add_row(fault.name, fault.text, fault.consequence)
    _print(table)


def show(result: CampaignResult) -> None:
    """Prints the scorecard with one row per kind of fault, and a summary."""
    table = Table(box=SIMPLE_HEAD)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _COLUMNS[:2] else "right")
    for row in _rows(result):
        table.add_row(*row)
    _print(table)
    print(_summary(result))


def as_json(result: CampaignResult) -> str:
    """Returns the campaign as one JSON object."""
    content = asdict(result) | {"folder": str(result.folder), "survived": _survived(result)}
    return json.dumps(content, indent=1)


def write(result: CampaignResult) -> Path:
    """Writes the scorecard as Markdown and JSON to the campaign's folder; returns the path of the Markdown file."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---|" + "---:|" * (len(_COLUMNS) - 2)]
    lines += [f"| {' | '.join(row)} |" for row in _rows(result)]
    lines += ["", _summary(result), *(f"- {_told(found)}" for found in result.failed), ""]
    path = result.folder / SCORECARD_FILE
    path.write_text("\n".join(lines))
    (result.folder / JSON_FILE).write_text(as_json(result) + "\n")
    return path


def _print(table: Table) -> None:
    # Output to a file or a pipe gets a fixed width.
    VisibleConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _rows(result: CampaignResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, fault in FAULTS.items():
        found = [one for one in result.results if one.kind == name]
        if not found:
            continue
        rows.append(
            (
                name,
                fault.consequence.value,
                str(len(found)),
                str(sum(not one.problem for one in found)),
                _seconds([one.detected_s for one in found]),
                _seconds([one.recovered_s for one in found]),
                str(max(one.lost_steps for one in found)),
            )
        )
    return rows


def _seconds(values: Sequence[float | None]) -> str:
    """Formats the median and the maximum."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.1f} s, at most {max(known):.1f}"


def _survived(result: CampaignResult) -> int:
    return len(result.results) - len(result.failed)


def _summary(result: CampaignResult) -> str:
    minutes = result.seconds / 60
    if not result.results:
        return f"No fault was injected, in {result.runs} runs and {minutes:.1f} minutes: nothing is shown by this."
    fewer = f" {result.asked} faults were asked for." if result.missing else ""
    return (
        f"{_survived(result)} of {len(result.results)} faults survived with nothing lost, in {result.runs} runs and "
        f"{minutes:.1f} minutes; a step takes {1000 * result.step_s:.0f} ms. Ledgers, validations and last checkpoints "
        f"are compared bit for bit with an undisturbed run's.{fewer}"
    )


def _told(found: FaultResult) -> str:
    return f"run {found.run}, {found.kind} ({found.where}) after step {found.step}: {found.problem}"
