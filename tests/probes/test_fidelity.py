"""Fidelity: golden numbers, whole-pass masks as brute force, and the off-by-one that would hide it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.asking import teacher_forced
from support.golden import golden_model
from support.jobs import Echo, records_of
from support.paths import GOLDEN
from support.probing import probe_job
from support.tables import group_of
from support.tiny import Broken, prompt_ids, tiny_model
from torch import Tensor

from kvbench.engine.answer import NonFiniteLogits
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.ask import read, score
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.probes import fidelity
from kvbench.probes.fidelity import FidelityProbe
from kvbench.report.frame import scores
from kvbench.report.tables import fidelity_table, score_table
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError
from kvbench.tasks.text import RunningText


@dataclass(frozen=True, kw_only=True)
class Kept(Method):
    kept: tuple = ()

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return gather_entries(layer, torch.tensor([self.kept[layer.layer_index]]))


def test_golden():
    golden = json.loads((GOLDEN / "fidelity.json").read_text())
    model = golden_model(golden)
    model.set_attn_implementation("kvbench")
    for case in golden["cases"]:
        sink, window = case["sink"], case["window"]
        size = Budget(size=sink + window, sink=sink, window=window - 1)
        kept = case["methods"]["kept_by_head"]["kept"]
        most = max(sink + window + 1, *(len(head) for layer in kept for head in layer))
        methods = {
            "streaming": (build_method("streaming_llm", decode="grow"), size),
            "kept_by_head": (Kept(kept=kept), Budget(size=most, sink=sink, window=window)),
        }
        results = teacher_forced(model, case["prompt_ids"], case["continuation"], methods)
        for label, result in results.items():
            expected = case["methods"][label]
            assert result.failure is None
            assert result.agree == expected["agree"]
            assert result.kl == pytest.approx(expected["kl"], abs=2e-5)
            for name in ("nll", "nll_exact", "difference"):
                assert getattr(result, name) == pytest.approx(expected[name], abs=2e-4)


def brute_force(model: Any, ids: list[int], continuation: list[int], hidden: Any) -> Tensor:
    """Logits of the rows that count, from one pass of eager attention in which rows from the last
    prompt token on do not see the positions `hidden`."""
    n, m = len(ids), len(continuation)
    tokens = torch.tensor([[*ids, *continuation[:-1]]])
    mask = torch.full((n + m - 1, n + m - 1), float("-inf")).triu(1)
    for j in hidden:
        mask[n - 1 :, j] = float("-inf")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask[None, None]).logits[0, n - 1 :]


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_brute_force(architecture):
    model, ids, continuation = tiny_model(architecture), prompt_ids(48), prompt_ids(9, seed=5)
    exact = brute_force(model, ids, continuation, []).log_softmax(-1)
    other = brute_force(model, ids, continuation, range(4, 37)).log_softmax(-1)
    kl = (exact.exp() * (exact - other)).sum(-1)
    y = torch.tensor(continuation)[:, None]
    methods = {
        "streaming": (build_method("streaming_llm"), Budget(size=14, sink=4, window=9)),
        "exact": (build_method("exact"), Budget()),
    }
    results = teacher_forced(model, ids, continuation, methods)
    streaming = results["streaming"]
    assert streaming.kl == pytest.approx(kl.tolist(), abs=2e-5)
    assert streaming.nll == pytest.approx((-other.gather(1, y))[:, 0].tolist(), abs=1e-4)
    assert streaming.agree == (exact.argmax(-1) == other.argmax(-1)).long().tolist()
    assert streaming.kl[0] > 1e-3, "the first token is compared, too"
    assert streaming.cost.entries == {"mean": 14.0, "max": 14}
    assert results["exact"].nll == pytest.approx((-exact.gather(1, y))[:, 0].tolist(), abs=1e-5)
    assert max(results["exact"].kl) < 1e-6


@pytest.mark.parametrize(
    "quantize",
    [
        None,
        {"bits": 4, "group_size": 8},
        {"bits": 4, "group_size": 8, "keys": "entry"},
        {"scheme": "turboquant", "bits": 2},
        {"scheme": "qjl", "group": 4, "buffer": 4, "value_group": 4, "outliers": 1},
    ],
)
def test_chunks_bound_the_logits_and_change_no_score(monkeypatch, quantize):
    """A token attends to the packed entries of those before it, however many are fed in one pass."""
    model, ids, continuation = tiny_model("llama"), prompt_ids(30), prompt_ids(17, seed=3)
    uniform = build_method("uniform", quantize=quantize)
    methods = {"uniform": (uniform, Budget(size=12, sink=2, window=2))}
    at_once = teacher_forced(model, ids, continuation, methods)["uniform"]
    assert at_once.failure is None
    rows = []
    model.lm_head.register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[:2].numel()))
    monkeypatch.setattr("kvbench.engine.ask.CHUNK_LOGITS", 97 * 2 * 5)
    in_chunks = teacher_forced(model, ids, continuation, methods)["uniform"]
    assert max(rows) == 10
    assert in_chunks.kl == pytest.approx(at_once.kl, abs=1e-5)


def test_an_infinite_divergence_is_a_failure(monkeypatch):
    model, ids = tiny_model("llama"), prompt_ids(40)
    size = Budget(size=12, sink=2, window=2)
    divergence = fidelity.divergence

    def infinite_at_the_second_token(exact: Tensor, other: Tensor) -> Tensor:
        return divergence(exact, other) + torch.tensor([0, math.inf])

    monkeypatch.setattr(fidelity, "divergence", infinite_at_the_second_token)
    results = teacher_forced(model, ids, [5, 6], {"uniform": (build_method("uniform"), size)})
    assert "token 2" in str(results["uniform"].failure)


def test_several_continuations_share_a_prefill_and_one_failure_stops_no_other():
    model, ids = tiny_model("llama"), prompt_ids(50)
    answers = [prompt_ids(k, seed=k) for k in (1, 4, 3)]
    size = Budget(size=16, sink=4, window=4)
    methods = {
        "h2o": (build_method("h2o"), size),
        "snapkv": (build_method("snapkv", quantize={"bits": 4, "group_size": 8}), size),
        "broken": (Broken(), size),
    }
    passes = []
    with kvbench_attention_on(model):
        reading = read(model, ids, methods, seed=0, name="x", held_back=1, room=4)
        model.model.register_forward_pre_hook(lambda *_: passes.append(1))
        scores = score(model, reading, answers)
    assert len(passes) == 1, "six rows, one batch"
    assert [str(scored.failure)[:13] for scored in scores["broken"]] == ["out of memory"] * 3
    for label in ("h2o", "snapkv"):
        for tokens, scored in zip(answers, scores[label], strict=True):
            alone = teacher_forced(model, ids, tokens, {label: methods[label]})[label]
            assert scored.logprobs == pytest.approx([-x for x in alone.nll], abs=1e-5)
            assert scored.greedy == [t == y for t, y in zip(alone.top, tokens, strict=True)]


def test_a_continuation_whose_logits_are_no_numbers_fails():
    model, ids = tiny_model("llama"), prompt_ids(20)
    model.lm_head.weight.data[3] = math.nan
    methods = {"snapkv": (build_method("snapkv"), Budget(size=12, sink=2, window=2))}
    with kvbench_attention_on(model):
        reading = read(model, ids, methods, seed=0, name="x", held_back=1, room=2)
        (scored,) = score(model, reading, [[5, 6]])["snapkv"]
    assert isinstance(scored.failure, NonFiniteLogits)
    assert scored.logprobs == []


def test_records_hold_the_definition(tmp_path):
    methods = {name: build_method(name) for name in ("exact", "snapkv", "h2o")}
    probe = FidelityProbe(prompts=Echo(count=2), tokens=5, num_prompts=2, rates=(0.5, 0.25))
    result = run_job(probe_job(tmp_path, probe, methods))
    assert result.failed == 0
    records = records_of(result)
    assert [record["example_id"] for record in records["h2o"]] == [
        f"e{i}/rate{rate}" for i in range(2) for rate in (0.5, 0.25)
    ]
    for record in records["h2o"]:
        kl = record["per_token"]["kl"]
        assert len(kl) == record["new_tokens"] == len(record["continuation_ids"]) == 5
        assert record["score"] == pytest.approx(sum(kl) / 5, rel=1e-4)
        assert record["tokens 3–4"] == pytest.approx(sum(kl[2:4]) / 2, rel=1e-4)
        assert record["compressed_tokens"] == record["prompt_tokens"] - 1
        assert record["perplexity_ratio"] == pytest.approx(math.exp(record["difference"]))
        check_first_difference(record)
    for record in records["exact"]:
        assert record["score"] < 1e-6
        check_first_difference(record)


def test_a_prompt_that_fails_whole_is_missing_at_every_rate(tmp_path, monkeypatch):
    methods = {name: build_method(name) for name in ("exact", "snapkv")}
    probe = FidelityProbe(prompts=Echo(count=3), tokens=2, num_prompts=3, rates=(0.5, 0.25))
    real = fidelity.fidelities_of

    def fails_once(model: Any, reading: Any, continuation: Any) -> Any:
        if reading.n == 64 + 8 + len(Echo().question) - 1:  # the second prompt
            raise torch.OutOfMemoryError("out of memory")
        return real(model, reading, continuation)

    monkeypatch.setattr(fidelity, "fidelities_of", fails_once)
    result = run_job(probe_job(tmp_path, probe, methods))
    assert result.failed == 2 * 2
    group = group_of(result.folders["exact"].parents[2])
    by_rate = scores(group, "rate")
    assert set(by_rate["failures"]) == {"1 oom"}
    assert set(by_rate["expected"]) == {3}
    assert set(fidelity_table(group).frame["compressed"]) == {"0/2", "2/2"}
    assert any("over 2 independent units" in note for note in score_table(group).notes)


def check_first_difference(record: dict[str, Any]) -> None:
    """Check `diverges_at`, which counts from 1 and is the place of the first token that is not the exact
    model's."""
    agree = record["per_token"]["agree"]
    assert record["agreement"] == pytest.approx(sum(agree) / len(agree))
    assert record["diverges_at"] == (agree.index(0) + 1 if 0 in agree else None)


def test_running_text_contexts_and_given_answers(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox " * 20)
    prompts = RunningText(files=str(tmp_path / "*.txt"), tokens=60, max_new_tokens=6)
    methods = {"uniform": build_method("uniform")}
    text = (tmp_path / "a.txt").read_text()
    probe = FidelityProbe(prompts=prompts, tokens=6, continuation="given")
    records = records_of(run_job(probe_job(tmp_path, probe, methods, task="text")))["uniform"]
    assert [record["example_id"] for record in records] == [f"a.txt/{60 * k}" for k in range(6)]
    assert records[1]["answers"] == [text[120:126]]
    probe = FidelityProbe(prompts=Echo(count=1), tokens=4, continuation="given")
    job = probe_job(tmp_path, probe, methods, task="context", compress_after="context")
    (record,) = records_of(run_job(job))["uniform"]
    assert record["compressed_tokens"] == record["prompt_tokens"] - len(Echo().question)
    assert record["answers"] == ["a"]


def test_refusals(tmp_path):
    with pytest.raises(TaskError, match=r"allowed: 'greedy' or 'given'"):
        FidelityProbe(prompts=Echo(), continuation="own")
    probe = FidelityProbe(prompts=Echo(count=1))
    job = probe_job(tmp_path, probe, {"uniform": build_method("uniform")})
    job.session.__dict__["encoder"] = replace(job.session.encoder, max_positions=30)
    with pytest.raises(KVError, match="the model 30 positions"):
        run_job(job)
    methods = {"uniform": build_method("uniform")}
    probe = FidelityProbe(prompts=Echo(count=1, question=""))
    job = probe_job(tmp_path, probe, methods, task="no question", compress_after="context")
    with pytest.raises(KVError, match="prompt 'e0' has no question; allowed: all_but_last"):
        run_job(job)
