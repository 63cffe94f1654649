"""LongBench: prompts of the original, rows that are refused in one line, the tokens and answers of the
benchmark's and of BalanceKV's code."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.encoders import ids_of, tokenizer
from support.paths import DATA, GOLDEN, write_lines

from kvbench.engine.answer import Stopping
from kvbench.engine.model import ModelError, ModelSpec, prompt_encoder
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import TaskError
from kvbench.tasks.longbench import PROTOCOLS, LongBench, truncate_middle
from kvbench.tasks.longbench_datasets import (
    DATASETS,
    E_DATASETS,
    fill,
    longbench_source,
    prompt_templates,
    rows_of,
)

# prompt templates


def test_prompts_and_limits_are_the_benchmarks() -> None:
    """By the sha256 of LongBench/config/dataset2prompt.json at 2e00731f."""
    golden = json.loads((GOLDEN / "longbench_prompt_sha256.json").read_text())
    digests = {name: sha256(text.encode()).hexdigest() for name, text in prompt_templates().items()}
    assert digests == {name: entry["sha256"] for name, entry in golden.items()}
    limits = {name: dataset.new_tokens for name, dataset in DATASETS.items()}
    assert limits == {name: entry["max_new_tokens"] for name, entry in golden.items()}


def test_braces_of_the_texts_stay() -> None:
    prompt, cut = fill("A {context} B {input} C", "{input} {context} {x}", "{context}")
    assert prompt == "A {input} {context} {x} B {context} C"
    assert prompt[:cut] == "A {input} {context} {x}"


# rows


def test_rows_of_an_invented_file_are_those_of_the_published_format() -> None:
    raw = [json.loads(line) for line in (DATA / "qasper_e.jsonl").read_text().splitlines()]
    rows = {row["_id"]: row for row in rows_of(longbench_source("qasper_e", str(DATA)), "qasper_e")}
    assert len(rows) == len(raw)
    for raw_row in raw:
        row = rows[raw_row["_id"]]
        for field in ("context", "input", "answers", "length"):
            assert row[field] == raw_row[field]


def test_data_come_from_a_mirror_or_the_authors_archive() -> None:
    mirror = longbench_source("qasper_e", dataset="someone/LongBench", revision="r")
    assert (mirror.dataset, mirror.config) == ("someone/LongBench", "qasper_e")
    archive = longbench_source("qasper", revision="r")
    assert (archive.dataset, archive.archive) == ("THUDM/LongBench", "data.zip")


GOOD = {"_id": "a", "context": "c", "input": "i", "answers": ["x"], "length": 3}
WRONG_ROWS: list[tuple[str, list[Any], str]] = [  # data set, rows, message
    ("qasper", [GOOD, {"_id": "b"}], r"row 2: field context is missing; allowed: a valid string"),
    ("qasper", [{**GOOD, "answers": []}], r"row 1: field answers is \[\]; allowed: "),
    ("qasper", [{**GOOD, "length": None}], r"length is None; allowed: a valid integer"),
    ("trec", [{**GOOD, "all_classes": None}], r"trec_e.jsonl row 1: field all_classes is None"),
    ("passage_retrieval_en", [GOOD], r"answers is \['x'\]; allowed: text with Paragraph"),
    ("qasper", [GOOD, GOOD], r"has _id 'a' twice; allowed: once"),
    ("qasper", [], r"holds no example"),
]


@pytest.mark.parametrize(("name", "rows", "message"), WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_a_wrong_row_is_one_line(tmp_path: Path, name: str, rows: list[Any], message: str) -> None:
    write_lines(tmp_path / f"{name}_e.jsonl", rows)
    with pytest.raises(TaskError, match=message) as caught:
        rows_of(longbench_source(f"{name}_e", str(tmp_path)), name)
    assert "\n" not in str(caught.value)


def test_a_parquet_mirror_calls_the_input_question_and_its_dates_stay_text(tmp_path: Path) -> None:
    row = {**GOOD, "answers": ["2009-01-02"], "question": GOOD["input"]}
    del row["input"]
    pd.DataFrame([row]).to_parquet(tmp_path / "qasper_e.parquet")
    (mirrored,) = rows_of(longbench_source("qasper_e", str(tmp_path)), "qasper")
    assert (list(mirrored["answers"]), mirrored["input"]) == (["2009-01-02"], "i")


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
    bos, end, *others = special
    spec = ModelSpec(name="m", path="x", stop_tokens=stop)
    made = prompt_encoder(tokenizer(template, bos, end, others), spec)
    return replace(made, family=family, max_positions=positions)


@pytest.fixture(scope="module")
def llama() -> Any:
    special = ["<|bos|>", "<|eos|>", "<|eot_id|>", "<|head|>", "<|endhead|>"]
    return encoder("llama", LLAMA3, special, ["<|eot_id|>"], 131072)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return encoder("qwen2", QWEN, ["", "<|im_end|>", "<|im_start|>"], [], 32768)


def examples(encoder: PromptEncoder, **options: Any) -> Any:
    return LongBench(data=str(DATA), per_dataset=1, **options).examples(encoder)


def in_chat(encoder: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    return encoder.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=True
    )["input_ids"]


def test_balancekv_prompts_llama_plainly(llama: Any) -> None:
    made = examples(llama)
    assert [example.dataset for example in made] == list(E_DATASETS)
    ends = {llama.tokenizer.convert_tokens_to_ids(token) for token in ("<|eos|>", "<|eot_id|>")}
    for example in made:
        assert ids_of(example) == llama.tokenizer.encode(example.context + example.question)
        assert ids_of(example)[0] == llama.tokenizer.bos_token_id
        assert example.end_ids == ends
        assert example.may_be_empty


def test_balancekv_gives_qwen_its_template_on_six_data_sets(qwen: Any) -> None:
    for example in examples(qwen):
        plain = example.dataset in QWEN_PLAIN
        text = example.context + example.question
        expected = qwen.tokenizer.encode(text) if plain else in_chat(qwen, text)
        assert ids_of(example) == expected
        assert ("Default of this template." in qwen.decode(ids_of(example))) != plain
        assert example.end_ids == {qwen.tokenizer.eos_token_id}


def test_the_benchmark_has_a_chat_for_all_but_few_shot_and_code(llama: Any) -> None:
    for example in examples(llama, protocol="longbench"):
        text = example.context + example.question
        plain = example.dataset in OFFICIAL_PLAIN
        expected = llama.tokenizer.encode(text) if plain else in_chat(llama, text)
        assert ids_of(example) == expected
        inside = example.context[len(example.context) // 2 :][:30]
        assert inside in llama.decode(list(example.context_ids))
        assert inside not in llama.decode(list(example.question_ids))


def test_a_chat_model_that_the_protocol_does_not_know_is_refused(qwen: Any) -> None:
    with pytest.raises(TaskError, match="does not say how to prompt a chat model of type 'gemma2'"):
        examples(replace(qwen, family="gemma2"), datasets=["qasper"])
    (example,) = examples(replace(qwen, family="opt", chat=False), datasets=["qasper"])
    assert ids_of(example) == qwen.tokenizer.encode(example.context + example.question)


@pytest.mark.parametrize(("length", "limit"), [(10, 10), (11, 10), (30, 10), (30, 11), (5, 100)])
def test_the_middle_of_token_ids_is_cut(length: int, limit: int) -> None:
    ids, half = list(range(length)), limit // 2
    for cut in range(length + 1):
        prompt = truncate_middle(ids, cut, limit)
        assert prompt.ids == (ids if length <= limit else ids[:half] + ids[-half:])
        assert prompt.truncated == length - len(prompt.ids)
        assert prompt.ids[: prompt.cut] == [i for i in prompt.ids if i < cut]


def test_balancekv_truncates_token_ids(qwen: Any) -> None:
    (full,) = examples(qwen, datasets=["qasper"])
    (short,) = examples(qwen, datasets=["qasper"], max_input=100)
    assert ids_of(short) == ids_of(full)[:50] + ids_of(full)[-50:]
    assert short.fields["truncated_tokens"] == len(ids_of(full)) - 100
    tight = replace(qwen, max_input=60)
    assert len(BALANCEKV.encode(tight, "trec", "x y " * 200, 9, 100).ids) == 60, "the smaller limit"


def test_the_benchmark_truncates_text_before_the_chat_template(llama: Any) -> None:
    (full,) = examples(llama, datasets=["hotpotqa"], protocol="longbench")
    (short,) = examples(llama, datasets=["hotpotqa"], protocol="longbench", max_input=90)
    plain = llama.tokenizer.encode(full.context + full.question)
    text = llama.decode(plain[:45]) + llama.decode(plain[-45:])
    assert ids_of(short) == in_chat(llama, text)
    assert full.question[-30:] in llama.tokenizer.decode(list(short.question_ids))
    assert short.fields["truncated_tokens"] == len(plain) - 90


def test_the_benchmark_leaves_the_answer_room_in_the_models_positions(llama: Any) -> None:
    with pytest.raises(TaskError, match=r"allowed: model.max_input or task.max_input"):
        examples(replace(llama, max_positions=None), protocol="longbench")
    tight = replace(llama, max_positions=400)
    for example in examples(tight, protocol="longbench", datasets=["qasper", "trec"]):
        assert len(ids_of(example)) + example.max_new_tokens <= 400
    tiny, prompt = replace(llama, max_positions=20), "x y " * 50  # no room for prompt and answer
    of_two_tokens = OFFICIAL.encode(llama, "trec", prompt, 9, 2)
    assert OFFICIAL.encode(tiny, "trec", prompt, 9, None).ids == of_two_tokens.ids


def test_samsum_stops_at_a_newline_that_is_not_its_first_token(llama: Any) -> None:
    (example,) = examples(llama, datasets=["samsum"], protocol="longbench")
    newline = llama.tokenizer.encode("\n", add_special_tokens=False)[-1]
    assert example.end_ids == llama.end_ids | {newline}
    assert not example.may_be_empty
    stopping = Stopping(8, example.end_ids, may_be_empty=example.may_be_empty)
    logits = torch.zeros(2, len(llama.tokenizer))
    logits[:, newline], logits[:, 7] = 2.0, 1.0
    assert stopping.mask_first(logits).argmax(-1).tolist() == [7, 7]
    assert stopping.reached([7, newline])
    assert examples(llama, datasets=["qasper"], protocol="longbench")[0].end_ids is None


def test_a_stop_token_that_the_tokenizer_lacks_is_refused(llama: Any) -> None:
    spec = ModelSpec(name="m", path="x", stop_tokens=["<|nothing|>"])
    with pytest.raises(ModelError, match=r"names '<\|nothing\|>', which the tokenizer of 'x' does"):
        prompt_encoder(llama.tokenizer, spec)


def released(prediction: str, dataset: str, llama: bool) -> str:
    text = prediction.strip()
    if dataset not in ("lcc", "repobench-p") or llama:
        text = text.lstrip("\n").split("\n")[0]
        text = text.split("  ")[0]
    return text


PREDICTIONS = [
    "",
    " \n ",
    "Ashe",
    "  Ashe\nNo",
    "\n\nAshe  river",
    "Ashe \nNo",
    "a  b\nc",
    "a\n  b",
    "x\n",
    "x \n\n y",
    "    return 1\n    x",
    "\tA\tB  C",
]
CUT_DATASETS = ["qasper", "gov_report", "samsum", "trec", "lcc"]


def test_answers_are_cut_as_in_the_released_code(llama: Any, qwen: Any) -> None:
    cases = itertools.product((llama, qwen), CUT_DATASETS, PREDICTIONS)
    for encoder, dataset, prediction in cases:
        expected = released(prediction, dataset, encoder is llama)
        assert BALANCEKV.answer(encoder, dataset, prediction) == expected


def test_the_score_of_a_final_answer_does_not_change(llama: Any, qwen: Any) -> None:
    final = 0
    for encoder, protocol in itertools.product((llama, qwen), PROTOCOLS):
        task = LongBench(data=str(DATA), per_dataset=1, protocol=protocol, datasets=CUT_DATASETS)
        for example, prediction in itertools.product(task.examples(encoder), PREDICTIONS):
            for start in itertools.accumulate(prediction):
                if example.is_final(start):
                    final += 1
                    assert task.score(start, example) == task.score(prediction, example)
    assert final > 100


# the task


def test_data_sets_take_turns_and_chinese_ones_run_only_where_they_are_named(llama: Any) -> None:
    task = LongBench(data=str(DATA), per_dataset=2, datasets=["lcc", "trec"])
    made = task.examples(llama)
    ids = ["lcc-lcc-00", "trec-trec-00", "lcc-lcc-01", "trec-trec-01"]
    assert [example.id for example in made] == ids
    whole = replace(task, per_dataset=None)
    for limit in (1, 3):
        first = [one.id for one in whole.first(limit).examples(llama)]
        assert first[:limit] == [one.id for one in whole.examples(llama)][:limit]
        assert len(first) == 2 * limit
    assert made[1].fields["length_bucket"] == "0-4k"
    assert set(task.digests()) == {"lcc_e", "trec_e"}
    assert len(LongBench(split="full").datasets or ()) == 16
    assert LongBench(split="full", datasets=["dureader"]).datasets == ("dureader",)
