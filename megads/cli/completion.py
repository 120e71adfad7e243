"""Shell completion: what may follow on a command line, and the scripts that ask for it.

The user waits for every answer, so nothing here imports Hydra, torch or DeepSpeed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megads.cli.reference import Key, group_names, group_options, keys, own_config_dirs
from megads.cli.verb import Verb

SHELLS = {
    "bash": 'eval "$(megads completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(megads completion zsh)" in ~/.zshrc, after compinit',
    "fish": "megads completion fish | source, in ~/.config/fish/config.fish",
}
"""Shells with a script, and how each takes it."""

_FLAGS = {
    "--help": "the verb's groups and keys",
    "--cfg": "print the composed config: job, hydra or all",
    "--resolve": "with --cfg: resolve interpolations",
    "--multirun": "run every point of comma-separated values",
    "--config-dir": "a folder of your own configs",
    "--info": "what Hydra knows of itself, the config and the plugins",
}
_CFG = {"job": "the verb's config", "hydra": "Hydra's own config", "all": "both"}


class Suggestion(NamedTuple):
    """One word that may stand at the cursor; one that ends in `=` or `.` goes on."""

    text: str
    explanation: str


def script(shell: str) -> str:
    """Returns the script that makes a shell complete megads commands.

    Args:
        shell: one of SHELLS.
    """
    return (Path(__file__).parent / "shells" / f"megads.{shell}").read_text(encoding="utf-8")


def complete(words: Sequence[str], verbs: Mapping[str, str], commands: Mapping[str, str]) -> list[Suggestion]:
    """Returns the candidates for the last word; none where a file name or a free value is wanted.

    Args:
        words: the command line after `megads` up to the cursor; the last word may be empty.
        verbs: the Hydra verbs with their summaries.
        commands: the other commands with theirs.
    """
    *before, current = words
    if not before:
        return _matching({**verbs, **commands, "--help": "all verbs", "--version": "the version"}, current)
    if before[0] == "completion":
        return _matching(SHELLS, current) if len(before) == 1 else []
    if before[0] not in verbs or before[-1] in ("--config-dir", "-cd"):
        return []
    if before[-1] in ("--cfg", "-c"):
        return _matching(_CFG, current)
    verb: Verb = importlib.import_module(f"megads.cli.{before[0]}").VERB
    if current.startswith("-"):
        return _matching({**dict.fromkeys(verb.flags, "short for an override"), **_FLAGS}, current)
    # +key=value and ++key=value are overrides too.
    sign = current[: len(current) - len(current.lstrip("+~"))]
    found = _override(verb, current[len(sign) :], own_config_dirs(words))
    words_alone = {flag: override for flag, override in verb.flags.items() if not flag.startswith("-")}
    return _matching(words_alone, current) + [Suggestion(sign + text, explanation) for text, explanation in found]


def _override(verb: Verb, current: str, own_dirs: Sequence[Path]) -> list[Suggestion]:
    """Returns what `current` may become: a group, a section, a key, or a value."""
    name, equals, value = current.partition("=")
    groups = group_names(verb.name)
    known = [key for key in keys(verb.schema) if "[]" not in key.name]
    if not equals:
        choices = {f"{group}=": f"choose one of {group}'s options" for group in groups}
        return _matching({**choices, **dict(_next_parts(known, name))}, current)
    if name in groups:
        values = group_options(name, own_dirs)
    else:
        values = {choice: "" for key in known if key.name == name for choice in key.choices}
    # `-m` sweeps over comma-separated values: the last of them is being typed.
    typed = current[: len(current) - len(value.rpartition(",")[2])]
    return _matching({typed + option: explanation for option, explanation in values.items()}, current)


def _next_parts(known: Sequence[Key], current: str) -> Iterator[tuple[str, str]]:
    """Yields keys of the section that is being typed: `train.` first, what is in it once the dot is there."""
    depth = current.count(".")
    for key in known:
        if key.name.count(".") == depth:
            kind = "" if key.is_section else f" ({key.kind}; {key.default})"
            yield f"{key.name}{'.' if key.is_section else '='}", f"{key.explanation}{kind}"


def _matching(options: Mapping[str, str], current: str) -> list[Suggestion]:
    return [Suggestion(text, explanation) for text, explanation in options.items() if text.startswith(current)]
