"""The report page as rendered by a browser."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra [report] is not installed")

from PIL import Image

from megads.tools.report.config import ReportConfig
from megads.tools.report.html_page import WrittenReport
from megads.tools.report.page import write_report
from tests.tools.report.browser import DARK, browse
from tests.tools.report.written_runs import write_eventful_run

# Runs in the page: measures what is shown, what overflows, and what is fetched.
INSPECT = """
addEventListener("load", () => {
  const shown = [...document.querySelectorAll("figure svg")].filter(svg => svg.getClientRects().length);
  const found = JSON.stringify({
    charts: shown.map(svg => ({
      label: svg.getAttribute("aria-label"),
      width: svg.getBoundingClientRect().width,
      height: svg.getBoundingClientRect().height,
      drawn: [...svg.querySelectorAll("path")].filter(path => path.getTotalLength() > 0).length,
      smallest_text_px: Math.min(...[...svg.querySelectorAll("text")].map(text =>
        parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a)),
      clipped: [...svg.querySelectorAll("text")].filter(text => {
        const inner = text.getBoundingClientRect(), outer = svg.getBoundingClientRect();
        return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1;
      }).map(text => text.textContent),
    })),
    pictures: [...document.images].map(image => image.naturalWidth),
    overflow_px: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    details: [...document.querySelectorAll("td.detail")].map(cell => cell.getBoundingClientRect().width),
    tables: [...document.querySelectorAll("table")].map(table => table.parentElement.getBoundingClientRect().right),
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
    scripts: document.scripts.length,
    width: innerWidth,
  });
  document.body.dataset.found = found;
  parent.postMessage(found, "*");
});
"""


# A window is never narrower than this; a frame can be, and its page uses the frame's width.
SMALLEST_WINDOW = 500
PHONE = """<!doctype html><body><script>
addEventListener("message", message => document.body.dataset.found = message.data);
</script><iframe src="{page}" style="border: 0; width: {width}px; height: 900px"></iframe></body>
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> WrittenReport:
    run_dir = tmp_path_factory.mktemp("run")
    write_eventful_run(run_dir)
    return write_report(ReportConfig(run=str(run_dir)))


def inspect(report: WrittenReport, width: int) -> dict[str, Any]:
    """What INSPECT measures in a copy of the page with the PNGs, whose Content-Security-Policy allows both."""
    page = report.page.read_text()
    loosened = re.sub(
        r'(?<=Security-Policy" content=")[^"]*', "script-src 'unsafe-inline'; style-src 'unsafe-inline'", page
    )
    pngs = "".join(
        f'<img src="{path.relative_to(report.page.parent)}" style="display:none">' for path in report.pictures
    )
    copy = report.page.with_name("inspected.html")
    copy.write_text(loosened.replace("</main>", f"</main>{pngs}<script>{INSPECT}</script>"))
    if width < SMALLEST_WINDOW:
        frame = copy.with_name("phone.html")
        frame.write_text(PHONE.format(page=copy.name, width=width))
        copy = frame
    dom = browse(copy, width, "--dump-dom", "--virtual-time-budget=10000").stdout
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None, dom[-500:]
    return dict(json.loads(html.unescape(found[1])))


@pytest.mark.parametrize("width", [1280, 600])
def test_everything_is_shown_and_fits(report: WrittenReport, width: int) -> None:
    """Catches an empty chart, text too small to read in a narrow window, a page that scrolls sideways, and unescaped
    markup from a message."""
    found = inspect(report, width)
    assert len(found["charts"]) == 8
    for chart in found["charts"]:
        assert chart["width"] > 400 and chart["height"] > 180 and chart["drawn"] > 5, chart
        assert chart["smallest_text_px"] > 10, chart
        assert chart["clipped"] == [], chart
    assert found["charts"][0]["width"] > 0.85 * width, "the loss takes the width of the page"
    assert len(found["pictures"]) == 8 and min(found["pictures"]) > 800
    assert found["overflow_px"] <= 0
    assert found["scripts"] == 1, "the one of this test"
    assert [name for name in found["requests"] if not name.endswith(".png")] == []


def test_tables_fit_a_phone(report: WrittenReport, tmp_path: Path) -> None:
    """Catches a page that scrolls sideways on a phone, a table that overflows its box, and an event's text in a column
    one word wide."""
    write_eventful_run(tmp_path / "other")
    compared = ReportConfig(run=[str(report.page.parent), str(tmp_path / "other")], output=str(tmp_path / "both"))
    for written in (report, write_report(compared)):
        found = inspect(written, 420)
        assert found["width"] == 420 and found["overflow_px"] <= 0, found
        assert found["tables"] and max(found["tables"]) <= 420, found
        assert all(width > 0.8 * 420 for width in found["details"]), found["details"]
    assert len(inspect(report, 420)["details"]) > 5


def test_no_complaint_and_both_color_schemes(report: WrittenReport, tmp_path: Path) -> None:
    """Catches a page that violates its own Content-Security-Policy, and one that is white in dark mode or empty."""
    brightness = {}
    for name, flags in (("light", ()), ("dark", (DARK,))):
        shot = tmp_path / f"{name}.png"
        done = browse(report.page, 1280, "--enable-logging=stderr", f"--screenshot={shot}", *flags, height=1600)
        assert "CONSOLE" not in done.stderr
        picture = Image.open(shot).convert("L")
        assert picture.size == (1280, 1600)
        histogram = picture.histogram()
        brightness[name] = sum(level * count for level, count in enumerate(histogram)) / sum(histogram)
        assert sum(count > 0 for count in histogram) > 100, "more than an empty page"
    assert brightness["light"] > 220 and brightness["dark"] < 60


def test_the_console_would_be_heard(tmp_path: Path) -> None:
    """Catches a browser whose console messages the test above would not see."""
    page = tmp_path / "bad.html"
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    page.write_text(f"<!doctype html>{policy}<script>throw 1</script>")
    assert "CONSOLE" in browse(page, 600, "--enable-logging=stderr", "--dump-dom").stderr
