"""Composes the config of a verb with Hydra, converts it to a typed object, and maps errors to exit codes."""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from string import Template
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megads.cli.command_line import (
    SWEEP_FLAGS,
    overrides_of,
    require_primary_config,
    values_of,
)
from megads.cli.composition import (
    drop_replaced_settings,
    explain,
    explain_added_key,
    set_length_of_text,
    use_bounded_file_source,
    with_current_keys,
)
from megads.cli.help_text import fit_width
from megads.cli.verb import Invocation, Verb, config_dir, describe_groups, describe_keys, own_config_dirs, shipped_file
from megads.config.dial import check_dial
from megads.errors import (
    DISK_FULL,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    MegadsError,
    exit_codes_text,
    is_left_to_debugger,
)
from megads.runtime import progress
from megads.runtime.environment import show_full_hydra_errors
from megads.runtime.registry import UsesPlugins

_ENVIRONMENT = (
    *(*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
)
"""Errors of a path that the user chose, not bugs."""
_HELP_FLAGS = ("--help", "-h")
_SHOWING_FLAGS = ("-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "--version")
OmegaConf.register_new_resolver("shipped", shipped_file, replace=True)
# A sweep ends if its current point was asked to stop.
_STOPPING_CODES = (5, 6, EXIT_INTERRUPTED)


@dataclass
class _Session:
    """One command line: a single point, or all the points of a sweep."""

    verb: Verb
    claimed_dirs: set[str] = field(default_factory=set)
    results: list[tuple[str, int | None]] = field(default_factory=list)

    def run_point(self, config: DictConfig) -> None:
        """Called by Hydra with each composed config; records the exit code and never raises, so that a sweep
        continues, except for a rank in this process (cluster.in_process)."""
        hydra_config = HydraConfig.get()
        # Unresolved: an override may contain an interpolation that cannot be resolved here.
        given = cast(list[str], OmegaConf.to_container(hydra_config.overrides.task, resolve=False))
        check_dial(config)
        drop_replaced_settings(config, given)
        set_length_of_text(config)
        overrides = " ".join(given)
        sweeping = hydra_config.mode == RunMode.MULTIRUN
        if sweeping and any(code in _STOPPING_CODES for _, code in self.results):
            self.results.append((overrides, None))
            return
        if sweeping:
            print(f"=== point {len(self.results)}: {overrides}", flush=True)
        choices = {str(group): option for group, option in hydra_config.runtime.choices.items()}
        invocation = Invocation(choices, self.claimed_dirs)
        progress.leave()
        code = exit_code_of(self.verb.name, lambda: self.verb.run(typed(config, self.verb.schema), invocation))
        self.results.append((overrides, code))


def exit_code_of(name: str, work: Callable[[], int]) -> int:
    """Runs a verb and returns its exit code; errors print one message, bugs a traceback. Bugs of a rank in this process
    are raised.

    Args:
        name: name of the verb.
        work: function that runs it and returns the exit code.
    """
    try:
        return work()
    except MegadsError as error:
        print(f"megads {name}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader of the output has ended, such as head: Python must not write what is left at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_INTERRUPTED
    except OSError as error:
        if is_left_to_debugger(error):
            raise
        if error.errno not in _ENVIRONMENT:
            traceback.print_exc()
            return EXIT_BUG
        print(f"megads {name}: {_explain_disk(error)}", file=sys.stderr, flush=True)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        print(f"megads {name}: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if is_left_to_debugger(error):
            raise
        traceback.print_exc()
        return EXIT_BUG


def _explain_disk(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    remedy = "free some space, or " if error.errno in DISK_FULL else ""
    return f"{where}{error.strerror}: {remedy}choose another path (run.dir=<path> for a run)"


def typed(config: DictConfig, schema: type) -> Any:
    """Returns the config as an instance of its dataclass; no other module uses a DictConfig of a run.

    Raises:
        ConfigError: the config does not fit the dataclass.
    """
    added = explain_added_key(OmegaConf.to_container(config, resolve=False), schema)
    if added:
        raise ConfigError(added)
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, schema)) from error
    require_values(result)
    if isinstance(result, UsesPlugins):
        result.resolve_plugins()
    return result


@dataclass(frozen=True)
class Composed:
    """One composed config.

    Attributes:
        config: an instance of the verb's schema.
        choices: selected option of each config group.
    """

    config: Any
    choices: Mapping[str, str | None]


@contextmanager
def hydra_initialized(verb: str) -> Iterator[None]:
    """Initializes Hydra for composing configs of a verb in this process."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3", job_name=f"megads {verb}"):
        yield


@contextmanager
def as_config_errors(schema: type) -> Iterator[None]:
    """Converts every error during composition into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(explain(error, schema)) from error


def compose_typed(verb: str, schema: type, overrides: Sequence[str]) -> Composed:
    """Composes one config; to be used inside `hydra_initialized`.

    Args:
        verb: the verb's name.
        schema: dataclass of its config.
        overrides: all overrides of the command line.

    Raises:
        ConfigError: the config does not compose or does not fit the schema.
    """
    with as_config_errors(schema):
        config = hydra.compose(verb, with_current_keys(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        choices = {str(group): option for group, option in config.hydra.runtime.choices.items()}
        with open_dict(config):
            del config["hydra"]
        check_dial(config)
        drop_replaced_settings(config, overrides)
        set_length_of_text(config)
        return Composed(typed(config, schema), choices)


def structured_schema(schema: type) -> DictConfig:
    """Returns the schema as an OmegaConf node; only options of plugins accept new keys without a `+`."""
    root = OmegaConf.structured(schema)
    _open(root, schema)
    return cast(DictConfig, root)


def _open(node: DictConfig, schema: type) -> None:
    for name, hint in get_type_hints(schema).items():
        if hint == dict[str, Any]:
            OmegaConf.set_struct(node[name], False)
        elif isinstance(hint, type) and is_dataclass(hint):
            _open(node[name], hint)


def _register_help(verb: Verb, arguments: Sequence[str]) -> None:
    """Registers the resolvers used in the help texts of conf/<verb>.yaml.

    `${megads.groups:}` lists the verb's config groups and their options, `${megads.keys:}` its keys,
    `${megads.exit_codes:}` all exit codes. Hydra substitutes `$NAME` in the text afterwards, so dollar signs are
    doubled.
    """
    texts = {
        "groups": lambda: describe_groups(verb.name, own_config_dirs(arguments)),
        "keys": lambda: describe_keys(verb.schema),
        "exit_codes": exit_codes_text,
    }
    for name, text in texts.items():
        OmegaConf.register_new_resolver(f"megads.{name}", lambda text=text: text().replace("$", "$$"), replace=True)


def _require_plugins(schema: type) -> None:
    """Loads all Hydra plugins that are installed in the environment.

    Args:
        schema: dataclass of the config to compose.

    Raises:
        ConfigError: a plugin cannot be loaded, in which case Hydra cannot compose any config.
    """
    try:
        Plugins.instance()
        use_bounded_file_source(schema)
    except Exception as error:
        raise ConfigError(
            f"a Hydra plugin of this environment cannot be loaded, so Hydra cannot compose any config: {error}; "
            "uninstall it (megads doctor names the known ones)"
        ) from error


def _require_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder cannot be used ({error.strerror}): it was removed? cd to another"
        ) from error


def run_verb(verb: Verb, arguments: Sequence[str]) -> int:
    """Composes the config of a verb and runs it, once or for every point of a sweep.

    Args:
        verb: the command.
        arguments: Hydra's flags and overrides.

    Returns:
        The exit code: 2 if the config cannot be composed; for a sweep the first non-zero code.
    """
    run, composed = verb.run, list[bool]()

    def noted(config: Any, invocation: Invocation) -> int:
        composed.append(True)
        return run(config, invocation)

    code = _compose_and_run(replace(verb, run=noted), arguments)
    if code == ConfigError.exit_code and not composed and verb.refused is not None:
        verb.refused(arguments)
    return code


def prepare_composing(verb: Verb, arguments: Sequence[str]) -> list[str]:
    """Prepares Hydra to compose a verb's config; returns the arguments as Hydra reads them: flags, then overrides.

    Raises:
        ConfigError: an argument is neither a flag nor an override, or no config can be composed here.
    """
    show_full_hydra_errors()
    _require_plugins(verb.schema)
    _require_folder()
    require_no_hydra_settings(arguments)
    given = with_own_config_path(verb.name, overrides_of(verb, arguments))
    ConfigStore.instance().store(name=f"{verb.name}_schema", node=structured_schema(verb.schema))
    _register_help(verb, arguments)
    return given


def _compose_and_run(verb: Verb, arguments: Sequence[str]) -> int:
    try:
        given = prepare_composing(verb, arguments)
    except ConfigError as error:
        print(f"megads {verb.name}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    sweep = verb.sweep
    if sweep is not None and _sweeps(given):
        rest = [argument for argument in given if argument not in SWEEP_FLAGS]
        return exit_code_of(verb.name, lambda: sweep(rest))
    if not any(argument.startswith("-") for argument in given):
        return exit_code_of(verb.name, lambda: _run_once(verb, given))
    *overrides, last = sorted(given, key=lambda argument: argument.startswith("-"))
    if last in _HELP_FLAGS and not any(argument.startswith("-") for argument in overrides):
        return exit_code_of(verb.name, lambda: _print_help(verb, overrides))
    session = _Session(verb)
    sys.argv = [f"megads {verb.name}", *given]

    # Hydra derives the name of the application from this function's module.
    def task(config: DictConfig) -> None:
        session.run_point(config)

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=verb.name)(task)()
    except Exception as error:
        if is_left_to_debugger(error):
            raise
        # Otherwise `run_point` never raises, so the error is from composition.
        print(f"megads {verb.name}: {explain(error, verb.schema)}", file=sys.stderr, flush=True)
        return ConfigError.exit_code
    if len(session.results) > 1:
        print(sweep_table(session.results), flush=True)
    return next((code for _, code in session.results if code), EXIT_OK)


def _print_help(verb: Verb, overrides: Sequence[str]) -> int:
    """Prints a verb's help. `hydra.main` would list all config groups once more, which takes a second."""
    with hydra_initialized(verb.name), as_config_errors(verb.schema):
        config = hydra.compose(verb.name, list(overrides), return_hydra_config=True)
        text = Template(config.hydra.help.template).substitute()
    print(fit_width(text))
    return EXIT_OK


def _run_once(verb: Verb, overrides: Sequence[str]) -> int:
    """Runs a command line without flags. `hydra.main` would compose its config twice, first to find out the mode."""
    with hydra_initialized(verb.name):
        composed = compose_typed(verb.name, verb.schema, overrides)
    progress.leave()
    return verb.run(composed.config, Invocation(composed.choices, set()))


_HYDRA_SEARCHPATH = "hydra.searchpath"
_QUIET_HYDRA = (
    *("hydra/job_logging=none", "hydra/hydra_logging=none"),
    *("hydra.output_subdir=null", "hydra.run.dir=.", "hydra.job.chdir=false"),
)
"""As in megads' own primary configs; otherwise Hydra creates output folders."""
_IN_PLACE = {
    "run": "run.dir=<folder> sets the directory of a run",
    "sweep": "sweep.dir=<folder> sets the directory of a sweep",
    "launcher": "sweep.launcher=local|slurm starts the points of a sweep",
    "sweeper": "hparams_search=grid|random|bayes chooses the points of a sweep",
    "verbose": "logging.level=debug shows more",
}
"""megads' setting in place of a Hydra setting, by the part after `hydra.` or `hydra/`."""


def require_no_hydra_settings(arguments: Sequence[str]) -> None:
    """Refuses overrides of Hydra's own settings, which have no effect in megads.

    Raises:
        ConfigError: there is one; the message names it and what to set instead.
    """
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+~")
        if re.match(r"hydra([./]|$)", key) and key != _HYDRA_SEARCHPATH:
            section = re.split(r"[./]", key)[1] if key != "hydra" else ""
            remedy = _IN_PLACE.get(section, f"the only Hydra setting that can be changed is {_HYDRA_SEARCHPATH}")
            raise ConfigError(f"{key} has no effect here: {remedy}")


def with_own_config_path(verb: str, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with --config-path made absolute and megads' configs added to the search path after it.

    Raises:
        ConfigError: there is no such config, or it composes nothing.
    """
    folder = next((Path(value) for value in values_of(("--config-path", "-cp"), arguments)), None)
    name = next(values_of(("--config-name", "-cn"), arguments), verb)
    if folder is not None or (name != verb and not _sweeps(arguments)):
        require_primary_config(folder, name, verb, own_config_dirs(arguments))
    if folder is None:
        return list(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path)
    rest = parser.parse_known_args(arguments)[1]
    ours = list(_QUIET_HYDRA)
    if not any(_HYDRA_SEARCHPATH in argument for argument in rest):
        ours.append(f"{_HYDRA_SEARCHPATH}=[file://{config_dir()}]")
    # Hydra's parser requires all overrides to be adjacent.
    overrides = (place for place, argument in enumerate(rest) if "=" in argument and argument[0] != "-")
    first = next(overrides, len(rest))
    return [f"--config-path={folder.absolute()}", *rest[:first], *ours, *rest[first:]]


def _sweeps(arguments: Sequence[str]) -> bool:
    """Whether the command runs a sweep: with Hydra's showing flags nothing is run."""
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    return bool(flags & set(SWEEP_FLAGS)) and not flags & set(_SHOWING_FLAGS)


def sweep_table(results: Sequence[tuple[str, int | None]]) -> str:
    """Returns a table with one line per point: exit code and overrides."""
    lines = ["=== sweep: exit code and overrides of every point"]
    for number, (overrides, code) in enumerate(results):
        lines.append(f"{number:4d}  {'not run' if code is None else f'exit {code}':<9} {overrides}")
    return "\n".join(lines)


# PyTorch, NumPy and file formats store counts as signed 64-bit integers.
_INTEGER_BITS = 63


def require_values(config: Any, where: str = "") -> None:
    """Refuses values that OmegaConf accepts by mistake.

    These are interpolations that put a section in place of a list or of another section, dicts as elements of lists,
    non-finite numbers, and integers of more than 64 bits.

    Args:
        config: an instance of a config dataclass.
        where: dotted key of the section, with a dot at its end; empty for the root.

    Raises:
        ConfigError: a value is invalid; the message gives the key, the value and the expected type.
    """
    for name, hint in get_type_hints(type(config)).items():
        _require(f"{where}{name}", getattr(config, name), hint)


def _require(key: str, value: Any, hint: Any) -> None:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in options:
        return
    _require_number(key, value)
    for option in options:
        origin = get_origin(option) or option
        if origin is list:
            if not isinstance(value, list):
                raise ConfigError(f"{key}: {value!r} is not a list; expected {key}=[a,b]")
            _require_items(key, value, get_args(option)[0])
        elif origin is dict:
            if not isinstance(value, dict):
                raise ConfigError(f"{key}: {value!r} is not a mapping; expected {key}={{a: 1}}")
        elif isinstance(origin, type) and is_dataclass(origin):
            if not isinstance(value, origin):
                raise ConfigError(f"{key}: {value!r} is not a section of the expected type; remove it")
            require_values(value, f"{key}.")
        elif origin is Any:
            for number in _numbers(value):
                _require_number(key, number)


def _require_items(key: str, values: list[Any], hint: Any) -> None:
    for place, item in enumerate(values):
        if hint is str:
            if not isinstance(item, str):
                name = key.rpartition(".")[2]
                raise ConfigError(f"{key}: {item!r} is not a text; expected a list of texts: {name}=[a,b]")
        elif hint in (int, float) and (isinstance(item, bool) or not isinstance(item, int | hint)):
            raise ConfigError(f"{key}[{place}]: {item!r} is not a number; expected a list of numbers: {key}=[1,2]")
        else:
            _require(f"{key}[{place}]", item, hint)


def _require_number(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {value}: must be a finite number")
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        shown = str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
        raise ConfigError(f"{key} = {shown}: must fit in a signed integer of 64 bits, that is up to {2**63 - 1}")


def _numbers(value: Any) -> Iterator[Any]:
    """Yields the leaves of nested lists and dicts."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    else:
        yield value
