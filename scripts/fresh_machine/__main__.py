"""Runs the README's commands on fresh Debian systems and prints a table of times; see scripts/fresh_machine.sh.

Every case gets its own copy of a minimal system that debootstrap built, and a tarball of the committed tree. Its
commands run as an ordinary user with umask 077 and without LANG, in mount and PID namespaces of their own. pip and apt
reach the package registries as this machine does: pip's settings are copied, the folders that they name are mounted
read-only. The systems, pip's downloads, the logs and results.md stay in the cache folder until --clean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from scripts.fresh_machine.cases import STARTED, Case, Run, all_cases, result, selected
from scripts.fresh_machine.inside import PIP_CACHE, Command, Entry, Outcome
from scripts.fresh_machine.system import (
    HOMES,
    NAMESPACES,
    SUITES,
    FreshMachineError,
    Registries,
    build,
    copy_system,
    debian_mirror,
    open_cache,
    remove,
    this_machines_registries,
)

TIMED_OUT = 124
"""Exit code of a step that was ended at its time limit, as of timeout(1)."""
NOT_RUN = -1

_PATH = "/usr/local/bin:/usr/bin:/bin"
_COLUMNS = (("case", 34), ("step", 9), ("exit", 5), ("installation", 12), ("run", 9))


class Table:
    """Prints a row per step, and appends it to results.md."""

    def __init__(self, file: Path, title: str) -> None:
        self._file = file
        head = " | ".join(name for name, _ in _COLUMNS)
        with file.open("a", encoding="utf-8") as out:
            out.write(f"\n{title}\n\n| {head} | result |\n|{'---|' * (len(_COLUMNS) + 1)}\n")
        print(title)
        self._print([name for name, _ in _COLUMNS], "result")

    def add(self, case: str, step: str, outcome: Outcome, found: str) -> None:
        """Adds the row of a step."""
        installed = outcome.installation_s
        run = outcome.seconds - (installed or 0.0)
        code = "-" if outcome.code == NOT_RUN else str(outcome.code)
        cells = [case, step, code, "-" if installed is None else f"{installed:.0f} s", f"{run:.0f} s"]
        self._print(cells, found)
        with self._file.open("a", encoding="utf-8") as out:
            out.write(f"| {' | '.join(cells)} | {found} |\n")

    @staticmethod
    def _print(cells: list[str], last: str) -> None:
        widths = [width for _, width in _COLUMNS]
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), last, flush=True)


class Runner:
    """Runs cases, one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._cache: Path = options.cache
        self._registries: Registries = this_machines_registries()
        self._tarball = self._cache / "megads.tar"
        done = subprocess.run(
            ["git", "archive", "--output", str(self._tarball), "HEAD"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FreshMachineError(f"git archive HEAD failed: {done.stderr.strip()}")
        self._logs = self._cache / "logs" / time.strftime("%Y-%m-%d-%H%M%S")
        self._logs.mkdir(parents=True)
        self.failed: list[str] = []

    def run(self, case: Case, table: Table) -> None:
        """Runs a case's steps and adds their rows; after a step that failed the others of the case are not run."""
        mirror = self._options.mirror or debian_mirror()
        base = build(self._cache, case.system, case.compiler, mirror)
        root = self._cache / "cases" / case.name.replace(":", "-")
        copy_system(self._cache, base, root, self._registries)
        try:
            with limited(case.limits) as (cgroups, missing):
                if missing:
                    table.add(case.name, "-", Outcome(NOT_RUN, 0.0, None), f"not run: {missing}")
                    return
                self._unpack(case, root)
                for step, runs in case.steps.items():
                    if not self._step(case, root, step, runs, cgroups, table):
                        self.failed.append(f"{case.name}:{step}")
                        return
        finally:
            if not self._options.keep:
                remove(self._cache, root)

    def _unpack(self, case: Case, root: Path) -> None:
        """Makes each user's checkout, as that user."""
        for user in case.users:
            uid, checkout = case.uid(user), case.checkout(user)
            if case.home != "own":
                (root / "srv" / user).mkdir(mode=0o700)
                os.chown(root / "srv" / user, uid, uid)
            if case.home == "read-only":
                os.chown(root / HOMES.lstrip("/") / user, 0, 0)
                (root / HOMES.lstrip("/") / user).chmod(0o555)
            script = f"umask 077; mkdir -p '{checkout}' && tar -x -C '{checkout}'"
            with self._tarball.open("rb") as archive:
                subprocess.run(
                    ["chroot", f"--userspec={uid}:{uid}", "--groups=", str(root), "bash", "-c", script],
                    stdin=archive,
                    check=True,
                )

    def _step(self, case: Case, root: Path, step: str, runs: tuple[Run, ...], cgroups: list[str], table: Table) -> bool:
        """Runs a step and returns whether it passed."""
        logs = [self._logs / f"{case.name.replace(':', '-')}-{step}-{run.user}.log" for run in runs]
        commands = [self._command(case, run, log) for run, log in zip(runs, logs, strict=True)]
        read_only = {str(path): str(path) for path in self._registries.folders}
        if case.python:
            # At its own path, which it may know as that of its shared library.
            read_only[str(case.python)] = str(case.python)
            for parent in reversed(case.python.relative_to("/").parents):
                (root / parent).mkdir(exist_ok=True)
                (root / parent).chmod(0o755)
        # One cache of downloads for the user whose home is as usual; the others have what a new user has.
        pip_cache = None
        if case.home == "own":
            pip_cache = str(self._cache / "pip")
            Path(pip_cache).mkdir(exist_ok=True)
            os.chown(pip_cache, case.uid("ada"), case.uid("ada"))
        limit_s = max(getattr(self._options, f"{run.kind}_limit_s") for run in runs)
        outcomes = self._enter(Entry(str(root), commands, read_only, pip_cache, cgroups), limit_s, logs)
        passed = True
        for run, log, outcome in zip(runs, logs, outcomes, strict=True):
            good, found = result(run.kind, log.read_text(encoding="utf-8", errors="replace"), case.compiler)
            if outcome.code == TIMED_OUT:
                found = f"ended at the limit of {limit_s} s; {found}"
            passed = passed and outcome.code == 0 and good
            name = step if len(runs) == 1 else f"{step}/{run.user}"
            table.add(case.name, name, outcome, found if outcome.code == 0 and good else f"FAILED: {found}; see {log}")
        return passed

    def _command(self, case: Case, run: Run, log: Path) -> Command:
        environment = {"PATH": _PATH, "HOME": f"{HOMES}/{run.user}", **self._registries.variables, **case.environment()}
        if case.home == "own" and run.user == "ada":
            environment["PIP_CACHE_DIR"] = PIP_CACHE
        prefix = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))] if case.cpus else []
        shell = f"umask 077; cd '{case.checkout(run.user)}' && {run.command}"
        return Command(shell, str(log), case.uid(run.user), environment, prefix, STARTED[run.kind])

    def _enter(self, entry: Entry, limit_s: int, logs: list[Path]) -> list[Outcome]:
        """Runs `inside.enter` in namespaces of its own."""
        asked, answer = self._cache / "entry.json", self._cache / "outcomes.json"
        asked.write_text(json.dumps(asdict(entry)), encoding="utf-8")
        answer.unlink(missing_ok=True)
        # Bash is the first process of the namespace: it reaps orphans, as an init does.
        inside = 'python=$1; shift; "$python" -m scripts.fresh_machine.inside "$@"; exit $?'
        process = subprocess.Popen(
            [*NAMESPACES, "bash", "-c", inside, "bash", sys.executable, str(asked), str(answer)],
            stdin=subprocess.DEVNULL,
        )
        began = time.monotonic()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return [Outcome(TIMED_OUT, time.monotonic() - began, None) for _ in logs]
        finally:
            # With its first process, the namespace ends: every process in it and every mount.
            process.kill()
            process.wait()
        if code or not answer.exists():
            raise FreshMachineError(f"entering {entry.root} failed with exit code {code}, see above")
        return [Outcome(**outcome) for outcome in json.loads(answer.read_text(encoding="utf-8"))]


@contextlib.contextmanager
def limited(limits: dict[str, int]) -> Iterator[tuple[list[str], str]]:
    """Makes cgroups with limits.

    Args:
        limits: cpu in cores, memory in bytes.

    Yields:
        The files to join them by, and what cannot be limited on this machine ("" if nothing).
    """
    top = Path("/sys/fs/cgroup")
    unified = (top / "cgroup.controllers").exists()
    made: list[Path] = []
    problem = ""
    try:
        for controller, value in limits.items():
            folder = (top if unified else top / controller) / f"megads-fresh-{os.getpid()}-{controller}"
            try:
                if unified:
                    (top / "cgroup.subtree_control").write_text(f"+{controller}")
                folder.mkdir()
                made.append(folder)
                for name, text in _limit_files(controller, value, unified).items():
                    (folder / name).write_text(text)
            except OSError as error:
                problem = f"no cgroup can limit {controller} on this machine ({error})"
        yield [str(folder / "cgroup.procs") for folder in made], problem
    finally:
        for folder in made:
            _remove_cgroup(folder)


def _limit_files(controller: str, value: int, unified: bool) -> dict[str, str]:
    if controller == "memory":
        return {"memory.max" if unified else "memory.limit_in_bytes": str(value)}
    quota, period = str(value * 100_000), "100000"
    if unified:
        return {"cpu.max": f"{quota} {period}"}
    return {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}


def _remove_cgroup(folder: Path) -> None:
    """Removes a cgroup once its killed processes are gone."""
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    print(f"fresh_machine: {folder} still has processes and is left", file=sys.stderr)


def machine() -> str:
    """Returns the processor's name, cores, memory, kernel and load, for the table's title."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":", 1)[1].split()}
    shown = sorted(flag for flag in flags if flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16"))
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    processor = f"{names[0] if names else platform.machine()} ({', '.join(shown)})"
    return (
        f"{processor}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB, load {os.getloadavg()[0]:.1f} at the start"
    )


def commit() -> str:
    """Returns the commit under test."""
    done = subprocess.run(["git", "log", "-1", "--format=%h %s"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Ends as after Ctrl-C: what runs is killed, and the case's system removed."""
    raise KeyboardInterrupt


def parse() -> argparse.Namespace:
    """Parses the command line."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megads-fresh-machine"
    parser = argparse.ArgumentParser(
        prog="scripts/fresh_machine.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="debian12:nocompiler:demo")
    parser.add_argument("--list", action="store_true", help="list the selected cases; needs no root")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and where; needs no root")
    parser.add_argument("--clean", action="store_true", help="remove the cache folder")
    parser.add_argument("--keep", action="store_true", help="keep each case's system, to look at a failure")
    parser.add_argument("--cache", type=Path, default=cache, help=f"folder, default {cache}: 1 GB, and 3 GB for a case")
    parser.add_argument("--mirror", help="address of a Debian mirror; default: the one that apt uses here")
    parser.add_argument(
        "--python",
        action="append",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="one more Python, built for Debian 12",
    )
    parser.add_argument("--demo-limit-s", type=int, default=1200, help="time limit of a demo with installation")
    parser.add_argument("--test-limit-s", type=int, default=3600, help="time limit of the tests with installation")
    parser.add_argument("--demo-command", default="make demo", help="what the demo steps run, default 'make demo'")
    parser.add_argument("--test-command", default="make test", help="what the test steps run, default 'make test'")
    options = parser.parse_args()
    options.cache = options.cache.absolute()
    options.python = [python.resolve() for python in options.python]
    for python in options.python:
        if not (python / "bin/python3").exists():
            parser.error(f"--python {python}: no bin/python3 in it")
    return options


def main() -> int:
    """Runs the selected cases; returns 1 if one failed."""
    options = parse()
    if options.clean:
        if options.cache.exists():
            with open_cache(options.cache):
                remove(options.cache, options.cache)
        return 0
    cases = selected(all_cases(options.python, options.demo_command, options.test_command), options.only)
    if not cases:
        raise FreshMachineError(f"no case has the words {' or '.join(options.only)}: see --list")
    if options.list or options.dry_run:
        for case in cases:
            print(f"{case.name:<34} {', '.join(case.steps):<24} {case.says}")
            for step, runs in case.steps.items() if options.dry_run else ():
                for run in runs:
                    print(
                        f"    {step}: {run.user} in {case.checkout(run.user)!r} on {SUITES[case.system]}: {run.command}"
                    )
        return 0
    if options.python == []:
        print("no Python 3.12: Debian 12 and 13 have 3.11 and 3.13; name an installation with --python for its case")
    signal.signal(signal.SIGTERM, interrupt)
    with open_cache(options.cache):
        runner = Runner(options)
        table = Table(options.cache / "results.md", f"{commit()}; {machine()}")
        for case in cases:
            runner.run(case, table)
    print(f"table: {options.cache / 'results.md'}; logs: {options.cache / 'logs'}")
    if runner.failed:
        print(f"FAILED: {', '.join(runner.failed)}")
    return 1 if runner.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FreshMachineError as error:
        sys.exit(f"fresh_machine: {error}")
    except KeyboardInterrupt:
        sys.exit("fresh_machine: interrupted")
