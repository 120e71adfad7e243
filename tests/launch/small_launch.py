"""A launcher of stub ranks, as a program; its signals, its console and its trackers are real.

`python -m tests.launch.small_launch <run_dir> <body>`; the run directory holds a frozen config, the bodies are in
rank_bodies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megads.config.frozen import config_digest, load_frozen
from megads.errors import MegadsError
from megads.launch.launcher import LaunchSpec, launch
from megads.launch.scheduler import Deadline, Scheduler
from megads.monitor.console import open_console
from megads.monitor.trackers import enabled_trackers
from megads.runtime import progress
from megads.runtime.lease import claimed


def main() -> None:
    """Exits with the launcher's exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("body")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--digest", default=None, help="of another config than the frozen one")
    arguments = parser.parse_args()
    run_dir = arguments.run_dir
    config = load_frozen(run_dir / "config.yaml")
    rank = ("-m", "megads.launch.rank", str(run_dir), "--digest", arguments.digest or config_digest(config), "--entry")
    tracker = ("-m", "megads.tools.trackers.process", str(run_dir), "--follow")
    spec = LaunchSpec(
        run_dir,
        num_ranks=arguments.ranks,
        command=(*rank, f"tests.launch.rank_bodies:{arguments.body}"),
        side_command=tracker if enabled_trackers(config.logging) else (),
        flush_s=config.logging.flush_s,
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
    )
    # As in start_run.
    progress.configure(quiet=False, plain_on_stdout=True)
    scheduler = Scheduler(deadline=Deadline(run_dir, None, lambda: None, None, config.run.stop_timeout_s))
    try:
        with (
            claimed(run_dir),
            open_console(run_dir, sys.stdout, config.logging, str(config.run.id), config.train.steps) as console,
        ):
            sys.exit(launch(spec, console, scheduler=scheduler).exit_code)
    except MegadsError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
