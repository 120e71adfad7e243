"""Fixtures and hooks that the tests share."""

from __future__ import annotations

import os
import signal
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import StartCommand, StartLauncher, commands_in, launchers_in
from tests.command_server import CommandServer
from tests.corpus import write_corpus
from tests.fork_server import ForkServer
from tests.tool_tests import REPOSITORY, Selection, changed_files, sources_of

# As many as a rank has: references with more threads would compete with the ranks for the cores, and the bits of
# LayerNorm's gradient depend on the number.
torch.set_num_threads(1)

# pytest-xdist's workers have 80 columns, and output to a pipe has none.
os.environ.pop("COLUMNS", None)

# A suite in the background inherits that Ctrl-C is ignored, and so would every command that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They start processes that import torch, or compile.
_SLOW_FIXTURES = {"megads", "module_megads", "start", "command_server", "fork_server", "kernels"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attack-examples", type=int, default=200, help="command lines of each verb that are made up")
    parser.addoption("--attack-rounds", type=int, default=60, help="kills of a run at random")
    parser.addoption("--attack-table", metavar="FILE", help="file for the counts of the attacks")
    parser.addoption(
        "--tools", choices=("all", "changed", "unchanged"), default="all", help="see Selection in tests/tool_tests.py"
    )
    parser.addoption(
        "--fast", action="store_true", help="the first case of each test of the trainer that starts no process"
    )
    parser.addoption("--share", metavar="K/N", help="run the K-th of N shares; the same tests for the same K and N")


_SELECTION = pytest.StashKey[Selection]()


def pytest_configure(config: pytest.Config) -> None:
    which = config.option.tools
    config.stash[_SELECTION] = Selection(which, changed_files() if which != "all" else ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and not config.stash[_SELECTION].keeps_file(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow the cases that a test's `quick` mark does not name; keeps only the requested tests and share.

    Tests of a file with the same parameters stay in one share, so that their fixtures are created once.
    """
    _make_the_others_slow(config, items)
    _keep(config, items, config.stash[_SELECTION].keeps)
    if config.option.fast:
        _keep(config, items, _is_fast())
    if os.environ.get("PYTEST_XDIST_WORKER"):
        _put_long_files_first(items)
    if not config.option.share:
        return
    share, shares = map(int, config.option.share.split("/"))
    if not 1 <= share <= shares:
        raise pytest.UsageError(f"--share {config.option.share}: want K/N with K from 1 to N")

    def mine(item: pytest.Item) -> bool:
        _, bracket, parameters = item.name.partition("[")
        key = f"{item.path.name}[{parameters}" if bracket else item.nodeid
        return zlib.crc32(key.encode()) % shares == share - 1

    _keep(config, items, mine)


def _keep(config: pytest.Config, items: list[pytest.Item], keep: Callable[[pytest.Item], bool]) -> None:
    kept = {id(item) for item in items if keep(item)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _is_fast() -> Callable[[pytest.Item], bool]:
    """Returns what keeps the first case of each test of the trainer that starts no process."""
    seen = set[str]()

    def is_fast(item: pytest.Item) -> bool:
        test = item.nodeid.partition("[")[0]
        if test in seen or item.get_closest_marker("slow") or sources_of(item.path.relative_to(REPOSITORY).as_posix()):
            return False
        seen.add(test)
        return not _starts_processes(item)

    return is_fast


def _starts_processes(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("distributed") or _SLOW_FIXTURES & set(getattr(item, "fixturenames", ())))


def _put_long_files_first(items: list[pytest.Item]) -> None:
    """Sorts the files: those with most tests that start processes first, so that no worker ends with a long one."""
    count = Counter(item.path for item in items if not item.get_closest_marker("slow") and _starts_processes(item))
    items.sort(key=lambda item: -count[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.user_properties += [("fault", number) for mark in item.iter_markers("fault") for number in mark.args]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After `make test-faults`, prints how many tests of each fault passed, failed and were skipped."""
    if not config.option.markexpr.startswith("fault"):
        return
    counts = defaultdict[int, Counter[str]](Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if not isinstance(report, pytest.TestReport):
                continue  # a module that was skipped as a whole
            for name, number in report.user_properties:
                if name == "fault":
                    counts[number][outcome] += 1
    terminalreporter.section("faults, by their number in docs/reliability.md")
    for number in sorted(counts):
        terminalreporter.line(f"{number:3}  {', '.join(f'{count} {what}' for what, count in counts[number].items())}")


def _make_the_others_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = defaultdict[Any, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("quick"):
            tests[item.function].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("quick")
        unknown = set(mark.args if mark else ()) - {case.callspec.id for case in cases}
        if unknown and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"{cases[0].nodeid}: the mark `quick` names {sorted(unknown)}, which are no cases")
        for case in cases:
            if mark and case.callspec.id not in mark.args:
                case.add_marker("slow")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the prefix of one small prepared dataset; read only."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.fixture(scope="session")
def command_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """Forks commands that train."""
    folder = tmp_path_factory.getbasetemp()
    # The folders of pytest-xdist's workers are in one of their session.
    folder = (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "command-server"
    folder.mkdir(mode=0o700, exist_ok=True)
    with closing(CommandServer(folder)) as server:
        yield server


@pytest.fixture(scope="session")
def fork_server(command_server: CommandServer) -> ForkServer:
    """Runs commands that end by themselves, without the seconds of imports of a new process."""
    return ForkServer(command_server)


@pytest.fixture
def megads(tmp_path: Path, command_server: CommandServer) -> Iterator[StartCommand]:
    """Starts `megads` commands in tmp_path; kills those still running at the end of the test."""
    with commands_in(tmp_path, command_server) as start:
        yield start


@pytest.fixture(scope="module")
def module_megads(tmp_path_factory: pytest.TempPathFactory, command_server: CommandServer) -> Iterator[StartCommand]:
    """Like `megads`, for runs that several tests of a module read."""
    with commands_in(tmp_path_factory.mktemp("runs"), command_server) as start:
        yield start


@pytest.fixture
def start(tmp_path: Path, command_server: CommandServer) -> Iterator[StartLauncher]:
    """Starts launchers with stand-in ranks, all of the run tmp_path / "run"."""
    with launchers_in(tmp_path / "run", command_server) as start:
        yield start


@pytest.fixture(scope="session")
def kernels() -> None:
    """Compiles and loads megads' own kernels; skips the test where that is not possible."""
    from megads.ops.build import KernelsUnavailable, build
    from megads.ops.resolve import load_library

    try:
        load_library(build(print))
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels here: {error}")


@pytest.fixture(autouse=True, scope="session")
def no_wandb() -> Iterator[None]:
    """Disables wandb unless a test enables it: its start takes a second per run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        yield
