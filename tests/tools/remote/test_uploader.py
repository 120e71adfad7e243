"""Tests the uploader process: SIGKILL, refused requests, a server that hangs, a second uploader."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.store import save_parts
from megads.config.frozen import freeze, load_frozen
from megads.config.root import RootConfig
from megads.engine.interface import Shard
from megads.runtime.config import RunConfig
from megads.runtime.metrics import EventWriter
from megads.tools.remote.store import RemoteStore
from megads.tools.remote.upload import pin_checkpoint, pins, remote_checkpoints
from megads.tools.remote.uploader import Uploader
from tests.checkpoint.random_layouts import run_record
from tests.checkpoint.small_checkpoints import write_checkpoint
from tests.command import events_of
from tests.s3_server import S3Server, s3_server
from tests.tools.remote.uploads import complete, fetched_seeds

pytestmark = pytest.mark.distributed
_WITHIN_S = 120.0


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server
        server.order()


def make_run(run_dir: Path, url: str, **checkpoint: object) -> Path:
    """Creates a run directory for checkpoints."""
    (run_dir / "logs").mkdir(parents=True)
    config = RootConfig(run=RunConfig(id="run", dir=str(run_dir)))
    config = replace(config, checkpoint=CheckpointConfig(upload=url, **checkpoint))  # type: ignore[arg-type]
    freeze(config, run_dir / "config.yaml")
    return run_dir


@contextmanager
def uploader(run_dir: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts an uploader; kills it on exit."""
    with (run_dir / "logs" / "uploader.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megads.tools.remote.uploader", str(run_dir), *options],
            stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes]) -> int:
    """Closes stdin, which tells the uploader that the run is over; returns its exit code."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(timeout=_WITHIN_S)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "never got there"
        time.sleep(0.05)


def write(run_dir: Path, step: int, seed: int | None = None) -> Path:
    """Writes a checkpoint as the ranks do; config.yaml is unchanged."""
    config = (run_dir / "config.yaml").read_bytes()
    folder = write_checkpoint(run_dir, step, seed)
    (run_dir / "config.yaml").write_bytes(config)
    return folder


def test_it_follows_a_run(tmp_path: Path, s3: S3Server) -> None:
    """Catches checkpoints not found, the newest uploaded last, no retention, and an exit before all are uploaded."""
    url = f"{s3.url}/follows"
    run_dir, store = make_run(tmp_path / "run", url, keep=2), RemoteStore(f"{url}/run")
    for step in (2, 4):
        write(run_dir, step)
    with uploader(run_dir) as process:
        wait_for(lambda: [c.step for c in complete(store)] == [4, 2])
        write(run_dir, 6)
        assert end(process) == 0
    uploaded = events_of(run_dir, "checkpoint_uploaded")
    assert [event["step"] for event in uploaded] == [4, 2, 6]
    assert uploaded[-1]["removed"] == ["step_00000002"] and uploaded[-1]["bytes_per_s"] > 0
    assert fetched_seeds(store, tmp_path) == {4: 4, 6: 6}
    assert events_of(run_dir, "upload_failed") == [] and not pins(run_dir)
    assert "uploader.json" not in store.files(""), "it is still held"
    with uploader(run_dir) as process:
        assert end(process) == 0
    assert len(events_of(run_dir, "checkpoint_uploaded")) == 3, "it was uploaded again"


@pytest.mark.slow
def test_parts_of_killed_uploads_are_removed(tmp_path: Path, s3: S3Server) -> None:
    """Catches leftover multipart uploads that are never aborted and cost money, and aborting those of other runs."""
    url = f"{s3.url}/parts"
    run_dir = make_run(tmp_path / "run", url)
    mine = "prefix/parts/run/checkpoints/step_00000002"
    others = ["prefix/parts/run-2/checkpoints/step_00000002/rank_00000.safetensors", "prefix/parts/running", "run/x"]
    for key in (f"{mine}/rank_00000.safetensors", f"{mine}/rank_00001.safetensors", *others):
        s3.begin_upload(key, parts=2 if key.endswith("1.safetensors") else 1)
    write(run_dir, 2)
    with uploader(run_dir) as process:
        assert end(process) == 0
    assert s3.unfinished() == sorted(others)
    (event,) = events_of(run_dir, "upload_parts_removed")
    assert (event["count"], event["bytes"]) == (2, 3 * 5 * 2**20)
    with uploader(run_dir) as process:
        assert end(process) == 0
    assert len(events_of(run_dir, "upload_parts_removed")) == 1
    assert not events_of(run_dir, "upload_failed") + events_of(run_dir, "upload_parts_left")


def test_parts_that_another_node_sends(tmp_path: Path, s3: S3Server) -> None:
    """Catches a start that aborts what another node of the job is uploading; and, where the store denies the abort, a
    start that fails or reports it at every try."""
    url = f"{s3.url}/both"
    run_dir = make_run(tmp_path / "run", url)
    config, pin = load_frozen(run_dir / "config.yaml"), pin_checkpoint(write(run_dir, 2))
    assert pin is not None
    sent = [f"prefix/both/run/checkpoints/step_{step:08d}/rank_00001.safetensors" for step in (2, 4)]
    for key in sent:
        s3.begin_upload(key)
    before = set(s3.unfinished()) - set(sent)
    with closing(EventWriter(run_dir)) as events:
        several = Uploader(config, run_dir, lambda: True, events, num_nodes=2)
        s3.order(refuse="DELETE")
        for _ in range(2):
            several._remove_parts(RemoteStore(f"{url}/run"))
        s3.order()
        assert set(s3.unfinished()) - before == set(sent)
        (event,) = events_of(run_dir, "upload_parts_left")
        assert "Denied" in event["message"]
        for num_nodes, left in ((2, sent[:1]), (1, [])):
            Uploader(config, run_dir, lambda: True, events, num_nodes=num_nodes)._remove_parts(
                RemoteStore(f"{url}/run")
            )
            assert sorted(set(s3.unfinished()) - before) == left


@pytest.mark.slow
def test_killed_between_parts(tmp_path: Path, s3: S3Server) -> None:
    """Catches parts of a real multipart upload that are not found again: its file is larger than two S3 parts."""
    url = f"{s3.url}/large"
    run_dir, store = make_run(tmp_path / "run", url), RemoteStore(f"{url}/run")
    shard = Shard("weight/w", (20 * 2**20,), (0,), torch.ones(20 * 2**20))
    save_parts(run_dir, [[shard]], run_record(2))
    before = set(s3.unfinished())
    with uploader(run_dir) as process:
        wait_for(lambda: set(s3.unfinished()) - before)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(set(s3.unfinished()) - before) == 1 and not complete(store)
    with uploader(run_dir) as process:
        assert end(process) == 0
    assert set(s3.unfinished()) == before and complete(store)[0].step == 2
    assert events_of(run_dir, "upload_parts_removed")[0]["count"] == 1


@pytest.mark.slow
def test_killed_at_random(tmp_path: Path, s3: S3Server) -> None:
    """Catches a partial checkpoint taken as complete after SIGKILL, and a next uploader that does not continue."""
    url, rng = f"{s3.url}/killed", random.Random(5)
    run_dir, store = make_run(tmp_path / "run", url, keep=2), RemoteStore(f"{url}/run")
    s3.order(delay_s=0.03)
    for number in range(1, 5):
        write(run_dir, number)
        with uploader(run_dir) as process:
            enough = len(s3.requests()) + 5
            wait_for(lambda enough=enough: len(s3.requests()) >= enough)
            time.sleep(rng.uniform(0.0, 0.6))
            process.send_signal(signal.SIGKILL)
            process.wait()
        seeds = fetched_seeds(store, tmp_path / str(number))
        assert all(step == seed for step, seed in seeds.items())
    s3.order()
    with uploader(run_dir) as process:
        assert end(process) == 0
    assert fetched_seeds(store, tmp_path / "end")[4] == 4 and complete(store)[0].step == 4


@pytest.mark.slow
def test_a_server_that_refuses_fails_or_goes_away(tmp_path: Path) -> None:
    """Catches an uploader that exits on a server fault, reports it never or at every try, or does not recover."""
    with s3_server(tmp_path / "s3") as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.variables.items():
            patch.setenv(name, value)
        run_dir, store = make_run(tmp_path / "run", s3.url, keep=0), RemoteStore(f"{s3.url}/run")
        s3.order(refuse="PUT")
        write(run_dir, 2)
        with uploader(run_dir) as process:
            wait_for(lambda: events_of(run_dir, "upload_failed"))
            time.sleep(3)
            refused = events_of(run_dir, "upload_failed")
            assert len(refused) == 1 and "Denied" in refused[0]["message"]
            assert refused[0]["level"] == "warning"
            s3.order(fail=0.05)
            wait_for(lambda: events_of(run_dir, "checkpoint_uploaded"))
            s3.stop()
            write(run_dir, 4)
            wait_for(lambda: len(events_of(run_dir, "upload_failed")) > len(refused))
            assert process.poll() is None
            s3.order()
            s3.start()
            # The restarted server is empty: everything is uploaded again.
            wait_for(lambda: [c.step for c in complete(store)] == [4, 2])
            assert end(process) == 0
        assert fetched_seeds(store, tmp_path) == {2: 2, 4: 4}


@pytest.mark.slow
def test_one_in_a_hundred_requests_fails(tmp_path: Path, s3: S3Server) -> None:
    """Catches a failed request that fails the upload instead of being retried."""
    url = f"{s3.url}/fails"
    run_dir, store = make_run(tmp_path / "run", url, keep=0), RemoteStore(f"{url}/run")
    s3.order(fail=0.01)
    for step in range(1, 9):
        write(run_dir, step)
    with uploader(run_dir) as process:
        assert end(process) == 0
    s3.order()
    assert fetched_seeds(store, tmp_path) == {step: step for step in range(1, 9)}


@pytest.mark.slow
def test_a_server_that_hangs_at_the_end(tmp_path: Path) -> None:
    """Catches an orphaned uploader that waits for its server without a limit after the run."""
    with s3_server(tmp_path / "s3") as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.variables.items():
            patch.setenv(name, value)
        run_dir = make_run(tmp_path / "run", s3.url, upload_wait_s=2.0)
        s3.hang()
        write(run_dir, 2)
        with uploader(run_dir) as process:
            assert end(process) == 4


@pytest.mark.slow
def test_two_run_directories_of_one_run(tmp_path: Path, s3: S3Server) -> None:
    """Catches two machines that upload one run at the same time, which would mix their files."""
    url = f"{s3.url}/two"
    first, second = (make_run(tmp_path / name, url, keep=0, upload_wait_s=3.0) for name in ("first", "second"))
    store = RemoteStore(f"{url}/run")
    write(first, 2)
    with uploader(first) as holder:
        wait_for(lambda: complete(store))
        write(second, 2, seed=20)
        write(second, 3, seed=30)
        with uploader(second) as other:
            wait_for(lambda: events_of(second, "upload_failed"))
            write(first, 4)
            wait_for(lambda: len(complete(store)) == 2)
            assert f"process {holder.pid}" in events_of(second, "upload_failed")[0]["message"]
            assert other.poll() is None
            assert fetched_seeds(store, tmp_path) == {2: 2, 4: 4}
            assert end(holder) == 0


@pytest.mark.slow
def test_a_slow_store_and_a_quick_run(tmp_path: Path, s3: S3Server) -> None:
    """Catches retention that deletes the files of an upload in progress, so that no upload ever completes."""
    url = f"{s3.url}/slow"
    run_dir, store = make_run(tmp_path / "run", url, keep=2), RemoteStore(f"{url}/run")
    s3.order(delay_s=0.15)
    write(run_dir, 1)
    with uploader(run_dir) as process:
        wait_for(lambda: pins(run_dir))
        for step in range(2, 8):
            shutil.rmtree(write(run_dir, step).with_name(f"step_{step - 1:08d}"))
            time.sleep(0.3)
        wait_for(lambda: events_of(run_dir, "checkpoint_uploaded"))
        assert end(process) == 0
    s3.order()
    assert events_of(run_dir, "checkpoint_uploaded")[0]["step"] == 1
    assert complete(store)[0].step == 7 and fetched_seeds(store, tmp_path)[7] == 7
    assert not pins(run_dir)


@pytest.mark.slow
def test_nodes_share_an_upload(tmp_path: Path, s3: S3Server) -> None:
    """Catches a second node that uploads no files, and one that does not end with the run."""
    url = f"{s3.url}/nodes"
    run_dir, store = make_run(tmp_path / "run", url), RemoteStore(f"{url}/run")
    with uploader(run_dir, "--nodes=2") as first, uploader(run_dir, "--node=1", "--nodes=2") as second:
        write(run_dir, 2)
        wait_for(lambda: complete(store))
        assert end(first) == 0 and end(second) == 0
    event = events_of(run_dir, "checkpoint_uploaded")[0]
    manifest = remote_checkpoints(store)[2].manifest
    assert manifest is not None and 0 < event["bytes"] < manifest.nbytes
    assert fetched_seeds(store, tmp_path) == {2: 2}
