"""Error messages for a command line or config file that does not compose; tests/cli/test_entry.py runs the command."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, OmegaConf
from yaml import YAMLError

from megads.cli.composition import explain, schema_keys


class Colour(StrEnum):
    red = "red"
    blue = "blue"


@dataclass
class ItemConfig:
    path: str = MISSING


@dataclass
class PartConfig:
    size: int = 3
    colour: Colour = Colour.red
    share: float | None = None
    on: bool = False


@dataclass
class ExampleConfig:
    part: PartConfig = field(default_factory=PartConfig)
    items: list[ItemConfig] = field(default_factory=list)
    name: str = "x"


def said_of(given: Any) -> str:
    """The error message for a config file with these contents."""
    with pytest.raises(Exception) as caught:
        merged = OmegaConf.merge(OmegaConf.structured(ExampleConfig), OmegaConf.create(given))
        OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    return explain(caught.value, ExampleConfig)


def test_schema_keys_list_sections_before_their_keys() -> None:
    """Catches a section missing before its keys, and listed keys of list items, which no dotted key reaches."""
    assert schema_keys(ExampleConfig) == [
        "part", "part.size", "part.colour", "part.share", "part.on", "items", "name"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"part": {"sizze": 3}}, "unknown key part.sizze: did you mean part.size?"),
        ({"size": 3}, "unknown key size: did you mean part.size?"),
        ({"part": {"qqq": 3}}, "unknown key part.qqq; part has size, colour, share, on"),
        ({"prt": {"qqq": 3}}, "unknown key prt: did you mean part?"),
        ({"qqq": 3}, "unknown key qqq; --help lists the main keys, --cfg job all of them"),
        ({"items": [{"pth": "x"}]}, "unknown key pth: did you mean path?"),
        (
            {"part": {"size": "many"}},
            "part.size: Value 'many' of type 'str' could not be converted to Integer (expected an integer",
        ),
        ({"part": {"share": "half"}}, "(expected a number or null)"),
        ({"part": {"on": "perhaps"}}, "(expected true or false)"),
        ({"part": {"colour": "green"}}, "expected one of [red, blue]"),
        ({"items": [{}]}, "items[0].path has no value: it must be set, for example items[0].path=<value>"),
    ],
)
def test_wrong_keys_and_values_are_answered_with_existing_ones(given: dict[str, Any], expected: str) -> None:
    """Catches a suggestion of a key that does not exist, and a rejected value without what is expected instead."""
    assert expected in said_of(given)


@pytest.mark.parametrize("kind", [HydraException, YAMLError, ValueError])
def test_hydras_messages_for_users_are_not_reported_as_crashes(kind: type[Exception]) -> None:
    """Catches Hydra's own message for users that is reported as a crash."""
    assert explain(kind(" You must specify one of [a, b] \n"), ExampleConfig) == "You must specify one of [a, b]"


def test_a_crash_in_hydra_is_reported_with_its_exception_type() -> None:
    """Catches a crash in Hydra that is reported without its exception type."""
    assert explain(TypeError("unhashable"), ExampleConfig) == "the overrides do not compose (TypeError: unhashable)"


def test_an_unknown_group_option_is_answered_with_the_groups_options() -> None:
    """Catches an unknown option of a config group that is reported as a file, or without the group's options."""
    missing = MissingConfigException("no", missing_cfg_file="model/smalll", options=["small", "large"])
    said = "model=smalll: there is no such option: did you mean small?; model has large, small"
    assert explain(missing, ExampleConfig) == said
    missing = MissingConfigException(" In 'x': no such file ", missing_cfg_file="x")
    assert explain(missing, ExampleConfig) == "In 'x': no such file"
