"""The commands of the README and of docs/ are run, in order, as a new user would type them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import LAYERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Run by .ci/run itself: they set up an environment and take minutes.
BY_CI = ("make demo", "make test")


def commands(page: Path) -> list[str]:
    """Lines that start with "$ " in console fences, continuation lines joined."""
    found = []
    for fence in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        joined = fence.replace("\\\n", "")
        found += [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]
    return [command for command in found if not command.startswith(("git ", "cd "))]


def run(command: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, and the dataset that the README makes of it."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "notes").mkdir()
    for number, source in enumerate(sorted((ROOT / "megads").rglob("*.py"))[:40]):
        (folder / "notes" / f"{number}.txt").write_text(source.read_text())
    for command in commands(ROOT / "README.md"):
        if command.startswith(("megads tokenizer", "megads preprocess")):
            run(command, folder)
    return folder


def test_readme_shows_its_two_commands() -> None:
    """Catches a README whose main commands CI does not run."""
    ci = (ROOT / ".ci" / "run").read_text()
    for command in BY_CI:
        assert command in commands(ROOT / "README.md")
        assert re.search(rf"\b{command.split()[1]}\b", ci), f".ci/run does not run {command}"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_of_the_docs_run(page: Path, notes: Path, tmp_path: Path) -> None:
    """Catches a page with the old name of a config key, command or file."""
    shutil.copytree(notes / "notes", tmp_path / "notes")
    if page.name in ("README.md", "first-run.md"):
        for made in (tmp_path / "notes").glob("[dt]*.*"):
            made.unlink()
    for command in commands(page):
        if command not in BY_CI:
            run(command, tmp_path)


def test_every_fault_of_the_table_is_injected() -> None:
    """Catches a fault in the table of docs/reliability.md without a test, and a test mark without a row."""
    _, table = (ROOT / "docs/reliability.md").read_text().split("\n## Faults, and what must hold\n")
    promised = set(re.findall(r"^\| (\d+) \|", table.split("\n## ")[0], re.MULTILINE))
    marked = {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        for numbers in re.findall(r"^@pytest\.mark\.fault\(([\d, ]+)\)", path.read_text(), re.MULTILINE)
        for number in numbers.split(", ")
    }
    assert marked == promised and len(promised) == 25


def anchors(page: Path) -> set[str]:
    """Names that a link to a page can end in: of its headings, as GitHub derives them, and of `<a id=...>`."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    names = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="([^"]+)"', text))


def test_links_lead_to_existing_pages_and_sections() -> None:
    """Catches a link to a page, file or section that was renamed."""
    for page in PAGES:
        for target, section in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not section or found.suffix != ".md" or section in anchors(found), f"{page.name}: {target}#{section}"


def test_every_page_is_listed() -> None:
    """Catches a manual, or a page of docs/notes, that docs/index.md does not name."""
    listed = set(re.findall(r"\]\(([^)#\s]+)\)", (ROOT / "docs" / "index.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} <= listed


def test_named_files_exist() -> None:
    """Catches a page that names a file which was moved; docs/architecture.md omits the folder megads."""
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`(\w+/[\w/.-]+\.(?:py|yaml|sh|sbatch|cpp|cuh?|h|md))`", page.read_text())
    }
    assert not [(page, name) for page, name in named if not any((ROOT / top / name).exists() for top in ("", "megads"))]


def test_pages_that_messages_name_exist() -> None:
    """Catches an error message, a help text or a comment that sends its reader to a page that was renamed."""
    folders = ("megads", "conf", "kernels", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_bytes().decode(errors="replace") for path in files if path.suffix != ".pyc"}
    named = {(path.name, page) for path, text in texts.items() for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert len(named) > 50
    assert [(name, page) for name, page in sorted(named) if not (ROOT / page).exists()] == []


def test_architecture_md_lists_packages_on_their_layers() -> None:
    """Catches a package that docs/architecture.md does not list, or lists on another floor than the test of imports."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("| floor | room |") :].split("\n\n")[0]
    floors: list[list[str]] = []
    for floor, rooms in re.findall(r"^\| (?:(\d+) )?\| (`[^|]+`) \|", table, re.MULTILINE):
        names = [name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", rooms)]
        if floor:
            assert int(floor) == len(LAYERS) - len(floors)
            floors.append(names)
        else:
            floors[-1] += names
    assert [set(names) for names in floors] == [set(rooms) for rooms in LAYERS]
