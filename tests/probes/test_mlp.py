"""Heavy neurons of MLPs: counts against the weights' own arithmetic, dropping against pruned weights."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from support.jobs import Echo, records_of
from support.probing import SYNTHETIC, probe_job, shipped
from support.tiny import tiny_model

from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.neurons import activation_counts, activations_of, mean_nll
from kvbench.kv import KVError
from kvbench.methods import build_method
from kvbench.probes.mlp import (
    Heavy,
    NeuronDropping,
    NeuronFrequency,
    NeuronOverlap,
    overlap,
)
from kvbench.report.build import build_report
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError

IDS = list(range(5, 45))
PARTS = {  # into the neurons, and out of them
    "llama": ("gate_proj", "down_proj"),
    "opt": ("fc1", "fc2"),
}


def ready(kind):
    model = tiny_model(kind)
    model.set_attn_implementation("kvbench")
    return model


def linears(model, name):
    return [m for path, m in model.named_modules() if path.endswith(f".{name}")]


@pytest.mark.parametrize("kind", list(PARTS))
def test_a_neuron_counts_where_what_goes_into_its_activation_is_positive(kind):
    model = ready(kind)
    into = linears(model, PARTS[kind][0])
    seen = []
    handles = [
        m.register_forward_hook(lambda _, __, out: seen.append((out.flatten(0, -2) > 0).sum(0)))
        for m in into
    ]
    counts, tokens = activation_counts(model, [IDS])
    for handle in handles:
        handle.remove()
    assert tokens == len(IDS)
    assert [len(c) for c in counts.values()] == [m.out_features for m in into]
    for (layer, count), wanted in zip(sorted(counts.items()), seen, strict=True):
        assert torch.equal(count, wanted), layer
        assert 0 < int(count.max()) <= tokens
    twice, both = activation_counts(model, [IDS, IDS])
    assert both == 2 * tokens
    assert torch.equal(twice[0], 2 * counts[0])
    assert not any(m._forward_hooks for m in activations_of(model).values()), "hooks are gone"


@pytest.mark.parametrize("kind", list(PARTS))
def test_dropping_neurons_is_pruning_what_they_write(kind):
    model = ready(kind)
    generator = torch.Generator().manual_seed(3)
    out = linears(model, PARTS[kind][1])
    dropped = {i: torch.rand(m.in_features, generator=generator) < 0.4 for i, m in enumerate(out)}
    whole = mean_nll(model, IDS, {})
    found = mean_nll(model, IDS, dropped)
    pruned = copy.deepcopy(model)
    for i, m in enumerate(linears(pruned, PARTS[kind][1])):
        m.weight.data[:, dropped[i]] = 0.0
    assert found == pytest.approx(mean_nll(pruned, IDS, {}), rel=1e-6)
    assert abs(found - whole) > 1e-4
    assert mean_nll(model, IDS, {}) == whole, "the model is what it was"
    model.set_attn_implementation("eager")
    own = model(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.detach()
    assert whole == pytest.approx(float(own), rel=1e-5)


def test_random_neurons_are_as_many_in_every_layer_and_others():
    counts = {0: torch.arange(100), 3: torch.arange(0, 200, 2)}
    heavy = Heavy(above=0.5).chosen(counts, 100, 0, "x")
    assert heavy[0].nonzero().flatten().tolist() == list(range(51, 100))
    drawn = Heavy(above=0.5, which="random").chosen(counts, 100, 0, "x")
    for layer, part in heavy.items():
        assert part.sum() == drawn[layer].sum()
        assert not torch.equal(part, drawn[layer])
    again = Heavy(above=0.5, which="random").chosen(counts, 100, 0, "x")
    assert torch.equal(again[3], drawn[3])


def test_overlap_is_the_jaccard_index_and_its_chance():
    one = torch.tensor([True, True, False, False])
    other = torch.tensor([True, False, True, False])
    found = overlap(one, other)
    assert found["score"] == pytest.approx(1 / 3)
    assert found["chance"] == pytest.approx(0.25 / 0.75)
    assert overlap(one, one)["score"] == 1.0
    none = torch.zeros(4, dtype=torch.bool)
    assert overlap(none, none)["score"] is None
    assert overlap(none, one)["score"] == 0.0


def test_what_has_no_mlp_of_its_own_is_refused():
    model = ready("llama")
    activations = activations_of(model)
    layers = model.model.layers
    layers[1].mlp.act_fn = activations[0]
    with pytest.raises(UnsupportedModel, match="has not one activation of its own in every layer"):
        activations_of(model)


def test_records_of_frequencies(tmp_path):
    probe = NeuronFrequency(ranks=(1, 16, 256), most_layers=2, num_prompts=2, prompts=Echo(count=2))
    job = probe_job(tmp_path, probe, {"heavy": Heavy()}, session=shipped())
    result = run_job(job)
    assert result.failed == 0
    rows = records_of(result)["heavy"]
    assert [row["example_id"] for row in rows[:4]] == [
        "e0/layer1/rank1", "e0/layer1/rank16", "e0/layer1/rank256", "e0/layer4/rank1",
    ]  # fmt: skip
    assert all(a["score"] >= b["score"] for a, b in zip(rows[::3], rows[1::3], strict=True))
    page = build_report(next(iter(result.folders.values())).parents[2]).page.read_text()
    assert "Power law y = C x^slope of share of tokens at which it is active" in page
    refused = run_job(replace(job, plan=replace(probe, ranks=(1, 999)), experiment="f"))
    row = records_of(refused)["heavy"][0]
    assert "task.ranks has 999 and layer 1 has 256 neurons" in row["error"]


def test_dropping_is_judged_on_other_prompts_than_it_is_counted_on(tmp_path):
    probe = NeuronDropping(calibration=2, num_prompts=4, prompts=Echo(count=5))
    methods = {
        "exact": build_method("exact"),
        "heavy": Heavy(),
        "none": Heavy(above=1.0),
        "random": Heavy(which="random"),
    }
    result = run_job(probe_job(tmp_path, probe, methods, session=shipped()))
    assert result.failed == 0
    records = records_of(result)
    assert [row["example_id"] for row in records["exact"]] == ["e2", "e3"]
    for whole, heavy, none, drawn in zip(*records.values(), strict=True):
        assert none["score"] == whole["score"]
        assert none["dropped"] == whole["dropped"] == 0.0
        assert 0 < heavy["dropped"] == drawn["dropped"] < 1
        assert heavy["score"] != whole["score"] != drawn["score"]
        assert heavy["perplexity"] == pytest.approx(math.exp(heavy["score"]))
    with pytest.raises(KVError, match=r"task.calibration is 5 and there are 4 prompts"):
        run_job(probe_job(tmp_path, replace(probe, calibration=5), methods, session=shipped()))


def test_overlap_of_texts_and_of_checkpoints(tmp_path):
    contents = {"a": Echo(count=1), "b": Echo(count=2, question="12345 67890 ")}
    probe = NeuronOverlap(contents=contents, num_prompts=1)
    methods = {"heavy": Heavy(), "random": Heavy(which="random")}
    result = run_job(probe_job(tmp_path, probe, methods, session=shipped()))
    records = records_of(result)
    assert [row["example_id"] for row in records["heavy"]] == [
        f"{pair}/layer{layer}" for pair in ("a/b", "b/a") for layer in range(1, 5)
    ]
    assert sum(r["score"] for r in records["heavy"]) > sum(r["score"] for r in records["random"])
    page = build_report(next(iter(result.folders.values())).parents[2]).page.read_text()
    assert "score by one and other" in page
    probe = NeuronOverlap(
        contents={"a": Echo(count=1)},
        checkpoints={"first": {}, "same": {"revision": None}, "random": {"random_weights": True}},
    )
    rows = records_of(
        run_job(probe_job(tmp_path, probe, {"heavy": Heavy()}, session=shipped(), experiment="c"))
    )["heavy"]
    by = {}
    for row in rows:
        by.setdefault((row["one"], row["other"]), []).append(row["score"])
    assert by["first", "same"] == [1.0] * 4
    assert max(by["first", "random"]) < 1.0


def test_what_cannot_be_met_is_refused():
    with pytest.raises(
        TaskError, match=r"task.contents has 1 kinds of text and task.checkpoints 0"
    ):
        NeuronOverlap(contents={"a": Echo()})
    with pytest.raises(TaskError, match=r"needs prompts; allowed: task.synthetic=null"):
        NeuronFrequency(synthetic=SYNTHETIC)
