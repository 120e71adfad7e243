"""The run directory: names of its files, creation and lookup."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import yaml

from megads.errors import ConfigError
from megads.runtime import environment
from megads.runtime.files import read_regular, require_bounded_yaml
from megads.runtime.own_folder import own_path

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.yaml"
DATA_FILE = "data_record.json"
TOKENIZER_FILE = "tokenizer.json"
HUGGING_FACE_FOLDER = "hugging_face"
"""Folder with the files of the Hugging Face model that the run's weights come from, except tokenizer.json and the
weights: settings of the tokenizer and of generation, the chat template."""
STARTS_FOLDER = "configs"
"""Folder with the config and the data record of every start."""


def recorded_config(path: Path) -> str:
    """Reads the text of a config that a start has written, which contains plain values only.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file was not written by a start: it has aliases, of which a few lines can expand to gigabytes,
            or ${...}, which could read the environment of this process.
    """
    text = read_regular(path).decode()
    require_bounded_yaml(text)
    if "${" in text:
        raise ValueError("${...} is never resolved in a file of a run")
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("aliases are never resolved in a file of a run")
    return text


def recorded_config_path(run_dir: Path, digest: str) -> Path:
    """Returns the file with the config of one start, by its sha256; config.yaml is that of the last start."""
    return run_dir / STARTS_FOLDER / f"{digest[:16]}.yaml"


def recorded_data_path(run_dir: Path, digest: str) -> Path:
    """Returns the file with the data record of one start, by its digest; data_record.json is that of the last start."""
    return run_dir / STARTS_FOLDER / f"data_{digest[:16]}.json"


def kept_tokenizer_path(run_dir: Path, sha256: str) -> Path:
    """Returns the file that keeps an earlier tokenizer.json of a run whose tokenizer was changed."""
    return run_dir / f"tokenizer.{sha256[:16]}.json"


def rank_log_path(run_dir: Path, rank: int) -> Path:
    """Returns the log file of a rank."""
    return run_dir / "logs" / f"rank_{rank:05d}.log"


def slowdowns_path(run_dir: Path) -> Path:
    """Returns the file with the slowdown of each rank relative to its peers, in the steps that were timed."""
    return run_dir / "slowdowns.jsonl"


def agent_log_path(run_dir: Path, node: int) -> Path:
    """Returns the log file of a node's agent."""
    return run_dir / "logs" / f"agent_{node:05d}.log"


def srun_log_path(run_dir: Path) -> Path:
    """Returns the log file of srun."""
    return run_dir / "logs" / "srun.log"


def tracker_log_path(run_dir: Path) -> Path:
    """Returns the log file of the tracker process."""
    return run_dir / "logs" / "tracker.log"


def uploader_log_path(run_dir: Path) -> Path:
    """Returns the log file of the process that uploads checkpoints."""
    return run_dir / "logs" / "uploader.log"


def upload_status_path(run_dir: Path) -> Path:
    """Returns the file with the progress of the process that uploads checkpoints."""
    return run_dir / "logs" / "upload.json"


def failure_path(run_dir: Path, rank: int, start: int | None = None) -> Path:
    """Returns the file in which a rank of a start (given by its lease number) records why it failed.

    The start is in the name because an orphaned rank of an earlier start may fail while a later one runs.
    """
    return run_dir / "logs" / f"failure_{_start(start)}{rank:05d}.json"


def evidence_path(run_dir: Path, start: int | None, name: str) -> Path:
    """Returns the folder of one collection of evidence by a start."""
    return run_dir / "evidence" / f"{_start(start)}{name}"


def exit_path(run_dir: Path, rank: int, start: int | None = None) -> Path:
    """Returns the file in which a rank of a start that ended by itself records its exit code."""
    return run_dir / "logs" / f"exit_{_start(start)}{rank:05d}.json"


def spare_path(path: Path) -> Path:
    """Returns where a rank writes a record if the run directory's disk is full: in its node's temporary folder."""
    run = hashlib.sha256(str(path.parent.absolute()).encode()).hexdigest()[:16]
    return own_path("records", run) / path.name


def _start(number: int | None) -> str:
    return "" if number is None else f"start_{number}_"


def create(run_dir: Path) -> None:
    """Creates a run directory if it does not exist, and checks that it is writable.

    Raises:
        ConfigError: the directory cannot be created or is not writable.
    """
    probe = run_dir / "logs" / f".writable.{environment.node_name()}.{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(run_dir, str(error.strerror)) from error


def refuse_unwritable(run_dir: Path) -> None:
    """Refuses a run directory that cannot be created or written to, without creating anything.

    Raises:
        ConfigError: it, or its nearest existing parent, is not a folder or not writable.
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
    """Whether a folder is a run directory: it contains config and events, or the lease and the logs of a start."""
    recorded = (folder / CONFIG_FILE).is_file() and (folder / EVENTS_FILE).is_file()
    return recorded or ((folder / "lease").is_dir() and (folder / "logs").is_dir())


def find_run(name: str) -> Path:
    """Returns the directory of a run, given as a path or as the id of a run in runs/.

    Raises:
        ConfigError: neither exists; the message lists existing runs.
    """
    given, by_id = Path(name), Path("runs") / name
    if given.is_dir():
        return given
    if by_id.is_dir():
        return by_id
    known = sorted(path.parent for path in Path("runs").glob("*/config.yaml"))
    hint = f"; runs here: {', '.join(map(str, known[:10]))}" if known else "; megads train prints the id"
    raise ConfigError(f"run = {name}: there is no such run directory, and no run of that id in runs/{hint}")
