"""What can be done with the checkpoints of a run beside training: a list, a check of every byte, an average."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from megads.checkpoint.config import CheckpointActionConfig, list_checkpoints
from megads.checkpoint.manifest import MANIFEST_FILE, Manifest, RunRecord, read_manifest
from megads.checkpoint.read import CheckpointHandle, check_model, model_config_of, open_checkpoint, read_into
from megads.checkpoint.retention import Reason
from megads.checkpoint.store import save_parts
from megads.config import best_loss_key
from megads.data.indexed.sidecar import template_path
from megads.engine.interface import Shard
from megads.errors import EXIT_OK, CheckpointError, ConfigError
from megads.frozen_config import load_frozen
from megads.plan.model_size import parameter_shapes
from megads.runtime.metrics import MetricHistory, read_json_lines
from megads.runtime.progress import Progress
from megads.runtime.run_dir import CONFIG_FILE, METRICS_FILE, TOKENIZER_FILE
from megads.runtime.visible_console import VisibleConsole
from megads.tools.generate import run_path
from megads.tools.output_folder import new_folder, require_free, write_origin

_MADE_BY = "megads checkpoint average"
_PIPE_WIDTH = 120


def list_all(run: str) -> None:
    """Prints a line for every checkpoint of a run; reads manifests, no tensors.

    Raises:
        CheckpointError: there is none.
    """
    run_dir, found = _checkpoints(run)
    losses = _losses(run_dir)
    table = Table(box=SIMPLE_HEAD)
    for name in ("step", "samples", "tokens", "loss", "valid", "layout", "size", "written", ""):
        table.add_column(name, justify="left" if name in ("layout", "") else "right")
    kept = _kept(run_dir, found)
    for step, manifest in found.items():
        if isinstance(manifest, str):
            table.add_row(f"{step:,}", *[""] * 7, "not usable")
            continue
        state, layout = manifest.run.state, manifest.run.layout
        table.add_row(
            f"{step:,}",
            f"{state['samples']:,}",
            f"{state['tokens']:,}",
            *losses.get(step, ("", "")),
            " ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "one process",
            f"{sum(manifest.files.values()) / 1e6:,.1f} MB",
            _when(_folder(run_dir, step) / MANIFEST_FILE),
            kept.get(step, ""),
        )
    # A file or a pipe is read by whoever gives it room.
    VisibleConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
    for step, manifest in found.items():
        if isinstance(manifest, str):
            print(f"{_folder(run_dir, step)}: {manifest}")


def verify(run: str, steps: Sequence[int] | None) -> int:
    """Verifies every checksum of checkpoints, and says of each whether it is sound.

    Args:
        run: the run.
        steps: of the checkpoints; None: all.

    Returns:
        The exit code: 4 where one is damaged.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    run_dir, found = _checkpoints(run, steps)
    code, total = EXIT_OK, sum(sum(m.files.values()) for m in found.values() if isinstance(m, Manifest))
    done = 0
    with Progress("verifying checkpoints", total) as progress:
        for step, manifest in found.items():
            try:
                handle = open_checkpoint(_folder(run_dir, step))
            except CheckpointError as error:
                code, said = error.exit_code, f"damaged: {error}"
            else:
                tensors = len(handle.manifest.by_key())
                said = f"sound: {tensors:,} tensors, {len(handle.manifest.files):,} files"
            done += sum(manifest.files.values()) if isinstance(manifest, Manifest) else 0
            progress.update(done)
            print(f"{_folder(run_dir, step)}: {said}", flush=True)
    return code


@dataclass(frozen=True)
class Averaged:
    """What was made.

    Attributes:
        folder: a run without training.
        steps: of the checkpoints whose mean it is.
    """

    folder: Path
    steps: tuple[int, ...]

    def __str__(self) -> str:
        steps = ", ".join(f"{step:,}" for step in self.steps)
        return (
            f"{self.folder}: the mean of the weights of steps {steps}\n"
            f"try it:    megads generate run={self.folder} prompt='...'"
        )


def average(config: CheckpointActionConfig) -> Averaged:
    """Writes the mean of the weights of several checkpoints (Polyak and Juditsky 1992), summed in fp64.

    One parameter is in memory at a time. The result has no optimizer state: a run starts from it by
    checkpoint.init_from.

    Raises:
        ConfigError: the output is taken.
        CheckpointError: a checkpoint is missing or damaged, or of another model; or the output cannot be written.
    """
    output = Path(str(config.output))
    require_free(output, config.overwrite, _MADE_BY)
    run_dir, found = _checkpoints(config.run, config.wanted_steps)
    steps = tuple(found) if config.wanted_steps else tuple(found)[-config.last :]
    handles = []
    with Progress(f"verifying {len(steps)} checkpoints"):
        handles += [open_checkpoint(_folder(run_dir, step)) for step in steps]
    newest = handles[-1]
    model = dataclasses.asdict(model_config_of(newest))
    for handle in handles:
        check_model(handle, model)
    with new_folder(output) as partial, Progress("averaging"):
        save_parts(partial, _means(handles), _record(newest))
        for path in (run_dir / TOKENIZER_FILE, template_path(run_dir / TOKENIZER_FILE)):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)
        write_origin(partial, _MADE_BY)
    return Averaged(output, steps)


def _means(handles: Sequence[CheckpointHandle]) -> Iterator[list[Shard]]:
    for name, shape in parameter_shapes(model_config_of(handles[-1])).items():
        total = torch.zeros(shape, dtype=torch.float64)
        for handle in handles:
            total += _weight(handle, name, shape)
        yield [Shard(f"weight/{name}", shape, (0,) * len(shape), (total / len(handles)).float())]


def _weight(handle: CheckpointHandle, name: str, shape: tuple[int, ...]) -> Tensor:
    weight = torch.empty(shape)
    read_into(handle, [Shard(f"weight/{name}", shape, (0,) * len(shape), weight)])
    return weight


def _record(newest: CheckpointHandle) -> RunRecord:
    """Of a run at step 0: it is one that has not begun."""
    return RunRecord(
        state={"step": 0, "samples": 0, "tokens": 0},
        optimizer_steps=0,
        config_digest="",
        model=json.loads(json.dumps(newest.manifest.run.model)),
        layout={"tp": 1, "cp": 1, "pp": 1, "dp": 1},
        tokenizer=newest.manifest.run.tokenizer,
    )


def _checkpoints(run: str, steps: Sequence[int] | None = None) -> tuple[Path, dict[int, Manifest | str]]:
    """A run's folder, and its checkpoints' manifests by step, or why one cannot be read.

    Raises:
        CheckpointError: there is none, or none of a step.
    """
    run_dir = run_path(run)
    folders = list_checkpoints(run_dir)
    if not folders:
        raise CheckpointError(f"{run_dir} holds no checkpoints")
    missing = [step for step in steps or () if step not in folders]
    if missing:
        there = ", ".join(map(str, folders))
        raise CheckpointError(f"{run_dir} has no checkpoint of step {missing[0]}; it has {there}")
    found: dict[int, Manifest | str] = {}
    for step in sorted(steps) if steps else folders:
        try:
            found[step] = read_manifest(folders[step])
        except CheckpointError as error:
            found[step] = str(error)
    return run_dir, found


def _folder(run_dir: Path, step: int) -> Path:
    return list_checkpoints(run_dir)[step]


def _losses(run_dir: Path) -> dict[int, tuple[str, str]]:
    """The training loss, and that of each validation set, by step."""
    found: dict[int, tuple[str, str]] = {}
    for line in read_json_lines(run_dir / METRICS_FILE):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        loss, valid = found.get(step, ("", ""))
        values = [value for key, value in line.items() if key.startswith("valid/") and key.endswith("/loss")]
        if isinstance(line.get("loss"), int | float):
            loss = f"{line['loss']:.4f}"
        valid = " ".join([valid, *(f"{value:.4f}" for value in values if isinstance(value, int | float))]).strip()
        found[step] = loss, valid
    return found


def _kept(run_dir: Path, found: Mapping[int, Manifest | str]) -> dict[int, str]:
    """Why each checkpoint stays, by the config of the run's last start; the newest alone where that is not there."""
    sequences = {step: 0 if isinstance(manifest, str) else manifest.sequence for step, manifest in found.items()}
    kept = dict.fromkeys(sequences, "")
    with suppress(ConfigError):
        config = load_frozen(run_dir / CONFIG_FILE, complete=False)
        key = best_loss_key(config)
        losses = MetricHistory(run_dir, key).values() if key is not None else {}
        retention = config.checkpoint.retention(losses, newest_is_proven=False)
        if retention.recent:
            kept = {step: ", ".join(reasons) for step, reasons in retention.reasons(sequences).items()}
    newest = max(sequences, key=sequences.__getitem__)
    return kept | {newest: kept[newest].replace(Reason.recent, "newest") or "newest"}


def _when(path: Path) -> str:
    return time.strftime("%F %H:%M", time.localtime(path.stat().st_mtime))
