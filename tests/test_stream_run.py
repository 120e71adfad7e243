"""Runs on a dataset in object storage equal those on local files: the real command, a slow and failing S3 server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.data.indexed.writer import IndexedDatasetWriter
from megads.runtime.metrics import read_json_lines
from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of, validations_of
from tests.corpus import VOCAB_SIZE
from tests.s3_server import S3Server, s3_server

pytestmark = pytest.mark.distributed
BLOCK = 4096


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a dataset of about 110 blocks."""
    prefix, random = tmp_path_factory.mktemp("large") / "large", np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(2000):
            writer.append(random.integers(0, VOCAB_SIZE, int(random.integers(20, 200))).tolist())
    return prefix


def stored(s3: S3Server, prefix: Path, name: str) -> str:
    for ending in (".bin", ".idx"):
        s3.put(f"{name}{ending}", Path(f"{prefix}{ending}").read_bytes())
    return f"{s3.url}/{name}"


def computed(run_dir: Path) -> list[dict[str, Any]]:
    """The ledger's steps and validations, without times."""
    keys = ("step", "valid/held_out/loss", "valid/held_out/tokens")
    return steps_of(run_dir) + [{key: line[key] for key in keys} for line in validations_of(run_dir)]


def streaming(data: object, cache: Path, **changes: Any) -> list[str]:
    """Overrides of a small run whose cache holds a fifth of the data."""
    values = {"data__stream__cache_dir": cache, "data__stream__block_kib": 4, "data__stream__cache_gib": 9e-5}
    values |= {"data__cache_dir": cache.with_name("maps"), "evaluation__every_steps": 4, "evaluation__max_tokens": 256}
    return small_model(Path(str(data)), **(values | {"data__train": f"[{{path: '{data}'}}]"} | changes))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"parallel__dp": 2}, id="dp2"),
        pytest.param({"parallel__tp": 2, "parallel__pp": 2, "data__document_mask": True}, id="tp2pp2"),
    ],
)
@pytest.mark.slow
def test_a_streamed_run_equals_one_of_local_files(
    layout: dict[str, Any], large: Path, megads: StartCommand, s3: S3Server
) -> None:
    """Catches a layout that reads other tokens, store delays that affect training, and a cache not shared by ranks.

    The cache is smaller than the data, the store takes 50 ms per request and fails one in a hundred.
    """
    url = stored(s3, large, "ledger")
    s3.order(delay_s=0.05, fail=0.01)
    for data in (large, url):
        run_dir = megads.folder / ("remote" if data is url else "local")
        words = streaming(data, megads.folder / "cache", train__steps=12, run__dir=run_dir, **layout)
        code, _, err = megads("train", *words, variables=s3.variables).end()
        assert code == 0, err
    s3.order()
    assert computed(megads.folder / "remote") == computed(megads.folder / "local")
    lines = [line for line in read_json_lines(megads.folder / "remote" / "metrics.jsonl") if "loss" in line]
    assert sum(line["stream_fetched_bytes"] for line in lines) > 0 < sum(line["stream_evicted_bytes"] for line in lines)
    (told,) = events_of(megads.folder / "remote", "streamed")
    assert told["stream_used_bytes"] <= 9e-5 * 2**30 and told["datasets"] == [url]


@pytest.mark.slow
def test_a_killed_streamed_run_continues(large: Path, megads: StartCommand, s3: S3Server) -> None:
    """Catches a kill that leaves a corrupt cache, or a run that cannot resume with local files and back.

    The run is killed while blocks are fetched, resumes, resumes with local files, and then from the store again.
    """
    url, reference, run_dir = stored(s3, large, "killed"), megads.folder / "reference", megads.folder / "run"
    fixed = {"parallel__dp": 2, "checkpoint__every_steps": 2, "schedule__name": "constant"}

    def words(data: object, steps: int, folder: Path) -> list[str]:
        return streaming(data, megads.folder / "cache", train__steps=steps, run__dir=folder, run__id="one", **fixed)

    code, _, err = megads("train", *words(large, 14, reference)).end()
    assert code == 0, err
    s3.order(delay_s=0.05)
    running = megads("train", *words(url, 8, run_dir), variables=s3.variables)
    while not (checkpoint_of(run_dir, 2) / "manifest.json").exists():
        time.sleep(0.02)
        assert running.process.poll() is None
    for process in reversed(running.processes()):
        process.kill()
    running.end()
    for data, steps in ((url, 8), (large, 10), (url, 14)):
        code, _, err = megads("train", *words(data, steps, run_dir), variables=s3.variables).end()
        assert code == 0, err
    s3.order()
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 14)) == checksums(checkpoint_of(reference, 14))


@pytest.mark.slow
def test_objects_that_vanish_or_change_end_the_run(large: Path, megads: StartCommand, s3: S3Server) -> None:
    """Catches a run that hangs or loses its checkpoints when its data is deleted, or that trains on other data."""
    url, run_dir = stored(s3, large, "gone"), megads.folder / "run"
    fixed = {
        "checkpoint__every_steps": 2,
        "run__dir": run_dir,
        "train__steps": 300,
        "data__stream__look_ahead_steps": 2,
    }
    words = streaming(url, megads.folder / "cache", **fixed)
    running = megads("train", *words, variables=s3.variables)
    while not (checkpoint_of(run_dir, 2) / "manifest.json").exists():
        time.sleep(0.02)
        assert running.process.poll() is None
    s3.delete("gone.bin")
    code, _, err = running.end()
    assert code == 3 and "gone.bin: is not there (any more)" in err, err
    code, _, err = megads("train", *words, variables=s3.variables).end()
    assert code == 3 and "gone.bin: no such file" in err, err
    s3.put("gone.bin", Path(f"{large}.bin").read_bytes()[::-1])
    code, _, err = megads("train", *words, variables=s3.variables).end()
    assert code == 3 and "gone.bin holds other tokens than before" in err, err
    stored(s3, large, "gone")
    saved = max(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    steps = int(saved.removeprefix("step_")) + 4
    words = [word for word in words if not word.startswith("train.steps")]
    code, _, err = megads("train", *words, f"train.steps={steps}", variables=s3.variables).end()
    assert code == 0, err
    assert events_of(run_dir, "resume")[-1]["step"] >= 2
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, steps + 1))


def test_a_dry_run_reports_what_is_streamed(large: Path, megads: StartCommand, s3: S3Server) -> None:
    """Catches a wrong URL that only the ranks report, and a plan that does not say that data is streamed."""
    url = stored(s3, large, "planned")
    words = streaming(url, megads.folder / "cache", train__steps=2, run__dry_run=True)
    code, out, err = megads("train", *words, variables=s3.variables).end()
    assert code == 0 and url in out and "streamed" in out, out + err
    words = streaming(f"{url}x", megads.folder / "cache", train__steps=2, run__dry_run=True)
    code, out, err = megads("train", *words, variables=s3.variables).end()
    assert code == 3 and "plannedx.idx: no such file" in err, out + err
