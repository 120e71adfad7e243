"""A verb: its schema, its function, and its config groups and keys, as shown by --help, completion and docs.

Shell completion imports this module, so it must import fast.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

import megads
from megads.cli.help_text import two_columns

REQUIRED = "required"
# OmegaConf's value of a mandatory field without a value.
_MANDATORY = "???"
_TYPE_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", NoneType: "null"}
_UNITS = {"m": 1e6, "b": 1e9}


@dataclass(frozen=True)
class Invocation:
    """Information from the command line that is not in the config.

    Attributes:
        choices: selected option of each config group; None if none is selected.
        claimed_dirs: output directories of earlier points of the same sweep; one set, shared by all points.
        on_run_dir: called with the run directory of `megads train`, before anything is written to it.
    """

    choices: Mapping[str, str | None]
    claimed_dirs: set[str]
    on_run_dir: Callable[[Path], None] = lambda _run_dir: None


@dataclass(frozen=True)
class Verb:
    """One command: `megads <name>`, composed from conf/<name>.yaml.

    Attributes:
        name: name of the verb.
        schema: dataclass of its config.
        run: function that runs the verb with an instance of `schema` and returns the exit code.
        flags: override by flag or word that is short for it, such as --json for json=true or merge for action=merge.
        text_keys: keys whose values are taken literally, commas and brackets included.
        sweep: replaces the default -m, which runs every point in this process; called with the arguments without -m,
            returns the exit code.
        refused: called with the arguments if no config could be composed from them.
    """

    name: str
    schema: type
    run: Callable[[Any, Invocation], int]
    flags: Mapping[str, str] = field(default_factory=dict)
    text_keys: tuple[str, ...] = ()
    sweep: Callable[[Sequence[str]], int] | None = None
    refused: Callable[[Sequence[str]], None] | None = None


def config_dir() -> Path:
    """Returns the folder of the YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(megads.__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def shipped_file(path: str) -> str:
    """Returns where a file of the checkout lies that the installed package has too: `${shipped:<path>}` in conf/.

    Args:
        path: relative to the checkout, below a folder that pyproject.toml includes in the wheel.

    Returns:
        The path as it is where the command is started in the checkout, so that configs name no folder of a machine;
        elsewhere the absolute path.
    """
    return path if Path(path).exists() else str(config_dir().parent / path)


def summary(path: Path) -> str:
    """Returns the first comment line of a YAML file that is not a `@package` directive, or an empty string."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return ""
        comment = line.lstrip("#").strip()
        if comment and not comment.startswith("@package"):
            return comment
    return ""


def group_names(verb: str) -> dict[str, str | None]:
    """Returns the config groups of a verb in the order of its defaults list, each with its default option."""
    primary = yaml.safe_load((config_dir() / f"{verb}.yaml").read_text(encoding="utf-8")) or {}
    names: dict[str, str | None] = {}
    for entry in primary.get("defaults", []):
        if isinstance(entry, dict):
            for group, option in entry.items():
                if not group.startswith(("override ", "hydra/")):
                    names[group.removeprefix("optional ")] = option
    return names


def group_options(group: str, own_dirs: Sequence[Path] = ()) -> dict[str, str]:
    """Returns the options of a config group, sorted by name and model size, each with its explanation.

    Args:
        group: folder below conf/.
        own_dirs: the user's config folders, as given with --config-dir.
    """
    options = {}
    for folder in (config_dir() / group, *(own / group for own in own_dirs)):
        for path in folder.rglob("*.yaml"):
            options[str(path.relative_to(folder).with_suffix(""))] = summary(path)
    return dict(sorted(options.items(), key=lambda item: _by_size(item[0])))


def _by_size(name: str) -> list[tuple[str, float]]:
    """Sort key that orders bloom_1b1, bloom_7b1, bloom_176b by size and all other names alphabetically."""
    parts = []
    for part in name.split("_"):
        size = re.fullmatch(r"(\d+)([mb])(\d*)", part)
        parts.append(("", float(f"{size[1]}.{size[3] or 0}") * _UNITS[size[2]]) if size else (part, 0.0))
    return parts


def own_config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Returns the folders given with --config-dir on a command line."""
    found = []
    for position, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            given = value or (arguments[position + 1] if position + 1 < len(arguments) else "")
            found += [Path(given)] if given else []
    return found


def describe_groups(verb: str, own_dirs: Sequence[Path] = ()) -> str:
    """Returns the config groups of a verb and their options as lines of `--help`."""
    lines = []
    for group, default in group_names(verb).items():
        lines.append(f"{group}={default or '<option>'}{' by default' if default else ', none by default'}")
        options = group_options(group, own_dirs)
        lines.append(two_columns(list(options.items()), indent=2))
    return "\n".join(lines)


@dataclass(frozen=True)
class Key:
    """One config key.

    Attributes:
        name: dotted key, for example train.seed; keys of list items contain [].
        kind: description of its type.
        default: default value as YAML, or "required".
        choices: allowed values, if they can be enumerated.
        explanation: docstring of the field, on one line.
        is_section: whether it contains keys instead of a value.
    """

    name: str
    kind: str
    default: str
    choices: tuple[str, ...]
    explanation: str
    is_section: bool


@functools.cache
def keys(schema: type) -> tuple[Key, ...]:
    """Returns all keys of a config dataclass in the order of its fields, each section before its keys."""
    return tuple(_walk(schema, ""))


def _walk(schema: type, prefix: str) -> Iterator[Key]:
    hints = get_type_hints(schema)
    docs = _field_docs(schema)
    for item in fields(schema):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        is_section = isinstance(hint, type) and is_dataclass(hint)
        default = "" if is_section else _default(item)
        # Names that plugins can extend are given as metadata, not as an enum.
        choices = tuple(item.metadata.get("choices", ())) or _choices(hint)
        kind = _kind(hint)
        if choices and kind.startswith(("integer or text", "true or false or text")):
            kind = kind.replace("text", ", ".join(name for name in choices if name not in ("true", "false")))
        yield Key(name, kind, default, choices, docs.get(item.name, ""), is_section)
        if is_section:
            yield from _walk(hint, f"{name}.")
        elif get_origin(hint) is list and is_dataclass(get_args(hint)[0]):
            yield from _walk(get_args(hint)[0], f"{name}[].")


def _field_docs(schema: type) -> dict[str, str]:
    """Returns the docstring of each field, those of base classes included."""
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
    """Returns a value as it is typed on the command line."""
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
        return "values by name" if arguments[1] is Any else f"{_plural(_kind(arguments[1]))} by name"
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
    # Only with other choices is null one.
    return (*found, "null") if found and NoneType in options else tuple(found)


def describe_keys(schema: type) -> str:
    """Returns all keys of a config dataclass as lines of `--help`."""
    rows = [(_typed(key), key.explanation) for key in keys(schema) if not key.is_section and "[]" not in key.name]
    return two_columns(rows)


def _typed(key: Key) -> str:
    return f"{key.name}={'<' + key.kind + '>' if key.default == REQUIRED else key.default}"
