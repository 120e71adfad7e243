"""What plugins bring: six registries of named parts, each with its typed options.

A plugin is a module of the user's, named on the command line (`plugins=[my_package]`). Importing it registers its parts
by the decorators below; the config then names a part as it names a built-in one. Nothing else imports a plugin: a
checkpoint, a dataset or a frozen config that names one is only data.
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
    """The options of a part that has none."""


@dataclass(frozen=True)
class Part:
    """One registered part.

    Attributes:
        name: as the config names it.
        make: the decorated class or function; its first argument is an instance of `options`.
        options: dataclass of its options.
        traits: what the decorator was told of it beside that.
    """

    name: str
    make: Callable[..., Any]
    options: type
    traits: Mapping[str, Any] = field(default_factory=dict)


class Registry:
    """The parts of one kind.

    Args:
        kind: in words, for messages.
        reserved: names of built-in parts that are not registered and have no options.
    """

    def __init__(self, kind: str, reserved: Sequence[str] = ()) -> None:
        self._kind, self._reserved = kind, dict[str, type](dict.fromkeys(reserved, NoOptions))
        self._parts: dict[str, Part] = {}

    def reserve(self, name: str, options: type = NoOptions) -> None:
        """Adds a built-in part that is not made from here.

        Args:
            name: of the part.
            options: dataclass of its options.
        """
        self._reserved[name] = options

    def is_reserved(self, name: str) -> bool:
        """Whether a name is a built-in part's, in place of a plugin's."""
        return name in self._reserved

    def register(self, name: str, options: type, **traits: Any) -> Callable[[T], T]:
        """Returns the decorator that registers a class or function.

        Raises:
            ConfigError: the name is taken or is no name, or `options` is no dataclass.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"the {self._kind} {name!r} cannot be registered: want letters, digits and _ in its name")
        if not is_dataclass(options):
            raise ConfigError(
                f"the {self._kind} {name!r} cannot be registered: its options {options!r} are no dataclass"
            )

        def decorate(make: T) -> T:
            known = self._parts.get(name)
            # A notebook defines the same part again and again.
            same = known is not None and _origin(known.make) == _origin(make)
            if name in self._reserved or (known is not None and not same):
                owner = "megads" if known is None else ".".join(_origin(known.make))
                raise ConfigError(f"the {self._kind} {name!r} cannot be registered: {owner} has one of this name")
            self._parts[name] = Part(name, make, options, traits)
            return make

        return decorate

    @property
    def parts(self) -> Mapping[str, Part]:
        """All registered parts by name."""
        return self._parts

    def find(self, name: str, key: str) -> Part:
        """Returns a part.

        Args:
            name: of the part.
            key: the config key that names it, for the message.

        Raises:
            ConfigError: there is none of this name.
        """
        if name in self._parts:
            return self._parts[name]
        known = [*self._reserved, *self._parts]
        has = f"it is one of {', '.join(known)}" if known else "none is registered"
        raise ConfigError(
            f"{key}: there is no {self._kind} {name!r}{_nearest(name, known)} ({has}); plugins=[<module>] imports a "
            "module of your own that registers more"
        )

    def complete(self, name: str, given: Mapping[str, Any], key: str, section: str) -> dict[str, Any]:
        """Returns a part's options, checked, with defaults filled in, as plain dicts, lists, strings and numbers.

        Args:
            name: of the part.
            given: what the config says of it.
            key: the config key that names it.
            section: the config key that holds `given`.

        Raises:
            ConfigError: there is no such part, or an option is unknown, missing or of another type.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section} = {given}: want settings by name, as in {section}.<setting>=<value>, or {{}}")
        known = self._reserved.get(name)
        if known is NoOptions:
            if given:
                raise ConfigError(
                    f"{section}.{next(iter(given))}: {key} = {name} has no options of this kind: they are for plugins"
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
        """Completes, in place, the options of several parts.

        Args:
            named: options by name.
            section: the config key that holds them.

        Raises:
            ConfigError: see `complete`.
        """
        for name, given in named.items():
            key = f"{section}.{name}"
            named[name] = self.complete(name, given or {}, key, key)

    def options_of(self, part: Part, options: Mapping[str, Any]) -> Any:
        """An instance of a part's dataclass from what `complete` returned, or from what is left to its defaults."""
        return _typed(part.options, options)

    def reserved_options(self, name: str, options: Mapping[str, Any]) -> Any:
        """The same for a built-in part that is not made from here."""
        return _typed(self._reserved[name], options)

    def source_of(self, name: str) -> str:
        """Version and digest of the module that registered a part: what it does may have changed where this has."""
        return _version(sys.modules[self.find(name, f"the {self._kind} {name}").make.__module__])

    def make(self, name: str, options: Mapping[str, Any], *arguments: Any) -> Any:
        """Calls a part with its typed options and further arguments.

        Raises:
            ConfigError: there is no such part.
        """
        part = self.find(name, f"the {self._kind} {name}")
        return part.make(self.options_of(part, options), *arguments)


@runtime_checkable
class UsesPlugins(Protocol):
    """A verb's config that names plugins."""

    plugins: list[str]

    def settle_plugins(self) -> None:
        """Imports them, and checks and completes the settings of the parts that the config names."""


HOOKS = Registry("hook")
BLOCKS = Registry("model block", reserved=("transformer",))
OPTIMIZERS = Registry("optimizer", reserved=("adamw",))
SCHEDULES = Registry("learning-rate schedule", reserved=("inverse_sqrt", "wsd"))
READERS = Registry("data reader", reserved=("auto",))
TRACKERS = Registry("tracker", reserved=("wandb", "tensorboard"))


def register_hook(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a hook: called with its options and a `megads.HookContext`, it returns a `megads.Hook`."""
    return HOOKS.register(name, options)


def register_model(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a model block: a module class called with its options, the model's config, the seed and its number.

    Its attribute `sharding`, a `megads.ShardingTable` of paths within the block, says how it may be cut.
    """
    return BLOCKS.register(name, options)


def register_optimizer(name: str, options: type = NoOptions, *, state: Sequence[str] = ()) -> Callable[[T], T]:
    """Registers an elementwise update: called with its options and a `megads.Update`, it changes its master weights.

    Args:
        name: for optim.name.
        options: dataclass of optim.options.
        state: names of the fp32 tensors that it keeps of every weight; they start at zero, and checkpoints hold them.
    """
    wrong = [kind for kind in state if not kind.isidentifier() or kind in ("weight", "gradient")]
    if wrong:
        raise ConfigError(f"the optimizer {name!r} cannot be registered: its state cannot be called {wrong[0]!r}")
    return OPTIMIZERS.register(name, options, state=tuple(state))


def register_schedule(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers the shape of the learning rate after the warmup.

    Called with its options and the share of the decay that is done, in [0, 1], it returns the share of the way from
    optim.min_lr to optim.lr.
    """
    return SCHEDULES.register(name, options)


def register_reader(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a data reader: called with its options and the path of a file, it yields the text of each document."""
    return READERS.register(name, options)


def register_tracker(name: str, options: type = NoOptions) -> Callable[[T], T]:
    """Registers a tracker: called with its options, a `megads.RunDescription` and the last step that it was told of
    before, it returns a `megads.Tracker`."""
    return TRACKERS.register(name, options)


def import_plugins(names: Sequence[str]) -> None:
    """Imports plugins, from the current directory as `python -m` does, or installed ones.

    Raises:
        ConfigError: one cannot be imported.
    """
    here = str(Path.cwd())
    if names and not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"plugins: {name!r} is no module's name: want one as in `import {Path(name).stem}`")
        try:
            module = importlib.import_module(name)
        except MegadsError as error:
            raise ConfigError(f"plugins: {name} cannot be imported: {error}") from error
        except Exception as error:
            raise ConfigError(_why_not_imported(name, error)) from error
        _VERSIONS[name] = _version(module)


def plugin_versions() -> dict[str, str]:
    """The plugins that this process imported, each with its version and a digest of its source."""
    return dict(_VERSIONS)


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
    """What the module says of itself, and a digest of its source: of all files, for a package."""
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
