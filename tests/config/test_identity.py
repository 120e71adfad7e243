"""Tests a run's identity: a start that would change it is refused and writes nothing, and a run is self-contained."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.read import open_checkpoint
from megads.config.identity import KEYS, ChangeClass, change_class, changed_keys, check_allowed
from megads.config.root import RootConfig, TrainConfig
from megads.data.config import DataConfig, DatasetConfig, Order, PackingMode, SkipConfig
from megads.data.tokenizer_config import TextTokenizerConfig
from megads.errors import ConfigError
from megads.tools.generate import checkpoint_tokenizer
from tests.command import Ended, StartCommand, checkpoint_of, events_of, steps_of

distributed = pytest.mark.distributed
QUICK = (
    "train.seq_len=32", "train.global_batch_size=2", "cluster.peak_tflops=1", "cluster.threads_per_rank=1",
    "tokenizer.vocab_size=262", "ops.impl=torch",
)  # fmt: skip
WORDS = {"notes": ("alpha", "beta", "gamma", "river"), "other": ("uno", "dos", "tres", "cuatro")}


def write_text(folder: Path, words: tuple[str, ...]) -> None:
    folder.mkdir()
    draw = random.Random(1)
    (folder / "a.txt").write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(400)))


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train(megads: StartCommand, *arguments: str, raw: str = "notes") -> Ended:
    return megads("train", f"data.raw={raw}", *QUICK, *arguments).end()


@pytest.fixture(scope="module")
def home(module_megads: StartCommand) -> Path:
    """A folder with two texts and runs/one: two steps on `notes`; read only."""
    for name, words in WORDS.items():
        write_text(module_megads.folder / name, words)
    ended = train(module_megads, "run.id=one", "train.steps=2")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "finished at step 2: raise train.steps to go on"
    return module_megads.folder


@pytest.fixture
def run_dir(home: Path, megads: StartCommand) -> Iterator[Path]:
    """Copies `home` into the test's folder; yields its runs/one."""
    for name in (*WORDS, "runs"):
        shutil.copytree(home / name, megads.folder / name)
    yield megads.folder / "runs" / "one"


@pytest.mark.fault(16, 21)
@distributed
def test_a_refused_start_leaves_the_runs_records_unchanged(run_dir: Path, megads: StartCommand) -> None:
    """Catches records that are replaced before the refusal, so that a second identical start trains on the other data,
    and `generate` uses the other tokenizer. Both vocabularies have one size, so that no shape tells them apart."""
    before = contents(run_dir)
    for _ in range(2):
        ended = train(megads, "run.id=one", "train.steps=3", raw="other")
        assert ended.code == 3 and "Traceback" not in ended.err, ended.err
        assert "made with another tokenizer (sha256 " in ended.err and "262 tokens) than runs/one" in ended.err
        assert "tokenizer.path=runs/one/tokenizer.json" in ended.err
        assert contents(run_dir) == before
    for arguments, code, message in (
        (("train.seed=7",), 2, "train.seed = 7, but the run was trained with 1234 up to sample 4"),
        (("model.num_heads=2",), 4, "is of another model (model.num_heads: "),
        (("run.allow_changes=[optim.lr]",), 2, "run.allow_changes has optim.lr"),
    ):
        ended = train(megads, "run.id=one", "train.steps=3", *arguments)
        assert ended.code == code and message in ended.err, ended.err
        assert contents(run_dir) == before
    (megads.folder / "short.txt").write_text("hello!")
    assert train(megads, "train.steps=1", "tokenizer.vocab_size=null", raw="short.txt").code == 3
    assert sorted(path.name for path in run_dir.parent.iterdir()) == ["data-cache", "one"]


@pytest.mark.slow
@distributed
def test_an_allowed_change_is_made_and_recorded_as_an_event(run_dir: Path, megads: StartCommand) -> None:
    """Catches an allowed key that permits other changes too, a change without an event, later starts that are not held
    to the new tokenizer, and earlier checkpoints that lose theirs."""
    tokenizer = read_manifest(checkpoint_of(run_dir, 2)).run.tokenizer
    assert tokenizer is not None
    first = tokenizer.sha256
    asked = ("run.id=one", "train.steps=3", "train.seed=7")
    ended = train(megads, *asked, "run.allow_changes=[train.seed]", raw="other")
    assert ended.code == 3 and "run.allow_changes=[tokenizer]" in ended.err, ended.err
    ended = train(megads, *asked, "run.allow_changes=[train.seed,tokenizer]", raw="other")
    assert ended.code == 0, ended.err
    (event,) = events_of(run_dir, "run_changed")
    seed, other = event["changes"]
    assert (seed["key"], seed["before"], seed["after"], event["samples"]) == ("train.seed", 1234, 7, 4)
    assert other["key"] == "tokenizer" and first[:12] in other["before"] and first[:12] not in other["after"]
    assert "train.seed 1234 -> 7" in ended.out and [line["step"] for line in steps_of(run_dir)] == [1, 2, 3]
    ended = train(megads, "run.id=one", "train.steps=4", "train.seed=7")
    assert ended.code == 3 and "made with another tokenizer" in ended.err, ended.err
    shutil.rmtree(run_dir.parent / "data-cache")
    for step, name in ((2, f"tokenizer.{first[:16]}.json"), (3, "tokenizer.json")):
        assert checkpoint_tokenizer(open_checkpoint(checkpoint_of(run_dir, step))).path == run_dir / name


@pytest.mark.fault(21)
@distributed
def test_a_change_is_reported_by_its_effect_on_training(run_dir: Path, megads: StartCommand) -> None:
    """Catches a dry run that does not report a changed learning rate, and a warning about a change without effect."""
    changed = ("optim.lr=0.02", "logging.every_steps=2")
    told = train(megads, "run.id=one", "train.steps=2", "run.dry_run=true", *changed).out.splitlines()
    told = [line for line in told if line.startswith("changed since the last start")]
    differently = "; the run trains differently from here on"
    assert [line.endswith(differently) for line in told if "optim.lr" in line] == [True]
    assert [line.endswith(differently) for line in told if "logging.every_steps" in line] == [False]


@pytest.mark.slow
def test_a_copied_run_generates_and_resumes_elsewhere(run_dir: Path, megads: StartCommand) -> None:
    """Catches a run that is lost with its data cache, a copy that generates other text, a tokenizer replaced in a run
    that decodes its ids to other text, and a copy that does not resume on the same text prepared again elsewhere."""
    copy, prompt = megads.folder / "elsewhere" / "one", ("prompt=alpha beta", "max_new_tokens=3", "temperature=0")
    shutil.copytree(run_dir, copy)
    wanted = megads("generate", "run=one", *prompt).end()
    shutil.rmtree(run_dir.parent / "data-cache")
    found = megads("generate", f"run={copy}", *prompt).end()
    assert (found.code, found.out) == (0, wanted.out), found.err
    ended = megads("why", "run=one", "step=1").end()
    assert ended.code == 3 and "the data that runs/one was trained on is not here" in ended.err, ended.err
    ended = train(megads, f"run.dir={copy}", "train.steps=3")
    assert ended.code == 0, ended.err
    assert len(steps_of(copy)) == 3 and not events_of(copy, "run_changed")
    assert "alpha" in megads("why", f"run={copy}", "step=1", "loss=none").end().out

    (megads.folder / "notes").rename(megads.folder / "away")
    ended = train(megads, "run.id=one", "train.steps=3")
    assert ended.code == 3 and "data.raw notes: matches no file" in ended.err, ended.err
    (megads.folder / "away").rename(megads.folder / "notes")
    tokenizer = run_dir / "tokenizer.json"
    content = tokenizer.read_bytes()
    tokenizer.write_bytes(content + b"\n")
    for command in (
        ("generate", "run=one", *prompt),
        ("train", "data.raw=notes", *QUICK, "run.id=one", "train.steps=3"),
    ):
        ended = megads(*command).end()
        assert ended.code == 3 and "but the run was trained with" in ended.err, ended.err
    assert (run_dir / "tokenizer.json").read_bytes() == content + b"\n"


@pytest.mark.slow
@distributed
def test_a_finished_run_says_how_to_continue(run_dir: Path, megads: StartCommand) -> None:
    """Catches a finished run that does not say how to continue, one that is trained again for a length it has passed,
    and an interrupted one whose user is not told that the same command continues it."""
    before = contents(run_dir)
    again = train(megads, "run.id=one", "train.steps=2")
    assert (again.code, again.out.splitlines()[-1]) == (0, "finished at step 2: raise train.steps to go on")
    shorter = train(megads, "run.id=one", "train.steps=1")
    assert shorter.code == 0 and "finished at step 2, beyond the 1 of train.steps" in shorter.out, shorter.out
    assert contents(run_dir) == before
    ended = train(megads, "run.id=one", "train.steps=100000", "run.exit_after=1s")
    assert ended.code == 6 and "the same command continues it from step" in ended.out.splitlines()[-1], ended.out
    (run_dir / "stop").touch()
    assert train(megads, "run.id=one", "train.steps=100000").code == 5


SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "train.seed": ({}, {"seed": 2}),
    "train.seq_len": ({}, {"seq_len": 64}),
    "data.split": ({}, {"split": [1.0, 0.0]}),
    "data.order": ({}, {"order": Order.megatron}),
    "data.packing": ({}, {"packing": PackingMode.best_fit}),
    "data.document_mask": ({}, {"document_mask": True}),
    "data.reset_positions": ({}, {"reset_positions": True}),
    "data.mask_eod": ({}, {"mask_eod": True}),
    "data.megatron_theta": ({"order": Order.megatron}, {"megatron_theta": 0.95}),
    "data.train": ({"order": Order.megatron}, {"train": [DatasetConfig("b")]}),
    "train.steps": ({"order": Order.megatron}, {"steps": 200}),
}


def config_of(**changes: Any) -> RootConfig:
    """Returns a config with settings of train and data by their last names."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    train = {"steps": 100} | {name: value for name, value in changes.items() if name in names}
    data = {"train": [DatasetConfig("a")]} | {name: value for name, value in changes.items() if name not in names}
    return RootConfig(train=TrainConfig(**train), data=DataConfig(**data))


@pytest.mark.parametrize("key", SAMPLES)
def test_a_changed_key_that_determines_the_samples_is_refused(key: str) -> None:
    """Catches a key whose change is accepted without a message, and one that is refused although it is allowed by
    name."""
    shared, change = SAMPLES[key]
    before, now = config_of(**shared), config_of(**(shared | change))
    with pytest.raises(ConfigError, match=rf"{key} = .*, but the run was trained with .*allow_changes=\[.*{key}"):
        changed_keys(before, now, 40, [])
    assert key in {found.key for found in changed_keys(before, now, 40, list(SAMPLES))}
    assert changed_keys(before, before, 40, []) == []
    assert {found.key for found in changed_keys(config_of(), now, 40, list(SAMPLES))} <= {key, "data.order"}


def test_every_start_may_change_length_batch_and_future_samples() -> None:
    """Catches a run that cannot be extended, or resumed with other batch sizes, another mix, or future samples to
    skip."""
    before = config_of()
    for change in (
        {"steps": 200}, {"steps": None, "tokens": 10**6}, {"global_batch_size": 64, "micro_batch_size": 4},
        {"train": [DatasetConfig("a", 1.0), DatasetConfig("b", 2.0)]}, {"cache_dir": "x"}, {"megatron_theta": 0.95},
        {"skip": [SkipConfig(samples=[40, 50])]},
    ):  # fmt: skip
        assert changed_keys(before, config_of(**change), 40, []) == []
    skip = config_of(skip=[SkipConfig(samples=[8, 16])])
    with pytest.raises(ConfigError, match=r"data\.skip leaves out 8 to 15 of the first samples"):
        changed_keys(before, skip, 40, [])
    assert [change.key for change in changed_keys(before, skip, 40, ["data.skip"])] == ["data.skip"]
    # With data.valid there is no split to change.
    assert changed_keys(config_of(valid="v"), config_of(valid="v", split=[1.0, 0.0]), 40, []) == []


@pytest.mark.parametrize(
    ("safe", "warned"),
    [
        ("parallel.tp", "optim.lr"),
        ("ops.impl", "schedule.decay_samples"),
        ("logging.wandb.mode", "hooks.mine.rate"),
        ("train.micro_batch_size", "train.global_batch_size"),
        ("optim.impl", "optim.clip_grad"),
        ("optim.ema_decay", "optim.groups"),
        ("data.cache_dir", "data.weights"),
        ("checkpoint.every_steps", "train.precision"),
    ],
)
def test_changed_keys_are_classified_by_their_effect(safe: str, warned: str) -> None:
    """Catches a change that affects training reported as quietly as one of logging, and the reverse."""
    assert change_class(safe) is ChangeClass.safe
    assert change_class(warned) is ChangeClass.warn


def test_every_key_of_train_data_and_tokenizer_is_classified() -> None:
    """Catches a new key for which nobody decided whether it determines the samples."""
    sections = {"train": TrainConfig, "data": DataConfig, "tokenizer": TextTokenizerConfig}
    there = {f"{section}.{field.name}" for section, schema in sections.items() for field in dataclasses.fields(schema)}
    others = {"data.skip", "checkpoint.init_from"}
    assert set(KEYS) == there | {"checkpoint.init_from"}
    assert {key for key, entry in KEYS.items() if callable(entry)} == {*SAMPLES, *others}
    check_allowed([*SAMPLES, *others, "data", "tokenizer"])
    with pytest.raises(ConfigError, match=r"run.allow_changes has train.sed: .*did you mean train.seed\?"):
        check_allowed(["train.sed"])


@distributed
def test_a_run_without_its_records_is_refused(run_dir: Path, megads: StartCommand) -> None:
    """Catches guards against changed data and settings that a removed folder switches off without a word."""
    shutil.rmtree(run_dir / "configs")
    for name in ("config.yaml", "data_record.json"):
        (run_dir / name).unlink()
    ended = train(megads, "run.id=one", "train.steps=4", "train.seed=7")
    assert ended.code == 2 and re.search(r"has no configs/\w+\.yaml and configs/data_\w+\.json anymore", ended.err)
    ended = train(megads, "run.id=one", "train.steps=4", "run.allow_changes=[records]")
    assert ended.code == 0, ended.err
    assert events_of(run_dir, "run_changed")[-1]["changes"][0]["key"] == "records"
