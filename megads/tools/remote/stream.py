"""Datasets at a URL: small files are copied to the node, tokens are fetched in blocks as needed.

`<cache>/<hash of the URL>/<hash of the versions>/<name>.idx` and the other files of that name are copies; the blocks of
`.bin` are in the same folder. Each process checks once whether the files in the store are still those that were copied;
of processes that start together on a node, one does.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megads.api import (
    Array,
    ConfigError,
    DataConfig,
    DataError,
    IndexedDataset,
    IntArray,
    atomic_writer,
    file_checksum,
    make_own,
    own_path,
    read_json,
    read_sidecar,
    reason_of,
)
from megads.data.config import StreamConfig
from megads.data.indexed.stream import StreamMeter
from megads.runtime.heartbeat import process_started_s
from megads.tools.remote.remote_files import (
    BlockCache,
    Bytes,
    CacheFolder,
    FileVersion,
    RemoteFiles,
    StreamCounters,
    VersionedFile,
)

TOKENS, INDEX = ".bin", ".idx"
_BESIDE = (".json", ".tokenizer.json", ".chat_template.jinja")
_GIB = 2**30
_COPIED_BYTES = 8 * 2**20
_STRETCH_BYTES = 4 * 2**20
"""Maximum number of bytes per request."""
_OPEN_BLOCKS = 64
_POLL_S = 0.005
_TRIES = 10
"""Attempts to read a block, before an error reports that blocks are evicted too fast."""


def cache_folder(config: StreamConfig) -> Path:
    """Creates the cache folder of remote data on this node, or accepts it; returns it.

    Raises:
        ConfigError: it cannot be created, or others can write to it.
    """
    given = config.cache_dir
    folder = own_path("streams") if given is None else Path(given)
    try:
        if given is None:
            return make_own(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A link of the user's own to another disk is fine.
        make_own(folder.resolve())
        return folder
    except OSError as error:
        raise ConfigError(
            f"data.stream.cache_dir = {folder}: cannot be used: {error.strerror}; give a folder of your own on a disk "
            "of the node"
        ) from error


def open_root(config: StreamConfig) -> CacheFolder:
    """Opens the cache folder of remote data on this node; raises ConfigError if it cannot be written to."""
    return CacheFolder(cache_folder(config), int(config.cache_gib * _GIB))


def copied_prefix(url: str, config: StreamConfig) -> Path:
    """See `megads.data.indexed.stream.DataStreaming`."""
    return _local_copy(url, config)[0]


def streamed_text(data: DataConfig) -> str:
    """See `megads.data.indexed.stream.DataStreaming`."""
    size = sum(_local_copy(url, data.stream)[1].num_bytes for url in data.urls)
    return (
        f" ({size / 1e9:,.2f} GB streamed from {len(data.urls)} URL{'s' if len(data.urls) > 1 else ''}, at most "
        f"{data.stream.cache_gib:g} GiB kept in {cache_folder(data.stream)})"
    )


def open_remote(url: str, config: StreamConfig) -> IndexedDataset:
    """See `megads.data.indexed.stream.DataStreaming`."""
    prefix, tokens = _local_copy(url, config)
    return IndexedDataset(prefix, name=url, open_tokens=lambda dtype: StreamedTokens(prefix, tokens, config, dtype))


def stream_meter(data: DataConfig) -> StreamMeter:
    """See `megads.data.indexed.stream.DataStreaming`."""
    return CacheMeter(open_root(data.stream))


class StreamedTokens:
    """The tokens of a remote dataset, sliced like an array [size].

    Slicing waits for missing blocks. `fetch_ahead` starts to fetch blocks in background threads.

    Args:
        prefix: prefix of the local copies; blocks are in the same folder.
        remote: token file, in the version to read.
        config: streaming settings.
        dtype: token dtype.

    Raises:
        ConfigError: the cache cannot be written to.
        DataError: the store's driver cannot be initialized.
    """

    def __init__(self, prefix: Path, remote: FileVersion, config: StreamConfig, dtype: np.dtype[Any]) -> None:
        self._dtype, self._config = dtype, config
        self.num_bytes, self.size = remote.num_bytes, remote.num_bytes // dtype.itemsize
        files = RemoteFiles(remote.url.removesuffix(TOKENS), config.connections, config.retry_s)
        self._remote = VersionedFile(files, TOKENS, remote)
        self.root = open_root(config)
        block_bytes = config.block_kib * 1024
        self._cache = BlockCache(self.root, prefix.parent, self.num_bytes, block_bytes)
        self._block_bytes = block_bytes
        self._pool = ThreadPoolExecutor(config.connections, thread_name_prefix="blocks")
        self._lock = threading.Lock()
        self._in_flight: dict[int, Future[None]] = {}
        self._open: OrderedDict[int, Bytes] = OrderedDict()

    def __getitem__(self, part: slice) -> Array:
        begin, end, step = part.indices(self.size)
        assert step == 1
        return self.read_bytes(begin * self._dtype.itemsize, end * self._dtype.itemsize).view(self._dtype)

    def read_bytes(self, begin: int, end: int) -> Bytes:
        """Returns bytes of the file, uint8 [end - begin].

        Raises:
            DataError: they cannot be read.
        """
        if end <= begin:
            return np.zeros(0, np.uint8)
        numbers = range(begin // self._block_bytes, (end - 1) // self._block_bytes + 1)
        parts = []
        for number in numbers:
            first = number * self._block_bytes
            parts.append(self._block(number)[max(begin - first, 0) : end - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def fetch_ahead(self, starts: IntArray, ends: IntArray) -> int:
        """Starts fetching the blocks of spans of tokens; returns the total size of these blocks, cached or not."""
        blocks = self._blocks(starts, ends)
        self._start_fetching([block for block in blocks if not self._cache.touch(block)])
        return sum(self._cache.size(block) for block in blocks)

    def fetch(self, starts: IntArray, ends: IntArray) -> None:
        """Waits until the blocks of spans of tokens are cached, and counts those that were not.

        Raises:
            DataError: they cannot be read.
        """
        blocks = self._blocks(starts, ends)
        missing = [block for block in blocks if not self._cache.touch(block)]
        begin_s = time.perf_counter()
        if missing:
            self._await(missing)
        waited_us = int(1e6 * (time.perf_counter() - begin_s)) if missing else 0
        self.root.count(hits=len(blocks) - len(missing), waits=len(missing), wait_us=waited_us)

    def _blocks(self, starts: IntArray, ends: IntArray) -> list[int]:
        """Returns the blocks of spans of tokens, without duplicates, in order."""
        filled = ends > starts
        width = self._dtype.itemsize
        first = starts[filled] * width // self._block_bytes
        last = (ends[filled] * width - 1) // self._block_bytes
        found = [first + step for step in range(int((last - first).max()) + 1)] if first.size else []
        inside = [some[some <= last] for some in found]
        return [int(block) for block in np.unique(np.concatenate(inside))] if inside else []

    def _block(self, block: int) -> Bytes:
        with self._lock:
            if (known := self._open.get(block)) is not None:
                self._open.move_to_end(block)
                return known
        for _ in range(_TRIES):
            content = self._cache.read(block)
            if content is None:
                self._await([block])
                continue
            with self._lock:
                self._open[block] = content
                if len(self._open) > _OPEN_BLOCKS:
                    self._open.popitem(last=False)
            return content
        raise ConfigError(
            f"data.stream.cache_dir = {self.root.folder}: blocks are evicted before they are read: raise "
            "data.stream.cache_gib, and let nothing else write there"
        )

    def _await(self, blocks: Sequence[int]) -> None:
        for future in self._start_fetching(blocks):
            future.result()

    def _start_fetching(self, blocks: Sequence[int]) -> list[Future[None]]:
        """Fetches blocks that are not being fetched yet, adjacent ones with one request; returns the futures to wait
        for."""
        with self._lock:
            new = [block for block in blocks if block not in self._in_flight]
            for stretch in _stretches(new, max(_STRETCH_BYTES // self._block_bytes, 1)):
                future = self._pool.submit(self._fetch, stretch)
                self._in_flight |= dict.fromkeys(stretch, future)
            return list({id(self._in_flight[block]): self._in_flight[block] for block in blocks}.values())

    def _fetch(self, blocks: Sequence[int]) -> None:
        """Fetches blocks, or waits until other processes of the node have."""
        left, retries = list(blocks), self._remote.retries
        try:
            while left:
                claimed = [block for block in left if self._cache.try_claim(block)]
                try:
                    absent = [block for block in claimed if not self._cache.touch(block)]
                    for stretch in _stretches(absent, len(blocks)):
                        self._download(stretch)
                finally:
                    self._cache.release(claimed)
                left = [block for block in left if block not in claimed and not self._cache.touch(block)]
                if left:
                    time.sleep(_POLL_S)
        finally:
            with self._lock:
                for block in blocks:
                    self._in_flight.pop(block, None)
            if (more := self._remote.retries - retries) > 0:
                self.root.count(retries=more)

    def _download(self, blocks: Sequence[int]) -> None:
        begin = blocks[0] * self._block_bytes
        end = blocks[-1] * self._block_bytes + self._cache.size(blocks[-1])
        content = self._remote.read(begin, end)
        for block in blocks:
            first = block * self._block_bytes - begin
            self._cache.put(block, content[first : first + self._cache.size(block)])
        self.root.count(requests=1, fetched_bytes=end - begin)


class CacheMeter(StreamMeter):
    """Reports how much remote data the processes of this node have read, for metrics and events.

    Args:
        root: cache folder of this node.
    """

    def __init__(self, root: CacheFolder) -> None:
        self._root = root
        self._first = self._last = root.counters()

    def since_last(self) -> dict[str, float]:
        before, self._last = self._last, self._root.counters()
        return self._counts(before)

    def total(self) -> dict[str, float]:
        return self._counts(self._first)

    def _counts(self, before: StreamCounters) -> dict[str, float]:
        found = asdict(self._root.counters().since(before))
        wait_s = found.pop("wait_us") / 1e6
        return {f"stream_{name}": value for name, value in found.items()} | {"stream_wait_s": wait_s}


def _stretches(blocks: Sequence[int], most: int) -> Iterator[list[int]]:
    """Splits block numbers into runs of consecutive numbers of bounded length."""
    stretch: list[int] = []
    for block in blocks:
        if stretch and (block != stretch[-1] + 1 or len(stretch) == most):
            yield stretch
            stretch = []
        stretch.append(block)
    if stretch:
        yield stretch


def _local_copy(url: str, config: StreamConfig) -> tuple[Path, FileVersion]:
    """Copies the files beside the tokens unless that was done before; returns their prefix, and the token file."""
    home = cache_folder(config) / hashlib.sha256(url.encode()).hexdigest()[:16]
    current = home / "current.json"
    try:
        make_own(home)
        with _locked(home / "lock"):
            known = _existing_copy(current)
            if known is None or current.stat().st_mtime <= process_started_s():
                known = _updated_copy(url, home, config, known)
                with atomic_writer(current) as file:
                    file.write(json.dumps(known, indent=1).encode())
    except OSError as error:
        raise ConfigError(
            f"data.stream.cache_dir = {home.parent}: {url} cannot be kept there: {reason_of(error)}; give a folder on "
            "a disk of the node"
        ) from error
    return home / known["version"] / known["name"], FileVersion(**known["files"][TOKENS])


def _existing_copy(current: Path) -> dict[str, Any] | None:
    """Returns the description of the existing copies; None if there are none or they are incomplete."""
    try:
        found: dict[str, Any] = read_json(current)
        prefix = current.parent / found["version"] / found["name"]
        copies = (Path(f"{prefix}{ending}") for ending in found["files"] if ending != TOKENS)
        whole = all(
            path.stat().st_size == found["files"][path.name.removeprefix(prefix.name)]["num_bytes"] for path in copies
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if whole else None


def _updated_copy(url: str, home: Path, config: StreamConfig, known: dict[str, Any] | None) -> dict[str, Any]:
    """Compares the files in the store with the existing copies, and copies them again if they changed."""
    files = RemoteFiles(url, config.connections, config.retry_s)
    endings = (INDEX, TOKENS, *_BESIDE)
    with ThreadPoolExecutor(len(endings)) as pool:
        found = {ending: file for ending, file in zip(endings, pool.map(files.find, endings), strict=True) if file}
    for ending in (INDEX, TOKENS):
        if ending not in found:
            raise DataError(
                f"{url}{ending}: no such file; copy both files of the dataset there, or correct the URL: it is that of "
                "<prefix>.bin and <prefix>.idx without the endings"
            )
    described = {ending: asdict(file) for ending, file in found.items()}
    version = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    if known is not None and known["version"] == version:
        return known
    for old in home.iterdir():
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
    name = url.rpartition("/")[2]
    prefix = home / version / name
    prefix.parent.mkdir(parents=True)
    for ending, file in found.items():
        if ending != TOKENS:
            _copy(VersionedFile(files, ending, file), Path(f"{prefix}{ending}"), config.connections)
    _verify_index(url, prefix)
    return {"url": url, "name": name, "version": version, "files": described}


def _copy(source: VersionedFile, target: Path, connections: int) -> None:
    size = source.expected.num_bytes
    begins = range(0, size, _COPIED_BYTES)
    with atomic_writer(target) as file, ThreadPoolExecutor(connections) as pool:
        # Few pieces at a time, because an index may be larger than memory.
        for some in range(0, len(begins), connections):
            pieces = begins[some : some + connections]
            for piece in pool.map(lambda begin: source.read(begin, min(begin + _COPIED_BYTES, size)), pieces):
                file.write(piece.data)


def _verify_index(url: str, prefix: Path) -> None:
    """Compares the copy of an index with the checksum in its sidecar, if there is one."""
    sidecar = read_sidecar(prefix)
    if sidecar is None or sidecar.idx_checksum is None:
        return
    if (found := file_checksum(Path(f"{prefix}{INDEX}"))) != sidecar.idx_checksum:
        raise DataError(
            f"{url}{INDEX}: its XXH3 is {found}, {url}.json says {sidecar.idx_checksum}: they do not belong together, "
            "or one is damaged; copy the dataset there again"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
