"""The manifest: round trip, corruption, invalid contents, earlier formats."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megads.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    TensorRecord,
    read_manifest,
    read_sequence,
    software,
    software_differences,
)
from megads.checkpoint.rank_file import FileRecord
from megads.checkpoint.read import open_checkpoint, read_into
from megads.errors import CheckpointError
from tests.checkpoint.random_layouts import all_equal, global_tensors, random_layout, run_record, shards_of

GOLDEN = Path(__file__).with_name("golden")
"""Checkpoints that earlier versions wrote: random_layout(7, 2) of global_tensors(7)."""


def manifest() -> Manifest:
    files = {"rank_00000.safetensors": FileRecord(99, "ab"), "rank_00001.safetensors": FileRecord(99, "cd")}
    tensors = {"weight/a": TensorRecord((4, 3), (0, 1)), "weight/b": TensorRecord((), (1,))}
    return Manifest(run_record(7), {"torch": "2"}, 3, files, tensors)


def test_round_trip() -> None:
    """Catches a field that is written and not read, or read as another type."""
    assert Manifest.decode(manifest().encode()) == manifest()
    assert Manifest.decode(manifest().encode()).digest() == manifest().digest()


def test_every_flipped_bit_is_noticed() -> None:
    """Catches undetected corruption of the manifest itself: a changed step, offset or checksum that still parses."""
    text = manifest().encode()
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position % 7)
        try:
            assert Manifest.decode(bytes(damaged)) == manifest(), position
        except CheckpointError:
            continue


def test_newer_format_is_refused() -> None:
    """Catches a newer format reported as damage, so that its owner looks for a broken disk."""
    text = manifest().encode().replace(b'"format_version": 3', b'"format_version": 99', 1)
    with pytest.raises(CheckpointError, match="format version 99 is newer"):
        Manifest.decode(text)


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoints_of_earlier_versions(version: int, tmp_path: Path) -> None:
    """Catches checkpoints of earlier formats that are refused, read wrongly, or accepted when damaged."""
    folder = tmp_path / "step_00000007"
    shutil.copytree(GOLDEN / f"version_{version}", folder)
    handle = open_checkpoint(folder)
    assert handle.manifest.run == run_record(7) and handle.manifest.sequence == read_sequence(folder) == 1
    shards = [shard for layout in random_layout(3, 4) for shard in shards_of(layout)]
    read_into(handle, shards)
    assert all_equal(shards, global_tensors(7))
    file = folder / "rank_00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"rank_00001.safetensors: \w+/\w at \[.*\] fails its checksum"):
        open_checkpoint(folder)
    file.write_bytes(whole)
    body = json.loads((folder / MANIFEST_FILE).read_text())
    keys = [tensor["key"] for tensor in body["tensors"]]
    gone = body["tensors"].pop(next(index for index, key in enumerate(keys) if keys.count(key) > 1))
    (folder / MANIFEST_FILE).write_bytes(resigned_before_3(body))
    with pytest.raises(CheckpointError, match=f"{gone['key']} of shape .* is not stored exactly once"):
        open_checkpoint(folder)


def resigned(body: dict[str, Any]) -> bytes:
    """The text of a manifest with valid checksums, as anyone who can write the file can make it."""
    head = {key: body.pop(key) for key in ("format_version", "sequence", "contents", "checksum") if key in body}
    contents = json.dumps(body)[1:].encode()
    line = json.dumps({**head, "contents": xxhash.xxh3_128_hexdigest(contents), "checksum": ""})
    signed = line[: line.rindex(', "checksum"')].encode()
    return signed + f', "checksum": "{xxhash.xxh3_128_hexdigest(signed)}",\n'.encode() + contents


def resigned_before_3(body: dict[str, Any]) -> bytes:
    """The same in the format of versions 1 and 2."""
    body.pop("checksum")
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps({"checksum": digest, **body}).encode()


Change = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, Change] = {
    "files elsewhere": lambda body: body["files"].update({"../../x.safetensors": {"bytes": 99, "header": "ab"}}),
    "no files": lambda body: body.update(files={}),
    "a file less": lambda body: body["files"].popitem(),
    "no tensors": lambda body: body.update(files={}, tensors={}),
    "version 0": lambda body: body.update(format_version=0),
    "version NaN": lambda body: body.update(format_version=float("nan")),
    "version true": lambda body: body.update(format_version=True),
    "step -5": lambda body: body["run"]["state"].update(step=-5),
    "step of another folder": lambda body: body["run"]["state"].update(step=8),
    "step 1e400": lambda body: body["run"]["state"].update(step=10**400),
    "step 7.0": lambda body: body["run"]["state"].update(step=7.0),
    "no samples": lambda body: body["run"]["state"].pop("samples"),
    "another counter": lambda body: body["run"]["state"].update(other=1),
    "more optimizer steps than steps": lambda body: body["run"].update(optimizer_steps=8),
    "a run that is a list": lambda body: body.update(run=[]),
    "a model that is text": lambda body: body["run"].update(model="gpt"),
    "a sequence that is text": lambda body: body.update(sequence="3"),
    "a size below 0": lambda body: body["files"]["rank_00000.safetensors"].update(bytes=-1),
    "a file with more": lambda body: body["files"]["rank_00000.safetensors"].update(code="x"),
    "a tensor of another kind": lambda body: body["tensors"].update({"weight/c": 7}),
    "a tensor with more": lambda body: body["tensors"]["weight/a"].update(code="x"),
    "a rank twice": lambda body: body["tensors"]["weight/a"].update(files=[0, 0, 1]),
    "a rank below 0": lambda body: body["tensors"]["weight/a"].update(files=[-1]),
    "a shape below 0": lambda body: body["tensors"]["weight/a"].update(shape=[-4, 3]),
    "a shape of text": lambda body: body["tensors"]["weight/a"].update(shape="23"),
    "a tokenizer with more": lambda body: body["run"].update(tokenizer={"sha256": "ab", "code": "x"}),
    "something more": lambda body: body.update(more=1),
    "nothing at all": lambda body: [body.pop(key) for key in ("run", "software", "files", "tensors")],
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_contents_that_no_checkpoint_has(change: Change, tmp_path: Path) -> None:
    """Catches a manifest that is trusted because its own checksum is valid: files outside the checkpoint, a step that
    the run never took, a type that causes a traceback."""
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    body = json.loads(manifest().encode())
    change(body)
    (folder / MANIFEST_FILE).write_bytes(resigned(body))
    with pytest.raises(CheckpointError, match=r"step_00000007/manifest\.json: "):
        read_manifest(folder)


def test_nesting_without_end(tmp_path: Path) -> None:
    """Catches a parser that overflows the stack."""
    (tmp_path / MANIFEST_FILE).write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(CheckpointError, match="it is damaged"):
        read_manifest(tmp_path)


def test_a_pipe_in_its_place(tmp_path: Path) -> None:
    """Catches a reader that hangs on a pipe without a writer."""
    os.mkfifo(tmp_path / MANIFEST_FILE)
    signal.alarm(10)
    try:
        with pytest.raises(CheckpointError, match="it is no regular file"):
            read_manifest(tmp_path)
    finally:
        signal.alarm(0)


def test_the_order_is_known_without_a_parser(tmp_path: Path) -> None:
    """Catches a damaged manifest that counts, among the checkpoints to keep or as the newest."""
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    text = manifest().encode()
    for change, found in (
        (text, 3),
        (text.replace(b'"sequence": 3', b'"sequence": 9', 1), None),
        (text.replace(b'"bytes": 99', b'"bytes": 98', 1), None),
        (text[:-1], None),
        (text[: text.index(b"\n") + 1], None),
    ):
        (folder / MANIFEST_FILE).write_bytes(change)
        assert read_sequence(folder) == found, change[:90]
    (folder / MANIFEST_FILE).unlink()
    assert read_sequence(folder) is None


def test_thread_count_and_versions_are_recorded() -> None:
    """Catches a resume with another thread count (other bits, see N5) that is not reported."""
    threads = torch.get_num_threads()
    before = software()
    try:
        torch.set_num_threads(threads + 1)
        assert software_differences(before, software()) == [f"threads: {threads} then, {threads + 1} now"]
    finally:
        torch.set_num_threads(threads)
    assert {"python", "torch", "megads", "threads", "cpu_capability"} <= before.keys()
    assert software_differences(before, software()) == []


def test_unknown_entries_are_no_difference() -> None:
    """Catches a warning at every resume because one side recorded more."""
    assert software_differences({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == []
