"""`megads watch`: a real server, requests over real sockets, and its page in a real browser."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

pytest.importorskip("matplotlib", reason="the extra [watch] is not installed")
pytest.importorskip("waitress", reason="the extra [watch] is not installed")

from megads.errors import ConfigError
from megads.runtime.lease import claimed
from megads.tools.report.config import MOST_RUNS
from megads.tools.report.watch.config import WatchConfig
from megads.tools.report.watch.server import RefreshedValue, WatchedRuns, overview
from tests.tools.report.browser import browse_address
from tests.tools.report.written_runs import write_config, write_eventful_run, write_start, write_steps


class Answer(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]


class Watching:
    """A running `megads watch` in a folder with runs/, and its first lines of output."""

    def __init__(self, folder: Path, *overrides: str):
        command = [sys.executable, "-m", "megads.cli.main", "watch", *overrides]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.printed = [self.process.stdout.readline() for _ in range(4)]
        self.address = self.printed[1].split()[-1]
        self.token = self.address.partition("token=")[2]
        self.port = urlsplit(self.address).port
        assert self.port is not None

    @property
    def cookie(self) -> str:
        return f"megads-watch-{self.port}={self.token}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Sends one request, with the right cookie unless another one is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        names = {name.replace("_", "-"): value for name, value in ({"Cookie": self.cookie} | headers).items()}
        connection.request(method, path, headers=names)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return Answer(answer.status, text, {name.lower(): value for name, value in answer.getheaders()})

    def end(self, number: int) -> tuple[int, str]:
        """Sends a signal; returns the exit code and stderr."""
        self.process.send_signal(number)
        _out, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and one that has not finished a step."""
    folder = tmp_path_factory.mktemp("watched")
    write_eventful_run(folder / "runs" / "first")
    write_config(folder / "runs" / "second", "second")
    write_steps(folder / "runs" / "second", 1, 20)
    write_config(folder / "runs" / "begun", "begun")
    return folder


@pytest.fixture(scope="module")
def watching(folder: Path) -> Iterator[Watching]:
    watching = Watching(folder, "refresh_s=1")
    yield watching
    assert watching.end(signal.SIGTERM) == (0, "")


@pytest.mark.always
def test_what_it_prints(watching: Watching) -> None:
    """Catches a printed address without its token, and an SSH tunnel to another port."""
    first, page, tunnel, last = watching.printed
    assert first == "watching 3 runs\n"
    assert page == f"page:     http://127.0.0.1:{watching.port}/?token={watching.token}\n"
    assert len(watching.token) >= 24
    assert f"-L {watching.port}:127.0.0.1:{watching.port} " in tunnel
    assert last.startswith("Ctrl+C ends it")


def test_all_runs_are_shown(watching: Watching) -> None:
    """Catches a run that is left out, one without a step that breaks the page, and faults that are not shown."""
    page = watching.ask("/")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    for part in ("eventful", "second", "has no step yet", ">20<", "Loss over tokens", "non-finite gradient"):
        assert part in page.text, part
    assert page.text.count('href="/run/') == 3
    assert "<script src=" in page.text and "<main>" in page.text


def test_one_run_is_shown(watching: Watching) -> None:
    """Catches a run's page that lacks parts of its report, and a broken link."""
    overview = watching.ask("/").text
    links = {name: link for link, name in _links(overview)}
    page = watching.ask(links["eventful"])
    assert page.status == 200
    for part in ("Training loss, validation loss", "config.yaml", "last step", "all runs"):
        assert part in page.text, part
    begun = watching.ask(links["begun"])
    assert begun.status == 200 and "has no step yet" in begun.text
    assert watching.ask("/run/0123456789ab").status == 404
    assert watching.ask("/etc/passwd").status == 404


def test_new_steps_and_new_runs_appear(watching: Watching, folder: Path) -> None:
    """Catches a page that does not change after it was opened, and one sent again although nothing has changed."""
    body = watching.ask("/?body")
    assert body.status == 200 and "<html" not in body.text
    again = watching.ask("/?body", If_None_Match=body.headers["etag"])
    assert (again.status, again.text) == (304, "")
    write_steps(folder / "runs" / "second", 21, 30)
    write_config(folder / "runs" / "third", "third")
    write_steps(folder / "runs" / "third", 1, 5)
    deadline = time.monotonic() + 60
    while ">30<" not in (text := watching.ask("/?body", If_None_Match=body.headers["etag"]).text):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
    assert "third" in text


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/", "GET", {"Cookie": ""}, 403),
        ("/", "GET", {"Cookie": "megads-watch-{port}=wrong"}, 403),
        ("/", "GET", {"Cookie": "megads-watch-1={token}"}, 403),
        ("/?token=wrong", "GET", {"Cookie": ""}, 403),
        ("/watch.js", "GET", {"Cookie": ""}, 403),
        ("/", "GET", {"Host": "stranger.example"}, 403),
        ("/", "GET", {"Host": "127.0.0.1.stranger.example:80"}, 403),
        ("/", "POST", {}, 405),
        ("/", "DELETE", {}, 405),
        ("/", "GET", {"Host": "localhost:1"}, 200),
        ("/watch.js", "GET", {}, 200),
        ("/", "HEAD", {}, 200),
    ],
)
def test_who_is_answered(path: str, method: str, headers: dict[str, str], status: int, watching: Watching) -> None:
    """Catches a run shown to another user of the machine, or to another site's page in the user's browser."""
    filled = {name: text.format(port=watching.port, token=watching.token) for name, text in headers.items()}
    answer = watching.ask(path, method, **filled)
    assert answer.status == status
    assert "loss" not in answer.text or status == 200
    assert answer.headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_the_token_becomes_a_cookie(watching: Watching) -> None:
    """Catches a token left in the address, visible in screenshots and history, and a cookie that scripts can read."""
    answer = watching.ask(f"/?token={watching.token}", Cookie="")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert answer.headers["set-cookie"] == f"{watching.cookie}; Path=/; HttpOnly; SameSite=Strict"


def test_in_a_browser(watching: Watching) -> None:
    """Catches a script that the page's content security policy blocks, and a page that does not refresh."""
    page = browse_address(watching.address, 1200, "--dump-dom", "--virtual-time-budget=20000").stdout
    assert 'data-renewed="' in page
    assert "s ago" in page or "min ago" in page
    assert "does megads watch still run" not in page


def test_it_ends_when_asked(folder: Path) -> None:
    """Catches a server that outlives Ctrl+C, or prints a traceback for it; the fixture's server gets SIGTERM."""
    assert Watching(folder, "run=second").end(signal.SIGINT) == (0, "")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"run": []}, "give a run directory"),
        ({"run": ["a", "a"]}, "run names a twice"),
        ({"run": [str(number) for number in range(9)]}, "at most 8"),
        ({"port": 70000}, "port = 70000"),
        ({"port": -1}, "port = -1"),
        ({"refresh_s": 0.0}, "refresh_s = 0"),
    ],
)
def test_what_is_refused(settings: dict[str, object], told: str) -> None:
    """Catches a page that polls without a pause, and a message that does not name the key."""
    with pytest.raises(ConfigError, match=told):
        WatchConfig(**settings).check()  # type: ignore[arg-type]


def test_runs_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an empty page for a mistyped name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder runs/ here"):
        WatchedRuns(["runs"])
    with pytest.raises(ConfigError, match="run = other"):
        WatchedRuns(["other"])


def test_the_newest_runs_of_a_folder(tmp_path: Path) -> None:
    """Catches runs that are left out silently, a page of the oldest ones, and an address whose run changes."""
    for number in range(MOST_RUNS + 2):
        write_config(tmp_path / f"run{number}", f"run{number}")
        time.sleep(0.01)
    runs = WatchedRuns([str(tmp_path)])
    shown, hidden = runs.find()
    assert hidden == 2 and [run.run_dir.name for run in shown] == [f"run{number}" for number in range(9, 1, -1)]
    oldest = shown[-1]
    write_config(tmp_path / "newer", "newer")
    assert runs.find()[0][0].run_dir.name == "newer"
    assert runs.with_key(oldest.key) is oldest


def swatches(html: str) -> dict[str, str]:
    """Colour by the name of the run that follows its swatch."""
    found = re.findall(r'swatch" style="background:var\(--chart-(\w+)\)"></span>(?:<a [^>]*>)?([\w ]+)', html)
    return {name.strip(): color for color, name in found}


def test_a_run_keeps_its_colour(tmp_path: Path) -> None:
    """Catches tables and curves in which the same run has different colours because a newer one comes first now."""
    for name in ("one", "two"):
        write_config(tmp_path / name, name)
        write_steps(tmp_path / name, 1, 5)
    runs = WatchedRuns([str(tmp_path)])
    status, curves = overview(runs)[1], overview(runs)[3]
    before = swatches(status)
    assert set(before) == {"one", "two"} and len(set(before.values())) == 2
    assert swatches("".join(overview(runs)[3:])) == before and "drawn at" in "".join(overview(runs))
    time.sleep(0.01)
    write_steps(tmp_path / "one", 6, 7)
    write_config(tmp_path / "three", "three")
    write_steps(tmp_path / "three", 1, 5)
    after = swatches(overview(runs)[1])
    assert {name: after[name] for name in before} == before and len(set(after.values())) == 3
    # The curves may be older for a while; they show the runs of their time, in the same colours.
    assert swatches("".join(overview(runs)[3:])).items() <= after.items()
    assert "var(--chart-" in curves


def test_a_run_that_trains_is_not_called_killed(tmp_path: Path) -> None:
    """Catches a run in progress shown as "in progress, or killed", and a killed one shown as in progress."""
    write_config(tmp_path / "run", "run")
    write_start(tmp_path / "run", 0, time.time())
    write_steps(tmp_path / "run", 1, 5)
    runs = WatchedRuns([str(tmp_path)])
    with claimed(tmp_path / "run"):
        assert "in progress" in overview(runs)[1] and "killed" not in overview(runs)[1]
    assert "killed, or its node was lost" in overview(runs)[1]


def test_many_requests_at_once_are_answered_without_a_message(folder: Path) -> None:
    """Catches waitress's warning in the terminal for every request that waits for a thread."""
    watching = Watching(folder)
    with ThreadPoolExecutor(16) as pool:
        answers = [answer.status for answer in pool.map(watching.ask, ["/"] * 32)]
    assert answers == [200] * 32
    assert watching.end(signal.SIGTERM) == (0, "")


def test_what_took_long_rests() -> None:
    """Catches a server that spends all its time on rereading a long run, and one that never rereads it."""
    clock, made = [0.0], []

    def make() -> int:
        clock[0] += 2.0
        made.append(clock[0])
        return len(made)

    value = RefreshedValue(make, now=lambda: clock[0])
    assert [value.get("a"), value.get("a")] == [1, 1]
    clock[0] += 17.0
    assert value.get("b") == 1
    clock[0] += 2.0
    assert [value.get("b"), value.get("b")] == [2, 2]


def test_others_get_the_last_one_meanwhile() -> None:
    """Catches a request that waits for another one's drawing although an older picture is available."""
    begun, go_on = threading.Event(), threading.Event()

    def make() -> str:
        begun.set()
        assert go_on.wait(30)
        return "new"

    value: RefreshedValue[str] = RefreshedValue(make, now=lambda: 0.0)
    go_on.set()
    assert value.get(1) == "new"
    begun.clear()
    go_on.clear()
    other = threading.Thread(target=value.get, args=(2,))
    other.start()
    try:
        assert begun.wait(30)
        assert value.get(2) == "new"
    finally:
        go_on.set()
        other.join()


def _links(page: str) -> list[tuple[str, str]]:
    """Addresses of runs and their names."""
    parts = page.split('href="/run/')[1:]
    return [(f"/run/{part.partition(chr(34))[0]}", part.partition(">")[2].partition("<")[0]) for part in parts]
