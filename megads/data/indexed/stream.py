"""Opens datasets on disk, and those at a URL, which `megads.tools.remote` streams.

A run whose data is on disk needs no tool.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from megads.data.config import DataConfig, StreamConfig
from megads.data.indexed.dataset import IndexedDataset
from megads.runtime.optional_tools import require_tool
from megads.runtime.url import is_url


class StreamMeter:
    """Counts what the processes of this node read from remote data, for metrics and events: nothing, if all is on disk;
    the tool's `CacheMeter` overrides it."""

    def since_last(self) -> dict[str, float]:
        """Returns the counts since the last call, by keys of metrics.jsonl."""
        return {}

    def total(self) -> dict[str, float]:
        """Returns the counts since this meter was made, as `since_last`."""
        return {}


class DataStreaming(Protocol):
    """What reading datasets at URLs asks of `megads.tools.remote`. Each raises ConfigError if the node's cache cannot
    be written to, and DataError if there is no dataset at a URL or it cannot be read."""

    def open_remote(self, url: str, config: StreamConfig) -> IndexedDataset:
        """Opens a dataset whose tokens are fetched when they are read."""
        ...

    def copied_prefix(self, url: str, config: StreamConfig) -> Path:
        """Copies the files beside the tokens to this node; returns the prefix of the copies."""
        ...

    def streamed_text(self, data: DataConfig) -> str:
        """Describes how much data a run streams, and where it is cached."""
        ...

    def stream_meter(self, data: DataConfig) -> StreamMeter:
        """Returns a meter of this node's cache."""
        ...


def _streaming(url: str) -> DataStreaming:
    return cast(DataStreaming, require_tool("remote.stream", f"the dataset {url}"))


def open_indexed(
    path: str, config: StreamConfig, holds_the_same: Callable[[Path], bool] | None = None
) -> IndexedDataset:
    """Opens a local or remote dataset.

    Args:
        path: prefix or URL of the dataset, without file extensions.
        config: streaming settings.
        holds_the_same: see `IndexedDataset`; not used for remote datasets, which are read in the version that was
            opened.

    Raises:
        ConfigError: the cache cannot be written to, or `megads.tools.remote` is not installed.
        DataError: the dataset is missing or damaged, or cannot be read.
    """
    return _streaming(path).open_remote(path, config) if is_url(path) else IndexedDataset(path, holds_the_same)


def local_prefix(path: str, config: StreamConfig) -> str:
    """Returns the prefix of the files beside a dataset's tokens: of a URL's copies on this node, or the path itself;
    errors as in `open_indexed`."""
    return str(_streaming(path).copied_prefix(path, config)) if is_url(path) else path


def streamed_text(data: DataConfig) -> str:
    """Describes how much data a run streams, and where it is cached; empty if all data is local; errors as in
    `open_indexed`."""
    return _streaming(data.urls[0]).streamed_text(data) if data.urls else ""


def stream_meter(data: DataConfig) -> StreamMeter:
    """Returns the meter of a run's remote data; errors as in `open_indexed`."""
    return _streaming(data.urls[0]).stream_meter(data) if data.urls else StreamMeter()
