"""Registered components, their options, and the import of plugins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.runtime import registry
from megads.runtime.registry import Registry, import_plugins, plugin_versions, register_optimizer


class Kind(StrEnum):
    one = "one"
    two = "two"


@dataclass
class Inner:
    width: int = 3


@dataclass
class Options:
    rate: float = 0.5
    kind: Kind = Kind.one
    inner: Inner = field(default_factory=Inner)

    def check(self) -> None:
        if self.rate < 0:
            raise ConfigError(f"rate = {self.rate}: must not be negative")


@pytest.fixture
def parts() -> Registry:
    """A registry with one component, which returns its arguments."""
    made = Registry("part", reserved=("standard",))
    made.register("echo", Options)(lambda *arguments: arguments)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, off the import path; modules imported from it are unloaded."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    monkeypatch.setattr(registry, "_VERSIONS", {})
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_options_are_completed_as_plain_values_and_given_typed(parts: Registry) -> None:
    """Catches a frozen config that lacks a default, or has values that YAML and JSON cannot hold."""
    plain = parts.complete("echo", {"inner": {"width": 7}, "kind": "two"}, "part.name", "part.options")
    assert plain == {"rate": 0.5, "kind": "two", "inner": {"width": 7}}
    assert parts.make("echo", plain, 1, 2) == (Options(0.5, Kind.two, Inner(7)), 1, 2)
    assert parts.complete("standard", {}, "part.name", "part.options") == {}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("ecko", {}, "there is no part 'ecko': did you mean echo?"),
        ("echo", {"rat": 1}, "unknown key part.options.rat: did you mean rate?"),
        ("echo", {"inner": {"widdth": 1}}, "unknown key part.options.inner.widdth: did you mean width?"),
        ("echo", {"rate": "fast"}, "part.options.rate: Value 'fast'"),
        ("echo", {"kind": "three"}, "part.options.kind: Invalid value 'three'"),
        ("echo", {"rate": -1}, "rate = -1.0: must not be negative"),
        ("echo", 3, "part.options = 3: expected options by name"),
        ("standard", {"rate": 1}, "part.options.rate: part.name = standard has no options"),
    ],
)
def test_wrong_names_and_options_are_refused(parts: Registry, name: str, given: object, said: str) -> None:
    """Catches a typo that trains with a default."""
    with pytest.raises(ConfigError) as raised:
        parts.complete(name, given, "part.name", "part.options")  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_a_name_belongs_to_one_part(parts: Registry) -> None:
    """Catches a plugin that silently replaces another one, or a built-in component."""
    for name in ("echo", "standard", "not a name"):
        with pytest.raises(ConfigError, match="cannot be registered"):
            parts.register(name, Options)(Options)
    with pytest.raises(ConfigError, match="are not a dataclass"):
        parts.register("other", int)
    with pytest.raises(ConfigError, match="cannot be called 'weight'"):
        register_optimizer("any", state=("weight",))
    with pytest.raises(ConfigError, match="cannot be called 'two words'"):
        register_optimizer("any", state=("moment", "two words"))
    register_optimizer("any", state=("moment", "square"))


def test_a_notebook_may_define_a_part_again() -> None:
    """Catches a notebook cell that can run only once."""
    parts = Registry("part")

    def define() -> None:
        @parts.register("again", Options)
        def part(options: Options) -> float:
            return options.rate

    define()
    define()
    assert parts.make("again", {"rate": 2}) == 2.0


def test_plugins_come_from_the_working_directory_with_their_versions(folder: Path) -> None:
    """Catches a console script that finds less than `python -m`, and an edit that a checkpoint does not record."""
    package = folder / "own_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.5'\n")
    (package / "part.py").write_text("x = 1\n")
    import_plugins(["own_plugin"])
    first = plugin_versions()["own_plugin"]
    assert first.startswith("1.5, source ")
    (package / "part.py").write_text("x = 2\n")
    import_plugins(["own_plugin"])
    assert plugin_versions()["own_plugin"] != first


def test_an_edited_plugin_is_imported_again(folder: Path) -> None:
    """Catches a notebook that checks the next run's options by the plugin that it imported for the first run."""
    package = folder / "edited_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("from edited_plugin.part import rate\n")
    (package / "part.py").write_text("rate = 1\n")
    import_plugins(["edited_plugin"])
    first = sys.modules["edited_plugin"]
    import_plugins(["edited_plugin"])
    assert sys.modules["edited_plugin"] is first and first.rate == 1
    (package / "part.py").write_text("rate = 1 + 1\n")
    import_plugins(["edited_plugin"])
    assert sys.modules["edited_plugin"].rate == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import megads_is_not_this\n", "ModuleNotFoundError: No module named 'megads_is_not_this'"),
        ("def f(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_plugin_that_fails_says_where(folder: Path, text: str, said: str) -> None:
    """Catches a plugin's missing dependency reported as a missing plugin, and a cause without a location."""
    (folder / "broken_plugin.py").write_text(text)
    with pytest.raises(ConfigError) as raised:
        import_plugins(["broken_plugin"])
    assert said in str(raised.value) and "python -c" in str(raised.value)


@pytest.mark.parametrize("name", ["no_such_plugin", "no_such_plugin.part", "./plugin.py", ""])
def test_a_missing_plugin_says_what_to_do(folder: Path, name: str) -> None:
    """Catches a traceback of importlib for a mistyped name."""
    with pytest.raises(ConfigError, match=r"there is no module|is not a module name"):
        import_plugins([name])
