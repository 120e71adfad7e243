"""Records a run with Weights & Biases; imported in the tracker's process only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import wandb

from megads.runtime.config import WandbConfig, WandbMode
from megads.runtime.console import render_event
from megads.runtime.trackers import RunDescription, details, numbers

_INIT_TIMEOUT_S = 60


class WandbTracker:
    """One run on wandb, under the run's own id, so that every start of a run continues the same one.

    wandb cannot take back a step. Its history goes by the run's step.

    Args:
        run: the run.
        config: project, entity and tags.
        mode: offline or online.
    """

    rewinds = False

    def __init__(self, run: RunDescription, config: WandbConfig, mode: WandbMode):
        self._run = wandb.init(
            dir=str(run.run_dir),
            id=run.run_id,
            name=run.run_id,
            project=config.project,
            entity=config.entity,
            tags=list(config.tags),
            config=dict(run.config),
            mode="online" if mode is WandbMode.online else "offline",
            resume="allow",
            settings=wandb.Settings(
                init_timeout=_INIT_TIMEOUT_S,
                # The run is not this process: its own output, code, usage and requirements say nothing.
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                silent=True,
            ),
        )
        self.first_step = int(self._run.starting_step) if mode is WandbMode.online else None
        self._step = int(self._run.starting_step)

    def rewind(self, step: int) -> None:
        raise NotImplementedError("wandb cannot take back steps")

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        # A lower step than the last would be refused: a validation made up for after a resume goes to the next row.
        self._step = max(int(record["step"]), self._step)
        self._run.log(numbers(record), step=self._step)

    def add_event(self, event: Mapping[str, Any]) -> None:
        self._run.write_logs(f"{_moment(event)} {render_event(event)}")

    def flush(self) -> None:
        pass

    def finish(self, table: Mapping[str, int | float], events: Sequence[Mapping[str, Any]]) -> None:
        rows = [(_moment(event), str(event.get("event")), details(event)) for event in events]
        values = [(name, f"{value:.6g}") for name, value in table.items()]
        # Html, not wandb.Table: that one is an artifact, for which wandb asks the server before it goes on.
        panels = {
            "events": wandb.Html(_html(("time", "event", "details"), rows), inject=False),
            "final": wandb.Html(_html(("name", "value"), values), inject=False),
        }
        self._run.log(panels, step=self._step)
        self._run.summary.update({f"final/{name}": value for name, value in table.items()})
        self._run.finish(exit_code=int(table.get("exit_code", 1)))


def _moment(event: Mapping[str, Any]) -> str:
    return time.strftime("%F %T", time.localtime(event.get("time")))


def _html(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th align=left>{column}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<meta charset=utf-8><table cellpadding=4><tr>{head}</tr>\n{body}</table>"
