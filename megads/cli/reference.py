"""The keys of a verb as its dataclasses state them: type, default, choices and the docstring under each field."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

REQUIRED = "required"
# What OmegaConf holds in a mandatory field that has no value.
_MANDATORY = "???"
_TYPE_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", NoneType: "null"}


@dataclass(frozen=True)
class Key:
    """One dotted key.

    Attributes:
        name: as typed, for example train.seed; keys of a list's items have [] in it.
        kind: its type in words.
        default: as YAML, or "required".
        choices: the values it can take, where they can be counted.
        explanation: the docstring under the field, on one line.
        is_section: it holds keys and takes no value.
    """

    name: str
    kind: str
    default: str
    choices: tuple[str, ...]
    explanation: str
    is_section: bool


def keys(schema: type) -> list[Key]:
    """Returns every key of a config dataclass in the order of its fields, each section before what it holds."""
    return list(_walk(schema, ""))


def _walk(schema: type, prefix: str) -> Iterator[Key]:
    hints = get_type_hints(schema)
    docs = _field_docs(schema)
    for item in fields(schema):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        is_section = isinstance(hint, type) and is_dataclass(hint)
        default = "" if is_section else _default(item)
        yield Key(name, _kind(hint), default, _choices(hint), docs.get(item.name, ""), is_section)
        if is_section:
            yield from _walk(hint, f"{name}.")
        elif get_origin(hint) is list and is_dataclass(get_args(hint)[0]):
            yield from _walk(get_args(hint)[0], f"{name}[].")


def _field_docs(schema: type) -> dict[str, str]:
    """Returns the string literal under each field, those of base classes included."""
    docs: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        body = _class_bodies(owner.__module__).get(owner.__name__, []) if is_dataclass(owner) else []
        for item, follower in itertools.pairwise(body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                literal = follower.value if isinstance(follower, ast.Expr) else None
                if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                    docs[item.target.id] = " ".join(inspect.cleandoc(literal.value).split())
    return docs


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def _default(item: Field[Any]) -> str:
    if item.default_factory is not NO_DEFAULT:
        return yaml_value(item.default_factory())
    return REQUIRED if item.default is NO_DEFAULT else yaml_value(item.default)


def yaml_value(value: Any) -> str:
    """Returns a value as one would type it on the command line."""
    if value == _MANDATORY:
        return REQUIRED
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {yaml_value(item)}" for name, item in value.items()) + "}"
    return str(value)


def _kind(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_kind(option) for option in arguments)
    if origin is list:
        return f"list of {_plural(_kind(arguments[0]))}"
    if origin is dict:
        return f"{_plural(_kind(arguments[1]))} by name"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(str(option.value) for option in hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return "{" + ", ".join(item.name for item in fields(hint)) + "}"
    return _TYPE_NAMES.get(hint, "any")


def _plural(kind: str) -> str:
    return kind if kind.startswith("{") or " " in kind else f"{kind}s"


def _choices(hint: Any) -> tuple[str, ...]:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    found: list[str] = []
    for option in options:
        if option is bool:
            found += ["true", "false"]
        elif isinstance(option, type) and issubclass(option, Enum):
            found += [str(member.value) for member in option]
    # `null` alone is no choice.
    return (*found, "null") if found and NoneType in options else tuple(found)


def describe_keys(schema: type) -> str:
    """Returns every key of a verb as lines of `--help`."""
    rows = [(_typed(key), key.explanation) for key in keys(schema) if not key.is_section and "[]" not in key.name]
    width = max((len(typed) for typed, _ in rows), default=0)
    return "\n".join(f"{typed:<{width}}  {explanation}" for typed, explanation in rows)


def _typed(key: Key) -> str:
    return f"{key.name}={'<' + key.kind + '>' if key.default == REQUIRED else key.default}"
