"""The one place where a config is composed: Hydra's command line to a typed object, errors to exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import megads
from megads.cli.composition_errors import explain, explain_added_key
from megads.cli.text_override import as_text
from megads.errors import EXIT_BUG, EXIT_OK, ConfigError, MegadsError
from megads.runtime.environment import show_full_hydra_errors

EXIT_INTERRUPTED = 130
# A sweep ends when somebody asked its current point to end.
_STOPPING_CODES = (5, 6, EXIT_INTERRUPTED)


@dataclass(frozen=True)
class Invocation:
    """What a verb knows of its command line beside the config.

    Attributes:
        choices: option taken in each config group, None for none.
        claimed_dirs: output places that earlier points of the same sweep named; shared by all its points.
    """

    choices: Mapping[str, str | None]
    claimed_dirs: set[str]


@dataclass(frozen=True)
class Verb:
    """One command: `megads <name>`, composed from conf/<name>.yaml.

    Attributes:
        name: the verb.
        schema: dataclass of its config.
        run: does the work and returns the exit code; gets an instance of `schema`.
        text_keys: keys whose values are taken as they stand, commas and brackets included.
    """

    name: str
    schema: type
    run: Callable[[Any, Invocation], int]
    text_keys: tuple[str, ...] = ()


@dataclass
class _Session:
    """One command line: a single point, or all the points of a sweep."""

    verb: Verb
    claimed_dirs: set[str] = field(default_factory=set)
    results: list[tuple[str, int | None]] = field(default_factory=list)

    def run_point(self, config: DictConfig) -> None:
        """What Hydra calls with each composed config; keeps the exit code, raises nothing, so that a sweep goes on."""
        hydra_config = HydraConfig.get()
        # Unresolved: an override may hold an interpolation that has no meaning here.
        overrides = " ".join(cast(list[str], OmegaConf.to_container(hydra_config.overrides.task, resolve=False)))
        sweeping = hydra_config.mode == RunMode.MULTIRUN
        if sweeping and any(code in _STOPPING_CODES for _, code in self.results):
            self.results.append((overrides, None))
            return
        if sweeping:
            print(f"=== point {len(self.results)}: {overrides}", flush=True)
        choices = {str(group): option for group, option in hydra_config.runtime.choices.items()}
        self.results.append((overrides, self._exit_code(config, Invocation(choices, self.claimed_dirs))))

    def _exit_code(self, config: DictConfig, invocation: Invocation) -> int:
        try:
            return self.verb.run(_typed(config, self.verb.schema), invocation)
        except MegadsError as error:
            print(f"megads {self.verb.name}: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        except KeyboardInterrupt:
            print(f"megads {self.verb.name}: interrupted", file=sys.stderr, flush=True)
            return EXIT_INTERRUPTED
        except Exception:
            traceback.print_exc()
            return EXIT_BUG


def _typed(config: DictConfig, schema: type) -> Any:
    """Returns the config as an instance of its dataclass; no DictConfig goes further than here."""
    added = explain_added_key(OmegaConf.to_container(config, resolve=False), schema)
    if added:
        raise ConfigError(added)
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, schema)) from error


def config_dir() -> Path:
    """Returns the folder of the YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(megads.__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def run_verb(verb: Verb, arguments: Sequence[str]) -> int:
    """Composes the config of a verb and runs it, once or for every point of a sweep.

    Args:
        verb: the command.
        arguments: Hydra's flags and overrides.

    Returns:
        The exit code: 2 when the config cannot be composed; for a sweep the first code that is not 0.
    """
    show_full_hydra_errors()
    ConfigStore.instance().store(name=f"{verb.name}_schema", node=verb.schema)
    session = _Session(verb)
    sys.argv = [f"megads {verb.name}", *(as_text(argument, verb.text_keys) for argument in arguments)]

    # Hydra names the application after this function's module.
    def task(config: DictConfig) -> None:
        session.run_point(config)

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=verb.name)(task)()
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        print(f"megads {verb.name}: {explain(error, verb.schema)}", file=sys.stderr, flush=True)
        return ConfigError.exit_code
    if len(session.results) > 1:
        print(_sweep_table(session.results), flush=True)
    return next((code for _, code in session.results if code), EXIT_OK)


def _sweep_table(results: Sequence[tuple[str, int | None]]) -> str:
    """Returns one line a point: its exit code and its overrides."""
    lines = ["=== sweep: exit code and overrides of every point"]
    for number, (overrides, code) in enumerate(results):
        lines.append(f"{number:4d}  {'not run' if code is None else f'exit {code}':<9} {overrides}")
    return "\n".join(lines)
