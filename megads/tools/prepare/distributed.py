"""Preprocessing by several processes at a time, on any nodes that see the same folders.

All processes cut the input in the same way, claim sections of it, and tokenize what they have claimed. A slow process
claims less, and the sections of a dead process are claimed again. A process that finds all sections finished joins the
dataset.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megads.api import (
    ConfigError,
    DataError,
    Engine,
    Progress,
    Sidecar,
    available_cores,
    import_plugins,
    read_sidecar,
    reason_of,
)
from megads.data.indexed.verified_once import file_state, require_unchanged
from megads.runtime.claims import Claims, participants
from megads.runtime.slurm import array_index
from megads.tools.prepare.block_tokenizer import (
    BlockTokenizer,
    DatasetShard,
    TokenizeSettings,
    open_shard,
    shard_path,
)
from megads.tools.prepare.blocks import (
    LARGEST_FED_BYTES,
    Block,
    LineRange,
    block_bytes_of,
    blocks_of,
    first_texts,
    texts_of_places,
)
from megads.tools.prepare.config import PreprocessConfig
from megads.tools.prepare.records import Fields
from megads.tools.prepare.text import DocumentReader, custom_reader
from megads.tools.prepare.text_files import text_bytes_estimate
from megads.tools.prepare.tokenizing import (
    Tokenizing,
    input_identity,
    map_items,
    parts_folder,
    parts_path,
    remove_parts,
)

_TASKS = "tasks-*"
"""Folders of claims in the folder of parts, one for every combination of input and settings."""
_MOST_SECTIONS = 4096
"""Few enough that listing them takes no time, many enough that a slow node delays the end little."""
_POLL_S = 2.0
_JOIN = "join"


@dataclass(frozen=True)
class FileGroup:
    """Consecutive files that one process reads, because they cannot be read from the middle.

    Attributes:
        paths: the files.
        input_bytes: their total size.
    """

    paths: tuple[str, ...]
    input_bytes: int


Unit = LineRange | FileGroup


def split_into_units(reader: DocumentReader, block_bytes: int) -> list[Unit]:
    """Cuts the files, in order, into units that a process can read alone; depends only on the files.

    Args:
        reader: provides the files.
        block_bytes: approximate size of a block's text.
    """
    units: list[Unit] = []
    group: list[str] = []
    group_bytes = group_text_bytes = 0

    def end_group() -> None:
        nonlocal group, group_bytes, group_text_bytes
        if group:
            units.append(FileGroup(tuple(group), group_bytes))
        group, group_bytes, group_text_bytes = [], 0, 0

    for path in reader.files:
        size = path.stat().st_size
        if reader.is_line_file(path):
            end_group()
            units += (
                LineRange(str(path), begin, min(begin + block_bytes, size)) for begin in range(0, size, block_bytes)
            )
            continue
        group.append(str(path))
        group_bytes += size
        group_text_bytes += text_bytes_estimate([path])
        if group_text_bytes >= min(block_bytes, LARGEST_FED_BYTES):
            end_group()
    end_group()
    return units


@dataclass(frozen=True)
class FinishedUnit:
    """Result of one unit.

    Attributes:
        unit: index of the unit.
        shards: number of its shards.
        tokens: number of tokens in them.
        input_bytes: size of its input.
        kept: number of shards that existed already.
        restarted: number of shards that were tokenized again by the reference.
        converted: encodings of its files that are not UTF-8.
    """

    unit: int
    shards: int
    tokens: int
    input_bytes: int
    kept: int
    restarted: int
    converted: dict[str, str]


class UnitTokenizer:
    """Tokenizes units into shards, in every worker process.

    Args:
        settings: settings that determine the token ids.
        folder: folder of the shards.
        fields: fields of a record that hold its text.
        block_bytes: approximate size of a block's text.
        config: settings for reading files.
    """

    def __init__(
        self, settings: TokenizeSettings, folder: Path, fields: Fields, block_bytes: int, config: PreprocessConfig
    ) -> None:
        import_plugins(config.plugins)
        self._tokenizer = BlockTokenizer(settings, folder)
        self._folder, self._fields, self._block_bytes, self._config = folder, fields, block_bytes, config

    def __call__(self, _: int, numbered: tuple[int, Unit]) -> FinishedUnit:
        """Makes the shards of a unit, except those that exist already."""
        number, unit = numbered
        converted: dict[str, str] = {}
        blocks: Iterable[Block]
        if isinstance(unit, LineRange):
            blocks = [unit]
        else:
            reader = DocumentReader(
                unit.paths, self._fields, custom=custom_reader(self._config.reader), encoding=self._config.encoding
            )
            # Filled while the files are read.
            converted = reader.converted
            blocks = blocks_of(reader, self._block_bytes, self._tokenizer.last_cut)
        made = [
            self._tokenizer.make(shard_path(self._folder, number, piece), block) for piece, block in enumerate(blocks)
        ]
        return FinishedUnit(
            number,
            len(made),
            sum(one.tokens for one in made),
            unit.input_bytes,
            sum(one.kept for one in made),
            sum(one.restarted for one in made),
            converted,
        )


@dataclass
class TaskReport:
    """Report of one of several processes.

    Attributes:
        output: prefix of the dataset.
        sections: number of sections of the input that it tokenized.
        all_sections: number of all sections of the input.
        tokens: number of tokens that it produced.
        seconds: duration.
        joined: whether it joined the dataset.
        joined_by: the process that joins or joined the dataset.
    """

    output: str
    sections: int = 0
    all_sections: int = 0
    tokens: int = 0
    seconds: float = 0.0
    joined: bool = False
    joined_by: str = ""

    def __str__(self) -> str:
        if not self.joined_by:
            return f"{self.output}: already made from this input with these settings: nothing is left to do"
        return (
            f"{self.output}: {self.sections} of {self.all_sections} sections of the input, {self.tokens:,} tokens, "
            f"in {self.seconds:.1f} s by this task; {self.joined_by} joins the dataset"
        )


@dataclass
class _Section:
    """Consecutive units that are claimed together, and the results of those that are finished."""

    name: str
    units: list[tuple[int, Unit]]
    finished: dict[int, FinishedUnit] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Returns the record for other processes and later starts; all units must be finished."""
        ordered = [self.finished[number] for number, _ in self.units]
        converted: dict[str, str] = {}
        for one in ordered:
            converted |= one.converted
        return {
            "shards": [one.shards for one in ordered],
            "tokens": sum(one.tokens for one in ordered),
            "input_bytes": sum(one.input_bytes for one in ordered),
            "converted": converted,
        }


def _section_name(number: int) -> str:
    return f"{number:06d}"


class DistributedTask:
    """One of the processes that make a dataset together.

    Args:
        tokenizing: the tokenizer and the output.
        source: the files.
        fields: fields of a record that hold its text.
        config: settings for reading files, and the number of workers of this process.

    Attributes:
        report: report of this process.
    """

    def __init__(
        self, tokenizing: Tokenizing, source: DocumentReader, fields: Fields, config: PreprocessConfig
    ) -> None:
        self._tokenizing, self._source, self._config = tokenizing, source, config
        self._states = {path: file_state(path) for path in source.files}
        sample = []
        if config.engine is not Engine.hf:
            sample = texts_of_places(source, fields)
            sample += first_texts(list(islice(tokenizing.blocks(source), 1)), fields)
        self._settings = tokenizing.settings(fields, config.engine, sample)
        self._identity = input_identity(self._settings, source)
        # Sizes and modification times, which are the same on all nodes.
        changes = [state[:2] for state in self._states.values()]
        digest = hashlib.sha256(repr((self._identity, changes)).encode()).hexdigest()[:16]
        self._folder = parts_path(config.output) / _TASKS.replace("*", digest)
        block_bytes = block_bytes_of(source)
        units = list(enumerate(split_into_units(source, block_bytes)))
        self._size = max(1, -(-len(units) // _MOST_SECTIONS))
        pieces = (units[begin : begin + self._size] for begin in range(0, len(units), self._size))
        sections = (_Section(_section_name(number), piece) for number, piece in enumerate(pieces))
        self._sections = {section.name: section for section in sections}
        self._make = functools.partial(UnitTokenizer, self._settings, self._folder, fields, block_bytes, config)
        self.report = TaskReport(config.output, all_sections=len(self._sections))

    def finished_sidecar(self) -> Sidecar | None:
        """Returns the sidecar of the dataset if it was made from this input with these settings, else None.

        Raises:
            DataError: the sidecar file is invalid.
        """
        sidecar = read_sidecar(self._config.output)
        if sidecar is None or sidecar.input_identity != self._identity:
            return None
        made_ns = file_state(Path(f"{self._config.output}.json"))[1]
        return sidecar if all(state[1] < made_ns for state in self._states.values()) else None

    def run(self) -> Sidecar | None:
        """Tokenizes sections that no other process has claimed, and joins the dataset unless another process does.

        Returns:
            The sidecar if this process has joined the dataset; None if another process does or has done so.

        Raises:
            ConfigError: other processes make the same dataset from other text, or with other settings.
            DataError: a damaged input or part, or a full disk.
            UnhealthyNode: a worker process died.
        """
        start_s = time.monotonic()
        parts = parts_path(self._config.output)
        try:
            with parts_folder(self._config.output, together=True), Claims(self._folder, [*self._sections]) as claims:
                refuse_other_tasks(self._config.output, self._folder)
                # Another process may have joined the dataset between the first check and the creation of the folder.
                if self.finished_sidecar() is not None:
                    remove_parts(self._config.output)
                    return None
                self._work(claims)
                self.report.seconds = time.monotonic() - start_s
                if not claims.take(_JOIN):
                    self.report.joined_by = claims.holder(_JOIN)
                    return None
                self.report.joined, self.report.joined_by = True, "this task"
                return self._join(claims)
        except (FileNotFoundError, DataError):
            # Joining removes the folder, and may happen while this process is considered dead.
            if parts.exists() or self.finished_sidecar() is None:
                raise
            self.report.joined, self.report.joined_by = False, "another task"
            return None
        except OSError as error:
            raise DataError(f"{parts}: writing failed: {reason_of(error)}; free space or permissions there") from error

    def _work(self, claims: Claims) -> None:
        """Returns when all sections are finished, by this or other processes."""
        total = sum(path.stat().st_size for path in self._source.files)
        restarted = shards = 0
        looked_s = 0.0
        with Progress("tokenizing", total) as progress:
            while len(self._show_progress(progress, claims)) < len(self._sections):
                items = self._claimed(claims)
                first = next(items, None)
                if first is None:
                    time.sleep(_POLL_S)
                    continue
                workers = self._config.workers or available_cores()
                workers = 1 if len(self._sections) == 1 else workers
                for one in map_items(self._make, chain([first], items), workers):
                    restarted, shards = restarted + one.restarted, shards + one.shards
                    self._record(one, claims)
                    # Showing progress lists folders shared by all nodes, so it is rate-limited.
                    if time.monotonic() - looked_s > _POLL_S:
                        self._show_progress(progress, claims)
                        looked_s = time.monotonic()
        self._tokenizing.count_restarted_shards(restarted, shards)

    def _claimed(self, claims: Claims) -> Iterator[tuple[int, Unit]]:
        """Yields (index, unit) for the units of sections that this process claims."""
        task, tasks = array_index() or (0, 1)
        first = task * len(self._sections) // max(tasks, 1)
        while (name := claims.take_any(first)) is not None:
            self._sections[name].finished.clear()
            yield from self._sections[name].units

    def _record(self, one: FinishedUnit, claims: Claims) -> None:
        section = self._sections[_section_name(one.unit // self._size)]
        section.finished[one.unit] = one
        self.report.tokens += one.tokens
        self._tokenizing.kept_shards += one.kept
        if len(section.finished) == len(section.units):
            claims.finish(section.name, section.record())
            self.report.sections += 1

    def _show_progress(self, progress: Progress, claims: Claims) -> dict[str, dict[str, Any]]:
        finished = claims.finished()
        tokens = sum(record["tokens"] for record in finished.values())
        here = f"{self.report.sections} of {len(finished)} sections by this task"
        progress.update(sum(record["input_bytes"] for record in finished.values()), f"{tokens:,} tokens, {here}")
        return finished

    def _join(self, claims: Claims) -> Sidecar:
        for path, state in self._states.items():
            require_unchanged(path, state)
        records = claims.finished()
        converted: dict[str, str] = {}
        for name in self._sections:
            converted |= records[name]["converted"]
        num_tokens = sum(record["tokens"] for record in records.values())
        paths = {name: self._shard_paths(name, records[name]["shards"]) for name in self._sections}
        try:
            shards = self._shards(claims, list(chain.from_iterable(paths.values())))
            return self._tokenizing.join(shards, num_tokens, self._source, self._settings, converted)
        except DataError:
            # Damaged shards have been removed; their sections must be made again.
            for name, made in paths.items():
                if not all(path.exists() for path in made):
                    claims.forget(name)
            raise

    def _shard_paths(self, section: str, counts: Sequence[int]) -> list[Path]:
        units = zip(self._sections[section].units, counts, strict=True)
        return [shard_path(self._folder, number, piece) for (number, _), count in units for piece in range(count)]

    def _shards(self, claims: Claims, paths: Sequence[Path]) -> Iterator[DatasetShard]:
        for path in paths:
            try:
                yield open_shard(path)
            except (ValueError, OSError) as error:
                path.unlink(missing_ok=True)
                raise DataError(
                    f"{path}: {error}: the disk lost what was written; give the same command again, which makes this "
                    "part anew"
                ) from error
        if not claims.holds(_JOIN):
            raise DataError(f"{claims.holder(_JOIN)} has taken over, because this process was silent for too long")


def refuse_other_tasks(output: str, own: Path | None = None) -> None:
    """Refuses to start while other tasks make the same dataset with another input or other settings.

    Args:
        output: prefix of the dataset.
        own: folder of the claims of tasks with the same input and settings.

    Raises:
        ConfigError: such tasks are alive.
    """
    folders = [folder for folder in parts_path(output).glob(_TASKS) if folder != own]
    for other in chain.from_iterable(map(participants, folders)):
        raise ConfigError(
            f"output = {output}: {other or 'another process'} is making it with distributed=true, from other text, "
            "with other settings, or with other versions of tokenizers or gigatoken; wait for it, stop it, or choose "
            "another output"
        )
