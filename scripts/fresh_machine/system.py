"""Builds the Debian systems, and finds how this machine reaches the package registries."""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

SUITES = {"debian12": "bookworm", "debian13": "trixie"}
"""Name of a system, and Debian's name of the release: Python 3.11 and 3.13."""

USERS = {"ada": 1000, "ben": 1001}
"""Ordinary users of every system, and their ids."""

HOMES = "/home"

UNKNOWN_USER = 12345
"""An id without a line in /etc/passwd, as of `docker run --user`."""

_PACKAGES = ("ca-certificates", "make", "python3", "python3-venv")
_MARK = ".megads-fresh-machine"

_PIP_SETTINGS = {
    *("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "client-cert", "constraint"),
    *("timeout", "default-timeout", "retries", "proxy"),
}
_VARIABLES = re.compile(
    r"(https?|ftp|all|no)_proxy|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE", re.IGNORECASE
)


class FreshMachineError(Exception):
    """The cases cannot be run; the message says why and what to do."""


@dataclass
class Registries:
    """How this machine reaches the package registries.

    Attributes:
        pip_conf: lines of a pip.conf.
        variables: environment variables of pip, of proxies and of certificates.
        folders: folders and files of this machine that these name.
    """

    pip_conf: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)


def registries(environment: dict[str, str], pip_list: str) -> Registries:
    """Returns the settings that a command in a fresh system needs.

    Args:
        environment: this process's environment variables.
        pip_list: output of `pip config list`; lines that start with ":env:" are the environment's.
    """
    found = Registries()
    sections: dict[str, list[str]] = {}
    named: list[str] = []
    for line in pip_list.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("", ":env:") or key not in _PIP_SETTINGS:
            continue
        words = str(ast.literal_eval(value)).split()
        sections.setdefault(section, []).append(f"{key} =" + "".join(f"\n    {word}" for word in words))
        named += words
    found.pip_conf = "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())
    for name, value in environment.items():
        setting = name.removeprefix("PIP_").lower().replace("_", "-")
        if _VARIABLES.fullmatch(name) or (name.startswith("PIP_") and setting in _PIP_SETTINGS):
            found.variables[name] = value
            named += value.split()
    for word in named:
        path = _local_path(word)
        if path is not None and path.exists() and not any(path.is_relative_to(known) for known in found.folders):
            found.folders = [known for known in found.folders if not known.is_relative_to(path)] + [path]
    return found


def _local_path(word: str) -> Path | None:
    """Returns the folder or file that a setting names, and for an index the folder that also holds its files."""
    if not word.startswith(("/", "file://")):
        return None
    path = Path(unquote(urlsplit(word).path))
    # An index of a folder per project links to files that often lie beside it.
    page = next((page for page in sorted(path.glob("*/index.html"))[:1]), None)
    link = re.search(r'href="([^"#]+)', page.read_text(encoding="utf-8", errors="replace")) if page else None
    if page is None or link is None or urlsplit(link[1]).scheme:
        return path
    target = Path(os.path.normpath(page.parent / unquote(link[1])))
    common = Path(os.path.commonpath([path, target]))
    return common if len(common.parts) > 2 else path


def this_machines_registries() -> Registries:
    """Returns `registries` of this process."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    return registries(dict(os.environ), done.stdout if done.returncode == 0 else "")


def debian_mirror() -> str:
    """Returns the address of the Debian mirror that apt uses here.

    Raises:
        FreshMachineError: there is none in apt's lists.
    """
    template = "$(ORIGIN) $(CODENAME) $(REPO_URI)"
    command = ["apt-get", "indextargets", "--format", template, "Created-By: Packages"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        origin, _, rest = line.partition(" ")
        codename, _, uri = rest.partition(" ")
        if origin == "Debian" and "-" not in codename and uri:
            return uri
    raise FreshMachineError(
        "apt's lists name no Debian mirror: run apt-get update on a Debian machine, or name a mirror with --mirror"
    )


def build(cache: Path, name: str, compiler: bool, mirror: str) -> Path:
    """Returns the folder of a system, built with debootstrap unless an earlier call completed it.

    Raises:
        FreshMachineError: debootstrap failed.
    """
    folder = cache / "systems" / (name + ("-compiler" if compiler else ""))
    if (folder / _MARK).exists():
        return folder
    if folder.exists():
        remove(cache, folder)
    folder.parent.mkdir(exist_ok=True)
    debs = cache / "debs" / name
    debs.mkdir(parents=True, exist_ok=True)
    packages = ",".join([*_PACKAGES, *(["g++"] if compiler else [])])
    log = folder.with_suffix(".log")
    print(f"building {folder.name} with debootstrap: {packages} (log: {log})", flush=True)
    # Debootstrap mounts proc and sys below the folder: in a namespace of its own, where they end with it.
    command = [*NAMESPACES, "debootstrap", "--variant=minbase", f"--include={packages}", f"--cache-dir={debs}"]
    with log.open("wb") as out:
        done = subprocess.run(
            [*command, SUITES[name], str(folder), mirror], stdout=out, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        tail = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise FreshMachineError(f"debootstrap {SUITES[name]} failed, see {log}: {tail}")
    for user, uid in USERS.items():
        for file, line in (
            ("passwd", f"{user}:x:{uid}:{uid}::{HOMES}/{user}:/bin/bash"),
            ("group", f"{user}:x:{uid}:"),
        ):
            with (folder / "etc" / file).open("a", encoding="utf-8") as out_file:
                out_file.write(line + "\n")
        home = folder / HOMES.lstrip("/") / user
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
    (folder / _MARK).touch()
    return folder


NAMESPACES = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--")
"""Words before a command that give it mount and PID namespaces, which end with it and with this process."""


def copy_system(cache: Path, base: Path, folder: Path, found: Registries) -> None:
    """Makes a case's own system: a copy of `base` that reaches the package registries."""
    if folder.exists():
        remove(cache, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(folder)], check=True)
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", folder / "etc" / name)
    (folder / "etc/pip.conf").write_text(found.pip_conf, encoding="utf-8")


def open_cache(folder: Path) -> IO[str]:
    """Creates the cache folder, which only root can read: settings of pip may hold a password.

    Returns:
        The mark of the folder, locked until it is closed: one call at a time builds systems and runs cases.

    Raises:
        FreshMachineError: the folder holds something else, or another call uses it.
    """
    mark = folder / _MARK
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise FreshMachineError(f"{folder} is not empty and was not made by this script: name another with --cache")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = mark.open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise FreshMachineError(
            f"another call uses {folder}: wait for it, or name another folder with --cache"
        ) from None
    return lock


def remove(cache: Path, folder: Path) -> None:
    """Removes a folder in the cache, and never what is mounted there.

    Raises:
        FreshMachineError: the folder is not in a cache of this script, or something is mounted below it.
    """
    whole = folder.resolve()
    if not (cache / _MARK).exists() or not whole.is_relative_to(cache.resolve()):
        raise FreshMachineError(f"{folder} is not in a cache folder of this script: not removed")
    mounts = [point for point in mount_points() if point.is_relative_to(whole)]
    if mounts:
        raise FreshMachineError(f"{folder} is not removed: something is mounted at {mounts[0]}; unmount it first")
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(whole)], check=True)


def mount_points() -> list[Path]:
    """Returns where file systems are mounted, as this process sees them."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return [Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])) for line in lines]
