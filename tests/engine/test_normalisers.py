"""What exact attention tells of its rows: the output stays the same number, the mass comes out right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.attention import LayerCall
from kvbench.engine.prefill import layer_kv
from kvbench.kv import NORMALISERS


def call(
    heads: int, kv_heads: int, n: int, dim: int, dtype: torch.dtype = torch.float32
) -> LayerCall:
    generator = torch.Generator().manual_seed(n)
    query, key, value = (
        torch.randn(1, h, n, dim, generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    return LayerCall(0, query, key, value, dim**-0.5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "dim"),
    [(4, 4, 1, 8), (8, 2, 700, 32), (6, 3, 129, 5), (8, 1, 64, 64)],
)
def test_output_is_bit_by_bit_that_of_exact_and_mass_that_of_the_definition(
    heads: int, kv_heads: int, n: int, dim: int
) -> None:
    one = call(heads, kv_heads, n, dim)
    out, normalisers = one.exact_with_normalisers()
    assert torch.equal(out, one.exact())
    assert normalisers is not None
    keys = one.key.double().repeat_interleave(heads // kv_heads, 1)
    logits = one.query.double() @ keys.mT * one.scaling
    logits.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(normalisers.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    mass = layer_kv(one, 0, 1, None, normalisers).attention_mass()
    torch.testing.assert_close(mass.double(), logits.softmax(-1).sum(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changed", [{"softcap": 3.0}, {"sliding_window": 7}, {}])
def test_attention_of_other_forms_tells_nothing(changed: dict[str, float]) -> None:
    one = call(4, 2, 40, 8, torch.float32 if changed else torch.bfloat16)
    one = replace(one, **changed)
    out, normalisers = one.exact_with_normalisers()
    assert normalisers is None
    assert torch.equal(out, one.exact())


def test_a_layer_with_tensors_of_its_own_does_not_take_another_layers_normalisers() -> None:
    """A method makes a layer of this one (fewer tokens, other keys): what is known is not of it."""
    one = call(4, 2, 60, 8)
    _, normalisers = one.exact_with_normalisers()
    layer = layer_kv(one, 0, 1, None, normalisers)
    assert NORMALISERS in layer.shared
    other = replace(layer, keys=layer.keys.flip(2), values=layer.values.clone())
    alone = replace(other, shared={})
    assert torch.equal(other.attention_mass(), alone.attention_mass())
    assert not torch.allclose(other.attention_mass(), layer.attention_mass())
    withheld = replace(layer, queries=one.query[:, :, :-5], withheld=5)
    alone = replace(withheld, shared={})
    assert torch.equal(withheld.attention_mass(), alone.attention_mass())
