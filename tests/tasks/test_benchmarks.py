"""Published benchmarks that are configs over data of the right format: prompts, limits, scores, turns.

tests/data/benchmarks.json holds the first example of every data set (of invented rows), and scores of
some predictions of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.benchmarks import BOOK, WRITERS, write_lines
from support.command import composed
from support.encoders import shipped
from support.paths import ROOT

from kvbench.cli.build import build_job
from kvbench.engine.sampling import Sampling
from kvbench.kv import KVError
from kvbench.run.runner import run_job

GOLDEN = ROOT / "tests" / "data" / "benchmarks.json"

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


def scbench(folder: Path) -> Path:
    """scbench_<name>.jsonl with context (or input), multi_turns and options."""
    for name, asked in TURNS.items():
        more = {"options": OPTIONS} if name == "choice_eng" else {}
        context = "input" if name == "vt" else "context"
        turns = [{"input": question, "answer": answer} | more for question, answer in asked]
        rows = [{"id": i, context: BOOK * (i + 1), "multi_turns": turns} for i in range(2)]
        write_lines(folder / f"scbench_{name}.jsonl", rows)
    return folder


def overrides(name: str, folder: Path) -> list[str]:
    """What gives a benchmark its invented data."""
    if name in ROWS:
        write_lines(folder / f"{name}.jsonl", ROWS[name])
        return [f"task.files=[{folder}/{name}.jsonl]"]
    if name == "h2o_summaries":
        return [f"task.data={ROOT / 'tests/data/summaries'}"]
    return [f"task.data={(WRITERS | {'scbench': scbench})[name](folder)}"]


def made(name: str, folder: Path, *more: str) -> Any:
    config = composed(f"task={name}", "task_label=t", *overrides(name, folder), *more)
    return instantiate(config.task, _convert_="all")


def shown(made: Any, scores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The first example of each data set, and the scores of the predictions that `scores` has of it."""
    firsts = {e.dataset: e for e in reversed(made.examples(shipped()))}
    return {
        name: {
            "id": e.id,
            "context": e.context.replace(BOOK, "<BOOK>"),
            "question": e.question,
            "answers": list(e.answers),
            "max_new_tokens": e.max_new_tokens,
            "stop": list(e.stop),
            "asked": sum(other.context_id == e.context_id for other in made.examples(shipped()))
            if e.context_id
            else 1,
            "history": e.history,
            "fields": dict(e.fields),
            "scores": {said: made.score(said, e) for said in scores.get(name, {})},
        }
        for name, e in sorted(firsts.items())
    }


@pytest.mark.parametrize("name", [*WRITERS, "scbench", "h2o_summaries", *ROWS])
def test_prompts_limits_and_scores_are_those_committed(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    found = shown(made(name, tmp_path), {key: one["scores"] for key, one in golden.items()})
    for key, example in golden.items():
        scores = example["scores"]
        example["scores"] = {said: pytest.approx(each) for said, each in scores.items()}
        assert found.pop(key) == example
    assert not found


def test_earlier_answers_may_be_the_methods_own_or_left_out(tmp_path: Path) -> None:
    for given, history in (("false", "own"), ("null", "none")):
        turns = made("scbench", tmp_path, "task.datasets=[kv]", f"task.golden_turns={given}")
        assert {example.history for example in turns.examples(shipped())} == {history}


@pytest.mark.slow
def test_scbench_compresses_before_aime_draws_eight_samples_and_all_run(
    tmp_path: Path,
) -> None:
    def job(name: str, *more: str) -> Any:
        where = ["device=cpu", "task_label=t", "budget.sink=2", "budget.window=2", "limit=1"]
        where += [f"results_dir={tmp_path}", f"experiment_name={name}", "method=[exact,snapkv]"]
        return build_job(composed(f"task={name}", *overrides(name, tmp_path), *where, *more))

    assert job("scbench").session.compress_after == "context"
    assert len(job("scbench", "limit=null").units.every) == 18
    for name in ("loogle", "scbench", *ROWS):
        sampling = Sampling(0.6, 0.95, 8) if name.startswith("aime") else Sampling()
        small = job(name, "task.max_new_tokens=2")
        assert small.session.sampling == sampling
        if name in ROWS:
            assert len(small.units.every[0].record_ids) == sampling.samples
        result = run_job(small)
        assert (result.failed, result.written > 0) == (0, True), name
    with pytest.raises(KVError, match="has no context; allowed: prompt"):
        job("gsm8k", "compress_after=context").units  # noqa: B018
