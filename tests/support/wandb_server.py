"""A stand-in for the W&B server on the loopback, which the real client can log to.

It answers the GraphQL operations that the client asks for, takes the file stream and file uploads, and
keeps all of it for a test to look at. It can also fail: see `StandIn.fault`.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["none", "errors", "slow", "silent", "rejects", "dies"]
ENTITY = "someone"


@dataclass
class Received:
    """One W&B run as the server has it.

    Attributes:
        start: the variables of the mutation that made the run (displayName, groupName, tags ...).
        config: keys to values.
        history: one dict per step, by line number.
        files: uploaded, by name.
    """

    start: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    complete: bool = False


@dataclass
class Artifact:
    """What was uploaded of one artifact version: its files and its manifest."""

    name: str
    type: str
    files: dict[str, bytes] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    committed: bool = False


class StandIn:
    """The server; a context manager that serves while it is entered.

    Attributes:
        fault: what it does wrong: "errors" answers everything with 500, "slow" after `delay`
            seconds, "silent" takes the connection and never answers, "rejects" knows no key, "dies"
            answers with 500 once a run has been made.
        runs, artifacts, views: what it received.
        unknown: operations and paths it had no answer for.
        keys: the API keys it was given.
    """

    def __init__(self, fault: Fault = "none", delay: float = 0.0) -> None:
        self.fault, self.delay = fault, delay
        self.runs: dict[str, Received] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.views: list[dict[str, Any]] = []
        self.projects: set[str] = set()
        self.operations: list[str] = []
        self.unknown: list[str] = []
        self.keys: set[str] = set()
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )

    @property
    def url(self) -> str:
        """What WANDB_BASE_URL is to be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The data of one operation, None where it is not known."""
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = found.group(1) if found else query.strip()[:40]
        with self._lock:
            self.operations.append(name)
            answer: Callable[[dict[str, Any]], dict[str, Any]] | None
            answer = getattr(self, f"_do_{name}", None)
            if answer is None:
                self.unknown.append(query)
                return None
            return answer(variables)

    def upload(self, path: str, content: bytes) -> None:
        """A file that was put where an earlier answer said."""
        kind, owner, name = path.removeprefix("/storage/").split("/", 2)
        with self._lock:
            if kind == "run":
                self.runs[owner].files[name] = content
            elif kind == "manifest":
                self.artifacts[owner].manifest = json.loads(content)
            else:
                self.artifacts[owner].files[name] = content

    def stream(self, run: str, message: Mapping[str, Any]) -> None:
        """One request of the file stream."""
        with self._lock:
            received = self.runs[run]
            for name, part in (message.get("files") or {}).items():
                if name == "wandb-history.jsonl":
                    for i, line in enumerate(part["content"]):
                        received.history[part["offset"] + i] = json.loads(line)
                elif name == "wandb-summary.json":
                    for line in part["content"]:
                        received.summary.update(json.loads(line))
            received.complete |= bool(message.get("complete"))

    def _do_Viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        viewer = {"id": "u", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": viewer | {"teams": {"edges": []}}}

    def _do_ServerFeaturesQuery(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def _do_RunResumeStatus(self, v: dict[str, Any]) -> dict[str, Any]:
        return {"model": {"id": "p", "name": v["project"], "entity": _ENTITY, "bucket": None}}

    def _do_UpsertBucket(self, v: dict[str, Any]) -> dict[str, Any]:
        inserted = v["name"] not in self.runs
        received = self.runs.setdefault(v["name"], Received())
        self.projects.add(v["project"])
        received.start |= {key: value for key, value in v.items() if value is not None}
        if v.get("config"):
            config = json.loads(v["config"])
            received.config |= {key: entry["value"] for key, entry in config.items()}
        if v.get("summaryMetrics"):
            received.summary.update(json.loads(v["summaryMetrics"]))
        bucket = {
            "id": f"id-{v['name']}",
            "name": v["name"],
            "displayName": v.get("displayName"),
            "description": None,
            "config": v.get("config"),
            "sweepName": None,
            "project": {"id": "p", "name": v["project"], "entity": _ENTITY},
            "historyLineCount": 0,
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _do_CreateRunFiles(self, v: dict[str, Any]) -> dict[str, Any]:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/storage/run/{v['run']}/{name}"}
            for name in v["files"]
        ]
        return {"createRunFiles": {"runID": v["run"], "uploadHeaders": [], "files": files}}

    def _do_FetchArtifactDigestAlgorithm(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": None}

    def _do_XXHashDigestsEnabled(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"entity": {"xxhashDigestsEnabled": False}}

    def _do_CreateArtifact(self, v: dict[str, Any]) -> dict[str, Any]:
        given = v["input"]
        name = given.get("artifactCollectionName") or given["artifactCollectionNames"][0]
        key = f"a{len(self.artifacts)}"
        self.artifacts[key] = Artifact(name, given["artifactTypeName"])
        sequence = {"id": f"s-{name}", "latestArtifact": None}
        artifact = {"id": key, "state": "PENDING", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}

    def _do_CreateArtifactManifest(self, v: dict[str, Any]) -> dict[str, Any]:
        owner = v["artifactID"]
        url = f"{self.url}/storage/manifest/{owner}/{v['name']}" if v["includeUpload"] else None
        file = {"id": "f", "uploadUrl": url, "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": f"m-{owner}", "file": file}}}

    def _do_UpdateArtifactManifest(self, v: dict[str, Any]) -> dict[str, Any]:
        owner = v["artifactManifestID"].removeprefix("m-")
        file = {
            "id": "f",
            "uploadUrl": f"{self.url}/storage/manifest/{owner}/m",
            "uploadHeaders": [],
        }
        return {"updateArtifactManifest": {"artifactManifest": {"id": f"m-{owner}", "file": file}}}

    def _do_CreateArtifactFiles(self, v: dict[str, Any]) -> dict[str, Any]:
        nodes = []
        for given in v["input"]["artifactFiles"]:
            owner = given["artifactID"]
            node = {
                "storagePath": f"{owner}/{given['name']}",
                "uploadUrl": f"{self.url}/storage/artifact/{owner}/{given['name']}",
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": owner},
            }
            nodes.append({"node": node})
        return {"createArtifactFiles": {"files": {"edges": nodes}}}

    def _do_CommitArtifact(self, v: dict[str, Any]) -> dict[str, Any]:
        self.artifacts[v["artifactID"]].committed = True
        return {"commitArtifact": {"artifact": {"id": v["artifactID"], "digest": "d"}}}

    def _do_GetDefaultEntity(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "u", "entity": ENTITY}}

    def _do_GetProjects(self, v: dict[str, Any]) -> dict[str, Any]:
        about = {"__typename": "Project", "id": "p", "entityName": ENTITY, "isBenchmark": False}
        about |= {"createdAt": "2026-01-01T00:00:00", "user": None}
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        edges = [{"node": about | {"name": name}} for name in sorted(self.projects)]
        return {"models": {"pageInfo": page, "edges": edges}}

    def _do_CreateProject(self, v: dict[str, Any]) -> dict[str, Any]:
        self.projects.add(v["input"]["name"])
        return {"result": {"project": None, "model": None, "inserted": True}}

    def _do_upsertView(self, v: dict[str, Any]) -> dict[str, Any]:
        inserted = not v["id"]
        self.views.append(v)
        name = v["id"] or f"view-{len(self.views) - 1}"
        project = {"id": "p", "name": v["projectName"], "entityName": v["entityName"]}
        view = {
            **{key: v[key] for key in ("type", "name", "displayName", "description", "spec")},
            **{"id": name, "project": project, "updatedAt": None},
        }
        return {"upsertView": {"view": view, "inserted": inserted}}


_ENTITY = {"id": "e", "name": ENTITY}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error; anything else is one of the stand-in."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            authorization = self.headers.get("Authorization", "")
            if authorization:
                stand_in.keys.add(authorization)
            if self._fails():
                return
            if self.path == "/graphql":
                asked = json.loads(content)
                data = stand_in.graphql(asked["query"], asked.get("variables") or {})
                if data is None:
                    self._send(200, {"data": None, "errors": [{"message": "unknown operation"}]})
                else:
                    self._send(200, {"data": data})
            elif stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                stand_in.stream(stream.group(1), json.loads(content))
                self._send(200, {})
            elif self.path.startswith("/storage/"):
                stand_in.upload(self.path, content)
                self._send(200, {})
            else:
                stand_in.unknown.append(self.path)
                self._send(404, {})

        def _fails(self) -> bool:
            """Whether the fault of the server took care of this request."""
            fault = stand_in.fault
            if fault == "silent":
                stand_in.closing.wait()
                self.close_connection = True
                return True
            if fault == "slow":
                stand_in.closing.wait(stand_in.delay)
            elif fault == "errors" or (fault == "dies" and stand_in.runs):
                self._send(500, {"error": "broken"})
                return True
            elif fault == "rejects":
                self._send(401, {"error": "invalid key"})
                return True
            return False

        def _send(self, status: int, answer: Mapping[str, Any]) -> None:
            body = json.dumps(answer).encode()
            with suppress(OSError):  # the client may be gone
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    return Handler


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
