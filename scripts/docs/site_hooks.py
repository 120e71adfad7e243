"""Hooks of mkdocs (mkdocs.yml): files outside of docs/ that its pages link to become part of the site.

CONTRIBUTING.md and CHANGELOG.md become pages; a source file is copied to source/<path>, where links then lead. In the
checkout, and wherever it is displayed, the links work as they are written.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
OUTER_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"(?<=\]\()(?!https?://)([^)#\s]+)")
_FILE_NAME = re.compile(r"\[[\w/-]+\.md\](?=\(([^)#\s]+))")
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of docs/, and the files that pages link to."""
    for name in OUTER_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / name)))
    for page in files.documentation_pages():
        for target in _LINK.findall(page.content_string):
            source = _in_site(page.src_uri, target)
            if source.startswith("source/") and files.get_file_from_path(source) is None:
                path = REPOSITORY / source.removeprefix("source/")
                if path.is_file():
                    files.append(File.generated(config, source, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Rewrites links that lead out of docs/, and those whose text is a file's name, except in code."""
    here, titles = page.file.src_uri, _titles(config.nav)
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # The page itself is one: the column beside it would be empty.
    folder = PurePosixPath(here).parent
    parts = _FENCE.split(markdown)
    for place in range(0, len(parts), 2):
        named = _FILE_NAME.sub(lambda link: f"[{titles.get(_in_site(here, link[1]), link[1])}]", parts[place])
        parts[place] = _LINK.sub(lambda link: os.path.relpath(_in_site(here, link[0]), folder), named)
    return "".join(parts)


def _titles(entries: list[Any]) -> dict[str, str]:
    """Returns the titles of pages in the navigation: who reads the site has no files."""
    found: dict[str, str] = {}
    for entry in entries:
        for title, target in entry.items() if isinstance(entry, dict) else ():
            found |= {target: title} if isinstance(target, str) else _titles(target)
    return found


def _in_site(page: str, target: str) -> str:
    """Returns where the target of a page's link lies in the site, relative to its root."""
    folder = PurePosixPath("." if page in OUTER_PAGES else "docs") / PurePosixPath(page).parent
    path = os.path.normpath(folder / target)
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in OUTER_PAGES else f"source/{path}"
