"""LongBench: prompts of the original, data that are refused in one line, the tokens and answers of the
benchmark's and of BalanceKV's code."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.paths import DATA, write_lines
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvbench.engine.model_spec import ModelError, ModelSpec, local_path
from kvbench.engine.stopping import Stopping
from kvbench.engine.tokenizer import prompt_encoder
from kvbench.prompts import PromptEncoder
from kvbench.tasks import longbench
from kvbench.tasks.base import TaskError
from kvbench.tasks.longbench import (
    DATASETS,
    E_DATASETS,
    PROTOCOLS,
    LongBench,
    fill,
    prompt_template,
    rows_of,
    source_of,
    truncate_middle,
)

# templates and data


def test_every_template_is_the_originals(shared_file: Callable[[str], Path]) -> None:
    expected = json.loads(shared_file("golden/longbench_prompt_sha256.json").read_text())
    assert set(expected) == set(DATASETS)
    for name, entry in expected.items():
        assert entry["sha256"].startswith(DATASETS[name].sha256)
        assert entry["max_new_tokens"] == DATASETS[name].new_tokens
        assert len(prompt_template(name)) == entry["n_chars"]  # its hash is checked


def test_a_template_that_is_not_the_original_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DATASETS:
        assert "{context}" in prompt_template(name), "as it is installed, its hash is right"
    prompt_template.cache_clear()
    monkeypatch.setattr(longbench, "_template_of_lm_eval", lambda name: "Read {context}\n{input}")
    with pytest.raises(TaskError, match="template of samsum in the installed lm-eval is not"):
        prompt_template("samsum")


def test_the_published_data_have_the_format(shared_file: Callable[[str], Path]) -> None:
    file = shared_file("data/longbench/multi_news.jsonl")
    raw = {row["_id"]: row for row in map(json.loads, file.open(encoding="utf-8"))}
    rows = rows_of(source_of("multi_news", str(file.parent)), "multi_news")
    assert len(rows) == len(raw) == 200
    for row in rows:
        assert all(row[key] == raw[row["_id"]][key] for key in ("context", "answers", "length"))


def test_rows_of_an_invented_file_are_those_of_the_published_format() -> None:
    raw = [json.loads(line) for line in (DATA / "qasper_e.jsonl").read_text().splitlines()]
    rows = {row["_id"]: row for row in rows_of(source_of("qasper_e", str(DATA)), "qasper_e")}
    assert len(rows) == len(raw)
    for given in raw:
        kept = ("context", "input", "answers", "length")
        assert {key: rows[given["_id"]][key] for key in kept} == {key: given[key] for key in kept}


def test_data_come_from_a_mirror_or_the_authors_archive() -> None:
    mirror = source_of("qasper_e", "hf://datasets/someone/LongBench", "r")
    assert (mirror.dataset, mirror.config) == ("someone/LongBench", "qasper_e")
    archive = source_of("qasper", None, "r")
    assert (archive.dataset, archive.archive) == ("THUDM/LongBench", "data.zip")


GOOD = {"_id": "a", "context": "c", "input": "i", "answers": ["x"], "length": 3}


BAD: list[tuple[str, list[Any], str]] = [  # data set, rows, what is said
    ("qasper", [GOOD, {"_id": "b"}], r"row 2: field context is missing; allowed: text"),
    ("qasper", [{**GOOD, "answers": []}], r"row 1: field answers is \[\]; allowed: a list"),
    ("qasper", [{**GOOD, "length": None}], r"length is None; allowed: an integer >= 0"),
    ("trec", [{**GOOD, "all_classes": None}], r"trec_e.jsonl row 1: field all_classes is None"),
    ("passage_retrieval_en", [GOOD], r"answers is \['x'\]; allowed: text with Paragraph"),
    ("qasper", [GOOD, GOOD], r"has _id 'a' twice; allowed: once"),
    ("qasper", [], r"holds no example"),
]


def test_bad_rows_are_one_line_and_a_parquet_mirror_has_other_names(tmp_path) -> None:
    """It calls the input question; dates stay text."""
    for name, rows, said in BAD:
        write_lines(tmp_path / f"{name}_e.jsonl", rows)
        with pytest.raises(TaskError, match=said) as caught:
            rows_of(source_of(f"{name}_e", str(tmp_path)), name)
        assert "\n" not in str(caught.value)
        (tmp_path / f"{name}_e.jsonl").unlink()
    row = {**GOOD, "answers": ["2009-01-02"], "question": GOOD["input"]}
    del row["input"]
    pd.DataFrame([row]).to_parquet(tmp_path / "qasper_e.parquet")
    (found,) = rows_of(source_of("qasper_e", str(tmp_path)), "qasper")
    assert (list(found["answers"]), found["input"]) == (["2009-01-02"], "i")


# protocols

OFFICIAL, BALANCEKV = PROTOCOLS["longbench"], PROTOCOLS["balancekv"]
QWEN_PLAIN = {"gov_report", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p"}
OFFICIAL_PLAIN = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|endhead|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|endhead|>\n\n{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nDefault of this template."
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encoder(family: str, template: str, special: list[str], stop: list[str], positions: int) -> Any:
    """The shipped model's pieces, with special tokens (begin, end ...) and another's chat template."""
    inner = AutoTokenizer.from_pretrained(local_path("asset:recall_mini")).backend_tokenizer
    inner.add_special_tokens([token for token in special if token])
    bos, end, *_ = special
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos or None, eos_token=end)
    made.chat_template = template
    spec = ModelSpec(name="m", path="x", stop_tokens=stop)
    return replace(prompt_encoder(made, spec), family=family, max_positions=positions)


@pytest.fixture(scope="module")
def llama() -> PromptEncoder:
    special = ["<|bos|>", "<|eos|>", "<|eot_id|>", "<|head|>", "<|endhead|>"]
    return encoder("llama", LLAMA3, special, ["<|eot_id|>"], 131072)


@pytest.fixture(scope="module")
def qwen() -> PromptEncoder:
    return encoder("qwen2", QWEN, ["", "<|im_end|>", "<|im_start|>"], [], 32768)


def examples(encoder: PromptEncoder, **options: Any) -> Any:
    return LongBench(data=str(DATA), per_dataset=1, **options).examples(encoder)


def whole(example: Any) -> list[int]:
    return [*example.context_ids, *example.question_ids]


def in_chat(encoder: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    return encoder.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=True
    )["input_ids"]


def test_balancekv_prompts_llama_plainly(llama: PromptEncoder) -> None:
    found = examples(llama)
    assert [e.dataset for e in found] == list(E_DATASETS)
    ends = {llama.tokenizer.convert_tokens_to_ids(token) for token in ("<|eos|>", "<|eot_id|>")}
    for e in found:
        assert whole(e) == llama.tokenizer.encode(e.context + e.question)
        assert whole(e)[0] == llama.tokenizer.bos_token_id
        assert e.end_ids == ends
        assert e.complete
        assert e.may_be_empty


def test_balancekv_gives_qwen_its_template_on_six_data_sets(qwen: PromptEncoder) -> None:
    for e in examples(qwen):
        plain = e.dataset in QWEN_PLAIN
        text = e.context + e.question
        assert whole(e) == (qwen.tokenizer.encode(text) if plain else in_chat(qwen, text))
        assert ("Default of this template." in qwen.decode(whole(e))) != plain
        assert e.end_ids == {qwen.tokenizer.eos_token_id}


def test_the_benchmark_has_a_chat_for_all_but_few_shot_and_code(llama: PromptEncoder) -> None:
    for e in examples(llama, protocol="longbench"):
        text, plain = e.context + e.question, e.dataset in OFFICIAL_PLAIN
        assert whole(e) == (llama.tokenizer.encode(text) if plain else in_chat(llama, text))
        inside = e.context[len(e.context) // 2 :][:30]
        assert inside in llama.decode(list(e.context_ids)), "a context is cut from its question"
        assert inside not in llama.decode(list(e.question_ids))


def test_a_chat_model_that_the_protocol_does_not_know_is_refused(qwen: PromptEncoder) -> None:
    with pytest.raises(TaskError, match="does not say how to prompt a chat model of type 'gemma2'"):
        examples(replace(qwen, family="gemma2"), datasets=["qasper"])
    (e,) = examples(replace(qwen, family="opt", chat=False), datasets=["qasper"])
    assert whole(e) == qwen.tokenizer.encode(e.context + e.question)


def test_the_middle_of_ids_goes_and_braces_of_the_text_stay() -> None:
    prompt, at = fill("A {context} B {input} C", "{input} {context} {x}", "{context}")
    assert prompt == "A {input} {context} {x} B {context} C"
    assert prompt[:at] == "A {input} {context} {x}"
    for n, limit in ((10, 10), (11, 10), (30, 10), (30, 11), (5, 100)):
        ids, half = list(range(n)), limit // 2
        for cut in range(n + 1):
            found = truncate_middle(ids, cut, limit)
            assert found.ids == (ids if n <= limit else ids[:half] + ids[-half:])
            assert found.truncated == n - len(found.ids)
            assert found.ids[: found.cut] == [i for i in found.ids if i < cut]


def test_balancekv_truncates_ids_and_the_benchmark_text_before_the_template(llama, qwen) -> None:
    (full,) = examples(qwen, datasets=["qasper"])
    (short,) = examples(qwen, datasets=["qasper"], max_input=100)
    assert whole(short) == whole(full)[:50] + whole(full)[-50:]
    assert short.fields["truncated_tokens"] == len(whole(full)) - 100
    tight = replace(qwen, max_input=60)
    assert len(BALANCEKV.encode(tight, "trec", "x y " * 200, 9, 100).ids) == 60, "the smaller limit"
    (full,) = examples(llama, datasets=["hotpotqa"], protocol="longbench")
    (short,) = examples(llama, datasets=["hotpotqa"], protocol="longbench", max_input=90)
    plain = llama.tokenizer.encode(full.context + full.question)
    assert whole(short) == in_chat(llama, llama.decode(plain[:45]) + llama.decode(plain[-45:]))
    assert full.question[-30:] in llama.tokenizer.decode(list(short.question_ids))
    assert short.fields["truncated_tokens"] == len(plain) - 90
    with pytest.raises(TaskError, match=r"allowed: model.max_input or task.max_input"):
        examples(replace(llama, max_positions=None), protocol="longbench")
    tight = replace(llama, max_positions=400)
    for e in examples(tight, protocol="longbench", datasets=["qasper", "trec"]):
        assert len(whole(e)) + e.max_new_tokens <= 400
    tiny, prompt = replace(llama, max_positions=20), "x y " * 50  # no room for prompt and answer
    two = OFFICIAL.encode(llama, "trec", prompt, 9, 2)
    assert OFFICIAL.encode(tiny, "trec", prompt, 9, None).ids == two.ids


def test_samsum_stops_at_a_newline_that_is_not_its_first_token(llama) -> None:
    (e,) = examples(llama, datasets=["samsum"], protocol="longbench")
    newline = llama.tokenizer.encode("\n", add_special_tokens=False)[-1]
    assert e.end_ids == llama.end_ids | {newline}
    assert not e.may_be_empty
    stopping = Stopping(8, e.end_ids, may_be_empty=e.may_be_empty)
    logits = torch.zeros(2, len(llama.tokenizer))
    logits[:, newline], logits[:, 7] = 2.0, 1.0
    assert stopping.mask_first(logits).argmax(-1).tolist() == [7, 7]
    assert stopping.reached([7, newline])
    assert examples(llama, datasets=["qasper"], protocol="longbench")[0].end_ids is None
    spec = ModelSpec(name="m", path="x", stop_tokens=["<|nothing|>"])
    with pytest.raises(ModelError, match=r"names '<\|nothing\|>', which the tokenizer of 'x' does"):
        prompt_encoder(llama.tokenizer, spec)


def released(prediction: str, dataset: str, llama: bool) -> str:
    """The released evaluation's cut, step by step."""
    text = prediction.strip()
    if dataset not in ("lcc", "repobench-p") or llama:
        text = text.lstrip("\n").split("\n")[0]
        text = text.split("  ")[0]
    return text


PREDICTIONS = [
    *("", " \n ", "Ashe", "  Ashe\nNo", "\n\nAshe  river", "Ashe \nNo", "a  b\nc", "a\n  b", "x\n"),
    *("x \n\n y", "    return 1\n    x", "\tA\tB  C"),
]


def test_answers_are_cut_as_in_the_released_code_and_nothing_follows_a_settled_one(
    llama, qwen
) -> None:
    names, settled = ["qasper", "gov_report", "samsum", "trec", "lcc"], 0
    for encoder, dataset, said in itertools.product((llama, qwen), names, PREDICTIONS):
        expected = released(said, dataset, encoder is llama)
        assert BALANCEKV.answer(encoder, dataset, said) == expected
    for encoder, protocol in itertools.product((llama, qwen), PROTOCOLS):
        task = LongBench(data=str(DATA), per_dataset=1, protocol=protocol, datasets=names)
        for e, prediction in itertools.product(task.examples(encoder), PREDICTIONS):
            for start in itertools.accumulate(prediction):
                if e.settled(start):
                    settled += 1
                    assert task.score(start, e) == task.score(prediction, e)
    assert settled > 100


# the task


def test_datasets_take_turns_and_the_full_benchmark_leaves_chinese_to_be_asked_for(llama) -> None:
    task = LongBench(data=str(DATA), per_dataset=2, datasets=["lcc", "trec"])
    found = task.examples(llama)
    ids = ["lcc-lcc-00", "trec-trec-00", "lcc-lcc-01", "trec-trec-01"]
    assert [e.id for e in found] == ids
    assert found[1].fields["length_bucket"] == "0-4k"
    assert set(task.digests()) == {"lcc_e", "trec_e"}
    assert len(LongBench(split="full").datasets or ()) == 16
    assert LongBench(split="full", datasets=["dureader"]).datasets == ("dureader",)
