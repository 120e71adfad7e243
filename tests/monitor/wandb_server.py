"""The part of a wandb server that a run needs, on a real socket: it keeps what the real client sends."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Use in a `with` block.

    Attributes:
        runs: run id -> its history rows, in the order of arrival.
        files: contents of the uploaded files, by path.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.files: dict[str, bytes] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self._body()
                if self.path == "/graphql":
                    variables = body.get("variables") or {}
                    self._answer({"data": outer.query(body.get("operationName", ""), variables)})
                    return
                run_id = self.path.split("/")[-2]
                history = body.get("files", {}).get("wandb-history.jsonl", {"content": []})
                outer.runs.setdefault(run_id, []).extend(json.loads(line) for line in history["content"])
                self._answer({})

            def do_PUT(self) -> None:
                outer.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer({})

            def _body(self) -> dict[str, Any]:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                return dict(json.loads(data))

            def _answer(self, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def query(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answers a GraphQL operation; those that no test needs get an empty answer."""
        project = {"id": "p", "name": "megads", "entity": {"id": "e", "name": "me"}}
        if operation == "RunResumeStatus":
            return {"model": project | {"bucket": self._resume_status(variables["name"])}}
        if operation == "UpsertBucket":
            bucket = {"id": "Ug==", "name": variables["name"], "displayName": variables["name"], "config": "{}"}
            return {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "Ug==", "uploadHeaders": [], "files": files}}
        return {}

    def _resume_status(self, run_id: str) -> dict[str, Any] | None:
        rows = self.runs.get(run_id)
        if not rows:
            return None
        last = json.dumps(rows[-1])
        lines = {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([last]), "eventsTail": "[]", "summaryMetrics": last}
        names = {"id": "Ug==", "name": run_id, "displayName": run_id, "config": "{}", "tags": []}
        return names | lines | tails | {"wandbConfig": '{"t": 1}'}
