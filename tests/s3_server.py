"""A real S3 server (moto's) on loopback, in its own process, that can fail, be slow, hang and be stopped."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class S3Server:
    """The server.

    Args:
        folder: for its request log and its orders.
    """

    def __init__(self, folder: Path):
        self._orders, self._log = folder / "orders.json", folder / "requests.txt"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
        self.variables: Mapping[str, str] = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.address, **files}
        self._process: subprocess.Popen[bytes] | None = None
        self.order()
        self.start()

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/prefix"

    def order(self, *, fail: float = 0.0, delay_s: float = 0.0, refuse: str = "") -> None:
        """Sets how it handles requests from now on: a share fails (503), all are delayed, those of a method are
        refused."""
        partial = self._orders.with_suffix(".partial")
        partial.write_text(json.dumps({"fail": fail, "delay_s": delay_s, "refuse": refuse}))
        partial.replace(self._orders)

    def start(self) -> None:
        """Starts it, empty, with one bucket."""
        words = [sys.executable, __file__, str(self.port), str(self._orders), str(self._log)]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self.address}/{BUCKET}", method="PUT"), timeout=5)
                return
            except OSError:
                assert time.monotonic() < deadline and self._process.poll() is None, "moto's server does not start"
                time.sleep(0.05)

    def stop(self) -> None:
        """Kills it: its objects are lost, connections are refused."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        """Makes it accept connections and answer none from now on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def requests(self) -> list[str]:
        """Returns method, path and range, if it has one, of every request so far."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def _client(self) -> Any:
        import boto3

        key, secret, region = CREDENTIALS.values()
        return boto3.client(
            "s3", endpoint_url=self.address, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region
        )

    def objects(self) -> list[str]:
        """Returns the keys in the bucket, below the prefix."""
        found = self._client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return sorted(item["Key"].removeprefix("prefix/") for item in found)

    def get(self, key: str) -> bytes:
        return bytes(self._client().get_object(Bucket=BUCKET, Key=f"prefix/{key}")["Body"].read())

    def begin_upload(self, key: str, parts: int = 1) -> None:
        """Leaves what a killed multipart upload of a key leaves: some parts of 5 MiB."""
        client, of = self._client(), {"Bucket": BUCKET, "Key": key}
        number = client.create_multipart_upload(**of)["UploadId"]
        for part in range(1, 1 + parts):
            client.upload_part(**of, UploadId=number, PartNumber=part, Body=bytes(5 * 2**20))

    def unfinished(self) -> list[str]:
        """Returns the keys in the bucket with an incomplete multipart upload."""
        found = self._client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return sorted(item["Key"] for item in found)

    def put(self, key: str, content: bytes) -> None:
        self._client().put_object(Bucket=BUCKET, Key=f"prefix/{key}", Body=content)

    def delete(self, key: str) -> None:
        self._client().delete_object(Bucket=BUCKET, Key=f"prefix/{key}")


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Yields a running server; stops it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = S3Server(folder)
    try:
        yield server
    finally:
        server.go_on()
        server.stop()


def _serve(port: int, orders: Path, log: Path) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application = DomainDispatcherApplication(create_backend_app)
    chance = random.Random(0)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Sequence[bytes]:
        wanted = json.loads(orders.read_text())
        with log.open("a") as lines:
            words = (environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}")
            lines.write(" ".join((*words, environ.get("HTTP_RANGE", ""))).strip() + "\n")
        time.sleep(wanted["delay_s"])
        if wanted["refuse"] == environ["REQUEST_METHOD"]:
            start("403 Forbidden", [("Content-Type", "application/xml")])
            denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [denied]
        if chance.random() < wanted["fail"]:
            # Reads the body, like a server that fails after receiving it.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        return application(environ, start)  # type: ignore[no-any-return]

    run_simple("127.0.0.1", port, answer, threaded=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("orders", type=Path)
    parser.add_argument("log", type=Path)
    given = parser.parse_args()
    _serve(given.port, given.orders, given.log)
