"""Reads tensors of a torch distributed checkpoint, whose pickle `.metadata` maps parts of tensors to files.

torch's reader executes the pickle; this one executes nothing.
"""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.checkpoint.rectangle import Rectangle, coverage_fault
from megads.errors import CheckpointError
from megads.runtime.files import read_regular
from megads.tools.exchange.inert_pickle import Named, read_inert
from megads.tools.exchange.pickles import load_inert
from megads.tools.exchange.source import Stored, require_float

METADATA_FILE = ".metadata"


@dataclass(frozen=True)
class StoredPart:
    """Location of a part of a tensor.

    Attributes:
        rectangle: position of the part in the tensor.
        file: name of the file in the checkpoint's folder.
        start: offset in the file, in bytes.
        length: length in the file, in bytes.
    """

    rectangle: Rectangle
    file: str
    start: int
    length: int


class DistributedFiles:
    """The tensors of a distributed checkpoint.

    Attributes:
        shapes: shapes of the tensors by name.

    Args:
        folder: folder of the files.

    Raises:
        CheckpointError: `.metadata` is missing or damaged, or parts of tensors are missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / METADATA_FILE
        try:
            metadata = read_inert(read_regular(path))
            self.shapes, self._parts = _contents(metadata)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path}: is not the metadata of a distributed checkpoint: {error}") from error
        for name, shape in self.shapes.items():
            fault = coverage_fault(shape, (part.rectangle for part in self._parts[name]))
            if fault:
                raise CheckpointError(f"{path}: {name} of shape {list(shape)} is not stored exactly once: {fault}")
        for file in {part.file for parts in self._parts.values() for part in parts}:
            if Path(file).name != file or not (folder / file).is_file():
                raise CheckpointError(f"{folder / file} is missing, which {METADATA_FILE} names")

    def stored(self, name: str, index: int | None = None) -> Stored:
        """Returns a tensor, or the slice at an index of its first dimension.

        Args:
            name: name of the tensor.
            index: index of a layer, if the tensor has the layers stacked.
        """
        whole, where = self.shapes[name], f"{self._folder}: {name}"
        if index is None:
            wanted = Rectangle((0,) * len(whole), whole)
            return Stored(whole, lambda: self._read(name, wanted), where)
        layer = Rectangle((index, *(0 for _ in whole[1:])), (1, *whole[1:]))
        return Stored(whole[1:], lambda: self._read(name, layer)[0], f"{where}, layer {index}")

    def _read(self, name: str, wanted: Rectangle) -> Tensor:
        found: Tensor | None = None
        for part in self._parts[name]:
            overlap = part.rectangle.overlap(wanted)
            if overlap is None:
                continue
            tensor = self._load(name, part)
            if found is None:
                found = torch.empty(wanted.shape, dtype=tensor.dtype)
            found[overlap.within(wanted)] = tensor[overlap.within(part.rectangle)]
        assert found is not None, name
        return found

    def _load(self, name: str, part: StoredPart) -> Tensor:
        path = self._folder / part.file
        where = f"{path}: {name} at {list(part.rectangle.offset)}"
        try:
            with path.open("rb") as file:
                file.seek(part.start)
                content = file.read(part.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if len(content) != part.length:
            raise CheckpointError(f"{where}: the file is too short")
        tensor = load_inert(io.BytesIO(content), where)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != part.rectangle.shape:
            raise CheckpointError(f"{where}: is not a tensor of shape {list(part.rectangle.shape)}")
        return require_float(tensor, where)


def _contents(metadata: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, list[StoredPart]]]:
    """Returns the shapes and parts of the tensors; skips other objects."""
    shapes, parts = {}, defaultdict(list)
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in metadata.values["storage_data"].items():
        if index.values.get("offset") is not None:
            places[index.values["fqn"], _extents(index.values["offset"])] = info
    for name, entry in metadata.values["state_dict_metadata"].items():
        if not isinstance(entry, Named) or "chunks" not in entry.values:
            continue
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not a name")
        shapes[name] = _extents(entry.values["size"])
        for chunk in entry.values["chunks"]:
            rectangle = Rectangle(_extents(chunk.values["offsets"]), _extents(chunk.values["sizes"]))
            info = places[name, rectangle.offset].values
            if info.get("transform_descriptors") or not isinstance(info["relative_path"], str):
                raise ValueError(f"{name} is compressed, or has no file")
            parts[name].append(StoredPart(rectangle, info["relative_path"], int(info["offset"]), int(info["length"])))
    return shapes, dict(parts)


def _extents(size: Any) -> tuple[int, ...]:
    """Returns the extents of a torch.Size, which is constructed from a tuple of integers."""
    found = size.arguments[0] if isinstance(size, Named) else size
    if not isinstance(found, tuple) or not all(isinstance(extent, int) and extent >= 0 for extent in found):
        raise ValueError(f"{found!r} is not a shape")
    return found
