"""H2O's selection and eviction against a plain loop."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.jobs import make_job
from support.method_layers import make_layer, run
from support.paths import GOLDEN
from support.tiny import prompt_ids, tiny_model
from torch import Tensor

from kvbench.engine.ask import read
from kvbench.engine.attention import LayerCall, Pass
from kvbench.engine.prefill import forward
from kvbench.kv import Budget, KVError
from kvbench.lm_eval.released_masks import (
    imagined_cost,
    masked_entries,
    masked_scores,
    released_mask,
)
from kvbench.methods import Held, build_method
from kvbench.run.runner import run_job


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("keeps", ["heaviest", "lightest"])
def test_heavy_hitters_and_recent(keeps, fraction):
    """``lightest`` drops the heaviest of the entries that are not recent, and keeps the others."""
    layer, budget = make_layer(80, kv_heads=2, group=3), Budget(size=64, sink=0, window=0)
    method = build_method("h2o", keeps=keeps, heavy_fraction=fraction)
    kept, heavy = run(method, layer, budget), round(fraction * 64)
    older = 80 - (64 - heavy)
    logits = layer.queries.double() @ layer.keys.double().repeat_interleave(3, 1).mT * layer.scaling
    future = torch.ones(80, 80, dtype=torch.bool).triu(1)
    mass = logits.masked_fill(future, -torch.inf).softmax(-1).sum(2).view(1, 2, 3, 80).mean(2)
    for head in range(2):
        best = mass[0, head, :older].argsort(descending=keeps == "heaviest")[:heavy]
        expected = [*sorted(best.tolist()), *range(older, 80)]
        assert kept.positions[0, head].tolist() == expected
        wanted = mass[0, head, expected]
        torch.testing.assert_close(kept.scores[0, head].double(), wanted, rtol=1e-4, atol=1e-5)
    if not fraction:
        local = run(build_method("local"), layer, budget)
        assert torch.equal(kept.positions, local.positions)


def test_the_heaviest_leave_where_the_lightest_stay_and_a_cache_may_grow():
    light, growing = build_method("h2o", keeps="lightest"), build_method("h2o", decode="grow")
    held = Held(torch.tensor([[5.0, 1.0, 3.0, 9.0, 0.0]]), torch.arange(5)[None], 4, 0)
    assert light.evict(held, torch.zeros(1, 5))[1].tolist() == [0], "the last two are recent"
    assert build_method("h2o").evict(held, torch.zeros(1, 5))[1].tolist() == [1]
    layer, budget = make_layer(80), Budget(size=64, sink=0, window=0)
    mass = layer.attention_mass().view(1, 2, 2, 80).mean(2)
    assert torch.equal(light.token_scores(layer, budget).argmin(-1), mass.argmax(-1))
    assert (growing.evicts, build_method("h2o").evicts) == (False, True)
    assert run(growing, layer, budget).scores is None


@pytest.mark.parametrize("rows", [7, 512])
def test_released_masks_are_golden(rows, monkeypatch):
    monkeypatch.setattr("kvbench.lm_eval.released_masks.QUERY_ROWS", rows)
    cases = json.loads((GOLDEN / "h2o_masks.json").read_text())["cases"]
    for case in cases:
        rng, scaling = np.random.default_rng(case["seed"]), case["dim"] ** -0.5
        shape = case["heads"], case["n"], case["dim"]
        draws = [rng.standard_normal(shape, dtype=np.float32) for _ in "qkv"]
        query, key, value = (
            torch.from_numpy(draw) for draw in (np.float32(1.6) * draws[0], *draws[1:])
        )
        for semantics in ("global", "sequential"):
            ratios = {name: case[name] for name in ("heavy_ratio", "recent_ratio")}
            seen = released_mask(query, key, semantics=semantics, scaling=scaling, **ratios)
            rows = [
                "|".join("".join(str(int(x)) for x in row[: i + 1]) for i, row in enumerate(head))
                for head in seen
            ]
            assert rows == case[semantics]
            assert not seen.triu(1).any()
            logits = (query.double() @ key.double().mT * scaling).masked_fill(~seen, -torch.inf)
            out = (logits.softmax(-1) @ value.double())[:, -1].flatten()
            assert out.tolist() == pytest.approx(case["last_row_output"][semantics], abs=1e-6)


@pytest.mark.parametrize("semantics", ["released_global", "released_sequential"])
@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_released_semantics_score_one_masked_pass(architecture, semantics):
    """Against a model whose attention layers are masked, one after another."""
    model, ids, answer = tiny_model(architecture), prompt_ids(50), prompt_ids(6, seed=4)
    method, budget = (
        build_method("h2o", semantics=semantics),
        Budget(total_rate=0.4, sink=0, window=0),
    )
    rule = semantics.removeprefix("released_")

    class Masked(Pass):
        def attend(self, call: LayerCall) -> Tensor:
            group = call.query.shape[1] // call.key.shape[1]
            key, value = (x.repeat_interleave(group, 1) for x in (call.key, call.value))
            seen = released_mask(call.query[0], key[0], rule, 0.2, 0.2, call.scaling)
            logits = (call.query.double() @ key.double().mT) * call.scaling
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            return (weights @ value.double()).to(call.query.dtype)

    model.set_attn_implementation("kvbench")
    tokens = torch.tensor([[*ids, *answer]])
    with torch.no_grad():
        logits = forward(model, tokens, torch.arange(56), Masked())[0, 49:-1]
    expected = -logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    (scored,) = masked_scores(model, ids, [answer], method, budget)
    assert scored.logprobs == pytest.approx((-expected).tolist(), abs=1e-4)
    assert scored.greedy == (logits.argmax(-1) == torch.tensor(answer)).tolist()
    reading = read(model, ids, {}, seed=0, name="x", held_back=1, room=6)
    cost = imagined_cost(model, reading, 55, method, budget)
    assert cost.extras["imagined"] is True
    assert cost.entries["max"] == 22 + (semantics == "released_global")
    group = 1 if architecture == "opt" else 2
    assert cost.ratio == pytest.approx(cost.entries["max"] * group / 55, abs=1e-3), (
        "each query head's"
    )


def test_released_semantics_hold_nothing_to_generate_with(tmp_path):
    method = build_method("h2o", semantics="released_global")
    with pytest.raises(KVError, match="likelihoods alone"):
        run_job(make_job(tmp_path, {"h2o": method}))
    with pytest.raises(KVError, match="holds no cache"):
        run(method, make_layer(200, kv_heads=2, group=2), Budget())
    with pytest.raises(KVError, match=r"keeps is 'lightest' and h2o\.semantics 'released_global'"):
        build_method("h2o", keeps="lightest", semantics="released_global")
    with pytest.raises(KVError, match=r"budget\.size is 20"):
        masked_entries(method, Budget(size=20, sink=2, window=2), 40)
