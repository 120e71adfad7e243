"""Tests the wheel in an empty environment: what `pip install megads` gives a user without a checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    (found,) = folder.glob("megads-*.whl")
    return found


def test_wheel_carries_its_configs(wheel: Path) -> None:
    """Catches a YAML or a kernel that is missing from the wheel, and files that do not belong in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    configs = {f"megads/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert configs <= names
    sources = {f"megads/kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.*")}
    assert sources and sources <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "scripts/"))]


def test_wheel_trains_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Catches a dependency that only the developers' extras install, and configs found only in a checkout."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    pip = (tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    run(*pip, "torch", folder=tmp_path)
    run(*pip, wheel, folder=tmp_path)
    megads = tmp_path / "venv/bin/megads"
    assert "num_layers: 70" in run(megads, "train", "model=bloom_176b", "--cfg", "job", folder=tmp_path)
    (tmp_path / "notes").mkdir()
    for number, source in enumerate(sorted((ROOT / "megads").rglob("*.py"))[:40]):
        (tmp_path / "notes" / f"{number}.txt").write_text(source.read_text())
    run(megads, "train", "data.raw=notes", "train.steps=2", "run.id=first", folder=tmp_path)
    assert (tmp_path / "runs/first/checkpoints/step_00000002/manifest.json").exists()
