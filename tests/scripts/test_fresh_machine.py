"""Tests the cases of `make test-fresh`, and what protects this machine's folders; builds no system."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fresh_machine.cases import Case, all_cases, result, selected
from scripts.fresh_machine.system import FreshMachineError, open_cache, registries, remove

CASES = all_cases([], "make demo", "make test")


def names(cases: list[Case]) -> list[str]:
    return [f"{case.name}:{step}" for case in cases for step in case.steps]


def test_a_selection_needs_all_of_its_words() -> None:
    """Catches a selection that runs cases which nobody asked for, for hours."""
    assert names(selected(CASES, ["debian12:nocompiler:demo"])) == [
        "debian12:nocompiler:space:demo",
        "debian12:nocompiler:megads:demo",
    ]
    assert names(selected(CASES, ["users:second", "memory"])) == ["debian12:users:second", "debian12:memory:demo"]
    assert selected(CASES, []) == CASES
    assert selected(CASES, ["debian11"]) == []


def test_a_demo_without_a_compiler_must_say_so() -> None:
    """Catches a demo that silently takes several times as long without a compiler, and one without a result."""
    log = "   12.0  validation loss: 4.0 nats a token; unigram entropy: 6.4; gained: 2.4075\n"
    assert result("demo", log, compiler=True) == (True, "gained 2.4075 nats")
    assert not result("demo", log, compiler=False)[0]
    assert result("demo", f"    3.0  megads: no kernels: there is no C++ compiler\n{log}", compiler=False)[0]
    assert not result("demo", "   12.0  done\n", compiler=True)[0]


def test_the_counts_of_pytest_are_found() -> None:
    """Catches a table without the number of tests, and a command that ran none."""
    assert result("test", "  900.1  = 1 failed, 6129 passed, 84 skipped in 984.00s (0:16:24) =\n", compiler=True) == (
        True,
        "1 failed, 6129 passed, 84 skipped",
    )
    assert not result("test", "  900.1  make: *** No rule\n", compiler=True)[0]


def test_pips_settings_and_their_folders_are_found(tmp_path: Path) -> None:
    """Catches an index in a folder whose files, beside it, do not appear in the system, and an option that must not be
    copied, such as a target folder."""
    page = tmp_path / "pypi" / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<a href="../../files/torch-2.13.0.whl#sha256=0">torch</a>')
    (tmp_path / "wheels of mine").mkdir()
    listed = f"global.extra-index-url='file://{page.parents[1]} https://example.org/simple'\nglobal.target='/opt'\n"
    environment = {"PIP_FIND_LINKS": str(tmp_path), "PIP_TARGET": "/opt", "HTTPS_PROXY": "http://proxy:3128", "A": "b"}
    found = registries(environment | {"PIP_FIND_LINKS": str(page.parents[2] / "none")}, listed)
    assert found.folders == [tmp_path / "pypi"]
    assert "https://example.org/simple" in found.pip_conf and "target" not in found.pip_conf
    assert set(found.variables) == {"PIP_FIND_LINKS", "HTTPS_PROXY"}
    assert registries(environment, listed).folders == [tmp_path]


def test_only_a_cache_of_this_script_is_removed(tmp_path: Path) -> None:
    """Catches --clean --cache=<a folder of the user's>, and a link in the cache that leads out of it."""
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    with pytest.raises(FreshMachineError, match="not made by this script"):
        open_cache(mine)
    with pytest.raises(FreshMachineError, match="not in a cache folder"):
        remove(mine, mine)
    cache = tmp_path / "cache"
    with open_cache(cache), pytest.raises(FreshMachineError, match="another call uses"):
        open_cache(cache)
    (cache / "link").symlink_to(mine)
    with pytest.raises(FreshMachineError, match="not in a cache folder"):
        remove(cache, cache / "link")
    assert (mine / "deep").is_dir()
    remove(cache, cache)
    assert not cache.exists()


def test_mounted_folders_are_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an `rm -r` that reaches a folder of this machine through a bind mount."""
    cache = tmp_path / "cache"
    open_cache(cache).close()
    (cache / "case" / "opt").mkdir(parents=True)
    monkeypatch.setattr("scripts.fresh_machine.system.mount_points", lambda: [Path("/"), cache / "case" / "opt"])
    with pytest.raises(FreshMachineError, match="is mounted at"):
        remove(cache, cache / "case")
    assert (cache / "case" / "opt").is_dir()
