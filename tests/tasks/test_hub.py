"""A Hub that is busy, limits or is slow is asked again, which one line says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvbench.errors import Once

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}

CODE = """
import json, logging, sys, time
time.sleep = lambda seconds: None  # between attempts
logging.basicConfig(format="%(message)s")
from kvbench.errors import Once
logging.root.handlers[0].addFilter(Once())  # as conf/config.yaml has it
from kvbench.engine.loading import ModelError, ModelSpec, load_config
for name in sys.argv[1:]:
    try:
        found = load_config(ModelSpec(name="m", path=f"some/{name}")).hidden_size
    except ModelError as error:
        found = str(error)
    print(json.dumps([name, found]), flush=True)
    print("--", file=sys.stderr, flush=True)
"""


class Hub(BaseHTTPRequestHandler):
    """Answers by what a model is called."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        name = self.path.removeprefix("/some/").partition("/")[0]
        self.asked[name] += 1
        if name == "slow":
            time.sleep(1.1)  # longer than HF_HUB_ETAG_TIMEOUT
            return  # without an answer
        well = name == "flaky" and self.asked[name] > 2 and self.path.endswith("/config.json")
        body = json.dumps(CONFIG).encode() if well else b"{}"
        self.send_response({"busy": 503, "limited": 429}.get(name, 200 if well else 503))
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_that_the_hub_is_asked_again_is_said_once(hub: str, tmp_path: Path) -> None:
    names = {
        "busy": "answers 503",
        "limited": "answers 429",
        "slow": "does not answer",
        "flaky": "answers 503",
    }
    environment = {name: value for name, value in os.environ.items() if "PROXY" not in name.upper()}
    environment.pop("HF_HUB_OFFLINE", None)
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_ETAG_TIMEOUT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *names],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    said = dict(zip(names, done.stderr.split("--\n"), strict=False))
    for name, answer in names.items():
        assert Hub.asked[name] > 2, name  # asked again
        (line,) = said[name].splitlines()
        assert line.startswith(f"model 'some/{name}': the Hub {answer}"), line
        assert line.endswith("; asking again, for half a minute or so")
    assert found.pop("flaky") == 64
    for name, line in found.items():
        assert line.startswith(f"model 'some/{name}' cannot be loaded: "), line
        assert "\n" not in line


def test_a_line_is_not_said_twice() -> None:
    def record(text: str, name: str = "a") -> logging.LogRecord:
        return logging.LogRecord(name, logging.WARNING, "", 0, text, None, None)

    once = Once()
    lines = [record("x"), record("x"), record("y"), record("x", "b"), record("y")]
    assert [once.filter(line) for line in lines] == [True, False, True, True, False]
