"""Object storage of a run: checkpoint.upload, and URLs in checkpoint.load and checkpoint.init_from.

`megads.tools.remote` implements it. A run that keeps everything on disk needs none: `OnDisk` takes its place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

from megads.checkpoint.config import fetched_folder
from megads.config.root import RootConfig
from megads.monitor.console import Console
from megads.runtime.optional_tools import require_tool
from megads.runtime.slurm import Allocation, SlurmJob
from megads.runtime.url import is_url


class Uploads(Protocol):
    """Uploads of a run's checkpoints while it trains."""

    def finish(self, exit_code: int, console: Console) -> None:
        """Waits for the upload of the last checkpoint; `exit_code` is that of the run."""
        ...


class ObjectStorage(Protocol):
    """What starting a run asks of object storage."""

    def prepare_checkpoints(self, config: RootConfig, asked_load: str, console: Console, job: SlurmJob | None) -> None:
        """Fetches the checkpoints that the start needs; `asked_load` is checkpoint.load as requested."""
        ...

    def restore_lost(self, config: RootConfig, console: Console) -> bool:
        """Restores the newest checkpoint if the run directory has no usable one; returns whether it did."""
        ...

    def uploading(
        self, config: RootConfig, allocation: Allocation | None = None
    ) -> AbstractContextManager[Uploads | None]:
        """Uploads new checkpoints during the block."""
        ...


class OnDisk:
    """Takes the place of object storage in a run whose checkpoints are only on disk."""

    def prepare_checkpoints(self, config: RootConfig, asked_load: str, console: Console, job: SlurmJob | None) -> None:
        """Does nothing."""

    def restore_lost(self, config: RootConfig, console: Console) -> bool:
        return False

    def uploading(
        self, config: RootConfig, allocation: Allocation | None = None
    ) -> AbstractContextManager[Uploads | None]:
        return nullcontext()


def object_storage(asked: RootConfig) -> ObjectStorage:
    """Returns `megads.tools.remote.run_storage` if a key of the config names a URL, else `OnDisk`.

    Args:
        asked: config as composed.

    Raises:
        ConfigError: a key names a URL, and the tool is not installed.
    """
    checkpoint = asked.checkpoint
    urls = {"upload": checkpoint.upload, "load": checkpoint.load, "init_from": checkpoint.init_from}
    for key, url in urls.items():
        if url is not None and is_url(url):
            return cast(ObjectStorage, require_tool("remote.run_storage", f"checkpoint.{key}={url}"))
    return OnDisk()


def with_local_load(config: RootConfig) -> RootConfig:
    """Returns the config with a URL in checkpoint.load replaced by the folder that it is fetched to.

    The folder is always the same for a URL.

    Args:
        config: config with run.dir set.
    """
    load = config.checkpoint.load
    if not is_url(load):
        return config
    local = fetched_folder(load, Path(str(config.run.dir)))
    return replace(config, checkpoint=replace(config.checkpoint, load=str(local)))
