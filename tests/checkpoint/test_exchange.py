"""Mixtures of files of several checkpoints: each file is intact, but together they are not a checkpoint."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megads.checkpoint.config import step_folder
from megads.checkpoint.manifest import MANIFEST_FILE
from megads.checkpoint.rank_file import file_name, read_header
from megads.checkpoint.read import find_checkpoint, open_checkpoint
from megads.checkpoint.store import save_parts
from megads.errors import CheckpointError
from tests.checkpoint.random_layouts import global_tensors, random_layout, run_record, shards_of

RANKS, STEP = 3, 7
LAYOUT = random_layout(7, RANKS)
NAMES = (*map(file_name, range(RANKS)), MANIFEST_FILE)


def saved(run_dir: Path, step: int, seed: int, layout: Any = LAYOUT) -> dict[str, bytes]:
    """Saves a checkpoint; returns its files."""
    folder = save_parts(run_dir, [shards_of(part, global_tensors(seed)) for part in layout], run_record(step))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Returns checkpoints whose files have the same names and the same rectangles, and so the same sizes."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "this": saved(root / "this", STEP, seed=1),
        "the next step": saved(root / "next", STEP + 1, seed=2),
        "another run": saved(root / "another", STEP, seed=3),
    }


@pytest.fixture
def run_dir(tmp_path: Path, others: dict[str, dict[str, bytes]]) -> Path:
    """Returns a run with a valid checkpoint of step 6 and the one of step 7."""
    saved(tmp_path, STEP - 1, seed=6)
    write(tmp_path, others["this"])
    return tmp_path


def write(run_dir: Path, files: dict[str, bytes]) -> Path:
    folder = step_folder(run_dir, STEP)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def refused(run_dir: Path, files: dict[str, bytes]) -> str:
    """Returns why the checkpoint of step 7 with these files is refused; empty where it is read."""
    try:
        open_checkpoint(write(run_dir, files))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_every_mixture(run_dir: Path, others: dict[str, dict[str, bytes]]) -> None:
    """Catches a file or a manifest of another rank, step or run that is accepted as this checkpoint's: of all 2,187
    ways to fill the four names, the two that are a checkpoint of step 7 must be read and every other refused, with the
    name of a file that does not belong."""
    given = [(whose, rank) for whose in others for rank in range(RANKS)]
    wrong, read = [], []
    for manifest, *filled in itertools.product(others, *[given] * RANKS):
        files = {file_name(rank): others[whose][file_name(of)] for rank, (whose, of) in enumerate(filled)}
        told = refused(run_dir, files | {MANIFEST_FILE: others[manifest][MANIFEST_FILE]})
        strangers = [file_name(rank) for rank, found in enumerate(filled) if found != (manifest, rank)]
        if manifest == "the next step":
            strangers = [MANIFEST_FILE]
        if not told:
            read.append((manifest, *filled))
        elif not any(name in told for name in strangers):
            wrong.append((manifest, *filled, told))
    assert wrong == []
    assert read == [(whose, *((whose, rank) for rank in range(RANKS))) for whose in ("this", "another run")]


def header_and_data(content: bytes, folder: Path) -> tuple[bytes, bytes]:
    (folder / "any").write_bytes(content)
    header = read_header(folder / "any")
    return header, content[len(header) :]


@pytest.mark.parametrize("whose", ["the next step", "another run"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_headers_and_data_apart(
    rank: int, whose: str, run_dir: Path, tmp_path: Path, others: dict[str, dict[str, bytes]]
) -> None:
    """Catches a file whose header, or whose tensors, are those of another file of the same sizes."""
    this, name = others["this"], file_name(rank)
    header, data = header_and_data(this[name], tmp_path)
    their_header, their_data = header_and_data(others[whose][name], tmp_path)
    assert len(header) == len(their_header) and len(data) == len(their_data)
    assert f"{name}: its header fails its checksum" in refused(run_dir, this | {name: their_header + data})
    told = refused(run_dir, this | {name: header + their_data})
    assert name in told and "fails its checksum" in told


def test_a_file_that_is_right_in_itself(run_dir: Path, tmp_path: Path, others: dict[str, dict[str, bytes]]) -> None:
    """Catches a value that changed before its checksum was computed, or whose checksum was forged: file and header
    agree, and only the manifest shows the difference."""
    draw, this, count = random.Random(1), others["this"], 0
    for name in NAMES[:RANKS]:
        header, data = header_and_data(this[name], tmp_path)
        told = json.loads(header[8:])
        notes = told["__metadata__"]
        for tensor, about in told.items():
            if tensor == "__metadata__":
                continue
            begin, end = about["data_offsets"]
            position = draw.randrange(begin, end)
            changed = data[:position] + bytes([data[position] ^ 64]) + data[position + 1 :]
            there = json.loads(notes[tensor])["xxh3_128"].encode()
            assert header.count(there) == 1
            forged = header.replace(there, xxhash.xxh3_128_hexdigest(changed[begin:end]).encode())
            why = refused(run_dir, this | {name: forged + changed})
            assert f"{name}: its header fails its checksum" in why
            count += 1
    assert count == sum(map(len, LAYOUT))


def test_tensors_exchanged_within_a_file(run_dir: Path, tmp_path: Path) -> None:
    """Catches two tensors of the same shape whose data are swapped."""
    files = saved(tmp_path / "equal", STEP, seed=1, layout=random_layout(7, 1))
    header, data = header_and_data(files[file_name(0)], tmp_path)
    told = {name: about for name, about in json.loads(header[8:]).items() if name != "__metadata__"}
    exchanged = 0
    for (one, first), (two, second) in itertools.combinations(told.items(), 2):
        if first["shape"] != second["shape"]:
            continue
        (a, b), (c, d) = first["data_offsets"], second["data_offsets"]
        if data[a:b] == data[c:d]:
            continue
        changed = data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]
        why = refused(run_dir, files | {file_name(0): header + changed})
        assert file_name(0) in why and "fails its checksum" in why, (one, two)
        exchanged += 1
    assert exchanged and not refused(run_dir, files)


def another_layout(others: dict[str, dict[str, bytes]], folder: Path) -> dict[str, bytes]:
    """Returns this checkpoint with the manifest of the same tensors in two files."""
    return {**others["this"], MANIFEST_FILE: saved(folder, STEP, 1, random_layout(8, 2))[MANIFEST_FILE]}


def a_rank_twice(others: dict[str, dict[str, bytes]], _: Path) -> dict[str, bytes]:
    return {**others["this"], file_name(1): others["this"][file_name(0)]}


def ranks_swapped(others: dict[str, dict[str, bytes]], _: Path) -> dict[str, bytes]:
    this = others["this"]
    return {**this, file_name(0): this[file_name(2)], file_name(2): this[file_name(0)]}


def half_of_another_step(others: dict[str, dict[str, bytes]], _: Path) -> dict[str, bytes]:
    return {**others["this"], file_name(1): others["the next step"][file_name(1)]}


def manifest_of_another_step(others: dict[str, dict[str, bytes]], _: Path) -> dict[str, bytes]:
    return {**others["this"], MANIFEST_FILE: others["the next step"][MANIFEST_FILE]}


def manifest_of_another_run(others: dict[str, dict[str, bytes]], _: Path) -> dict[str, bytes]:
    return {**others["this"], MANIFEST_FILE: others["another run"][MANIFEST_FILE]}


def all_of_another_step(others: dict[str, dict[str, bytes]], _: Path) -> dict[str, bytes]:
    return others["the next step"]


EXCHANGES: list[Callable[[dict[str, dict[str, bytes]], Path], dict[str, bytes]]] = [
    another_layout, a_rank_twice, ranks_swapped, half_of_another_step, manifest_of_another_step,
    manifest_of_another_run, all_of_another_step,
]  # fmt: skip


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_passed_by(
    exchange: Callable[[dict[str, dict[str, bytes]], Path], dict[str, bytes]], run_dir: Path, tmp_path: Path,
    others: dict[str, dict[str, bytes]],
) -> None:  # fmt: skip
    """Catches a start that fails, or continues without a message, where the checkpoint before is whole."""
    handle = find_checkpoint(run_dir, "auto")
    assert handle is not None and handle.state["step"] == STEP and not handle.skipped
    write(run_dir, exchange(others, tmp_path / "more"))
    handle = find_checkpoint(run_dir, "auto")
    assert handle is not None and handle.state["step"] == STEP - 1
    (why,) = handle.skipped
    assert why.startswith(f"{step_folder(run_dir, STEP).name}: ") and any(name in why for name in NAMES)
