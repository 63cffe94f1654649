"""Reasoning: boxed answers, GSM8K, MATH-500 and AIME from local files, samples and pass@1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.configs import composed
from support.encoders import shipped
from support.faulty import with_session
from support.jobs import Letters, make_job, records_of

from kvbench.cli.build import build_job
from kvbench.engine.sampling import Sampling
from kvbench.kv import KVError
from kvbench.report.experiment import load_experiment
from kvbench.run.runner import run_job
from kvbench.tasks.base import PromptEncoder
from kvbench.tasks.metrics import METRICS, Key

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {
            "question": f"Ann has {i} geese and 2 more. How many?",
            "answer": f"{i}+2=\n#### {i + 2},000",
        }
        for i in range(3)
    ],
    "math500": [
        {
            "problem": f"What is half of ${i}$?",
            "solution": "Halve it.",
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


def composed_task(name: str, folder: Path, *more: str) -> Any:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return composed(
        f"task={name}", f"task.files=[{file}]", "device=cpu", "task_label=t", "budget.sink=2",
        "budget.window=2", *more
    )  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_local_files_make_examples(tmp_path: Path, name: str) -> None:
    task = instantiate(composed_task(name, tmp_path).task, _convert_="all")
    found = task.examples(shipped())
    assert len(found) == len(ROWS[name])
    for example in found:
        assert example.question.endswith(
            "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert not example.context
        assert example.context_id is None, "problems share no context"
        (answer,) = example.answers
        assert task.score(f"So it is \\boxed{{{answer}}}.", example) == {"score": 1.0, "null": 0.0}
        assert task.score(f"So it is {answer}.", example) == {"score": 0.0, "null": 1.0}
    assert found[0].max_new_tokens == (2048 if name == "gsm8k" else 32768)
    if name == "math500":
        assert found[0].id == "math500-test/algebra/1.json"
        assert found[0].fields["level"] == 1
        assert task.breakdown == ("level", "subject")
    if name == "gsm8k":
        assert found[1].answers == ("3,000",)


@pytest.mark.parametrize(
    ("prediction", "answer", "right"),
    [
        (r"\boxed{42}", "42", 1),
        (r"first \boxed{41}, then \boxed{42}", "42", 1),
        (r"first \boxed{42}, then \boxed{41}", "42", 0),
        (r"\boxed{\frac{1}{2}}", r"\dfrac12", 1),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}", 1),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", 1),
        (r"\boxed{1,234}", "1234", 1),
        (r"\boxed{\$1,234.00}", "1234", 1),
        (r"\boxed{025}", "25", 1),
        (r"\boxed{-3}", "3", 0),
        (r"\boxed{5\%}", "5", 1),
        (r"\fbox{7}", "7", 1),
        (r"\boxed 7$", "7", 1),
        (r"\boxed{7", "7", 0),
        (r"\boxed", "7", 0),
        (r"\boxed{}", "7", 0),
        ("7", "7", 0),
    ],
)
def test_what_is_boxed_counts(prediction: str, answer: str, right: int) -> None:
    assert METRICS["boxed"](prediction, Key((answer,)))["score"] == right


def test_whatever_a_model_writes_is_scored() -> None:
    for text in ("\\boxed{" * 500, "}" * 50 + "\\boxed", "\\boxed \\boxed{", "\\boxed{\\boxed 1}"):
        assert METRICS["boxed"](text, Key(("1",)))["score"] in (0.0, 1.0)


def test_aime_draws_eight_samples_and_the_others_none(tmp_path: Path) -> None:
    for name, sampling in (
        ("aime24", Sampling(0.6, 0.95, 8)),
        ("aime25", Sampling(0.6, 0.95, 8)),
        ("math500", Sampling()),
    ):
        job = build_job(composed_task(name, tmp_path))
        assert job.session.sampling == sampling
        assert len(job.units()[0]) == len(ROWS[name])
        assert len(job.units()[0][0].record_ids) == sampling.samples
    with pytest.raises(KVError, match="has no context; allowed: prompt"):
        build_job(composed_task("gsm8k", tmp_path, "compress_after=context")).units()


def test_pass_at_one_is_the_mean_over_samples_of_each_problem(tmp_path: Path) -> None:
    task = instantiate(
        composed_task("gsm8k", tmp_path, "task.max_new_tokens=20").task, _convert_="all"
    )
    made = with_session(make_job(tmp_path, echo=task), sampling=Sampling(1.0, 1.0, 4))
    made.session.__dict__.update(encoder=PromptEncoder(Letters()))
    result = run_job(made)
    for rows in records_of(result).values():
        assert len(rows) == 12
        assert {row["status"] for row in rows} == {"ok"}
        assert len({row["prediction"] for row in rows}) > 6
    (group,) = load_experiment(tmp_path / "e").groups
    assert group.meta.unit == "context_id"
    assert group.records["context_id"].nunique() == 3
