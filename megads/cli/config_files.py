"""Extensions of Hydra: size limits for config files, and integers in short form such as 1e9, 1M, 4Ki."""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megads.cli.verb import Key, keys
from megads.errors import ConfigError
from megads.runtime.files import read_regular, require_bounded_yaml

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKMBGT]|[KMG]i)?")
_UNITS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_OF_A_SEQUENCE = ("seq_len", "max_seq_len")
"""Keys for which 4k may mean 4000 or 4096."""


def integer_keys(schema: type) -> frozenset[str]:
    """Returns the dotted keys of a config dataclass that take an integer, or an integer, auto or null."""
    return frozenset(key.name for key in keys(schema) if _is_count(key))


def _is_count(key: Key) -> bool:
    return key.kind.startswith("integer")


def expand_count(key: str, text: str) -> str:
    """Expands 1e9, 1_000, 4k, 1.5M, 2B, 3T or 4Ki to digits; returns any other text unchanged.

    Args:
        key: key of the value.
        text: value as written.

    Raises:
        ConfigError: a sequence length such as 4k, which may mean 4000 or 4096.
    """
    found = _COUNT.fullmatch(text)
    if found is None:
        return text
    number, unit = Decimal(found[1].replace("_", "")), found[2] or ""
    if unit in _UNITS and key.rpartition(".")[2] in _OF_A_SEQUENCE:
        binary = number * 1024 ** (len(str(_UNITS[unit])) // 3)
        raise ConfigError(
            f"{key} = {text}: is {number * _UNITS[unit]:f} or {binary:f} meant? Write the number, "
            f"or {found[1]}Ki for multiples of 1024"
        )
    value = number * {**_UNITS, **_BINARY_UNITS}.get(unit, 1)
    return f"{value:f}".partition(".")[0] if value == value.to_integral_value() else text


def expand_counts(argument: str, integers: Collection[str]) -> str:
    """Expands the integers of an override of an integer key, those of a sweep included.

    Args:
        argument: an argument of the command line.
        integers: keys that take an integer.
    """
    key, equals, values = argument.partition("=")
    if not equals or key.lstrip("+") not in integers:
        return argument
    return f"{key}={','.join(expand_count(key, value) for value in values.split(','))}"


_MOST_CHARACTERS = 1 << 18
_MOST_VALUES = 10_000
"""Most values in one file with its aliases expanded; the largest config of a run has some 200."""


class BoundedFileSource(FileConfigSource):
    """Hydra's file source, with limits on the size of a file, and short integers as on the command line.

    Attributes:
        count_names: last parts of the keys that take an integer.
    """

    count_names: frozenset[str] = frozenset()

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a file; raises ConfigLoadError if it is missing, not a config, or too large once aliases are
        expanded."""
        path = Path(self.path) / self._normalize_file_name(config_path)
        if path.is_file():
            _require_bounded(path)
        try:
            result = super().load_config(config_path)
            content = OmegaConf.to_container(result.config, resolve=False)
            result.config = OmegaConf.create(_with_counts(content, self.count_names))
            return result
        except RecursionError:
            raise ConfigLoadError(f"{path}: is nested too deeply") from None
        except ConfigError as error:
            raise ConfigLoadError(f"{path}: {error}") from error
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ConfigLoadError(f"{path}: cannot be read as a config: {said}") from error


def read_files_with(schema: type) -> None:
    """Makes Hydra read files with BoundedFileSource; to be called after Hydra has loaded its plugins.

    Args:
        schema: dataclass of the config to compose.
    """
    integers, others = set[str](), set[str]()
    for key in keys(schema):
        if not key.is_section and not key.kind.startswith("list"):
            (integers if _is_count(key) else others).add(key.name.rpartition(".")[2])
    BoundedFileSource.count_names = frozenset(integers - others)
    # `register` does not replace Hydra's own source of a scheme.
    SourcesRegistry.instance().types["file"] = BoundedFileSource


def _with_counts(content: Any, names: frozenset[str]) -> Any:
    """Expands the integers under these names in nested dicts and lists.

    A file does not say in which section Hydra puts it, so keys are matched by their last part.
    """
    if isinstance(content, list):
        return [_with_counts(item, names) for item in content]
    if not isinstance(content, dict):
        return content
    made = {}
    for name, value in content.items():
        if name in names and isinstance(value, str | float):
            text = expand_count(name, str(value))
            made[name] = int(text) if text.isdecimal() else value
        else:
            made[name] = _with_counts(value, names)
    return made


def _require_bounded(path: Path) -> None:
    try:
        text = read_regular(path).decode()
        require_bounded_yaml(text, _MOST_CHARACTERS)
    except (OSError, ValueError) as error:
        raise ConfigLoadError(f"{path}: cannot be read as a config: {error}") from error
    # Files without aliases, that is most, are not parsed twice.
    if "&" not in text or "*" not in text:
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = 0 if root is None else _values(root, {})
    except RecursionError:
        raise ConfigLoadError(f"{path}: is nested too deeply, or an alias contains itself") from None
    except YAMLError:
        # Loading the file reports the error.
        return
    if values > _MOST_VALUES:
        raise ConfigLoadError(
            f"{path}: its aliases expand to more than {_MOST_VALUES:,} values: write the values without aliases"
        )


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Counts the values below a node, those of an alias once per use."""
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        else:
            children = node.value if isinstance(node, yaml.SequenceNode) else []
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]
