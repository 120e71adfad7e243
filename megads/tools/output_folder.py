"""Folders that commands make: whole or not at all, on the disk, and never over somebody else's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megads.errors import CheckpointError, ConfigError
from megads.runtime.files import parse_json, read_regular, sync_directory
from megads.runtime.run_dir import EVENTS_FILE

_ORIGIN_FILE = "megads.json"


def require_free(output: Path, overwrite: bool, made_by: str) -> None:
    """Refuses a folder that is there, but for an earlier one of the same command that may be replaced.

    Args:
        output: the folder.
        overwrite: it may be replaced.
        made_by: the command.

    Raises:
        ConfigError: it is taken.
    """
    if not output.exists():
        return
    if not overwrite:
        raise ConfigError(f"output = {output}: exists; choose another folder or give overwrite=true")
    try:
        found = parse_json(read_regular(output / _ORIGIN_FILE))
    except (OSError, ValueError, RecursionError):
        found = None
    # A run that was trained in an imported folder is more than that folder. Every start writes events; the config may
    # have been copied along with a checkpoint.
    if found != {"made_by": made_by} or (output / EVENTS_FILE).exists():
        raise ConfigError(f"output = {output}: is none of {made_by}, and overwrite=true replaces no other folder")


def write_origin(folder: Path, made_by: str) -> None:
    """Notes which command made a folder, which that command may then replace."""
    (folder / _ORIGIN_FILE).write_text(json.dumps({"made_by": made_by}) + "\n", encoding="utf-8")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Gives a folder to write to, which then appears whole in the place of what was there, or not at all.

    Args:
        output: where it goes.

    Raises:
        CheckpointError: it cannot be written.
    """
    partial, replaced = (output.with_name(f".{output.name}.{suffix}") for suffix in ("partial", "replaced"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                _bring_to_disk(path)
        shutil.rmtree(replaced, ignore_errors=True)
        if output.exists():
            output.rename(replaced)
        try:
            partial.rename(output)
        except OSError:
            replaced.rename(output)
            raise
        sync_directory(output.parent)
    except OSError as error:
        raise CheckpointError(f"output = {output}: cannot be written: {error.strerror}") from error
    finally:
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)


def _bring_to_disk(path: Path) -> None:
    """Waits for what was written before; after all files are written, for the disk is busy while they are made."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def require_room(output: Path, nbytes: int) -> None:
    """Raises CheckpointError where a folder's disk has no room for so many bytes."""
    parent = next(folder for folder in (output.absolute().parent, *output.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise CheckpointError(f"output = {output}: it takes {nbytes:,} bytes, {parent} has {free:,} free")
