"""manifest.json: what a checkpoint holds and where; written last, so that its presence commits the checkpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megads.checkpoint.rectangle import Rectangle, coverage_fault
from megads.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1


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

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
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
    """

    state: dict[str, int]
    optimizer_steps: int
    config_digest: str
    model: dict[str, Any]
    layout: dict[str, int]


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

    run: RunRecord
    software: dict[str, str]
    sequence: int
    files: dict[str, int]
    tensors: tuple[StoredTensor, ...]

    def by_key(self) -> dict[str, list[StoredTensor]]:
        return _group(self.tensors, "key")

    def by_file(self) -> dict[str, list[StoredTensor]]:
        return _group(self.tensors, "file")

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
            found = body.pop("checksum")
            if body["format_version"] > FORMAT_VERSION:
                raise CheckpointError(
                    f"format version {body['format_version']} is newer than this megads reads ({FORMAT_VERSION}): "
                    "load it with the version that wrote it"
                )
            if found != _digest(body):
                raise CheckpointError("its checksum does not match its contents")
            return cls(
                run=RunRecord(**body["run"]),
                software=body["software"],
                sequence=body["sequence"],
                files=body["files"],
                tensors=tuple(_stored_tensor(entry) for entry in body["tensors"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"it is damaged ({type(error).__name__}: {error})") from error


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is damaged or incomplete; names the file.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = Manifest.decode(path.read_bytes())
        manifest.check_coverage()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint was never completed") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return manifest


def _digest(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _stored_tensor(entry: dict[str, Any]) -> StoredTensor:
    lists = {name: tuple(entry[name]) for name in ("global_shape", "offset", "shape")}
    return StoredTensor(**{**entry, **lists})


def _group(tensors: Iterable[StoredTensor], attribute: str) -> dict[str, list[StoredTensor]]:
    groups: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[getattr(tensor, attribute)].append(tensor)
    return dict(groups)
