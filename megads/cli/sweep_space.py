"""Composes the points of a sweep: Hydra's override grammar to a search space, one assignment to one typed config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, open_dict

from megads.cli.composition_errors import explain
from megads.cli.entry import typed
from megads.cli.reference import config_dir
from megads.errors import ConfigError
from megads.tools.sweep.config import Assignment, Choice, Interval, Space

_SETTINGS_GROUP = "hparams_search"
_SETTINGS_SECTION = "sweep"


@dataclass(frozen=True)
class SweepLine:
    """A command line of a sweep, taken apart.

    Attributes:
        fixed: overrides of every point.
        settings: overrides of the sweep itself.
        space: the swept keys.
    """

    fixed: tuple[str, ...]
    settings: tuple[str, ...]
    space: Space


@dataclass(frozen=True)
class Composed:
    """One composed config.

    Attributes:
        config: an instance of the verb's schema.
        choices: option taken in each config group.
    """

    config: Any
    choices: Mapping[str, str | None]


class Composer:
    """Composes configs of one verb; use inside `composing`.

    Args:
        verb: the verb's name.
        schema: dataclass of its config.
        flags: Hydra's flags, of which only --config-dir can stand in a sweep.
    """

    def __init__(self, verb: str, schema: type, flags: Sequence[str]):
        self._verb, self._schema = verb, schema
        folders = [Path(flag).resolve() for flag in flags]
        self._search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []

    def parse(self, overrides: Sequence[str]) -> SweepLine:
        """Takes a command line apart.

        Raises:
            ConfigError: it cannot be read, or sweeps over what does not belong to a point.
        """
        with _explained(self._schema):
            loader = GlobalHydra.instance().config_loader()
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
            return self._split(parsed)

    def _split(self, parsed: Sequence[Override]) -> SweepLine:
        fixed: list[str] = []
        settings: list[str] = []
        space: dict[str, Choice | Interval] = {}
        for override in parsed:
            key = override.get_key_element()
            plain = key.lstrip("+~")
            own = plain == _SETTINGS_GROUP or plain.partition(".")[0] == _SETTINGS_SECTION
            if plain.startswith(("hydra/launcher", "hydra/sweeper", "hydra.sweep", "hydra.launcher")):
                raise ConfigError(
                    f"{plain} has no effect: sweeps of megads {self._verb} are not run by Hydra's plugins; see "
                    "hparams_search= and the keys of sweep, such as sweep.launcher=slurm, in docs/sweeps.md"
                )
            if not override.is_sweep_override():
                text = str(override.input_line)
                (settings if own else fixed).append(text)
            elif own:
                raise ConfigError(f"{key} is a setting of the sweep, so it cannot have several values in it")
            else:
                space[key] = _parameter(override)
        return SweepLine(tuple(fixed), tuple(settings), space)

    def compose(self, overrides: Sequence[str], number: int = 0) -> Composed:
        """Composes one config.

        Args:
            overrides: all of its command line.
            number: of the point, which ${hydra:job.num} gives.

        Raises:
            ConfigError: it does not compose or fit the schema.
        """
        with _explained(self._schema):
            config = compose(
                self._verb, [*self._search, *overrides, f"hydra.job.num={number}"], return_hydra_config=True
            )
            HydraConfig.instance().set_config(config)
            choices = {str(group): option for group, option in config.hydra.runtime.choices.items()}
            with open_dict(config):
                del config["hydra"]
            return Composed(typed(config, self._schema), choices)

    def settings(self, line: SweepLine, schema: type) -> Any:
        """The sweep's own section, typed, as the fixed part of a command line composes it.

        Raises:
            ConfigError: that part does not compose.
        """
        with _explained(self._schema):
            config = compose(self._verb, [*self._search, *line.fixed, *line.settings])
            section = config[_SETTINGS_SECTION]
            assert isinstance(section, DictConfig)
            return typed(section, schema)


@contextmanager
def _explained(schema: type) -> Iterator[None]:
    """Turns whatever stops a config from composing into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(explain(error, schema)) from error


def overrides_of(assignment: Assignment) -> list[str]:
    """An assignment as overrides."""
    return [f"{key}={value}" for key, value in assignment.items()]


@contextmanager
def composing(verb: str) -> Iterator[None]:
    """Makes Hydra ready to compose configs of a verb in this process."""
    with initialize_config_dir(str(config_dir()), version_base="1.3", job_name=f"megads {verb}"):
        yield


def _parameter(override: Override) -> Choice | Interval:
    """Hydra's choice(...), range(...), glob(...) or interval(...), the latter perhaps int or tagged log."""
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return Choice(tuple(override.sweep_string_iterator()))
    assert value.start is not None and value.end is not None
    integer = isinstance(value.start, int) and isinstance(value.end, int)
    unknown = sorted(str(tag) for tag in value.tags - {"log"})
    if unknown:
        raise ConfigError(f"{override.get_key_element()}: the tag {unknown[0]} means nothing here; log is known")
    return Interval(float(value.start), float(value.end), log="log" in value.tags, integer=integer)
