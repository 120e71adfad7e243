"""The plan of a coordinated evaluation: its checkpoints and units, with their predicted costs."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megads.api import (
    MANIFEST_FILE,
    CheckpointError,
    CheckpointHandle,
    ConfigError,
    atomic_writer,
    decode,
    encode,
    list_checkpoints,
    model_config_of,
    read_json_lines,
    read_manifest,
    read_regular,
)
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.harness_tasks import LoadedTasks, documents_digest
from megads.tools.evaluate.job import require_tokenizer_of
from megads.tools.evaluate.packing import (
    LoadCosts,
    MeasuredTime,
    TaskCost,
    WorkUnit,
    predict_metric_s,
    predict_s,
    split,
)
from megads.tools.generate import checkpoint_tokenizer, run_path

FOLDER, TIMES_FILE, PLAN_FILE = "evaluation", "times.jsonl", "plan.json"
_ASSUMED = LoadCosts(start_s=10.0, stage_s=5.0, load_s=0.5)
"""Load costs of a node if none were measured."""


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A checkpoint to evaluate.

    Attributes:
        id: readable name, unique in the plan.
        run: name of its run.
        folder: checkpoint folder.
        digest: digest of its manifest.
        step: step at which it was saved.
        parameters: number of parameters of the model.
        output: folder of its results.
    """

    id: str
    run: str
    folder: Path
    digest: str
    step: int
    parameters: int
    output: Path


@dataclass(frozen=True)
class EvaluationPlan:
    """Plan that the coordinator gives to its workers.

    Attributes:
        config: config of the user.
        checkpoints: checkpoints in order.
        units: units in the order of checkpoints and tasks.
        costs: costs of loading a checkpoint.
        times: file of measured times.
    """

    config: EvaluateConfig
    checkpoints: tuple[PlannedCheckpoint, ...]
    units: tuple[WorkUnit, ...]
    costs: LoadCosts
    times: Path

    def checkpoint(self, name: str) -> PlannedCheckpoint:
        """The checkpoint with an id."""
        return next(one for one in self.checkpoints if one.id == name)

    def write(self, folder: Path) -> None:
        """Writes the plan for the workers."""
        with atomic_writer(folder / PLAN_FILE) as file:
            file.write(encode(self, EvaluationPlan))

    @classmethod
    def read(cls, folder: Path) -> EvaluationPlan:
        """Reads the output of `write`."""
        plan: EvaluationPlan = decode(read_regular(folder / PLAN_FILE), EvaluationPlan, 0)
        return plan


def evaluation_folder(config: EvaluateConfig) -> Path:
    """Folder of files about all checkpoints: `output`, or the evaluation folder of the first run."""
    if config.output is not None:
        return Path(config.output).absolute()
    folder = run_path(config.runs[0]).absolute()
    run_dir = folder.parent.parent if (folder / MANIFEST_FILE).is_file() else folder
    return run_dir / FOLDER


def find_checkpoints(config: EvaluateConfig) -> list[PlannedCheckpoint]:
    """Finds the checkpoints that the config selects.

    Raises:
        CheckpointError: a checkpoint does not exist, or its manifest is damaged.
        DataError: a tokenizer is missing or belongs to another model.
        ConfigError: `checkpoints` is invalid, or a checkpoint is selected twice.
    """
    found: list[PlannedCheckpoint] = []
    for given in config.runs:
        folder = run_path(given).absolute()
        alone = (folder / MANIFEST_FILE).is_file()
        run_dir = folder.parent.parent if alone else folder
        for chosen in [folder] if alone else _chosen(folder, config.checkpoints):
            handle = CheckpointHandle(chosen, read_manifest(chosen))
            require_tokenizer_of(model_config_of(handle), checkpoint_tokenizer(handle, config.tokenizer))
            name = f"{run_dir.name}/{chosen.name}" if len(config.runs) > 1 else chosen.name
            output = run_dir / FOLDER / chosen.name if config.output is None else evaluation_folder(config) / name
            weights = (tensor for key, tensor in handle.manifest.tensors.items() if key.startswith("weight/"))
            parameters, digest = sum(math.prod(tensor.shape) for tensor in weights), handle.manifest.digest()
            found.append(
                PlannedCheckpoint(name, run_dir.name, chosen, digest, handle.state["step"], parameters, output)
            )
    names = [one.id for one in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"run = {config.run}: {', '.join(sorted(twice))} would be evaluated twice")
    if not found:
        raise ConfigError(f"checkpoints = {config.checkpoints}: want all, last:<n>, or steps such as [100,200]")
    return found


def _chosen(run_dir: Path, wanted: object) -> list[Path]:
    """Selected checkpoint folders of a run: all, last:<n>, or a list of steps; None is the last one."""
    there = list_checkpoints(run_dir)
    if not there:
        raise CheckpointError(f"{run_dir} holds no checkpoint: checkpoints/step_* is empty")
    if wanted is None or isinstance(wanted, str):
        last = re.fullmatch(r"last:([1-9]\d*)", wanted or "last:1")
        if last:
            return list(there.values())[-int(last[1]) :]
        if wanted == "all":
            return list(there.values())
    found = []
    for one in wanted if isinstance(wanted, list) else [wanted]:
        number = re.fullmatch(r"(?:step_)?(\d+)", str(one))
        if number is None:
            raise ConfigError(f"checkpoints = {wanted}: want all, last:<n>, or steps such as [100,200]")
        if int(number[1]) not in there:
            raise CheckpointError(
                f"checkpoints = {wanted}: {run_dir} has no step {number[1]}; it has {', '.join(map(str, there))}"
            )
        found.append(there[int(number[1])])
    return list(dict.fromkeys(found))


def plan_digest(config: EvaluateConfig, checkpoints: Sequence[PlannedCheckpoint], tasks: LoadedTasks) -> str:
    """Digest of everything that determines the results and the batches of requests."""
    of_tasks = []
    for name, task in tasks.tasks.items():
        # The location of the YAML file does not matter.
        metadata = {**(task.dump_config().get("metadata") or {}), "config_source": ""}
        documents = documents_digest(task, config.limit)
        of_tasks.append((name, {**task.dump_config(), "metadata": metadata}, documents))
    keys = ("limit", "num_fewshot", "batch_size", "tokenizer", "precision", "bootstrap_iters", "tasks")
    about = [[(one.id, one.digest) for one in checkpoints], of_tasks, {key: getattr(config, key) for key in keys}]
    # Functions of a task's YAML file are printed with their addresses, which vary.
    text = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(about, default=str))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(
    config: EvaluateConfig,
    checkpoints: Sequence[PlannedCheckpoint],
    tasks: LoadedTasks,
    workers: int,
    device: str,
    known_parts: dict[tuple[str, str], int],
) -> EvaluationPlan:
    """Predicts the cost of the tasks and splits them into units.

    Args:
        config: config of the user.
        checkpoints: checkpoints to evaluate.
        tasks: loaded tasks.
        workers: number of model workers on all nodes.
        device: cpu or cuda; selects the measured times.
        known_parts: number of parts by checkpoint and task, for tasks with completed parts of an earlier start.
    """
    times = evaluation_folder(config) / TIMES_FILE
    history, costs = read_times(times, device)
    priced = []
    for checkpoint in checkpoints:
        for name, task in tasks.tasks.items():
            documents = min(len(task.eval_docs), config.limit or len(task.eval_docs))
            fewshot = int(task.get_config("num_fewshot") or 0)
            cost_s = predict_s(name, task.OUTPUT_TYPE, documents, fewshot, checkpoint.parameters, history)
            priority, tail_s = config.priority.get(name, 0), predict_metric_s(name, history)
            parts = known_parts.get((checkpoint.id, name))
            priced.append(TaskCost(checkpoint.id, name, cost_s, documents, priority, parts, tail_s))
    units = tuple(split(priced, workers))
    return EvaluationPlan(config, tuple(checkpoints), units, costs, times)


def read_times(path: Path, device: str) -> tuple[list[MeasuredTime], LoadCosts]:
    """Reads the earlier measurements on a type of device: times of tasks, the latest last, and costs of loads."""
    history, load = [], asdict(_ASSUMED)
    for line in read_json_lines(path) if path.is_file() else ():
        if line.get("device") != device:
            continue
        if "task" in line:
            history.append(MeasuredTime(**line))
        else:
            load |= {key: line[key] for key in load if key in line}
    return history, LoadCosts(**load)
