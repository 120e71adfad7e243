"""Runs commands inside a system's folder, in mount and PID namespaces of its own.

The mounts exist only in this namespace, whose first process is this one: when it ends, however it ends, the kernel
kills what still runs and the mounts are gone. No process outside of it ever sees a mount below the cache folder, so
removing that folder cannot reach a folder of this machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

SHARED_MEMORY = "64m"
"""Size of /dev/shm, as in a container by default."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass
class Command:
    """A shell command of one user; its output goes to `log`, every line after the seconds since its start.

    Attributes:
        shell: bash script.
        log: file on this machine.
        uid: user id, also the group id.
        environment: all of its variables.
        prefix: words before the shell, such as taskset.
        started: regular expression of the line with which the command's own work starts, after its installation.
    """

    shell: str
    log: str
    uid: int
    environment: dict[str, str]
    prefix: list[str] = field(default_factory=list)
    started: str = ""


@dataclass
class Outcome:
    """Exit code of a command, its duration, and the part of it before the `started` line; None without that line."""

    code: int
    seconds: float
    installation_s: float | None


@dataclass
class Entry:
    """Commands that start at the same time in one system.

    Attributes:
        root: folder of the system.
        commands: what runs in it.
        read_only: folders and files of this machine that appear in it at the same path, or at the path they map to.
        pip_cache: folder of this machine for pip's downloads.
        cgroups: cgroup.procs files of the cgroups to join.
    """

    root: str
    commands: list[Command]
    read_only: dict[str, str]
    pip_cache: str | None
    cgroups: list[str]


PIP_CACHE = "/var/cache/pip"


def enter(entry: Entry) -> list[Outcome]:
    """Mounts what a running system has, runs the commands, and returns their outcomes in the same order."""
    for procs in entry.cgroups:
        Path(procs).write_text("0")
    root = Path(entry.root)
    _mount_system(root)
    for source, target in entry.read_only.items():
        _bind(Path(source), root / target.lstrip("/"), "ro")
    if entry.pip_cache:
        _bind(Path(entry.pip_cache), root / PIP_CACHE.lstrip("/"), "rw")
    outcomes: list[Outcome | None] = [None] * len(entry.commands)

    def run(index: int) -> None:
        outcomes[index] = _run(root, entry.commands[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(outcomes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcome or Outcome(1, 0.0, None) for outcome in outcomes]


def _mount_system(root: Path) -> None:
    # A mount point of its own, so that /proc/self/mounts lists the root file system, as on every machine.
    _mount("--bind", root, root)
    _mount("-t", "proc", "proc", root / "proc")
    _mount("--bind", "/sys", root / "sys")
    _mount("-o", "remount,bind,ro", root / "sys")
    # The cgroups are file systems of their own below /sys.
    _mount("--rbind", "/sys/fs/cgroup", root / "sys/fs/cgroup")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
    for name in _DEVICES:
        _bind(Path("/dev") / name, root / "dev" / name, "rw")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (root / "dev" / name).symlink_to(target)
    for name in ("pts", "shm"):
        (root / "dev" / name).mkdir()
    _mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620", "devpts", root / "dev/pts")
    (root / "dev/ptmx").symlink_to("pts/ptmx")
    _mount("-t", "tmpfs", "-o", f"mode=1777,size={SHARED_MEMORY}", "tmpfs", root / "dev/shm")


def _bind(source: Path, target: Path, mode: str) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--bind", source, target)
    if mode == "ro":
        _mount("-o", "remount,bind,ro", target)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def _run(root: Path, command: Command) -> Outcome:
    """Runs a command as its user and writes the log."""
    words = ["chroot", f"--userspec={command.uid}:{command.uid}", "--groups=", str(root)]
    words += ["env", "-i", *(f"{name}={value}" for name, value in command.environment.items())]
    words += ["bash", "-c", command.shell]
    started = re.compile(command.started) if command.started else None
    installation_s: float | None = None
    begin = time.monotonic()
    with Path(command.log).open("a", encoding="utf-8") as log:
        log.write(f"$ {command.shell}\n")
        log.flush()
        with subprocess.Popen(
            [*command.prefix, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                text, now = line.decode(errors="replace").rstrip("\n"), time.monotonic() - begin
                if started is not None and installation_s is None and started.search(text):
                    installation_s = now
                log.write(f"{now:7.1f}  {text}\n")
                log.flush()
        seconds = time.monotonic() - begin
        log.write(f"exit {process.returncode} after {seconds:.0f} s\n")
    return Outcome(process.returncode, seconds, installation_s)


def main() -> None:
    """Reads an `Entry` as JSON from the file named first, and writes the outcomes to the file named second."""
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    entry = Entry(**given | {"commands": [Command(**command) for command in given["commands"]]})
    outcomes = enter(entry)
    Path(sys.argv[2]).write_text(json.dumps([asdict(outcome) for outcome in outcomes]), encoding="utf-8")


if __name__ == "__main__":
    main()
