"""Where data come from: files, folders, archives, the Hub, and what is said when they are not there."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvbench.errors import Once
from kvbench.tasks.base import TaskError
from kvbench.tasks.data import Source, file_digests, hub_answers, hub_rows, texts_of_dataset

ROWS = [{"text": f"Text {i}. It says little!", "n": i} for i in range(3)]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(**where: Any) -> list[Any]:
    return [dict(row) for _, _, row in Source("t", **where).rows()]


def test_files_folders_archives_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    import pandas as pd

    file = write(tmp_path / "deep" / "my.jsonl", ROWS)
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(file, "inside/my.jsonl")
    (tmp_path / "parts" / "my").mkdir(parents=True)
    pd.DataFrame(ROWS).to_parquet(tmp_path / "parts" / "my" / "test-00000.parquet")
    for where in (
        {"files": (str(file),)},
        {"files": (str(tmp_path / "**/*.jsonl"),)},
        {"files": (str(tmp_path / "list.json"),)},
        {"data": str(tmp_path / "deep"), "file": "data/my.jsonl"},
        {"data": str(tmp_path), "file": "deep/my.jsonl"},
        {"data": str(tmp_path / "data.zip"), "file": "my.jsonl"},
        {"data": str(tmp_path / "parts"), "file": "my.jsonl"},
    ):
        assert rows_of(**where) == ROWS, where
    zipped = Source("t", data=str(tmp_path / "data.zip"), file="my.jsonl")
    assert zipped.digests() == file_digests([str(file)])
    write(file, ROWS[:1])
    assert zipped.digests() != file_digests([str(file)])


def test_what_is_not_there_is_one_line_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    where = {"dataset": "some/set", "archive": "data.zip", "file": "a.jsonl"}
    for data, said in (
        (tmp_path, r"no a\.jsonl in .*: hf download some/set data\.zip --repo-type dataset"),
        (tmp_path / "nothing", "which does not exist; allowed: a folder or zip with a.jsonl"),
        (tmp_path / "file", "is no zip archive"),
    ):
        with pytest.raises(TaskError, match=said):
            rows_of(data=str(data), **where)
    with pytest.raises(TaskError, match=r"no file matches files='x\*\.jsonl'"):
        rows_of(files=("x*.jsonl",))


def test_wrong_files_are_one_line_naming_file_and_line(tmp_path: Path, capsys: Any) -> None:
    cut = json.dumps(ROWS[0])[:-9].encode()
    for content, said in (
        (b"{}\n" + cut, "line 2 is not complete JSON"),
        (b'{}\n{"a": "\xff"}', r"line 2 is not UTF-8 \(byte 7\)"),
        (b"[1]\n", "row 1 is not an object with fields"),
        (b"[" * 50_000, "line 1 is not complete JSON"),
    ):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(TaskError, match=said) as caught:
            rows_of(files=(str(tmp_path / "a.jsonl"),))
        assert "\n" not in str(caught.value)
    for name, said in (("a.json", "holds no list"), ("a.parquet", "cannot read")):
        (tmp_path / name).write_text("{}")
        with pytest.raises(TaskError, match=said):
            rows_of(files=(str(tmp_path / name),))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("reached", [True, False])
def test_an_archive_of_the_hub_is_fetched_at_its_revision(
    tmp_path: Path, monkeypatch: Any, caplog: Any, reached: bool
) -> None:
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: reached)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/a.jsonl", json.dumps(ROWS[0]))
    asked = []

    def fetch(repository: str, name: str, **options: Any) -> str:
        asked.append((repository, name, *options.values()))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    where = {
        "dataset": "some/set",
        "archive": "data.zip",
        "file": "data/a.jsonl",
        "revision": "abc",
    }
    assert rows_of(**where) == ROWS[:1]
    assert asked == [("some/set", "data.zip", "dataset", "abc", not reached)]

    def refuse(*arguments: Any, **options: Any) -> None:
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TaskError, match=r"revision abc\) cannot be fetched \(OSError\); allowed: a"),
    ):
        rows_of(**where)
    assert not caplog.records, "the error is the only line"


def test_a_repository_is_read_by_datasets_where_the_hub_answers(monkeypatch: Any) -> None:
    asked = []

    def load(path: str, *, name: Any, split: str, streaming: bool, revision: Any) -> list[Any]:
        asked.append((path, name, split, revision))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: True)
    assert rows_of(dataset="some/set", config="x", revision="r") == ROWS
    assert hub_rows("t", "some/set", None, "dev", limit=2) == ROWS[:2]
    assert asked == [("some/set", "x", "test", "r"), ("some/set", None, "dev", None)]
    texts = texts_of_dataset("some/set", None, "test", "text")
    assert texts[0] == ("row 0", ROWS[0]["text"])
    with pytest.raises(TaskError, match="no column 'body'; one of text, n"):
        texts_of_dataset("some/set", None, "test", "body")
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: False)
    with pytest.raises(TaskError, match="cannot read some/set x test: the Hub cannot be reached"):
        rows_of(dataset="some/set", config="x")
    with pytest.raises(TaskError, match=r"'some/set' cannot be read \(ConnectionError\)"):
        Source("t", dataset="some/set").digests()
    assert len(asked) == 4, "the library is not asked where the Hub is silent"


def test_a_hub_that_is_not_there_is_found_out_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr("kvbench.tasks.data.getproxies", dict)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        assert not hub_answers(), "bound, not listening: refused"
        server.listen()
        assert hub_answers()
    monkeypatch.setattr("kvbench.tasks.data.getproxies", lambda: {"https": "http://proxy"})
    assert hub_answers(), "behind a proxy the library finds out itself"


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
        body = json.dumps({"model_type": "llama", "hidden_size": 64}).encode() if well else b"{}"
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


@pytest.mark.slow
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
    command = [sys.executable, "-c", CODE, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
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
