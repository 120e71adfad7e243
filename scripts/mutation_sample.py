"""Changes one place of megads/ at a time and says which changes no test notices.

    make mutation [COUNT=200] [SEED=1]
    python -m scripts.mutation_sample [--count 200] [--seed 1] [--jobs 2] [--files megads/data ...] [--append FILE]

cosmic-ray knows the small defects: another operator, a number off by one, a negated condition, an exception that is
not caught, a loop that does not run. This draws places with equal chance, applies one defect each to a copy of the
committed tree, and runs the tests beside the file: those that import it or have its name, else all tests of its room;
never the slow ones. A test that fails or hangs has killed the mutation. Every tenth draw changes nothing: its tests
must pass, or the share of killed mutations means nothing. A second call with the same --append file goes on where the
first ended.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent
LIMIT_S = 420
"""Of the tests of one mutation; those of the unchanged file take less."""
NO_TESTS_COLLECTED = 5
CONTROL = "no change"
"""Operator of a draw that checks the tests."""
NEEDS_A_GPU = ("megads/ops/apex.py",)
"""Without a GPU no test calls it."""


@dataclass(frozen=True)
class Mutation:
    """One defect.

    Attributes:
        file: what is changed, relative to the repository.
        operator: cosmic-ray's name of the change.
        occurrence: which of the places in the file that the operator could change.
        line: where it is.
    """

    file: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True)
class Result:
    """What became of a mutation: `outcome` is killed, hung, survived or untested."""

    mutation: Mutation
    outcome: str
    tests: list[str]
    diff: str


@cache
def operators() -> dict[str, Operator]:
    """cosmic-ray's operators that need no arguments, by name."""
    classes = {name: get_operator(name) for name in operator_names()}
    return {name: kind() for name, kind in classes.items() if not kind.arguments()}


def mutations_of(file: Path) -> list[list[Mutation]]:
    """Every mutation of a file, those of one place together."""
    tree = get_ast(file.read_text())
    places: dict[tuple[int, int], list[Mutation]] = {}
    for name, operator in operators().items():
        positions = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(positions):
            mutation = Mutation(file.relative_to(ROOT).as_posix(), name, occurrence, line)
            places.setdefault((line, column), []).append(mutation)
    return list(places.values())


class _WithoutAnnotations(ast.NodeTransformer):
    """Drops what is not run: annotations and the imports for them."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(None)
        self.generic_visit(node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return ast.Pass()
        self.generic_visit(node)
        return node


def runs_alike(before: str, after: str) -> bool:
    """Whether the change is only in annotations."""
    first, second = (ast.dump(_WithoutAnnotations().visit(ast.parse(source))) for source in (before, after))
    return first == second


def draw(files: Sequence[Path], count: int, seed: int) -> list[tuple[Mutation, str]]:
    """So many mutations, places with equal chance, and a control a ten; each with the source that it makes."""
    places = [place for file in files for place in mutations_of(file)]
    choice = random.Random(seed)
    choice.shuffle(places)
    drawn: list[tuple[Mutation, str]] = []
    for place in places:
        mutation = choice.choice(place)
        before = (ROOT / mutation.file).read_text()
        after = mutate_code(before, operators()[mutation.operator], mutation.occurrence)
        if after is None or runs_alike(before, after):
            continue
        drawn.append((mutation, after))
        if len(drawn) % 10 == 0:
            drawn.append((replace(mutation, operator=CONTROL), before))
        if len(drawn) >= count * 11 // 10:
            break
    return drawn


@cache
def imports_of_tests() -> dict[str, frozenset[str]]:
    """The modules and names that each file of tests imports."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        found[path.relative_to(ROOT).as_posix()] = frozenset(names)
    return found


def tests_beside(file: str) -> list[str]:
    """The tests that import a file or have its name, nearest first; all of its room where there are none."""
    path = Path(file).with_suffix("")
    module = ".".join(path.parts)
    room = f"tests/{path.parent.relative_to('megads').as_posix()}/"
    found = [
        test
        for test, imported in imports_of_tests().items()
        if module in imported or Path(test).stem == f"test_{path.name}"
    ]
    found.sort(key=lambda test: (Path(test).stem != f"test_{path.name}", not test.startswith(room)))
    return found or ([room] if (ROOT / room).is_dir() else [])


def run_tests(folder: Path, tests: Sequence[str]) -> str:
    """Runs the tests in a copy of the tree; returns killed, hung, survived or untested."""
    if not tests:
        return "untested"
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not slurm and not attack", *tests]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {0: "survived", NO_TESTS_COLLECTED: "untested"}.get(code, "killed")


def try_mutation(mutation: Mutation, source: str, folders: SimpleQueue[Path]) -> Result:
    """Applies a mutation to a free copy of the tree, and takes it back."""
    folder = folders.get()
    file = folder / mutation.file
    before = file.read_text()
    tests = tests_beside(mutation.file)
    try:
        file.write_text(source)
        outcome = run_tests(folder, tests)
    finally:
        file.write_text(before)
        folders.put(folder)
    diff = difflib.unified_diff(before.splitlines(), source.splitlines(), mutation.file, "changed", n=0, lineterm="")
    return Result(mutation, outcome, tests, "\n".join(diff))


def copies(parent: Path, count: int) -> Iterator[Path]:
    """Copies of the committed tree."""
    for number in range(count):
        folder = parent / str(number)
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
        yield folder


def show(results: Sequence[Result]) -> None:
    """Prints the survivors and the counts by room."""
    console = Console()
    by_room: dict[str, Counter[str]] = {}
    controls = Counter(result.outcome for result in results if result.mutation.operator == CONTROL)
    for result in results:
        if result.mutation.operator == CONTROL:
            continue
        by_room.setdefault(Path(result.mutation.file).parts[1], Counter())[result.outcome] += 1
        if result.outcome in ("survived", "untested"):
            console.print(
                f"\n{result.mutation.file}:{result.mutation.line} {result.outcome}", style="bold", markup=False
            )
            console.print(result.diff, markup=False, highlight=False)
    table = Table("room", "mutations", "killed", "hung", "survived", "untested", "killed, %")
    total: Counter[str] = sum(by_room.values(), Counter())
    for room, counts in [*sorted(by_room.items()), ("all", total)]:
        dead = 100 * (counts["killed"] + counts["hung"]) / counts.total()
        cells = (counts[name] for name in ("killed", "hung", "survived", "untested"))
        table.add_row(room, str(counts.total()), *map(str, cells), f"{dead:.0f}")
    console.print(table)
    console.print(f"without a change {controls['survived']} of {controls.total()} test runs passed")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
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
    parent = Path(tempfile.mkdtemp(prefix="megads-mutations-"))
    try:
        folders: SimpleQueue[Path] = SimpleQueue()
        for folder in copies(parent, arguments.jobs):
            folders.put(folder)
        with ThreadPoolExecutor(arguments.jobs) as threads:
            tried = threads.map(lambda pair: try_mutation(pair[0], pair[1], folders), left)
            for result in track(tried, "mutations", len(left), console=Console(stderr=True)):
                results.append(result)
                if arguments.append:
                    with arguments.append.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
