"""Published benchmarks that are configs over data of the right format: prompts, limits, scores and
turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.benchmarks import BOOK, WRITERS, write_lines
from support.configs import composed
from support.encoders import chat, shipped
from support.paths import ROOT

from kvbench.cli.build import build_job
from kvbench.engine.sampling import Sampling
from kvbench.kv import KVError
from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import TaskError


def task(name: str, folder: Path, **options: Any) -> Any:
    settings = [f"task.{key}={value}" for key, value in options.items()]
    config = composed(f"task={name}", f"task.data={WRITERS[name](folder)}", *settings)
    return instantiate(config.task, _convert_="all")


def by_dataset(made: Any) -> dict[str, Any]:
    """The first example of each data set."""
    return {e.dataset: e for e in reversed(made.examples(shipped()))}


def test_longbench_v2(tmp_path: Path) -> None:
    made = task("longbench_v2", tmp_path)
    found = made.examples(shipped())
    assert made.breakdown == ("difficulty", "length")
    assert found[0].context == (
        f"Please read the following text and answer the question below.\n\n<text>\n{BOOK}\n"
    )
    assert found[0].question == (
        "</text>\n\nWhat is the correct answer to this question: Who met Bob 0?\nChoices:\n"
        "(A) Option A\n(B) Option B\n(C) Option C\n(D) Option D\n\nFormat your response as follows: "
        '"The correct answer is (insert answer here)".'
    )
    assert found[0].fields == {"difficulty": "easy", "length": "short", "truncated_tokens": 0}
    assert [e.answers for e in found[:5]] == [("A",), ("B",), ("C",), ("D",), ("A",)]
    assert made.score("**The correct answer is (A)**", found[0])["score"] == 1.0


def test_infinitebench(tmp_path: Path) -> None:
    made = task("infinitebench", tmp_path)
    found = by_dataset(made)
    assert len(found) == 11
    assert "math_calc" not in found
    assert found["code_run"].context.startswith(
        "Following is a set of Python functions. There is a function called named func_1.\n\nAnn met"
    )
    assert found["code_run"].question == (
        "Please give me the exact number of the return value of func_1(4). Be concise. Your response "
        "must end with the final returned value."
    )
    start = "What is the largest number in the following list?"
    assert found["math_find"].context.startswith(start)
    assert found["longbook_choice_eng"].question.endswith("A. Carl\nB. Ann\nC. Dora\nD. Eve")
    assert found["longbook_qa_chn"].question == "问题：几只鹅？\n请尽量简短地回答。"
    limits = [found[n].max_new_tokens for n in ("passkey", "kv_retrieval", "longbook_sum_eng")]
    assert limits == [6, 50, 1200]
    for dataset, right, wrong in (
        ("passkey", "71432 is it, not 5", "5, or 71432"),
        ("number_string", " 2233344555.", "223334455"),
        ("kv_retrieval", '"9c-1".', "9c-12"),
        ("code_run", "It returns -7.", "-7 it is"),
        ("code_debug", "C.", "func_c or A"),
        ("math_find", "97", "9.7"),
        ("longdialogue_qa_eng", "It is Ann", "It is Bob"),
        ("longbook_qa_eng", "The seven geese.", "hens"),
        ("longbook_sum_eng", "Ann met Bob.", "Nothing."),
        ("longbook_choice_eng", "B", "A"),
        ("longbook_qa_chn", "七只。", "八"),
    ):
        assert made.score(right, found[dataset])["score"] == 1.0, dataset
        assert made.score(wrong, found[dataset])["score"] == 0.0, dataset
    (example, _) = task("infinitebench", tmp_path, datasets="[math_calc]").examples(shipped())
    assert example.answers == ("1", "4", "9")


def test_zeroscrolls(tmp_path: Path) -> None:
    made = task("zeroscrolls", tmp_path)
    found = by_dataset(made)
    assert len(found) == 10
    for example in found.values():
        assert example.context == f"You are given a text.\n\nText:\n{BOOK}\n\n"
        assert example.question == "Question:\nWhat?\n\nAnswer:\n"
    assert found["qasper"].answers == ("seven", "7 geese")
    for dataset, text, score in (
        ("qasper", "The 7 geese", 1.0),
        ("musique", "a mill in town", 0.5),
        ("quality", "the answer is B", 1.0),
        ("space_digest", "about 52%", 0.5),
        ("book_sum_sort", "1, 3, 2, 4", 5 / 6),
        ("gov_report", "", 0.0),
    ):
        assert made.score(text, found[dataset])["score"] == pytest.approx(score), dataset


def test_loogle_asks_a_document_all_its_questions(tmp_path: Path) -> None:
    made = task("loogle", tmp_path)
    examples = made.examples(shipped())
    short = [e for e in examples if e.dataset == "shortdep_qa"]
    assert len({e.context_id for e in short}) == 1
    assert [e.answers for e in short] == [("Ann and Bob",), ("7",)]
    assert short[0].question == "Question: Who?\nAnswer: "
    found = by_dataset(made)
    start = "Please generate a summary of the below paper. \nAnn"
    assert found["longdep_summarization"].context.startswith(start)
    cloze = found["shortdep_cloze"]
    assert "{'<mask-0>': 'Bob'" in cloze.context
    said = "{'<mask-0>': 'Ann Lee', '<mask-1>': 'Bob'}"
    assert made.score(said, cloze) == {"score": 1.0, "partial": 1.0}


HUB = {
    "xsum": {"document": "A dog ran.", "summary": "Dog runs.", "id": "7"},
    "cnn_dailymail": {"article": "A dog ran.", "highlights": "Dog runs.", "id": "7"},
}


def test_h2os_summaries_of_released_rows_and_of_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    def made(data: Path | None, *more: str) -> list[Any]:
        config = composed("task=h2o_summaries", f"task.data={data or 'null'}", *more)
        return list(instantiate(config.task, _convert_="all").examples(shipped()))

    data = ROOT / "tests" / "data" / "summaries"
    examples = made(data)
    assert [e.dataset for e in examples[:4]] == ["xsum", "cnn_dailymail"] * 2
    for example, name in zip(examples[:2], ("xsum", "cnn"), strict=True):
        row = json.loads((data / f"{name}_0shot.jsonl").read_text().splitlines()[0])
        assert example.context + example.question == row["article"]
        assert example.answers == (row["summary_gt"],)
        assert example.max_new_tokens == row["max_tokens"]
        assert list(example.stop) == row["stop"]
    asked = []

    def load(path: str, *, name: Any, split: str, **options: Any) -> list[Any]:
        asked.append((path, name, split))
        return [HUB["xsum" if "xsum" in path else "cnn_dailymail"]]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: True)
    counts = ("1 sentence", "3 sentences")
    for example, count in zip(made(None), counts, strict=True):
        prompt = f"###\nArticle: A dog ran.\n\nSummarize the above article in {count}.\n"
        assert example.context + example.question == prompt
        assert example.answers == ("Dog runs.",)
    hub = [("EdinburghNLP/xsum", None, "test"), ("abisee/cnn_dailymail", "3.0.0", "test")]
    assert asked == hub


def test_what_is_missing_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("kvbench.tasks.data.hub_answers", lambda: False)
    for name, file in (("longbench_v2", "data.json"), ("zeroscrolls", "gov_report.zip")):
        made = instantiate(composed(f"task={name}").task, _convert_="all")
        with pytest.raises(TaskError, match=rf"{file} of \S+ \(revision main\) cannot be fetched"):
            made.examples(shipped())
    made = instantiate(composed("task=loogle", f"task.data={tmp_path}").task, _convert_="all")
    with pytest.raises(TaskError, match=r"no data/shortdep_qa\.jsonl in"):
        made.examples(shipped())
    for option, said in (
        ({"datasets": "[pass_key]"}, r"task.datasets is 'pass_key'.*did you mean 'passkey'"),
        ({"files": "[x.jsonl]"}, r"task.files is .* allowed: task.data="),
    ):
        with pytest.raises(Exception, match=said):
            task("infinitebench", tmp_path, **option)


# SCBench: turns and shared contexts

OPTIONS = ["Ann", "Bob", "Carl", "Dora"]
TURNS: dict[str, list[tuple[str, Any]]] = {
    "kv": [('Key: "4b"\nThe value is: ', "9c-1"), ('Key: "5b"\nThe value is: ', "7a-2")],
    "prefix_suffix": [("Prefix 4, suffix b", "4..b"), ("Prefix 5, suffix b", "5..b")],
    "vt": [("Which variables have 7?", ["AB", "CD"]), ("Which have 8?", ["EF", "GH"])],
    "qa_eng": [("Who?", "Ann"), ("Whom?", "Bob")],
    "qa_chn": [("谁？", "安"), ("几只？", "七只")],
    "choice_eng": [("Who?", "Bob"), ("Whom?", "Dora")],
    "many_shot": [("Date?", "(A)"), ("And now?", "(B)")],
    "mf": [("The largest number of the list is: ", 97), ("The median of the list is: ", 5)],
    "summary": [("Sum up the first.", "Ann met Bob."), ("And the second.", "They met geese.")],
}


@pytest.fixture
def turns(tmp_path: Path) -> Any:
    """A function: the config of SCBench on invented contexts, with further overrides."""
    for name, asked in TURNS.items():
        more = {"options": OPTIONS} if name == "choice_eng" else {}
        rows = [
            {
                "id": number,
                "input" if name == "vt" else "context": "Ann met Bob at the mill. " * (5 + number),
                "multi_turns": [{"input": q, "answer": a} | more for q, a in asked],
            }
            for number in range(2)
        ]
        write_lines(tmp_path / f"scbench_{name}.jsonl", rows)
    return lambda *more: composed(
        "task=scbench", f"task.data={tmp_path}", "task_label=t", "device=cpu", *more
    )


def made_of(config: Any) -> Any:
    return instantiate(config.task, _convert_="all")


def test_scbench_asks_each_context_its_turns(turns: Any) -> None:
    made = made_of(turns())
    found = made.examples(shipped())
    assert len(found) == 9 * 2 * 2
    assert turns().compress_after == "context"
    assert len(build_job(turns()).units()[0]) == 18
    assert {example.history for example in found} == {"golden"}
    pairs = {
        e.dataset: (e, f) for e, f in reversed(list(zip(found[::2], found[1::2], strict=True)))
    }
    right = {"choice_eng": "B", "vt": "AB and CD", "mf": "it is 97"}
    assert set(pairs) == set(TURNS)
    for name, (first, second) in pairs.items():
        assert first.context_id == second.context_id is not None
        assert first.context == second.context
        assert "Ann met Bob at the mill." in first.context
        assert TURNS[name][0][0].strip() in first.question
        assert TURNS[name][1][0].strip() in second.question
        said = right.get(name, str(TURNS[name][0][1]))
        assert made.score(said, first)["score"] == pytest.approx(1.0), name
        assert made.score("nothing 0", first)["score"] == 0.0, name
    assert pairs["choice_eng"][0].question == (
        "Question: Who?\nA. Ann\nB. Bob\nC. Carl\nD. Dora\n\nThe the correct answer is"
    )
    assert [pairs[name][0].max_new_tokens for name in ("kv", "mf", "summary")] == [150, 5, 200]


def test_golden_turns_stand_before_a_question(turns: Any, monkeypatch: Any) -> None:
    only = "task.datasets=[kv,vt]"
    (kv1, a1), (kv2, _) = TURNS["kv"]

    def read(*more: str) -> list[str]:
        encoded = encode_examples(made_of(turns(only, *more)).examples(shipped()), shipped())
        return [shipped().tokenizer.decode(list(each.question_ids)) for each in encoded]

    texts = read()
    assert texts[1] == f"{kv1}{a1}\n\n{kv2}"
    assert any("Which variables have 7?AB, CD\n\nWhich have 8?" in text for text in texts)
    assert read("task.golden_turns=null")[1] == kv2
    own = made_of(turns(only, "task.golden_turns=false")).examples(shipped())
    assert {example.history for example in own} == {"own"}
    names = {"user": "user", "assistant": "model"}

    def template(messages: Any, **_: Any) -> str:
        return "".join(f"<{names[m['role']]}>{m['content']}</{names[m['role']]}>" for m in messages)

    encoder = chat()
    monkeypatch.setattr(encoder.tokenizer, "apply_chat_template", template, raising=False)
    found = encode_examples(made_of(turns("task.datasets=[kv]")).examples(encoder), encoder)
    assert encoder.tokenizer.decode(list(found[1].question_ids)) == (
        f"{kv1}</user><model>{a1}</model><user>{kv2}</user><model>"
    )


# reasoning: boxed answers, samples, pass@1

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": f"{i} geese and 2 more. How many?", "answer": f"{i}+2=\n#### {i + 2},000"}
        for i in range(3)
    ],
    "math500": [
        {
            "problem": f"What is half of ${i}$?",
            "answer": f"\\frac{{{i}}}{{2}}",
            "subject": "Algebra",
            "level": i,
            "unique_id": f"test/algebra/{i}.json",
        }
        for i in range(1, 4)
    ],
    "aime24": [{"ID": f"2024-I-{i}", "Problem": "Find n.", "Answer": 25 + i} for i in range(2)],
    "aime25": [{"id": str(i), "problem": "Find n.", "answer": f"0{25 + i}"} for i in range(2)],
}


def reasoning(name: str, folder: Path, *more: str) -> Any:
    write_lines(folder / f"{name}.jsonl", ROWS[name])
    return composed(
        f"task={name}", f"task.files=[{folder}/{name}.jsonl]", "device=cpu", "task_label=t",
        "budget.sink=2", "budget.window=2", *more,
    )  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_local_files_make_problems_and_aime_draws_eight_samples(tmp_path: Path, name: str) -> None:
    config = reasoning(name, tmp_path)
    task = made_of(config)
    found = task.examples(shipped())
    assert len(found) == len(ROWS[name])
    for example in found:
        assert example.question.endswith(
            "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert (example.context, example.context_id) == ("", None), "problems share no context"
        (answer,) = example.answers
        assert task.score(f"So it is \\boxed{{{answer}}}.", example) == {"score": 1.0, "null": 0.0}
        assert task.score(f"So it is {answer}.", example) == {"score": 0.0, "null": 1.0}
    assert found[0].max_new_tokens == (2048 if name == "gsm8k" else 32768)
    if name == "math500":
        assert found[0].id == "math500-test/algebra/1.json"
        assert found[0].fields["level"] == 1
        assert task.breakdown == ("level", "subject")
    job = build_job(config)
    sampling = Sampling(0.6, 0.95, 8) if name.startswith("aime") else Sampling()
    assert job.session.sampling == sampling
    assert len(job.units()[0][0].record_ids) == sampling.samples
    with pytest.raises(KVError, match="has no context; allowed: prompt"):
        build_job(reasoning(name, tmp_path, "compress_after=context")).units()
