"""Help texts and config keys of the verbs, from the dataclasses."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from omegaconf import MISSING

from megads.cli.composition import schema_keys
from megads.cli.main import VERBS
from megads.cli.verb import (
    config_dir,
    describe_keys,
    group_names,
    group_options,
    keys,
    own_config_dirs,
    shipped_file,
    summary,
)
from megads.config.root import RootConfig
from tests.fork_server import ForkServer

Help = Callable[..., str]


@pytest.fixture
def verb_help(fork_server: ForkServer, tmp_path: Path) -> Help:
    def help_of(verb: str, *arguments: str) -> str:
        outcome = fork_server(tmp_path, [verb, *arguments, "--help"])
        assert outcome.code == 0, outcome
        return outcome.out

    return help_of


@pytest.mark.quick("train", "evaluate")
@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_every_group_option_with_its_explanation(verb: str, verb_help: Help) -> None:
    """Catches a verb whose help lacks an option, or text that Hydra substitutes as a placeholder."""
    text = verb_help(verb)
    # Explanations are wrapped to the width of the terminal.
    words = " ".join(text.split())
    for group in group_names(verb):
        assert f"{group}=" in text
        for option, explanation in group_options(group).items():
            assert f"{option} " in text and " ".join(explanation.split()) in words
    assert "Exit codes: 0" in text and "${" not in text and "$$" not in text


def test_help_lists_keys_from_their_docstrings(verb_help: Help) -> None:
    """Catches a hand-written description of a key that differs from its docstring."""
    text = verb_help("tokenizer")
    assert "vocab_size=8192" in text and "Vocabulary size, including the special tokens." in text


def test_help_lists_own_configs(tmp_path: Path, verb_help: Help) -> None:
    """Catches a help that lists only the package's configs."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n# Costs $5.\ntrain: {steps: 1}\n")
    assert "mine Costs $5." in " ".join(verb_help("train", "--config-dir", str(tmp_path)).split())


def test_files_that_configs_name_are_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a config that works in the folder of a checkout only, or whose file an installed megads lacks."""
    checkout = config_dir().parent
    wheel = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    shipped = {folder for folder, target in wheel["force-include"].items() if target == f"megads/{folder}"}
    texts = [path.read_text() for path in config_dir().rglob("*.yaml")]
    names = {name for text in texts for name in re.findall(r"\$\{shipped:([^}]+)\}", text)}
    assert names
    for name in names:
        assert (checkout / name).is_file() and any(name.startswith(f"{folder}/") for folder in shipped)
        monkeypatch.chdir(checkout)
        assert shipped_file(name) == name
        monkeypatch.chdir(tmp_path)
        assert shipped_file(name) == str(checkout / name)


def test_summary_is_the_first_comment_that_is_no_directive(tmp_path: Path) -> None:
    """Catches `@package _global_` shown as an explanation, and a comment from the middle of a file."""
    path = tmp_path / "a.yaml"
    for text, expected in (("# @package x\n\n# Me.\n", ""), ("# @package x\n# Me.\n", "Me."), ("a: 1\n# No.\n", "")):
        path.write_text(text)
        assert summary(path) == expected


def test_options_are_sorted_by_size() -> None:
    """Catches bloom_176b listed before bloom_1b1."""
    names = [name for name in group_options("model") if name.startswith("bloom_")]
    assert names == ["bloom_560m", "bloom_1b1", "bloom_1b7", "bloom_3b", "bloom_7b1", "bloom_176b"]


def test_every_spelling_of_config_dir_is_recognized() -> None:
    """Catches a spelling of --config-dir that is not recognized."""
    assert own_config_dirs(["--config-dir", "a", "-cd", "b", "--config-dir=c", "-cd"]) == [*map(Path, "abc")]
    assert config_dir().is_dir()


class Colour(StrEnum):
    red = "red"
    blue = "blue"


@dataclass
class ItemConfig:
    path: str = MISSING
    """Where."""


@dataclass
class PartConfig:
    size: int = 3
    """How large,
    in metres."""


@dataclass
class BaseConfig:
    shared: bool = False
    """Of the base class."""


@dataclass
class ExampleConfig(BaseConfig):
    colour: Colour | None = None
    """Which."""
    part: PartConfig = field(default_factory=PartConfig)
    """A part."""
    items: list[ItemConfig] = field(default_factory=list)
    """Several."""
    undocumented: str = "x"
    weights: dict[str, float] = field(default_factory=lambda: {"a": 0.5})
    """By name."""
    placeholder: int = 1
    switch: bool | str = field(default=False, metadata={"choices": ("true", "false", "auto")})


def test_every_kind_of_field_is_listed_as_it_is_typed() -> None:
    """Catches a type shown in Python syntax, a default that cannot be typed on the command line, a lost docstring."""
    found = [(key.name, key.kind, key.default, key.choices, key.explanation) for key in keys(ExampleConfig)]
    assert found == [
        ("shared", "true or false", "false", ("true", "false"), "Of the base class."),
        ("colour", "red, blue or null", "null", ("red", "blue", "null"), "Which."),
        ("part", "{size}", "", (), "A part."),
        ("part.size", "integer", "3", (), "How large, in metres."),
        ("items", "list of {path}", "[]", (), "Several."),
        ("items[].path", "text", "required", (), "Where."),
        ("undocumented", "text", "x", (), ""),
        ("weights", "numbers by name", "{a: 0.5}", (), "By name."),
        ("placeholder", "integer", "1", (), ""),
        ("switch", "true or false or auto", "false", ("true", "false", "auto"), ""),
    ]


def test_every_key_that_errors_suggest_is_explained() -> None:
    """Catches a key that the listing misses, and a key without a docstring."""
    found = {key.name: key.explanation for key in keys(RootConfig) if "[]" not in key.name}
    assert list(found) == schema_keys(RootConfig)
    assert [name for name, explanation in found.items() if not explanation] == []


def test_help_marks_required_keys_as_such() -> None:
    """Catches a required key that is shown as if it had a default."""
    assert "path=<text>  Where." in describe_keys(ItemConfig)
    assert len(describe_keys(ExampleConfig).splitlines()) == 8
