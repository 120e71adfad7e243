"""One rank of an evaluation, started by its command: `python -m megads.tools.evaluate.rank <folder>`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from megads.api import EXIT_OK, run_rank, start_rank


def main() -> NoReturn:
    """Reads the job, runs it and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.evaluate.rank")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    start_rank(folder)
    run_rank(folder, lambda: _work(folder))


def _work(folder: Path) -> int:
    # Imported after the log is open, so that import errors are logged.
    from megads.api import build_grid, decode, open_checkpoint, rank_device, rank_environment, world
    from megads.runtime.heartbeat import heartbeat
    from megads.tools.evaluate.config import EvaluateConfig
    from megads.tools.evaluate.job import evaluate_checkpoint, load_configured_tasks, load_layout
    from megads.tools.generate import checkpoint_tokenizer

    config: EvaluateConfig = decode((folder / "config.json").read_bytes(), EvaluateConfig, 0)
    assert config.output is not None
    config.resolve_plugins()
    environment = rank_environment()
    device = rank_device(environment, deterministic=True)

    with heartbeat(environment.heartbeats, environment.rank) as beats, world(device, config.timeout_s) as control:

        def progress(what: str, done: int, of: int) -> None:
            beats.enter(f"{what}, {done:,} of {of:,}")

        beats.enter("loading the checkpoint")
        grid = build_grid(config.layout.parallel, environment.rank, environment.world_size, control)
        handle = open_checkpoint(Path(config.run), control)
        found = checkpoint_tokenizer(handle, config.tokenizer)
        scorer = load_layout(config, handle, grid, device)
        tasks = load_configured_tasks(config) if environment.rank == 0 else None
        result = evaluate_checkpoint(config, handle, found, scorer, tasks, Path(config.output), progress)
        if result is not None:
            (folder / "result.json").write_text(json.dumps(asdict(result)))
    return EXIT_OK


if __name__ == "__main__":
    main()
