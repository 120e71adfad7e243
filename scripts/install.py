#!/usr/bin/env python3
"""Installs megads and its pinned dependencies into a virtual environment; run by scripts/setup.sh, once per level.

The levels are demo (training and its report), dev (also tests and benchmarks) and mutation. A level includes those
before it. pip's output goes to setup.log in the environment. Runs before anything is installed, therefore it uses the
standard library only.

Environment variables: VENV, the environment's folder; TORCH_CPU_INDEX, the package index of torch's CPU builds, used on
machines without an NVIDIA GPU where pip's own indexes have only a CUDA build; empty if it must not be asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

LEVELS = {"demo": "report", "dev": "report,dev", "mutation": "report,dev,mutation"}
"""The extras of pyproject.toml that each level installs."""
NEEDED_GB = {"demo": 1.1, "dev": 2.0, "mutation": 2.0}
"""Disk space of a complete environment with the CPU build of torch, measured with du."""
CUDA_GB = 5.0
"""What a CUDA build of torch 2.13 needs beyond the CPU build."""
MINUTES = {"demo": "1 to 3 minutes", "dev": "2 to 6 minutes", "mutation": "2 to 6 minutes"}
COMMANDS = {"demo": "make demo", "dev": "make test", "mutation": "make mutation"}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROGRESS_S = 15.0
"""Seconds between two lines of progress."""
RECORD = ".megads-venv"
"""Names the folder and the Python that the environment was made for: its scripts contain both."""
UNFINISHED = ".megads-unfinished"
"""Exists while pip runs."""
IMPORTS = "import torch, deepspeed, hydra, numpy, rich, safetensors, tokenizers, xxhash, zstandard, megads.train.loop"


class SetupError(Exception):
    """The environment cannot be made; the message names cause and remedy."""


def say(text: str) -> None:
    """Prints a line at once."""
    print(f"setup: {text}", flush=True)


def state(venv: Path) -> dict[str, str]:
    """Returns what an installation depends on: requirements, checkout, environment, Python version."""
    wanted = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    parts = [wanted["build-system"], wanted["project"], wanted["tool"].get("hatch")]
    requirements = json.dumps(parts, sort_keys=True) + Path("constraints.txt").read_text(encoding="utf-8")
    return {
        "requirements": hashlib.sha256(requirements.encode()).hexdigest(),
        "checkout": os.path.realpath("."),
        **made_for(venv),
    }


def made_for(venv: Path) -> dict[str, str]:
    """Returns what an environment itself depends on: its folder and Python version."""
    return {"folder": os.path.realpath(venv), "python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def stamp(venv: Path, level: str) -> Path:
    """Returns the file that holds the state for which a level was installed."""
    return venv / f".megads-setup-{level}"


def levels_from(level: str) -> list[str]:
    """Returns a level and those that include it."""
    names = list(LEVELS)
    return names[names.index(level) :]


def is_installed(venv: Path, level: str) -> bool:
    """Whether a level, or one that includes it, was installed for the present state."""
    wanted = json.dumps(state(venv))
    return python_in(venv).exists() and any(
        path.exists() and path.read_text(encoding="utf-8") == wanted
        for path in (stamp(venv, name) for name in levels_from(level))
    )


def python_in(venv: Path) -> Path:
    """Returns the environment's interpreter."""
    return venv / "bin" / "python"


@contextlib.contextmanager
def alone(venv: Path) -> Iterator[None]:
    """Waits for another set-up of the same environment.

    Raises:
        SetupError: the environment's folder cannot be written.
    """
    try:
        venv.mkdir(parents=True, exist_ok=True)
        lock = (venv / ".megads-lock").open("w")
    except OSError as error:
        raise SetupError(f"{venv} cannot be written ({error}). Name another folder: VENV=/path/to/venv") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up of {venv}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(venv: Path, level: str) -> None:
    """Ensures that the folder is a virtual environment of this Python with pip; makes a broken one again.

    Raises:
        SetupError: it cannot be made, or a folder that is not ours would have to be emptied.
    """
    record = venv / RECORD
    ours = record.exists()
    files = [path for path in venv.iterdir() if path.name != ".megads-lock"]
    broken = ""
    if ours and (was := json.loads(record.read_text(encoding="utf-8") or "{}")) != made_for(venv):
        broken = f"it was made in {was.get('folder')} with Python {was.get('python')}"
    elif files and not runs_this_python(venv):
        broken = f"its Python does not run, or is not {made_for(venv)['python']}"
    if broken:
        if not ours and not (venv / "pyvenv.cfg").exists():
            raise SetupError(f"{venv} is no virtual environment. Name another folder: VENV=/path/to/venv")
        if not ours:
            raise SetupError(f"{venv} cannot be used: {broken}. Remove it (rm -r '{venv}') and run the command again")
        say(f"making {shown(venv)} again: {broken}")
        for path in files:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if not python_in(venv).exists() or not has_pip(venv):
        check_space(venv, level)
        create(venv)
    record.write_text(json.dumps(made_for(venv)), encoding="utf-8")


def runs_this_python(venv: Path) -> bool:
    """Whether the environment's interpreter runs and has this interpreter's version."""
    show = "import sys; print(f'{sys.version_info.major}.{sys.version_info.minor}')"
    try:
        done = subprocess.run([python_in(venv), "-I", "-S", "-c", show], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == made_for(venv)["python"]


def has_pip(venv: Path) -> bool:
    """Whether the environment's pip starts; that of an interrupted `python -m venv` does not."""
    command = [str(python_in(venv)), "-I", "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True, check=False, env=pip_environment()).returncode == 0


def create(venv: Path) -> None:
    """Makes the virtual environment, or completes one without pip.

    Raises:
        SetupError: Python lacks its venv module, or it fails.
    """
    # A folder that is removed when the creation ends in the middle needs the record: it tells that it is ours.
    (venv / RECORD).write_text(json.dumps(made_for(venv)), encoding="utf-8")
    base = getattr(sys, "_base_executable", None) or sys.executable
    done = subprocess.run([base, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = (done.stdout + done.stderr).strip()
    if "ensurepip" in said or "No module named venv" in said:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(
            f"{base} has no venv module, which makes virtual environments. Install it (Debian and Ubuntu, as root: "
            f"apt install {name}) or name another Python: PYTHON=/path/to/python make {level_name()}"
        )
    raise SetupError(f"'{base} -m venv {venv}' failed:\n{last_lines(said)}")


def level_name() -> str:
    """Returns the target that the user called, for messages."""
    return "demo" if sys.argv[1:] == ["demo"] else "test"


def check_space(venv: Path, level: str) -> None:
    """Raises SetupError if the disk has no room for the environment."""
    free_gb = shutil.disk_usage(venv).free / 1e9
    if free_gb < NEEDED_GB[level]:
        raise SetupError(
            f"{venv} needs about {NEEDED_GB[level]:.1f} GB, and {free_gb:.1f} GB are free there. Make room, or name a "
            "folder on another disk: VENV=/path/to/venv"
        )


def pip_environment() -> dict[str, str]:
    """Returns the environment variables of pip: the user's, less those that lead it out of the environment."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_QUIET")
    ours = {
        # megads uses none of DeepSpeed's kernels: do not compile them.
        "DS_BUILD_OPS": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_USER": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return {name: value for name, value in os.environ.items() if name not in left_out} | ours


def pip(venv: Path, *arguments: str) -> list[str]:
    """Returns a command line of the environment's pip, with the pinned versions."""
    return [str(python_in(venv)), "-m", "pip", *arguments, "--constraint", "constraints.txt"]


def choose_torch(venv: Path) -> tuple[str, str]:
    """Chooses the build of torch.

    Returns:
        The requirement for pip, and a description; the CPU build wherever there is no NVIDIA GPU and an index has it.
    """
    if next(venv.glob("lib/python3*/site-packages/torch-*.dist-info/METADATA"), None):
        return "torch", "torch is there already"
    if has_nvidia_gpu():
        return "torch", "torch in the build that your package index has for this machine's GPU"
    found = resolve_torch(venv)
    if found is None:  # pip itself says why
        return "torch", "torch"
    if not is_cuda(found):
        return "torch", "torch's CPU build"
    index = os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX)
    cpu = resolve_torch(venv, "--index-url", index, "--retries", "0", "--timeout", "10") if index else None
    if cpu is not None and not is_cuda(cpu):
        return f"torch @ {cpu['download_info']['url']}", f"torch's CPU build, from {index}"
    return "torch", (
        f"torch's CUDA build although there is no NVIDIA GPU, {CUDA_GB:.0f} GB more: no index reached has a CPU build "
        "for this Python"
    )


def has_nvidia_gpu() -> bool:
    """Whether there is an NVIDIA GPU: its driver's files are there."""
    return any(Path(name).exists() for name in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


def resolve_torch(venv: Path, *options: str) -> Any:
    """Returns the entry of pip's installation report for torch: the wheel that pip would take, None without one."""
    report = venv / "torch.json"
    report.unlink(missing_ok=True)
    dry = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=torch", "--report", str(report)]
    command = [*pip(venv, *dry, *options), "torch"]
    done = subprocess.run(command, capture_output=True, check=False, env=pip_environment())
    if done.returncode:
        return None
    return json.loads(report.read_text(encoding="utf-8"))["install"][0]


def is_cuda(wheel: Any) -> bool:
    """Whether a wheel of torch requires CUDA's libraries."""
    return any(re.match(r"(nvidia|cuda)-", text) for text in wheel["metadata"].get("requires_dist", ()))


def install(venv: Path, level: str) -> None:
    """Runs pip, with a line of progress now and then.

    Raises:
        SetupError: pip failed; contains its last relevant lines.
    """
    log = venv / "setup.log"
    unfinished = venv / UNFINISHED
    if unfinished.exists():
        remove_incomplete(venv)
    torch, description = choose_torch(venv)
    say(
        f"installing what '{COMMANDS[level]}' needs into {shown(venv)}, {NEEDED_GB[level]:.1f} GB, with {description}; "
        f"{MINUTES[level]}; pip writes to {shown(log)}"
    )
    unfinished.touch()
    # Bytecode of 25,000 files would take half of the time: Python compiles the few thousand that are used.
    command = [*pip(venv, "install", "--no-compile", "--use-pep517"), torch, "--editable", f".[{LEVELS[level]}]"]
    with log.open("w", encoding="utf-8") as out:
        code = watch(command, out.fileno(), log)
    if code:
        raise SetupError(f"pip failed with exit code {code}: {shown(log)}\n{failure(log.read_text(errors='replace'))}")
    unfinished.unlink()


def shown(path: Path) -> str:
    """Returns a path as the user knows it: relative to the checkout if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def watch(command: list[str], out: int, log: Path) -> int:
    """Runs a command until it ends, says how far it is, and returns its exit code."""
    started = said = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=pip_environment()) as process:
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - said >= PROGRESS_S:
                    said = time.monotonic()
                    say(f"{said - started:4.0f} s: {progress(log.read_text(errors='replace'))}")
        except BaseException:
            process.terminate()
            raise
    return process.returncode


def progress(text: str) -> str:
    """Returns what pip does, from its output."""
    doing = [
        line.strip() for line in text.splitlines() if re.match(r"\s*(Collect|Download|Build|Prepar|Install)", line)
    ]
    last = doing[-1] if doing else "pip starts"
    if last.startswith("Installing collected packages"):
        return f"unpacking {last.count(',') + 1} packages"
    return last[:1].lower() + re.sub(r" \(from .*", "", last[1:])[:90]


def failure(text: str) -> str:
    """Returns the lines of pip's output that say why it failed, and a remedy."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("WARNING", "  WARNING"))]
    first = next(
        (at for at, line in enumerate(lines) if re.search(r"\b(ERROR|[Ee]rror:)", line)), max(0, len(lines) - 10)
    )
    if "No space left" in text or "Disk quota exceeded" in text:
        remedy = "The disk is full. Make room there, or set TMPDIR, PIP_CACHE_DIR or VENV to folders on another disk"
    elif re.search(r"No matching distribution|conflicting dependencies|[Cc]onnection|ProxyError|SSLError", text):
        remedy = (
            "Without network, point pip at a mirror or a folder of wheels (PIP_INDEX_URL, PIP_FIND_LINKS); behind a "
            "proxy, set HTTPS_PROXY; see docs/install.md"
        )
    else:
        remedy = "See docs/install.md"
    return (
        last_lines("\n".join(lines[first : first + 10]), 10) + f"\n{remedy}; then run the command again, it continues"
    )


def last_lines(text: str, count: int = 6) -> str:
    """Returns the last lines, indented and shortened."""
    return "\n".join(f"    {line.strip()[:300]}" for line in text.splitlines()[-count:])


def remove_incomplete(venv: Path) -> None:
    """Removes the metadata of packages that an interrupted pip has not finished, so that pip installs them again."""
    say("the last set-up did not finish: it is continued")
    for info in venv.glob("lib/python3*/site-packages/*.dist-info"):
        if not (info / "RECORD").exists():
            shutil.rmtree(info)


def verify(venv: Path) -> None:
    """Imports what training imports, which also writes its bytecode, and builds the kernels.

    Raises:
        SetupError: an import or the kernels' build fails.
    """
    variables = {name: value for name, value in pip_environment().items() if name != "PYTHONDONTWRITEBYTECODE"}
    python = str(python_in(venv))
    done = subprocess.run([python, "-c", IMPORTS], env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(
            f"the installed packages cannot be imported. Remove {shown(venv)} and run the command again:\n"
            + last_lines(done.stderr)
        )
    if subprocess.run([python, "-m", "megads.ops.build"], env=variables, check=False).returncode:
        raise SetupError("the kernels' build failed, see above. It is a bug: please report it")


def stop(_number: int, _frame: FrameType | None) -> None:
    """Ends on SIGTERM as on Ctrl-C, so that pip ends too."""
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """The command line: the level, dev without one."""
    level = arguments[0] if arguments else "dev"
    if level not in LEVELS or len(arguments) > 1:
        print(f"usage: scripts/setup.sh [{'|'.join(LEVELS)}]", file=sys.stderr)
        return 2
    venv = Path(os.environ.get("VENV") or ".venv").absolute()
    started = time.monotonic()
    signal.signal(signal.SIGTERM, stop)
    try:
        if is_installed(venv, level):
            return 0
        with alone(venv):
            if is_installed(venv, level):
                return 0
            prepare(venv, level)
            install(venv, level)
            verify(venv)
            for name in list(LEVELS)[: list(LEVELS).index(level) + 1]:
                stamp(venv, name).write_text(json.dumps(state(venv)), encoding="utf-8")
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the same command continues", file=sys.stderr)
        return 130
    say(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
