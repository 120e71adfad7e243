"""Python commands with CUDA builds of torch: which wheels are installed, once, and the message if there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: str = "") -> None:
    """Writes a pure Python wheel of these files."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    own = {f"{info}/METADATA": metadata, f"{info}/WHEEL": tags, f"{info}/RECORD": ""}
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | own).items():
            wheel.writestr(path, text)


def cuda_torch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with its own cache; pip sees a folder of wheels and no network."""
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    environment = os.environ | pip | {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "scripts.cuda_torch", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_cuda_build_is_installed_once(tmp_path: Path) -> None:
    """Catches a CPU build of the same version that is preferred, libraries that torch does not find, a second download,
    a failing command that passes, and a missing wheel without its own exit status and reason."""
    wheels = tmp_path / "wheels"
    cuda, cpu = ({"torch/__init__.py": f"class version: cuda = {of!r}"} for of in ("13.0", None))
    needs = 'Requires-Dist: nvidia-one==1.0; platform_system == "Linux"\nRequires-Dist: triton==3.0\n'
    write_wheel(wheels, "torch", "9.9.0", cuda, needs)
    write_wheel(wheels, "torch", "9.9.0+cpu", cpu)
    write_wheel(wheels, "nvidia_one", "1.0", {"nvidia/one/__init__.py": ""})
    show = "import torch, nvidia.one; print(torch.version.cuda, torch.__file__)"
    found = cuda_torch(tmp_path, "--torch", "9.9.0", "--", "-c", show)
    assert found.returncode == 0, found.stderr
    assert f"13.0 {tmp_path}/cache/megads/cuda_torch/" in found.stdout
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert cuda_torch(tmp_path, "--torch", "9.9.0", "--", "-c", "raise SystemExit(5)").returncode == 5
    missing = cuda_torch(tmp_path, "--torch", "9.8.0", "--", "-c", "raise SystemExit(5)")
    assert missing.returncode == 69
    assert "NOT RUN: 'pip install torch===9.8.0' failed: ERROR: Could not find a version" in missing.stderr
