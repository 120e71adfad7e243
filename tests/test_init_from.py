"""Tests a new run that starts from another run's weights: what it loads, what starts fresh, and how it resumes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megads.train.resume
from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.initial import open_source
from megads.checkpoint.manifest import RunRecord, read_manifest
from megads.checkpoint.read import open_checkpoint, read_into
from megads.checkpoint.store import save_checkpoint
from megads.config.frozen import derive_run_id
from megads.config.identity import changed_keys, with_init_from
from megads.config.root import RootConfig
from megads.data.indexed.run_tokenizer import TokenizerSource, tokenizer_of_data
from megads.data.indexed.sidecar import carried_path
from megads.errors import ConfigError, MegadsError
from megads.launch import initial_weights
from megads.launch.preflight import ResolvedRun
from megads.launch.start import StartRequest, start_run
from megads.runtime.config import RunConfig
from megads.runtime.metrics import EventWriter
from tests import parity
from tests.command import StartCommand, checkpoint_of, events_of, steps_of
from tests.config.test_identity import QUICK, WORDS, contents, train, write_text
from tests.distributed import run_ranks
from tests.engine.test_training import everything
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with, step_batches
from tests.small_run import write_dataset
from tests.test_conf import compose_train

distributed = pytest.mark.distributed
SOURCE = scenario_with(masked=True)


def _trained(run_dir: Path, name: str, scenario: Scenario) -> dict[str, Any]:
    """Trains two steps and saves a checkpoint; returns the state, the validation loss and the loss of a third step."""
    scenario = parity.fitted(scenario, LAYOUTS[name])
    engine = build_engine(scenario, LAYOUTS[name])
    batches = [step_batches(scenario, step, engine.grid.dp.rank, engine.grid.dp.size) for step in range(3)]
    for batch in batches[:2]:
        engine.step(batch, scenario.lr)
    model = json.loads(json.dumps(dataclasses.asdict(scenario.model)))
    record = RunRecord({"step": 2, "samples": 8, "tokens": 100}, engine.optimizer_steps, "digest", model, {})
    save_checkpoint(run_dir, engine.named_shards(), record, control=engine.grid.control)
    owned, evaluated = parity.pieces(engine.named_shards()), parity.evaluate(engine, scenario)
    return {"owned": owned, "evaluated": evaluated, "next": engine.step(batches[2], scenario.lr).loss}


def _started(run_dir: Path, name: str, scenario: Scenario, defect: Callable[[], None] | None) -> dict[str, Any]:
    """Returns a new run's state before its first step, and the loss of that step on the source's third batch."""
    if defect is not None:
        defect()
    scenario = parity.fitted(scenario, LAYOUTS[name])
    engine = build_engine(dataclasses.replace(scenario, seed=99), LAYOUTS[name])
    config = RootConfig(model=scenario.model, checkpoint=CheckpointConfig(init_from=str(run_dir)))
    events = EventWriter(run_dir / "new", enabled=engine.grid.rank == 0)
    megads.train.resume.load_initial_weights(open_source(str(run_dir), engine.grid.control), config, engine, events)
    owned, steps = parity.pieces(engine.named_shards()), engine.optimizer_steps
    evaluated = parity.evaluate(engine, scenario)
    batch = step_batches(scenario, 2, engine.grid.dp.rank, engine.grid.dp.size)
    first = engine.step(batch, scenario.lr).loss
    return {"owned": owned, "steps": steps, "evaluated": evaluated, "next": first}


def wrong_in_start(
    run_dir: Path, source: str, name: str, scenario: Scenario, defect: Callable[[], None] | None = None
) -> list[str]:
    """Starts from fp32 weights that another layout trained, and lists what differs from the expected state."""
    trained = run_ranks(_trained, LAYOUTS[source].world_size, run_dir, source, SOURCE)
    (run_dir / "new").mkdir()
    started = run_ranks(_started, LAYOUTS[name].world_size, run_dir, name, scenario, defect)
    there, here = everything(trained), everything(started)
    assert all(values.any() for values in there["exp_avg"].values()), "a moment of the source is zero"
    wrong = [key for key, values in there["weight"].items() if not np.array_equal(here["weight"][key], values)]
    wrong += [f"{kind}/{key}" for kind in ("exp_avg", "exp_avg_sq") for key, v in here[kind].items() if v.any()]
    wrong += [] if started[0]["steps"] == 0 else ["optimizer steps"]
    bound = 1e-6 if scenario.precision == "float32" else 1e-2
    for key, before, after in (
        ("validation loss", trained[0]["evaluated"][0], started[0]["evaluated"][0]),
        ("first loss", trained[0]["next"], started[0]["next"]),
    ):
        wrong += [] if after == pytest.approx(before, rel=bound) else [f"{key} {before} -> {after}"]
    return wrong


@distributed
@pytest.mark.quick("tp2-single-float32")
@pytest.mark.parametrize(
    ("source", "name", "precision"),
    [
        ("tp2", "single", "float32"),
        ("single", "tp2", "bfloat16"),
        ("single", "tp2pp2sp", "float32"),
        ("zero3dp2", "tp3", "float32"),
        ("pp2 zb_v", "hierarchical", "bfloat16"),
        ("cp2", "zero2dp2", "float32"),
    ],
)
def test_weights_are_taken_and_nothing_else(source: str, name: str, precision: str, tmp_path: Path) -> None:
    """Catches weights that are lost between layouts, above all with vocabulary padding, or rounded to the new run's
    precision; working weights that differ from those that were read; moments or a step count that are loaded too."""
    assert wrong_in_start(tmp_path, source, name, dataclasses.replace(SOURCE, precision=precision)) == []
    (event,) = [json.loads(line) for line in (tmp_path / "new" / "events.jsonl").read_text().splitlines()]
    folder = checkpoint_of(tmp_path, 2)
    assert (event["event"], event["step"], event["source"], event["source_step"]) == ("init_from", 0, str(tmp_path), 2)
    assert (event["checkpoint"], event["manifest_digest"]) == (str(folder), read_manifest(folder).digest())


def optimizer_state_taken_along() -> None:
    megads.train.resume.read_weights = lambda source, shards, _: read_into(source.handle, shards)


def weights_left_as_they_were() -> None:
    megads.train.resume.read_weights = lambda source, shards, _: None


@distributed
@pytest.mark.quick("optimizer_state_taken_along")
@pytest.mark.parametrize("defect", [optimizer_state_taken_along, weights_left_as_they_were])
def test_the_check_of_initial_weights_finds_a_defect(defect: Callable[[], None], tmp_path: Path) -> None:
    """Catches a check of a start from weights that cannot fail."""
    assert wrong_in_start(tmp_path, "single", "single", SOURCE, defect) != []


def test_the_run_id_depends_on_the_initial_weights() -> None:
    """Catches runs with different initial weights in one folder, and runs without them whose name changes."""

    def named(path: str | None) -> str:
        return derive_run_id(RootConfig(checkpoint=CheckpointConfig(init_from=path)), "run")

    assert named("runs/a") == named("./runs/a/") != named("runs/b")
    assert named(None) == derive_run_id(RootConfig(checkpoint=CheckpointConfig(keep=7)), "run") != named("runs/a")


def test_a_resumed_run_refuses_other_initial_weights() -> None:
    """Catches a run that accepts other initial weights, or any at all, after it has begun; and a resume that must name
    them again."""
    old, other, none = (RootConfig(checkpoint=CheckpointConfig(init_from=path)) for path in ("runs/a", "runs/b", None))
    assert with_init_from(none, old) == old
    assert changed_keys(old, with_init_from(none, old), 8, []) == []
    assert changed_keys(old, RootConfig(checkpoint=CheckpointConfig(init_from="./runs/a/")), 8, []) == []
    for before, now in ((old, other), (none, other)):
        with pytest.raises(ConfigError, match=r"init_from = .*/runs/b, but .*allow_changes=\[checkpoint.init_from"):
            changed_keys(before, with_init_from(now, before), 8, [])
        (change,) = changed_keys(before, now, 8, ["checkpoint.init_from"])
        assert change.key == "checkpoint.init_from"


def test_a_url_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a URL resolved as a path in the working directory, so that a run started elsewhere is refused, a URL of
    another store accepted as the same, and one with credentials that is recorded."""
    given = [RootConfig(checkpoint=CheckpointConfig(init_from=f"s3://{name}/runs/a")) for name in ("b", "b", "c")]
    before = changed_keys(given[0], given[1], 8, [])
    monkeypatch.chdir(tmp_path)
    assert before == changed_keys(given[0], given[1], 8, []) == []
    with pytest.raises(ConfigError, match=r"init_from = s3://c/runs/a, but .* s3://b/runs/a"):
        changed_keys(given[0], given[2], 8, [])
    with pytest.raises(ConfigError, match=r"checkpoint\.init_from holds credentials"):
        CheckpointConfig(init_from="s3://key:secret@bucket/runs/a").check()


def test_a_run_cannot_start_from_its_own_upload() -> None:
    """Catches a run that starts from its own upload, which its first checkpoint replaces."""

    def is_refused(init_from: str) -> bool:
        config = RootConfig(checkpoint=CheckpointConfig(init_from=init_from, upload="s3://bucket/all/"))
        return initial_weights._is_own_upload(dataclasses.replace(config, run=RunConfig(id="mine")))

    assert is_refused("s3://bucket/all/mine") and is_refused("s3://bucket/all/mine/checkpoints/step_00000002")
    assert not is_refused("s3://bucket/all/mine-2") and not is_refused("runs/mine")


def test_tokenizers_are_compared_by_their_ids(tmp_path: Path) -> None:
    """Catches a refusal of a tokenizer file that differs only in formatting, and an accepted tokenizer of the same size
    with other ids."""

    def source(name: str, content: str) -> TokenizerSource:
        (tmp_path / name).write_text(content)
        found = tokenizer_of_data([], str(tmp_path / name))
        assert found is not None
        return found

    prefix = write_dataset(tmp_path / "data")
    text = carried_path(prefix).read_text()
    one, again = source("one", text), source("again", json.dumps(json.loads(text), indent=3))
    assert one.record.sha256 != again.record.sha256 and one.gives_the_ids_of(again)
    words = json.loads(text)
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    assert not one.gives_the_ids_of(source("other", json.dumps(words)))
    assert not one.gives_the_ids_of(dataclasses.replace(again, content=None))


@pytest.fixture(scope="module")
def home(module_megads: StartCommand) -> Path:
    """A folder with two texts and runs/pre: two steps on `notes`, with a checkpoint of each; read only."""
    for name, words in WORDS.items():
        write_text(module_megads.folder / name, words)
    ended = train(module_megads, "run.id=pre", "train.steps=2", "checkpoint.every_steps=1", "train.precision=fp32")
    assert ended.code == 0, ended.err
    return module_megads.folder


@pytest.fixture
def source(home: Path, megads: StartCommand) -> Path:
    """Copies `home` into the test's folder; returns its runs/pre."""
    for name in (*WORDS, "runs"):
        shutil.copytree(home / name, megads.folder / name)
    return megads.folder / "runs" / "pre"


FROM = ("checkpoint.init_from=runs/pre", "tokenizer.vocab_size=null", "train.precision=fp32")


@pytest.mark.slow
@distributed
def test_a_run_starts_from_weights_once(source: Path, megads: StartCommand) -> None:
    """Catches a source that is written to, a tokenizer that is trained again, samples or a step count that are loaded,
    a second start that begins again or requires a source that is gone, and one that loads other weights."""
    before, command = contents(source), (*FROM, "run.id=next", "parallel.tp=2")
    ended = train(megads, *command, "train.steps=1", raw="other")
    assert ended.code == 0, ended.err
    assert "starts from the weights of step_00000002" in ended.out and contents(source) == before
    next_run = source.parent / "next"
    manifest = read_manifest(checkpoint_of(next_run, 1))
    assert (manifest.run.state["samples"], manifest.run.optimizer_steps) == (2, 1)
    assert manifest.run.tokenizer == read_manifest(checkpoint_of(source, 2)).run.tokenizer
    assert (next_run / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()

    shutil.copytree(source, source.parent / "twin")
    for arguments, code, message in (
        (("checkpoint.init_from=runs/twin",), 2, "runs/twin, but the run was trained with "),
        (("checkpoint.init_from=runs/twin", "run.allow_changes=[checkpoint.init_from]"), 0, "resumes from its own"),
        (("checkpoint.init_from=null", "tokenizer.path=runs/next/tokenizer.json"), 0, "nothing was started"),
    ):
        ended = train(megads, *command, *arguments, "train.steps=2", "run.dry_run=true", raw="other")
        assert ended.code == code and message in ended.out + ended.err, ended
    shutil.rmtree(source)
    ended = train(megads, *command, "train.steps=2", raw="other")
    assert ended.code == 0, ended.err
    assert "resumes from its own checkpoint of step 1" in ended.out
    assert [event["step"] for event in events_of(next_run, "resume")] == [1]
    assert len(events_of(next_run, "init_from")) == 1 and [line["step"] for line in steps_of(next_run)] == [1, 2]


@pytest.mark.slow
@distributed
def test_weights_are_read_from_a_url(source: Path, megads: StartCommand) -> None:
    """Catches a URL that gives other weights or another tokenizer than the folder, corrupt weights that are trained on,
    a restart that needs the store again, and a dry run that fetches tensors or does not mention the weights."""
    command = (*FROM, "parallel.tp=2")
    ended = train(megads, *command, "run.id=next", "train.steps=1", raw="other")
    assert ended.code == 0, ended.err
    store = megads.folder / "store" / "pre"
    shutil.copytree(source, store)
    url = (*command, f"checkpoint.init_from=file://{store}", "run.id=far")
    ended = train(megads, *url, "train.steps=1", "run.dry_run=true", raw="other")
    assert ended.code == 0 and "starts from the weights of step_00000002" in ended.out, ended.err
    far = source.parent / "far"
    assert not far.exists()
    path = min(checkpoint_of(store, 2).glob("*.safetensors"))
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    ended = train(megads, *url, "train.steps=1", "run.id=older", raw="other")
    assert ended.code == 0 and "fetched step_00000001" in ended.out and "not usable there" in ended.out, ended.out
    path.write_bytes(intact)
    ended = train(megads, *url, "train.steps=1", raw="other")
    assert ended.code == 0, ended.err
    assert steps_of(far) == steps_of(source.parent / "next") != steps_of(source.parent / "older")
    (event,) = events_of(far, "init_from")
    assert (event["source"], event["source_step"]) == (f"file://{store}", 2)
    assert (far / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    shutil.rmtree(store)
    shutil.rmtree(far / "downloads")
    ended = train(megads, *url, "train.steps=2", raw="other")
    assert ended.code == 0 and "resumes from its own checkpoint of step 1" in ended.out, ended.err


def dry_run(*overrides: str) -> str:
    """Returns the choices that `megads train ... run.dry_run=true` shows."""
    config = compose_train(*QUICK, *FROM, "train.steps=3", "run.dry_run=true", *overrides)
    shown: list[ResolvedRun] = []
    start_run(config, StartRequest({"model": "tiny"}, set(), lambda resolved: shown.append(resolved) or ""))
    return "; ".join(shown[0].choices)


@distributed
def test_a_dry_run_reports_and_refuses_initial_weights(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mistake that the dry run does not detect, a wrong exit code, and a dry run that does not mention the
    weights."""
    monkeypatch.chdir(source.parent.parent)
    before = contents(source.parent)
    given, learnt = "data.raw=other", ("checkpoint.load=runs/pre", "data.raw=notes", "tokenizer.vocab_size=262")
    assert "starts from the weights of step_00000002, all else is fresh" in dry_run(given)
    assert "continues with its weights, step, optimizer" in dry_run("checkpoint.init_from=null", *learnt)
    for arguments, code, message in (
        (("model.hidden_size=96", "model.num_layers=3"), 2, "give model.hidden_size=64 model.num_layers=2, or leave"),
        (("model.vocab_size=300",), 2, "model.vocab_size: 262 there, 300 here"),
        (("checkpoint.init_from=runs/nothing",), 4, "checkpoint.init_from = runs/nothing: there is no such folder"),
        (("checkpoint.load=runs/pre",), 2, "are both set"),
        (("checkpoint.load=none", "run.id=pre"), 2, "is this run itself"),
    ):
        with pytest.raises(MegadsError) as refused:
            dry_run(given, *arguments)
        assert refused.value.exit_code == code and message in str(refused.value)
    assert contents(source.parent) == before


@pytest.mark.slow
@distributed
def test_initial_weights_that_do_not_fit_are_refused(source: Path, megads: StartCommand) -> None:
    """Catches token ids of another tokenizer than the weights were trained with, ranks that start with a larger
    vocabulary than the weights, and another checkpoint loaded in place of the one named."""
    allowed = "run.allow_changes=[tokenizer]"
    for arguments, code, message in (
        (("tokenizer.vocab_size=262",), 3, "tokenizer.path=runs/pre/tokenizer.json"),
        (("tokenizer.vocab_size=266", allowed), 2, "model.vocab_size: 262 there, 266 here"),
    ):
        ended = train(megads, *FROM, *arguments, "train.steps=1", raw="other")
        assert ended.code == code and message in ended.err and "Traceback" not in ended.err, ended
    assert sorted(path.name for path in source.parent.iterdir()) == ["data-cache", "pre"]
    path = next(checkpoint_of(source, 2).glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    given = f"checkpoint.init_from={checkpoint_of(Path('runs/pre'), 2)}"
    ended = train(megads, *FROM, given, "train.steps=1", raw="other")
    assert ended.code == 4 and "step_00000002" in ended.err and "fails its checksum" in ended.err, ended
    assert "Traceback" not in ended.err


@distributed
def test_another_tokenizer_may_be_allowed(source: Path, megads: StartCommand) -> None:
    """Catches a suggested remedy that does not work, and a damaged checkpoint that is loaded, or skipped without a
    message."""
    path = next(checkpoint_of(source, 2).glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    allowed = ("tokenizer.vocab_size=262", "run.allow_changes=[tokenizer]")
    ended = train(megads, *FROM, *allowed, "run.id=foreign", "train.steps=1", raw="other")
    assert ended.code == 0, ended.err
    (changed,), (begun,) = (events_of(source.parent / "foreign", name) for name in ("run_changed", "init_from"))
    assert changed["changes"][0]["key"] == "tokenizer" and changed["samples"] == 0
    assert begun["source_step"] == 1 and "fails its checksum" in begun["passed_by"][0]
    assert open_checkpoint(source).state["step"] == 1
