"""lm-evaluation-harness on compressed caches: HFLM's numbers for exact, masked attention for others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import transformers as t
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support.encoders import tokenizer
from support.jobs import make_job, records_of
from support.paths import ROOT
from support.tiny import CONFIGS

from kvbench import compare
from kvbench.engine.model import ModelSpec
from kvbench.errors import UserError
from kvbench.lm_eval import KVBenchLM
from kvbench.lm_eval.scoring import truncated
from kvbench.lm_eval.task import HarnessTask
from kvbench.methods import build_method
from kvbench.run.job import Job
from kvbench.run.runner import run_job
from kvbench.run.session import Session

TEXT = "the cat sat on a mat and then they all went home because it was late in the day"
WORDS = TEXT.split(" ")
FOLDER = str(ROOT / "tests/data/lm_eval")
INVENTED = ["copa", "mathqa", "openbookqa", "piqa", "rte", "winogrande"]


def save_model(folder: Path, *, bos: bool) -> str:
    made = tokenizer(bos="<s>" if bos else "", eos="</s>", special=("<s>",))
    made.save_pretrained(folder)
    begin, end = made.convert_tokens_to_ids(["<s>", "</s>"])
    config = CONFIGS["llama"]()
    changes = {"max_position_embeddings": 256, "bos_token_id": begin, "eos_token_id": end}
    config.update({"vocab_size": len(made), **changes})
    torch.manual_seed(0)
    t.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no_bos"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), bos=request.param)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("saved"), bos=True)


def text(words: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def likelihoods(*pairs: tuple[str, str]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def hflm(folder: str) -> HFLM:
    return HFLM(folder, device="cpu", dtype="float32", logits_cache=False, batch_size=1)


LONG = text(60)
REQUESTS = likelihoods(
    (LONG, " the cat sat on a mat"),
    (LONG, " because"),
    (LONG + "  ", "late in the day"),
    ("", " the day"),
    ("", "</s> went home"),
    ("<s> it was", " late"),
    ("a", " mat"),
    (text(400, seed=1), " they all went home"),
    (text(30, seed=2), text(40, seed=3)),
)


def test_exact_is_hflm(folder):
    expected = hflm(folder).loglikelihood(REQUESTS, disable_tqdm=True)
    lm = KVBenchLM(folder, device="cpu", batch_size="1")
    ours = lm.loglikelihood(REQUESTS, disable_tqdm=True)
    order = random.Random(0).sample(range(len(REQUESTS)), len(REQUESTS))
    shuffled = lm.loglikelihood([REQUESTS[i] for i in order], disable_tqdm=True)
    for i, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
        assert mine[1] == theirs[1]
        assert shuffled[order.index(i)] == pytest.approx(mine, abs=1e-4)
    assert len(lm.records) == 2 * len(REQUESTS)


def test_exact_rolls_and_generates_as_hflm(folder):
    rolling = [Instance("loglikelihood_rolling", {}, (text(200, seed=4),), 0)]
    options = {"max_gen_toks": 12, "do_sample": False}
    given = ((text(30, seed=5), ["the"]), (text(90, seed=6), []), (text(400, seed=7), [" home"]))
    asked = [
        Instance("generate_until", {}, (words, {**options, "until": stop}), i)
        for i, (words, stop) in enumerate(given)
    ]
    theirs, ours = hflm(folder), KVBenchLM(folder, device="cpu", batch_size=2)
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-3
    )
    plain = theirs.generate_until(asked, disable_tqdm=True)
    assert ours.generate_until(asked) == plain
    alone = KVBenchLM(folder, device="cpu", batch_size=2, generation_config=False)
    alone.model.generation_config.repetition_penalty = 1.3
    assert alone.generate_until(asked) == plain, "the model's own logits"
    assert alone.get_model_info()["kvbench_generation_config"] is False
    for lm in (ours, theirs):  # the model's own, and what a task asks for
        lm.model.generation_config.repetition_penalty = 1.3
    for asks in ({}, {"no_repeat_ngram_size": 1}, {"repetition_penalty": 2.0}):
        for request in asked:
            request.arguments[1].update(asks)
        penalised = theirs.generate_until(asked, disable_tqdm=True)
        assert ours.generate_until(asked) == penalised != plain
    first = KVBenchLM(folder, method="snapkv", device="cpu", compress_after="prompt", batch_size=3)
    assert len(first.generate_until(asked)) == 3
    with pytest.raises(UserError, match="a likelihood is asked of the compressed one"):
        first.loglikelihood(REQUESTS[:1], disable_tqdm=True)
    with pytest.raises(
        UserError, match=r"protocol' .now compress_after; minus_last is all_but_last"
    ):
        KVBenchLM(folder, device="cpu", protocol="minus_last")


@pytest.mark.parametrize("protocol", ["all_but_last", "prompt"])
def test_a_generation_is_that_of_compare_under_either_protocol(folder, protocol):
    how: dict[str, Any] = {"sink": 4, "window": 4, "rate": 0.25, "compress_after": protocol}
    lm = KVBenchLM(folder, method="snapkv", device="cpu", **how)
    prompt, options = text(60, seed=5), {"max_gen_toks": 8, "do_sample": False, "until": []}
    (ours,) = lm.generate_until([Instance("generate_until", {}, (prompt, options), 0)])
    assert lm.tok_encode(prompt) == lm.tokenizer(prompt)["input_ids"]
    frame = compare(lm.model, lm.tokenizer, prompt, "snapkv", max_new_tokens=8, **how)
    assert frame.loc["snapkv", "text"] == ours


def masked(lm: Any, context: str, continuation: str, sink: int, window: int) -> float:
    """Log-likelihood by eager attention: rows from the last context token on see sink, window, and each
    other."""
    c, y = lm._encode_pair(context, continuation)
    ids = torch.tensor([[*c, *y[:-1]]])
    n, head = ids.shape[1], len(c) - 1
    mask = torch.full((n, n), float("-inf")).triu(1)
    mask[head:, sink : head - window] = float("-inf")
    model = lm._model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask[None, None]).logits[0, head:]
    model.set_attn_implementation("kvbench")
    return float(logits.log_softmax(-1).gather(1, torch.tensor(y)[:, None]).sum())


def test_streaming_llm_is_masked_attention(folder):
    lm = KVBenchLM(folder, method="streaming_llm", rate=0.25, device="cpu")
    pairs = [(text(150, seed=8), " the"), (text(150, seed=8), " cat sat on"), (LONG, " late")]
    ours = lm.loglikelihood(likelihoods(*pairs), disable_tqdm=True)
    exact = KVBenchLM(folder, device="cpu").loglikelihood(likelihoods(*pairs), disable_tqdm=True)
    for (context, continuation), (mine, _), (whole, _), record in zip(
        pairs, ours, exact, lm.records, strict=True
    ):
        head = record["compressed_tokens"]
        window = lm.budget.capacity(head) - 32
        if record["compressed"]:
            assert mine == pytest.approx(masked(lm, context, continuation, 32, window), abs=1e-4)
            assert abs(mine - whole) > 1e-3, "the first token is not for free"
        assert record["entries"]["max"] == lm.budget.capacity(head)
    assert 0 < lm.get_model_info()["kvbench_compressed_share"] <= 1


def test_draws_depend_on_the_context_alone(saved):
    lm = KVBenchLM(saved, "uniform", total_rate=0.1, sink=0, window=0, device="cpu", scoring="mean")
    one, two = likelihoods((LONG, " cat sat"), (text(50, seed=9), " home"))
    apart = [lm.loglikelihood([r], disable_tqdm=True)[0][0] for r in (two, one)]
    both = [logprob for logprob, _ in lm.loglikelihood([one, two], disable_tqdm=True)]
    assert both == pytest.approx(apart[::-1], abs=1e-5)
    assert lm.records[0]["ratio"] < 0.12


def harness_job(
    saved: str, tmp_path: Path, task: Any, methods: dict[str, Any], **changes: Any
) -> Job:
    session = Session(ModelSpec(name="tiny", path=saved), torch.device("cpu"), torch.float32)
    return make_job(tmp_path, methods, session=session, plan=task, task="lm_eval", **changes)


def test_our_side_gives_the_numbers_of_its_side(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER)  # its files are named as lying there
    task = HarnessTask(tasks=["rte"], include_path=FOLDER)
    methods = {name: build_method(name) for name in ("exact", "snapkv")}
    records = records_of(run_job(harness_job(saved, tmp_path, task, methods, limit=4)))
    manager = lm_eval.tasks.TaskManager(include_path=FOLDER, include_defaults=False)
    for name in methods:
        lm = KVBenchLM(saved, name, rate=0.25, sink=4, window=4, device="cpu")
        result = lm_eval.simple_evaluate(
            lm, tasks=["rte"], task_manager=manager, bootstrap_iters=0, log_samples=True, limit=4
        )
        assert result["config"]["kvbench_method"] == name
        theirs = sorted(result["samples"]["rte"], key=lambda sample: sample["doc_id"])
        for mine, sample in zip(records[name], theirs, strict=True):
            logprobs = [response[0] for response in sample["filtered_resps"]]
            assert mine["logprobs"] == pytest.approx(logprobs, abs=1e-4)
            assert (mine["score"], mine["acc_norm"]) == (sample["acc"], sample["acc_norm"])
            assert mine["contexts"] == 1
            assert mine["choices"] == 2
    assert records["snapkv"][0]["compressed"]
    assert records["snapkv"][0]["ratio"] < 0.5


def test_h2os_tasks_run_offline(saved, tmp_path):
    task = HarnessTask(tasks=INVENTED, include_path=FOLDER, num_fewshot=2, scoring="mean")
    job = harness_job(saved, tmp_path, task, {"h2o": build_method("h2o")}, limit=6)
    records = records_of(run_job(job))["h2o"]
    assert {r["dataset"] for r in records} == set(INVENTED)
    assert all(r["status"] == "ok" for r in records)
    assert next(r["contexts"] for r in records if r["dataset"] == "winogrande") == 2
    assert next(r["num_fewshot"] for r in records) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratee": 0.5}, "unknown key 'ratee'.*rate"),
        ({"compression_ratio": 0.5}, "did you mean 'total_rate', which is 1 - compression_ratio"),
        ({"pretrained": None}, "model_args has no pretrained; allowed: pretrained=<model>"),
        ({"method": "snapkv", "h2o.decode": "grow"}, "unknown key 'h2o.decode'"),
        ({"scoring": "max"}, r"allowed: 'sum' or 'mean'"),
        ({"method": "snapkvv"}, "snapkv"),
        ({"rate": 2}, "budget.rate is 2"),
        ({"tasks": ["copa"], "include_path": "/no/such"}, "a folder"),
        ({"tasks": ["copaa"]}, "'copaa' is unknown to lm-evaluation-harness.*; allowed: copa"),
        ({"tasks": ["copa"], "num_fewshot": 99}, "fewer examples"),
    ],
)
def test_refusals(saved, tmp_path, options, words):
    def begin() -> Any:
        if "tasks" not in options:
            return KVBenchLM(**{"pretrained": saved, **options})
        task = HarnessTask(**{"include_path": FOLDER, **options})
        return run_job(harness_job(saved, tmp_path, task, {"h2o": build_method("h2o")}))

    with pytest.raises(UserError, match=words):
        begin()


def test_options_of_a_method_and_what_no_request_may_be(saved):
    dotted = {"snapkv.kernel_size": 7}
    lm = KVBenchLM(saved, "snapkv", '{"pooling": "maxpool"}', device="cpu", **dotted)
    assert (lm.method.pooling, lm.method.kernel_size) == ("maxpool", 7)
    with pytest.raises(UserError, match="use_cache"):
        lm.set_cache_hook(None)
    with pytest.raises(UserError, match="would compress nothing"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (LONG,), 0)])
    beams = Instance("generate_until", {}, ("a", {"num_beams": 3}), 0)
    with pytest.raises(UserError, match=r"generation kwargs ask for beams .*; allowed: greedy"):
        lm.generate_until([beams])
    sampling = Instance("generate_until", {}, ("a", {"do_sample": True, "temperature": 1.0}), 0)
    with pytest.raises(UserError, match="greedy"):
        lm.generate_until([sampling])
    assert truncated((range(10), [1, 2]), 5) == ([6, 7, 8, 9], [1, 2])
    with pytest.raises(UserError, match="positions"):
        truncated(([1], range(6)), 5)
