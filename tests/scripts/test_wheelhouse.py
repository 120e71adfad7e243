"""`make wheelhouse`: its wheels install megads where there is no network."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.two_hosts import OUTERMOST

ROOT = Path(__file__).parents[2]
NO_NETWORK = (*OUTERMOST, "sh", "-ec", 'ip link set lo up; exec "$@"', "sh")
"""Command line before a program without any network but loopback."""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Runs a command without the settings of pip that this machine has; returns its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200,
        check=False, env=kept | variables,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def no_network() -> tuple[str, ...]:
    """Command line before a program without network; skips the test where that is not permitted."""
    command = [*NO_NETWORK, sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 5)"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"cutting off the network needs namespaces: {error}")
    if "Network is unreachable" not in tried.stderr:
        pytest.skip(f"cutting off the network needs namespaces, which are not permitted here: {tried.stderr.strip()}")
    return NO_NETWORK


@pytest.mark.slow
def test_the_wheelhouse_installs_without_network(no_network: tuple[str, ...], tmp_path: Path) -> None:
    """Catches a package that the wheelhouse lacks and pip would take from its cache or the network, and a run that
    needs the network itself."""
    wheels, site, home = tmp_path / "a folder" / "wheels", tmp_path / "site", tmp_path / "home"
    of_this_machine = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    made = run("make", "wheelhouse", f"DEST={wheels}", "EXTRAS=", f"VENV={sys.prefix}", folder=ROOT, **of_this_machine)
    assert list(wheels.glob("megads-*.whl")) and not list(wheels.glob("*.tar.gz"))
    home.mkdir()
    alone = {"HOME": str(home), "PIP_CONFIG_FILE": os.devnull, "PIP_CACHE_DIR": str(tmp_path / "empty cache")}
    run(sys.executable, "-m", "venv", site, folder=tmp_path)
    (install,) = re.findall(r"^pip (install .*)$", made, re.MULTILINE)
    # Bytecode of all packages would take half of the time.
    words = [*shlex.split(install), "--no-compile", "--quiet"]
    run(*no_network, site / "bin/pip", *words, folder=tmp_path, **alone)
    path = {"PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    assert "train" in run(*no_network, "megads", "--help", folder=tmp_path, **alone, **path)
    (tmp_path / "notes").mkdir()
    for number, source in enumerate(sorted((ROOT / "megads").rglob("*.py"))[:60]):
        (tmp_path / "notes" / f"{number}.txt").write_text(source.read_text())
    command = ("megads", "train", "experiment=first", "data.raw=notes", "train.steps=2", "run.id=first")
    run(*no_network, *command, "ops.impl=torch", folder=tmp_path, **alone, **path)
    assert (tmp_path / "runs/first/checkpoints/step_00000002/manifest.json").exists()


def test_a_folder_with_wheels_is_refused(tmp_path: Path) -> None:
    """Catches two versions of a package in one wheelhouse, of which pip takes the newer, whatever was asked for."""
    (tmp_path / "torch-2.9.0-cp311-cp311-linux_x86_64.whl").touch()
    command = ["make", "wheelhouse", f"DEST={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "already has wheels" in done.stderr
