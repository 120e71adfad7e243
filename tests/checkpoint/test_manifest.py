"""The manifest survives a round trip and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    StoredTensor,
    _digest,
    read_manifest,
    software,
    software_differences,
)
from megads.errors import CheckpointError
from tests.checkpoint.random_layouts import run_record


def manifest(offset: int = 2) -> Manifest:
    tensors = (
        StoredTensor("weight/a", (4, 3), (0, 0), (2, 3), "F32", "rank_00000.safetensors", "0", "ab"),
        StoredTensor("weight/a", (4, 3), (offset, 0), (2, 3), "F32", "rank_00001.safetensors", "0", "cd"),
    )
    return Manifest(
        run_record(7), {"torch": "2"}, 3, {"rank_00000.safetensors": 99, "rank_00001.safetensors": 99}, tensors
    )


def test_round_trip() -> None:
    """Catches a field that is written and not read, or read as another type."""
    assert Manifest.decode(manifest().encode()) == manifest()
    assert Manifest.decode(manifest().encode()).digest() == manifest().digest()


def test_every_flipped_bit_is_noticed() -> None:
    """Catches damage in the manifest itself: a changed step, offset or checksum that still parses."""
    text = manifest().encode()
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position % 7)
        try:
            assert Manifest.decode(bytes(damaged)) == manifest(), position
        except CheckpointError:
            continue


def test_newer_format_is_refused() -> None:
    """Catches a newer checkpoint reported as damaged, which sends its owner looking for a broken disk."""
    body = json.loads(manifest().encode())
    body["format_version"] = 99
    with pytest.raises(CheckpointError, match="format version 99 is newer"):
        Manifest.decode(json.dumps(body).encode())


def test_a_checkpoint_of_version_1_still_loads() -> None:
    """Catches checkpoints of before that are refused for what they could not know yet."""
    body = json.loads(manifest().encode())
    body["format_version"] = 1
    for key in ("tokenizer", "data_digest"):
        del body["run"][key]
    found = Manifest.decode(resigned(body))
    assert found == manifest() and found.run.tokenizer is None


def resigned(body: dict[str, Any]) -> bytes:
    """The text of a manifest with a checksum that holds, as whoever can write it can make it."""
    body.pop("checksum")
    return json.dumps({"checksum": _digest(body), **body}).encode()


Change = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, Change] = {
    "files elsewhere": lambda body: (
        body.update(files={"../../x.safetensors": 99}),
        [tensor.update(file="../../x.safetensors") for tensor in body["tensors"]],
    ),
    "no files": lambda body: body.update(files={}),
    "no tensors": lambda body: body.update(files={}, tensors=[]),
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
    "a size below 0": lambda body: body["files"].update({"rank_00000.safetensors": -1}),
    "a tensor of another kind": lambda body: body["tensors"].append(7),
    "a tensor with more": lambda body: body["tensors"][0].update(code="x"),
    "an offset that is short": lambda body: body["tensors"][0].update(offset=[0]),
    "an offset below 0": lambda body: body["tensors"][0].update(offset=[-1, 0]),
    "a shape of text": lambda body: body["tensors"][0].update(shape="23"),
    "a tokenizer with more": lambda body: body["run"].update(tokenizer={"sha256": "ab", "code": "x"}),
    "something more": lambda body: body.update(more=1),
    "nothing at all": lambda body: [body.pop(key) for key in list(body) if key != "checksum"],
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_contents_that_no_checkpoint_has(change: Change, tmp_path: Path) -> None:
    """Catches a manifest that is believed because its own checksum holds: files read from elsewhere, a step that the
    run never did, a type that ends the run in a traceback."""
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    body = json.loads(manifest().encode())
    change(body)
    (folder / MANIFEST_FILE).write_bytes(resigned(body))
    with pytest.raises(CheckpointError, match=r"step_00000007/manifest\.json: "):
        read_manifest(folder)


def test_nesting_without_end(tmp_path: Path) -> None:
    """Catches a parser that runs out of stack."""
    (tmp_path / MANIFEST_FILE).write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(CheckpointError, match="it is damaged"):
        read_manifest(tmp_path)


def test_a_pipe_in_its_place(tmp_path: Path) -> None:
    """Catches a reader that waits for a writer that never comes."""
    os.mkfifo(tmp_path / MANIFEST_FILE)
    signal.alarm(10)
    try:
        with pytest.raises(CheckpointError, match="it is no regular file"):
            read_manifest(tmp_path)
    finally:
        signal.alarm(0)


def test_coverage() -> None:
    """Catches parts that overlap and leave a gap of the same size."""
    manifest().check_coverage()
    with pytest.raises(CheckpointError, match=r"weight/a of shape \[4, 3\] is not stored exactly once: .* overlap"):
        manifest(offset=1).check_coverage()


def test_thread_count_and_versions_are_recorded() -> None:
    """Catches a resume under another thread count (other bits, see N5) that passes unnoticed."""
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
