"""manifest.json: the tensors of a checkpoint, the files that hold them, and the run and software that computed it.

It is written last, so its presence commits the checkpoint. It holds the checksum of each file's header, and the header
lists the file's tensors (`rank_file`). Its size is therefore linear in the number of files, and a rank that loads its
own part reads one header. A resume is bitwise exact only with the same software and thread count.
"""

from __future__ import annotations

import json
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from pydantic import TypeAdapter, ValidationError

import megads
from megads.checkpoint.config import EVERYTHING, History, list_checkpoints, step_of
from megads.checkpoint.rank_file import (
    FILE_NAME,
    STRICT,
    Count,
    Extents,
    FileRecord,
    Rectangle,
    StoredTensor,
    add_cover_sums,
    cover_sum,
    coverage_fault,
    file_name,
    rank_of,
    read_rank_file,
    whole,
)
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.errors import CheckpointError
from megads.ops.resolve import loaded_kernels
from megads.runtime.files import read_regular
from megads.runtime.metrics import LedgerRecord
from megads.runtime.registry import plugin_versions

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 3
"""2 added records of data and tokenizer; 3 moved the rectangles into the headers of the files."""
_COUNTERS = {"step", "samples", "tokens"}
_FIRST_LINE = re.compile(
    rb'(\{"format_version": (\d{1,9}), "sequence": (\d{1,18}), "contents": "[0-9a-f]{32}"), '
    rb'"checksum": "([0-9a-f]{32})",\n'
)
_PLUGIN = "plugin "


@dataclass(frozen=True)
class RunRecord:
    """A checkpoint's record of the run that wrote it.

    Attributes:
        state: TrainState.state_dict().
        optimizer_steps: steps of the optimizer, without skipped ones.
        config_digest: sha256 of the run's resolved config.
        model: the model config as a dict, to detect a checkpoint of another model.
        layout: tp, cp, pp and dp, for information only: any layout can be loaded in any other.
        ledger: length and checksum of metrics.jsonl; None: not recorded.
        tokenizer: tokenizer of the run; None if unknown, and in version 1.
        data_digest: sha256 of the data_record.json of the start that wrote it; None in version 1.
    """

    __pydantic_config__: ClassVar = STRICT

    state: dict[str, Count]
    optimizer_steps: Count
    config_digest: str
    model: dict[str, Any]
    layout: dict[str, Count]
    ledger: LedgerRecord | None = None
    tokenizer: TokenizerRecord | None = None
    data_digest: str | None = None


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor.

    Attributes:
        shape: global shape.
        files: ranks whose files hold parts of the tensor, ascending.
    """

    __pydantic_config__: ClassVar = STRICT

    shape: Extents
    files: tuple[Count, ...]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a committed checkpoint.

    Attributes:
        run: record of the run.
        software: software versions and thread count when it was written.
        sequence: 1 more than the highest sequence in the folder before; identifies the newest checkpoint even after a
            run went back to an earlier step.
        files: records of all files, by name.
        tensors: records of all tensors, by key.
        stored: all rectangles, by file, in versions 1 and 2, whose file headers do not contain them.
        checksum: checksum of the text that it was read from, hex; empty if it was not read.
    """

    run: RunRecord
    software: dict[str, str]
    sequence: Count
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    stored: Mapping[str, list[StoredTensor]] | None = None
    checksum: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def stored_in(self, folder: Path, name: str) -> list[StoredTensor]:
        """The tensors stored in a file.

        Args:
            folder: folder of the checkpoint.
            name: name of the file.

        Raises:
            CheckpointError: the file does not match this manifest; names the file.
        """
        if self.stored is not None:
            return self.stored[name]
        found = read_rank_file(folder / name, self.files[name])
        for tensor in found:
            record = self.tensors.get(tensor.key)
            if record is None or tensor.global_shape != record.shape:
                raise CheckpointError(f"{folder / name}: {tensor} does not match a tensor of the manifest")
        return found

    def check(self, step: int | None) -> None:
        """Checks that the contents are consistent, independently of their checksum.

        Args:
            step: step in the name of the folder; None: the name has none.

        Raises:
            CheckpointError: counters, files or tensors are inconsistent.
        """
        state, outside = self.run.state, sorted(name for name in self.files if not FILE_NAME.fullmatch(name))
        named = {file_name(rank) for tensor in self.tensors.values() for rank in tensor.files}
        for wrong, why in (
            (state.keys() != _COUNTERS, f"the run's counters are {', '.join(sorted(state))}"),
            (step is not None and state.get("step") != step, f"it is of step {state.get('step')}, its folder is not"),
            (self.run.optimizer_steps > state.get("step", 0), f"it counts {self.run.optimizer_steps} optimizer steps"),
            (bool(outside), f"{', '.join(map(repr, outside[:3]))} cannot be a file of a checkpoint"),
            (named != self.files.keys(), "the files are not those that the tensors are in"),
            (not self.tensors, "it holds no tensor"),
            (
                any(not _ascending(tensor.files) for tensor in self.tensors.values()),
                "the ranks of a tensor are not in ascending order",
            ),
        ):
            if wrong:
                raise CheckpointError(f"it cannot be used: {why}")

    def cover_sum(self) -> int:
        """Cover sum of all tensors, see `rank_file.cover_sum`; those of the parts in all files must add up to it."""
        return add_cover_sums(cover_sum(key, [whole(tensor.shape)]) for key, tensor in self.tensors.items())

    def explain_coverage(self, folder: Path, keys: Iterable[str] | None = None) -> str:
        """Describes the first tensor whose elements are not stored exactly once; empty if there is none.

        Args:
            folder: folder of the checkpoint; the headers of all files that hold these tensors are read.
            keys: keys of the tensors to check; None: all.
        """
        wanted = {key: self.tensors[key] for key in (self.tensors if keys is None else keys)}
        parts: dict[str, list[Rectangle]] = {key: [] for key in wanted}
        for name in {file_name(rank) for tensor in wanted.values() for rank in tensor.files}:
            for tensor in self.stored_in(folder, name):
                if tensor.key in parts:
                    parts[tensor.key].append(tensor.rectangle)
        for key, found in parts.items():
            fault = coverage_fault(wanted[key].shape, found)
            if fault:
                return f"{key} of shape {list(wanted[key].shape)} is not stored exactly once: {fault}"
        return ""

    def digest(self) -> str:
        """Checksum of the contents, hex."""
        return self.checksum or Manifest.decode(self.encode()).checksum

    def encode(self) -> bytes:
        """JSON text: a first line with the sequence and checksums, then one entry per line."""
        contents = "\n".join(
            (
                f'"run": {json.dumps(asdict(self.run))},',
                f'"software": {json.dumps(self.software)},',
                '"files": {',
                ",\n".join(f"{json.dumps(name)}: {json.dumps(vars(record))}" for name, record in self.files.items()),
                '},\n"tensors": {',
                ",\n".join(f"{json.dumps(key)}: {json.dumps(vars(record))}" for key, record in self.tensors.items()),
                "}}\n",
            )
        ).encode()
        return _first_line(self.sequence, contents) + contents

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """The inverse of encode.

        Raises:
            CheckpointError: the text is damaged or from a newer version of the format.
        """
        try:
            line = _FIRST_LINE.match(text)
            if line is None or int(line[2]) != FORMAT_VERSION:
                return _decode_before_3(text)
            sequence, contents = int(line[3]), text[line.end() :]
            if line[0] != _first_line(sequence, contents):
                raise CheckpointError("its checksum does not match its contents")
            body = _CONTENTS.validate_json(b"{" + contents)
            checksum = line[4].decode()
            return cls(body.run, body.software, sequence, body.files, body.tensors, checksum=checksum)
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(f"it is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']})") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"it is damaged ({type(error).__name__}: {error})") from error


def _ascending(numbers: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))


@dataclass(frozen=True)
class _Contents:
    """The text after the first line."""

    __pydantic_config__: ClassVar = STRICT

    run: RunRecord
    software: dict[str, str]
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


@dataclass(frozen=True)
class _ContentsBefore3:
    """Contents in versions 1 and 2, where the manifest holds all rectangles of all files."""

    __pydantic_config__: ClassVar = STRICT

    run: RunRecord
    software: dict[str, str]
    sequence: Count
    files: dict[str, Count]
    tensors: tuple[StoredTensor, ...]


_CONTENTS, _CONTENTS_BEFORE_3 = TypeAdapter(_Contents), TypeAdapter(_ContentsBefore3)


def _decode_before_3(text: bytes) -> Manifest:
    """Reads versions 1 and 2.

    Raises:
        CheckpointError: the text is damaged, or from a version after 3.
        ValueError, TypeError, KeyError, AttributeError: the text is not a manifest.
    """
    body = json.loads(text)
    version = body["format_version"]
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointError(
            f"format version {version} is newer than this megads reads ({FORMAT_VERSION}): load it with the "
            "version that wrote it"
        )
    checksum = body.pop("checksum")
    if checksum != xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()):
        raise CheckpointError("its checksum does not match its contents")
    if type(version) is not int or version not in (1, 2):
        raise CheckpointError(f"format version {version!r} does not match the layout of the text")
    del body["format_version"]
    found = _CONTENTS_BEFORE_3.validate_json(json.dumps(body))
    shapes: dict[str, Extents] = {}
    holders: dict[str, set[int]] = defaultdict(set)
    for tensor in found.tensors:
        if shapes.setdefault(tensor.key, tensor.global_shape) != tensor.global_shape:
            raise CheckpointError(f"it cannot be used: {tensor.key} is stored with several global shapes")
        if not len(tensor.global_shape) == len(tensor.offset) == len(tensor.shape):
            raise CheckpointError(f"it cannot be used: offset and shape of {tensor.key} differ in length")
        if not FILE_NAME.fullmatch(tensor.file):
            raise CheckpointError(f"it cannot be used: {tensor.file!r} cannot be a file of a checkpoint")
        holders[tensor.key].add(rank_of(tensor.file))
    files = {name: FileRecord(size, "") for name, size in found.files.items()}
    tensors = {key: TensorRecord(shape, tuple(sorted(holders[key]))) for key, shape in shapes.items()}
    stored: dict[str, list[StoredTensor]] = {name: [] for name in files}
    for tensor in found.tensors:
        stored.setdefault(tensor.file, []).append(tensor)
    return Manifest(found.run, found.software, found.sequence, files, tensors, stored, checksum)


def _first_line(sequence: int, contents: bytes | memoryview) -> bytes:
    """The first line, with checksums of the rest and of itself: checkpoints can be ordered without parsing the rest."""
    digest = xxhash.xxh3_128_hexdigest(contents)
    line = f'{{"format_version": {FORMAT_VERSION}, "sequence": {sequence}, "contents": "{digest}"'.encode()
    return line + f', "checksum": "{xxhash.xxh3_128_hexdigest(line)}",\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is damaged or incomplete; names the file.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = Manifest.decode(read_regular(path))
        manifest.check(step_of(folder))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint was never completed") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return manifest


def read_sequence(folder: Path) -> int | None:
    """A checkpoint's sequence number, see `Manifest`; the manifest is verified, but not parsed.

    Returns:
        None if the manifest cannot be read.
    """
    try:
        text = read_regular(folder / MANIFEST_FILE)
        line = _FIRST_LINE.match(text)
        if line is not None and line[0] == _first_line(int(line[3]), memoryview(text)[line.end() :]):
            return int(line[3])
        return read_manifest(folder).sequence
    except (OSError, CheckpointError):
        return None


def newest_sequence(run_dir: Path) -> int:
    """Sequence of the run's last written checkpoint; 0 if there is none."""
    return max((read_sequence(folder) or 0 for folder in list_checkpoints(run_dir).values()), default=0)


def newest_manifest(run_dir: Path, history: History = EVERYTHING) -> Manifest | None:
    """Manifest of the run's last written checkpoint, whose tensors are not verified; None if there is none.

    Args:
        run_dir: the run's folder.
        history: the checkpoints that count.
    """
    sequences = {folder: read_sequence(folder) for folder in list_checkpoints(run_dir).values()}
    found = [folder for folder, sequence in sequences.items() if history.has(folder, sequence)]
    for folder in sorted(found, key=lambda folder: sequences[folder] or 0, reverse=True):
        with suppress(CheckpointError):
            return read_manifest(folder)
    return None


def software() -> dict[str, str]:
    """Versions of Python, PyTorch, megads and its requirements, CPU vector instructions, threads, kernels, plugins."""
    versions = {
        "python": platform.python_version(),
        "megads": megads.__version__,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "kernels": loaded_kernels(),
    }
    if torch.cuda.is_available():
        versions |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for name in _required_distributions():
        try:
            versions.setdefault(name, version(name))
        except PackageNotFoundError:
            continue
    return versions | {f"{_PLUGIN}{name}": found for name, found in plugin_versions().items()}


def _required_distributions() -> list[str]:
    """Names of the distributions that megads requires; empty in a checkout that is not installed."""
    try:
        requirements = requires("megads") or []
    except PackageNotFoundError:
        return []
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements if "extra ==" not in requirement)
    return [match.group() for match in names if match]


def software_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line of text per entry that is in both and differs, and per plugin that only one of them has."""
    shared = [name for name in before if name in now]
    differing = [f"{name}: {before[name]} then, {now[name]} now" for name in shared if before[name] != now[name]]
    differing += [f"{name}: {before[name]} then, not imported now" for name in before if _only(name, now)]
    return differing + [f"{name}: not imported then, {now[name]} now" for name in now if _only(name, before)]


def _only(name: str, others: Mapping[str, str]) -> bool:
    return name.startswith(_PLUGIN) and name not in others
