"""Evaluates a checkpoint, in this process or on several ranks, and prints the results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from megads.api import (
    EXIT_OK,
    CheckpointHandle,
    ConfigError,
    Console,
    LaunchSpec,
    Progress,
    encode,
    launch,
    model_config_of,
    open_checkpoint,
)
from megads.runtime.run_dir import refuse_unwritable
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.coordinate import coordinate
from megads.tools.evaluate.evaluation_plan import FOLDER
from megads.tools.evaluate.job import (
    Evaluated,
    check_layout,
    evaluate_checkpoint,
    evaluated_model,
    load_configured_tasks,
    load_unsharded_model,
    record_results,
    require_tokenizer_of,
    settings_of,
    settings_text,
)
from megads.tools.evaluate.results import show
from megads.tools.generate import checkpoint_tokenizer, print_line, run_path
from megads.tools.jobs import exclusive


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


def evaluate(config: EvaluateConfig) -> int:
    """Runs the evaluation, prints the results and records them in the events of the run."""
    config.check()
    if config.coordinated:
        return coordinate(config)
    handle = open_checkpoint(run_path(config.runs[0]))
    for reason in handle.skipped:
        print_line(f"passed by: {reason}")
    model = evaluated_model(config, model_config_of(handle))
    check_layout(config, model)
    found = checkpoint_tokenizer(handle, config.tokenizer)
    require_tokenizer_of(model, found)
    if config.output is None and handle.folder.parent.name != "checkpoints":
        raise ConfigError(f"{handle.folder} is not in a run directory: set the folder for results with output=<folder>")
    output = Path(config.output or handle.folder.parent.parent / FOLDER / handle.folder.name)
    refuse_unwritable(output)
    tasks = load_configured_tasks(config)
    layout = config.layout.parallel
    ranks = f", {layout.world_size} processes" if layout.world_size > 1 else ""
    given = settings_text(settings_of(config, model))
    about = f"step {handle.state['step']:,}{f', {given}' if given else ''}{ranks}"
    print_line(f"{handle.folder}: {about}; tokenizer {found.path}")
    result: Evaluated | None
    if layout.world_size == 1:
        scorer = load_unsharded_model(config, handle)
        with Progress("evaluating") as shown:

            def progress(what: str, done: int, of: int) -> None:
                shown.update(note=f"{what}, {done:,} of {of:,}")

            result = evaluate_checkpoint(config, handle, found, scorer, tasks, output, progress)
    else:
        code, result = _on_ranks(config, handle, output)
        if code != EXIT_OK:
            return code
    assert result is not None
    files = [path for path in (result.harness_file, result.sets_file, result.needles_file) if path is not None]
    record_results(handle.folder, handle.state["step"], files, result.metrics)
    show(result)
    return EXIT_OK


def _on_ranks(config: EvaluateConfig, handle: CheckpointHandle, output: Path) -> tuple[int, Evaluated | None]:
    """Starts the ranks and waits for them; returns the exit code of the launcher and, if it is 0, the results."""
    folder, ranks = output / "ranks", config.layout.parallel.world_size
    with exclusive(folder, "output"):
        result = folder / "result.json"
        result.unlink(missing_ok=True)
        job = replace(config, run=str(handle.folder), output=str(output.absolute()))
        (folder / "config.json").write_bytes(encode(job, EvaluateConfig))
        command = ("-m", "megads.tools.evaluate.rank", str(folder))
        with Progress(f"evaluating on {ranks} processes") as shown, _RankConsole(folder, shown) as console:
            outcome = launch(LaunchSpec(folder, ranks, command, cpu=config.device == "cpu", saves=False), console)
        if outcome.exit_code != EXIT_OK:
            return outcome.exit_code, None
        return EXIT_OK, Evaluated(**json.loads(result.read_text()))
