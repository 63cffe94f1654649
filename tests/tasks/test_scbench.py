"""SCBench's turns and shared contexts, on invented contexts in its format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.configs import composed
from support.encoders import chat, shipped
from support.jobs import Letters, make_job, records_of

from kvbench.cli.build import build_job
from kvbench.methods import build_method
from kvbench.run.encoding import encode_examples
from kvbench.run.runner import run_job
from kvbench.tasks.base import PromptEncoder
from kvbench.tasks.metrics import METRICS, Key

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


def folder_of(tmp_path: Path) -> Path:
    for name, turns in TURNS.items():
        rows = [
            {
                "id": number,
                "input" if name == "vt" else "context": "Ann met Bob at the mill. " * (5 + number),
                "multi_turns": [
                    {"input": asked, "answer": answer}
                    | ({"options": OPTIONS} if name == "choice_eng" else {})
                    for asked, answer in turns
                ],
            }
            for number in range(2)
        ]
        path = tmp_path / f"scbench_{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return tmp_path


def config_of(tmp_path: Path, *more: str) -> Any:
    return composed(
        "task=scbench", f"task.data={folder_of(tmp_path)}", "task_label=t", "device=cpu", *more
    )


def task_of(tmp_path: Path, *more: str) -> Any:
    return instantiate(config_of(tmp_path, *more).task, _convert_="all")


def test_every_data_set_has_its_prompts_turns_and_limits(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    found = task.examples(shipped())
    assert len(found) == 9 * 2 * 2
    assert {example.history for example in found} == {"golden"}
    by_context: dict[str, list[Any]] = {}
    for example in found:
        by_context.setdefault(str(example.context_id), []).append(example)
    assert {len(asked) for asked in by_context.values()} == {2}
    firsts = {asked[0].dataset: asked for asked in reversed(by_context.values())}
    assert set(firsts) == set(TURNS)
    for name, (first, second) in firsts.items():
        assert first.context == second.context
        assert "Ann met Bob at the mill." in first.context
        assert TURNS[name][0][0].strip() in first.question
        assert TURNS[name][1][0].strip() in second.question
    assert firsts["choice_eng"][0].question == (
        "Question: Who?\nA. Ann\nB. Bob\nC. Carl\nD. Dora\n\nThe the correct answer is"
    )
    limits = {name: asked[0].max_new_tokens for name, asked in firsts.items()}
    assert limits["kv"] == 150
    assert limits["mf"] == 5
    assert limits["summary"] == 200
    right = {"choice_eng": "B", "vt": "AB and CD", "mf": "it is 97"}
    for name, (first, _) in firsts.items():
        said = right.get(name, str(TURNS[name][0][1]))
        assert task.score(said, first)["score"] == pytest.approx(1.0), name
        assert task.score("nothing 0", first)["score"] == 0.0, name
    assert task.score("only ab", firsts["vt"][0])["score"] == 0.5


def tail(encoded: Any, encoder: Any, tokens: int) -> str:
    return str(encoder.tokenizer.decode(list(encoded.question_ids)[-tokens:]))


def test_golden_turns_stand_before_a_question(tmp_path: Path) -> None:
    only = "task.datasets=[kv,vt]"
    golden = encode_examples(task_of(tmp_path, only).examples(shipped()), shipped())
    texts = [shipped().tokenizer.decode(list(each.question_ids)) for each in golden]
    (kv1, a1), (kv2, _) = TURNS["kv"]
    assert texts[1] == f"{kv1}{a1}\n\n{kv2}"
    assert any("Which variables have 7?AB, CD\n\nWhich have 8?" in text for text in texts)
    alone = task_of(tmp_path, only, "task.golden_turns=null").examples(shipped())
    assert {example.history for example in alone} == {"none"}
    plain = encode_examples(alone, shipped())
    assert shipped().tokenizer.decode(list(plain[1].question_ids)) == kv2
    own = task_of(tmp_path, only, "task.golden_turns=false").examples(shipped())
    assert {example.history for example in own} == {"own"}


def test_chat_turns_have_the_template_between_them(tmp_path: Path, monkeypatch: Any) -> None:
    names = {"user": "user", "assistant": "model"}

    def template(messages: Any, **_: Any) -> str:
        return "".join(f"<{names[m['role']]}>{m['content']}</{names[m['role']]}>" for m in messages)

    encoder = chat()
    monkeypatch.setattr(encoder.tokenizer, "apply_chat_template", template, raising=False)
    found = encode_examples(task_of(tmp_path, "task.datasets=[kv]").examples(encoder), encoder)
    (kv1, a1), (kv2, _) = TURNS["kv"]
    assert encoder.tokenizer.decode(list(found[1].question_ids)) == (
        f"{kv1}</user><model>{a1}</model><user>{kv2}</user><model>"
    )


@pytest.mark.parametrize("turns", ["true", "false", "null"])
def test_each_mode_runs_from_one_compression(tmp_path: Path, turns: str) -> None:
    config = config_of(tmp_path)
    assert config.compress_after == "context"
    assert len(build_job(config).units()[0]) == 18
    options = ["task.datasets=[kv,mf]", f"task.golden_turns={turns}", "task.max_input=null"]
    task = task_of(tmp_path, *options, "task.subsets.kv.max_new_tokens=4")
    methods = {name: build_method(name) for name in ("exact", "h2o", "balancekv")}
    made = make_job(tmp_path / "r", methods, echo=task, compress_after="context")
    made.session.__dict__.update(encoder=PromptEncoder(Letters()))
    for rows in records_of(run_job(made)).values():
        assert len(rows) == 8
        assert {row["status"] for row in rows} == {"ok"}
        assert len({row["context_id"] for row in rows}) == 4
        history = {"true": "golden", "false": "own", "null": None}[turns]
        assert {row.get("history") for row in rows} == {history}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("B", 1), ("B. Bob", 1), ("Bob", 1), ("A", 0), ("", 0), ("The answer is: B", 1),
        ("I think the answer is C", 0), ("so (maybe) it is B or C", 1), ("perhaps", 0),
    ],
)  # fmt: skip
def test_the_first_letter_counts(said: str, score: int) -> None:
    key = Key(("Bob",), tuple(OPTIONS))
    assert METRICS["first_letter"](said, key)["score"] == score
