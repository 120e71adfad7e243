"""sweep.yaml: what a sweep was asked, written before its first point and compared when it goes on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from megads.errors import ConfigError
from megads.runtime.files import atomic_writer, read_regular, require_bounded_yaml
from megads.tools.sweep.config import Direction, SweepConfig
from megads.tools.sweep.search import describe
from megads.tools.sweep.space import Space

SWEEP_FILE = "sweep.yaml"
_MAY_CHANGE = (
    "trials", "parallel", "launcher", "point_limit_s", "sbatch", "sbatch_options", "poll_s", "retry_failed", "name",
    "dir", "repeat_best", "repeats",
)  # fmt: skip
"""Settings that a sweep may go on with in another value: they decide how much of it is done and where."""


@dataclass(frozen=True)
class SweepRecord:
    """What was asked.

    Attributes:
        name: of the sweep.
        fixed: overrides of every point.
        space: what is searched, in words.
        settings: of the sweep.
    """

    name: str
    fixed: tuple[str, ...]
    space: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def direction(self) -> Direction:
        """What is best."""
        return Direction(self.settings["direction"])

    @property
    def objective_name(self) -> str:
        """The objective as a heading."""
        return str(self.settings["objective"] or "loss")


def make_record(name: str, fixed: Sequence[str], space: Space, config: SweepConfig) -> SweepRecord:
    """Names a sweep after what is asked, so that the same command goes on with the same sweep.

    Args:
        name: first part of a derived name: the experiment's, else the model's.
        fixed: overrides of every point.
        space: what is searched.
        config: the sweep's settings.
    """
    settings = json.loads(json.dumps(asdict(config)))
    record = SweepRecord(config.name or name, tuple(fixed), describe(space), settings)
    if config.name is not None:
        return record
    digest = hashlib.sha256(json.dumps(_identity(record), sort_keys=True).encode()).hexdigest()
    return SweepRecord(f"{name}-{digest[:8]}", record.fixed, record.space, record.settings)


def _identity(record: SweepRecord) -> dict[str, Any]:
    settings = {key: value for key, value in record.settings.items() if key not in _MAY_CHANGE}
    return {"fixed": sorted(record.fixed), "space": dict(record.space), "settings": settings}


def write_record(folder: Path, record: SweepRecord) -> None:
    """Writes sweep.yaml.

    Raises:
        ConfigError: the folder holds another sweep, or cannot be written to.
    """
    try:
        before = read_record(folder)
    except FileNotFoundError:
        before = record
    was, now = _identity(before), _identity(record)
    if was != now:
        part = next(key for key in was if was[key] != now[key])
        raise ConfigError(
            f"{folder} holds another sweep: its {part} is {was[part]}, and now it would be {now[part]}; give this one "
            "another sweep.name or sweep.dir"
        )
    try:
        with atomic_writer(folder / SWEEP_FILE) as file:
            file.write(yaml.safe_dump(asdict(record) | {"fixed": list(record.fixed)}, sort_keys=False).encode())
    except OSError as error:
        raise ConfigError(f"the sweep's folder {folder} cannot be written to ({error.strerror})") from error


def read_record(folder: Path) -> SweepRecord:
    """Reads sweep.yaml.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it cannot be read.
    """
    text = read_regular(folder / SWEEP_FILE)
    try:
        require_bounded_yaml(text.decode())
        content = yaml.safe_load(text)
        return SweepRecord(content["name"], tuple(content["fixed"]), content["space"], content["settings"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / SWEEP_FILE} is no record of a sweep: {error}") from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Creates a sweep's folder and keeps a second command out of it; the kernel lets go when the process dies.

    Raises:
        ConfigError: it cannot be created, or a live sweep holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"the sweep's folder {folder} cannot be written to ({error.strerror}): choose another with sweep.dir=<path>"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"the sweep {folder} is in progress in another process: wait for it, or give this one another "
                "sweep.name"
            ) from None
        yield
    finally:
        os.close(descriptor)
