"""Runs a headless browser: Debian's chromium, or a similar one on the PATH."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"


def browse(page: Path, width: int, *arguments: str, height: int = 1000) -> subprocess.CompletedProcess[str]:
    """Opens a page in a window of the given size with a new profile; skips the test if there is no browser."""
    return browse_address(page.as_uri(), width, *arguments, height=height)


def browse_address(address: str, width: int, *arguments: str, height: int = 1000) -> subprocess.CompletedProcess[str]:
    """Opens the page at an address in the same way."""
    with tempfile.TemporaryDirectory(prefix="megads-browser-", ignore_cleanup_errors=True) as profile:
        return subprocess.run(
            [*_command(profile, width, height), *arguments, address],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip


@contextmanager
def open_browser(address: str, width: int, console: Path, height: int = 1000) -> Iterator[None]:
    """Shows the page at an address until the context ends; its console messages go to a file."""
    with tempfile.TemporaryDirectory(prefix="megads-browser-", ignore_cleanup_errors=True) as profile:
        with console.open("w") as log:
            command = [*_command(profile, width, height), "--enable-logging=stderr", address]
            browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


def _command(profile: str, width: int, height: int) -> list[str]:
    browser = next((found for found in map(shutil.which, NAMES) if found), None)
    if browser is None:
        pytest.skip(f"no browser found ({', '.join(NAMES)}): scripts/install_chromium.sh installs one")
    return [browser, *QUIET, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
