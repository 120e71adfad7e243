"""Checkpoint files as docs/checkpoints.md describes them, read by the documented reader, and invalid headers."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megads.checkpoint.manifest import MANIFEST_FILE, read_manifest
from megads.checkpoint.rank_file import file_name, read_header
from megads.checkpoint.read import open_checkpoint, read_into
from megads.checkpoint.store import save_parts
from megads.errors import CheckpointError
from tests.checkpoint.random_layouts import SHAPES, all_equal, global_tensors, random_layout, run_record, shards_of
from tests.checkpoint.test_manifest import resigned

PAGE = Path(__file__).parents[2] / "docs" / "read_checkpoint.py"


def read_checkpoint() -> Any:
    """Imports docs/read_checkpoint.py."""
    spec = importlib.util.spec_from_file_location("read_checkpoint", PAGE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def saved(run_dir: Path, ranks: int = 3) -> Path:
    """Saves a checkpoint of step 7, cut into random parts on some ranks."""
    tensors = global_tensors(7)
    return save_parts(run_dir, [shards_of(layout, tensors) for layout in random_layout(7, ranks)], run_record(7))


def test_the_documented_reader(tmp_path: Path) -> None:
    """Catches a format that differs from the documentation, and a documented reader that loads damaged files."""
    folder, reader = saved(tmp_path), read_checkpoint()
    found = dict(reader.tensors(folder))
    assert found.keys() == SHAPES.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in global_tensors(7).items())
    for name in (MANIFEST_FILE, *read_manifest(folder).files):
        whole = (folder / name).read_bytes()
        for position in (30, len(whole) // 2, len(whole) - 2):
            (folder / name).write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises((SystemExit, ValueError)):
                dict(reader.tensors(folder))
        (folder / name).write_bytes(whole)


def test_a_checkpoint_of_this_version(tmp_path: Path) -> None:
    """Catches a format change without a new version: this checkpoint was written when version 3 was introduced."""
    folder = PAGE.parents[1] / "tests" / "checkpoint" / "golden" / "version_3"
    shards = [shard for layout in random_layout(3, 4) for shard in shards_of(layout)]
    handle = open_checkpoint(folder)
    read_into(handle, shards)
    assert all_equal(shards, global_tensors(7)) and handle.manifest.run == run_record(7)
    now = saved(tmp_path, ranks=2)
    for name in read_manifest(now).files:
        assert (now / name).read_bytes() == (folder / name).read_bytes()


def test_a_rank_reads_its_own_header_alone(tmp_path: Path) -> None:
    """Catches a start at which every rank reads all ranks' headers: 100 million reads at 10,000 ranks."""
    folder = saved(tmp_path, ranks=4)
    for rank, layout in enumerate(random_layout(7, 4)):
        handle, shards = open_checkpoint(folder), shards_of(layout)
        for other in set(range(4)) - {rank}:
            (folder / file_name(other)).rename(folder / f"{other}.away")
        read_into(handle, shards, rank)
        assert all_equal(shards, global_tensors(7))
        for other in set(range(4)) - {rank}:
            (folder / f"{other}.away").rename(folder / file_name(other))


Header = dict[str, Any]
Change = Callable[[Header], object]


def first(header: Header) -> str:
    return next(name for name in header if name != "__metadata__")


def renamed(header: Header, name: str) -> None:
    old = first(header)
    header[name], header["__metadata__"][name] = header.pop(old), header["__metadata__"].pop(old)


def noted(header: Header, **values: Any) -> None:
    notes = header["__metadata__"]
    notes[first(header)] = json.dumps(json.loads(notes[first(header)]) | values)


def moved(header: Header) -> None:
    key, _, offset = first(header).rpartition("@")
    indices = [int(index) for index in offset.split(",")]
    renamed(header, f"{key}@{','.join(map(str, [*indices[:-1], indices[-1] + 1]))}")


HOSTILE: dict[str, tuple[Change, str]] = {
    "a part elsewhere": (moved, "is not stored exactly once"),
    "a key that is not there": (lambda header: renamed(header, "weight/z@0,0"), "not match a tensor of the manifest"),
    "no offset": (lambda header: renamed(header, "weight/a"), "does not end in an offset"),
    "an offset below 0": (lambda header: renamed(header, "weight/a@-1,0"), "does not end in an offset"),
    "an offset that is short": (lambda header: renamed(header, "weight/a@1"), "differ in length"),
    "another global shape": (lambda header: noted(header, global_shape=[99, 12]), "not match a tensor of the manifest"),
    "a global shape of text": (lambda header: noted(header, global_shape="99"), "its header cannot be used"),
    "more notes": (lambda header: noted(header, code="x"), "its header cannot be used"),
    "another checksum": (lambda header: noted(header, xxh3_128="0" * 32), "fails its checksum"),
    "another type": (lambda header: header[first(header)].update(dtype="F64"), "is not F64 of shape"),
    "an unknown type": (lambda header: header[first(header)].update(dtype="F7"), "is not F7 of shape"),
    "another shape": (lambda header: header[first(header)].update(shape=[1, 2]), "is not F32 of shape"),
    "no bytes": (lambda header: header[first(header)].update(data_offsets=[10**9, 10**9]), "is not F32 of shape"),
    "bytes elsewhere": (lambda header: header[first(header)].update(data_offsets=[10**9, 10**9 + 4]), "cannot be read"),
    "no metadata": (lambda header: header.pop("__metadata__"), "its header cannot be used"),
    "a tensor without notes": (lambda header: header["__metadata__"].popitem(), "do not have the same names"),
}


@pytest.mark.parametrize(("change", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_headers_that_no_checkpoint_has(change: Change, reason: str, tmp_path: Path) -> None:
    """Catches a header accepted because all checksums match, although its parts are misplaced or overlap."""
    folder = saved(tmp_path)
    path = folder / file_name(0)
    data = path.read_bytes()[len(read_header(path)) :]
    header = json.loads(read_header(path)[8:])
    change(header)
    text = json.dumps(header).encode()
    text = len(text).to_bytes(8, "little") + text
    path.write_bytes(text + data)
    body = json.loads((folder / MANIFEST_FILE).read_text())
    body["files"][path.name] = {"bytes": path.stat().st_size, "header": xxhash.xxh3_128_hexdigest(text)}
    (folder / MANIFEST_FILE).write_bytes(resigned(body))
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder)


def test_a_manifest_that_leaves_a_holder_out(tmp_path: Path) -> None:
    """Catches a checkpoint that is accepted although a part of it cannot be found."""
    folder = saved(tmp_path)
    body = json.loads((folder / MANIFEST_FILE).read_text())
    next(record for record in body["tensors"].values() if len(record["files"]) > 1)["files"].pop()
    (folder / MANIFEST_FILE).write_bytes(resigned(body))
    with pytest.raises(CheckpointError, match="holds other tensors than the manifest says"):
        open_checkpoint(folder)


def flipped(data: bytes, draw: random.Random) -> bytes:
    position = draw.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << draw.randrange(8)]) + data[position + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def with_a_hole(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.choice((1, 8, 64, 512)))
    return data[:begin] + bytes(end - begin) + data[end:]


def with_bytes_moved(data: bytes, draw: random.Random) -> bytes:
    begin, end = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[end:] + data[begin:end] + data[:begin]


def longer(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.choice((1, 8, 100)))


@pytest.mark.quick("flipped", "cut")
@pytest.mark.fault(7, 8)
@pytest.mark.parametrize("change", [flipped, cut, with_a_hole, with_bytes_moved, longer])
def test_no_damage_is_silent(change: Callable[[bytes, random.Random], bytes], tmp_path: Path) -> None:
    """Catches damage in any byte of any file that is loaded, or that raises an error which does not name the file."""
    folder, draw = saved(tmp_path), random.Random(change.__name__)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(600):
        name = draw.choice(sorted(whole))
        damaged = change(whole[name], draw)
        if damaged == whole[name]:
            continue
        (folder / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            open_checkpoint(folder)
        (folder / name).write_bytes(whole[name])
    assert open_checkpoint(folder).state["step"] == 7


def test_files_of_two_checkpoints(tmp_path: Path) -> None:
    """Catches an intact file of another checkpoint that is accepted as part of this one."""
    one, tensors = saved(tmp_path / "one"), global_tensors(8)
    other = save_parts(tmp_path / "other", [shards_of(part, tensors) for part in random_layout(7, 3)], run_record(8))
    (one / file_name(1)).write_bytes((other / file_name(1)).read_bytes())
    with pytest.raises(CheckpointError, match=rf"{file_name(1)}: its header fails its checksum"):
        open_checkpoint(one)
