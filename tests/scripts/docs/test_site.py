"""The documentation as a site: built strictly, as a browser shows it, and structured as on a page of the repository."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

pytest.importorskip("material", reason="the extra [docs] is not installed")

import megads
from scripts.docs.site import list_versions
from tests.tools.report.browser import open_browser

REPOSITORY = Path(__file__).parents[3]
OUTER_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
WIDTHS = (390, 800, 1400)
"""A phone, a tablet and a screen, in CSS pixels."""
INSPECT = """<!doctype html><meta charset="utf-8"><iframe style="border: 0; height: 900px"></iframe><script>
const frame = document.querySelector("iframe");
const pause = () => new Promise(done => setTimeout(done, 50));
const open = address => new Promise(done => { frame.onload = done; frame.src = address; });
const until = async test => { while (!test()) await pause(); };
const inside = () => frame.contentDocument;
addEventListener("load", async () => {
  const found = {overflow: [], pictures: [], requests: []};
  for (const page of PAGES) {
    await open(page);
    for (const width of WIDTHS) {
      frame.style.width = `${width}px`;
      const root = inside().documentElement, over = () => root.scrollWidth - root.clientWidth;
      // The theme's script places the sidebars some frames after a change of the width.
      for (let waited = 0; over() > 0 && waited < 40; waited++) await pause();
      if (over() > 0) found.overflow.push([page, width, over()]);
    }
    for (const picture of inside().images) {
      picture.loading = "eager";
      await picture.decode().catch(() => found.pictures.push(picture.src));
    }
    const entries = frame.contentWindow.performance.getEntriesByType("resource");
    found.requests.push(...entries.map(entry => entry.name).filter(name => !name.startsWith(location.origin)));
  }
  await open(PAGES[0]);
  await until(() => inside().querySelector(".md-version__current"));
  found.version = inside().querySelector(".md-version__current").textContent.trim();
  const scheme = () => inside().body.dataset.mdColorScheme;
  found.schemes = [];
  for (let times = 0; times < 3; times++) {
    found.schemes.push([scheme(), frame.contentWindow.getComputedStyle(inside().body).backgroundColor]);
    const shown = [...inside().querySelectorAll("[data-md-component=palette] label")].find(label => !label.hidden);
    shown.click();
    await pause();
  }
  inside().querySelector("label[for=__search]").click();
  const query = inside().querySelector("input.md-search__input");
  query.focus();
  await until(() => !/^Init/.test(inside().querySelector(".md-search-result__meta").textContent));
  query.value = WORD;
  query.dispatchEvent(new frame.contentWindow.Event("input", {bubbles: true}));
  query.dispatchEvent(new frame.contentWindow.KeyboardEvent("keyup", {bubbles: true}));
  await until(() => inside().querySelector(".md-search-result__item a"));
  found.results = [...inside().querySelectorAll(".md-search-result__item a")].map(link => link.href);
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
});
</script>
"""


def build(repository: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "scripts" / "docs" / "site.py"), "--output", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    output = tmp_path_factory.mktemp("a site é")
    built = build(REPOSITORY, output)
    assert built.returncode == 0, built.stdout + built.stderr
    return output


def markdown_pages() -> dict[str, Path]:
    """Sources of the pages by their address in a version of the site."""
    docs = REPOSITORY / "docs"
    pages = {str(page.relative_to(docs).with_suffix("")): page for page in docs.rglob("*.md")}
    pages |= {Path(name).stem: REPOSITORY / name for name in OUTER_PAGES}
    return {"" if name == "index" else f"{name}/": page for name, page in pages.items()}


class Structure(HTMLParser):
    """Counts the elements of an HTML text that structure it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h1", "h2", "h3", "li", "ol", "ul", "table", "tr", "pre", "p", "img", "em", "strong"):
            self.counts[tag] += 1


@pytest.mark.slow
def test_every_page_has_the_structure_that_the_repository_shows(site: Path) -> None:
    """Catches a list, table or block of code that CommonMark shows but Python-Markdown does not, or the reverse."""
    commonmark = MarkdownIt("commonmark").enable("table")
    for address, source in markdown_pages().items():
        page = (site / megads.__version__ / address / "index.html").read_text()
        article = re.search(r'<article class="md-content__inner md-typeset">(.*?)</article>', page, re.DOTALL)
        assert article is not None, address
        assert re.findall(r">[\w/-]+\.md</a>", article[1]) == [], "a link shows a file that the site does not have"
        assert Structure(article[1]).counts == Structure(commonmark.render(source.read_text())).counts, source.name


class Server(ThreadingHTTPServer):
    """Serves a folder on this machine, and keeps what a page posts."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.found: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(SimpleHTTPRequestHandler):
    """Answers without a line of log per request."""

    server: Server

    def do_POST(self) -> None:
        self.server.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_a_browser_shows_every_page_whole_and_the_search_finds_a_word(site: Path, tmp_path: Path) -> None:
    """Catches a page that scrolls sideways, an error in the console, a picture that does not load, a request to another
    server, a scheme that cannot be switched, a selector without the version, and a search that finds nothing."""
    folder = tmp_path / "served"
    shutil.copytree(site, folder)
    pages = [f"{megads.__version__}/{address}" for address in markdown_pages()]
    pages.sort(key=len)
    parts = {"PAGES": pages, "WIDTHS": WIDTHS, "WORD": "muon"}
    head = "".join(f"const {name} = {json.dumps(value)};" for name, value in parts.items())
    (folder / "inspect.html").write_text(INSPECT.replace("<script>", f"<script>{head}", 1))
    console = tmp_path / "console"
    with Server(folder) as server, open_browser(f"http://127.0.0.1:{server.server_port}/inspect.html", 1500, console):
        found = server.found.get(timeout=480)
    messages = [line for line in console.read_text().splitlines() if "CONSOLE" in line]
    assert messages == []
    assert (found["overflow"], found["pictures"], found["requests"]) == ([], [], [])
    assert found["version"] == megads.__version__
    assert {scheme for scheme, _ in found["schemes"]} == {"default", "slate"}
    assert len({color for _, color in found["schemes"]}) == 2
    assert any(link.endswith("/optimizers/?h=muon#muon") for link in found["results"]), found["results"]


@pytest.mark.slow
def test_broken_links_and_unlisted_pages_fail_the_build(tmp_path: Path) -> None:
    """Catches a build that writes dead links, missing pictures, links to missing sections, or a page nobody finds."""
    for name in ("docs/index.md", "docs/plan.md", *OUTER_PAGES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# A page\n")
    shutil.copytree(REPOSITORY / "scripts" / "docs", tmp_path / "scripts" / "docs")
    (tmp_path / "megads").mkdir()
    shutil.copy(REPOSITORY / "megads" / "__init__.py", tmp_path / "megads")
    config, _ = (REPOSITORY / "mkdocs.yml").read_text().split("\nnav:\n")
    listed = ["index.md", "plan.md", *OUTER_PAGES]
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: {json.dumps(listed)}\n")
    broken = ("nowhere.md", "plan.md#nowhere", "notes/nowhere.png", "../scripts/nowhere.sh")
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n" + "\n".join(f"![a]({target})" for target in broken))
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode != 0
    assert [name for name in broken if Path(name).name not in built.stderr] == []
    sound = "[a](plan.md#a-page) [b](../CHANGELOG.md#a-page) [c](../megads/__init__.py)"
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{sound}\n")
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode == 0, built.stderr
    assert list((tmp_path / "out").glob("*/source/megads/__init__.py"))
    listed.remove("plan.md")
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: {json.dumps(listed)}\n")
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode != 0 and "plan.md" in built.stderr


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    """Catches 0.10 below 0.9, a pre-release above its release, and a folder that is no version."""
    for name in ("0.9.1", "0.10.0", "0.10.0rc1", "assets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    assert list_versions(tmp_path) == ["0.10.0", "0.10.0rc1", "0.9.1"]
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [entry["version"] for entry in listed] == ["0.10.0", "0.10.0rc1", "0.9.1"]
    assert 'url=0.10.0/"' in (tmp_path / "index.html").read_text()
