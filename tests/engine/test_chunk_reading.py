"""Many tokens at once through a full cache that evicts: what one token after the other gives."""

from __future__ import annotations

import pytest
import torch
from support.attention import of_one_row
from support.interpreted import HAVE_TRITON

from kvbench.engine import chunk_reading
from kvbench.engine.cache import LayerCache
from kvbench.engine.chunk_reading import read_chunk, rule_in_turn
from kvbench.kv import CompressedKV
from kvbench.methods import build_method
from kvbench.methods.base import Method

HEADS, KV_HEADS, DIM = 6, 2, 16
RULES = {
    "h2o": {},
    "h2o heavy only": {"heavy_fraction": 1.0},
    "h2o local only": {"heavy_fraction": 0.0},
    "h2o lightest": {"keeps": "lightest"},
    "streaming_llm": {"decode": "evict"},
    "local": {"decode": "evict"},
}


def method_of(name: str) -> Method:
    return build_method(name.split()[0], **RULES[name])


def full_cache(name: str, count: int, *, sink: int, weighted: bool, seed: int = 0) -> LayerCache:
    """Of tokens with gaps between them, the last one just before position 3 * count."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, KV_HEADS, count, DIM, generator=generator)
    gaps = torch.randperm(3 * count - 1, generator=generator)[: count - 1].sort().values
    places = torch.cat([gaps, torch.tensor([3 * count - 1])]).expand(1, KV_HEADS, -1).clone()
    places[..., :sink] = torch.arange(min(sink, count))
    held = CompressedKV(
        keys,
        values,
        torch.randn(1, KV_HEADS, count, generator=generator) if weighted else None,
        places,
        torch.rand(1, KV_HEADS, count, generator=generator) if name.startswith("h2o") else None,
    )
    return LayerCache(held, 2, method_of(name), capacity=count, sink=sink)


def new_tokens(count: int, tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(HEADS, tokens, DIM, generator=generator)
    key, value = torch.randn(2, KV_HEADS, tokens, DIM, generator=generator)
    return query, key, value, torch.arange(3 * count, 3 * count + tokens)


def assert_same(one: LayerCache, other: LayerCache) -> None:
    n = one.length
    assert other.length == n
    assert torch.equal(one.positions[:, :n], other.positions[:, :n]), "slot by slot"
    for name in ("keys", "values", "log_weights", "scores"):
        part, twin = getattr(one, name), getattr(other, name)
        assert (part is None) == (twin is None)
        if part is not None:
            torch.testing.assert_close(part[:, :n], twin[:, :n], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize(
    ("count", "tokens", "sink", "weighted", "softcap"),
    [
        (20, 7, 3, False, None),
        (9, 30, 4, True, None),
        (5, 12, 5, False, 2.0),
        (33, 2, 0, True, 3.0),
    ],
)
def test_a_chunk_is_what_its_tokens_are_one_by_one(
    name: str,
    count: int,
    tokens: int,
    sink: int,
    weighted: bool,
    softcap: float | None,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels == "triton" and (not HAVE_TRITON or not name.startswith("h2o")):
        pytest.skip("no Triton, or no kernel in it")
    monkeypatch.setenv("KVBENCH_KERNELS", kernels)
    walked = full_cache(name, count, sink=sink, weighted=weighted)
    read = walked.clone()
    *new, at = new_tokens(count, tokens)
    given = of_one_row(*new, DIM**-0.5, softcap), at
    want = walked.step(*given)
    rule = rule_in_turn(read)
    assert rule is not None
    got = read_chunk(read, rule, *given)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_same(read, walked)


@pytest.mark.parametrize("name", list(RULES))
def test_how_many_logits_exist_at_once_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (full_cache(name, 12, sink=2, weighted=False) for _ in range(2))
    (*new, at), rule = new_tokens(12, 40), rule_in_turn(whole)
    assert rule is not None
    given = of_one_row(*new, DIM**-0.5), at
    want = read_chunk(whole, rule, *given)
    monkeypatch.setattr(chunk_reading, "LOGITS", 7 * HEADS * 13)
    got = read_chunk(parts, rule, *given)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_same(parts, whole)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_entries_that_received_the_same_leave_in_the_order_of_the_cache(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of zeros: every entry receives 1/c, so that the slot decides."""
    if kernels == "triton" and not HAVE_TRITON:
        pytest.skip("no Triton")
    monkeypatch.setenv("KVBENCH_KERNELS", kernels)
    walked = full_cache("h2o", 16, sink=0, weighted=False)
    walked.keys.zero_()
    assert walked.scores is not None
    walked.scores[:, :16] = 4.0
    read = walked.clone()
    query, key, value, at = new_tokens(16, 21)
    given = of_one_row(query, torch.zeros_like(key), value, 1.0), at
    walked.step(*given)
    rule = rule_in_turn(read)
    assert rule is not None
    read_chunk(read, rule, *given)
    assert_same(read, walked)


def test_what_cannot_be_read_at_once_is_walked() -> None:
    class Own(type(build_method("h2o"))):  # type: ignore[misc]
        def evict(self, held, attention):  # type: ignore[no-untyped-def]
            return super().evict(held, attention)

    cache = full_cache("h2o", 8, sink=0, weighted=False)
    assert rule_in_turn(cache) is not None
    cache.granted = 9
    assert rule_in_turn(cache) is None, "not full yet"
    cache.granted = 8
    cache.method = Own()
    assert rule_in_turn(cache) is None, "an evict of its own"
