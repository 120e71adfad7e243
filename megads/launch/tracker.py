"""`python -m megads.launch.tracker <run_dir>`: tells wandb and TensorBoard of a run, from where they are.

The launcher starts it beside the ranks with --follow. By hand it sends what a run could not send before its end.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megads.errors import EXIT_OK, ConfigError, MegadsError
from megads.frozen_config import config_dict, load_frozen
from megads.launch.rank import leave_signals_to_the_launcher
from megads.monitor.tracker_process import track
from megads.monitor.trackers import RunDescription, wanted_trackers
from megads.runtime.registry import TRACKERS, import_plugins
from megads.runtime.run_dir import CONFIG_FILE


def main() -> int:
    """Reads the frozen config of the run directory, tracks, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.tracker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--follow", action="store_true", help="the run goes on until standard input ends")
    parser.add_argument("--plugin", action="append", default=[], help="a module of yours to import for its tracker")
    arguments = parser.parse_args()
    if arguments.follow:
        leave_signals_to_the_launcher()
    # A descriptor of its own: multiprocessing closes the standard input of the children, who wait for it too.
    over = os.dup(0) if arguments.follow else None
    try:
        config = load_frozen(arguments.run_dir / CONFIG_FILE)
        # Only beside a run of the user's own command line: by hand, the frozen config of anybody's run is only data.
        if arguments.follow:
            config.settle_plugins()
        import_plugins(arguments.plugin)
        missing = sorted(config.logging.trackers.keys() - TRACKERS.parts.keys())
        if missing:
            raise ConfigError(f"the tracker {missing[0]} is of a plugin: give --plugin <module>, which registers it")
        wanted = wanted_trackers(config.logging)
        if not wanted:
            print(f"{arguments.run_dir}: neither wandb nor TensorBoard is switched on (logging.wandb.mode)")
            return EXIT_OK
        run = RunDescription(str(config.run.id), arguments.run_dir, config_dict(config))
        return track(run, config.logging, wanted, over)
    except MegadsError as error:
        print(f"tracker: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Without the interpreter's shutdown: what a plugin has imported may take its time there.
    os._exit(code)
