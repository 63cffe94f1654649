"""Published benchmarks that are configs over data of the right format: prompts, limits, scores, turns.

tests/data/benchmarks holds invented rows in the published formats; benchmarks.json beside it the first
example of every data set, and scores of some predictions of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.command import composed, job_of
from support.encoders import shipped
from support.paths import ROOT

from kvbench.engine.answer import Sampling
from kvbench.kv import KVError
from kvbench.run.runner import run_job

GOLDEN = ROOT / "tests" / "data" / "benchmarks.json"
INVENTED = ROOT / "tests" / "data" / "benchmarks"
FOLDERS = ("longbench_v2", "infinitebench", "zeroscrolls", "loogle", "scbench")
FILES = ("gsm8k", "math500", "aime24", "aime25")
BOOK = "Ann met Bob at the mill. They counted seven geese. " * 8


def overrides(name: str) -> list[str]:
    if name in FILES:
        return [f"task.files=[{INVENTED / name}.jsonl]"]
    folder = ROOT / "tests/data/summaries" if name == "h2o_summaries" else INVENTED / name
    return [f"task.data={folder}"]


def benchmark(name: str, *more: str) -> Any:
    config = composed(f"task={name}", "task_label=t", *overrides(name), *more)
    return instantiate(config.task, _convert_="all")


def described(task: Any, predictions: dict[str, Iterable[str]]) -> dict[str, Any]:
    """The first example of each data set, and the scores of the predictions for that data set."""
    examples = task.examples(shipped())
    questions = Counter(example.context_id for example in examples)
    return {
        example.dataset: {
            "id": example.id,
            "context": example.context.replace(BOOK, "<BOOK>"),
            "question": example.question,
            "answers": list(example.answers),
            "max_new_tokens": example.max_new_tokens,
            "stop": list(example.stop),
            "asked": questions[example.context_id] if example.context_id else 1,
            "history": example.history,
            "fields": dict(example.fields),
            "scores": {
                prediction: task.score(prediction, example)
                for prediction in predictions.get(example.dataset, ())
            },
        }
        for example in reversed(examples)
    }


@pytest.mark.parametrize("name", [*FOLDERS, "h2o_summaries", *FILES])
def test_prompts_limits_and_scores_are_those_committed(name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    predictions = {dataset: example["scores"] for dataset, example in golden.items()}
    actual = described(benchmark(name, "task.order=file"), predictions)
    assert actual.keys() == golden.keys()
    for dataset, example in golden.items():
        for prediction, scores in example["scores"].items():
            example["scores"][prediction] = pytest.approx(scores)
        assert actual[dataset] == example


def test_earlier_answers_may_be_the_methods_own_or_left_out() -> None:
    for golden_turns, history in (("false", "own"), ("null", "none")):
        turns = benchmark("scbench", "task.datasets=[kv]", f"task.golden_turns={golden_turns}")
        assert {example.history for example in turns.examples(shipped())} == {history}


@pytest.mark.slow
def test_scbench_compresses_before_aime_draws_eight_samples_and_all_run(tmp_path: Path) -> None:
    def job(name: str, *more: str) -> Any:
        where = ["model=tiny_random", "device=cpu", "task_label=t", "limit=1"]
        where += ["budget.sink=2", "budget.window=2"]
        where += [f"results_dir={tmp_path}", f"experiment_name={name}", "method=[exact,snapkv]"]
        return job_of(f"task={name}", *overrides(name), *where, *more)

    assert job("scbench").session.compress_after == "context"
    assert len(job("scbench", "limit=null").within_limit) == 18
    for name in ("loogle", "scbench", *FILES):
        sampling = Sampling(0.6, 0.95, 8) if name.startswith("aime") else Sampling()
        small = job(name, "task.max_new_tokens=2")
        assert small.session.sampling == sampling
        if name in FILES:
            assert len(small.within_limit[0].record_ids) == sampling.samples
        result = run_job(small)
        assert (result.failed, result.written > 0) == (0, True), name
    with pytest.raises(KVError, match="has no context; allowed: all_but_last"):
        job("gsm8k", "compress_after=context").items  # noqa: B018
