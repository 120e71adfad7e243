"""What a run directory says of one of its steps: which samples it trained on, with which config, held to its hash."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megads.config import RootConfig, open_run_data
from megads.data.config import DatasetConfig, MixConfig
from megads.data.indexed.dataset import IntArray, idx_path
from megads.data.indexed.recorded import DataRecord, read_record, record_data
from megads.data.sampling.runs import TrainSource
from megads.data.sampling.sampler import batch_hash
from megads.errors import ConfigError, DataError
from megads.frozen_config import config_of_start, load_frozen
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE, METRICS_FILE


@dataclass(frozen=True)
class TrainedStep:
    """One step of a run, its data opened and found to be what was trained on.

    Attributes:
        line: of metrics.jsonl.
        config: of the start that trained it, the paths of its data as they are found from here.
        source: the run's samples.
        data_recorded: the tokens themselves were held to what the run recorded, not only the order of the samples.
    """

    line: dict[str, Any]
    config: RootConfig
    source: TrainSource
    data_recorded: bool

    @property
    def samples(self) -> IntArray:
        """int64 [global batch size], numbers of its samples in the run."""
        end = int(self.line["samples"])
        return np.arange(end - int(self.line["global_batch_size"]), end)


def open_step(run_dir: Path, step: int) -> TrainedStep:
    """Finds a step in a run directory and opens the data that it trained on.

    Args:
        run_dir: the run's folder.
        step: as metrics.jsonl counts.

    Raises:
        ConfigError: no such step, or the directory of no run.
        DataError: the data is gone, or is not what the step trained on.
    """
    line = _line_of(run_dir, step)
    config, digest = _config_of(run_dir, step)
    located = _located(config, run_dir)
    recorded = _require_same_content(run_dir, config, located)
    source, _ = open_run_data(located)
    found = TrainedStep(line, located, source, recorded)
    recomputed = batch_hash(source.dataset_samples(found.samples))
    if recomputed != line["batch_hash"]:
        reason = f"step {step} was trained by a start whose config ({digest[:8]}) was not kept and differs"
        if digest == "":
            reason = "its config.yaml is not that of the start that trained the step, or its data changed"
        raise DataError(
            f"{run_dir}: step {step} trained on samples of hash {line['batch_hash']}, the data and config of today "
            f"give {recomputed}: {reason}. What is shown would not be what was trained on"
        )
    return found


def _line_of(run_dir: Path, step: int) -> dict[str, Any]:
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"run = {run_dir}: has no {METRICS_FILE}: it is no run directory, or nothing was trained")
    first = last = None
    for line in read_json_lines(path):
        if "loss" not in line or "batch_hash" not in line:
            continue
        if line["step"] == step:
            return line
        first, last = first if first is not None else line["step"], line["step"]
    known = "no step" if last is None else f"steps {first} to {last}"
    raise ConfigError(f"step = {step}: {path} has {known}")


def _config_of(run_dir: Path, step: int) -> tuple[RootConfig, str]:
    """The config of the start that trained a step, else the last one; and the digest that it should have."""
    digest = ""
    for event in read_json_lines(run_dir / EVENTS_FILE):
        # A later start from before the step would have cut its line off and written it anew.
        if event.get("event") == "start" and event.get("step", step) < step:
            digest = str(event.get("config_digest", ""))
    config = config_of_start(run_dir, digest) if digest else None
    return config or load_frozen(run_dir / CONFIG_FILE, complete=False), digest


def _located(config: RootConfig, run_dir: Path) -> RootConfig:
    """Paths are relative to where the run was started: that is here, or the folder that holds runs/."""

    def find(path: str) -> str:
        beside = run_dir.resolve().parent.parent / path
        return str(beside) if not idx_path(path).exists() and idx_path(beside).exists() else path

    data = config.data
    valid: Any = data.valid
    if valid is not None:
        valid = find(valid) if isinstance(valid, str) else {name: find(path) for name, path in valid.items()}
    train: list[DatasetConfig] = [dataclasses.replace(item, path=find(item.path)) for item in data.train]
    history = [MixConfig(mix.from_sample, {find(path): w for path, w in mix.weights.items()}) for mix in data.history]
    # Validation shares are named after the paths, which may differ in their folders only.
    data = dataclasses.replace(data, train=train, valid=valid, history=history, stage_to=None)
    return dataclasses.replace(config, data=data)


def _require_same_content(run_dir: Path, config: RootConfig, located: RootConfig) -> bool:
    """Holds the datasets to what the run recorded of them; False where it recorded nothing.

    Raises:
        DataError: one is gone, damaged, or holds something else.
    """
    before = read_record(run_dir)
    if before is None:
        return False
    now = record_data(located.data)
    named = tuple(
        dataclasses.replace(record, path=name) for record, name in zip(now.datasets, config.data.paths, strict=True)
    )
    changes = before.changes(DataRecord(named))
    if changes:
        raise DataError(
            f"the data of {run_dir} is not what it was trained on: {'; '.join(changes)}. Put the data back to see what "
            "the step read"
        )
    return {record.path for record in named} <= {record.path for record in before.datasets}
