"""manifest.json: which rectangles of which tensors a checkpoint holds and where, and the software that computed it.

It is written last, so that its presence commits the checkpoint. A resume promises equal bits only with the same
software and thread count.
"""

from __future__ import annotations

import json
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import xxhash
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

import megads
from megads.checkpoint.config import list_checkpoints, step_of
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.errors import CheckpointError
from megads.ops.resolve import loaded_kernels
from megads.runtime.files import read_regular
from megads.runtime.metrics import LedgerRecord
from megads.runtime.registry import plugin_versions

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 2
"""2 added what a checkpoint knows of its data and tokenizer; one of version 1 knows neither."""
_FILE_NAME = re.compile(r"rank_\d{5,}\.safetensors")
_COUNTERS = {"step", "samples", "tokens"}

Count = Annotated[int, Field(ge=0, lt=2**63)]
Extents = tuple[Count, ...]
_STRICT = ConfigDict(strict=True, extra="forbid")
"""What is read is of the types that are written, with nothing missing and nothing more."""
_PLUGIN = "plugin "


@dataclass(frozen=True)
class Rectangle:
    """A part of a global tensor.

    Attributes:
        offset: first index in each dim.
        shape: extent in each dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(start + extent for start, extent in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """The elements that both hold, None where there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(high - low for low, high in zip(offset, map(min, self.end, other.end), strict=True))
        return Rectangle(offset, shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Where this rectangle lies in a tensor that holds `outer`, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + extent) for start, extent in zip(starts, self.shape, strict=True))


def coverage_fault(global_shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str | None:
    """Says why rectangles do not cover every element of a tensor exactly once, None when they do."""
    whole = Rectangle((0,) * len(global_shape), tuple(global_shape))
    # A sweep along the first dim: only rectangles that are still open there can overlap the next one.
    open_rectangles: list[Rectangle] = []
    covered = 0
    for rectangle in sorted(rectangles, key=lambda part: part.offset):
        if len(rectangle.shape) != len(whole.shape) or rectangle.overlap(whole) != rectangle:
            return f"the part at {list(rectangle.offset)} of shape {list(rectangle.shape)} is not inside it"
        open_rectangles = [part for part in open_rectangles if not part.shape or part.end[0] > rectangle.offset[0]]
        for part in open_rectangles:
            if part.overlap(rectangle) is not None:
                return f"the parts at {list(part.offset)} and {list(rectangle.offset)} overlap"
        open_rectangles.append(rectangle)
        covered += rectangle.elements
    if covered != whole.elements:
        return f"{whole.elements - covered} of its {whole.elements} elements are in no part"
    return None


@dataclass(frozen=True)
class StoredTensor:
    """One rectangle on disk.

    Attributes:
        key: name of the global tensor, "<kind>/<parameter name>".
        global_shape: shape of the global tensor.
        offset: where the rectangle starts in it.
        shape: extent of the rectangle.
        dtype: as safetensors names it, "F32" for instance.
        file: name of the file in the checkpoint's folder.
        name: name of the tensor in that file.
        checksum: xxh3_128 of its bytes, hex.
    """

    __pydantic_config__: ClassVar = _STRICT

    key: str
    global_shape: Extents
    offset: Extents
    shape: Extents
    dtype: str
    file: str
    name: str
    checksum: str

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(self.offset, self.shape)


@dataclass(frozen=True)
class RunRecord:
    """What a checkpoint says of the run that wrote it.

    Attributes:
        state: TrainState.state_dict().
        optimizer_steps: steps the optimizer has taken, skipped ones not counted.
        config_digest: sha256 of the run's resolved config.
        model: the model's config as a dict, by which a checkpoint of another model is told.
        layout: tp, cp, pp and dp, for information: any layout can be loaded in any other.
        ledger: what metrics.jsonl held; None: nobody looked.
        tokenizer: of the run; None where nobody knows it, and in version 1.
        data_digest: sha256 of the data_record.json of the start that wrote it; None in version 1.
    """

    __pydantic_config__: ClassVar = _STRICT

    state: dict[str, Count]
    optimizer_steps: Count
    config_digest: str
    model: dict[str, Any]
    layout: dict[str, Count]
    ledger: LedgerRecord | None = None
    tokenizer: TokenizerRecord | None = None
    data_digest: str | None = None


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint.

    Attributes:
        run: the run's part.
        software: versions and thread count at the time.
        sequence: 1 more than that of any checkpoint in the folder before; tells the newest one even after a run went
            back to an earlier step.
        files: size in bytes of each file.
        tensors: every stored rectangle.
    """

    __pydantic_config__: ClassVar = _STRICT

    run: RunRecord
    software: dict[str, str]
    sequence: Count
    files: dict[str, Count]
    tensors: tuple[StoredTensor, ...]

    def by_key(self) -> dict[str, list[StoredTensor]]:
        return _group(self.tensors, "key")

    def by_file(self) -> dict[str, list[StoredTensor]]:
        return _group(self.tensors, "file")

    def check(self, step: int | None) -> None:
        """Holds the contents to each other, whatever their checksum says.

        Args:
            step: that the folder's name says; None: it says none.

        Raises:
            CheckpointError: counters, files or shapes cannot be those of a checkpoint, or tensors are not whole.
        """
        state, outside = self.run.state, sorted(name for name in self.files if not _FILE_NAME.fullmatch(name))
        stored = {tensor.file for tensor in self.tensors}
        for wrong, why in (
            (state.keys() != _COUNTERS, f"the run's counters are {', '.join(sorted(state))}"),
            (step is not None and state.get("step") != step, f"it is of step {state.get('step')}, its folder is not"),
            (self.run.optimizer_steps > state.get("step", 0), f"it counts {self.run.optimizer_steps} optimizer steps"),
            (bool(outside), f"{', '.join(map(repr, outside[:3]))} cannot be a file of a checkpoint"),
            (stored != self.files.keys(), "the files are not those that the tensors are in"),
            (not self.tensors, "it holds no tensor"),
        ):
            if wrong:
                raise CheckpointError(f"it cannot be used: {why}")
        for tensor in self.tensors:
            if not len(tensor.global_shape) == len(tensor.offset) == len(tensor.shape):
                raise CheckpointError(f"it cannot be used: offset and shape of {tensor.key} differ in length")
        self.check_coverage()

    def check_coverage(self) -> None:
        """Raises CheckpointError unless the rectangles cover every element of every key exactly once."""
        for key, parts in self.by_key().items():
            shapes = {part.global_shape for part in parts}
            if len(shapes) > 1:
                raise CheckpointError(f"{key} is stored with several global shapes: {sorted(shapes)}")
            fault = coverage_fault(parts[0].global_shape, (part.rectangle for part in parts))
            if fault:
                raise CheckpointError(
                    f"{key} of shape {list(parts[0].global_shape)} is not stored exactly once: {fault}"
                )

    def digest(self) -> str:
        """Checksum of the whole contents, hex."""
        return _digest(self._body())

    def encode(self) -> bytes:
        """JSON text with a checksum of itself."""
        body = self._body()
        return json.dumps({"checksum": _digest(body), **body}, indent=1).encode()

    def _body(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """The inverse of encode.

        Raises:
            CheckpointError: the text is damaged or from a newer version of the format.
        """
        try:
            body = json.loads(text)
            found, version = body.pop("checksum"), body["format_version"]
            if type(version) is int and version > FORMAT_VERSION:
                raise CheckpointError(
                    f"format version {version} is newer than this megads reads ({FORMAT_VERSION}): load it with the "
                    "version that wrote it"
                )
            if found != _digest(body):
                raise CheckpointError("its checksum does not match its contents")
            if type(version) is not int or version < 1:
                raise CheckpointError(f"format version {version!r} never was one")
            del body["format_version"]
            return _SCHEMA.validate_json(json.dumps(body))
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(f"it is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']})") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"it is damaged ({type(error).__name__}: {error})") from error


_SCHEMA = TypeAdapter(Manifest)


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


def newest_manifest(run_dir: Path) -> Manifest | None:
    """Of this run's last written checkpoint, whose tensors nobody has looked at; None where there is none."""
    found = []
    for folder in list_checkpoints(run_dir).values():
        with suppress(CheckpointError):
            found.append(read_manifest(folder))
    return max(found, key=lambda manifest: manifest.sequence, default=None)


def _digest(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _group(tensors: Iterable[StoredTensor], attribute: str) -> dict[str, list[StoredTensor]]:
    groups: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[getattr(tensor, attribute)].append(tensor)
    return dict(groups)


def software() -> dict[str, str]:
    """Versions of Python, torch, megads and what it requires, the CPU's vector instructions, threads, kernels."""
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
    """Names of megads's own requirements; none when it runs from a checkout that is not installed."""
    try:
        requirements = requires("megads") or []
    except PackageNotFoundError:
        return []
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements if "extra ==" not in requirement)
    return [match.group() for match in names if match]


def software_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One readable line for each entry that both know and that differs, and for each plugin that one of them lacks."""
    shared = [name for name in before if name in now]
    differing = [f"{name}: {before[name]} then, {now[name]} now" for name in shared if before[name] != now[name]]
    differing += [f"{name}: {before[name]} then, not imported now" for name in before if _only(name, now)]
    return differing + [f"{name}: not imported then, {now[name]} now" for name in now if _only(name, before)]


def _only(name: str, others: Mapping[str, str]) -> bool:
    return name.startswith(_PLUGIN) and name not in others
