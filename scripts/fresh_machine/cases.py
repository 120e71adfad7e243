"""The cases of `make test-fresh`: which system, folder and condition, and the steps of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.fresh_machine.system import HOMES, SUITES, UNKNOWN_USER, USERS

FOLDERS = {"space": "Länder und Texte/checkout", "megads": "megads"}
"""Word of a case, and the checkout's folder in it; `git clone` makes the second."""

MEMORY_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Run:
    """One user's command in a step.

    Attributes:
        user: name in `USERS`.
        command: bash command in the checkout.
        kind: demo or test: decides the time limit and what of the output is reported.
    """

    user: str
    command: str
    kind: str


@dataclass(frozen=True)
class Case:
    """One fresh system and what is run in it, step by step.

    Attributes:
        words: identify the case, for example ("debian12", "compiler", "megads").
        steps: name of each step, and what starts at the same time in it.
        says: condition in words, for --list.
    """

    words: tuple[str, ...]
    steps: Mapping[str, tuple[Run, ...]]
    says: str
    system: str = "debian12"
    compiler: bool = True
    folder: str = "megads"
    home: str = "own"
    cpus: str = ""
    limits: dict[str, int] = field(default_factory=dict)
    python: Path | None = None

    @property
    def name(self) -> str:
        return ":".join(self.words)

    @property
    def users(self) -> list[str]:
        return sorted({run.user for runs in self.steps.values() for run in runs})

    def uid(self, user: str) -> int:
        return UNKNOWN_USER if self.home == "none" else USERS[user]

    def checkout(self, user: str) -> str:
        """Returns the checkout's folder in the system: in the user's home, if that can be written."""
        above = f"{HOMES}/{user}" if self.home == "own" else f"/srv/{user}"
        return f"{above}/{FOLDERS[self.folder]}"

    def environment(self) -> dict[str, str]:
        """Returns the variables of a login shell that differ between cases; LANG and LC_ALL are never set."""
        home = {"HOME": "/"} if self.home == "none" else {}
        return home | ({"PYTHON": str(self.python / "bin/python3")} if self.python else {})


def all_cases(pythons: list[Path], demo_command: str, test_command: str) -> list[Case]:
    """Returns every case, in the order in which they run.

    Args:
        pythons: installations of Python on this machine, each for one more case.
        demo_command: command of the demo steps.
        test_command: command of the test steps.
    """
    demo = Run("ada", demo_command, "demo")
    both = {"demo": (demo,), "test": (Run("ada", test_command, "test"),)}
    only_demo = {"demo": (demo,)}
    cases = [
        Case(
            (system, "compiler" if compiler else "nocompiler", folder),
            both,
            f"in {FOLDERS[folder]!r}, {'with' if compiler else 'without'} a C++ compiler",
            system,
            compiler,
            folder,
        )
        for system in SUITES
        for compiler in (True, False)
        for folder in FOLDERS
    ]
    for python in pythons:
        version = python_version(python)
        cases.append(Case(("debian12", f"python{version}"), both, f"Python {version} of {python}", python=python))
    again = Run("ben", demo_command, "demo")
    fresh = tuple(Run(user, f"export FRESH=1; {demo_command}", "demo") for user in ("ada", "ben"))
    users = {"demo": (demo,), "second": (again,), "together": fresh}
    cases += [
        Case(("debian12", "home"), both, "a home directory that cannot be written", home="read-only"),
        Case(("debian12", "nouser"), only_demo, "a user id without a name, HOME=/ (docker --user)", home="none"),
        Case(("debian12", "users"), users, "two users, one after the other, then at the same time"),
        Case(("debian12", "onecore"), only_demo, "one core (taskset)", cpus="taskset"),
        Case(("debian12", "quota"), only_demo, "a cgroup quota of one core, all visible", limits={"cpu": 1}),
        Case(("debian12", "memory"), only_demo, "4 GiB of memory (cgroup)", limits={"memory": MEMORY_BYTES}),
    ]
    return cases


def selected(cases: list[Case], only: list[str]) -> list[Case]:
    """Returns the cases, and of each the steps, that have all words of one of the selections; none selects all."""
    if not only:
        return cases
    found = []
    for case in cases:
        steps = {
            step: runs
            for step, runs in case.steps.items()
            if any(set(choice.split(":")) <= {*case.words, step} for choice in only)
        }
        if steps:
            found.append(Case(**{**case.__dict__, "steps": steps}))
    return found


def python_version(installation: Path) -> str:
    """Returns the version of an installation of Python: 3.12, from its lib folder."""
    names = sorted(path.name for path in (installation / "lib").glob("python3.*") if path.is_dir())
    return names[-1].removeprefix("python") if names else "unknown"


STARTED = {"demo": r"^== 1/4", "test": r"^=+ test session starts"}
"""Line with which the work of a command starts, after its installation."""

_PASSED = re.compile(
    r"^=* ?((?:\d+ (?:failed|passed|skipped|errors?|deselected|xfailed|warnings?),? ?)+)in ", re.MULTILINE
)
_GAINED = re.compile(r"gained: (-?[\d.]+)")
_NO_COMPILER = re.compile(r"no C\+\+ compiler")


def result(kind: str, log: str, compiler: bool) -> tuple[bool, str]:
    """Returns whether a log shows what its command promises, and its figures.

    Args:
        kind: demo or test.
        log: output of the command, every line after a time.
        compiler: whether the system has a C++ compiler; without one the output must say so.
    """
    text = re.sub(r"^ *[\d.]+  ", "", log, flags=re.MULTILINE)
    if kind == "test":
        summaries = _PASSED.findall(text)
        return bool(summaries), "; ".join(summary.strip() for summary in summaries) or "no summary of pytest"
    gained = _GAINED.findall(text)
    found = [f"gained {gained[-1]} nats" if gained else "no validation loss"]
    said = compiler or bool(_NO_COMPILER.search(text))
    if not compiler:
        found.append("says that there is no compiler" if said else "does NOT say that there is no compiler")
    return bool(gained) and said, ", ".join(found)
