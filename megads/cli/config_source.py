"""Reads the YAML files of which Hydra composes a config, and refuses those that are no configs but bombs."""

from __future__ import annotations

from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megads.runtime.files import read_regular, require_bounded_yaml

_MOST_CHARACTERS = 1 << 18
_MOST_VALUES = 10_000
"""Of one file with its aliases put in; the largest config of a run has some 200."""


class BoundedFileSource(FileConfigSource):
    """Hydra's source of files, with a bound on what one of them may hold."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a file; raises ConfigLoadError where it is missing or no config, or grows too large by its aliases."""
        path = Path(self.path) / self._normalize_file_name(config_path)
        if path.is_file():
            _require_bounded(path)
        try:
            return super().load_config(config_path)
        except RecursionError:
            raise ConfigLoadError(f"{path}: is nested too deeply") from None
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ConfigLoadError(f"{path}: cannot be read as a config: {said}") from error


def bound_config_files() -> None:
    """Lets Hydra read files through BoundedFileSource; it must have loaded its plugins."""
    # `register` keeps the first source of a scheme, which is Hydra's own.
    SourcesRegistry.instance().types["file"] = BoundedFileSource


def _require_bounded(path: Path) -> None:
    try:
        text = read_regular(path).decode()
        require_bounded_yaml(text, _MOST_CHARACTERS)
    except (OSError, ValueError) as error:
        raise ConfigLoadError(f"{path}: cannot be read as a config: {error}") from error
    # Most files have no alias, and are not parsed twice.
    if "&" not in text or "*" not in text:
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = 0 if root is None else _values(root, {})
    except RecursionError:
        raise ConfigLoadError(f"{path}: is nested too deeply, or an alias contains itself") from None
    except YAMLError:
        # Reading it says what is wrong.
        return
    if values > _MOST_VALUES:
        raise ConfigLoadError(
            f"{path}: its aliases stand for more than {_MOST_VALUES:,} values: write out those that are meant"
        )


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Counts the values below a node, those of an alias at each of its places."""
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        else:
            children = node.value if isinstance(node, yaml.SequenceNode) else []
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]
