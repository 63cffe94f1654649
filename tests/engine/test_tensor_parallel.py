"""One model over two processes (gloo, on CPUs): records as of one process, and what is refused."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.command import main
from support.fork_server import ForkServer
from support.stores import rows_below
from support.tiny import tiny_model

from kvbench.engine.loading import ModelError, ModelSpec, load_model
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Held, Method

JOB = ["logger=none", "model=recall_mini", "task=longeval_lines", "task.num_lines=[20]", "limit=2"]
JOB += ["method=[exact,snapkv,h2o,streaming_llm,uniform]", "task.max_new_tokens=8", "batch_size=2"]
LAME = "+methods.{0}={{_target_:engine.test_tensor_parallel.Lame,when:{0}}}"


@dataclass(frozen=True, kw_only=True)
class Lame(Method):
    """Keeps everything; fails on the second rank alone, while it compresses or at a step."""

    saves_memory: ClassVar[bool] = False

    when: str

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        assert (self.when, layer.layer_index, os.environ.get("RANK")) != ("early", 1, "1")
        return keep_all(layer)

    def evict(self, held: Held, attention: torch.Tensor) -> tuple[None, None]:
        assert (self.when, os.environ.get("RANK")) != ("late", "1")
        return None, None


def test_records_are_those_of_one_process(server: ForkServer, tmp_path: Path) -> None:
    """A method's draws alone are others; one that fails on one rank is a record, and delays nobody."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    children = [server.kvbench(whole, *JOB)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    job = [*JOB, "model.parallel=tensor", LAME.format("early"), LAME.format("late")]
    for rank in ("0", "1"):
        env = {**where, "RANK": rank, "LOCAL_RANK": rank}
        children.append(server.kvbench(parts, *job, env=env))
    for child in children:
        child.process.join(120)
    assert [child.process.exitcode for child in children] == [0, 1, 0], children[1].err.read_text()
    assert children[2].out.read_text() == children[2].err.read_text() == ""
    named = [{name.rpartition("-")[0]: rows for name, rows in rows_below(each).items()} for each in (whole, parts)]
    one, two = named
    for row in (row for rows in (*one.values(), *two.values()) for row in rows):
        del row["config_hash"]
    assert one.pop("uniform")[0]["cache_bytes"] == two.pop("uniform")[0]["cache_bytes"]
    lame = [(two.pop(name)[0]["error"] for name in ("early", "late"))]
    assert lame == []
    assert one == two
