"""Overrides whose value is a text: a prompt with commas, brackets or quotes is not Hydra's grammar but a text."""

from __future__ import annotations

import re
from collections.abc import Collection

# What Hydra would read as one quoted string: the user knows its grammar.
_QUOTED = re.compile(r"""\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*""", re.DOTALL)


def as_text(argument: str, keys: Collection[str]) -> str:
    """Quotes the value of an override for Hydra.

    Args:
        argument: an argument of the command line.
        keys: keys whose values are texts.

    Returns:
        The argument as Hydra must see it to give the text back; unchanged for other keys, for null, and for a value
        that already is one quoted string.
    """
    key, equals, value = argument.partition("=")
    if key not in keys or not equals or value == "null" or _QUOTED.fullmatch(value):
        return argument
    # OmegaConf would resolve ${...}; in front of it, and of a closing quote, backslashes count double.
    value = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", value)
    value = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (found[2] and '\\"'), value)
    return f'{key}="{value}"'
