"""LongBench's protocols: the tokens and the answers of the benchmark's and of BalanceKV's code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvbench.engine.loading import ModelError, ModelSpec, local_path, prompt_encoder, stop_token_ids
from kvbench.engine.stopping import Stopping
from kvbench.tasks.base import PromptEncoder, TaskError
from kvbench.tasks.longbench import E_DATASETS, LongBench
from kvbench.tasks.longbench.protocol import PROTOCOLS, truncate_middle

DATA = str(Path(__file__).parents[1] / "data" / "longbench")
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


def tokenizer(template: str | None, bos: str | None, end: str, *others: str):
    """The shipped model's pieces, with special tokens and a chat template of another family."""
    inner = AutoTokenizer.from_pretrained(local_path("asset:recall_mini")).backend_tokenizer
    special = [token for token in (bos, end, *others) if token]
    inner.add_special_tokens(special)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=end)
    made.chat_template = template
    return made


def encoder(family: str, made, **facts) -> PromptEncoder:
    spec = ModelSpec(name="m", path="x", stop_tokens=facts.pop("stop_tokens", ()))
    return replace(
        prompt_encoder(made, spec),
        family=family,
        chat=made.chat_template is not None,
        end_ids=stop_token_ids(made, spec),
        **facts,
    )


@pytest.fixture(scope="module")
def llama():
    made = tokenizer(LLAMA3, "<|bos|>", "<|eos|>", "<|eot_id|>", "<|head|>", "<|endhead|>")
    return encoder("llama", made, stop_tokens=["<|eot_id|>"], max_positions=131072)


@pytest.fixture(scope="module")
def qwen():
    made = tokenizer(QWEN, None, "<|im_end|>", "<|im_start|>")
    return encoder("qwen2", made, max_positions=32768)


def examples(encoder, **options):
    return LongBench(data=DATA, per_dataset=1, **options).examples(encoder)


def text_of(encoder, example) -> str:
    return encoder.tokenizer.decode([*example.context_ids, *example.question_ids])


def whole(example) -> list[int]:
    return [*example.context_ids, *example.question_ids]


def test_balancekv_gives_llama_the_plain_prompt_everywhere(llama):
    found = examples(llama)
    assert [e.dataset for e in found] == list(E_DATASETS)
    for e in found:
        assert whole(e) == llama.tokenizer.encode(e.context + e.question)
        assert whole(e)[0] == llama.tokenizer.bos_token_id
        assert e.end_ids == {
            llama.tokenizer.convert_tokens_to_ids(token) for token in ("<|eos|>", "<|eot_id|>")
        }
        assert e.complete
        assert e.may_be_empty


def test_balancekv_gives_qwen_its_own_default_system_message_on_six_datasets(qwen):
    for e in examples(qwen):
        if e.dataset in QWEN_PLAIN:
            expected = qwen.tokenizer.encode(e.context + e.question)
        else:
            message = [{"role": "user", "content": e.context + e.question}]
            expected = qwen.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            assert text_of(qwen, e).startswith("<|im_start|>system\nDefault of this template.")
        assert whole(e) == list(expected), e.dataset
        assert e.end_ids == {qwen.tokenizer.eos_token_id}


def test_balancekv_asks_about_chat_models_that_its_code_does_not_know(qwen):
    with pytest.raises(TaskError, match="does not say how to prompt a chat model of type 'gemma2'"):
        examples(replace(qwen, family="gemma2"), datasets=["qasper"])
    plain = replace(qwen, family="opt", chat=False)
    (e,) = examples(plain, datasets=["qasper"])
    assert "im_start" not in text_of(plain, e)


def test_the_benchmark_gives_its_chat_template_to_all_but_few_shot_and_code(llama):
    for e in examples(llama, protocol="longbench"):
        text = text_of(llama, e)
        if e.dataset in OFFICIAL_PLAIN:
            assert whole(e) == llama.tokenizer.encode(e.context + e.question)
        else:
            assert text.startswith("<|bos|><|head|>user<|endhead|>\n\n")
            assert not text.startswith("<|bos|><|bos|>")
            assert text.endswith("<|eot_id|><|head|>assistant<|endhead|>\n\n")
            assert (e.context + e.question).strip() in text


@pytest.mark.parametrize("protocol", ["longbench", "balancekv"])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_the_context_ends_at_a_token_and_holds_nothing_of_the_question(protocol, family, request):
    encoder = request.getfixturevalue(family)
    for e in examples(encoder, protocol=protocol):
        context = encoder.tokenizer.decode(list(e.context_ids))
        question = encoder.tokenizer.decode(list(e.question_ids))
        assert e.question.strip() in question
        assert e.context.strip()[-8:-4] in context[-24:] or e.context[-8:].strip() in question
        assert len(e.context_ids) > 0.5 * len(whole(e)), e.dataset
        assert len(context) <= text_of(encoder, e).find(e.context.strip()) + len(e.context)


def test_slow_tokenizers_find_the_same_boundary(llama):
    class Slow:
        def __call__(self, text, **options):
            return {"input_ids": llama.tokenizer(text, **options)["input_ids"]}

    slow = replace(llama, tokenizer=Slow())
    for text in ("the quick line 17 jumps over 24169 fences", "a b"):
        for cut in range(len(text)):
            ids, fast_cut = llama.encode_prompt(text, cut, special=True)
            assert slow.encode_prompt(text, cut, special=True)[0] == ids
            assert slow.encode_prompt(text, cut, special=True)[1] <= fast_cut
            kept = llama.tokenizer.decode(ids[1:fast_cut])
            assert text.startswith(kept)
            assert len(kept) <= cut


@pytest.mark.parametrize(("n", "limit"), [(10, 10), (11, 10), (30, 10), (30, 11), (5, 100)])
def test_middle_truncation(n, limit):
    ids = list(range(n))
    for cut in range(n + 1):
        found = truncate_middle(ids, cut, limit)
        half = limit // 2
        assert found.ids == (ids if n <= limit else ids[:half] + ids[-half:])
        assert found.truncated == n - len(found.ids)
        assert found.ids[: found.cut] == [i for i in found.ids if i < cut]


def test_balancekv_truncates_ids_chat_template_included(qwen):
    (full,) = examples(qwen, datasets=["qasper"])
    (short,) = examples(qwen, datasets=["qasper"], max_input=100)
    assert whole(short) == whole(full)[:50] + whole(full)[-50:]
    assert short.fields["truncated_tokens"] == len(whole(full)) - 100
    assert BALANCEKV.max_input == 100_000
    assert BALANCEKV.encode(
        replace(qwen, max_input=60), "trec", "x y " * 200, 9, new_tokens=4, limit=100
    ).truncated  # the smaller of the two limits


def test_the_benchmark_truncates_text_and_then_puts_the_template_around(llama):
    (full,) = examples(llama, datasets=["hotpotqa"], protocol="longbench")
    (short,) = examples(llama, datasets=["hotpotqa"], protocol="longbench", max_input=90)
    plain = llama.tokenizer.encode(full.context + full.question)
    text = llama.decode(plain[:45]) + llama.decode(plain[-45:])
    message = [{"role": "user", "content": text}]
    expected = llama.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert whole(short) == list(expected)
    assert full.question[-30:] in llama.tokenizer.decode(list(short.question_ids))
    assert short.fields["truncated_tokens"] == len(plain) - 90


def test_the_benchmark_needs_to_know_the_models_maximum(llama):
    with pytest.raises(TaskError, match=r"allowed: model.max_input or task.max_input"):
        examples(replace(llama, max_positions=None), protocol="longbench")
    tight = replace(llama, max_positions=400)
    for e in examples(tight, protocol="longbench", datasets=["qasper", "trec"]):
        assert len(whole(e)) + e.max_new_tokens <= 400


def test_samsum_stops_at_a_newline_that_is_not_its_first_token(llama):
    (e,) = examples(llama, datasets=["samsum"], protocol="longbench")
    newline = llama.tokenizer.encode("\n", add_special_tokens=False)[-1]
    assert e.end_ids == llama.end_ids | {newline}
    assert not e.may_be_empty
    stopping = Stopping(8, e.end_ids, may_be_empty=e.may_be_empty)
    logits = torch.zeros(2, len(llama.tokenizer))
    logits[:, newline], logits[:, 7] = 2.0, 1.0
    assert stopping.first(logits).argmax(-1).tolist() == [7, 7]
    assert logits[0, newline] == 2.0
    assert stopping.reached([7, newline])
    assert examples(llama, datasets=["qasper"], protocol="longbench")[0].end_ids is None


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


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_balancekvs_answers_are_cut_as_in_its_code(family, request):
    encoder = request.getfixturevalue(family)
    for dataset in ("qasper", "gov_report", "lcc"):
        for prediction in PREDICTIONS:
            expected = released(prediction, dataset, family == "llama")
            assert BALANCEKV.answer(encoder, dataset, prediction) == expected


@pytest.mark.parametrize("protocol", [OFFICIAL, BALANCEKV], ids=lambda p: p.name)
def test_what_follows_a_settled_answer_changes_nothing(protocol, llama, qwen):
    names = ["qasper", "gov_report", "samsum", "trec", "lcc"]
    task = LongBench(data=DATA, per_dataset=1, protocol=protocol.name, datasets=names)
    settled = 0
    for encoder in (llama, qwen):
        for e in task.examples(encoder):
            for prediction in PREDICTIONS:
                for end in range(len(prediction)):
                    start = prediction[: end + 1]
                    if e.settled(start):
                        settled += 1
                        assert task.score(start, e) == task.score(prediction, e)
    assert settled > 50


def test_stop_tokens_must_exist(llama):
    spec = ModelSpec(name="m", path="x", stop_tokens=["<|nothing|>"])
    with pytest.raises(ModelError, match=r"names '<\|nothing\|>', which the tokenizer of 'x' does"):
        stop_token_ids(llama.tokenizer, spec)


def test_datasets_take_turns_and_per_dataset_narrows(llama):
    task = LongBench(data=DATA, per_dataset=2, datasets=["lcc", "trec"])
    assert [e.id for e in task.examples(llama)] == [
        *("lcc-lcc-00", "trec-trec-00", "lcc-lcc-01", "trec-trec-01"),
    ]
    assert task.examples(llama)[1].fields["length_bucket"] == "0-4k"
    assert set(task.digests()) == {"lcc_e", "trec_e"}


def test_the_full_benchmark_leaves_chinese_to_be_asked_for():
    assert len(LongBench(split="full").names) == 16
    assert LongBench(split="full", datasets=["dureader"]).names == ("dureader",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "x"}, r"task.split is 'x'; allowed: e \| full"),
        ({"protocol": "x"}, r"task.protocol is 'x'; allowed: longbench \| balancekv"),
        ({"datasets": ["qaspr"]}, "task.datasets has 'qaspr', which is not in split 'e'.*qasper"),
        ({"datasets": ["narrativeqa"]}, "'narrativeqa', which is not in split 'e'"),
        ({"datasets": ["lcc", "lcc"]}, "each once"),
        ({"datasets": []}, r"datasets is \[\]; allowed: a list of texts, each once, or null"),
        ({"per_dataset": 0}, "per_dataset is 0; allowed: an integer >= 1, or null"),
        ({"max_input": 1.5}, "max_input is 1.5; allowed: an integer >= 2, or null"),
    ],
)
def test_options_that_cannot_be_are_one_line(options, message):
    with pytest.raises(TaskError, match=message):
        LongBench(**options)
