"""A launcher over stand-in ranks, as a program: what it shows and what it tells the trackers is real.

`python -m tests.launch.small_launch <run_dir> <body>`; the run directory holds a frozen config.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megads.frozen_config import config_digest, load_frozen
from megads.launch.launcher import LaunchSpec, launch
from megads.monitor.live_console import open_console
from megads.monitor.trackers import wanted_trackers
from megads.runtime.lease import claimed


def main(run_dir: Path, body: str) -> int:
    config = load_frozen(run_dir / "config.yaml")
    rank = ("-m", "megads.launch.rank", str(run_dir), "--digest", config_digest(config), "--entry")
    tracker = ("-m", "megads.launch.tracker", str(run_dir), "--follow")
    spec = LaunchSpec(
        run_dir,
        num_ranks=1,
        command=(*rank, f"tests.launch.rank_bodies:{body}"),
        side_command=tracker if wanted_trackers(config.logging) else (),
        flush_s=config.logging.flush_s,
    )
    with (
        claimed(run_dir),
        open_console(run_dir, sys.stdout, config.logging, str(config.run.id), config.train.steps) as console,
    ):
        return launch(spec, console).exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
