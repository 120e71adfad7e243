"""The reference runs of docs/runs: what is recorded is complete, fits the experiments, and can be repeated."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from megads.config.frozen import config_dict
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, METRICS_FILE, recorded_config
from megads.tools.compare.comparison import REFERENCE_FILE, compare, config_differences
from megads.tools.compare.config import CompareConfig
from megads.tools.report.history import read_history
from scripts.reference_runs import FACTOR, NAMES, Differences, from_other_expert, speeches, tolerance
from tests.command import StartCommand
from tests.test_conf import compose_train

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "docs" / "runs"
LARGEST_BYTES = 50_000
# Keys, or their beginnings, that a start resolves; options of an optimizer get their defaults.
RESOLVED = ("engine", "model.vocab_size", "optim.options")


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_is_complete(name: str) -> None:
    """Catches a ledger with gaps or of another length than the experiment, and a file that makes the repository
    large."""
    config, ledger = compose_train(f"experiment=reference_{name}"), list(read_json_lines(RUNS / name / METRICS_FILE))
    steps = [line for line in ledger if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, (config.train.steps or 0) + 1))
    assert all(line.keys() >= {"grad_norm", "lr", "batch_hash"} for line in steps)
    assert len(ledger) - len(steps) == len(steps) / config.evaluation.every_steps
    assert all(path.stat().st_size < LARGEST_BYTES for path in (RUNS / name).iterdir())
    record = json.loads((RUNS / name / REFERENCE_FILE).read_text())
    assert record["factor"] == FACTOR and {"torch", "dp2", "tp2"} <= record["largest_differences"].keys()
    assert compare(CompareConfig(run=str(RUNS / name), reference=name)).is_within


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_is_of_its_experiment(name: str) -> None:
    """Catches an experiment, or a default, that was changed without a new reference."""
    recorded = yaml.safe_load(recorded_config(RUNS / name / CONFIG_FILE))
    composed = config_dict(compose_train(f"experiment=reference_{name}"))
    del composed["sweep"]
    trains, _ = config_differences(recorded, composed)
    changed = {key: values for key, values in trains.items() if not key.startswith(RESOLVED)}
    assert changed == {}


def test_a_key_of_a_later_version_has_its_default_in_an_earlier_run() -> None:
    """Catches a run of an earlier version that differs from the same run of today by keys that it did not know."""
    now = config_dict(compose_train("experiment=reference_bloom"))
    before = {**now, "data": {key: value for key, value in now["data"].items() if key != "balance_documents"}}
    assert config_differences(before, now) == config_differences(now, before) == ({}, {})
    now["data"] = {**now["data"], "balance_documents": True}
    assert {"data.balance_documents": (False, True)} in config_differences(before, now)


def test_the_losses_of_a_reference_fall() -> None:
    """Catches a recorded run that learned nothing, which would hide every defect."""
    for name in NAMES:
        history = read_history(RUNS / name)
        losses = history.columns["loss"]
        assert losses[-10:].mean() < losses[:10].mean() - 1.5, name
        assert history.validations[0].loss[-1] < history.validations[0].loss[0], name


def test_conversations_are_made_from_the_plays() -> None:
    """Catches conversations that the script would no longer make."""
    plays, shipped = (
        gzip.decompress((RUNS / "text" / name).read_bytes()).decode()
        for name in ("tinyshakespeare.txt.gz", "speeches.jsonl.gz")
    )
    assert [json.loads(line) for line in shipped.splitlines()] == speeches(plays)


def test_a_tolerance_covers_every_step_up_to_the_next() -> None:
    """Catches a tolerance that is below a measured difference between two of its steps, or falls with the steps."""
    steps = np.arange(1.0, 31.0)
    measured = [np.where(steps == 9, 3e-5, 1e-8), np.where(steps == 4, 2e-5, 0)]
    knots = tolerance(steps, measured, floor=1e-6)
    assert knots == [(1, 1e-6), (2, 2e-4), (5, 3e-4)]


def test_differences_of_experts_begin_where_a_token_went_to_another() -> None:
    """Catches a tolerance that allows other experts only from the step on at which they were measured."""
    loss = np.array([1e-8, 2e-8, 1e-8, 5e-6, 3e-4, 1e-4])
    found = from_other_expert(Differences(loss, loss * 10))
    assert found.loss.tolist() == [5e-6, 3e-4, 1e-4, 3e-4, 3e-4, 3e-4]
    assert found.grad_norm == pytest.approx(found.loss * 10)
    calm = Differences(loss[:3], loss[:3])
    assert from_other_expert(calm).loss.tolist() == calm.loss.tolist()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama"])
def test_a_reference_can_be_repeated(name: str, megads: StartCommand) -> None:
    """Catches a change of the numerics, of the data order or of the initial weights, and commands of docs/runs.md that
    do not work: 30 steps are within the tolerance, and with another learning rate they are not."""
    (megads.folder / "docs").symlink_to(ROOT / "docs")
    words = ("train", f"experiment=reference_{name}", "train.steps=30")
    for run, changes, code in (("mine", [], 0), ("other", ["optim.lr=2.02e-3"], 7)):
        ended = megads(*words, f"run.id={run}", *changes).end()
        assert ended.code == 0, ended.err
        said = megads("compare", f"run={run}", f"reference={name}").end()
        assert said.code == code, said.out + said.err
    assert "leaves" in said.err and "optim.lr: 0.002 -> 0.00202" in said.out
