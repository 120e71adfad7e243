"""HTTP server of `megads watch`, for the browsers of one user.

It listens only on 127.0.0.1 and never changes a run. Other users of the machine can connect to that address, too:
every client needs a token, which is part of the printed URL and is then kept in a cookie. A malicious web page can make
a browser request any address, also by a host name that it resolves to 127.0.0.1 (DNS rebinding): the cookie is not sent
with cross-site requests, and only requests with a local host name are answered.
"""

from __future__ import annotations

import getpass
import hashlib
import secrets
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from waitress.server import create_server

from megads.errors import ConfigError
from megads.tools.watch.config import WatchConfig
from megads.tools.watch.pages import POLICY, SCRIPT_PATH, of_run, overview, page
from megads.tools.watch.watched import WatchedRuns

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
        if _host_of(environ.get("HTTP_HOST", "")) not in _HOSTS:
            return Response(HTTPStatus.FORBIDDEN, f"ask for {HOST} or localhost\n")
        path = environ.get("PATH_INFO", "/")
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        if self._is_token(query.get("token", [""])[0]):
            kept = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            return Response(HTTPStatus.SEE_OTHER, headers=(("Set-Cookie", kept), ("Location", path)))
        if not self._is_token(_cookie(environ, self._cookie)):
            return Response(HTTPStatus.FORBIDDEN, "open the address that megads watch has printed, with its token\n")
        if path == SCRIPT_PATH:
            return Response(HTTPStatus.OK, self._script, "text/javascript; charset=utf-8")
        return self._page(path, "body" in query, environ.get("HTTP_IF_NONE_MATCH", ""))

    def _page(self, path: str, body_only: bool, known: str) -> Response:
        """Returns a complete page, or only its body to refresh an open page."""
        if path == "/":
            title, body = "runs", overview(self._runs)
        else:
            run = self._runs.with_key(path.removeprefix(_RUN_PATH)) if path.startswith(_RUN_PATH) else None
            if run is None:
                return Response(HTTPStatus.NOT_FOUND, "no such run\n")
            title, body = run.run_dir.name, of_run(run)
        if not body_only:
            return Response(HTTPStatus.OK, page(title, body, self._refresh_s), _HTML)
        text = "\n".join(body)
        tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
        if tag == known:
            return Response(HTTPStatus.NOT_MODIFIED, headers=(("ETag", tag),))
        return Response(HTTPStatus.OK, text, _HTML, (("ETag", tag),))

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), self._token.encode())


def _host_of(header: str) -> str:
    """Returns the host name in a Host header, without the port, which differs behind an SSH tunnel."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _cookie(environ: dict[str, Any], name: str) -> str:
    try:
        found = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def serve(config: WatchConfig) -> None:
    """Prints the URL and serves until Ctrl+C or SIGTERM.

    Raises:
        ConfigError: A run does not exist, or the port is in use.
    """
    runs, token = WatchedRuns(config.names), secrets.token_urlsafe(18)
    listener = _listen(config.port)
    port = listener.getsockname()[1]
    application = Application(runs, token, config.refresh_s, f"megads-watch-{port}")
    server = create_server(application, sockets=[listener], threads=_THREADS, ident=None)
    shown, hidden = runs.find()
    signal.signal(signal.SIGTERM, _end)
    with suppress(KeyboardInterrupt, SystemExit):
        print(f"watching {len(shown)} runs" + (f", the newest of {len(shown) + hidden}" if hidden else ""))
        print(f"page:     http://{HOST}:{port}/?token={token}")
        print(f"tunnel:   ssh -N -L {port}:{HOST}:{port} {getpass.getuser()}@{socket.gethostname()}")
        print("Ctrl+C ends it; the runs are only read", flush=True)
        server.run()


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port = {port} cannot be used ({error.strerror}): take another one, or leave it out for a free one"
        ) from error
    return listener


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit
