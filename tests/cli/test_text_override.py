"""A text on the command line arrives as it was typed."""

from __future__ import annotations

import random

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from megads.cli.text_override import as_text


def received(argument: str) -> object:
    """What the config holds in the end."""
    override = OverridesParser.create().parse_override(as_text(argument, ("prompt",)))
    assert not override.is_sweep_override()
    return OmegaConf.to_container(OmegaConf.create({"prompt": override.value()}), resolve=True)["prompt"]


def test_any_text_survives() -> None:
    """Catches commas that sweep, brackets that parse, quotes that end the text, ${...} that is resolved."""
    draw = random.Random(0)
    alphabet = [*"ab \\\"'${}()[],=:~+-#%@!?\n\té🚀*&^|<>;/.", "${", "null", "\\"]
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(15))) for _ in range(1500)]
    quoted = [text for text in texts if text.strip()[:1] in "\"'" and text.strip()[-1:] == text.strip()[:1]]
    for text in (text for text in texts if text not in (*quoted, "null")):
        assert received(f"prompt={text}") == text


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("prompt='Once, upon'", "Once, upon"),
        ('prompt="Once, upon"', "Once, upon"),
        ('prompt="No," she said, "never"', '"No," she said, "never"'),
        ("prompt=null", None),
        ("prompt=", ""),
        ("prompt=1", "1"),
    ],
)
def test_quoted_texts_and_null(argument: str, expected: object) -> None:
    """Catches quotes that Hydra's users type from habit in the text, and numbers where a text is wanted."""
    assert received(argument) == expected


def test_other_keys_are_left_alone() -> None:
    """Catches sweeps over other keys that no longer sweep."""
    assert as_text("top_p=0.5,0.9", ("prompt",)) == "top_p=0.5,0.9"
    assert as_text("--help", ("prompt",)) == "--help"
