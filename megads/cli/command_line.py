"""What users type, as arguments that Hydra reads: flags first, then overrides of keys that exist.

Values that Hydra's grammar does not accept are quoted, a value for a key that takes a list becomes a list of one, and
what is no override (other tools' flags, positional arguments, `key = value` with spaces) is refused with what to type.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from megads.cli.composition import (
    added_key_fault,
    expand_counts,
    integer_keys,
    quote_texts,
    suggested_keys,
    text_keys,
    with_current_keys,
)
from megads.cli.values import as_text, expand_home, quote_scalars, quoted, to_list_override, unbalanced_bracket
from megads.cli.verb import REQUIRED, Key, Verb, config_dir, group_names, group_options, keys, own_config_dirs
from megads.errors import ConfigError
from megads.runtime.run_dir import is_run_dir

SWEEP_FLAGS = ("-m", "--multirun")
_BARE_FLAGS = (
    *SWEEP_FLAGS,
    *("-h", "--help", "--hydra-help", "--version", "--resolve", "--shell-completion", "-sc"),
)
_PATH_FLAGS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun")
_PACKAGE_FLAGS = ("--package", "-p")
_VALUE_FLAGS = (*_PATH_FLAGS, *_PACKAGE_FLAGS)
_SHOW = {
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
}
_PLAIN = re.compile(r"[\w./:+%@*?|&-]*", re.ASCII)
"""Values that Hydra reads as one text, number or truth value."""
_KEY = re.compile(r"[A-Za-z_][\w.-]*(?:[/@:][\w./@:-]*)?", re.ASCII)
_MAIN_KEYS = ("run", "input", "data.raw", "run.dir")
"""Keys that a positional argument is likely meant for, the likeliest first."""


def overrides_of(verb: Verb, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command line as Hydra reads them: its flags, then the overrides.

    Args:
        verb: the command.
        arguments: what follows it on the command line.

    Raises:
        ConfigError: an argument is neither a flag nor an override, or its value cannot be read; the message names what
            to type.
    """
    line = _CommandLine(verb, arguments)
    line.read()
    return [*line.flags, *line.words, *map(line.override, with_current_keys(line.overrides))]


class _CommandLine:
    """A command line, taken apart.

    Args:
        verb: the command.
        arguments: what follows it.

    Attributes:
        flags: Hydra's flags, each with its value.
        words: the verb's own flags and words.
        overrides: everything else, as typed.
    """

    def __init__(self, verb: Verb, arguments: Sequence[str]) -> None:
        self.verb = verb
        self.arguments = list(arguments)
        self.flags: list[str] = []
        self.words: list[str] = []
        self.overrides: list[str] = []
        self._known = {key.name: key for key in keys(verb.schema) if not (key.is_section or "[]" in key.name)}
        self._groups = group_names(verb.name)
        self._own_dirs = own_config_dirs(arguments)
        self._parser = OverridesParser.create()

    @property
    def sweeps(self) -> bool:
        """Whether values are comma-separated lists of points."""
        return any(flag in SWEEP_FLAGS for flag in self.flags)

    def _shows_config(self) -> bool:
        return any(text.partition("=")[0] in ("--cfg", "-c") for text in self.arguments)

    def read(self) -> None:
        """Sorts the arguments; raises ConfigError on one that is neither a flag nor an override."""
        place = 0
        while place < len(self.arguments):
            text = self.arguments[place]
            following = self.arguments[place + 1] if place + 1 < len(self.arguments) else ""
            name, equals, _ = text.partition("=")
            if text in self.verb.flags:
                self.words.append(self.verb.flags[text])
            elif name in _PACKAGE_FLAGS and not self._shows_config():
                self._refuse_flag(text, following)
            elif name in (*_VALUE_FLAGS, *_SHOW) or name in _BARE_FLAGS:
                place += self._take_flag(text, following)
            elif text.startswith("-"):
                self._refuse_flag(text, following)
            elif not equals and not text.startswith("~"):
                self._refuse_word(text, place)
            elif not name.strip("+~ "):
                raise ConfigError(f"{text!r}: there is no key before the =: write key=value, without spaces around =")
            else:
                self.overrides.append(text)
            place += 1

    def _take_flag(self, text: str, following: str) -> int:
        """Adds a flag; returns the number of further arguments that are its value."""
        name, equals, value = text.partition("=")
        if name in _BARE_FLAGS:
            if equals:
                raise ConfigError(f"{text}: {name} takes no value")
            self.flags.append(name)
            return 0
        takes_next = not equals and bool(following) and not following.startswith("-")
        optional = name in ("--info", "-i")
        if optional and following not in _SHOW[name]:
            takes_next = False
        given = following if takes_next else value
        if name in _SHOW and given not in _SHOW[name] and not (optional and not equals):
            shown = f"{name} {given}".strip()
            raise ConfigError(
                f"{shown}: {name} prints the config: {name} {'|'.join(_SHOW[name])}. {self._config_advice(given)}"
            )
        if name in _VALUE_FLAGS and not given:
            raise ConfigError(f"{name}: has no value: {name} <folder>")
        self.flags += [name, following] if takes_next else [text]
        return int(takes_next)

    def _refuse_flag(self, text: str, following: str) -> None:
        name, equals, value = text.partition("=")
        if not equals and following and not following.startswith("-") and "=" not in following:
            value = following
        near = difflib.get_close_matches(name, [*_BARE_FLAGS, *_VALUE_FLAGS, *_SHOW, *self.verb.flags], n=1, cutoff=0.8)
        if name.lstrip("-").replace("-", "_") in ("config", "config_file", "conf", "cfg_file"):
            raise ConfigError(f"{name}: there is no such flag. {self._config_advice(value)}")
        meant = suggested_keys(name.lstrip("-"), self.verb.schema)
        # A switch such as --overwrite has no value.
        if meant and not value and self._known[meant[0]].kind.startswith("true or false"):
            value = "true"
        if not meant and near:
            raise ConfigError(f"{name}: there is no such flag: did you mean {near[0]}?")
        typed = self._typed(meant, value)
        raise ConfigError(f"{name}: there is no such flag: settings are written key=value, without dashes; {typed}")

    def _refuse_word(self, text: str, place: int) -> None:
        before = self.arguments[place - 1] if place else ""
        following = self.arguments[place + 1] if place + 1 < len(self.arguments) else ""
        if before.endswith("=") and before in self.overrides:
            raise ConfigError(f"{before} {text}: write {before}{text}, without a space")
        key, separator, value = text.partition(":")
        if following == "=":
            following = "".join(self.arguments[place + 2 : place + 3])
        elif "=" in following.lstrip("="):
            following = ""
        meant = [key] if key in self._known else suggested_keys(key, self.verb.schema) if separator or following else []
        if meant and not self._near_word(text):
            value = value if separator else following
            example = self._typed(meant, value.strip().removeprefix("="))
            raise ConfigError(f"{text}: settings are written key=value, without spaces; {example}")
        raise ConfigError(f"{text!r} is no setting: settings are written key=value. {self._meant_by_word(text)}")

    def _near_word(self, text: str) -> str:
        words = [word for word in self.verb.flags if word[0] != "-"]
        return "".join(difflib.get_close_matches(text, words, n=1))

    def _meant_by_word(self, text: str) -> str:
        if near := self._near_word(text):
            return f"Did you mean {near}?"
        for group in self._groups:
            if text in group_options(group, self._own_dirs):
                return f"Did you mean {group}={text}?"
        if text.endswith((".yaml", ".yml")):
            return self._config_advice(text)
        main = [name for name in _MAIN_KEYS if name in self._known]
        if text.isdecimal():
            main = [
                key.name for key in self._known.values() if key.kind == "integer" and key.default == REQUIRED
            ] or main
        elif "prompt" in self._known and not Path(text).exists() and "/" not in text:
            main = ["prompt"]
        if "data.raw" in main and is_run_dir(Path(text)):
            return f"{text} is a run: the command that started it continues it"
        if not main:
            return f"megads {self.verb.name} --help lists the keys"
        return f"Did you mean {main[0]}={_shown(text)}? megads {self.verb.name} --help lists the keys"

    def _typed(self, names: Sequence[str], value: str) -> str:
        """Returns what to type for keys that may be meant."""
        if not names:
            return f"megads {self.verb.name} --help lists the keys"
        shown = _shown(value) or "<value>"
        return f"did you mean {' or '.join(f'{name}={shown}' for name in names)}?"

    def _config_advice(self, text: str) -> str:
        if "experiment" not in self._groups:
            return f"megads {self.verb.name} reads no config file: give its keys as key=value"
        name = Path(text).stem if text.endswith((".yaml", ".yml")) else "mine"
        return (
            f"A config file of your own is an experiment: mine/experiment/{name}.yaml, its first line "
            f"`# @package _global_`, chosen with --config-dir mine experiment={name}"
        )

    def override(self, text: str) -> str:
        """Returns an override as Hydra reads it; raises ConfigError if its value cannot be read."""
        name, equals, _ = text.partition("=")
        sign = name[: len(name) - len(name.lstrip("+~"))]
        key = name[len(sign) :]
        if sign == "~" and not self._is_group(key) and key not in (known.name for known in keys(self.verb.schema)):
            raise ConfigError(f"{text}: ~ leaves a key out: {added_key_fault(key, self.verb.schema) or key}")
        if not equals:
            return text
        self._require_key(key, text)
        self._require_one_setting(text)
        if self._is_group(key) and text.partition("=")[2].isdecimal():
            # Hydra takes only texts as options.
            return f"{name}={quoted(text.partition('=')[2])}"
        if sign.startswith("+") and not self._is_group(key):
            fault = added_key_fault(key, self.verb.schema)
            if fault:
                raise ConfigError(fault)
        text = as_text(text, self.verb.text_keys)
        text = expand_home(expand_counts(text, integer_keys(self.verb.schema)))
        text = self._readable(quote_texts(text, text_keys(self.verb.schema)))
        known = self._known.get(key)
        return self._as_list(text, known) if known is not None and known.kind.startswith("list of") else text

    def _is_group(self, key: str) -> bool:
        folder = re.split(r"[@:]", key)[0]
        return key.startswith("hydra") or any((base / folder).is_dir() for base in (config_dir(), *self._own_dirs))

    def _require_key(self, key: str, text: str) -> None:
        if _KEY.fullmatch(key):
            return
        if "[" in key:
            whole = key.partition("[")[0]
            raise ConfigError(f"{key}: an item of a list has no key: give the whole list, {whole}='[...]'")
        words = key.split()
        if len(words) > 1 and words[-1] in self._known:
            raise ConfigError(f"{text!r}: give each setting as an argument of its own, {' '.join(words[:-1])} apart")
        stripped = key.strip().strip("\"'").replace(" ", "")
        meant = suggested_keys(stripped, self.verb.schema)
        raise ConfigError(f"{key!r} is no key: {self._typed(meant, text.partition('=')[2].strip())}")

    def _require_one_setting(self, text: str) -> None:
        """Raises ConfigError if an argument has two settings, as within one pair of quotes."""
        for found in re.finditer(r"[ ,;]+([\w.]+)=", text.partition("=")[2]):
            if found[1] in self._known and text.partition("=")[0] not in self.verb.text_keys:
                raise ConfigError(
                    f"{text!r} has two settings: write each as an argument of its own, separated by a space outside of "
                    f"quotes: ... {found[1]}=..."
                )

    def _readable(self, text: str) -> str:
        """Quotes what Hydra's grammar cannot read."""
        name, _, value = text.partition("=")
        if _PLAIN.fullmatch(value) or self._parsed(text) is not None:
            return text
        known = self._known.get(name.lstrip("+~"))
        takes_text = known is not None and known.kind.startswith(("text", "any"))
        tries = [f"{name}={quote_scalars(value)}"]
        if takes_text and not value.lstrip().startswith(("[", "{")):
            parts = value.split(",") if self.sweeps else [value]
            tries = [f"{name}={','.join(quoted(part) for part in parts)}"]
        for attempt in tries:
            if "${" not in value and self._parsed(attempt) is not None:
                return attempt
        why = unbalanced_bracket(value) or "it is neither one value nor a list"
        raise ConfigError(
            f"cannot read the override {text}: {why}; a text is written with quotes of both kinds: \"{name}='...'\""
        )

    def _parsed(self, text: str) -> Override | None:
        try:
            return self._parser.parse_override(text)
        except (HydraException, ValueError, RecursionError):
            return None

    def _as_list(self, text: str, key: Key) -> str:
        name, _, value = text.partition("=")
        parsed = self._parsed(text)
        if parsed is None or "${" in value or (parsed.is_sweep_override() and not self.sweeps):
            return text
        return f"{name}={to_list_override(value, key.kind, swept=parsed.is_sweep_override())}"


def _shown(value: str) -> str:
    """Returns a value as a shell takes it."""
    return value if re.fullmatch(r"[\w./:,+%@-]*", value) else "'" + value.replace("'", "'\\''") + "'"


def require_primary_config(folder: Path | None, name: str, verb: str, own_dirs: Sequence[Path]) -> None:
    """Raises ConfigError unless the primary config exists and composes others.

    A saved config.yaml has no defaults list, so Hydra would compose it without its schema.

    Args:
        folder: --config-path; None is megads' own configs.
        name: --config-name, or the verb's name.
        verb: the verb's name.
        own_dirs: --config-dir.
    """
    folders = [folder] if folder is not None else [*own_dirs, config_dir()]
    name = f"{name.removesuffix('.yaml')}.yaml"
    file = next((place / name for place in folders if (place / name).is_file()), None)
    if file is None and folder is not None:
        raise ConfigError(
            f"--config-path {folder}: there is no {name} in it; "
            f"to add your own experiments and models to those of megads, use --config-dir {folder}"
        )
    if file is None:
        raise ConfigError(
            f"--config-name {name.removesuffix('.yaml')}: there is no {name} in "
            f"{', '.join(map(str, folders[:-1])) or 'conf'}; leave the flag out"
        )
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        # Reported with its place when it is composed.
        return
    if isinstance(content, Mapping) and "defaults" not in content:
        raise ConfigError(
            f"{file}: is a saved config, without the defaults list of a config that megads {verb} composes. To start "
            f"from it, make it an experiment: mkdir -p mine/experiment; (echo '# @package _global_'; cat {file}) > "
            f"mine/experiment/mine.yaml; megads {verb} --config-dir mine experiment=mine run.id=<new name>"
        )


def values_of(flag_names: Sequence[str], arguments: Sequence[str]) -> Iterator[str]:
    """Yields the values of a flag on a command line."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in flag_names:
            yield value if equals else "".join(arguments[place + 1 : place + 2])
