"""Output folders of commands: written atomically, synced to disk, and replaced only by the same command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megads.api import EVENTS_FILE, CheckpointError, ConfigError, parse_json, read_regular, sync_directory

_ORIGIN_FILE = "megads.json"


def require_replaceable(output: Path, overwrite: bool, made_by: str) -> None:
    """Raises if a folder exists, unless the same command created it and it may be replaced.

    Args:
        output: the folder.
        overwrite: whether it may be replaced.
        made_by: name of the command.

    Raises:
        ConfigError: the folder exists and may not be replaced.
    """
    if not output.exists():
        return
    if not overwrite:
        raise ConfigError(f"output = {output}: exists; choose another folder or give overwrite=true")
    try:
        found = parse_json(read_regular(output / _ORIGIN_FILE))
    except (OSError, ValueError, RecursionError):
        found = None
    # A run may have been trained in an imported folder. Events show that, as every start writes them; the config does
    # not, as it may have been copied with a checkpoint.
    if found != {"made_by": made_by} or (output / EVENTS_FILE).exists():
        raise ConfigError(
            f"output = {output}: was not created by {made_by}; overwrite=true replaces only its own folders"
        )


def write_origin(folder: Path, made_by: str) -> None:
    """Records which command created a folder, so that the command may replace it later."""
    (folder / _ORIGIN_FILE).write_text(json.dumps({"made_by": made_by}) + "\n", encoding="utf-8")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yields a temporary folder that atomically replaces `output` at the end, or is removed on an error.

    Args:
        output: path of the folder.

    Raises:
        CheckpointError: the folder cannot be written.
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
    """Calls fsync on a file; done after all files are written, because the disk is busy while they are."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def require_free_space(output: Path, nbytes: int) -> None:
    """Raises CheckpointError if the disk of a folder has less free space than `nbytes`."""
    parent = next(folder for folder in (output.absolute().parent, *output.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise CheckpointError(f"output = {output}: needs {nbytes:,} bytes, {parent} has {free:,} free")
