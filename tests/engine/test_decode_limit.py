"""A budget holds over the whole generation: prompts that do not fill it, and caches that fill up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.forward import reference
from support.tiny import prompt_ids, tiny_model

from kvbench.api import compress
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache
from kvbench.engine.decoding import DecodeState, _Counters
from kvbench.engine.fork import Fork
from kvbench.engine.generate import (
    Generation,
    Prompt,
    run_batch,
)
from kvbench.engine.prefill import PrefillState
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget, BudgetExceeded, KVError
from kvbench.methods import available_methods, build_method, method_class
from kvbench.methods.base import Held, Method
from kvbench.methods.streaming_llm import StreamingLLM

SINK = 4
ROOM = Budget(size=50, sink=SINK, window=4)
NEW = 60
EVICTING = ("h2o", "streaming_llm", "local")
PATHS = ("shared", "context", "batched", "live")


def evicting(name: str) -> Method:
    return build_method(name, decode="evict")


def test_no_method_that_evicts_is_forgotten_here() -> None:
    able = [n for n in available_methods() if "decode" in method_class(n).__dataclass_fields__]
    assert {name for name in able if evicting(name).evicts} == set(EVICTING)


@dataclass
class Seen:
    """What the caches of a generation did: the most entries after any token, and their ends."""

    lengths: list[int]
    ends: list[dict[int, list[list[int]]]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen([], [])

    def watch(name: str) -> None:
        real = getattr(LayerCache, name)

        def watched(cache: LayerCache, *given: Any) -> Any:
            out = real(cache, *given)
            found.lengths.append(int(cache.entries().max()))
            return out

        monkeypatch.setattr(LayerCache, name, watched)

    watch("_append_and_attend")
    watch("evict_one")
    move_on = _Counters.move_on

    def moved_on(counters: _Counters) -> None:
        move_on(counters)
        found.lengths.extend(counters.lengths.tolist())

    monkeypatch.setattr(_Counters, "move_on", moved_on)
    audit = Fork.audit

    def at_the_end(fork: Fork, *given: Any) -> None:
        found.ends.append(
            {
                layer: cache.positions[:, : cache.length].sort(-1).values.tolist()
                for layer, cache in fork.layers.items()
            }
        )
        audit(fork, *given)

    monkeypatch.setattr(Fork, "audit", at_the_end)
    return found


def generate(path: str, model: Any, n: int, method: Method, budget: Budget = ROOM) -> Any:
    """A generation of `NEW` tokens from an n-token prompt: what the path says of it."""
    ids = prompt_ids(n)
    if path == "live":
        share = {"rate": budget.rate, "sink": budget.sink, "window": budget.window}
        with compress(model, method, size=budget.size, **share) as session:
            model.generate(torch.tensor([ids]), min_new_tokens=NEW, max_new_tokens=NEW)
        return session.rows[0]
    split = n - 10
    prompts = [
        Prompt(ids[:split], ids[split:], {"m": (method, budget)}, Stopping(NEW), f"p{i}")
        for i in range(2 if path == "batched" else 1)
    ]
    if path == "batched":  # beside a prompt that is over the budget from the start
        longer = prompt_ids(90)
        prompts[1] = Prompt(longer, [], {"m": (method, budget)}, Stopping(NEW - 20), "longer")
    after = "context" if path == "context" else "prompt"
    answers = run_batch(model, prompts, seed=0, compress_after=after)
    result: Generation = answers[0]["m"]
    if result.failure is not None:
        raise result.failure
    return result


@pytest.mark.parametrize("n", [40, 49, 50, 51])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", EVICTING)
def test_a_cache_that_fills_up_evicts_from_there(name: str, path: str, n: int, seen: Seen) -> None:
    """40 prompt and 60 new tokens, 50 entries: never 51, and what is left is what the rule says."""
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    result = generate(path, model, n, evicting(name))
    assert max(seen.lengths) <= 50
    assert result.compressed  # at the end it is not what exact holds
    assert result.cache_bytes_end == 4 * 2 * 50 * (2 * 16 * 4 + (4 if name == "h2o" else 0))
    (end, *others) = seen.ends
    assert len(others) == (path == "batched")
    fed = n + NEW - 1  # the last token is not fed
    latest = {
        "local": [*range(fed - 50, fed)],
        "streaming_llm": [*range(SINK), *range(fed - 50 + SINK, fed)],
    }
    for rows in end.values():
        for held in rows:
            assert len(held) == 50
            assert held == latest.get(name, held)
            assert set(range(fed - 25, fed)) <= set(held)  # H2O's recent half


def h2o_by_hand(queries: torch.Tensor, keys: torch.Tensor, n: int) -> tuple[list[int], int]:
    """What one KV head holds after n prompt tokens and the others one by one, 50 entries at most; and
    how many of the prompt's left while decoding. Queries, keys: [heads of the group, tokens, dim]."""
    total, dim = keys.shape[1:]
    scores = [0.0] * total
    held, left = set(range(n)), 0

    def attend(t: int, among: list[int]) -> None:
        logits = (keys[:, among] @ queries[:, t, :, None])[..., 0] * dim**-0.5
        for position, mass in zip(among, logits.softmax(-1).mean(0).tolist(), strict=True):
            scores[position] += mass

    for t in range(n):
        attend(t, list(range(t + 1)))
    if n > 50:
        heavy = sorted(range(n - 25), key=lambda p: -scores[p])[:25]
        held = {*heavy, *range(n - 25, n)}
    for t in range(n, total):
        held.add(t)
        attend(t, sorted(held))
        if len(held) > 50:
            lightest = min(held - set(range(t - 24, t + 1)), key=lambda p: scores[p])
            held.remove(lightest)
            left += lightest < n
    return sorted(held), left


@pytest.mark.parametrize("n", [40, 50, 70])
def test_h2o_drops_what_has_received_least_whenever_it_fills(
    n: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer again in float64, entry by entry, from the queries and keys that it was given."""
    calls: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def watch(state: Any) -> None:
        real = state.attend

        def watched(self: Any, call: LayerCall) -> Any:
            calls.setdefault(call.layer, []).append((call.query[0].double(), call.key[0].double()))
            return real(self, call)

        monkeypatch.setattr(state, "attend", watched)

    for state in (PrefillState, DecodeState):
        watch(state)
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    generate("shared", model, n, evicting("h2o"))
    (end,) = seen.ends
    left = 0
    for layer, given in calls.items():
        queries = torch.cat([query for query, _ in given], 1)
        keys = torch.cat([key for _, key in given], 1).repeat_interleave(2, 0)  # to query heads
        assert keys.shape[1] == n + NEW - 1
        for head in range(2):
            group = slice(2 * head, 2 * head + 2)
            held, gone = h2o_by_hand(queries[group], keys[group], n)
            assert held == end[layer][head]
            left += gone
    assert left > 20  # else the order alone would do


@pytest.mark.parametrize("path", PATHS)
def test_the_audit_catches_a_method_that_forgets_to_evict(path: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Forgetful(StreamingLLM):
        decode: str = "evict"

        def evict(self, held: Held, attention: Any) -> tuple[None, None]:
            return None, None

    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    with pytest.raises((BudgetExceeded, RuntimeError)) as caught:
        generate(path, model, 40, Forgetful())
    if isinstance(caught.value, BudgetExceeded):
        assert (caught.value.expected, caught.value.found) == (50, 99)
    else:  # told at once where a kernel had written the entry in the place of one to leave
        assert "evicted nothing from a full cache of 50 entries" in str(caught.value)


@pytest.mark.parametrize("name", EVICTING)
def test_a_generation_that_never_fills_the_cache_is_exact_and_says_so(name: str) -> None:
    model = tiny_model("llama")
    ids = prompt_ids(40)
    expected = reference(model, ids, 11)
    model.set_attn_implementation("kvbench")
    methods = {"m": (evicting(name), ROOM)}
    (answer,) = run_batch(model, [Prompt(ids, [], methods, Stopping(11), "x")], seed=0)
    assert answer["m"].tokens == expected  # the last of 50 entries is the tenth new token's
    assert answer["m"].compressed is False
    assert answer["m"].failure is None


@pytest.mark.parametrize("name", EVICTING)
def test_a_rate_of_one_keeps_everything_to_the_end(name: str) -> None:
    model = tiny_model("llama")
    ids = prompt_ids(40)
    expected = reference(model, ids, 30)
    model.set_attn_implementation("kvbench")
    budgets = [Budget(rate=1.0), Budget(total_rate=1.0, sink=0, window=0)]
    for budget in budgets:
        methods = {"m": (evicting(name), budget)}
        (answer,) = run_batch(model, [Prompt(ids, [], methods, Stopping(30), "x")], seed=0)
        assert answer["m"].failure is None
        assert (answer["m"].tokens, answer["m"].compressed) == (expected, False)


def test_a_prompt_shorter_than_sink_and_window_fills_them(seen: Seen) -> None:
    """A rate's budget is sink, window and its share of the middle: of a short prompt, the first two."""
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    for name in EVICTING:
        seen.lengths.clear()
        generate("shared", model, 30, evicting(name), Budget(rate=0.25, sink=20, window=20))
        assert max(seen.lengths) == 40


def test_growing_methods_grow_as_before(seen: Seen) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    for name in (*EVICTING, "snapkv", "exact"):
        seen.lengths.clear()
        seen.ends.clear()
        options = {"decode": "grow"} if name in EVICTING else {}
        result = generate("shared", model, 40, build_method(name, **options))
        assert not result.compressed
        assert [len(rows[0]) for rows in seen.ends[0].values()] == [99] * 4


def test_a_share_of_the_prompt_is_the_share_in_all() -> None:
    budget = Budget(total_rate=0.2, sink=8, window=8)
    for n in (100, 512, 513, 7000):
        assert budget.capacity(n) == budget.limit(n) == round(0.2 * n)
        assert budget.middle_kept(n) == round(0.2 * n) - 16
        assert budget.rate_of(n) == (round(0.2 * n) - 16) / (n - 16)
    assert Budget(total_rate=0.2, sink=0, window=0).capacity(512) == 102
    assert Budget(rate=0.2).capacity(512) == 64 + 90  # 30 per cent of the prompt
    assert budget.with_share(0.5).capacity(100) == 50
    assert Budget().with_share(0.5).capacity(100) == 64 + 18
    assert Budget(total_rate=1.0).capacity(70) == 70


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"total_rate": 0.0}, r"budget.total_rate is 0.0; allowed: a number in \(0, 1\]"),
        ({"total_rate": 1.5}, r"budget.total_rate is 1.5; allowed: a number in \(0, 1\]"),
        (
            {"total_rate": 0.2, "rate": 0.5},
            "budget.total_rate is 0.2 and budget.rate is 0.5; allowed: one of",
        ),
        (
            {"total_rate": 0.2, "size": 100},
            "budget.total_rate is 0.2 and budget.size is 100; allowed: one of",
        ),
    ],
)
def test_a_budget_names_one_share(given: dict[str, Any], told: str) -> None:
    with pytest.raises(KVError, match=told):
        Budget(**given)


def test_a_share_below_sink_and_window_is_refused() -> None:
    with pytest.raises(KVError, match=r"0.2 of a prompt of 100 tokens is 20 entries; allowed: at"):
        Budget(total_rate=0.2).capacity(100)
    with pytest.raises(KVError, match=r"budget\.size is 100, so there is no rate to vary"):
        Budget(size=100).with_share(0.2)
