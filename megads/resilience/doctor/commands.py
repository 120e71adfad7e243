"""Asks programs and packages of this machine for a line about themselves."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess


def ask(*command: str, timeout_s: float = 2.0) -> str | None:
    """Returns what a program prints, or None when it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout.strip()


def installed_version(package: str) -> str | None:
    """Returns the version of a package by its metadata, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
