"""The run directory: its files' names, and its making."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from pathlib import Path

import yaml

from megads.errors import ConfigError
from megads.runtime import environment
from megads.runtime.files import read_regular, require_bounded_yaml

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.yaml"
DATA_FILE = "data_record.json"
TOKENIZER_FILE = "tokenizer.json"
STARTS_FOLDER = "configs"
"""Keeps the config of every start, and what its data held."""


def recorded_config(path: Path) -> str:
    """The text of a config that a start has written: plain values, which are no program for whoever reads them.

    Raises:
        OSError: it cannot be read.
        ValueError: something else has written it: an alias, of which a few lines make gigabytes, or ${...}, which takes
            a reader's environment for a value.
    """
    text = read_regular(path).decode()
    require_bounded_yaml(text)
    if "${" in text:
        raise ValueError("${...} is never resolved in a file of a run")
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("aliases are never resolved in a file of a run")
    return text


def recorded_config_path(run_dir: Path, digest: str) -> Path:
    """Returns the file that keeps the config of one start by its sha256; config.yaml is that of the last one only."""
    return run_dir / STARTS_FOLDER / f"{digest[:16]}.yaml"


def recorded_data_path(run_dir: Path, digest: str) -> Path:
    """Returns the file that keeps what the data of one start held; data_record.json is that of the last one only."""
    return run_dir / STARTS_FOLDER / f"data_{digest[:16]}.json"


def kept_tokenizer_path(run_dir: Path, sha256: str) -> Path:
    """Returns the file that keeps a tokenizer that tokenizer.json held before the run was told to take another one."""
    return run_dir / f"tokenizer.{sha256[:16]}.json"


def rank_log_path(run_dir: Path, rank: int) -> Path:
    """Returns the file that holds everything a rank prints."""
    return run_dir / "logs" / f"rank_{rank:05d}.log"


def slowdowns_path(run_dir: Path) -> Path:
    """Returns the file that holds how much longer than its peers each rank computed, in the steps that were timed."""
    return run_dir / "slowdowns.jsonl"


def agent_log_path(run_dir: Path, node: int) -> Path:
    """Returns the file that holds everything that the agent of a node prints."""
    return run_dir / "logs" / f"agent_{node:05d}.log"


def srun_log_path(run_dir: Path) -> Path:
    """Returns the file that holds everything that srun prints."""
    return run_dir / "logs" / "srun.log"


def tracker_log_path(run_dir: Path) -> Path:
    """Returns the file that holds everything the tracker process prints."""
    return run_dir / "logs" / "tracker.log"


def uploader_log_path(run_dir: Path) -> Path:
    """Returns the file that holds everything the process that uploads checkpoints prints."""
    return run_dir / "logs" / "uploader.log"


def upload_status_path(run_dir: Path) -> Path:
    """Returns the file in which that process says how far it is."""
    return run_dir / "logs" / "upload.json"


def failure_path(run_dir: Path, rank: int, start: int | None = None) -> Path:
    """Returns the file in which a rank of a start (its lease's number) says why it failed.

    An orphan of an earlier start may fail while a later one runs, and must not be taken for its namesake there.
    """
    return run_dir / "logs" / f"failure_{_start(start)}{rank:05d}.json"


def evidence_path(run_dir: Path, start: int | None, name: str) -> Path:
    """Returns the folder of evidence that one start collected at one time."""
    return run_dir / "evidence" / f"{_start(start)}{name}"


def exit_path(run_dir: Path, rank: int, start: int | None = None) -> Path:
    """Returns the file in which a rank of a start that ended by itself leaves its exit code."""
    return run_dir / "logs" / f"exit_{_start(start)}{rank:05d}.json"


def spare_path(path: Path) -> Path:
    """Where a rank leaves a record that the run's own disk does not take: in its node's folder of temporary files."""
    run = hashlib.sha256(str(path.parent.absolute()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"megads-records-{os.getuid()}-{run}" / path.name


def _start(number: int | None) -> str:
    return "" if number is None else f"start_{number}_"


def create(run_dir: Path) -> None:
    """Creates a run directory, or finds that it can be written to.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    probe = run_dir / "logs" / f".writable.{environment.node_name()}.{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(run_dir, str(error.strerror)) from error


def refuse_unwritable(run_dir: Path) -> None:
    """Refuses a run directory that cannot be made or written to, as far as that shows without making anything.

    Raises:
        ConfigError: it, or the folder that it would be made in, is no folder or not writable.
    """
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not there.is_dir():
        raise _unwritable(run_dir, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(run_dir, os.strerror(errno.EACCES))


def _unwritable(run_dir: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the run directory {run_dir} cannot be written to ({reason}): choose another with run.dir=<path>, or make it "
        "writable"
    )


def is_run_dir(folder: Path) -> bool:
    """Whether a folder is a run's: it holds its config and its events, or the lease and the logs of a start."""
    recorded = (folder / CONFIG_FILE).is_file() and (folder / EVENTS_FILE).is_file()
    return recorded or ((folder / "lease").is_dir() and (folder / "logs").is_dir())


def find_run(name: str) -> Path:
    """The directory of a run, given itself or by the id of a run in runs/.

    Raises:
        ConfigError: neither is there; names the runs that are.
    """
    given, by_id = Path(name), Path("runs") / name
    if given.is_dir():
        return given
    if by_id.is_dir():
        return by_id
    known = sorted(path.parent for path in Path("runs").glob("*/config.yaml"))
    hint = f"; runs here: {', '.join(map(str, known[:10]))}" if known else ", as megads train names it at its start"
    raise ConfigError(f"run = {name}: there is no such run directory, and no run of that id in runs/{hint}")
