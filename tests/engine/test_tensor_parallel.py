"""One model over two processes (gloo, on CPUs): records as of one process, and what is refused."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support.command import composed
from support.fork_server import ForkServer
from support.method_layers import make_layer
from support.stores import rows_below
from support.tiny import prompt_ids, tiny_model

from kvbench import compress
from kvbench.cli.build import build_job
from kvbench.engine.costs import ExactBytes, LayerBytes
from kvbench.engine.faults import NonFiniteLogits
from kvbench.engine.fork import Fork
from kvbench.engine.ranks import RankFailure, Ranks, _Reason
from kvbench.errors import UserError, one_line
from kvbench.kv import Budget, BudgetExceeded, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import Method

JOB = ["logger=none", "model=recall_mini", "task=longeval_lines", "task.num_lines=[20]", "limit=2"]
JOB += ["method=[exact,snapkv,h2o,streaming_llm,uniform]", "task.max_new_tokens=6", "batch_size=2"]
LAME = "+methods.{0}={{_target_:engine.test_tensor_parallel.Lame,at:{0}}}"
REFUSED = [
    ("model.random_weights=true", "parallel is 'tensor' and model.random_weights is true"),
    ("method=[exact,spatten]", r"methods that choose .* itself \(not: .'spatten'"),
    ("batch_size=auto", "allowed with it: batch_size=<number>"),
    ("limit=1", "nproc-per-node is 3; allowed for 'asset:recall_mini': 2$"),
]


@dataclass(frozen=True, kw_only=True)
class Lame(Method):
    """Fails on the second rank alone, as it compresses or at a step."""

    saves_memory: ClassVar[bool] = False
    at: str

    def compress(self, layer: Any, budget: Any, generator: Any) -> Any:
        assert (self.at, layer.layer_index, os.environ["RANK"]) != ("compress", 1, "1")
        return keep_all(layer)

    def evict(self, held: Any, attention: Any) -> Any:
        assert (self.at, os.environ["RANK"]) != ("evict", "1")
        return None, None


@pytest.mark.slow
def test_records_are_those_of_one_process(server: ForkServer, tmp_path: Path) -> None:
    """Only draws are others. What fails on one rank is a record, and ends no other method."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    job = [*JOB, "model.parallel=tensor", LAME.format("compress"), LAME.format("evict")]
    children = [server.kvbench(tmp_path, *JOB, "results_dir=one")]
    for rank in ("0", "1"):
        env = {**at, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        children.append(server.kvbench(tmp_path, *job, "results_dir=two", env=env))
    assert [child.process.join(200) or child.process.exitcode for child in children] == [0, 1, 0]
    assert children[2].err.read_text() == ""
    found = [list(rows_below(tmp_path / name).values()) for name in ("one", "two")]
    hashes = {row.pop("config_hash") for runs in found for rows in runs for row in rows}
    one, two = ({rows[0]["method"]: rows for rows in runs} for runs in found)
    failed = [row["error"] for name in ("compress", "evict") for row in two.pop(name)]
    assert failed == ["RankFailure: AssertionError"] * 4
    drawn = [(a["entries"], a["cache_bytes"]) for each in (one, two) for a in each.pop("uniform")]
    assert (drawn[:2], len(hashes)) == (drawn[2:], 12)
    assert one == two


def test_compress_counts_the_bytes_of_all_ranks(monkeypatch: Any) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda ranks, own: [own] * ranks.count)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    model, ids, found = tiny_model("llama"), torch.tensor([prompt_ids(60)]), []
    for model._tp_size in (1, 2):
        with compress(model, "snapkv", sink=4, window=4) as session:
            model.generate(ids, max_new_tokens=4)
        found.append([session.cache_bytes[0], session.exact_bytes[0]])
    assert found[1] == [2 * value for value in found[0]]


OWN, OTHER = ValueError("own"), _Reason("KeyError: theirs", follows=False)
FOLLOWS = _Reason("logits are NaN", follows=True)
AGREED: list[tuple[Exception | None, Any, str | None]] = [
    (None, None, None),
    (None, OTHER, "RankFailure: KeyError: theirs"),
    (OWN, None, "RankFailure: ValueError: own"),
    (OWN, OTHER, "RankFailure: ValueError: own"),
    (NonFiniteLogits(1), OTHER, "RankFailure: KeyError: theirs"),
    (NonFiniteLogits(1), FOLLOWS, f"RankFailure: {one_line(NonFiniteLogits(1))}"),
    (RankFailure("agreed before"), OTHER, "RankFailure: agreed before"),
    (BudgetExceeded("m", 0, 3, 9), OTHER, one_line(BudgetExceeded("m", 0, 3, 9))),
]
"""What failed here, on the other rank, and what both say of it."""


@pytest.mark.parametrize(("own", "other", "agreed"), AGREED, ids=range(len(AGREED)))
def test_ranks_agree_on_the_first_reason_that_follows_from_no_other(
    own: Exception | None, other: Any, agreed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value, other])
    found = Ranks(2).agree_on(own)
    assert (None if found is None else one_line(found)) == agreed
    assert Ranks(1).agree_on(own) is own, "one process has nobody to ask"


def test_a_fork_that_failed_on_another_rank_fails_at_its_next_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[Any] = []
    monkeypatch.setattr(Ranks, "gather", lambda ranks, value: [value, *others])
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    layer = make_layer(40, kv_heads=2, num_layers=1)
    exact = ExactBytes([LayerBytes((layer.keys.nbytes + layer.values.nbytes) // 40, None)])
    for fails_later in (False, True):
        fork = Fork("m", build_method("exact"), Budget(), 0, "x", room=4)
        fork.begin_prompt(40, Ranks(2))
        assert fork.example_id == "x\0rank 1", "draws of its own"
        fork.hold(0, keep_all(layer), 40)
        if fails_later:
            fork.end_prompt(40, exact)
            assert fork.failure is None
        others.append(OTHER)
        if fails_later:
            fork.cost()
        else:
            fork.end_prompt(40, exact)
        assert str(fork.failure) == "KeyError: theirs"
        assert not fork.layers, "its memory is given back"
        others.clear()


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_cannot_be_divided_is_one_line(given: str, said: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=said):
        _ = build_job(composed(*JOB, "model.parallel=tensor", given)).session.model
