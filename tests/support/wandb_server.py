"""A stand-in for the W&B server on the loopback, which the real client can log to: it answers what the
client asks for in GraphQL and keeps what it is sent. It can also fail."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["none", "errors", "silent", "dies"]
ENTITY = {"id": "e", "name": "someone"}


class StandIn:
    """A context manager that serves while it is entered.

    Attributes:
        fault: "errors" answers everything with 500, "silent" takes the connection and never answers,
            "dies" answers with 500 once a run has been made.
        runs: by id what a mutation made a run with; summary: by id. uploads: files by path.
        unknown: operations it had no answer for.
    """

    def __init__(self, fault: Fault = "none") -> None:
        self.fault = fault
        self.runs: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, dict[str, Any]] = defaultdict(dict)
        self.uploads: dict[str, bytes] = {}
        self.unknown: list[str] = []
        self.closing = threading.Event()
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that left
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, operation: str, v: dict[str, Any]) -> Any:
        """The data of one GraphQL operation; None where it is not known."""
        viewer = {"id": "u", "entity": "someone", "username": "someone", "email": "", "flags": "{}"}
        project = {"id": "p", "name": v.get("project"), "entity": ENTITY}
        fixed: dict[str, Any] = {
            "Viewer": {"viewer": viewer | {"teams": {"edges": []}}},
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
            "RunResumeStatus": {"model": project | {"bucket": None}},
            "FetchArtifactDigestAlgorithm": {"project": None},
            "XXHashDigestsEnabled": {"entity": {"xxhashDigestsEnabled": False}},
        }
        if operation == "UpsertBucket":
            self.runs.setdefault(v["name"], {}).update(
                {k: x for k, x in v.items() if x is not None}
            )
            self.summary[v["name"]] |= json.loads(v.get("summaryMetrics") or "{}")
            bucket = {
                "id": v["name"],
                "name": v["name"],
                "config": v.get("config"),
                "project": project,
            }
            bucket |= {"displayName": None, "description": None, "sweepName": None}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [
                {"name": n, "uploadUrl": f"{self.url}/storage/{v['run']}/{n}"} for n in v["files"]
            ]
            return {"createRunFiles": {"runID": v["run"], "uploadHeaders": [], "files": files}}
        if operation == "CreateArtifact":
            sequence = {"id": "s", "latestArtifact": None}
            artifact = {"id": "a", "state": "PENDING", "artifactSequence": sequence}
            return {"createArtifact": {"artifact": artifact}}
        if operation in ("CreateArtifactManifest", "UpdateArtifactManifest"):
            file = {"id": "f", "uploadUrl": f"{self.url}/storage/manifest", "uploadHeaders": []}
            key = operation[0].lower() + operation[1:]
            return {key: {"artifactManifest": {"id": "m", "file": file}}}
        if operation == "CreateArtifactFiles":
            nodes = [
                {"storagePath": f["name"], "uploadUrl": f"{self.url}/storage/artifact/{f['name']}",
                 "uploadHeaders": [], "uploadMultipartUrls": None, "artifact": {"id": "a"}}
                for f in v["input"]["artifactFiles"]
            ]  # fmt: skip
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if operation == "CommitArtifact":
            return {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}}
        return fixed.get(operation)


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""

    def do_POST(self) -> None:
        one, content = self.stand_in, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if one.fault == "silent":
            one.closing.wait()
            return
        if one.fault == "errors" or (one.fault == "dies" and one.runs):
            self._send(500, {"error": "broken"})
        elif self.path == "/graphql":
            asked = json.loads(content)
            name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            data = one.answer(name[1] if name else "", asked.get("variables") or {})
            if data is None:
                one.unknown.append(asked["query"])
            self._send(200, {"data": data} | ({} if data else {"errors": [{"message": "unknown"}]}))
        else:
            if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                files = json.loads(content).get("files") or {}
                for line in files.get("wandb-summary.json", {}).get("content", []):
                    one.summary[stream[1]] |= json.loads(line)
            else:
                one.uploads[self.path.removeprefix("/storage/")] = content
            self._send(200, {})

    do_PUT = do_GET = do_POST

    def _send(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        with suppress(OSError):  # the client may be gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
