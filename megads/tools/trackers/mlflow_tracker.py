"""The tracker of MLflow."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAMS_TAGS_PER_BATCH

from megads.api import CONFIG_FILE, EVENTS_FILE, EXIT_OK, MlflowConfig, RunDescription
from megads.tools.trackers.feed import numbers

_RUN_TAG, _BRANCH_TAG = "megads.run_id", "megads.branch"
_LOSS = "train/loss"
_REFUSED_CHARACTER = re.compile(r"[^\w\-. :/]")


class MlflowTracker:
    """Records to MLflow as one MLflow run, which all starts of a run continue.

    The MLflow run is found by its tag megads.run_id, and its store tells what has arrived: a value whose step the store
    has is not sent again. MLflow cannot take back steps: a run that leaves its own history continues as another MLflow
    run <id>-branch<n>, which gets the whole curve. A parameter cannot change: parameters are the config of the first
    start; the artifact config.yaml is that of the last.

    Args:
        options: store and experiment.
        run: description of the run.
        branch: how often the run has left its own history.
    """

    rewinds = False
    starts_over = True

    def __init__(self, options: MlflowConfig, run: RunDescription, branch: int = 0):
        self._options, self._about, self._branch = options, run, branch
        uri = options.uri or str(run.run_dir / "mlflow")
        self._client = MlflowClient(tracking_uri=uri if "://" in uri else Path(uri).absolute().as_uri())
        self._open()

    def _open(self) -> None:
        run, client = self._about, self._client
        experiment = self._experiment()
        name = f"{run.run_id}-branch{self._branch}" if self._branch else run.run_id
        tags = {_RUN_TAG: run.run_id, _BRANCH_TAG: str(self._branch)}
        wanted = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())
        # Of several, as two processes at one time would make them, the oldest.
        found = client.search_runs([experiment], wanted, order_by=["attributes.start_time ASC"], max_results=1)
        known = found[0] if found else client.create_run(experiment, run_name=name, tags=tags)
        self._run_id: str = known.info.run_id
        self._last_steps = {metric.key: int(metric.step) for metric in known.data.to_proto().metrics}
        self._unsent = list[Metric]()
        self.first_step: int | None = self._last_steps.get(_LOSS, 0) + 1
        client.update_run(self._run_id, status="RUNNING")
        params = [Param(key, text) for key, text in _params(run.config) if key not in known.data.params]
        for first in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
            client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS_TAGS_PER_BATCH])
        self._add_file(CONFIG_FILE)

    def _experiment(self) -> str:
        """Returns the id of the experiment, which is created unless it exists."""
        name = self._options.experiment
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                # Another run may have created it meanwhile.
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def rewind(self, step: int) -> None:
        if step:
            raise NotImplementedError("MLflow cannot take back steps")
        self._client.set_terminated(self._run_id, "KILLED")
        self._branch += 1
        self._open()

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        step, moment_ms = int(record["step"]), int(1000 * record.get("time", time.time()))
        values = {_REFUSED_CHARACTER.sub("_", key): value for key, value in numbers(record).items()}
        # The loss is the last of a step: where the store has it, the step is complete.
        for key in sorted(values, key=lambda key: key == _LOSS):
            if step > self._last_steps.get(key, -1):
                self._last_steps[key] = step
                self._unsent.append(Metric(key, values[key], moment_ms, step))

    def add_event(self, event: Mapping[str, Any]) -> None:
        pass  # `finish` sends the file of all events.

    def flush(self) -> None:
        for first in range(0, len(self._unsent), MAX_METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=self._unsent[first : first + MAX_METRICS_PER_BATCH])
        self._unsent.clear()

    def finish(self, table: Mapping[str, int | float], events: Sequence[Mapping[str, Any]]) -> None:
        self.flush()
        self._client.log_dict(self._run_id, dict(table), "final.json")
        self._add_file(EVENTS_FILE)
        moment_s = float(events[-1].get("time", time.time())) if events else time.time()
        status = "FINISHED" if table.get("exit_code") == EXIT_OK else "FAILED"
        self._client.set_terminated(self._run_id, status, end_time=int(1000 * moment_s))

    def _add_file(self, name: str) -> None:
        path = self._about.run_dir / name
        if path.exists():
            self._client.log_artifact(self._run_id, str(path))


def _params(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the keys of a config with their values as text; those of a list in one, as JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _params(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield _REFUSED_CHARACTER.sub("_", f"{prefix}{name}"), text
