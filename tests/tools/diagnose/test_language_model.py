"""Tests diagnose's language model: the request to a server, masked secrets, and that its answer changes nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megads.errors import ConfigError
from megads.tools.diagnose.command import Report, diagnose
from megads.tools.diagnose.config import DiagnoseConfig, LanguageModelConfig
from megads.tools.diagnose.language_model import mask_secrets

SECRETS = {
    "hf": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "openai": "sk-proj-abcDEF0123456789abcDEF",
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "password": "hunter2-very-secret",
    "bearer": "abc.def-ghi_jkl",
    "user": "jane.doe",
    "mail": "jane.doe@example.org",
    "v4": "10.20.30.40",
    "v6": "fe80::966d:ae03:8b:df54",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
}
HOME = "/" + "home/"
LINES = [
    f"RuntimeError: No space left on device: {HOME}{SECRETS['user']}/run",
    f"OSError: [Errno 28] No space left on device, token={SECRETS['hf']}",
    f"OSError: [Errno 28] No space left on device OPENAI_API_KEY: {SECRETS['openai']} from {SECRETS['mail']}",
    f"OSError: [Errno 28] No space left on device wandb {SECRETS['wandb']} at {SECRETS['v4']}:29500 {SECRETS['v6']}",
    f"OSError: [Errno 28] No space left on device --db-password {SECRETS['password']} {SECRETS['aws']}",
    f"OSError: [Errno 28] No space left on device Authorization: Bearer {SECRETS['bearer']}",
    f"OSError: [Errno 28] No space left on device https://{SECRETS['user']}:{SECRETS['password']}@h/x {SECRETS['jwt']}",
]


class Service(HTTPServer):
    """An OpenAI-compatible server that records its requests."""

    status = 200
    answer: Any = None

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, dict(self.headers), body))
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()
        said = {"choices": [{"message": {"content": "rm -rf / and cause: cuda_oom"}}]}
        self.wfile.write(json.dumps(said if self.server.answer is None else self.server.answer).encode())

    do_GET = do_POST  # noqa: N815 - the name that http.server wants

    def log_message(self, *_arguments: object) -> None:
        """Logs nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    """A running service on loopback."""
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def report(tmp_path: Path, **llm: Any) -> Report:
    log = tmp_path / "a.log"
    log.write_text("\n".join(LINES))
    found = diagnose(DiagnoseConfig(logs=[str(log)], llm=LanguageModelConfig(**llm)))
    assert isinstance(found, Report)
    return found


def test_it_is_off_unless_named(tmp_path: Path, service: Service) -> None:
    """Catches log lines sent off the machine although no endpoint is configured."""
    assert report(tmp_path).advice_of_model == "" and service.requests == []


def test_secrets_stay_here(tmp_path: Path, service: Service) -> None:
    """Catches a token, key, password, user or address that is sent to the service."""
    key = tmp_path / "key"
    key.write_text("the-service-key\n")
    found = report(tmp_path, endpoint=service.url + "/", key_file=str(key), model="small")
    ((path, headers, body),) = service.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer the-service-key"
    sent = json.loads(body)
    assert sent["model"] == "small" and "disk_full" in sent["messages"][1]["content"]
    assert sent["messages"][1]["content"].count("No space left on device") == 5
    assert [name for name, secret in SECRETS.items() if secret in body.decode()] == []
    assert found.advice_of_model == "rm -rf / and cause: cuda_oom"


@pytest.mark.parametrize("name", SECRETS)
def test_every_kind_of_secret(name: str) -> None:
    """Catches a kind of secret that is not masked, also in log lines that a report does not send."""
    assert SECRETS[name] in "\n".join(LINES)
    assert SECRETS[name] not in mask_secrets("\n".join(LINES))


def test_its_answer_changes_nothing(tmp_path: Path, service: Service) -> None:
    """Catches an answer that becomes the cause, or otherwise changes the diagnosis."""
    assert report(tmp_path, endpoint=service.url).diagnosis == report(tmp_path).diagnosis


@pytest.mark.parametrize(
    ("status", "answer"), [(500, None), (200, {"choices": []}), (200, [1]), (401, None), (302, None)]
)
def test_a_service_that_fails(tmp_path: Path, service: Service, status: int, answer: Any) -> None:
    """Catches a diagnosis lost because a service refuses, redirects or sends an invalid answer."""
    service.status, service.answer = status, answer
    found = report(tmp_path, endpoint=service.url)
    assert found.advice_of_model == "" and "gave no answer" in found.notes[-1]
    assert len(service.requests) == 1, "nothing is sent to where it redirects"


def test_a_service_that_is_not_there(tmp_path: Path) -> None:
    """Catches a traceback for a refused connection, and a missing key file that is ignored."""
    with Service() as closed:
        url = closed.url
    assert "gave no answer" in report(tmp_path, endpoint=url, timeout_s=5).notes[-1]
    with pytest.raises(ConfigError, match=r"llm\.key_file"):
        report(tmp_path, endpoint=url, key_file=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "text",
    [
        "Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB",
        "File train.py, line 12, in step: tokens per second 1234.5",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "2026-01-02 03:04:05 rank 3 exit code 137",
        "KeyError: 'learning_rate'",
    ],
)
def test_what_is_no_secret_is_kept(text: str) -> None:
    """Catches masking of harmless text that advice depends on."""
    assert mask_secrets(text) == text
