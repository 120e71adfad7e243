"""Keys as the dataclasses state them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from megads.cli.composition_errors import schema_keys
from megads.cli.reference import describe_keys, keys
from megads.config import RootConfig


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
    weights: dict[str, float] = field(default_factory=lambda: {"a": 0.5})
    """By name."""
    undocumented: str = "x"


def test_every_kind_of_field() -> None:
    """Catches a type that is shown as Python writes it, a default that cannot be typed, a lost docstring."""
    found = [(key.name, key.kind, key.default, key.choices, key.explanation) for key in keys(ExampleConfig)]
    assert found == [
        ("shared", "true or false", "false", ("true", "false"), "Of the base class."),
        ("colour", "red, blue or null", "null", ("red", "blue", "null"), "Which."),
        ("part", "{size}", "", (), "A part."),
        ("part.size", "integer", "3", (), "How large, in metres."),
        ("items", "list of {path}", "[]", (), "Several."),
        ("items[].path", "text", "required", (), "Where."),
        ("weights", "numbers by name", "{a: 0.5}", (), "By name."),
        ("undocumented", "text", "x", (), ""),
    ]


def test_every_key_that_errors_suggest_is_explained() -> None:
    """Catches a walk over the schema that misses a key, and a key without a docstring."""
    found = {key.name: key.explanation for key in keys(RootConfig) if "[]" not in key.name}
    assert list(found) == schema_keys(RootConfig)
    assert [name for name, explanation in found.items() if not explanation] == []


def test_help_has_a_line_a_key() -> None:
    """Catches a required key that looks as if it had a value."""
    assert "path=<text>  Where." in describe_keys(ItemConfig)
    assert len(describe_keys(ExampleConfig).splitlines()) == 6
