"""Tests the wheel in an empty environment: what `pip install megads` gives a user without a checkout."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import megads

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | variables
    done = subprocess.run(
        list(map(str, command)), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900,
        check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    (found,) = folder.glob("megads-*.whl")
    return found


def requirements(package: str, extras: frozenset[str], found: dict[tuple[str, frozenset[str]], None]) -> None:
    """Collects a package's dependencies with those of some of its extras, recursively."""
    for text in importlib.metadata.distribution(package).requires or ():
        requirement = Requirement(text)
        wanted = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker and not any(map(requirement.marker.evaluate, wanted)):
            continue
        key = requirement.name, frozenset(requirement.extras)
        if key not in found:
            found[key] = None
            requirements(*key, found)


def make_environment(wheel: Path, folder: Path, *extras: str) -> Path:
    """Makes a virtual environment of the wheel and the dependencies that pip installs for it, linked from this one.

    Args:
        wheel: the wheel of megads.
        folder: where the environment is made.
        extras: extras of megads; none by default.

    Returns:
        Its folder of commands.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    found: dict[tuple[str, frozenset[str]], None] = {}
    requirements("megads", frozenset(extras), found)
    for name in {name for name, _ in found}:
        distribution = importlib.metadata.distribution(name)
        files = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for file in files - {link.name for link in packages.iterdir()}:
            (packages / file).symlink_to(Path(str(distribution.locate_file(file))))
    # pip itself verifies that no dependency is missing: it has no index to take one from.
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-index"]
    run(*pip, f"{wheel}[{','.join(extras)}]" if extras else wheel, folder=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commands of an environment without any extra."""
    return make_environment(wheel, tmp_path_factory.mktemp("a folder é") / "venv")


def write_notes(folder: Path) -> None:
    """Writes half a MB of text."""
    (folder / "notes").mkdir()
    for number, source in enumerate(sorted((ROOT / "megads").rglob("*.py"))[:60]):
        (folder / "notes" / f"{number}.txt").write_text(source.read_text())


@pytest.mark.slow
def test_wheel_carries_its_files(wheel: Path) -> None:
    """Catches a YAML, a kernel, the licence or the typed marker that is missing from the wheel, and files that do not
    belong in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    configs = {f"megads/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert configs <= names
    sources = {f"megads/kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.*")}
    assert sources and sources <= names
    assert "megads/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0\n" in metadata
    assert not [name for name in names if name.startswith(("tests/", "docs/", "scripts/"))]


@pytest.mark.slow
def test_wheel_trains_from_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    """Catches a dependency that only the developers' extras install, configs found only in a checkout, and a run that
    does not start without a home folder."""
    megads = environment / "megads"
    assert "num_layers: 70" in run(megads, "train", "model=bloom_176b", "--cfg", "job", folder=tmp_path)
    write_notes(tmp_path)
    command = (megads, "train", "experiment=first", "data.raw=notes", "train.steps=2", "run.id=first")
    said = run(*command, folder=tmp_path, HOME="/proc/nowhere", XDG_CACHE_HOME="/proc/nowhere")
    assert (tmp_path / "runs/first/checkpoints/step_00000002/manifest.json").exists()
    (line,) = (line for line in said.splitlines() if line.startswith("ops.impl: torch (/proc/nowhere/megads/ops"))
    assert "cannot be written" in line and "set XDG_CACHE_HOME" in line


TRAIN = "megads train experiment=first data.raw=notes train.steps=2 run.id=first"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "command", "made"),
    [
        ("wandb", f"{TRAIN} logging.wandb.mode=offline", "runs/first/wandb/offline-run-*/run-first.wandb"),
        ("tensorboard", f"{TRAIN} logging.tensorboard.enabled=true", "runs/first/tensorboard/events.*"),
        ("mlflow", f"{TRAIN} logging.mlflow.enabled=true logging.flush_s=60", "runs/first/mlflow/*/*/metrics/train/*"),
        ("report", "python -c 'import megads.tools.report.site_page'", ""),
        ("watch", "python -c 'import megads.tools.report.watch.server'", ""),
        ("sweep", "python -c 'import megads.tools.sweep.study'", ""),
        ("evaluate", "python -c 'import megads.tools.evaluate.harness_tasks, megads.tools.evaluate.harness'", ""),
        ("parquet", "python -c 'import megads.tools.prepare.records, pyarrow.parquet'", ""),
        ("datatrove", "python -c 'import megads.tools.datatrove, datatrove.data, datatrove.pipeline.base'", ""),
        ("notebook", "python -c 'import ipykernel.kernelapp, matplotlib.pyplot, transformers; import megads'", ""),
        ("fast", "python -c 'import megads.tools.prepare.tokenizer, gigatoken'", ""),
        ("s3", "python -c 'import fsspec; fsspec.get_filesystem_class(\"s3\")'", ""),
    ],
)
def test_each_extra_works_alone(extra: str, command: str, made: str, wheel: Path, tmp_path: Path) -> None:
    """Catches an extra that only works beside another: trackers imported each other's package and logged nothing."""
    commands = make_environment(wheel, tmp_path / "venv", extra)
    write_notes(tmp_path)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    said = run("bash", "-c", command, folder=tmp_path, PATH=path)
    assert "tracker failed" not in said
    assert not made or list(tmp_path.glob(made)), said


@pytest.mark.slow
def test_wheel_has_the_reference_runs_and_the_batch_scripts(environment: Path, tmp_path: Path) -> None:
    """Catches an experiment whose text only a checkout has, a reference that is not found without one, and a page that
    sends a user without a checkout to files which are not there."""
    megads = environment / "megads"
    short = ("experiment=reference_bloom", "train.steps=2", "run.id=mine", "ops.impl=torch")
    run(megads, "train", *short, folder=tmp_path)
    assert "within the tolerance" in run(megads, "compare", "run=mine", "reference=bloom", folder=tmp_path)
    where = run(environment / "python", "-c", "import megads; print(megads.__path__[0])", folder=tmp_path).strip()
    for path in ("slurm/train.sbatch", "slurm/submit.sh", "slurm/evaluate.sbatch", "platforms/volcano.yaml"):
        assert (Path(where) / "scripts" / path).is_file()


@pytest.mark.slow
def test_wheel_builds_its_kernels_at_first_use(environment: Path, tmp_path: Path) -> None:
    """Catches kernel sources that are not found in an installed package."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("there is no C++ compiler")
    write_notes(tmp_path)
    command = (environment / "megads", "train", "experiment=first", "data.raw=notes", "train.steps=2", "run.id=first")
    said = run(*command, folder=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert f"into {tmp_path}/cache/megads/ops" in said, said
    assert list(tmp_path.glob("cache/megads/ops/*/libmegads_ops.so"))


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """Catches a tarball from which the wheel cannot be built, or that lacks what the README's commands need."""
    hook = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.27,<2", folder=tmp_path)
    run(python, "-c", hook, tmp_path, folder=ROOT)
    (source,) = tmp_path.glob("megads-*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = "LICENSE CITATION.cff Makefile Dockerfile .dockerignore .yamllint constraints.txt scripts/setup.sh .ci/run"
    wanted += " mkdocs.yml .gitlab-ci.yml .github/workflows/ci.yml"
    assert set(wanted.split()) <= names
    assert not [name for name in names if name.startswith(("runs/", ".venv/", ".git/"))]
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source, folder=tmp_path)
    (made,) = tmp_path.glob("megads-*.whl")
    with zipfile.ZipFile(made) as first, zipfile.ZipFile(wheel) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_licence_and_citation_agree() -> None:
    """Catches a citation of another version, and a licence that is not the one that the package names."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == megads.__version__
    assert citation["license"] == project["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in licence and "END OF TERMS AND CONDITIONS" in licence
    assert "[yyyy]" not in licence and "[name of copyright owner]" not in licence


def test_pinned_versions_accept_the_oldest_python() -> None:
    """Catches a pinned version that only later patch releases of Python can install: Debian 12 has 3.11.2."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    refusing, seen = [], 0
    for name in pinned:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            accepted = importlib.metadata.metadata(name).get("Requires-Python") or ""
            seen += 1
            refusing += [] if SpecifierSet(accepted).contains(f"{oldest}.0") else [f"{name}: {accepted}"]
    assert refusing == [] and seen > 20


def test_the_dockerfile_uses_existing_files_and_pinned_versions() -> None:
    """Catches a COPY of a file that does not exist or is ignored, an installation without the pinned versions, and a
    container that runs as root. An image is not built here: that needs a Docker daemon."""
    text = re.sub(r"\\\n(?:\s*#.*\n)*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"ARG", "FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} <= known
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert ignore[0] == "*" and all((ROOT / name).exists() for name in allowed)
    for line in lines:
        words = shlex.split(line)
        if words[0] == "COPY" and not words[1].startswith("--from"):
            copied = words[1:-1]
            assert all(name == "." or (name in allowed and (ROOT / name).exists()) for name in copied), line
        for command in re.findall(r"pip install[^&;]*", line) if words[0] == "RUN" else ():
            assert "--constraint /opt/megads/constraints.txt" in command or "--no-deps" in command, command
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], "megads"}
    assert needed | set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]) <= allowed
    users = [line for line in lines if fnmatch(line, "USER *")]
    assert users and users[-1].split()[1] != "0" and lines.index(users[-1]) < lines.index('ENTRYPOINT ["megads"]')
    (printed,) = re.findall(r"python -c '(.*?)' +/opt/megads/pyproject.toml", text)
    listed = run(sys.executable, "-c", printed, ROOT / "pyproject.toml", "report", folder=ROOT).split("\n")
    assert "torch>=2.9" in listed and "matplotlib>=3.9" in listed
