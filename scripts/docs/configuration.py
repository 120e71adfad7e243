"""Writes docs/configuration.md: every verb's groups and keys, taken from conf/ and the config dataclasses.

python scripts/docs/configuration.py            writes the page
python scripts/docs/configuration.py --check    exits 1 when the committed page is not what would be written
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from megads.cli.main import VERBS
from megads.cli.verb import REQUIRED, Key, Verb, config_dir, group_names, group_options, keys, summary, yaml_value

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
COMMAND = "make docs"
_INTRODUCTION = f"""\
# Configuration

Every key that `megads <verb> key=value ...` takes. Defaults are what a verb composes when nothing else is given;
"{REQUIRED}" must be given. `megads <verb> --cfg job` prints the config as composed from your command line, and
`megads completion bash|zsh|fish` completes keys and options with tab.

    megads train train.steps=100                    a key
    megads train model=bloom_560m                   an option of a group: a file of conf/model
    megads train experiment=demo optim.lr=1e-3      the command line wins over the experiment, that over the model
    megads train -m optim.lr=1e-3,3e-4              every value in turn
    megads train --config-dir mine experiment=a     options of your own: mine/experiment/a.yaml, which begins with the
                                                    line `# @package _global_`
    megads train --config-path mine                 a primary config of your own, mine/train.yaml; megads' groups stay
    megads train train.tokens=1.5B                  1e9, 1_000_000, 4k, 1.5M, 2B and 3T are powers of ten; 4Ki is 4096
    megads train data.train='[{{path: a}}]'           quote lists and braces

Written by `{COMMAND}` from the code; do not edit.
"""


def page() -> str:
    """Returns the whole page."""
    return "\n".join([_INTRODUCTION, *(line for verb in VERBS for line in _verb_lines(verb))])


def _verb_lines(name: str) -> Iterator[str]:
    verb: Verb = importlib.import_module(f"megads.cli.{name}").VERB
    yield f"## megads {name}\n"
    yield f"{summary(config_dir() / f'{name}.yaml')}\n"
    for group, default in group_names(name).items():
        yield f"`{group}=` takes one of these{f'; `{default}` unless given' if default else ', or none'}:\n"
        yield from _table(("option", "what it is"), [(f"`{o}`", text) for o, text in group_options(group).items()])
    composed = _composed(verb)
    root: list[Key] = []
    sections: dict[str, list[Key]] = {"": root}
    for key in keys(verb.schema):
        if key.is_section:
            sections[f"{key.name}."] = []
        else:
            # Keys of a list's items stand below the list.
            owner = key.name.partition("[]")[0]
            sections[f"{owner.rpartition('.')[0]}." if "." in owner else ""].append(key)
    for section, members in sections.items():
        if members and section:
            yield f"### {section.rstrip('.')}\n"
            yield f"{_introduction(verb.schema, section)}\n"
        if members:
            yield from _table(("key", "type", "default", "what it does"), [_row(key, composed) for key in members])


def _row(key: Key, composed: Mapping[str, str]) -> tuple[str, ...]:
    default = composed.get(key.name, key.default)
    return f"`{key.name}`", key.kind, default if default == REQUIRED else f"`{default}`", key.explanation


def _composed(verb: Verb) -> dict[str, str]:
    """Returns the values of a verb's config when nothing is given, by dotted key."""
    ConfigStore.instance().store(name=f"{verb.name}_schema", node=verb.schema)
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = OmegaConf.to_container(compose(verb.name), resolve=False, throw_on_missing=False)
    return {name: yaml_value(value) for name, value in _flat(config, "")}


def _flat(content: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _introduction(schema: type, section: str) -> str:
    """Returns the docstring of a section's dataclass, on one line."""
    kind: Any = schema
    for part in section.rstrip(".").split("."):
        kind = get_type_hints(kind)[part]
    return _prose(" ".join(str(inspect.getdoc(kind)).split()))


def _prose(text: str) -> str:
    """Keeps Markdown from taking <word> for HTML; code spans show everything as it is."""
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(text.split("`")))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        # A bar would end the cell, in code too.
        yield "| " + " | ".join(_prose(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is stale")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(
        f"{PAGE.relative_to(PAGE.parents[1])} is not what the code says: run `{COMMAND}` and commit it", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
