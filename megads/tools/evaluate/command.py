"""Evaluates a checkpoint, in this process or on several ranks, and prints the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.checkpoint.read import CheckpointHandle, model_config_of, open_checkpoint
from megads.data.indexed.sidecar import FoundTokenizer
from megads.errors import EXIT_OK, ConfigError
from megads.launch.launcher import LaunchSpec, launch
from megads.monitor.console import Console
from megads.runtime.distributed import encode
from megads.runtime.lease import claimed
from megads.runtime.progress import Progress
from megads.runtime.rich_console import VisibleConsole
from megads.runtime.run_dir import refuse_unwritable
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.coordinate import coordinate
from megads.tools.evaluate.harness_tasks import LoadedTasks
from megads.tools.evaluate.job import (
    Evaluated,
    check_layout,
    evaluate_checkpoint,
    load_configured_tasks,
    load_unsharded_model,
    record_results,
    refuse_concurrent,
    require_tokenizer_of,
)
from megads.tools.generate import checkpoint_tokenizer, print_line, run_path

FOLDER, RESULT_FILE = "evaluation", "result.json"
_TABLE_WIDTH = 110
"""Width of the widest table in characters; a narrower terminal wraps its lines instead of truncating cells."""
_TEXTS = ("set", "task", "filter", "metric")


class _RankConsole(Console):
    """Shows warnings, and the progress of the first rank.

    Args:
        folder: folder of the ranks.
        progress: progress line.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        super().__init__(folder, sys.stderr, level="warning")
        self._progress = progress

    def show_phase(self, phase: str) -> None:
        """See Console."""
        self._progress.update(note=phase)


@dataclass(frozen=True)
class RankJob:
    """Job of every rank.

    Attributes:
        config: config of the user.
        checkpoint: checkpoint folder.
        output: folder of the results.
    """

    config: EvaluateConfig
    checkpoint: Path
    output: Path


def evaluate(config: EvaluateConfig) -> int:
    """Runs the evaluation, prints the results and records them in the events of the run."""
    config.check()
    if config.coordinated:
        return coordinate(config)
    handle = open_checkpoint(run_path(config.runs[0]))
    for reason in handle.skipped:
        print_line(f"passed by: {reason}")
    model = model_config_of(handle)
    check_layout(config, model)
    found = checkpoint_tokenizer(handle, config.tokenizer)
    require_tokenizer_of(model, found)
    output = _output(config, handle)
    refuse_unwritable(output)
    tasks = load_configured_tasks(config)
    layout = config.layout.parallel
    ranks = f", {layout.world_size} processes" if layout.world_size > 1 else ""
    print_line(f"{handle.folder}: step {handle.state['step']:,}{ranks}; tokenizer {found.path}")
    if layout.world_size == 1:
        result: Evaluated | None = _alone(config, handle, found, tasks, output)
    else:
        code, result = _on_ranks(config, handle, output)
        if code != EXIT_OK:
            return code
    assert result is not None
    files = [path for path in (result.harness_file, result.sets_file) if path is not None]
    record_results(handle.folder, handle.state["step"], files, result.metrics)
    show(result)
    return EXIT_OK


def _output(config: EvaluateConfig, handle: CheckpointHandle) -> Path:
    if config.output is not None:
        return Path(config.output)
    if handle.folder.parent.name != "checkpoints":
        raise ConfigError(f"{handle.folder} is not in a run directory: set the folder for results with output=<folder>")
    return handle.folder.parent.parent / FOLDER / handle.folder.name


def _alone(
    config: EvaluateConfig, handle: CheckpointHandle, found: FoundTokenizer, tasks: LoadedTasks | None, output: Path
) -> Evaluated | None:
    loaded = load_unsharded_model(config, handle)
    with Progress("evaluating") as shown:

        def progress(what: str, done: int, of: int) -> None:
            shown.update(note=f"{what}, {done:,} of {of:,}")

        return evaluate_checkpoint(config, handle, found, loaded, tasks, output, progress)


def _on_ranks(config: EvaluateConfig, handle: CheckpointHandle, output: Path) -> tuple[int, Evaluated | None]:
    """Starts the ranks and waits for them; returns the exit code of the launcher and, if it is 0, the results."""
    folder = output / "ranks"
    refuse_concurrent(folder)
    with claimed(folder):
        result = folder / RESULT_FILE
        result.unlink(missing_ok=True)
        job = RankJob(config, handle.folder, output.absolute())
        (folder / "job.json").write_bytes(encode(job, RankJob))
        command = ("-m", "megads.tools.evaluate.rank", str(folder))
        ranks = config.layout.parallel.world_size
        with Progress(f"evaluating on {ranks} processes") as shown, _RankConsole(folder, shown) as console:
            outcome = launch(LaunchSpec(folder, ranks, command, cpu=config.device == "cpu", saves=False), console)
        if outcome.exit_code != EXIT_OK:
            return outcome.exit_code, None
        return EXIT_OK, Evaluated(**json.loads(result.read_text()))


def show(result: Evaluated) -> None:
    """Prints the results as tables."""
    if result.kept:
        print_line(f"reused cached answers: {', '.join(result.kept)}")
    console = VisibleConsole(highlight=False, soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)
    if result.harness_file is not None:
        content = json.loads(Path(result.harness_file).read_text(encoding="utf-8"))
        console.print(_task_table(content))
    if result.sets:
        table = _table("set", "loss", "perplexity", "bits per byte", "tokens", "bytes")
        for name, values in result.sets.items():
            numbers = (f"{values[key]:.4f}" for key in ("loss", "perplexity", "bits_per_byte"))
            table.add_row(name, *numbers, *(f"{values[key]:,}" for key in ("tokens", "bytes")))
        console.print(table)
    for path in (result.harness_file, result.sets_file):
        if path is not None:
            print_line(path)


def _table(*headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, justify="left" if header in _TEXTS else "right", no_wrap=True)
    return table


def _task_table(content: Mapping[str, Any]) -> Table:
    """Task results with the columns of lm-eval's table; groups precede their tasks."""
    table = _table("task", "version", "filter", "examples", "documents", "metric", "value", "error")
    for task, metrics in content["results"].items():
        documents = content.get("n-samples", {}).get(task, {}).get("effective", "")
        shown = (metrics.get("alias", task), str(content["versions"].get(task, "")))
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{metric}_stderr,{chosen}")
            told = f"± {error:.4f}" if isinstance(error, float) else ""
            few = str(content["n-shot"].get(task, ""))
            table.add_row(*shown, chosen, few, str(documents), metric, f"{value:.4f}", told)
            shown = ("", "")
    return table
