"""What a cache holds of a prompt: every entry, and strips of a record's size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.generation import Letters
from support.jobs import Echo, make_job, records_of
from support.tiny import prompt_ids, tiny_model
from support.variants import VARIANTS, label

import kvbench
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.kept import MOST_PIECES, strips_of
from kvbench.engine.prefill import prefill
from kvbench.engine.row import Row, prompt_name
from kvbench.kv import Budget
from kvbench.methods import build_method
from kvbench.run.runner import run_job

SMALL: dict[str, Any] = {"sink": 4, "window": 4}
PROMPT = "the quick brown fox jumps over the lazy dog. " * 4


MODEL = tiny_model("llama")


def row_of(method: Any, ids: list[int]) -> Row:
    row = Row("m", method, Budget(**SMALL), 0, prompt_name(ids), room=0)
    with kvbench_attention_on(MODEL):
        prefill(MODEL, ids, [row])
    assert row.failure is None
    return row


def check_frame(name: str, options: dict[str, Any]) -> None:
    ids = Letters().encode(PROMPT)
    whole: dict[str, Any] = {"compress_after": "prompt", **SMALL}
    frame = kvbench.kept(MODEL, Letters(), PROMPT, name, **whole, **options)
    assert list(frame.columns) == ["position", "token", "layer", "head", "weight"]
    row = row_of(build_method(name, **options), ids)
    for layer, (cache,) in row.caches.items():
        here = frame[frame["layer"] == layer]
        assert here.groupby("head").size().tolist() == row.entries[layer].tolist()
        for head in range(cache.keys.shape[0]):
            rows = here[here["head"] == head].sort_values("position", kind="stable")
            order = cache.positions[head, : cache.length].sort(stable=True)
            weights = torch.ones(cache.length)
            if cache.log_weights is not None:
                weights = cache.log_weights[head, : cache.length].exp()
            sound = weights[order.indices] > 0
            assert rows["position"].tolist() == order.values[sound].tolist()
            torch.testing.assert_close(
                torch.tensor(rows["weight"].to_numpy(), dtype=torch.float32),
                weights[order.indices][sound],
            )
    placed = frame[frame["position"] >= 0]
    assert (placed["token"] == [PROMPT[at] for at in placed["position"]]).all()


def test_every_entry_is_a_line_of_the_frame() -> None:
    for variant in VARIANTS:
        try:
            check_frame(*variant)
        except AssertionError as error:
            raise AssertionError(label(variant)) from error


def test_strips_are_the_weight_per_token_of_each_piece() -> None:
    ids = prompt_ids(300)
    row = row_of(build_method("balancekv", block_size=16), ids)
    strips = json.loads(json.dumps(strips_of(row, 300)))
    assert (strips["tokens"], strips["width"], strips["unplaced"]) == (300, 3, 0.0)
    for layer, (cache,) in row.caches.items():
        held = np.zeros(300)
        weights = cache.log_weights[:, : cache.length].exp().numpy()  # type: ignore[index]
        np.add.at(held, cache.positions[:, : cache.length].numpy(), weights)
        expected = held.reshape(100, 3).mean(1) / 2  # two heads
        assert len(strips["layers"][str(layer)]) == 100 <= MOST_PIECES
        np.testing.assert_allclose(strips["layers"][str(layer)], 100 * expected, atol=0.5001)
    whole = strips_of(row_of(build_method("exact"), ids), 300)
    assert whole["layers"] == {str(layer): [100] * 100 for layer in range(4)}


def test_records_of_the_first_examples_say_what_was_kept_and_of_no_others(tmp_path: Any) -> None:
    class Told(Echo):
        def examples(self, encoder: Any) -> Any:
            return [
                replace(
                    each, context=f"{each.context}THE ANSWER{each.context}", evidence="THE ANSWER"
                )
                for each in super().examples(encoder)
            ]

    records = records_of(run_job(make_job(tmp_path, echo=Told())))
    for method, found in records.items():
        assert [record["example_id"] for record in found if "kept" in record] == ["e0", "e1"]
        assert {record["evidence"] for record in found} == {"THE ANSWER"}
        kept = found[0]["kept"]
        assert found[0]["prompt_tokens"] == 64 + 10 + 64 + 11
        assert kept["tokens"] == found[0]["prompt_tokens"] - 1  # one is held back
        assert kept["answer"] == [64, 74]
        assert len(kept["texts"]) == len(kept["layers"]["0"])
        assert "".join(kept["texts"])[64:74] == "THE ANSWER"
        assert (min(kept["layers"]["1"]) == 100) == (method == "exact")
        assert len(json.dumps(kept)) < 8_000
