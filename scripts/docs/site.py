"""Builds the documentation as a site: `make site`, or python scripts/docs/site.py [--output build/site].

The pages of this checkout go to <output>/<version of megads>/. Folders of other versions that lie there stay, so a site
of several versions is built by checking out each tag in turn. versions.json lists them for the selector in the header,
and index.html leads to the newest one. A broken link, a missing picture or section, and a page without a place in the
navigation fail the build.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

REPOSITORY = Path(__file__).parents[2]
_VERSION = re.compile(r"\d+(\.\d+)*\w*")
_REDIRECT = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>megads</title>
<meta http-equiv="refresh" content="0; url={newest}/">
<a href="{newest}/">megads {newest}</a></html>
"""


def main() -> int:
    """Builds the site and returns the exit code."""
    parser = argparse.ArgumentParser(description="builds the documentation as a site")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "site")
    output: Path = parser.parse_args().output.resolve()
    if importlib.util.find_spec("material") is None:
        print("site: mkdocs-material is not installed: pip install 'megads[docs]', or make setup", file=sys.stderr)
        return 1
    version = version_of(REPOSITORY)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(output / version)]
    # Otherwise the theme announces other products at every build.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    if built.returncode != 0:
        return built.returncode
    versions = list_versions(output)
    print(f"site: {output}, versions {', '.join(versions)}; python -m http.server --directory '{output}' serves it")
    return 0


def version_of(repository: Path) -> str:
    """Returns the version that megads/__init__.py declares, without importing it."""
    declared = re.search(r'^__version__ = "(.+)"$', (repository / "megads" / "__init__.py").read_text(), re.MULTILINE)
    assert declared is not None
    return declared[1]


def list_versions(output: Path) -> list[str]:
    """Writes versions.json and index.html for the versions in a folder; returns these, newest first."""
    found = [page.parent.name for page in output.glob("*/index.html") if _VERSION.fullmatch(page.parent.name)]
    versions = sorted(found, key=Version, reverse=True)
    entries = [{"version": version, "title": version, "aliases": []} for version in versions]
    (output / "versions.json").write_text(json.dumps(entries, indent=1) + "\n")
    (output / "index.html").write_text(_REDIRECT.format(newest=versions[0]))
    return versions


if __name__ == "__main__":
    sys.exit(main())
