"""What users type, turned into overrides; tests/attack/test_first_attempts.py has generated lines."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors import SafetensorError, safe_open

from megads.cli.command_line import overrides_of
from megads.cli.main import run
from megads.cli.verb import Verb
from megads.errors import ConfigError, reason_of


def verb_of(name: str) -> Verb:
    found: Verb = importlib.import_module(f"megads.cli.{name}").VERB
    return found


def value_of(verb: str, argument: str) -> object:
    """The value that Hydra reads of an argument."""
    (override,) = overrides_of(verb_of(verb), [argument])
    parsed = OverridesParser.create().parse_override(override)
    assert not parsed.is_sweep_override()
    return parsed.value()


@pytest.mark.parametrize(
    "text",
    [
        "year=2019/month=10",
        "hash#1",
        "it's",
        "uni-Ä日本",
        "a&b;c",
        "(1)",
        '6" pipe',
        "a`b`",
        "s3://b/c?d=1",
        "a\\",
        "1e5",
    ],
)
def test_a_text_keeps_what_was_typed(text: str) -> None:
    """Catches a path or name that Hydra's grammar cannot read, alone and in a list."""
    assert value_of("train", f"data.raw={text}") == text
    assert value_of("train", f"run.name={text}") == text
    if text not in ('6" pipe', "a\\", "1e5"):
        assert value_of("preprocess", f"input=[{text}, b]") == [text, "b"]
        assert value_of("train", f"data.train=[{{path: {text}, weight: 2}}]") == [{"path": text, "weight": 2}]


@pytest.mark.parametrize(
    ("verb", "argument", "expected"),
    [
        ("preprocess", "input=notes", ["notes"]),
        ("preprocess", "input='a,b'", ["a,b"]),
        ("preprocess", "input=[a,b]", ["a", "b"]),
        ("preprocess", "input=", []),
        ("train", "plugins=mine", ["mine"]),
        ("train", "data.train=d", [{"path": "d"}]),
        ("train", "data.train=1e5", [{"path": "1e5"}]),
        ("train", "data.train=[d,{path: e, weight: 2}]", [{"path": "d"}, {"path": "e", "weight": 2}]),
        ("train", "data.train={path: e}", [{"path": "e"}]),
        ("train", "parallel.layer_costs=1.5", [1.5]),
        ("train", "parallel.layer_costs=null", None),
        ("checkpoint", "action=list", "list"),
    ],
)
def test_a_single_value_becomes_a_list_of_one(verb: str, argument: str, expected: object) -> None:
    """Catches `input=notes` refused with the name of a library's list type."""
    assert value_of(verb, argument) == expected


def test_points_of_a_sweep_stay_points() -> None:
    """Catches the values of -m put into one list."""
    made = overrides_of(verb_of("tokenizer"), ["-m", "input=a,b", "vocab_size=300,400"])
    assert made == ["-m", "input=[a],[b]", "vocab_size=300,400"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("report runs/notes", "did you mean run=runs/notes?"),
        ("generate runs/notes", "did you mean run=runs/notes?"),
        ("tokenizer notes", "did you mean input=notes?"),
        ("train notes.txt", "did you mean data.raw=notes.txt?"),
        ("train tiny", "did you mean model=tiny?"),
        ("why 100", "did you mean step=100?"),
        ("checkpoint lst", "did you mean list?"),
        ("train --steps 100", "did you mean train.steps=100?"),
        ("train --lr=1e-3", "did you mean optim.lr=1e-3?"),
        ("train --batch-size 8", "train.global_batch_size=8 or train.micro_batch_size=8?"),
        ("plan --json", "did you mean json=true?"),
        ("train --multi-run", "did you mean --multirun?"),
        ("train train.steps = 100", "did you mean train.steps=100?"),
        ("train train.steps= 100", "write train.steps=100, without a space"),
        ("train train.steps:100", "did you mean train.steps=100?"),
        ("train config.yaml", "chosen with --config-dir mine experiment=config"),
        ("train --config config.yaml", "chosen with --config-dir mine experiment=config"),
        ("train -c config.yaml", "-c job|hydra|all"),
        ("train data.train[0].path=x", "give the whole list, data.train='[...]'"),
        ("train data.raw=[a", "the bracket [ is not closed"),
        ("train +foo.bar=1", "unknown key foo.bar"),
        ("train ~foo", "unknown key foo"),
        ("train optim.lr=1|optim.beta=2|train.steps=3", "has two settings"),
    ],
)
def test_an_argument_that_is_no_override_is_answered_with_what_to_type(line: str, expected: str) -> None:
    """Catches a library's message, or none, for what newcomers type first."""
    name, *arguments = line.split()
    with pytest.raises(ConfigError) as caught:
        overrides_of(verb_of(name), [text.replace("|", " ") if "has two" in expected else text for text in arguments])
    assert expected.lower() in str(caught.value).lower()


def test_flags_come_before_overrides() -> None:
    """Catches flags between overrides, which Hydra refuses."""
    line = ["train.steps=1", "--config-dir", "mine", "optim.lr=1", "--cfg=job"]
    assert overrides_of(verb_of("train"), line) == ["--config-dir", "mine", "--cfg=job", "train.steps=1", "optim.lr=1"]


@pytest.mark.parametrize(
    "flags", [["--config-path=saved", "--config-name=config"], ["--config-dir=saved", "-cn=config"]]
)
def test_a_saved_config_as_argument_is_refused_with_the_command_to_use(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback for Hydra's own way to start from a saved config, and a way that does not work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    assert run(["train", "--cfg", "job", "model=tiny", "data.train=d", "run.id=a"]) == 0
    saved = capsys.readouterr().out
    (tmp_path / "saved" / "config.yaml").write_text(saved)
    assert run(["train", *flags]) == 2
    said = capsys.readouterr().err
    assert "is a saved config" in said and "mine/experiment/mine.yaml; megads train --config-dir mine" in said
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{saved}")
    assert run(["train", "--config-dir", "mine", "experiment=mine", "run.id=b", "--cfg", "job"]) == 0
    assert capsys.readouterr().out == saved.replace("id: a\n", "id: b\n")


def test_config_file_errors_name_the_fault_and_texts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a byte order mark reported as a missing first line, a text in place of a list in a library's words, and
    the name `no` read as False."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    file = tmp_path / "mine" / "experiment" / "own.yaml"

    def said(text: str) -> str:
        file.write_text(text)
        code = run(["train", "--config-dir", "mine", "experiment=own", "--cfg", "job"])
        out, err = capsys.readouterr()
        return out if code == 0 else err

    assert "begins with a byte order mark" in said("\ufeff# @package _global_\ntrain: {steps: 1}\n")
    assert "data.train: must be a list" in said("# @package _global_\ndata: {train: d}\n")
    shown = said("# @package _global_\nrun: {name: no, id: 1e5}\ndata: {raw: [2020, on], extensions: [1.0]}\n")
    for line in ("  name: 'no'", "  id: '1e5'", "  - '2020'\n  - 'on'", "  - '1.0'"):
        assert line in shown


def test_a_removed_working_directory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a removed working directory reported as overrides that do not compose."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["train", "model=tiny"]) == 2
    assert "the current folder cannot be used (No such file or directory)" in capsys.readouterr().err


def test_a_library_error_without_a_reason_is_given_one(tmp_path: Path) -> None:
    """Catches "cannot be read: None" for a missing shard: libraries raise OSError without the system's message."""
    with pytest.raises((OSError, SafetensorError)) as caught:
        safe_open(tmp_path / "model-00002.safetensors", framework="pt")
    assert isinstance(caught.value, OSError) and "No such file" in reason_of(caught.value)
    assert reason_of(OSError(2, os.strerror(2))) == "No such file or directory"
