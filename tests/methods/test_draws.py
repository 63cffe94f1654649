"""What methods draw at random: by Philox, under keys of their generator."""

from __future__ import annotations

from typing import Any

import torch
from support.jobs import SMALL
from support.kernels import generator
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.prefill import prefill
from kvbench.engine.row import Row, layer_generator
from kvbench.kernels.philox import philox
from kvbench.methods import build_method
from kvbench.methods._draws import place, places, uniforms

CPU = torch.device("cpu")


def test_draws_are_philox_under_a_key_of_the_generator() -> None:
    key = int(torch.randint(2**32, 2**62, (), generator=generator(3)))
    expected = philox(key, 1, 2, 5, dtype=torch.float32, device=CPU)
    going_on = generator(3)
    assert torch.equal(uniforms(going_on, CPU, 2, 5), expected)
    assert not torch.equal(uniforms(going_on, CPU, 2, 5), expected)
    copy = torch.Generator()
    copy.set_state(going_on.get_state())
    assert torch.equal(place(going_on, 2, 50, CPU), place(copy, 2, 50, CPU))


def test_places_are_a_fair_sample_without_replacement() -> None:
    """Each place of 40 is drawn 10 of 40 times, each pair as often as independence less one allows."""
    going_on, heads, n, count = generator(0), 8000, 40, 10
    taken_places = places(going_on, heads, n, count, CPU)[0]
    assert taken_places.shape == (heads, count)
    assert bool((taken_places.diff() > 0).all())
    taken = torch.zeros(heads, n).scatter_(1, taken_places, 1.0)
    share, wanted = taken.mean(0), count / n
    assert float((share - wanted).abs().max()) < 4 * (wanted * (1 - wanted) / heads) ** 0.5
    pairs = (taken.T @ taken / heads)[~torch.eye(n, dtype=torch.bool)]
    expected = wanted * (count - 1) / (n - 1)
    assert float((pairs - expected).abs().max()) < 5 * (expected * (1 - expected) / heads) ** 0.5


def test_draws_depend_on_seed_example_and_layer_only() -> None:
    """Not on the other methods of a job, nor on the order of methods and prompts."""
    model = tiny_model("llama", layers=2)
    model.set_attn_implementation("kvbench")

    def kept(names: list[str], examples: list[Any]) -> dict[str, Any]:
        found = {}
        for example in examples:
            rows = [Row(name, build_method(name), SMALL, 5, example, room=0) for name in names]
            for row in rows:
                row.compresses = True
            prefill(model, prompt_ids(90, seed=int(example)), rows)
            for row in rows:
                assert row.failure is None
                for layer, (cache,) in row.caches.items():
                    found[row.label, example, layer] = cache.positions.tolist()
        return found

    first = kept(["uniform", "balancekv", "subgen"], ["1", "2"])
    other = kept(["subgen", "h2o", "balancekv", "uniform"], ["2", "1"])
    assert {key: other[key] for key in first} == first
    assert first["uniform", "1", 0] != first["uniform", "1", 1]
    draws = {
        tuple(torch.rand(3, generator=layer_generator(*key)).tolist())
        for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    }
    assert len(draws) == 4
