"""Streaming of datasets from object storage, with a real S3 server: block cache, prefetch, retries, errors."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megads.data.config import DataConfig, DatasetConfig, StreamConfig
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.recorded import record_data
from megads.data.indexed.stream import local_prefix, open_indexed
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.loader import LoaderShare, LookAhead, TrainLoader
from megads.data.sampling.samples import TrainSamples
from megads.errors import ConfigError, DataError
from megads.tools.remote.remote_files import BlockCache, CacheFolder, FileVersion
from megads.tools.remote.stream import StreamedTokens
from tests.s3_server import S3Server, s3_server

BLOCK = 4096
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3")) as server:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def local(tmp_path: Path) -> IndexedDataset:
    """A hundred blocks of tokens."""
    random = np.random.default_rng(3)
    with IndexedDatasetWriter(tmp_path / "c", np.uint16) as writer:
        while writer.num_tokens < 100 * BLOCK // 2:
            writer.append(random.integers(0, 1000, int(random.integers(20, 400))).tolist())
    return IndexedDataset(tmp_path / "c")


def stored(local: IndexedDataset, s3: S3Server, name: str) -> str:
    """URL of the dataset in the store."""
    for ending in (".bin", ".idx"):
        s3.put(f"{name}{ending}", Path(f"{local.prefix}{ending}").read_bytes())
    return f"{s3.url}/{name}"


def streaming(tmp_path: Path, **changes: float) -> StreamConfig:
    config = StreamConfig(**({"cache_dir": str(tmp_path / "cache"), "block_kib": 4, "retry_s": 20.0} | changes))
    config.check()
    return config


def fetched(s3: S3Server, name: str) -> list[str]:
    """Byte ranges of the `.bin` file that were requested."""
    found = [line for line in s3.requests() if line.startswith("GET") and f"/{name}.bin" in line]
    return [line.rpartition("bytes=")[2] for line in found if "bytes=" in line]


def streamed(dataset: IndexedDataset) -> StreamedTokens:
    assert isinstance(dataset.all_tokens, StreamedTokens)
    return dataset.all_tokens


@pytest.mark.always
def test_any_streamed_span_equals_the_local_file(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches blocks joined at the wrong byte, a wrong last block, and a content hash that depends on the path."""
    url, config = stored(local, s3, "spans"), streaming(tmp_path)
    remote = open_indexed(url, config)
    assert remote.fingerprint() == local.fingerprint() and remote.num_tokens == local.num_tokens
    random = np.random.default_rng(0)
    spans = np.sort(random.integers(0, local.num_tokens + 1, (200, 2)))
    for begin, end in [*spans.tolist(), (0, local.num_tokens), (local.num_tokens - 1, local.num_tokens)]:
        assert np.array_equal(remote.all_tokens[begin:end], local.all_tokens[begin:end])
    data = [DataConfig(train=[DatasetConfig(path)], stream=config) for path in (url, local.prefix)]
    there, here = (record_data(some).datasets[0] for some in data)
    assert (there.index, there.content) == (here.index, here.content) and there.path == url


@pytest.mark.slow
def test_the_content_hash_of_a_large_remote_file_is_the_local_one(
    local: IndexedDataset, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a content hash of a large remote file that differs from a local copy's, or that reads all bytes."""
    monkeypatch.setattr("megads.data.indexed.recorded.WHOLE_BYTES", 1000)
    monkeypatch.setattr("megads.data.indexed.recorded.PIECE_BYTES", 7)
    monkeypatch.setattr("megads.data.indexed.recorded.PIECES", 5)
    url, config = stored(local, s3, "pieces"), streaming(tmp_path)
    records = [record_data(DataConfig(train=[DatasetConfig(path)], stream=config)) for path in (url, local.prefix)]
    assert records[0].datasets[0].content == records[1].datasets[0].content
    assert len(fetched(s3, "pieces")) == 5


def _read_all(url: str, config: StreamConfig, seed: int) -> None:
    """Reads every block, in a random order."""
    remote = open_indexed(url, config)
    starts = np.random.default_rng(seed).permutation(remote.num_tokens - 50)[:400]
    tokens = streamed(remote)
    tokens.fetch_ahead(starts, starts + 50)
    tokens.fetch(np.array([0]), np.array([remote.num_tokens]))


def test_a_block_is_fetched_once_a_node(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches processes that each fetch the same blocks: 3 at a time must together fetch the size of the file."""
    url, config = stored(local, s3, "once"), streaming(tmp_path)
    s3.order(delay_s=0.02)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_read_all, args=(url, config, seed)) for seed in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    s3.order()
    size = Path(f"{local.prefix}.bin").stat().st_size
    counters = streamed(open_indexed(url, config)).root.counters()
    assert counters.fetched_bytes == size
    ranges = [tuple(map(int, text.split("-"))) for text in fetched(s3, "once")]
    assert sum(end - begin + 1 for begin, end in ranges) == size
    assert len(ranges) == counters.requests < 90  # neighbours come by one request
    assert sum(line.startswith("GET") and "once.idx" in line for line in s3.requests()) == 1


@pytest.mark.slow
def test_look_ahead_hides_a_slow_and_failing_store(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches a look-ahead that prefetches too late: after the first step every read must be a cache hit."""
    url, config = stored(local, s3, "ahead"), streaming(tmp_path, look_ahead_steps=8)
    s3.order(delay_s=0.05, fail=0.01)
    remote, batches = open_indexed(url, config), []
    samples = [TrainSamples(some, range(some.num_documents), 64, 1) for some in (remote, local)]
    root = streamed(remote).root
    with TrainLoader(
        samples[0], BatchSizeSchedule(8), LoaderShare(2, 0, 1, 1000), look_ahead=LookAhead(8, 2**20)
    ) as loader:
        batches.append(next(loader))
        # The loader reads the second step while its blocks are still in flight.
        await_loader(loader, streamed(remote))
        before = root.counters()
        for _ in range(24):
            batches.append(next(loader))
            await_loader(loader, streamed(remote))
        counted = root.counters().since(before)
    s3.order()
    assert counted.waits == 0 < counted.hits and counted.requests > 0
    with TrainLoader(samples[1], BatchSizeSchedule(8), LoaderShare(2, 0, 1, 1000)) as loader:
        for batch, expected in zip(batches, loader, strict=False):
            assert batch.batch_hash == expected.batch_hash
            for ours, theirs in zip(batch.micro_batches, expected.micro_batches, strict=True):
                assert ours.tokens_bs is not None and theirs.tokens_bs is not None
                assert ours.tokens_bs.equal(theirs.tokens_bs)


def test_a_cache_smaller_than_the_data_keeps_its_limit(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches a cache that exceeds its limit, an eviction of the block used last, and one that corrupts reads."""
    url, config = stored(local, s3, "small"), streaming(tmp_path, cache_gib=20 * BLOCK / 2**30)
    remote = open_indexed(url, config)
    tokens, width = streamed(remote), BLOCK // 2
    for begin in range(0, local.num_tokens, width):
        remote.fetch(np.array([0, begin]), np.array([1, begin + 1]))
        assert np.array_equal(remote.all_tokens[begin : begin + width], local.all_tokens[begin : begin + width])
        files = [path for path in (tmp_path / "cache").rglob("blocks-*/*/*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 20 * BLOCK
    counters = tokens.root.counters()
    assert counters.used_bytes <= 20 * BLOCK and counters.evicted_bytes > 70 * BLOCK
    assert len([text for text in fetched(s3, "small") if text.startswith("0-")]) == 1, "block 0 was always in use"


def await_loader(loader: TrainLoader, tokens: StreamedTokens) -> None:
    """Waits until the loader has prefetched all that it may, and no block is being fetched.

    A slow machine must not look like a look-ahead that is too short, nor like an evicted block.
    """
    deadline = time.monotonic() + 240
    while not loader._queue.full() or tokens._in_flight:
        assert time.monotonic() < deadline, "blocks are still being fetched"
        time.sleep(0.005)


@pytest.mark.slow
def test_the_look_ahead_keeps_to_its_share_of_the_cache(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches a look-ahead that evicts its own blocks: in a small cache each block must be read before eviction."""
    url, config = stored(local, s3, "share"), streaming(tmp_path, cache_gib=64 * BLOCK / 2**30)
    remote = open_indexed(url, config)
    samples = TrainSamples(remote, range(remote.num_documents), 64, 1)
    with TrainLoader(
        samples, BatchSizeSchedule(4), LoaderShare(2, 0, 1, 1000), look_ahead=LookAhead(1000, 32 * BLOCK)
    ) as loader:
        next(loader)
        await_loader(loader, streamed(remote))
        before = streamed(remote).root.counters()
        assert before.evicted_bytes == 0 and before.used_bytes <= 40 * BLOCK
        for _ in range(60):
            next(loader)
            await_loader(loader, streamed(remote))
        counted = streamed(remote).root.counters().since(before)
    assert counted.waits == 0 and counted.evicted_bytes > 0


def test_truncated_and_damaged_blocks_are_fetched_again(tmp_path: Path) -> None:
    """Catches a truncated, corrupt or misplaced block that is used, and partial files that are never deleted."""
    root = CacheFolder(tmp_path / "cache", 10**6)
    cache = BlockCache(root, tmp_path / "cache" / "a" / "b", 10_000, 4096)
    content = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    blocks = [content[begin : begin + 4096] for begin in range(0, 10_000, 4096)]
    for number, block in enumerate(blocks):
        cache.put(number, block)
    (path,) = (tmp_path / "cache").rglob("0000000001")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", bytes([whole[0] ^ 1]) + whole[1:], bytes(len(whole))):
        path.write_bytes(damaged)
        assert cache.read(1) is None and not path.exists()
        assert not cache.touch(1)
        cache.put(1, blocks[1])
        found = cache.read(1)
        assert found is not None and np.array_equal(found, blocks[1])
    shutil.copy(path, path.with_name("0000000002"))
    assert cache.read(2) is None, "a block of another length"
    abandoned = path.with_name("0000000007.1-1.partial")
    abandoned.write_bytes(bytes(100))
    os.utime(abandoned, (1, 1))
    root.make_room()
    assert not abandoned.exists()


_FETCH = """
import sys, numpy as np
from megads.data.config import StreamConfig
from megads.data.indexed.stream import open_indexed
remote = open_indexed(sys.argv[1], StreamConfig(cache_dir=sys.argv[2], block_kib=4, retry_s=20))
print("open", flush=True)
remote.fetch(np.array([0]), np.array([remote.num_tokens]))
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.05, 0.2])
def test_a_kill_during_a_fetch_leaves_no_lock(
    after_s: float, local: IndexedDataset, s3: S3Server, tmp_path: Path
) -> None:
    """Catches a lock that outlives its process, and a partial block that is used: a later reader must get all bytes."""
    url, config = stored(local, s3, "killed"), streaming(tmp_path, connections=2)
    s3.order(delay_s=0.03)
    words = [sys.executable, "-c", _FETCH, url, str(config.cache_dir)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **s3.variables}) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert "done" not in process.stdout.read(), "it was too fast to be killed"
    s3.order()
    remote = open_indexed(url, config)
    assert np.array_equal(remote.all_tokens[0 : remote.num_tokens], local.all_tokens[0 : local.num_tokens])


def changed(local: IndexedDataset, s3: S3Server, name: str) -> None:
    """Replaces the tokens in the store by as many others."""
    s3.put(f"{name}.bin", Path(f"{local.prefix}.bin").read_bytes()[::-1])


def test_an_object_that_changes_during_a_run_is_refused(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches blocks of two object versions in one run, and a next start that does not read the new version."""
    url, config = stored(local, s3, "changing"), streaming(tmp_path)
    remote = open_indexed(url, config)
    first = remote.all_tokens[:100]
    changed(local, s3, "changing")
    with pytest.raises(DataError, match="something wrote to it while this run read it"):
        remote.fetch(np.array([100_000]), np.array([100_001]))
    # Ages the record, as for a start on another day: this process has already checked the version.
    current = next((tmp_path / "cache").rglob("current.json"))
    os.utime(current, (1, 1))
    again = open_indexed(url, config)
    expected = np.frombuffer(Path(f"{local.prefix}.bin").read_bytes()[::-1], np.uint16)
    assert np.array_equal(again.all_tokens[: again.num_tokens], expected)
    assert not np.array_equal(again.all_tokens[:100], first)
    assert len(list(current.parent.glob("*/"))) == 1, "what was kept of the old version is gone"


@pytest.mark.slow
def test_unchanged_objects_are_not_fetched_again(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches a start that fetches the index again, and a truncated copy that is used."""
    url, config = stored(local, s3, "kept"), streaming(tmp_path)

    def indexes() -> int:
        return sum(line.startswith("GET") and "kept.idx" in line for line in s3.requests())

    prefix = local_prefix(url, config)
    assert indexes() == 1
    os.utime(next((tmp_path / "cache").rglob("current.json")), (1, 1))
    assert local_prefix(url, config) == prefix and indexes() == 1
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.truncate(100)
    assert open_indexed(url, config).num_tokens == local.num_tokens and indexes() == 2


@pytest.mark.slow
def test_an_unreadable_object_is_reported_with_its_reason(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches a traceback, minutes of retries or an empty reason for a wrong URL, no permission or a deleted object."""
    url, config = stored(local, s3, "refused"), streaming(tmp_path)
    remote = open_indexed(url, config)
    s3.delete("refused.bin")
    with pytest.raises(DataError, match=r"refused\.bin: is not there"):
        remote.fetch(np.array([0]), np.array([1]))
    with pytest.raises(DataError, match=r"other\.idx: no such file; copy both files"):
        open_indexed(f"{s3.url}/other", config)
    stored(local, s3, "refused")
    s3.order(refuse="HEAD")
    with pytest.raises(DataError, match="may not be read"):
        open_indexed(f"{s3.url}/refused2", config)
    s3.order()
    for path, told in (
        ("gs://bucket/x", r"pip install 'megads\[gcs\]'"),
        ("memory://x", "keeps no datasets"),
        ("s3://key:secret@bucket/x", "holds credentials"),
    ):
        with pytest.raises(ConfigError, match=told):
            DataConfig(train=[DatasetConfig(path)]).check()
    with pytest.raises(ConfigError, match=r"leave data\.stage_to out"):
        DataConfig(train=[DatasetConfig(url)], stage_to="/x").check()
    with pytest.raises(ConfigError, match="at least 16 blocks"):
        DataConfig(train=[DatasetConfig(url)], stream=StreamConfig(cache_gib=0.001)).check()


@pytest.mark.slow
def test_an_outage_of_the_store_is_waited_out_and_reported(local: IndexedDataset, s3: S3Server, tmp_path: Path) -> None:
    """Catches a run that fails when its store is unavailable for seconds, and one that never reports it."""
    url = stored(local, s3, "outage")
    remote = open_indexed(url, streaming(tmp_path, connections=1))
    given_up = open_indexed(url, streaming(tmp_path, retry_s=0.0))
    s3.order(fail=1.0)
    with pytest.raises(DataError, match="tried for 0 s"):
        given_up.fetch(np.array([0]), np.array([1]))
    remote.fetch_ahead(np.array([0]), np.array([1]))
    time.sleep(0.5)
    s3.order()
    remote.fetch(np.array([0]), np.array([1]))
    assert np.array_equal(remote.all_tokens[:5], local.all_tokens[:5])


def test_file_urls_stream_and_a_wrong_checksum_is_refused(local: IndexedDataset, tmp_path: Path) -> None:
    """Catches stores other than S3 that do not work, and an index that does not match the sidecar's checksum."""
    config = streaming(tmp_path)
    url = Path(local.prefix).absolute().as_uri()
    remote = open_indexed(url, config)
    assert np.array_equal(remote.all_tokens[: local.num_tokens], local.all_tokens[: local.num_tokens])
    sidecar = {
        "tokenizer_sha256": "0",
        "vocab_size": 9,
        "max_token_id": 8,
        "end_of_document_id": None,
        "documents": 1,
        "tokens": 1,
        "text_bytes": 1,
        "rejected_lines": 0,
        "rejected_reasons": {},
        "rejected_examples": [],
        "input_files": [],
        "format_version": 1,
        "idx_checksum": "0" * 16,
    }
    Path(f"{local.prefix}.json").write_text(json.dumps(sidecar))
    os.utime(next((tmp_path / "cache").rglob("current.json")), (1, 1))
    with pytest.raises(DataError, match=r"c\.idx: its XXH3 is"):
        open_indexed(url, config)


def test_a_response_shorter_than_asked_for_is_not_used(local: IndexedDataset, tmp_path: Path) -> None:
    """Catches a response shorter than the requested range: the block would be filled up with the bytes that follow."""
    config = streaming(tmp_path, retry_s=0.0)
    url = Path(local.prefix).absolute().as_uri()
    size = Path(f"{local.prefix}.bin").stat().st_size
    wrong = FileVersion(f"{url}.bin", size + 5000, "x")
    tokens = StreamedTokens(tmp_path / "cache" / "a" / "b" / "c", wrong, config, np.dtype(np.uint16))
    with pytest.raises(DataError, match="something wrote to it"):
        tokens.fetch(np.array([0]), np.array([tokens.size]))
