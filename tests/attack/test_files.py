"""Damage to every file of a run: the right result or a message that names the file, never another result silently."""

from __future__ import annotations

import collections
import random
from pathlib import Path

import pytest

from tests.attack.command_lines import copy_template
from tests.attack.damage import DAMAGES, READERS, TRAIN, damaged_copy, files_of, write_cut_off_run
from tests.command import steps_of
from tests.fork_server import ForkServer, Outcome

pytestmark = pytest.mark.distributed

QUICK_READS, QUICK_RESUMES = 20, 2
"""Number of cases sampled in `make test`; a resume takes seconds."""

# Prefixes of the files that each command reads; it ignores all others.
_READ_BY = {
    "report": ("run/",),
    "why": ("corpus", "run/"),
    "generate": ("corpus.json", "corpus.tokenizer", "run/checkpoints", "run/config"),
    "check": ("corpus",),
    "inspect": ("corpus",),
    "dry run": ("corpus",),
}
# Not the report: its pages contain times, and its numbers come from files with remarks of their own.
_COMPARED = ("why", "generate", "check", "inspect", "dry run")


class Sound:
    """The undamaged run, and what its readers print."""

    def __init__(self, root: Path, server: ForkServer) -> None:
        self.server, self.template, self.folder = server, root / "template", root / "folder"
        self.template.mkdir()
        self.steps = write_cut_off_run(self.template, server)
        self.files = files_of(self.template)
        self.said = {name: self.in_copy(line) for name, line in READERS.items()}
        assert not [name for name, outcome in self.said.items() if outcome.code or outcome.defect()], self.said

    def in_copy(self, line: list[str]) -> Outcome:
        return self.server(copy_template(self.template, self.folder), line)

    def reads(self) -> list[tuple[str, str, str]]:
        """Every file, damage and reader of the file."""
        return [
            (file, damage, reader)
            for reader, starts in _READ_BY.items()
            for file in self.files
            if file.startswith(starts)
            for damage in DAMAGES
        ]

    def wrong_read(self, file: str, damage: str, reader: str) -> str:
        """What is wrong in a reader's result on a damaged file; empty if nothing is."""
        damaged_copy(self.template, self.folder, file, damage)
        outcome = self.server(self.folder, READERS[reader])
        return self._wrong(file, outcome, differs=reader in _COMPARED and outcome.out != self.said[reader].out)

    def wrong_resume(self, file: str, damage: str) -> str:
        """The same for `megads train`, which resumes the run."""
        damaged_copy(self.template, self.folder, file, damage)
        outcome = self.server(self.folder, TRAIN)
        run_dir = self.folder / "run"
        differs = not outcome.code and (not (run_dir / "metrics.jsonl").is_file() or steps_of(run_dir) != self.steps)
        return self._wrong(file, outcome, differs)

    def _wrong(self, file: str, outcome: Outcome, differs: bool) -> str:
        events = self.folder / "run" / "events.jsonl"
        remarks = events.read_text(errors="replace") if events.is_file() else ""
        name = Path(file).name
        if outcome.defect():
            return f"{outcome.defect()}: {outcome.err[-2000:]}"
        # The dataset's prefix is enough to name one of its files.
        names = (name, "corpus" if name.startswith("corpus.") else name, Path(file).parent.name)
        if outcome.code and not any(name in outcome.err for name in names):
            return f"exit {outcome.code} without the file's name: {outcome.err}"
        if not outcome.code and differs and not any(name in outcome.out + outcome.err + remarks for name in names):
            return "another result in silence"
        return ""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Sound:
    return Sound(tmp_path_factory.mktemp("files"), fork_server)


@pytest.mark.slow
def test_a_damaged_file_is_read(sound: Sound) -> None:
    """Catches a traceback, a hang or a result from damaged data in a command that reads a run's files."""
    for read in random.Random(17).sample(sound.reads(), QUICK_READS):
        assert not (wrong := sound.wrong_read(*read)), (read, wrong)


@pytest.mark.slow
def test_a_run_goes_on_from_a_damaged_file(sound: Sound) -> None:
    """Catches a resume that trains on damaged data, or ends in a traceback."""
    pairs = [(file, damage) for file in sound.files for damage in DAMAGES]
    for file, damage in random.Random(17).sample(pairs, QUICK_RESUMES):
        assert not (wrong := sound.wrong_resume(file, damage)), (file, damage, wrong)


@pytest.mark.attack
def test_every_damage_of_every_file_is_read(sound: Sound) -> None:
    """Catches what test_a_damaged_file_is_read samples, in every case."""
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for read in sound.reads():
        wrong = sound.wrong_read(*read)
        counts["wrong" if wrong else "sound"] += 1
        if counts.total() % 100 == 0:
            print(dict(counts), flush=True)
        if wrong:
            found.append((read, wrong))
            print(f"\n{read}: {wrong}", flush=True)
    print(f"\ndamaged files read: {dict(counts)}")
    assert not found, f"{len(found)} of {counts.total()}"


@pytest.mark.attack
def test_a_run_goes_on_from_every_damage_of_every_file(sound: Sound) -> None:
    """Catches what test_a_run_goes_on_from_a_damaged_file samples, in every case."""
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for file in sound.files:
        for damage in DAMAGES:
            wrong = sound.wrong_resume(file, damage)
            counts["wrong" if wrong else "sound"] += 1
            if counts.total() % 20 == 0:
                print(dict(counts), flush=True)
            if wrong:
                found.append((file, damage, wrong))
                print(f"\n{file}, {damage}: {wrong}", flush=True)
    print(f"\nresumed from damaged files: {dict(counts)}")
    assert not found, f"{len(found)} of {counts.total()}"
