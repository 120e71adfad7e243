"""scripts/setup.sh with the real pip, on a small project whose dependencies are wheels of a local package index."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import install

ROOT = Path(__file__).parent.parent.parent
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "megads"
version = "1.0"
[tool.other]
"""
BACKEND = '''
"""Builds the editable wheel of the small project; waits in the middle while the file `wait` exists."""
import os, pathlib, time, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    while os.path.exists("wait"):
        pathlib.Path("waiting").touch()
        time.sleep(0.05)
    needs = "Requires-Dist: torch\\nRequires-Dist: libraries\\nProvides-Extra: report\\nProvides-Extra: dev\\n"
    files = {
        "megads.pth": os.getcwd(),
        "megads-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\\nName: megads\\nVersion: 1.0\\n{needs}"
        "Requires-Dist: linter; extra == 'dev'\\n",
        "megads-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        "megads-1.0.dist-info/entry_points.txt": "[console_scripts]\\nmegads = megads.train.loop:main\\n",
        "megads-1.0.dist-info/RECORD": "",
    }
    name = "megads-1.0-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name

build_wheel = build_editable
'''
LIBRARIES = ("deepspeed", "hydra", "numpy", "rich", "safetensors", "tokenizers", "xxhash", "zstandard")


def add_wheel(index: Path, name: str, version: str, files: dict[str, str], requires: str = "") -> None:
    """Adds a pure Python wheel to a package index in a folder."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    own = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | own).items():
            wheel.writestr(path, text)
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


@dataclass
class Checkout:
    """A small checkout with the real scripts.

    Attributes:
        folder: folder of the checkout; has a space and a letter outside of ASCII in its path.
        index: package index that pip uses.
        variables: changes to the environment variables; None removes one.
    """

    folder: Path
    index: Path
    variables: dict[str, str | None]

    def command(self, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        environment: dict[str, str | None] = {**os.environ, **self.variables, **variables}
        kept = {name: value for name, value in environment.items() if value is not None}
        return [str(self.folder / "scripts/setup.sh"), *arguments], kept

    def setup(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command, environment = self.command(*arguments, **variables)
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)

    def megads(self) -> str:
        _, environment = self.command()
        command = self.folder / ".venv/bin/megads"
        return subprocess.run([command], env=environment, capture_output=True, text=True, check=True).stdout

    def installed(self) -> list[str]:
        found = (self.folder / ".venv").glob("lib/python3*/site-packages/*.dist-info")
        return sorted(path.name.split("-")[0] for path in found if not path.name.startswith(("pip", "setuptools")))


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    folder = tmp_path / "a folder é" / "megads"
    index = tmp_path / "index"
    (folder / "scripts").mkdir(parents=True)
    for name in ("setup.sh", "install.py"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts")
    files = {"pyproject.toml": PROJECT, "backend.py": BACKEND, "constraints.txt": "torch==2.0\n"}
    files |= {
        "megads/__init__.py": "",
        "megads/train/__init__.py": "",
        "megads/train/loop.py": "def main():\n    print(__file__)\n",
    }
    files |= {"megads/ops/__init__.py": "", "megads/ops/build.py": "print('kernels')\n"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    add_wheel(index, "torch", "2.0", {"torch/__init__.py": ""})
    add_wheel(index, "torch", "3.0", {"torch/__init__.py": ""})
    add_wheel(index, "libraries", "1.0", {f"{name}.py": "" for name in LIBRARIES})
    add_wheel(index, "linter", "1.0", {"linter.py": ""})
    pip = {"PIP_INDEX_URL": index.as_uri(), "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": None}
    plain = {
        "VENV": None,
        "PYTHON": sys.executable,
        "LANG": None,
        "LC_ALL": None,
        "PYTHONPATH": None,
        "TORCH_CPU_INDEX": "",
    }
    # No home folder: pip's cache cannot be written.
    yield Checkout(folder, index, {**pip, **plain, "HOME": "/proc/nowhere", "XDG_CACHE_HOME": None})


def test_a_level_installs_what_it_needs_once(checkout: Checkout) -> None:
    """Catches a demo that installs the tests' packages, tests without theirs, versions that are not the pinned ones, a
    second run that works again, pip's chatter on the terminal, and a folder or a home that the set-up cannot bear."""
    demo = checkout.setup("demo")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert checkout.installed() == ["libraries", "megads", "torch"]
    assert demo.stdout.splitlines()[0].startswith("setup: installing what 'make demo' needs into .venv, 1.1 GB")
    assert len(demo.stdout.splitlines()) < 6 and not demo.stderr
    assert "Installing collected packages: torch" in (checkout.folder / ".venv/setup.log").read_text()
    assert checkout.megads() == f"{checkout.folder}/megads/train/loop.py\n"
    assert checkout.setup("demo").stdout == ""

    assert "'make test'" in checkout.setup().stdout
    assert checkout.installed() == ["libraries", "linter", "megads", "torch"]
    assert [checkout.setup(level).stdout for level in ("demo", "dev")] == ["", ""]
    (checkout.folder / "pyproject.toml").write_text(PROJECT + "line-length = 120\n")
    assert checkout.setup("dev").stdout == ""
    (checkout.folder / "constraints.txt").write_text("torch==3.0\n")
    assert checkout.setup("demo").returncode == 0
    assert list((checkout.folder / ".venv").glob("lib/python3*/site-packages/torch-3.0.dist-info"))


@pytest.mark.slow
def test_a_moved_environment_is_made_again(checkout: Checkout) -> None:
    """Catches scripts that name an interpreter that is not there, and packages of a Python that was replaced."""
    assert checkout.setup("demo").returncode == 0
    moved = Checkout(checkout.folder.with_name("elsewhere"), checkout.index, checkout.variables)
    checkout.folder.rename(moved.folder)
    again = moved.setup("demo")
    assert f"making .venv again: it was made in {checkout.folder}/.venv" in again.stdout, again.stderr
    assert moved.megads() == f"{moved.folder}/megads/train/loop.py\n"
    (moved.folder / ".venv/bin/python").unlink()
    (moved.folder / ".venv/bin/python").symlink_to("/usr/bin/no-such-python")
    assert "making .venv again: its Python does not run" in moved.setup("demo").stdout
    assert moved.installed() == ["libraries", "megads", "torch"]


def test_a_folder_that_is_no_environment_is_kept(checkout: Checkout, tmp_path: Path) -> None:
    """Catches a set-up that empties a folder of the user's, named by mistake."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").touch()
    refused = checkout.setup("demo", VENV=str(tmp_path / "notes"))
    assert refused.returncode == 1 and "is no virtual environment" in refused.stderr
    assert (tmp_path / "notes" / "thesis.txt").exists()


@pytest.mark.slow
def test_an_interrupted_set_up_continues(checkout: Checkout) -> None:
    """Catches Ctrl-C that leaves pip running, and an environment that only removing it mends."""
    (checkout.folder / "wait").touch()
    command, environment = checkout.command("demo")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        while not (checkout.folder / "waiting").exists():
            assert run.poll() is None
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "interrupted; the same command continues" in said
    (checkout.folder / "wait").unlink()
    (info,) = (checkout.folder / ".venv").glob("lib/python3*/site-packages/pip-*.dist-info")
    assert info.exists()
    again = checkout.setup("demo")
    assert again.returncode == 0 and "the last set-up did not finish: it is continued" in again.stdout, again.stderr
    assert checkout.installed() == ["libraries", "megads", "torch"]


@pytest.mark.slow
def test_a_failure_names_the_log_and_the_cause(checkout: Checkout) -> None:
    """Catches an error without pip's reason or without a remedy, and a failure after which the command stays broken."""
    (checkout.folder / "constraints.txt").write_text("torch==9.0\n")
    failed = checkout.setup("demo")
    assert failed.returncode == 1
    assert "pip failed with exit code 1: .venv/setup.log\n" in failed.stderr
    assert "The user requested (constraint) torch==9.0" in failed.stderr and "PIP_FIND_LINKS" in failed.stderr
    add_wheel(checkout.index, "torch", "9.0", {"torch/__init__.py": ""})
    assert checkout.setup("demo").returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(install.has_nvidia_gpu(), reason="a machine without an NVIDIA GPU is tested")
def test_the_cpu_build_of_torch_is_found(checkout: Checkout, tmp_path: Path) -> None:
    """Catches gigabytes of CUDA on a machine without a GPU, and their download without a word."""
    cuda = {"torch/__init__.py": "cuda = True"}
    add_wheel(checkout.index, "torch", "2.0", cuda, "Requires-Dist: nvidia-one; platform_system == 'Linux'\n")
    add_wheel(checkout.index, "nvidia-one", "1.0", {"nvidia.py": ""})
    said = checkout.setup("demo")
    assert "torch's CUDA build although there is no NVIDIA GPU, 5 GB more" in said.stdout, said.stderr
    assert "nvidia_one" in checkout.installed()
    shutil.rmtree(checkout.folder / ".venv")
    add_wheel(tmp_path / "cpu", "torch", "2.0+cpu", {"torch/__init__.py": "cuda = False"})
    said = checkout.setup("demo", TORCH_CPU_INDEX=(tmp_path / "cpu").as_uri())
    assert "with torch's CPU build, from file://" in said.stdout, said.stderr
    assert checkout.installed() == ["libraries", "megads", "torch"]


def test_a_python_without_ensurepip_is_named(checkout: Checkout, tmp_path: Path) -> None:
    """Catches an error of venv's inside that does not say which package of Debian is missing."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(os.__file__).parent
    (tmp_path / "home/bin").mkdir(parents=True)
    (tmp_path / "home/lib" / version).mkdir(parents=True)
    for path in library.iterdir():
        if path.name not in ("ensurepip", "site-packages"):
            (tmp_path / "home/lib" / version / path.name).symlink_to(path)
    shutil.copy(Path(sys.executable).resolve(), tmp_path / "home/bin" / version)
    failed = checkout.setup("demo", PYTHON=str(tmp_path / "home/bin" / version))
    assert failed.returncode == 1
    assert f"apt install {version}-venv" in failed.stderr, failed.stderr


def test_without_python_the_remedy_is_said(checkout: Checkout, tmp_path: Path) -> None:
    """Catches 'command not found' where there is no Python, or only an old one."""
    for name in ("bash", "dirname", "sed", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    failed = checkout.setup("demo", PATH=str(tmp_path), PYTHON="python2")
    assert failed.returncode == 1
    assert "no Python >= 3.11 found (tried python2, python3, " in failed.stderr
    assert "PYTHON=/path/to/python3.11 make demo" in failed.stderr


def test_a_full_disk_is_named() -> None:
    """Catches advice about networks for a full disk."""
    text = "WARNING: Location 'x' is ignored\nCollecting torch\nERROR: Could not install packages due to an OSError: "
    said = install.failure(text + "[Errno 28] No space left on device\n")
    assert "The disk is full" in said and "Errno 28" in said and "WARNING" not in said and "proxy" not in said
