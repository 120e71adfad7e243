"""Tokenized blocks on disk: what an interrupted preprocessing keeps, and what the dataset is joined from.

A shard file: u32 length of the header, the header as JSON, int32 [sequences] lengths, the tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megads.data.indexed_append import COPY_BYTES
from megads.errors import DataError
from megads.runtime.files import parse_json, temporary_path

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class ShardHeader:
    """What a shard holds."""

    identity: str
    """Hash of the block and of all settings: equal ones give equal shards."""
    sequences: int
    """Documents, a part of one at either end included."""
    tokens: int
    """Their tokens."""
    text_bytes: int
    """Their text in UTF-8."""
    max_token_id: int
    """Largest token, 0 for none."""
    continues: bool
    """The last document goes on in the next shard."""
    first: bool
    """Lines of rejections are counted from the start of a file; else from where the shard before ended."""
    lines: int
    """Lines of input."""
    rejected: list[list[Any]]
    """Source, line, reason and detail of every line that gave no document."""
    checksum: str
    """XXH3 of lengths and tokens."""


@dataclass(frozen=True)
class DatasetShard:
    """A shard file, opened.

    Attributes:
        path: the file.
        header: what it holds.
        sizes: int32 [sequences] tokens of each.
    """

    path: Path
    header: ShardHeader
    sizes: npt.NDArray[np.int32]
    token_offset: int

    def tokens(self) -> Iterator[bytes]:
        """Yields the tokens in pieces.

        Raises:
            DataError: they are not what was written; the file is removed, so that the next start makes it anew.
        """
        digest = xxhash.xxh3_64(self.sizes.tobytes())
        with self.path.open("rb") as file:
            file.seek(self.token_offset)
            while piece := file.read(COPY_BYTES):
                digest.update(piece)
                yield piece
        if digest.hexdigest() != self.header.checksum:
            self.path.unlink()
            raise DataError(
                f"{self.path}: its checksum is {digest.hexdigest()}, {self.header.checksum} was written: the disk lost "
                "bytes. It is removed; give the same command again, which makes this part anew"
            )


def shard_path(folder: Path, number: int) -> Path:
    """Returns the file of the block with a number."""
    return folder / f"{number:08d}.shard"


def write_shard(path: Path, header: ShardHeader, sizes: npt.NDArray[np.int32], tokens: bytes | bytearray) -> None:
    """Writes a shard that is either complete under its name or not there.

    Not forced onto the disk: after a loss of power its checksum tells.

    Raises:
        DataError: the disk does not take it.
    """
    content = json.dumps(asdict(header)).encode()
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            for part in (_LENGTH.pack(len(content)), content, sizes.astype("<i4").tobytes(), tokens):
                file.write(part)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"{path}: writing failed: {error.strerror}; free space there and give the same command again: what is "
            "finished is kept"
        ) from error


def open_shard(path: Path) -> DatasetShard:
    """Reads a shard's header and lengths.

    Raises:
        ValueError: it is no shard, or a truncated one.
        OSError: as the system reports it.
    """
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        if len(start) != _LENGTH.size:
            raise ValueError("truncated")
        try:
            header = ShardHeader(**parse_json(file.read(_LENGTH.unpack(start)[0])))
        except TypeError as error:
            raise ValueError(str(error)) from error
        sizes = np.frombuffer(file.read(4 * header.sequences), "<i4")
        return DatasetShard(path, header, sizes, file.tell())


def kept_shard(path: Path, identity: str) -> DatasetShard | None:
    """Returns the shard of an earlier start if it is what would be made now, to the last bit; else None."""
    try:
        shard = open_shard(path)
        if shard.header.identity != identity or shard.sizes.size != shard.header.sequences:
            return None
        for _ in shard.tokens():
            pass
    except (OSError, ValueError, DataError):
        return None
    return shard


def shard_checksum(sizes: npt.NDArray[np.int32], tokens: bytes | bytearray) -> str:
    """Returns the checksum that a shard's header carries."""
    digest = xxhash.xxh3_64(sizes.astype("<i4").tobytes())
    digest.update(tokens)
    return str(digest.hexdigest())
