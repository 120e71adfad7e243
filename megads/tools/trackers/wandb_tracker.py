"""The tracker of Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import wandb

from megads.api import RunDescription, WandbConfig, WandbMode, render_event
from megads.tools.trackers.feed import details, numbers

_INIT_TIMEOUT_S = 60


class WandbTracker:
    """Records to wandb under the run's id, so that all starts of a run continue the same wandb run.

    The step of its history is the run's step. wandb cannot take back steps: a run that leaves its own history, by a
    rollback or with other settings, continues as another wandb run <id>-branch<n> of the same group, which gets the
    whole curve.

    Args:
        run: description of the run.
        config: project, entity and tags.
        mode: offline or online.
        branch: how often the run has left its own history.
    """

    rewinds = False
    starts_over = True

    def __init__(self, run: RunDescription, config: WandbConfig, mode: WandbMode, branch: int = 0):
        self._about, self._config, self._mode, self._branch = run, config, mode, branch
        self._open()

    def _open(self) -> None:
        run, config, mode = self._about, self._config, self._mode
        name = f"{run.run_id}-branch{self._branch}" if self._branch else run.run_id
        self._run = wandb.init(
            dir=str(run.run_dir),
            id=name,
            name=name,
            group=run.run_id,
            project=config.project,
            entity=config.entity,
            tags=list(config.tags),
            config=dict(run.config),
            mode="online" if mode is WandbMode.online else "offline",
            resume="allow",
            settings=wandb.Settings(
                init_timeout=_INIT_TIMEOUT_S,
                # This process is not the training run: its output, code, resource usage and packages are irrelevant.
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
        if step:
            raise NotImplementedError("wandb cannot take back steps")
        self._run.finish()
        self._branch += 1
        self._open()

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        # wandb rejects a lower step than the last one: a validation repeated after a resume goes to the current step.
        self._step = max(int(record["step"]), self._step)
        self._run.log(numbers(record), step=self._step)

    def add_event(self, event: Mapping[str, Any]) -> None:
        self._run.write_logs(f"{_moment(event)} {render_event(event)}")

    def flush(self) -> None:
        pass

    def finish(self, table: Mapping[str, int | float], events: Sequence[Mapping[str, Any]]) -> None:
        rows = [(_moment(event), str(event.get("event")), details(event)) for event in events]
        values = [(name, f"{value:.6g}") for name, value in table.items()]
        # Html, not wandb.Table: a table is an artifact, for which wandb waits for the server.
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
