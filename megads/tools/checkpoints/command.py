"""Operations on the checkpoints of a run: list, verify, average and reshard."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from megads.api import (
    CONFIG_FILE,
    DATA_FILE,
    EXIT_OK,
    HUGGING_FACE_FOLDER,
    MANIFEST_FILE,
    METRICS_FILE,
    STARTS_FOLDER,
    TOKENIZER_FILE,
    CheckpointError,
    CheckpointHandle,
    ConfigError,
    Manifest,
    MetricHistory,
    Progress,
    RunRecord,
    Shard,
    VisibleConsole,
    best_loss_key,
    check_model,
    checkpoints_folder,
    list_checkpoints,
    load_frozen,
    model_config_of,
    open_checkpoint,
    output_width,
    parameter_shapes,
    read_into,
    read_json_lines,
    read_manifest,
    router_state_shapes,
    save_parts,
    template_path,
)
from megads.checkpoint.config import Reason
from megads.checkpoint.rank_file import DTYPE_NAMES
from megads.checkpoint.read import readable_folders
from megads.data.indexed.run_tokenizer import keep_files_of_run
from megads.tools.checkpoints.config import CheckpointActionConfig
from megads.tools.generate import run_path
from megads.tools.output_folder import new_folder, require_free_space, require_replaceable, write_origin

_MADE_BY = "megads checkpoint average"
_RESHARDED_BY = "megads checkpoint reshard"
_PIPE_WIDTH = 120
_BLOCK_BYTES = 64 * 2**20
"""Bytes of a resharded tensor that are in memory at a time; one row if a row is larger."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def list_all(run: str) -> None:
    """Prints one line per checkpoint of a run. Reads only manifests.

    Raises:
        CheckpointError: the run has no checkpoints.
    """
    run_dir, found = _checkpoints(run)
    losses = _losses(run_dir)
    rows: list[Sequence[str]] = []
    kept = _kept(run_dir, found)
    for step, manifest in found.items():
        if isinstance(manifest, str):
            rows.append((f"{step:,}", *[""] * 7, "not usable"))
            continue
        samples, tokens, layout, size = manifest_cells(manifest)
        written = _when(_folder(run_dir, step) / MANIFEST_FILE)
        loss = losses.get(step, ("", ""))
        rows.append((f"{step:,}", samples, tokens, *loss, layout, size, written, kept.get(step, "")))
    print_table(("step", "samples", "tokens", "loss", "valid", "layout", "size", "written", ""), rows)
    for step, manifest in found.items():
        if isinstance(manifest, str):
            print(f"{_folder(run_dir, step)}: {manifest}")


def manifest_cells(manifest: Manifest) -> tuple[str, str, str, str]:
    """Returns samples, tokens, layout and size of a checkpoint, formatted for tables."""
    state, layout = manifest.run.state, manifest.run.layout
    axes = " ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "one process"
    return f"{state['samples']:,}", f"{state['tokens']:,}", axes, f"{manifest.nbytes / 1e6:,.1f} MB"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table of checkpoints with right-aligned numbers."""
    table = Table(box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name in ("layout", "") else "right")
    for row in rows:
        table.add_row(*row)
    VisibleConsole(width=output_width(_PIPE_WIDTH)).print(table)


def verify(run: str, steps: Sequence[int] | None) -> int:
    """Verifies all checksums of checkpoints and prints the result for each.

    Args:
        run: path or name of the run.
        steps: steps of the checkpoints; None verifies all.

    Returns:
        The exit code: 4 if a checkpoint is damaged, otherwise 0.

    Raises:
        CheckpointError: a requested checkpoint does not exist.
    """
    run_dir, found = _checkpoints(run, steps)
    code, total = EXIT_OK, sum(m.nbytes for m in found.values() if isinstance(m, Manifest))
    done = 0
    with Progress("verifying checkpoints", total) as progress:
        for step, manifest in found.items():
            try:
                handle = open_checkpoint(_folder(run_dir, step))
            except CheckpointError as error:
                code, said = error.exit_code, f"damaged: {error}"
            else:
                tensors = len(handle.manifest.tensors)
                said = f"sound: {tensors:,} tensors, {len(handle.manifest.files):,} files"
            done += manifest.nbytes if isinstance(manifest, Manifest) else 0
            progress.update(done)
            print(f"{_folder(run_dir, step)}: {said}", flush=True)
    return code


@dataclass(frozen=True)
class Averaged:
    """Result of `average`.

    Attributes:
        folder: folder of the new run, which has one checkpoint at step 0.
        steps: steps of the averaged checkpoints.
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
    """Writes the mean of the weights of several checkpoints (Polyak and Juditsky 1992), accumulated in fp64.

    One parameter is in memory at a time. The result has no optimizer state; a run starts from it with
    checkpoint.init_from.

    Raises:
        ConfigError: the output exists and may not be replaced.
        CheckpointError: a checkpoint is missing, damaged or of another model, or the output cannot be written.
    """
    output = Path(str(config.output))
    require_replaceable(output, config.overwrite, _MADE_BY)
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
        if (run_dir / TOKENIZER_FILE).is_file():
            shutil.copyfile(run_dir / TOKENIZER_FILE, partial / TOKENIZER_FILE)
        keep_files_of_run(run_dir, partial)
        write_origin(partial, _MADE_BY)
    return Averaged(output, steps)


def _means(handles: Sequence[CheckpointHandle]) -> Iterator[list[Shard]]:
    model = model_config_of(handles[-1])
    for name, shape in (parameter_shapes(model) | router_state_shapes(model)).items():
        total = torch.zeros(shape, dtype=torch.float64)
        for handle in handles:
            total += _weight(handle, name, shape)
        yield [Shard(f"weight/{name}", shape, (0,) * len(shape), (total / len(handles)).float())]


def _weight(handle: CheckpointHandle, name: str, shape: tuple[int, ...]) -> Tensor:
    weight = torch.empty(shape)
    read_into(handle, [Shard(f"weight/{name}", shape, (0,) * len(shape), weight)])
    return weight


def _record(newest: CheckpointHandle) -> RunRecord:
    """Returns the record of a run at step 0, which has not trained."""
    return RunRecord(
        state={"step": 0, "samples": 0, "tokens": 0},
        optimizer_steps=0,
        config_digest="",
        model=json.loads(json.dumps(newest.manifest.run.model)),
        layout={"tp": 1, "cp": 1, "pp": 1, "dp": 1},
        tokenizer=newest.manifest.run.tokenizer,
    )


@dataclass(frozen=True)
class Resharded:
    """Result of `reshard`.

    Attributes:
        folder: folder of the new run, which has one checkpoint.
        source: the source checkpoint, which has the same values.
        files_before: number of tensor files of the source.
        files: number of tensor files written.
        asked: number of tensor files requested.
    """

    folder: Path
    source: CheckpointHandle
    files_before: int
    files: int
    asked: int

    def __str__(self) -> str:
        fewer = f" ({self.asked:,} requested; rows are not split)" if self.files < self.asked else ""
        return (
            f"{self.folder}: step {self.source.state['step']:,} in {self.files:,} file{'s' * (self.files > 1)}{fewer}, "
            f"{self.files_before:,} before\ncontinue it: megads train ... checkpoint.load={self.folder}"
        )


def reshard(config: CheckpointActionConfig) -> Resharded:
    """Writes a copy of a checkpoint with another number of files; the values are identical byte for byte.

    The output is a run that resumes where the source would: it has weights, optimizer state, counters, and the run's
    records of config, data and tokenizer. One block of a tensor is in memory at a time.

    Raises:
        ConfigError: the output exists and may not be replaced, or overlaps with the run.
        CheckpointError: the checkpoint is missing or damaged, or the output cannot be written.
    """
    assert config.files is not None
    output, source = Path(str(config.output)), _one_checkpoint(config.run, config.wanted_steps)
    run_dir = source.parent.parent if checkpoints_folder(source.parent.parent) == source.parent else None
    _require_apart(output, run_dir or source)
    require_replaceable(output, config.overwrite, _RESHARDED_BY)
    with Progress("verifying the checkpoint"):
        handle = open_checkpoint(source)
    size = handle.manifest.nbytes
    require_free_space(output, size)
    parts = list(_spread(_whole_tensors(handle), config.files))
    # The ledger describes metrics.jsonl, which is not copied.
    record = replace(handle.manifest.run, ledger=None)
    with new_folder(output) as partial, Progress("resharding", size) as progress:
        blocks = _BlockReader(handle, progress)
        save_parts(partial, parts, record, blocks.read, handle.manifest.software)
        if run_dir is not None:
            _copy_records(run_dir, partial)
        write_origin(partial, _RESHARDED_BY)
    return Resharded(output, handle, len(handle.manifest.files), len(parts), config.files)


def _one_checkpoint(run: str, steps: Sequence[int] | None) -> Path:
    """Returns the folder of a step's checkpoint, the given folder, or a run's newest checkpoint, even if damaged."""
    if not steps:
        return readable_folders(run_path(run))[0]
    run_dir, found = _checkpoints(run, steps)
    return _folder(run_dir, next(iter(found))).absolute()


def _require_apart(output: Path, source: Path) -> None:
    made, there = output.resolve(), source.resolve()
    if made.is_relative_to(there) or there.is_relative_to(made):
        where = "is" if made == there else "is inside" if made.is_relative_to(there) else "contains"
        raise ConfigError(f"output = {output}: {where} {source}, which is only read; choose another folder")


def _whole_tensors(handle: CheckpointHandle) -> list[Shard]:
    """Returns every tensor of a checkpoint as one shard on the meta device, in the order of its files."""
    wholes = []
    for key, record in handle.manifest.tensors.items():
        dtypes = {part.dtype for part in handle.parts_of(key)}
        shape = record.shape
        # Reading would convert to one dtype, and the bytes would differ.
        if len(dtypes) > 1 or not dtypes <= _DTYPES.keys():
            raise CheckpointError(f"{handle.folder}: {key} is stored as {', '.join(sorted(dtypes))}, want one dtype")
        without_values = torch.empty(shape, dtype=_DTYPES[dtypes.pop()], device="meta")
        wholes.append(Shard(key, shape, (0,) * len(shape), without_values))
    return wholes


def _spread(wholes: Sequence[Shard], num_files: int) -> Iterator[list[Shard]]:
    """Splits tensors by rows into parts of about equal bytes; there are at most as many parts as rows."""
    total, num_files = sum(whole.tensor.nbytes for whole in wholes), min(num_files, sum(map(_num_rows, wholes)))
    part: list[Shard] = []
    number, start = 1, 0
    for whole in wholes:
        row, row_bytes = 0, whole.tensor.nbytes // _num_rows(whole)
        while row < _num_rows(whole):
            end = min((total * number // num_files - start) // row_bytes, _num_rows(whole))
            if end > row:
                part.append(_rows(whole, row, end))
                row = end
            if row < _num_rows(whole):
                number += 1
                if part:
                    yield part
                part = []
        start += whole.tensor.nbytes
    yield part


def _num_rows(shard: Shard) -> int:
    return shard.tensor.shape[0] if shard.tensor.dim() else 1


def _rows(shard: Shard, start: int, end: int) -> Shard:
    if not shard.tensor.dim():
        return shard
    return replace(shard, offset=(shard.offset[0] + start, *shard.offset[1:]), tensor=shard.tensor[start:end])


class _BlockReader:
    """Reads shards from a checkpoint in blocks of rows.

    Args:
        handle: the checkpoint.
        progress: progress display, updated after each block.
    """

    def __init__(self, handle: CheckpointHandle, progress: Progress) -> None:
        self._handle, self._progress, self._done_bytes = handle, progress, 0

    def read(self, shard: Shard) -> Iterator[Tensor]:
        """Yields the values of a shard, whose tensor is on the meta device, in blocks of rows."""
        num_rows = _num_rows(shard)
        step = max(1, _BLOCK_BYTES * num_rows // shard.tensor.nbytes)
        for start in range(0, num_rows, step):
            block = _rows(shard, start, min(start + step, num_rows))
            block = replace(block, tensor=torch.empty_like(block.tensor, device="cpu"))
            read_into(self._handle, [block])
            yield block.tensor
            self._done_bytes += block.tensor.nbytes
            self._progress.update(self._done_bytes)


def _copy_records(run_dir: Path, folder: Path) -> None:
    """Copies the run's records that resuming needs: config, data, tokenizer."""
    paths = [run_dir / CONFIG_FILE, run_dir / DATA_FILE, template_path(run_dir / TOKENIZER_FILE)]
    # All tokenizers, because a file name from a manifest must not be used as a path to write to.
    folders = (STARTS_FOLDER, HUGGING_FACE_FOLDER)
    for path in (*paths, *run_dir.glob("tokenizer*.json"), *(p for name in folders for p in run_dir.glob(f"{name}/*"))):
        if path.is_file():
            copy = folder / path.relative_to(run_dir)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _checkpoints(run: str, steps: Sequence[int] | None = None) -> tuple[Path, dict[int, Manifest | str]]:
    """Returns a run's folder, and by step the manifest of each checkpoint, or the error if it cannot be read.

    Raises:
        CheckpointError: the run has no checkpoints, or none of a requested step.
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
    """Returns the training loss and the validation losses by step, formatted."""
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
    """Returns why each checkpoint is kept, by the config of the run's last start; without it, marks only the newest."""
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
