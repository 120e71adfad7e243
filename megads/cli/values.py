"""Values of overrides in Hydra's grammar: quoting, lists of one, home folders."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from megads.runtime.environment import home_dir

# A value that Hydra parses as one quoted string.
_QUOTED_TEXT = re.compile(r"""\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*""", re.DOTALL)
_SCALAR = re.compile(r"[\w./:+%@*?|& \t-]*", re.ASCII)
_QUOTES = "\"'"
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)


def as_text(argument: str, keys: Collection[str]) -> str:
    """Quotes the value of an override for Hydra.

    Args:
        argument: an argument of the command line.
        keys: keys whose values are texts.

    Returns:
        The argument, quoted so that Hydra parses the value as this text; unchanged for other keys, for null, and for a
        value that is already one quoted string.
    """
    key, equals, value = argument.partition("=")
    if key not in keys or not equals or value == "null" or _QUOTED_TEXT.fullmatch(value):
        return argument
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """Returns a text as a quoted string that Hydra parses as exactly this text."""
    # Escapes ${...}, which OmegaConf would resolve; before it, and before the closing quote, backslashes are doubled.
    text = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", text)
    text = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (found[2] and '\\"'), text)
    return f'"{text}"'


# A ~ at the start of a value, or of an item of a list.
_HOME = re.compile(r"(?<=[=\[,:])(\s*)~(?=[/,\]}]|$)")


def expand_home(argument: str) -> str:
    """Returns an override with `~` expanded to the user's home, which shells do not do after `key=` and in lists.

    Hydra's grammar has no `~` in values, so no valid value is changed. Quoted values are not changed.

    Args:
        argument: an argument of the command line.
    """
    home = home_dir()
    if home is None or "~" not in argument or "'" in argument or '"' in argument:
        return argument
    return _HOME.sub(lambda found: found[1] + str(home), argument)


def _tokens(value: str) -> Iterator[str]:
    """Cuts a value into brackets, commas, quoted strings and what is between them; a colon only after a key in {}."""
    depth, in_key, token, place = "", False, "", 0
    while place < len(value):
        character = value[place]
        string = _STRING.match(value, place) if not token.strip() else None
        cuts = character in "[]{}," or (character == ":" and in_key and depth.endswith("{"))
        if string is not None or cuts:
            if token:
                yield token
            token = ""
            yield string[0] if string is not None else character
            place = string.end() if string is not None else place + 1
            if string is None:
                depth = depth + character if character in "[{" else depth[:-1] if character in "]}" else depth
                in_key = character in "{,"
            continue
        token += character
        place += 1
    if token:
        yield token


def quote_scalars(value: str) -> str:
    """Quotes the texts in a value, or in its lists and mappings, that Hydra cannot read unquoted: `[it's, a=b]`."""

    def shown(token: str) -> str:
        bare = token.strip()
        if bare in (*"[]{},:", "") or _STRING.fullmatch(token) or _SCALAR.fullmatch(bare):
            return token
        return token.replace(bare, quoted(bare), 1)

    return "".join(shown(token) for token in _tokens(value))


def _items(inside: str) -> list[str]:
    """Cuts the inside of a list at its own commas."""
    items, depth = [""], 0
    for token in _tokens(inside):
        depth += (token in _CLOSING) - (token in "]}")
        if token == "," and not depth:
            items.append("")
        else:
            items[-1] += token
    return [item.strip() for item in items]


def to_list_override(value: str, kind: str, swept: bool = False) -> str:
    """Returns the value of a key that takes a list: one that is no list becomes a list of one.

    Args:
        value: the value, as Hydra reads it.
        kind: description of the key's type. Items of datasets may be given as their paths.
        swept: the value is several ones, separated by commas.
    """
    if swept:
        return ",".join(to_list_override(item, kind) for item in _items(value)) if "(" not in value else value
    bare = value.strip()
    if bare == "null" and kind.endswith("or null"):
        return value
    items = _items(bare[1:-1]) if bare.startswith("[") and bare.endswith("]") else [bare]
    items = [item for item in items if item]
    if kind.startswith("list of {path,"):
        items = [
            item if item[0] == "{" else f"{{path: {item if item[0] in _QUOTES else quoted(item)}}}" for item in items
        ]
    elif bare.startswith("["):
        return value
    return f"[{', '.join(items)}]"


def unbalanced_bracket(value: str) -> str:
    """Returns which bracket or quote of a value has no partner, as a sentence; empty if all have one."""
    rest = _STRING.sub("", value)
    opened: list[str] = []
    for character in rest:
        if character in _CLOSING:
            opened.append(character)
        elif character in _CLOSING.values() and (not opened or _CLOSING[opened.pop()] != character):
            return f"there is no bracket that {character} closes"
    if opened:
        return f"the bracket {opened[-1]} is not closed"
    quote = next((character for character in rest if character in "\"'"), "")
    return f"the quote {quote} is not closed" if quote else ""
