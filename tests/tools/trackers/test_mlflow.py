"""The MLflow tracker with the real MLflow: its runs hold everything once, and its failure does not stop a run."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")

from mlflow.entities import Run as MlflowRun
from mlflow.tracking import MlflowClient

from megads.errors import ConfigError
from megads.runtime.config import LoggingConfig
from tests.command_server import CommandServer
from tests.tools.trackers.test_trackers import (
    REPOSITORY,
    STEPS,
    Run,
    frozen_run,
    launcher_of,
    losses,
    no_process_left,
    warnings_of,
)


@pytest.fixture(autouse=True)
def file_stores_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """The files of a run with nine steps, tracked in a store of several runs."""
    run = Run(tmp_path / "a-run")
    (run.run_dir / "logs").mkdir(parents=True)
    frozen_run(run.run_dir, mlflow=str(tmp_path / "store"))
    run.start(0)
    run.steps(1, 9)
    yield run
    run.metrics.close()
    run.events.close()


def send(run_dir: Path) -> None:
    """Sends what the store lacks, as a user does by hand."""
    command = [sys.executable, "-m", "megads.tools.trackers.process", str(run_dir)]
    sent = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert sent.returncode == 0, sent.stderr


def client_of(store: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=store.as_uri())


def runs_of(store: Path) -> dict[str, MlflowRun]:
    client = client_of(store)
    experiment = client.get_experiment_by_name("megads")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    assert len({run.info.run_name for run in found}) == len(found)
    return {str(run.info.run_name): run for run in found}


def history(store: Path, run: MlflowRun, key: str = "train/loss") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client_of(store).get_metric_history(run.info.run_id, key)]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_and_resumed_run_is_one_mlflow_run(command_server: CommandServer, tmp_path: Path) -> None:
    """Catches a resume that creates a second MLflow run, steps lost or sent twice, and a missing config or event."""
    run_dir = tmp_path / "a-run"
    frozen_run(run_dir, mlflow=None)
    (run_dir / "die").touch()
    store = run_dir / "mlflow"
    for code in (10, 0):
        with closing(launcher_of(run_dir, command_server)) as launcher:
            done = launcher.end(120)
        assert done.code == code, done.err
        (found,) = runs_of(store).values()
        assert found.info.status == ("FINISHED" if code == 0 else "FAILED")
    assert warnings_of(run_dir) == []
    truth = losses(run_dir)
    assert history(store, found) == sorted(truth.items()) and len(truth) == STEPS
    assert [step for step, _ in history(store, found, "valid/held_out/loss")] == [10, 20, 30]
    assert found.info.run_name == found.data.tags["megads.run_id"] == "a-run"
    assert found.data.params["train.seq_len"] == "128" and found.data.params["logging.wandb.tags"] == '["a tag"]'
    client = client_of(store)
    names = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert names == {"config.yaml", "events.jsonl", "final.json"}
    assert "checkpoint_saved" in Path(client.download_artifacts(found.info.run_id, "events.jsonl")).read_text()
    assert no_process_left(run_dir)


@pytest.mark.slow
def test_what_the_store_has_is_not_sent_again(run: Run, tmp_path: Path) -> None:
    """Catches a tracker, killed before it saved its position, that repeats values, and names that MLflow refuses."""
    store = tmp_path / "store"
    run.metrics.write({"step": 9, "eval/arc,easy/acc": 0.5, "valid/a/loss": math.inf})
    send(run.run_dir)
    (run.run_dir / "logs" / "tracker_mlflow.json").unlink()
    run.steps(10, 10)
    run.metrics.write({"step": 11, "loss": math.nan})
    send(run.run_dir)
    (found,) = runs_of(store).values()
    points = history(store, found)
    assert points[:-1] == [(step, 1.0) for step in range(1, 11)]
    assert points[-1][0] == 11 and math.isnan(points[-1][1])
    assert history(store, found, "valid/a/loss") == [(5, 1.0), (9, math.inf), (10, 1.0)]
    assert history(store, found, "eval/arc_easy/acc") == [(9, 0.5)]
    client_of(store).delete_run(found.info.run_id)
    send(run.run_dir)
    (again,) = runs_of(store).values()
    assert again.info.run_id != found.info.run_id and len(history(store, again)) == 11


@pytest.mark.slow
def test_a_branch_is_its_own_mlflow_run(run: Run, tmp_path: Path) -> None:
    """Catches abandoned steps that stay in the curve, a branch that begins in the middle, and runs mixed in a store."""
    store = tmp_path / "store"
    other = Run(tmp_path / "another")
    (other.run_dir / "logs").mkdir()
    frozen_run(other.run_dir, mlflow=str(store))
    other.start(0)
    other.steps(1, 2, loss=3.0)
    for run_dir in (run.run_dir, other.run_dir):
        send(run_dir)
    run.events.write("config_changed", level="warning")
    run.start(5)
    run.steps(6, 8, loss=2.0)
    send(run.run_dir)
    found = runs_of(store)
    assert found.keys() == {"a-run", "a-run-branch1", "another"}
    whole = [(step, 1.0) for step in range(1, 6)] + [(step, 2.0) for step in range(6, 9)]
    assert history(store, found["a-run-branch1"]) == whole
    assert found["a-run"].info.status == "KILLED" and len(history(store, found["a-run"])) == 9
    assert len(history(store, found["another"])) == 2


@pytest.mark.slow
@pytest.mark.fault(17)
@pytest.mark.distributed
def test_a_store_that_cannot_be_written_does_not_stop_the_run(command_server: CommandServer, tmp_path: Path) -> None:
    """Catches a run that ends, waits or prints a traceback because MLflow fails."""
    run_dir = tmp_path / "run"
    (tmp_path / "file").touch()
    frozen_run(run_dir, mlflow=str(tmp_path / "file" / "store"))
    with closing(launcher_of(run_dir, command_server)) as launcher:
        done = launcher.end(120)
    assert (done.code, done.err) == (0, "")
    assert len(losses(run_dir)) == STEPS
    (warning,) = warnings_of(run_dir)
    assert warning.startswith("mlflow: ")
    assert "mlflow" not in (run_dir / "logs" / "rank_00000.log").read_text()
    (tmp_path / "file").unlink()
    send(run_dir)
    (found,) = runs_of(tmp_path / "file" / "store").values()
    assert len(history(tmp_path / "file" / "store", found)) == STEPS


@pytest.mark.parametrize(("key", "value"), [("experiment", " "), ("uri", "")])
def test_empty_names_are_refused_before_the_start(key: str, value: Any) -> None:
    """Catches an empty experiment or folder that MLflow refuses once the run trains."""
    config = LoggingConfig()
    setattr(config.mlflow, key, value)
    with pytest.raises(ConfigError, match=f"logging.mlflow.{key}"):
        config.check()
