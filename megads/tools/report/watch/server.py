"""`megads watch`: watched runs, their pages, and the HTTP server for the browsers of one user.

The server listens only on 127.0.0.1 and never changes a run. Other users of the machine can connect to that address,
too: every client needs a token, which is part of the printed URL and is then kept in a cookie. A malicious web page can
make a browser request any address, also by a host name that it resolves to 127.0.0.1 (DNS rebinding): the cookie is not
sent with cross-site requests, and only requests with a local host name are answered.

Pages are built from parts of `megads report` and the current status. Reading a run takes time proportional to its
steps, and drawing it some seconds. Both are done only after a file of the run has changed, and use at most a tenth of a
CPU core.
"""

from __future__ import annotations

import hashlib
import html
import logging
import math
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

from waitress.server import create_server

from megads.api import CONFIG_FILE, EVENTS_FILE, METRICS_FILE, ConfigError, find_run, slowdowns_path, user_name
from megads.tools.report.charts import run_charts
from megads.tools.report.config import MOST_RUNS
from megads.tools.report.history import RunHistory, number, read_history
from megads.tools.report.html_page import Html, document, draw_charts, footer, table, utc_text
from megads.tools.report.page import (
    EVENT_COLUMNS,
    comparison_body,
    comparison_charts,
    drawn_at_line,
    event_severity,
    event_table_row,
    names,
    run_body,
    swatch,
)
from megads.tools.report.style import CYCLE
from megads.tools.report.summary import facts, key_numbers, last, loss_text, short, status
from megads.tools.report.watch.config import WatchConfig

T = TypeVar("T")
Signature = tuple[tuple[int, int, int], ...]
"""Inode, size and modification time of every file of a run that a report reads."""

_PAUSE_FACTOR = 9.0
"""Pause after reading or drawing before it is repeated, as a multiple of its duration."""
_DRAWING = threading.Lock()
"""Serializes drawing: matplotlib's settings are global to the process."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return any((folder / name).exists() for name in (METRICS_FILE, EVENTS_FILE, CONFIG_FILE))


def signature(run_dir: Path) -> Signature:
    """Returns a value that changes whenever the report of the run may change."""
    names = [run_dir / name for name in (METRICS_FILE, EVENTS_FILE, CONFIG_FILE, "checkpoints")]
    found = []
    for path in (*names, slowdowns_path(run_dir)):
        try:
            about = path.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((about.st_ino, about.st_size, about.st_mtime_ns))
    return tuple(found)


class RefreshedValue(Generic[T]):
    """A cached value that is recomputed after its inputs have changed, at a limited rate.

    While one thread computes it, other threads get the previous value.

    Args:
        make: computes the value.
        now: clock, in seconds.
    """

    def __init__(self, make: Callable[[], T], now: Callable[[], float] = time.monotonic):
        self._make, self._now = make, now
        self._lock = threading.Lock()
        self._made: tuple[object, T] | None = None
        self._paused_until = 0.0

    def get(self, state: object) -> T:
        """Returns the value for a state of the inputs, or the previous value during the pause after a computation.

        Args:
            state: state of the inputs; equal as long as they have not changed.
        """
        made = self._made
        if made is not None and (made[0] == state or self._now() < self._paused_until):
            return made[1]
        if not self._lock.acquire(blocking=made is None):
            assert made is not None
            return made[1]
        try:
            if self._made is None or self._made[0] != state:
                begin = self._now()
                self._made = (state, self._make())
                end = self._now()
                self._paused_until = end + _PAUSE_FACTOR * (end - begin)
            return self._made[1]
        finally:
            self._lock.release()


class WatchedRun:
    """One watched run.

    Args:
        run_dir: run directory.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        """Identifies the run in URLs."""
        self._history = RefreshedValue(self._read)
        self._pictures = RefreshedValue(self._draw)

    def history(self) -> RunHistory | str:
        """Returns the recorded history, or a message why nothing can be shown yet."""
        return self._history.get(signature(self.run_dir))

    def pictures(self) -> tuple[list[str], float]:
        """Returns the charts of the run as parts of a page, and when they were drawn, in seconds since 1970."""
        return self._pictures.get(signature(self.run_dir))

    def _read(self) -> RunHistory | str:
        try:
            return read_history(self.run_dir)
        except ConfigError as error:
            return str(error)

    def _draw(self) -> tuple[list[str], float]:
        history, now_s = self.history(), time.time()
        if isinstance(history, str):
            return [], now_s
        with _DRAWING:
            return draw_charts(run_charts(history)), now_s


class WatchedRuns:
    """The configured runs.

    Args:
        names: run directories, ids of runs in runs/, or folders of runs.

    Raises:
        ConfigError: A name is none of these.
    """

    def __init__(self, names: Sequence[str]):
        self._places = [_place(name) for name in names]
        self._known: dict[Path, WatchedRun] = {}
        self._comparison = RefreshedValue(self._draw)
        self._compared: tuple[RunHistory, ...] = ()
        self._colors: dict[Path, str] = {}

    def find(self) -> tuple[list[WatchedRun], int]:
        """Returns the runs to show, newest first, and the number of older runs that are left out."""
        found = dict[Path, int]()
        for place in self._places:
            folders = [place]
            if not is_run(place):
                with suppress(OSError):
                    folders = [path for path in place.iterdir() if path.is_dir()]
            found |= {path: max(changed for *_, changed in signature(path)) for path in folders if is_run(path)}
        newest = sorted(found, key=lambda path: found[path], reverse=True)
        shown = newest[:MOST_RUNS]
        for path in shown:
            self._known.setdefault(path, WatchedRun(path))
        # A run keeps its colour while it is shown; hidden runs free theirs.
        self._colors = {path: color for path, color in self._colors.items() if path in shown}
        for path in sorted(set(shown) - self._colors.keys()):
            self._colors[path] = next(color for color in CYCLE if color not in self._colors.values())
        return [self._known[path] for path in shown], len(newest) - len(shown)

    def with_key(self, key: str) -> WatchedRun | None:
        """Returns the run with a key, even if newer runs have displaced it from the list; None if there is none."""
        self.find()
        return next((run for run in self._known.values() if run.key == key), None)

    def color(self, run_dir: Path) -> str:
        """Returns the colour of a shown run, in all tables and charts."""
        return self._colors.get(run_dir, CYCLE[-1])

    def comparison(self, histories: Sequence[RunHistory]) -> list[str]:
        """Returns the comparison of runs as parts of a page, for the runs of when its charts were drawn."""
        self._compared = tuple(histories)
        return self._comparison.get(tuple(signature(history.run_dir) for history in histories))

    def _draw(self) -> list[str]:
        histories, now_s = self._compared, time.time()
        colors = [self.color(history.run_dir) for history in histories]
        with _DRAWING:
            pictures = draw_charts(comparison_charts(histories, colors))
        return [*comparison_body(histories, pictures, colors), drawn_at_line(now_s)]


def _place(name: str) -> Path:
    if name == "runs" and not Path(name).is_dir():
        raise ConfigError("there is no folder runs/ here: give a run directory, or a folder of runs, as run=<folder>")
    return find_run(name)


POLICY = "default-src 'none'; connect-src 'self'; script-src 'self'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy: only this server's script may run, and it may connect only to this server."""
SCRIPT_PATH = "/watch.js"
_MOST_FAULTS = 30


def page(title: str, body: Sequence[str], refresh_s: float) -> str:
    """Returns a complete page.

    Args:
        title: title of the page.
        body: parts of the body, as HTML.
        refresh_s: refresh interval of the body, in seconds.
    """
    head = f'<script src="{SCRIPT_PATH}" data-every-s="{refresh_s:g}" defer></script>'
    return document(title, body, POLICY, head)


def overview(runs: WatchedRuns) -> list[str]:
    """Returns the body of the page of all runs: status table, common charts, warnings and faults."""
    shown, hidden = runs.find()
    read = [(run, run.history()) for run in shown]
    histories = [history for _, history in read if isinstance(history, RunHistory)]
    body = ["<header><h1>Runs</h1></header>", _runs(read, runs)]
    if hidden:
        body.append(f"<p>{hidden:,} older runs are not shown; run=&lt;run directory&gt; shows any of them.</p>")
    if histories:
        body += ["<h2>Curves</h2>", *runs.comparison(histories)]
    unreadable = sum(history.unreadable_lines for history in histories)
    return [*body, _faults(histories), footer(unreadable, live=True)]


def of_run(run: WatchedRun) -> list[str]:
    """Returns the body of the page of one run: its current report."""
    back = '<p><a href="/">all runs</a></p>'
    history = run.history()
    if isinstance(history, str):
        return [back, f"<header><h1>{html.escape(run.run_dir.name)}</h1></header>", f"<p>{html.escape(history)}</p>"]
    age = f"<p>last step {_last_step(history)}</p>"
    pictures, drawn_s = run.pictures()
    return [
        back,
        *run_body(history, pictures),
        age,
        drawn_at_line(drawn_s),
        footer(history.unreadable_lines, live=True),
    ]


def _runs(read: Sequence[tuple[WatchedRun, RunHistory | str]], runs: WatchedRuns) -> str:
    """Returns the table with one row per run."""
    if not read:
        return "<p>No run has begun yet; the first appears here when it does.</p>"
    head = ("run", "status", ">step", "last step", ">train loss", ">tokens/s", ">effective time", ">faults", ">starts")
    known = iter(names([history for _, history in read if isinstance(history, RunHistory)]))
    rows: list[Sequence[str]] = []
    for run, history in read:
        name = html.escape(next(known).strip() if isinstance(history, RunHistory) else run.run_dir.name)
        link = Html(f'{swatch(runs.color(run.run_dir))}<a href="/run/{run.key}">{name}</a>')
        if isinstance(history, str):
            rows.append(Html(f'<tr><td>{link}</td><td colspan="8">{html.escape(history)}</td></tr>'))
            continue
        words, kind = status(history)
        numbers = {item.label: item.value for item in key_numbers(history)}
        planned = number(history.last_event("start").get("total_steps"))
        rows.append(
            (
                link,
                Html(f'<span class="status {kind}">{html.escape(words)}</span>'),
                f"{history.step[-1]:,.0f}" + (f" of {planned:,.0f}" if math.isfinite(planned) else ""),
                _last_step(history),
                loss_text(last(history.columns["loss"])),
                short(last(history.columns["tokens_per_s"])),
                numbers.get("effective time", ""),
                numbers.get("faults", "0"),
                dict(facts(history)).get("starts", "1"),
            )
        )
    return table(head, rows)


def _last_step(history: RunHistory) -> Html:
    """Returns the end of the last step; the page's script shows the age, so that the HTML stays unchanged."""
    ended = last(history.columns["time"])
    if not math.isfinite(ended):
        return Html("unknown")
    return Html(f'<time data-ended-s="{ended:.3f}">{utc_text(ended)} UTC</time>')


def _faults(histories: Sequence[RunHistory]) -> str:
    """Returns the table of the newest warnings and errors of all runs; empty if there are none."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name, history in zip(names(histories), histories, strict=True):
        found += [(name.strip(), event) for event in history.events if event_severity(event) != "info"]
    newest = sorted(found, key=lambda item: number(item[1].get("time")), reverse=True)[:_MOST_FAULTS]
    if not newest:
        return ""
    rows = [event_table_row(event, f"<td>{html.escape(name)}</td>") for name, event in newest]
    return f"<h2>Warnings and faults, the newest first</h2>{table(('run', *EVENT_COLUMNS), rows, 'events')}"


HOST = "127.0.0.1"
_HOSTS = (HOST, "localhost", "::1")
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_RUN_PATH = "/run/"
_THREADS = 4
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


@dataclass(frozen=True)
class Response:
    """An HTTP response.

    Attributes:
        status: HTTP status.
        text: body.
        kind: content type.
        headers: headers in addition to those of every response.
    """

    status: HTTPStatus
    text: str = ""
    kind: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


class Application:
    """WSGI application (PEP 3333) of `megads watch`.

    Args:
        runs: runs to show.
        token: token that a client needs.
        refresh_s: refresh interval of the pages, in seconds.
        cookie: name of the cookie with the token, different for each server on this machine.
    """

    def __init__(self, runs: WatchedRuns, token: str, refresh_s: float, cookie: str):
        self._runs, self._token, self._refresh_s, self._cookie = runs, token, refresh_s, cookie
        self._script = resources.files(__package__).joinpath("watch.js").read_text()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers one request."""
        answer = self._answer(environ)
        body = answer.text.encode()
        headers = [*_HEADERS, *answer.headers, ("Content-Type", answer.kind), ("Content-Length", str(len(body)))]
        start_response(f"{answer.status.value} {answer.status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: dict[str, Any]) -> Response:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, "runs are only read\n", headers=(("Allow", "GET, HEAD"),))
        host, given, path = None, SimpleCookie(), environ.get("PATH_INFO", "/")
        # The port differs behind an SSH tunnel. A malformed header is like none.
        with suppress(ValueError):
            host = urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname
        if host not in _HOSTS:
            return Response(HTTPStatus.FORBIDDEN, f"ask for {HOST} or localhost\n")
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        if self._is_token(query.get("token", [""])[0]):
            kept = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            return Response(HTTPStatus.SEE_OTHER, headers=(("Set-Cookie", kept), ("Location", path)))
        with suppress(CookieError):
            given.load(environ.get("HTTP_COOKIE", ""))
        if self._cookie not in given or not self._is_token(given[self._cookie].value):
            return Response(HTTPStatus.FORBIDDEN, "open the address that megads watch has printed, with its token\n")
        if path == SCRIPT_PATH:
            return Response(HTTPStatus.OK, self._script, "text/javascript; charset=utf-8")
        if path == "/":
            title, body = "runs", overview(self._runs)
        else:
            run = self._runs.with_key(path.removeprefix(_RUN_PATH)) if path.startswith(_RUN_PATH) else None
            if run is None:
                return Response(HTTPStatus.NOT_FOUND, "no such run\n")
            title, body = run.run_dir.name, of_run(run)
        if "body" not in query:
            return Response(HTTPStatus.OK, page(title, body, self._refresh_s), _HTML)
        text = "\n".join(body)
        tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
        if tag == environ.get("HTTP_IF_NONE_MATCH", ""):
            return Response(HTTPStatus.NOT_MODIFIED, headers=(("ETag", tag),))
        return Response(HTTPStatus.OK, text, _HTML, (("ETag", tag),))

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), self._token.encode())


def serve(config: WatchConfig) -> None:
    """Prints the URL and serves until Ctrl+C or SIGTERM.

    Raises:
        ConfigError: A run does not exist, or the port is in use.
    """
    # It warns of each request that waits for a thread, as requests of a browser with several pages often do.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    runs, token = WatchedRuns(config.names), secrets.token_urlsafe(18)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port = {config.port} cannot be used ({error.strerror}): take another one, or leave it out for a free one"
        ) from error
    port = listener.getsockname()[1]
    application = Application(runs, token, config.refresh_s, f"megads-watch-{port}")
    server = create_server(application, sockets=[listener], threads=_THREADS, ident=None)
    shown, hidden = runs.find()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with suppress(KeyboardInterrupt, SystemExit):
        print(f"watching {len(shown)} runs" + (f", the newest of {len(shown) + hidden}" if hidden else ""))
        print(f"page:     http://{HOST}:{port}/?token={token}")
        print(f"tunnel:   ssh -N -L {port}:{HOST}:{port} {user_name()}@{socket.gethostname()}")
        print("Ctrl+C ends it; the runs are only read", flush=True)
        server.run()
