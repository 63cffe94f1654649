"""One context, many questions: one prefill and one compression, and the answers of separate runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.faulty import with_session
from support.jobs import Letters, make_job, records_of
from support.prompts import methods

from kvbench.engine import generate as engine
from kvbench.engine.generate import run_forks
from kvbench.engine.sampling import Sampling
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.records.shards import Shard
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.strata import strata_of
from kvbench.run.encoding import encode_examples
from kvbench.run.preview import print_dry_run
from kvbench.run.runner import run_job
from kvbench.tasks.base import Example, PromptEncoder, Task

ASKED = ("what next? ", "and who is it then? ", "why so? ")
NOT_ANSWERS = ("batch", "kept", "prefill_s", "compress_s", "decode_s", "config_hash")


@dataclass(frozen=True, kw_only=True)
class Quiz(Task):
    """Contexts of letters, each asked the same questions."""

    name: ClassVar[str] = "quiz"

    contexts: int = 2
    questions: Sequence[str] = ASKED
    history: str = "none"
    new_tokens: int = 6

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        return [
            Example(
                id=f"c{c}q{q}",
                context="abcdefgh" * (8 + c),
                question=question,
                answers=(f"A{q}",),
                max_new_tokens=self.new_tokens,
                dataset="quiz",
                context_id=f"c{c}",
                history=self.history,
                fields={"place": q},
            )
            for c in range(self.contexts)
            for q, question in enumerate(self.questions)
        ]

    def score(self, prediction: str, example: Example) -> dict[str, float]:
        return {"score": float("a" in prediction)}


def job(
    tmp_path: Path, task: Task, labels: Sequence[str] = ("exact", "h2o"), **changes: Any
) -> Any:
    picked = {label: method for label, method in methods().items() if label in labels}
    changes = {"compress_after": "context", **changes}
    return make_job(tmp_path, picked, echo=task, **changes)


def answers(result: Any, *ids: str) -> dict[str, list[dict[str, Any]]]:
    return {
        label: [
            {k: v for k, v in row.items() if k not in NOT_ANSWERS}
            for row in rows
            if not ids or row["example_id"] in ids
        ]
        for label, rows in records_of(result).items()
    }


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prefill."""
    seen, real = [], engine.prefill

    def prefill(model: Any, ids: Sequence[int], forks: Any, **options: Any) -> Any:
        seen.append(len(ids))
        return real(model, ids, forks, **options)

    monkeypatch.setattr(engine, "prefill", prefill)
    return seen


def test_one_compressed_context_answers_as_separate_runs_do(
    tmp_path: Path, prefills: list[int]
) -> None:
    """What each question leaves in the cache is counted after it."""
    everything = ("exact", "snapkv_2bit", "h2o", "balancekv", "subgen_streaming")
    together = run_job(job(tmp_path / "all", Quiz(), everything))
    assert prefills == [64, 72], "one prefill for three questions"
    found = answers(together)
    assert {row["status"] for rows in found.values() for row in rows} == {"ok"}
    for q in range(len(ASKED)):
        prefills.clear()

        @dataclass(frozen=True, kw_only=True)
        class One(Quiz):
            only: int

            def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
                return [e for e in super().examples(encoder) if e.fields["place"] == self.only]

        alone = answers(run_job(job(tmp_path / str(q), One(only=q), everything)))
        assert len(prefills) == 2
        assert alone == {label: rows[q :: len(ASKED)] for label, rows in found.items()}
    for label in ("exact", "h2o"):
        ends = [row["cache_bytes_end"] - row["cache_bytes"] for row in found[label][:3]]
        assert (len(set(ends)) > 1) == (label == "exact"), "h2o evicts, exact grows by what it read"
    predictions = {row["prediction"] for row in found["exact"]}
    assert len(predictions) > 1, "questions that are answered alike would test little"


def test_with_the_question_in_the_prompt_each_is_a_prompt(
    tmp_path: Path, prefills: list[int]
) -> None:
    run_job(job(tmp_path, Quiz(), compress_after="prompt"))
    assert prefills == [n + len(question) for n in (64, 72) for question in ASKED]


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_the_context_is_what_limit_and_shards_count(tmp_path: Path, compress_after: str) -> None:
    task = Quiz(contexts=5)
    first = run_job(job(tmp_path / "l", task, limit=2, compress_after=compress_after))
    assert [row["example_id"] for row in records_of(first)["exact"]] == [
        f"c{c}q{q}" for c in range(2) for q in range(3)
    ]
    seen = []
    for part in (1, 2):
        made = job(tmp_path / "s", task, shard=Shard(part, 2), compress_after=compress_after)
        seen.append({unit.context for unit in made.units()[1]})
        result = run_job(made)
    assert seen[0] | seen[1] == {f"c{c}" for c in range(5)}
    assert not seen[0] & seen[1]
    assert result.complete


def test_a_run_goes_on_within_a_context(tmp_path: Path, prefills: list[int]) -> None:
    whole = answers(run_job(job(tmp_path / "whole", Quiz())))
    cut = job(tmp_path / "cut", Quiz())
    folder = run_job(cut).folders["h2o"]
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:4]) + lines[4][:30])
    prefills.clear()
    again = run_job(job(tmp_path / "cut", Quiz()))
    assert (prefills, again.written) == ([72], 2)
    assert answers(again) == whole
    assert run_job(job(tmp_path / "cut", Quiz())).written == 0


def test_batches_keep_contexts_together_and_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Quiz(contexts=3)
    one = run_job(job(tmp_path / "1", task))
    two = run_job(job(tmp_path / "2", task, batch_size=2))
    assert [row["batch"] for row in records_of(two)["exact"]] == [2] * 6 + [1] * 3
    monkeypatch.setattr(engine.memory, "total_bytes", lambda device: 1)
    monkeypatch.setattr(engine.memory, "used_bytes", lambda device: 1)
    copies: list[int] = []
    real = engine.decode_rows
    monkeypatch.setattr(
        engine, "decode_rows", lambda m, rows, g: (copies.append(len(rows)), real(m, rows, g))
    )
    short = run_job(job(tmp_path / "3", task))
    assert set(copies) == {2}, "where memory is short for copies, one question after the other"
    assert answers(one) == answers(two) == answers(short)


def test_turns_with_the_methods_own_answers_are_one_conversation(tmp_path: Path) -> None:
    """Each question meets what the method itself answered before; exact as in one long prompt."""
    result = run_job(job(tmp_path, Quiz(history="own"), ("exact", "h2o", "balancekv", "snapkv")))
    rows = records_of(result)
    assert {row["status"] for each in rows.values() for row in each} == {"ok"}
    made = job(tmp_path / "x", Quiz())
    letters = Letters()
    ids = letters.encode("abcdefgh" * 8)
    for row, question in zip(rows["exact"][:3], ASKED, strict=True):
        ids += letters.encode(question)
        alone = run_forks(
            made.session.model,
            ids[:-1],
            ids[-1:],
            {"exact": (build_method("exact"), Budget())},
            Stopping(6),
            seed=0,
            example_id="x",
            compress_after="context",
        )["exact"]
        assert row["prediction"] == letters.decode(alone.tokens)
        ids += [*alone.tokens, *letters.encode("\n\n")]
    grown = [row["cache_bytes_end"] for row in rows["exact"][:3]]
    assert grown == sorted(set(grown)), "the cache of a turn begins with those before"
    assert len({row["cache_bytes"] for row in rows["exact"][:3]}) == 1
    assert len({row["cache_bytes_end"] for row in rows["h2o"][:3]}) == 1
    with pytest.raises(KVError, match=r"goes on from the methods' own answers.*allowed: context"):
        run_job(job(tmp_path / "p", Quiz(history="own"), compress_after="prompt"))


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_golden_turns_are_a_question_that_begins_with_them(
    tmp_path: Path, compress_after: str
) -> None:
    golden = run_job(job(tmp_path / "1", Quiz(history="golden"), compress_after=compress_after))
    before = ["", f"{ASKED[0]}A0\n\n", f"{ASKED[0]}A0\n\n{ASKED[1]}A1\n\n"]
    written = tuple(a + b for a, b in zip(before, ASKED, strict=True))
    plain = run_job(job(tmp_path / "2", Quiz(questions=written), compress_after=compress_after))
    told = ("prediction", "prompt_tokens", "entries", "cache_bytes_end", "ratio")
    assert [[row[k] for k in told] for row in records_of(golden)["h2o"]] == [
        [row[k] for k in told] for row in records_of(plain)["h2o"]
    ]
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


def test_a_context_id_stands_for_one_context(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mixed(Quiz):
        def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
            return [replace(e, context_id="c") for e in super().examples(encoder)]

    with pytest.raises(KVError, match="'c1q0' has context_id 'c' and another context"):
        run_job(job(tmp_path, Mixed()))
    with pytest.raises(KVError, match="history 'gold'; allowed: none, golden, own"):
        run_job(job(tmp_path, Quiz(history="gold")))


def test_a_method_that_fails_takes_no_other_along(tmp_path: Path) -> None:
    """A context that has no time left: its own questions say so, the others are answered."""
    made = job(tmp_path, Quiz())
    late = run_job(with_session(made, example_timeout=1e-9))
    assert {row["status"] for rows in records_of(late).values() for row in rows} == {"timeout"}
    for rows in records_of(late).values():
        assert [row["place"] for row in rows] == [0, 1, 2] * 2
        assert {row["context_id"] for row in rows} == {"c0", "c1"}


def test_intervals_are_over_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = job(tmp_path, Quiz(contexts=4))
    run_job(made)
    (group,) = load_experiment(tmp_path / "e").groups
    assert group.meta.unit == "context_id"
    (scores,) = strata_of(group)
    assert scores.values.shape == (12, 2)
    assert scores.stratum(scores.values).counts.tolist() == [[3.0, 3.0]] * 4
    print_dry_run(job(tmp_path / "dry", Quiz(contexts=4)))
    said = " ".join(capsys.readouterr().out.split())
    assert "4 examples, 4 of them to run, 12 answers per method" in said


def test_samples_are_seeded_by_example_and_number(tmp_path: Path, prefills: list[int]) -> None:
    task = Quiz(contexts=2, questions=ASKED[:2])
    warm = Sampling(temperature=1.0, top_p=0.9, samples=3)

    def run(name: str, sampling: Sampling, **changes: Any) -> Any:
        return run_job(with_session(job(tmp_path / name, task, **changes), sampling=sampling))

    for mode, contexts in (("context", 2), ("prompt", 4)):
        prefills.clear()
        one = run(f"{mode}1", warm, compress_after=mode)
        assert len(prefills) == contexts, "samples share the prefill"
        rows = records_of(one)["exact"]
        assert len(rows) == 12
        assert len({row["prediction"] for row in rows if row["example_id"][:4] == "c0q0"}) == 3
        assert {row["sample"] for row in rows} == {0, 1, 2}
        many = run(f"{mode}2", warm, compress_after=mode, batch_size=4)
        assert {row["example_id"]: row["prediction"] for row in records_of(many)["exact"]} == {
            row["example_id"]: row["prediction"] for row in rows
        }
        few = run(f"{mode}3", replace(warm, samples=1), compress_after=mode)
        assert answers(few)["exact"] == [
            {k: v for k, v in row.items() if k != "sample"}
            for row in answers(one)["exact"]
            if "/" not in row["example_id"]
        ]
        more = run(f"{mode}3", warm, compress_after=mode)
        assert (more.written, more.folders) == (16, few.folders), "more samples of the same run"
    greedy = run("g", Sampling(), compress_after="context")
    assert greedy.folders["exact"].name != run("context1", warm).folders["exact"].name
