"""One rank of a run: `python -m megads.launch.rank <run_dir> --digest <sha256>`, started by the launcher only."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import NoReturn

from megads.launch.rank_process import run_rank, start_rank


def main() -> NoReturn:
    """Reads the frozen config of the run directory and trains."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.rank")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--digest", required=True, help="sha256 that the frozen config must have")
    parser.add_argument("--entry", default="megads.train:train", help="module:function to run; tests name their own")
    arguments = parser.parse_args()
    start_rank(arguments.run_dir)
    run_rank(arguments.run_dir, lambda: _train(arguments.run_dir, arguments.digest, arguments.entry))


def _train(run_dir: Path, digest: str, entry: str) -> int:
    """Checks that this rank reads the config that the launcher froze, then runs the entry."""
    # Imported after the log is open, so that a failing import is in it.
    from megads.errors import ConfigError
    from megads.frozen_config import config_digest, load_frozen
    from megads.runtime.run_dir import CONFIG_FILE

    config = load_frozen(run_dir / CONFIG_FILE)
    found = config_digest(config)
    if found != digest:
        raise ConfigError(
            f"{run_dir / CONFIG_FILE} has digest {found[:8]}, the launcher froze {digest[:8]}: "
            "the file changed during the start, or the ranks see another file system; start again"
        )
    # Only now: this is the config that the user's own command line froze.
    config.settle_plugins()
    module, function = entry.split(":")
    return int(getattr(importlib.import_module(module), function)(config, run_dir))


if __name__ == "__main__":
    main()
