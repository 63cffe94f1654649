"""Models spread over devices give the tokens of the same model on one device.

Without a GPU the second device is the disk: accelerate brings a layer's weights in as the layer is
needed. Between two passes they are nowhere (on "meta"), so nothing may ask the model where it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.fork import Fork
from kvbench.engine.generate import Generation, run_forks
from kvbench.engine.loading import ModelError, ModelSpec, load_model
from kvbench.engine.prefill import capture_layers, input_device
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method
from kvbench.run.runner import run_job

SMALL = Budget(rate=0.25, sink=4, window=4)
NAMES = (
    "exact",
    "balancekv",
    "h2o",
    "snapkv",
    "pyramidkv",
    "subgen",
    "spatten",
    "balancekv_needle",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


def load(folder: Path, **placement: Any) -> Any:
    spec = ModelSpec(name="tiny", path=str(folder), **placement)
    return load_model(spec, device=torch.device("cpu"), dtype=torch.float32)


def halves(first: str, second: str) -> dict[str, str]:
    """A device map with the embedding and two of four layers on `first`, the rest on `second`."""
    layers = {f"model.layers.{i}": first if i < 2 else second for i in range(4)}
    ends = {"model.embed_tokens": first, "model.norm": second, "lm_head": second}
    return {**layers, **ends, "model.rotary_emb": first}


def generations(model: Any, **options: Any) -> dict[str, Generation]:
    methods = {name: (build_method(name), SMALL) for name in options.pop("names", NAMES)}
    ids = prompt_ids(96)
    return run_forks(
        model, ids[:80], ids[80:], methods, Stopping(12), seed=3, example_id="x", **options
    )


def told(results: dict[str, Generation]) -> dict[str, Any]:
    return {
        label: (r.failure, r.tokens, r.entries, r.cache_bytes, r.exact_bytes)
        for label, r in results.items()
    }


MAPS = {
    "cpu, then disk": {"device_map": halves("cpu", "disk")},
    "disk, then cpu": {"device_map": halves("disk", "cpu")},
    "auto": {"device_map": "auto", "max_memory": {"cpu": "300KB"}},
}


@pytest.mark.parametrize("placement", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_tokens_are_those_of_one_device(folder, placement, compress_after):
    spread = load(folder, **placement)
    assert set(spread.hf_device_map.values()) == {"cpu", "disk"}
    assert any(weight.is_meta for weight in spread.parameters()), "nothing is offloaded"
    assert input_device(spread) == torch.device("cpu")
    expected = told(generations(load(folder), compress_after=compress_after))
    assert all(failure is None for failure, *_ in expected.values())
    assert len({str(tokens) for _, tokens, *_ in expected.values()}) > 2, "methods must differ"
    assert told(generations(spread, compress_after=compress_after)) == expected


def test_probing_layers_works_on_a_spread_model(folder):
    whole, spread = load(folder), load(folder, **MAPS["disk, then cpu"])
    ids = prompt_ids(40)
    expected, found = (capture_layers(model, ids, [0, 3]) for model in (whole, spread))
    for layer in (0, 3):
        torch.testing.assert_close(found[layer].keys, expected[layer].keys, rtol=0, atol=0)


def test_what_a_method_carries_follows_the_layers(folder):
    fork = Fork("spatten", build_method("spatten"), SMALL, 0, "x", room=1)
    fork.carried["noted"] = torch.ones(2)
    fork.carry_to(torch.device("meta"))
    assert fork.carried["noted"].is_meta


def test_where_a_model_lies_is_not_part_of_a_run(tmp_path, folder):
    from dataclasses import replace

    from support.jobs import make_job

    job = make_job(tmp_path)
    session = replace(job.session, spec=replace(job.spec, device_map="auto", max_memory={0: "1GB"}))
    session.__dict__.update(
        {k: v for k, v in job.session.__dict__.items() if k not in vars(session)}
    )
    spread = replace(job, session=session)
    assert [spread.folder(label) for label in job.methods] == [job.folder(x) for x in job.methods]
    assert run_job(job).written
    assert run_job(spread).written == 0


def test_a_device_map_that_cannot_be_is_one_line(folder):
    with pytest.raises(
        ModelError, match=r"device_map is 'balanced' and model.random_weights is true"
    ):
        ModelSpec(name="x", path="y", random_weights=True, device_map="balanced")
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        load(folder, device_map="autu")
    assert "\n" not in str(error.value)
