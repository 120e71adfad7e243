"""The one place where a config is composed: Hydra's command line to a typed object, errors to exit codes."""

from __future__ import annotations

import argparse
import errno
import math
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megads.cli.composition_errors import explain, explain_added_key
from megads.cli.config_files import expand_counts, integer_keys, read_files_with
from megads.cli.verb import Invocation, Verb, config_dir, describe_groups, describe_keys, own_config_dirs
from megads.errors import DISK_FULL, EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, ConfigError, MegadsError, exit_codes_text
from megads.runtime import progress
from megads.runtime.environment import show_full_hydra_errors
from megads.runtime.registry import UsesPlugins

_ENVIRONMENT = (
    *(*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
)
"""Errors of a path, not of the program."""
_HELP_WIDTH = 114
_SWEEP_FLAGS = ("-m", "--multirun")
_SHOWING_FLAGS = ("-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "--version")
# A sweep ends when somebody asked its current point to end.
_STOPPING_CODES = (5, 6, EXIT_INTERRUPTED)


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
        invocation = Invocation(choices, self.claimed_dirs)
        progress.leave()
        code = exit_code_of(self.verb.name, lambda: self.verb.run(typed(config, self.verb.schema), invocation))
        self.results.append((overrides, code))


def exit_code_of(name: str, work: Callable[[], int]) -> int:
    """Does a verb's work and returns its exit code; a failure is one message, only a bug a traceback.

    Args:
        name: the verb's.
        work: returns the exit code, or raises.
    """
    try:
        return work()
    except MegadsError as error:
        print(f"megads {name}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in _ENVIRONMENT:
            traceback.print_exc()
            return EXIT_BUG
        print(f"megads {name}: {_explain_disk(error)}", file=sys.stderr, flush=True)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        print(f"megads {name}: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        return EXIT_BUG


def _explain_disk(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    remedy = "free some space, or " if error.errno in DISK_FULL else ""
    return f"{where}{error.strerror}: {remedy}choose another path (run.dir=<path> for a run)"


def typed(config: DictConfig, schema: type) -> Any:
    """Returns the config as an instance of its dataclass; no DictConfig goes further than here.

    Raises:
        ConfigError: it does not fit the dataclass.
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
        result.settle_plugins()
    return result


def schema_node(schema: type) -> DictConfig:
    """Returns the schema as Hydra composes it: the settings of plugins take keys without a `+`, nothing else does."""
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
    """Gives the help texts of conf/<verb>.yaml the lists that are taken from the code and from conf/.

    `${megads.groups:}` lists the verb's config groups and their options, `${megads.keys:}` its keys,
    `${megads.exit_codes:}` all exit codes. Hydra fills `$NAME` into the text afterwards, so a dollar sign is doubled.
    """
    texts = {
        "groups": lambda: describe_groups(verb.name, own_config_dirs(arguments)),
        "keys": lambda: describe_keys(verb.schema),
        "exit_codes": lambda: textwrap.fill(exit_codes_text(), _HELP_WIDTH),
    }
    for name, text in texts.items():
        OmegaConf.register_new_resolver(f"megads.{name}", lambda text=text: text().replace("$", "$$"), replace=True)


def _require_plugins(schema: type) -> None:
    """Loads Hydra's plugins, which all of the environment may bring.

    Args:
        schema: dataclass of the config that is composed.

    Raises:
        ConfigError: one of them cannot be loaded; Hydra then composes nothing for any application.
    """
    try:
        Plugins.instance()
        read_files_with(schema)
    except Exception as error:
        raise ConfigError(
            f"a Hydra plugin of this environment cannot be loaded, so that no config composes: {error}; "
            "uninstall it (megads doctor names the known ones)"
        ) from error


def run_verb(verb: Verb, arguments: Sequence[str]) -> int:
    """Composes the config of a verb and runs it, once or for every point of a sweep.

    Args:
        verb: the command.
        arguments: Hydra's flags and overrides.

    Returns:
        The exit code: 2 when the config cannot be composed; for a sweep the first code that is not 0.
    """
    show_full_hydra_errors()
    try:
        _require_plugins(verb.schema)
        arguments = [expand_counts(argument, integer_keys(verb.schema)) for argument in arguments]
        require_no_hydra_settings(arguments)
        arguments = with_own_config_path(verb.name, arguments)
    except ConfigError as error:
        print(f"megads {verb.name}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    ConfigStore.instance().store(name=f"{verb.name}_schema", node=schema_node(verb.schema))
    _register_help(verb, arguments)
    texts = (as_text(argument, verb.text_keys) for argument in arguments)
    given = [with_home(verb.flags.get(text, text)) for text in texts]
    sweep = verb.sweep
    if sweep is not None and _sweeps(given):
        rest = [argument for argument in given if argument not in _SWEEP_FLAGS]
        return exit_code_of(verb.name, lambda: sweep(rest))
    session = _Session(verb)
    sys.argv = [f"megads {verb.name}", *given]

    # Hydra names the application after this function's module.
    def task(config: DictConfig) -> None:
        session.run_point(config)

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=verb.name)(task)()
    except Exception as error:
        # Work is done within `run_point`, which raises nothing: Hydra cannot compose what was written.
        print(f"megads {verb.name}: {explain(error, verb.schema)}", file=sys.stderr, flush=True)
        return ConfigError.exit_code
    if len(session.results) > 1:
        print(sweep_table(session.results), flush=True)
    return next((code for _, code in session.results if code), EXIT_OK)


_HYDRA_SEARCHPATH = "hydra.searchpath"
_QUIET_HYDRA = (
    *("hydra/job_logging=none", "hydra/hydra_logging=none"),
    *("hydra.output_subdir=null", "hydra.run.dir=.", "hydra.job.chdir=false"),
)
"""As megads' own primary configs have it: otherwise Hydra makes folders of its own."""
_IN_PLACE = {
    "run": "run.dir=<folder> is where a run is kept",
    "sweep": "sweep.dir=<folder> is where a sweep is kept",
    "launcher": "sweep.launcher=local|slurm starts the points of a sweep",
    "sweeper": "hparams_search=grid|random|bayes chooses the points of a sweep",
    "verbose": "logging.level=debug shows more",
}
"""By the part behind `hydra.` or `hydra/`."""


def require_no_hydra_settings(arguments: Sequence[str]) -> None:
    """Refuses settings of Hydra's own, which megads composes once and then keeps out.

    Raises:
        ConfigError: names the first of them, and what to set in its place.
    """
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+~")
        if re.match(r"hydra([./]|$)", key) and key != _HYDRA_SEARCHPATH:
            section = re.split(r"[./]", key)[1] if key != "hydra" else ""
            remedy = _IN_PLACE.get(section, f"of Hydra's own settings only {_HYDRA_SEARCHPATH} counts")
            raise ConfigError(f"{key} has no effect here: {remedy}")


def with_own_config_path(verb: str, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with --config-path as Hydra wants it: absolute, and megads' configs searched after it.

    Raises:
        ConfigError: the folder has no config of that name.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", type=Path)
    found, rest = parser.parse_known_args(arguments)
    if found.config_path is None:
        return list(arguments)
    name = next((a.partition("=")[2] for a in rest if a.startswith("--config-name=")), verb)
    file = found.config_path / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        raise ConfigError(
            f"--config-path {found.config_path}: there is no {file.name} in it; "
            f"for experiments and models of your own beside those of megads give --config-dir {found.config_path}"
        )
    ours = list(_QUIET_HYDRA)
    if not any(_HYDRA_SEARCHPATH in argument for argument in rest):
        ours.append(f"{_HYDRA_SEARCHPATH}=[file://{config_dir()}]")
    # Hydra's parser wants all overrides in one place.
    overrides = (place for place, argument in enumerate(rest) if "=" in argument and argument[0] != "-")
    first = next(overrides, len(rest))
    return [f"--config-path={found.config_path.absolute()}", *rest[:first], *ours, *rest[first:]]


def _sweeps(arguments: Sequence[str]) -> bool:
    """Whether points are to be run; Hydra's other flags only show something."""
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    return bool(flags & set(_SWEEP_FLAGS)) and not flags & set(_SHOWING_FLAGS)


def sweep_table(results: Sequence[tuple[str, int | None]]) -> str:
    """Returns one line a point: its exit code and its overrides."""
    lines = ["=== sweep: exit code and overrides of every point"]
    for number, (overrides, code) in enumerate(results):
        lines.append(f"{number:4d}  {'not run' if code is None else f'exit {code}':<9} {overrides}")
    return "\n".join(lines)


# What Hydra would read as one quoted string: the user knows its grammar.
_QUOTED_TEXT = re.compile(r"""\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*""", re.DOTALL)


def as_text(argument: str, keys: Collection[str]) -> str:
    """Quotes the value of an override for Hydra.

    Args:
        argument: an argument of the command line.
        keys: keys whose values are texts.

    Returns:
        The argument as Hydra must see it to give the text back; unchanged for other keys, for null, and for a value
        that already is one quoted string.
    """
    key, equals, value = argument.partition("=")
    if key not in keys or not equals or value == "null" or _QUOTED_TEXT.fullmatch(value):
        return argument
    # OmegaConf would resolve ${...}; in front of it, and of a closing quote, backslashes count double.
    value = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", value)
    value = re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (found[2] and '\\"'), value)
    return f'{key}="{value}"'


# Where a path may begin in an override: its value, or an item of its list.
_HOME = re.compile(r"(?<=[=\[,:])(\s*)~(?=[/,\]}]|$)")


def with_home(argument: str) -> str:
    """Returns an override with `~` for the user's home spelled out, which shells leave behind `key=` and in lists.

    Hydra reads no `~` in a value, so that no text which it takes is changed. Quoted values stay as they are.

    Args:
        argument: an argument of the command line.
    """
    if "~" not in argument or "'" in argument or '"' in argument:
        return argument
    home = str(Path("~").expanduser())
    return _HOME.sub(lambda found: found[1] + home, argument)


# Counts reach torch, NumPy and files as signed integers of 64 bits.
_INTEGER_BITS = 63


def require_values(config: Any, where: str = "") -> None:
    """Refuses what OmegaConf lets through: ${...} that puts a section where a list or another section belongs, whole
    dicts as elements of lists, numbers that are none, and integers that no counter holds.

    Args:
        config: an instance of a config dataclass.
        where: dotted key of the section, with a dot at its end; empty for the root.

    Raises:
        ConfigError: names the key, the value and what is wanted.
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
                raise ConfigError(f"{key}: {value!r} is no list, and one is wanted: {key}=[a,b]")
            _require_items(key, value, get_args(option)[0])
        elif origin is dict:
            if not isinstance(value, dict):
                raise ConfigError(f"{key}: {value!r} is no map, and one is wanted: {key}={{a: 1}}")
        elif isinstance(origin, type) and is_dataclass(origin):
            if not isinstance(value, origin):
                raise ConfigError(f"{key}: {value!r} is no section of the kind that is wanted; leave it out")
            require_values(value, f"{key}.")
        elif origin is Any:
            for number in _numbers(value):
                _require_number(key, number)


def _require_items(key: str, values: list[Any], hint: Any) -> None:
    for place, item in enumerate(values):
        if hint is str:
            if not isinstance(item, str):
                name = key.rpartition(".")[2]
                raise ConfigError(f"{key}: {item!r} is no text, and a list of texts is wanted: {name}=[a,b]")
        elif hint in (int, float) and (isinstance(item, bool) or not isinstance(item, int | hint)):
            raise ConfigError(f"{key}[{place}]: {item!r} is no number, and a list of numbers is wanted: {key}=[1,2]")
        else:
            _require(f"{key}[{place}]", item, hint)


def _require_number(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {value}: must be a finite number")
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        shown = str(value) if value.bit_length() < 128 else f"an integer of {value.bit_length()} bits"
        raise ConfigError(f"{key} = {shown}: must fit in a signed integer of 64 bits, that is up to {2**63 - 1}")


def _numbers(value: Any) -> Iterator[Any]:
    """Yields what is in nested lists and dicts."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    else:
        yield value
