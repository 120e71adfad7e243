"""Plugin registries: six kinds of named components, each with typed options.

A plugin is a user's module, named on the command line (`plugins=[my_package]`). Importing it registers its components
with the decorators below; the config then selects a component like a built-in one. Nothing else imports a plugin: a
checkpoint, dataset or frozen config that names one does not cause an import.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, runtime_checkable

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from megads.errors import ConfigError, MegadsError

T = TypeVar("T", bound=Callable[..., Any])
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VERSIONS: dict[str, str] = {}


@dataclass
class NoOptions:
    """Options of a component without options."""


@dataclass(frozen=True)
class Part:
    """One registered component.

    Attributes:
        name: name in the config.
        make: decorated class or function; its first argument is an instance of `options`.
        options: dataclass of its options.
        traits: additional keyword arguments of the decorator.
    """

    name: str
    make: Callable[..., Any]
    options: type
    traits: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """Registry of the components of one kind.

    Args:
        kind: name of the kind, for messages.
        reserved: names of built-in components without options, which are not created by the registry.
    """

    def __init__(self, kind: str, reserved: Sequence[str] = ()) -> None:
        self._kind, self._reserved = kind, dict[str, type](dict.fromkeys(reserved, NoOptions))
        self._parts: dict[str, Part] = {}

    def reserve(self, name: str, options: type = NoOptions) -> None:
        """Reserves the name of a built-in component, which is not created by the registry.

        Args:
            name: name of the component.
            options: dataclass of its options.
        """
        self._reserved[name] = options

    def is_reserved(self, name: str) -> bool:
        """Whether a name is that of a built-in component that is not created by the registry."""
        return name in self._reserved

    def register(self, name: str, options: type, **traits: Any) -> Callable[[T], T]:
        """Returns a decorator that registers a class or function.

        Raises:
            ConfigError: the name is taken or invalid, or `options` is not a dataclass.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"the {self._kind} {name!r} cannot be registered: use letters, digits and _ only")
        if not is_dataclass(options):
            raise ConfigError(
                f"the {self._kind} {name!r} cannot be registered: its options {options!r} are not a dataclass"
            )

        def decorate(make: T) -> T:
            known = self._parts.get(name)
            # In a notebook the same component may be defined repeatedly.
            same = known is not None and _origin(known.make) == _origin(make)
            if name in self._reserved or (known is not None and not same):
                owner = "megads" if known is None else ".".join(_origin(known.make))
                raise ConfigError(f"the {self._kind} {name!r} cannot be registered: {owner} has one of this name")
            self._parts[name] = Part(name, make, options, traits)
            return make

        return decorate

    @property
    def parts(self) -> Mapping[str, Part]:
        """All registered components by name."""
        return self._parts

    def find(self, name: str, key: str) -> Part:
        """Returns a component.

        Args:
            name: name of the component.
            key: config key that selects it, for the message.

        Raises:
            ConfigError: no component of this name is registered.
        """
        if name in self._parts:
            return self._parts[name]
        known = [*self._reserved, *self._parts]
        has = f"it is one of {', '.join(known)}" if known else "none is registered"
        raise ConfigError(
            f"{key}: there is no {self._kind} {name!r}{_nearest(name, known)} ({has}); plugins=[<module>] imports your "
            "own module that registers more"
        )

    def complete(self, name: str, given: Mapping[str, Any], key: str, section: str) -> dict[str, Any]:
        """Validates a component's options and fills in defaults; returns plain dicts, lists, strings and numbers.

        Args:
            name: name of the component.
            given: its options in the config.
            key: config key that selects the component.
            section: config key that contains `given`.

        Raises:
            ConfigError: no such component is registered, or an option is unknown, missing or of another type.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section} = {given}: expected options by name, {section}.<option>=<value>, or {{}}")
        known = self._reserved.get(name)
        if known is NoOptions:
            if given:
                raise ConfigError(
                    f"{section}.{next(iter(given))}: {key} = {name} has no options here: they are for plugins"
                )
            return {}
        schema = self.find(name, key).options if known is None else known
        try:
            merged = OmegaConf.merge(OmegaConf.structured(schema), dict(given))
            options = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise ConfigError(_explain(error, section)) from error
        check = getattr(options, "check", None)
        if check is not None:
            check()
        plain = OmegaConf.to_container(OmegaConf.structured(options), resolve=True, enum_to_str=True)
        assert isinstance(plain, dict)
        return {str(name): value for name, value in plain.items()}

    def complete_all(self, named: dict[str, Any], section: str) -> None:
        """Completes the options of several components in place.

        Args:
            named: options by name of the component.
            section: config key that contains them.

        Raises:
            ConfigError: see `complete`.
        """
        for name, given in named.items():
            key = f"{section}.{name}"
            named[name] = self.complete(name, given or {}, key, key)

    def options_of(self, part: Part, options: Mapping[str, Any]) -> Any:
        """Returns an instance of a component's dataclass from completed options, or from partial ones with defaults."""
        return _typed(part.options, options)

    def reserved_options(self, name: str, options: Mapping[str, Any]) -> Any:
        """As `options_of`, for a reserved component."""
        return _typed(self._reserved[name], options)

    def source_version(self, name: str) -> str:
        """Returns version and digest of the module that registered a component, to detect changes of its behavior."""
        return _version(sys.modules[self.find(name, f"the {self._kind} {name}").make.__module__])

    def make(self, name: str, options: Mapping[str, Any], *arguments: Any) -> Any:
        """Calls a component with its typed options and further arguments.

        Raises:
            ConfigError: no such component is registered.
        """
        part = self.find(name, f"the {self._kind} {name}")
        return part.make(self.options_of(part, options), *arguments)


@runtime_checkable
class UsesPlugins(Protocol):
    """A verb's config with plugins."""

    plugins: list[str]

    def resolve_plugins(self) -> None:
        """Imports the plugins; validates and completes the options of the components in the config."""


HOOKS = Registry("hook")
BLOCKS = Registry("model block", reserved=("transformer",))
OPTIMIZERS = Registry("optimizer", reserved=("adamw",))
SCHEDULES = Registry("learning-rate schedule", reserved=("inverse_sqrt", "wsd"))
READERS = Registry("data reader", reserved=("auto",))
TRACKERS = Registry("tracker", reserved=("wandb", "tensorboard", "mlflow"))


def register_hook(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a hook: a callable that takes its options and a `megads.HookContext` and returns a `megads.Hook`."""
    return HOOKS.register(name, options)


def register_model(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a model block: a module class that takes its options, the model's config, the seed and its layer index.

    Its attribute `sharding`, a `megads.ShardingTable` of paths within the block, defines how it can be sharded.
    """
    return BLOCKS.register(name, options)


def register_optimizer(name: str, options: type = NoOptions, *, state: Sequence[str] = ()) -> Callable[[T], T]:
    """Registers an elementwise optimizer: a callable that takes its options and a `megads.Update`.

    It updates the master weights in place.

    Args:
        name: value of optim.name that selects it.
        options: dataclass of optim.options.
        state: names of its fp32 state tensors per weight; they are initialized to zero and saved in checkpoints.
    """
    wrong = [kind for kind in state if not kind.isidentifier() or kind in ("weight", "gradient")]
    if wrong:
        raise ConfigError(f"the optimizer {name!r} cannot be registered: its state cannot be called {wrong[0]!r}")
    return OPTIMIZERS.register(name, options, state=tuple(state))


def register_schedule(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a learning-rate schedule for the steps after the warmup.

    The callable takes its options and the completed fraction of the decay, in [0, 1], and returns the learning rate as
    a fraction of the way from optim.min_lr to optim.lr.
    """
    return SCHEDULES.register(name, options)


def register_reader(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a data reader: a callable that takes its options and a file's path and yields each document's text."""
    return READERS.register(name, options)


def register_tracker(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a tracker: a callable that takes its options, a `megads.RunDescription` and the last step that it has
    already recorded, and returns a `megads.Tracker`."""
    return TRACKERS.register(name, options)


def import_plugins(names: Sequence[str]) -> None:
    """Imports plugins: installed modules, or modules in the current directory, as with `python -m`.

    A plugin whose source has changed since its last import is imported again: a notebook's process outlives edits.

    Raises:
        ConfigError: a plugin cannot be imported.
    """
    here = str(Path.cwd())
    if names and not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"plugins: {name!r} is not a module name: expected one as in `import {Path(name).stem}`")
        if name in sys.modules and _VERSIONS.get(name, "") not in ("", _version(sys.modules[name])):
            _unload(name)
        try:
            module = importlib.import_module(name)
        except MegadsError as error:
            raise ConfigError(f"plugins: {name} cannot be imported: {error}") from error
        except Exception as error:
            raise ConfigError(_why_not_imported(name, error)) from error
        _VERSIONS[name] = _version(module)


def plugin_versions() -> dict[str, str]:
    """Returns version and source digest of every plugin that this process has imported."""
    return dict(_VERSIONS)


def _unload(name: str) -> None:
    """Makes the next import of a module, and of what it contains, read its source."""
    for loaded in [loaded for loaded in sys.modules if f"{loaded}.".startswith(f"{name}.")]:
        del sys.modules[loaded]
    importlib.invalidate_caches()


def _why_not_imported(name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return (
            f"plugins: there is no module {name} in {Path.cwd()} or among the installed packages: start the command in "
            "the folder that holds it, or install it"
        )
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"plugins: {name} cannot be imported: {type(error).__name__}: {error} ({last.filename}:{last.lineno}); "
        f'python -c "import {name}" shows the whole traceback'
    )


def _version(module: ModuleType) -> str:
    """Returns a module's `__version__` and a digest of its source; for a package, of all its files."""
    declared = getattr(module, "__version__", None)
    origin = getattr(module, "__file__", None)
    if origin is None:
        return str(declared)
    path = Path(origin)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(path.parent)).encode() + b"\0" + file.read_bytes() + b"\0")
    source = f"source {digest.hexdigest()[:12]}"
    return source if declared is None else f"{declared}, {source}"


def _typed(schema: type, options: Mapping[str, Any]) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), dict(options)))


def _origin(make: Callable[..., Any]) -> tuple[str, str]:
    return make.__module__, make.__qualname__


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


def _explain(error: OmegaConfBaseException, section: str) -> str:
    key = str(error.full_key or "")
    place = f"{section}.{key}" if key else section
    if isinstance(error, MissingMandatoryValue):
        return f"{place} has no value: it must be set, for example {place}=<value>"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        owner: Any = error.object_type
        known = [item.name for item in fields(owner)] if is_dataclass(owner) else []
        hint = _nearest(key.rpartition(".")[2], known)
        return f"unknown key {place}{hint} ({section} takes {', '.join(known) or 'no settings'})"
    return f"{place}: {str(error).strip().splitlines()[0]}"
