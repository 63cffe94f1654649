"""What methods draw at random: the version of before, and the one that GPUs draw themselves."""

from __future__ import annotations

import pytest
import torch
from support.configs import composed
from support.jobs import SMALL
from support.method_layers import make_layer, run
from support.tiny import prompt_ids, tiny_model

import kvbench
from kvbench.cli.build import build_job
from kvbench.engine.fork import Fork
from kvbench.engine.loading import ModelSpec
from kvbench.engine.prefill import prefill
from kvbench.engine.tokenizer import load_tokenizer
from kvbench.engine.weights import load_model
from kvbench.errors import UserError
from kvbench.kernels.philox import philox
from kvbench.kv import Budget
from kvbench.methods import available_methods, build_method
from kvbench.methods.base import Method
from kvbench.methods.uniform import Uniform
from kvbench.run.runner import Job

CPU = torch.device("cpu")
BUDGET = Budget(rate=0.25, sink=4, window=4)
DRAWING = ("uniform", "subgen", "subgen_streaming", "balancekv", "balancekv_needle", "wildcat")
OTHERWISE = {
    "balancekv_streaming": "an algorithm of the CPU, which seeds a generator for each of its structures",
    "kvpress": "that package's own code draws, from torch's generator",
}
"""Methods that draw, in one version."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_method_that_draws_is_known():
    drawing = set()
    for name in available_methods():
        try:
            method, state = build_method(name), generator().get_state()
            after = generator()
            method.compress(make_layer(80), BUDGET, after)
        except (UserError, NotImplementedError):  # a package, a model that is not there
            continue
        if not torch.equal(state, after.get_state()):
            drawing.add(name)
    assert drawing - OTHERWISE.keys() == set(DRAWING)
    assert all(build_method(name).draws_as("v2") == {"draws": "v2"} for name in DRAWING)
    assert not any(build_method(name).draws_as("v2") for name in drawing & OTHERWISE.keys())


@pytest.mark.parametrize("name", DRAWING)
def test_nothing_said_is_the_version_of_before(name):
    of = {
        draws: run(build_method(name, draws=draws), make_layer(300), BUDGET).positions
        for draws in (None, "v1", "v2")
    }
    assert torch.equal(of[None], of["v1"])
    assert not torch.equal(of["v1"], of["v2"])


def test_v1_is_what_torch_draws():
    method = build_method("uniform")
    assert torch.equal(
        method.uniforms(generator(3), CPU, 2, 5), torch.rand(1, 2, 5, generator=generator(3))
    )
    draws = torch.rand(1, 2, 50, generator=generator(3), dtype=torch.float64)
    best = draws.topk(20).indices.sort().values
    assert torch.equal(method.places(generator(3), 2, 50, 20, CPU), best)
    one = torch.rand(1, 2, generator=generator(3), dtype=torch.float64)
    assert torch.equal(method.place(generator(3), 2, 50, CPU), (one * 50).long())


def test_v2_is_philox_under_a_key_of_the_generator():
    method = build_method("uniform", draws="v2")
    key = int(torch.randint(2**32, 2**62, (), generator=generator(3)))
    expected = philox(key, 1, 2, 5, dtype=torch.float32, device=CPU)
    going_on = generator(3)
    assert torch.equal(method.uniforms(going_on, CPU, 2, 5), expected)
    assert not torch.equal(method.uniforms(going_on, CPU, 2, 5), expected)
    copy = torch.Generator()
    copy.set_state(going_on.get_state())
    assert torch.equal(method.place(going_on, 2, 50, CPU), method.place(copy, 2, 50, CPU))


def test_a_halved_subset_is_drawn_alike():
    subset, coin = build_method("uniform", scope="subset"), build_method("balancekv", gamma=0.0)
    for draws in ("v1", "v2"):
        found, expected = (run(m.drawing(draws), make_layer(300), BUDGET) for m in (subset, coin))
        assert torch.equal(found.positions, expected.positions)


@pytest.mark.parametrize("draws", ["v1", "v2"])
def test_places_are_a_fair_sample_without_replacement(draws):
    """Each place of 40 is drawn 10 of 40 times, each pair as often as independence less one allows."""
    method, going_on, heads, n, count = (
        build_method("uniform", draws=draws),
        generator(),
        8000,
        40,
        10,
    )
    places = method.places(going_on, heads, n, count, CPU)[0]
    assert places.shape == (heads, count)
    assert bool((places.diff() > 0).all())
    taken = torch.zeros(heads, n).scatter_(1, places, 1.0)
    share, wanted = taken.mean(0), count / n
    assert float((share - wanted).abs().max()) < 4 * (wanted * (1 - wanted) / heads) ** 0.5
    together = taken.T @ taken / heads
    pairs = together[~torch.eye(n, dtype=torch.bool)]
    expected = wanted * (count - 1) / (n - 1)
    assert float((pairs - expected).abs().max()) < 5 * (expected * (1 - expected) / heads) ** 0.5
    one = torch.cat([method.place(going_on, heads, n, CPU).flatten() for _ in range(5)])
    counts = torch.bincount(one, minlength=n).double()
    assert len(counts) == n
    assert 15 < float((counts - counts.mean()).square().sum() / counts.mean()) < 75  # 39 degrees


@pytest.mark.parametrize("draws", ["v1", "v2"])
def test_draws_depend_on_seed_example_and_layer_only(draws):
    """Not on the other methods of a job, nor on the order of methods and prompts."""
    model = tiny_model("llama", layers=2)
    model.set_attn_implementation("kvbench")

    def kept(names, examples):
        found = {}
        for example in examples:
            forks = [
                Fork(name, build_method(name, **({"draws": draws} if name in DRAWING else {})),
                     SMALL, 5, example, room=0)
                for name in names
            ]  # fmt: skip
            for fork in forks:
                fork.compressed = True
            prefill(model, prompt_ids(90, seed=int(example)), forks)
            for fork in forks:
                assert fork.failure is None
                for layer, cache in fork.layers.items():
                    found[fork.label, example, layer] = cache.positions.tolist()
        return found

    first = kept(["uniform", "balancekv", "subgen"], ["1", "2"])
    other = kept(["subgen", "h2o", "balancekv", "uniform"], ["2", "1"])
    assert {key: other[key] for key in first} == first
    assert first["uniform", "1", 0] != first["uniform", "1", 1]


# --- jobs and names -------------------------------------------------------------------------------


def job_of(*overrides: str) -> Job:
    return build_job(composed(*overrides, "task_label=t", "device=cpu"))


def test_a_job_draws_anew_unless_it_says_otherwise():
    labels = "method=[exact,snapkv,h2o,uniform,balancekv_released,subgen_streaming,recompress]"
    more = ["methods.recompress.of=uniform", "+methods.recompress.options.weighted=false"]
    new, old = (job_of(labels, *more, *said) for said in ([], ["draws=v1"]))
    drawing = {"uniform", "balancekv_released", "subgen_streaming", "recompress"}
    assert new.methods["uniform"][0].draws == "v2"
    assert new.methods["recompress"][0].options == {"weighted": False, "draws": "v2"}
    assert old.methods["uniform"][0].draws is None
    assert old.methods["recompress"][0].options == {"weighted": False}
    for label in new.methods:
        same = new.folder(label) == old.folder(label)
        assert same == (label not in drawing), label
    assert old.identity("uniform")["method"]["draws"] is None
    assert new.identity("uniform")["method"]["draws"] == "v2"


def test_a_method_that_says_how_it_draws_is_left_alone():
    job = job_of("method=[uniform]", "methods.uniform.draws=v2", "draws=v1")
    assert job.methods["uniform"][0].draws == "v2"
    with pytest.raises(UserError, match="draws is 'v3'; allowed: v1, v2"):
        job_of("draws=v3")


def test_a_method_of_somebody_else_has_torchs_generator_to_draw_from():
    class Mine(Method):
        pass

    assert Mine().draws_as("v2") == {}
    mine = Mine()
    assert mine.drawing("v2") is mine


@pytest.mark.parametrize("given", ["uniform", Uniform()])
def test_python_draws_as_a_new_job(given):
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")
    model, tokenizer = load_model(spec, device=CPU, dtype=torch.float32), load_tokenizer(spec)
    text = " ".join(map(str, range(60)))

    def kept(method, **options):
        frame = kvbench.kept(model, tokenizer, text, method, sink=4, window=4, **options)
        return frame["position"].tolist()

    assert kept(given) == kept("uniform", draws="v2") == kept(Uniform(draws="v2"))
    assert kept(given) != kept("uniform", draws="v1")
