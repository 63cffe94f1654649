"""One context, many questions: one prefill and one compression, and the answers of separate runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.asking import generate_one
from support.jobs import Letters, make_job, records_of, with_session
from support.prompts import methods

from kvbench.engine import ask as engine
from kvbench.engine.answer import Sampling, Stopping
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.prompts import PromptEncoder
from kvbench.records.shards import Shard
from kvbench.run.encoding import encode_examples
from kvbench.run.runner import run_job
from kvbench.tasks.base import Example, Task

ASKED = ("what next? ", "and who is it then? ", "why so? ")
NOT_ANSWERS = ("batch", "kept", "config_hash", "sample")


@dataclass(frozen=True, kw_only=True)
class Quiz(Task):
    """Contexts of letters, each asked the same questions."""

    name: ClassVar[str] = "quiz"

    contexts: int = 2
    questions: Sequence[str] = ASKED
    history: str = "none"
    context_id: str = "c{c}"
    context_ids: tuple[int, ...] | None = None

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        return [
            Example(
                id=f"c{c}q{q}",
                context="abcdefgh" * (8 + c),
                question=question,
                answers=(f"A{q}",),
                max_new_tokens=6,
                dataset="quiz",
                context_id=self.context_id.format(c=c),
                context_ids=self.context_ids,
                history=self.history,
                fields={"place": q},
            )
            for c in range(self.contexts)
            for q, question in enumerate(self.questions)
        ]

    def score(self, prediction: str, example: Example) -> dict[str, float]:
        return {"score": float("a" in prediction)}


def job(folder: Path, task: Task, labels: Sequence[str] = ("exact", "h2o"), **changes: Any) -> Any:
    picked = {label: method for label, method in methods().items() if label in labels}
    return make_job(folder, picked, **{"echo": task, "compress_after": "context", **changes})


def answers(result: Any) -> dict[str, list[dict[str, Any]]]:
    return {
        label: [{k: v for k, v in row.items() if k not in NOT_ANSWERS} for row in rows]
        for label, rows in records_of(result).items()
    }


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prefill."""
    seen, real = [], engine.prefill

    def prefill(model: Any, ids: Sequence[int], rows: Any, **options: Any) -> Any:
        seen.append(len(ids))
        return real(model, ids, rows, **options)

    monkeypatch.setattr(engine, "prefill", prefill)
    return seen


def test_a_context_is_read_once_for_its_questions(tmp_path: Path, prefills: list[int]) -> None:
    found = answers(run_job(job(tmp_path / "all", Quiz())))
    assert prefills == [64, 72], "one prefill for three questions"
    assert {row["status"] for rows in found.values() for row in rows} == {"ok"}
    for label in ("exact", "h2o"):
        ends = [row["cache_bytes_end"] - row["cache_bytes"] for row in found[label][:3]]
        assert (len(set(ends)) > 1) == (label == "exact"), "h2o evicts, exact grows by what it read"
    assert len({row["prediction"] for row in found["exact"]}) > 1, "or this would test little"
    prefills.clear()
    run_job(job(tmp_path / "prompt", Quiz(), compress_after="prompt"))
    assert prefills == [n + len(question) for n in (64, 72) for question in ASKED]


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_the_context_is_what_limit_and_shards_count(tmp_path: Path, compress_after: str) -> None:
    task = Quiz(contexts=5)
    first = run_job(job(tmp_path / "l", task, limit=2, compress_after=compress_after))
    found = [row["example_id"] for row in records_of(first)["exact"]]
    assert found == [f"c{c}q{q}" for c in range(2) for q in range(3)]
    parts = [
        job(tmp_path / "s", task, shard=Shard(part, 2), compress_after=compress_after)
        for part in (1, 2)
    ]
    seen = [{item.context for item in part.items} for part in parts]
    assert seen[0] | seen[1] == {f"c{c}" for c in range(5)}
    assert not seen[0] & seen[1]
    assert [run_job(part).complete for part in parts] == [False, True]


def test_a_run_goes_on_within_a_context(tmp_path: Path, prefills: list[int]) -> None:
    whole = answers(run_job(job(tmp_path / "whole", Quiz())))
    path = run_job(job(tmp_path / "cut", Quiz())).folders["h2o"] / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:30])
    prefills.clear()
    again = run_job(job(tmp_path / "cut", Quiz()))
    assert (prefills, again.written) == ([72], 2)
    assert answers(again) == whole


def test_turns_with_the_methods_own_answers_are_one_conversation(tmp_path: Path) -> None:
    """Each question meets what the method itself answered before; exact as in one long prompt."""
    made = job(tmp_path, Quiz(history="own"), ("exact", "h2o", "balancekv", "snapkv"))
    rows = records_of(run_job(made))
    assert {row["status"] for each in rows.values() for row in each} == {"ok"}
    letters = Letters()
    ids = letters.encode("abcdefgh" * 8)
    exact = {"exact": (build_method("exact"), Budget())}
    for row, question in zip(rows["exact"][:3], ASKED, strict=True):
        ids += letters.encode(question)
        how: dict[str, Any] = {"seed": 0, "example_id": "x", "compress_after": "context"}
        alone = generate_one(made.session.model, ids[:-1], ids[-1:], exact, Stopping(6), **how)
        assert row["prediction"] == letters.decode(alone["exact"].tokens)
        ids += [*alone["exact"].tokens, *letters.encode("\n\n")]
    grown = [row["cache_bytes_end"] for row in rows["exact"][:3]]
    assert grown == sorted(set(grown)), "the cache of a turn begins with those before"
    assert len({row["cache_bytes"] for row in rows["exact"][:3]}) == 1
    assert len({row["cache_bytes_end"] for row in rows["h2o"][:3]}) == 1


def test_golden_turns_are_a_question_that_begins_with_them(tmp_path: Path) -> None:
    golden = run_job(job(tmp_path / "1", Quiz(history="golden")))
    before = ["", f"{ASKED[0]}A0\n\n", f"{ASKED[0]}A0\n\n{ASKED[1]}A1\n\n"]
    written = tuple(a + b for a, b in zip(before, ASKED, strict=True))
    plain = run_job(job(tmp_path / "2", Quiz(questions=written)))
    fields = ("prediction", "prompt_tokens", "entries", "cache_bytes_end", "ratio")
    one, other = (
        [[row[k] for k in fields] for row in records_of(r)["h2o"]] for r in (golden, plain)
    )
    assert one == other
    assert {row["history"] for row in records_of(golden)["h2o"]} == {"golden"}


def test_what_stands_between_turns_comes_from_the_chat_template() -> None:
    class Chat(Letters):
        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return "".join(f"<{m['role'][0]}>{m['content']}<e>" for m in messages)

    encoder = PromptEncoder(Chat(), (1,), (2,), chat=True)
    found = encode_examples(Quiz(contexts=1, history="golden").examples(encoder), encoder)
    code = Letters().encode
    assert found[1].question_ids == (*code(ASKED[0]), 2, *code("A0<e><u>"), *code(ASKED[1]), 2)
    own = encode_examples(Quiz(contexts=1, history="own").examples(encoder), encoder)
    assert own[0].question_ids == (*code(ASKED[0]), 2)
    assert own[1].question_ids == (*code("<e><u>"), *code(ASKED[1]), 2)


@pytest.mark.parametrize(
    ("options", "compress_after", "says"),
    [
        ({"context_id": "c"}, "context", "'c1q0' has context_id 'c' and another context"),
        ({"history": "own"}, "prompt", r"the methods' own answers.*allowed: context"),
        ({"questions": ("",)}, "context", "has no question; allowed: all_but_last"),
        ({"context_ids": (1, 2)}, "prompt", "'c0q0' has token ids of context or question; allowed"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, options: Any, compress_after: str, says: str
) -> None:
    with pytest.raises(KVError, match=says):
        run_job(job(tmp_path, Quiz(**options), compress_after=compress_after))


@pytest.mark.parametrize(("mode", "contexts"), [("context", 2), ("prompt", 4)])
def test_samples_are_seeded_by_example_and_number(
    tmp_path: Path, prefills: list[int], mode: str, contexts: int
) -> None:
    warm = Sampling(temperature=1.0, top_p=0.9, samples=3)

    def run(name: str, sampling: Sampling, **changes: Any) -> Any:
        made = job(tmp_path / name, Quiz(questions=ASKED[:2]), compress_after=mode, **changes)
        return run_job(with_session(made, sampling=sampling))

    one = run("1", warm)
    assert len(prefills) == contexts, "samples share the prefill"
    rows = answers(one)["exact"]
    assert len(rows) == 12
    assert len({row["prediction"] for row in rows if row["example_id"][:4] == "c0q0"}) == 3
    many = {row["example_id"]: row for row in answers(run("2", warm, batch_size=4))["exact"]}
    assert many == {row["example_id"]: row for row in rows}
    few = run("3", replace(warm, samples=1))
    assert answers(few)["exact"] == [row for row in rows if "/" not in row["example_id"]]
    more = run("3", warm)
    assert (more.written, more.folders) == (16, few.folders), "more samples of the same run"
    assert run("g", Sampling()).folders["exact"].name != one.folders["exact"].name
