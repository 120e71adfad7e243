"""One tracker at work, in a process of its own: passes a run's news on until the run is over."""

from __future__ import annotations

import os
import select
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from megads.runtime import environment
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.feed import Feed, Position
from megads.runtime.final_table import final_table
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from megads.runtime.trackers import WANDB, RunDescription, Tracker, state_path

_POLL_S = 1.0
CONNECTED = "connected"
"""What a recorder says once its tracker takes records; anything else that it says is why it failed."""


def record(
    run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, over: int | None, parent: Connection
) -> NoReturn:
    """Records to the end of the run; never returns.

    Args:
        run: the run.
        config: settings of the trackers.
        name: the tracker.
        mode: where wandb records.
        over: descriptor that becomes readable when the run is over; None when it is over already.
        parent: told CONNECTED or why it failed.
    """
    try:
        environment.prepare_wandb()
        position = Position.load(state_path(run.run_dir, name))
        tracker = _open(run, config, name, mode, position)
        parent.send(CONNECTED)
        _pass_on(run, name, tracker, position, over)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        parent.send(f"{type(error).__name__}: {text[0] if text else ''}")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Without the interpreter's shutdown: a library's exit handler may wait for its server.
    os._exit(code)


def wait_for_end(over: int | None, timeout_s: float) -> bool:
    """Waits until the run is over, for a while; tells whether it is."""
    return over is None or bool(select.select([over], [], [], timeout_s)[0])


def _open(run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, position: Position) -> Tracker:
    # Imported here, in the tracker's own process: their imports are slow and start threads.
    if name == WANDB:
        from megads.runtime.wandb_tracker import WandbTracker

        return WandbTracker(run, config.wandb, mode)
    from megads.runtime.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker(run, position.step)


def _pass_on(run: RunDescription, name: str, tracker: Tracker, position: Position, over: int | None) -> None:
    feed = Feed(run.run_dir, position, tracker.rewinds)
    if tracker.first_step is not None:
        feed.go_on_from(max(0, tracker.first_step - 1))
    ended = False
    while not ended:
        # Asked first: whatever was written before the end is then read.
        ended = wait_for_end(over, _POLL_S)
        while news := feed.read():
            if news.rewound_to is not None:
                tracker.rewind(news.rewound_to)
            for metrics in news.metrics:
                tracker.add_metrics(metrics)
            for event in news.events:
                tracker.add_event(event)
            tracker.flush()
            position.save(state_path(run.run_dir, name))
    events: list[dict[str, Any]] = list(read_json_lines(run.run_dir / EVENTS_FILE))
    tracker.finish(final_table(position.last_step, position.last_validation, events), events)
