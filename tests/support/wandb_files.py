"""Reading back what W&B's client wrote for an offline run."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def isolated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No key, no settings of the user's, and nothing outside `folder`."""
    for name in ("API_KEY", "MODE", "DIR", "PROJECT", "ENTITY", "BASE_URL", "SILENT"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    monkeypatch.setenv("HOME", str(folder))


def read_offline(path: Path) -> Iterator[Any]:
    """The protocol messages of a .wandb file: a LevelDB log after a 7-byte header.

    Ends at the first part that is not yet written whole: W&B's own process may still be writing.
    """
    from wandb.proto import wandb_internal_pb2 as messages

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too short for a header: padding up to the next block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if kind == 0 or at + 7 + length > len(content):
            break
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole message, or its last part
            yield messages.Record.FromString(parts)  # type: ignore[attr-defined]
            parts = b""


def offline_run(experiment: Path, run_id: str) -> tuple[Path, list[Any]]:
    """A run's folder and its messages, once W&B's own process has written the last one."""
    (folder,) = (experiment / "wandb").glob(f"offline-run-*-{run_id}")
    (file,) = folder.glob("*.wandb")
    for _ in range(1200):
        messages = list(read_offline(file))
        if messages and messages[-1].WhichOneof("record_type") == "exit":
            return folder, messages
        time.sleep(0.1)
    raise AssertionError(f"{file} has no last message")


def start_of(messages: list[Any]) -> Any:
    (start,) = [m.run for m in messages if m.WhichOneof("record_type") == "run"]
    return start


def updates(messages: list[Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for message in messages:
        sources = {"config": [message.config], "summary": [message.summary]}[kind]
        if message.WhichOneof("record_type") == "run" and kind == "config":
            sources.append(message.run.config)
        for source in sources:
            for item in source.update:
                found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def history(messages: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in m.history.item
        }
        for m in messages
        if m.WhichOneof("record_type") == "history"
    ]


def table_of(folder: Path, key: str) -> dict[str, list[Any]]:
    (file,) = (folder / "files/media/table").glob(f"{key}_*.table.json")
    table = json.loads(file.read_text())
    return {
        name: [row[i] for row in table["data"]] for i, name in enumerate(map(str, table["columns"]))
    }
