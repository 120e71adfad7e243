"""The config groups of a verb and their options, each with the first comment of its YAML file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

import megads

_UNITS = {"m": 1e6, "b": 1e9}


def config_dir() -> Path:
    """Returns the folder of the YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(megads.__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def summary(path: Path) -> str:
    """Returns the first comment line of a YAML file that is no `@package` directive, or nothing."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return ""
        comment = line.lstrip("#").strip()
        if comment and not comment.startswith("@package"):
            return comment
    return ""


def group_names(verb: str) -> dict[str, str | None]:
    """Returns the groups that a verb chooses from, in the order of its defaults list, each with its default option."""
    primary = yaml.safe_load((config_dir() / f"{verb}.yaml").read_text(encoding="utf-8")) or {}
    names: dict[str, str | None] = {}
    for entry in primary.get("defaults", []):
        if isinstance(entry, dict):
            for group, option in entry.items():
                if not group.startswith(("override ", "hydra/")):
                    names[group.removeprefix("optional ")] = option
    return names


def group_options(group: str, own_dirs: Sequence[Path] = ()) -> dict[str, str]:
    """Returns the options of a group sorted by name and size, each with its explanation.

    Args:
        group: folder below conf/.
        own_dirs: the user's folders of configs, as given with --config-dir.
    """
    options = {}
    for folder in (config_dir() / group, *(own / group for own in own_dirs)):
        for path in folder.rglob("*.yaml"):
            options[str(path.relative_to(folder).with_suffix(""))] = summary(path)
    return dict(sorted(options.items(), key=lambda item: _by_size(item[0])))


def _by_size(name: str) -> list[tuple[str, float]]:
    """Sorts bloom_1b1, bloom_7b1, bloom_176b by their sizes, and all other names by their letters."""
    parts = []
    for part in name.split("_"):
        size = re.fullmatch(r"(\d+)([mb])(\d*)", part)
        parts.append(("", float(f"{size[1]}.{size[3] or 0}") * _UNITS[size[2]]) if size else (part, 0.0))
    return parts


def own_config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Returns the folders that a command line names with --config-dir."""
    found = []
    for position, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            given = value or (arguments[position + 1] if position + 1 < len(arguments) else "")
            found += [Path(given)] if given else []
    return found


def describe_groups(verb: str, own_dirs: Sequence[Path] = ()) -> str:
    """Returns the groups of a verb and their options as lines of `--help`."""
    lines = []
    for group, default in group_names(verb).items():
        lines.append(f"{group}={default or '<option>'}{' unless given' if default else ', none unless given'}")
        options = group_options(group, own_dirs)
        width = max((len(option) for option in options), default=0)
        lines += [f"  {option:<{width}}  {explanation}" for option, explanation in options.items()]
    return "\n".join(lines)
