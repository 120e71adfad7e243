"""Mutation testing: changes one place of megads/ at a time and reports the changes that no test detects.

    make mutation [COUNT=200] [SEED=1]
    python -m scripts.mutation_sample [--count 200] [--seed 1] [--jobs 2] [--files megads/data ...] [--append FILE]

cosmic-ray provides the mutations: another operator, a number off by one, a negated condition, an exception that is not
caught, a loop that does not run. This script draws places uniformly, applies one mutation each to a copy of the
committed tree, and runs the nearest tests: the six nearest of those that import the file or are named after it, those
that name the changed function first, and the tests of the command that has the package's name; if there are none, all
tests of the package. Tests in one process go first, slow ones are never run, and none starts after 60 s (--budget-s). A
test that fails or hangs kills the mutation. Every tenth draw changes nothing: its tests must pass, otherwise the share
of killed mutations is meaningless. A second call with the same --append file continues where the first ended.

Not drawn, because they cannot affect a run: annotations, `if TYPE_CHECKING`, the type of a cast, abstractmethod and
other marks for mypy, frozen= of a dataclass (mypy rejects the assignment), arguments of loggers, and
`if __name__ == "__main__"`. cosmic-ray does not change strings, so docstrings, `__all__` and `__slots__` are not
mutated. Numbers that only tune, such as timeouts, are drawn and survive. Survivors that a reviewer found to be
equivalent are listed with the reason in scripts/equivalent_mutations.json; they are counted separately, not as killed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    # Only `make mutation` installs it; the tests of this script run without it.
    from cosmic_ray.operators.operator import Operator

ROOT = Path(__file__).parent.parent
EQUIVALENTS = ROOT / "scripts/equivalent_mutations.json"
NEAREST = 6
"""Maximum number of test files."""
CONTROL = "no change"
"""Operator of a control draw, which changes nothing."""
NEEDS_A_GPU = ("megads/ops/apex.py",)
"""Files that no test calls without a GPU."""
PUNCTUATION = frozenset(("(", ")", "[", "]", "{", "}", ",", ".", ":", "=", "->", ";", "..."))
FOR_MYPY = {"abstractmethod", "runtime_checkable", "override", "final", "overload"}


@dataclass(frozen=True)
class Mutation:
    """One mutation.

    Attributes:
        file: mutated file, relative to the repository.
        operator: cosmic-ray's name of the operator.
        occurrence: index of the place among those in the file to which the operator applies.
        line: line number.
    """

    file: str
    operator: str
    occurrence: int
    line: int

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions and classes around it."""
        return _names_at(self.file, self.line)


@dataclass(frozen=True)
class Result:
    """Result of a mutation: `outcome` is killed, hung, survived or untested, `by` the test that failed."""

    mutation: Mutation
    outcome: str
    tests: list[str]
    diff: str
    by: str = ""
    wall_s: float = 0.0


@cache
def _names_at(file: str, line: int) -> frozenset[str]:
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = (node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, defined))
    return frozenset(node.name for node in nodes if node.lineno <= line <= (node.end_lineno or 0))


@cache
def operators() -> dict[str, Operator]:
    """cosmic-ray's operators without arguments, by name."""
    from cosmic_ray.plugins import get_operator, operator_names

    classes = {name: get_operator(name) for name in operator_names()}
    return {name: kind() for name, kind in classes.items() if not kind.arguments()}


def mutations_of(file: Path) -> list[list[Mutation]]:
    """All mutations of a file, grouped by place."""
    from cosmic_ray.ast import ast_nodes, get_ast

    # Most nodes are punctuation, which no operator changes; to ask each of 211 operators about them takes minutes.
    nodes = [node for node in ast_nodes(get_ast(file.read_text())) if getattr(node, "value", "") not in PUNCTUATION]
    places: dict[tuple[int, int], list[Mutation]] = {}
    for name, operator in operators().items():
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(positions):
            mutation = Mutation(file.relative_to(ROOT).as_posix(), name, occurrence, line)
            places.setdefault((line, column), []).append(mutation)
    return list(places.values())


class _WhatRuns(ast.NodeTransformer):
    """Removes code on which no run depends."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        node.decorator_list = [each for each in node.decorator_list if _name(each) not in FOR_MYPY]
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = [each for each in node.decorator_list if _name(each) not in FOR_MYPY]
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(None)
        self.generic_visit(node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        tested = node.test.left if isinstance(node.test, ast.Compare) else node.test
        if _name(tested) in ("TYPE_CHECKING", "__name__"):
            return ast.Pass()
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _name(node.func)
        if isinstance(node.func, ast.Attribute) and _name(node.func.value) in ("log", "logger", "logging"):
            return ast.Constant(None)
        if isinstance(node.func, ast.Name) and name == "cast":
            node.args = node.args[1:]
        if name == "dataclass":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "frozen"]
        self.generic_visit(node)
        return node


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_python(source: str) -> bool:
    """Whether it compiles: cosmic-ray puts a minus before a dict's `**rest` too, for example."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, "mutated", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def runs_alike(before: str, after: str) -> bool:
    """Whether the mutation cannot affect any run; both must compile."""
    first, second = (ast.dump(_WhatRuns().visit(ast.parse(source))) for source in (before, after))
    return first == second


def draw(files: Sequence[Path], count: int, seed: int) -> list[tuple[Mutation, str]]:
    """Draws this many mutations, uniformly over places, and a control per ten; each with its mutated source.

    A mutation that does not compile or cannot affect a run is replaced by that of the next place.
    """
    from cosmic_ray.mutating import mutate_code

    places = [place for file in files for place in mutations_of(file)]
    choice = random.Random(seed)
    choice.shuffle(places)
    drawn: list[tuple[Mutation, str]] = []
    left = count
    for place in places:
        mutation = choice.choice(place)
        before = (ROOT / mutation.file).read_text()
        after = mutate_code(before, operators()[mutation.operator], mutation.occurrence)
        if after is None or not is_python(after) or runs_alike(before, after):
            continue
        drawn.append((mutation, after))
        left -= 1
        if left % 10 == 0:
            drawn.append((replace(mutation, operator=CONTROL), before))
        if not left:
            break
    return drawn


@cache
def imports_of_tests() -> dict[str, frozenset[str]]:
    """The modules and names that each test file imports, and the modules that it starts."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.parent.name in ("slurm", "attack"):
            continue
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and str(node.value).startswith("megads."):
                names.add(str(node.value))  # a module that is started: python -m megads.tools.trackers.process
        found[path.relative_to(ROOT).as_posix()] = frozenset(names)
    return found


@cache
def _words_of(test: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", (ROOT / test).read_text()))


def nearest_tests(file: str, names: frozenset[str] = frozenset()) -> list[str]:
    """The nearest tests that import a file or are named after it, and those of the command named after its package.

    Args:
        file: file of megads, relative to the repository.
        names: functions and classes of it; tests that name one of them go first.
    """
    path = Path(file).with_suffix("")
    module = ".".join(path.parts)
    room = (Path("tests") / path.parent.relative_to("megads")).as_posix()
    namesake = f"{room}/test_{path.name}.py"
    found = [test for test, imported in imports_of_tests().items() if module in imported or test == namesake]

    def distance(test: str) -> tuple[bool, bool, bool, int]:
        imported = sum(name.startswith("megads.") for name in imports_of_tests()[test])
        return not names & _words_of(test), test != namesake, not test.startswith(f"{room}/"), imported

    nearest = sorted(found, key=distance)[:NEAREST]
    # A tool's own test of its command may be in another package: tests/cli/test_plan.py of megads/tools/plan.
    named = [test for test in imports_of_tests() if test.endswith(f"/test_{path.parent.name}.py")]
    beside = [] if nearest else [test for test in imports_of_tests() if Path(test).parent == Path(room)]
    return list(dict.fromkeys([*nearest, *beside, *named]))


class Tester:
    """A copy of the committed tree and the process that runs tests in it; scripts/mutation_tests.py."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self.folder = folder
        self._time_s = 10**9
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
        (folder / "tmp").mkdir()
        environment = os.environ | {"PYTHONPATH": str(folder), "TMPDIR": str(folder / "tmp")}
        command = [sys.executable, "-m", "scripts.mutation_tests", str(budget_s)]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def write(self, file: str, source: str) -> None:
        """Writes a file with a new mtime each time, because Python would otherwise run the previous bytecode."""
        (self.folder / file).write_text(source)
        self._time_s += 1
        os.utime(self.folder / file, (self._time_s, self._time_s))

    def run(self, tests: Sequence[str]) -> dict[str, str]:
        """Runs the tests in the current copy: returns outcome and the failed test."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps(tests), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        for path in (self.folder / "tmp").iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the process, which kills the running tests."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def try_mutation(mutation: Mutation, source: str, testers: SimpleQueue[Tester]) -> Result:
    """Applies a mutation to a free copy of the tree, tests it, and reverts it."""
    before = (ROOT / mutation.file).read_text()
    diff = difflib.unified_diff(before.splitlines(), source.splitlines(), mutation.file, "changed", n=0, lineterm="")
    tests = nearest_tests(mutation.file, mutation.names)
    if not tests:
        return Result(mutation, "untested", tests, "\n".join(diff))
    tester = testers.get()
    start = time.monotonic()
    try:
        tester.write(mutation.file, source)
        found = tester.run(tests)
    finally:
        tester.write(mutation.file, before)
        testers.put(tester)
    return Result(mutation, tests=tests, diff="\n".join(diff), wall_s=round(time.monotonic() - start, 1), **found)


def try_all(drawn: Sequence[tuple[Mutation, str]], jobs: int, budget_s: float) -> Iterator[Result]:
    """Returns the results in the order of the draws."""
    parent = Path(tempfile.mkdtemp(prefix="megads-mutations-"))
    testers: list[Tester] = []
    try:
        free: SimpleQueue[Tester] = SimpleQueue()
        for number in range(jobs):
            testers.append(Tester(parent / str(number), budget_s))
            free.put(testers[-1])
        with ThreadPoolExecutor(jobs) as threads:
            try:
                yield from threads.map(lambda pair: try_mutation(pair[0], pair[1], free), drawn)
            except BaseException:
                for tester in testers:
                    tester.close()
                raise
    finally:
        for tester in testers:
            tester.close()
        shutil.rmtree(parent, ignore_errors=True)


@cache
def equivalents() -> list[dict[str, str]]:
    """Reviewed mutations that do not change megads' behavior: file, the lines before and after, reason."""
    return json.loads(EQUIVALENTS.read_text())  # type: ignore[no-any-return]


def is_equivalent(result: Result) -> bool:
    """Whether a survivor is in the reviewed list."""
    lines = [line for line in result.diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    before, after = ("\n".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return any(
        (each["file"], each["before"], each["after"]) == (result.mutation.file, before, after) for each in equivalents()
    )


def show(results: Sequence[Result]) -> None:
    """Prints the survivors and the counts by package."""
    console = Console()
    by_room: dict[str, Counter[str]] = {}
    controls = Counter(result.outcome for result in results if result.mutation.operator == CONTROL)
    for result in results:
        if result.mutation.operator == CONTROL:
            continue
        lives = result.outcome in ("survived", "untested")
        outcome = "equivalent" if lives and is_equivalent(result) else result.outcome
        by_room.setdefault(Path(result.mutation.file).parts[1], Counter())[outcome] += 1
        if lives and outcome != "equivalent":
            console.print(
                f"\n{result.mutation.file}:{result.mutation.line} {result.outcome}", style="bold", markup=False
            )
            console.print(result.diff, markup=False, highlight=False)
    outcomes = ("killed", "hung", "survived", "untested", "equivalent")
    table = Table("room", "mutations", *outcomes, "killed, %", "of those not equivalent, %")
    total: Counter[str] = sum(by_room.values(), Counter())
    for room, counts in [*sorted(by_room.items()), ("all", total)]:
        dead = 100 * (counts["killed"] + counts["hung"])
        cells = (str(counts[name]) for name in outcomes)
        others = max(1, counts.total() - counts["equivalent"])
        table.add_row(room, str(counts.total()), *cells, f"{dead / max(1, counts.total()):.0f}", f"{dead / others:.0f}")
    console.print(table)
    console.print(f"without a change {controls['survived']} of {controls.total()} test runs passed")


def main() -> int:
    """The command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budget-s", type=float, default=60, help="no test of a mutation starts after so many seconds")
    parser.add_argument("--files", nargs="+", type=Path, default=[ROOT / "megads"], help="files or folders to change")
    parser.add_argument("--append", type=Path, help="JSON lines of the results; what stands in it is not repeated")
    arguments = parser.parse_args()
    found = (file.resolve() for path in arguments.files for file in (path.rglob("*.py") if path.is_dir() else [path]))
    files = sorted(file for file in found if file.relative_to(ROOT).as_posix() not in NEEDS_A_GPU)
    drawn = draw(files, arguments.count, arguments.seed)
    lines = arguments.append.read_text().splitlines() if arguments.append and arguments.append.exists() else []
    known = [Result(Mutation(**line.pop("mutation")), **line) for line in map(json.loads, lines)]
    left = [(mutation, source) for mutation, source in drawn if mutation not in {result.mutation for result in known}]
    results = [result for result in known if result.mutation in {mutation for mutation, _ in drawn}]
    for result in track(
        try_all(left, arguments.jobs, arguments.budget_s), "mutations", len(left), console=Console(stderr=True)
    ):
        results.append(result)
        if arguments.append:
            with arguments.append.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
