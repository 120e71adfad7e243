"""SIGKILL to a run at random times and inside the saving protocol, repeatedly; it must end as if undisturbed."""

from __future__ import annotations

import collections
import random
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from megads.errors import RankKilled
from tests.command import Command, Ended, StartCommand, checkpoint_of, checksums, small_model, steps_of
from tests.faults import KILL_AT

pytestmark = [pytest.mark.attack, pytest.mark.distributed]

STEPS = 8
# A start and eight steps, on a busy machine.
_LONGEST_S = 120.0
# Changes of files and names in all saves of a run; a count beyond the last interrupts nothing.
_CHANGES = 34


@dataclass
class Table:
    """Outcomes of the attacks of each kind.

    Attributes:
        path: file that is rewritten after each attack; None writes nothing.
        rows: counts by the kind of attack.
        wrong: outcomes that fail the test.
    """

    path: Path | None
    rows: dict[str, collections.Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    COLUMNS = ("attacks", "recovered bit for bit", "refused with a name", "hangs", "unnamed", "unequal")

    def count(self, kind: str, ending: str, told: str) -> None:
        row = self.rows.setdefault(kind, collections.Counter())
        row["attacks"] += 1
        row[ending] += 1
        if ending not in self.COLUMNS[1:3]:
            self.wrong.append(f"{kind}: {ending}: {told}")
        print(f"{sum(row['attacks'] for row in self.rows.values()):4d}  {kind}: {ending}", flush=True)
        if self.path is not None:
            self.path.write_text(str(self))

    def __str__(self) -> str:
        lines = [f"| attack | {' | '.join(self.COLUMNS)} |", "|---" * (1 + len(self.COLUMNS)) + "|"]
        for kind, row in self.rows.items():
            lines.append(f"| {kind} | {' | '.join(str(row[column]) for column in self.COLUMNS)} |")
        return "\n".join(lines) + "\n"


def kill_random_process(command: Command, draw: random.Random) -> str:
    """Kills the launcher, one of its processes, or all of them, at a random moment; returns what it killed."""
    delay_s = draw.uniform(0.0, 9.0)
    target = draw.choice(["launcher", "one process", "everything"])
    try:
        command.process.wait(timeout=delay_s)
    except subprocess.TimeoutExpired:
        pass
    else:
        return "nothing: it had ended"
    try:
        processes = command.processes()
        if target == "launcher":
            processes[0].kill()
        elif target == "one process":
            draw.choice(processes).kill()
        else:
            command.kill_everything()
    except psutil.NoSuchProcess:
        pass
    return f"{target} after {delay_s:.2f} s"


def ended(command: Command) -> Ended | None:
    """Returns how a start ended; None if it hangs."""
    try:
        return command.end(_LONGEST_S)
    except subprocess.TimeoutExpired:
        command.kill_everything()
        return None


def recovered(overrides: list[str], run_dir: Path, reference: Path, megads: StartCommand) -> tuple[str, str]:
    """Runs the same command again, repeatedly while the folder is in use; returns the outcome and its message."""
    # A rank that outlived its launcher holds the folder for a moment.
    for _ in range(3):
        again = ended(megads("train", *overrides, f"run.dir={run_dir}"))
        if again is None:
            return "hangs", "the resume"
        if again.code != 2 or "is in use" not in again.err:
            break
        time.sleep(2.0)
    if again.code:
        named = str(run_dir) in again.err and "Traceback" not in again.err and again.code in (2, 3, 4)
        return ("refused with a name" if named else "unnamed"), again.err
    if steps_of(run_dir) != steps_of(reference):
        return "unequal", "the ledger"
    if checksums(checkpoint_of(run_dir, STEPS)) != checksums(checkpoint_of(reference, STEPS)):
        return "unequal", "the last checkpoint"
    return "recovered bit for bit", ""


def test_kills_at_random(corpus: Path, module_megads: StartCommand, pytestconfig: pytest.Config) -> None:
    """Catches a moment at which a kill loses trained steps, changes them, or makes the run impossible to resume."""
    overrides = small_model(
        corpus, train__steps=STEPS, checkpoint__every_steps=2, checkpoint__keep=2, parallel__dp=2, model__num_layers=1,
    )  # fmt: skip
    folder = module_megads.folder
    reference = folder / "reference"
    first = module_megads("train", *overrides, f"run.dir={reference}").end()
    assert first.code == 0, first.err
    given = pytestconfig.getoption("--attack-table")
    table, draw = Table(Path(given) if given else None), random.Random(17)
    for number in range(pytestconfig.getoption("--attack-rounds")):
        run_dir = folder / f"run-{number}"
        in_save = number % 2 == 1
        if in_save:
            target = draw.choice(["run", "rank"])
            kind = f"SIGKILL to the {target} inside a save"
            variables = {KILL_AT: f"{draw.randint(1, _CHANGES)} {target}"}
            command = module_megads(
                "train", *overrides, f"run.dir={run_dir}", fault="die_in_a_save", variables=variables
            )
            told = variables[KILL_AT]
        else:
            command = module_megads("train", *overrides, f"run.dir={run_dir}")
            told = kill_random_process(command, draw)
            kind = f"SIGKILL at random to {told.partition(' after')[0]}"
        cut_off = ended(command)
        if cut_off is None:
            table.count(kind, "hangs", told)
            continue
        # The launcher was killed, or reported the process that was.
        if cut_off.code not in (0, -9, RankKilled.exit_code) or "Traceback" in cut_off.err:
            table.count(kind, "unnamed", f"{told}: exit {cut_off.code}: {cut_off.err[-1500:]}")
            continue
        if cut_off.code == 0:
            kind = "none: the run had ended"
        ending, said = recovered(overrides, run_dir, reference, module_megads)
        table.count(kind, ending, f"{told}: {said[-1500:]}")
    print(f"\n{table}")
    assert not table.wrong, "\n".join(table.wrong)
