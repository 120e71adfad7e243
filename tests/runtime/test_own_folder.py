"""Folders in places where every user may write: made for this user alone, or refused; and no others are made."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

import pytest

from megads.checkpoint.local_files import open_folder
from megads.data.config import StreamConfig
from megads.data.indexed import verified_once
from megads.errors import ConfigError
from megads.runtime import environment, heartbeat
from megads.runtime.heartbeat import HeartbeatMonitor
from megads.runtime.own_folder import is_users_folder, make_own, own_path
from megads.tools.evaluate.weights_cache import NodeWeightsCache
from megads.tools.remote.stream import cache_folder

PACKAGE = Path(__file__).parents[2] / "megads"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder in which everything that others could have planted is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def planted(folder: Path, kind: str) -> None:
    """Makes a folder as another user could."""
    if kind == "link":
        (folder.parent / "elsewhere").mkdir(exist_ok=True)
        folder.symlink_to(folder.parent / "elsewhere")
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    if kind == "owner":
        folder.chmod(0o755)
        os.chown(folder, 65534, 65534)


KINDS = ("link", "file", "mode", pytest.param("owner", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_folder_is_refused_by_all_that_use_one(kind: str, shared: Path) -> None:
    """Catches training data, kernels, weights or results that another user planted under a name that megads uses."""
    folder = own_path("streams")
    planted(folder, kind)
    assert not is_users_folder(folder)
    with pytest.raises(OSError):
        make_own(folder)
    with pytest.raises(ConfigError, match=r"data\.stream\.cache_dir = .*megads-streams-\d+: cannot be used"):
        cache_folder(StreamConfig())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    planted(own_path("verified", boot), kind)
    assert verified_once._memory() is None
    planted(own_path(suffix="run", root=shared), kind)
    with pytest.raises(OSError):
        open_folder(own_path(suffix="run", root=shared) / "own_00000")
    cache = NodeWeightsCache(shared, shared / "evaluation").folder
    assert is_users_folder(cache)
    for path in cache.iterdir():
        path.unlink()
    cache.rmdir()
    planted(cache, kind)
    with pytest.raises(ConfigError, match="staging_folder"):
        NodeWeightsCache(shared, shared / "evaluation")


def test_an_own_folder_is_private_and_found_again(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder that a process makes and the next one refuses, and one that others can read."""
    made = make_own(own_path("cache"))
    assert made == shared / f"megads-cache-{os.getuid()}" and made.stat().st_mode & 0o777 == 0o700
    assert make_own(own_path("cache")) == made
    monkeypatch.setattr(environment, "home_dir", lambda: None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert environment.user_cache_dir() == made


def test_no_other_module_makes_a_folder_in_tmp() -> None:
    """Catches another predictable name in a folder that all users share, without these checks."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"gettempdir\(|getuid\(\)\}-|mkdir\(mode=", path.read_text())
    }
    # The monitor's folder and that of the private SLURM have random names.
    assert found == {"runtime/own_folder.py", "runtime/heartbeat.py", "tools/rehearse/private_slurm.py"}


def test_heartbeats_of_killed_launchers_are_removed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a temporary folder that fills with what killed launchers left, and a live one that loses its own."""
    live, killed, recent = HeartbeatMonitor(), HeartbeatMonitor(), shared / "megads-heartbeats-recent"
    assert live.folder is not None and killed.folder is not None and killed._lock is not None
    killed._lock.close()  # as the kernel does
    recent.mkdir(mode=0o700)
    old = shared / "megads-heartbeats-old"
    old.mkdir(mode=0o700)
    os.utime(old, (time.time() - 8 * 86400,) * 2)
    new = HeartbeatMonitor()
    assert new.folder is not None and new.folder.exists() and live.folder.exists() and recent.exists()
    assert not killed.folder.exists() and not old.exists()
    assert heartbeat._ALIVE in {path.name for path in live.folder.iterdir()}
