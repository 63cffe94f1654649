"""The shipped model: loads without kvbench, reads any text, and finds what it is asked for."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.jobs import make_job, records_of
from support.paths import ROOT
from support.probing import shipped
from transformers import AutoTokenizer

from kvbench.methods import build_method
from kvbench.run.runner import run_job
from kvbench.tasks.base import Task
from kvbench.tasks.longeval_lines import LongEvalLines
from kvbench.tasks.needle import Needle

ASSET = ROOT / "kvbench" / "assets" / "recall_mini"
NEVER_TRAINED_SEED = 77


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ASSET)


def mean_score(folder: Path, task: Task) -> float:
    """Of the exact cache over a task's examples."""
    job = make_job(folder, {"exact": build_method("exact")}, echo=task, session=shipped())
    return statistics.mean(record["score"] for record in records_of(run_job(job))["exact"])


def test_it_is_small_and_holds_no_pickles() -> None:
    assert sum(file.stat().st_size for file in ASSET.glob("*.safetensors")) <= 12e6
    assert {file.suffix for file in ASSET.iterdir()} <= {".safetensors", ".json", ".md"}


def test_any_text_comes_back_as_it_was_and_digits_are_read_in_pairs(tokenizer: Any) -> None:
    rng = random.Random(0)
    texts = ["".join(map(chr, range(128))), "a  b\t\n\n c , . ' s ", " , x n't", "日本 é 🙂", ""]
    texts += ["".join(chr(rng.randrange(128)) for _ in range(300)) for _ in range(20)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < 2000
    for number in ("7", "42", "915", "2416", "50000", "00915"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(number)]
        assert pieces == [number[at : at + 2] for at in range(0, len(number), 2)]


@pytest.mark.slow
def test_it_finds_lines_and_the_needle(tmp_path: Path, shared_file: Any) -> None:
    path = shared_file("data/longeval_lines/200_lines.jsonl")
    (tmp_path / "five.jsonl").write_text("".join(path.open().readlines()[:5]))
    needle = yaml.safe_load((ROOT / "conf" / "task" / "needle.yaml").read_text())
    texts = {name: needle[name] for name in ("needle", "question", "answer")}
    grid: dict[str, Any] = {"lengths": [512, 1024], "depths": [0, 50, 100], "num_examples": 1}
    tasks: list[tuple[Task, float]] = [
        (LongEvalLines(num_lines=[20], num_examples=15, seed=NEVER_TRAINED_SEED), 0.99),
        (LongEvalLines(num_lines=[50, 100], num_examples=10, seed=NEVER_TRAINED_SEED), 0.9),
        (Needle(**texts, **grid, seed=NEVER_TRAINED_SEED), 0.95),
        (LongEvalLines(files=[str(tmp_path / "five.jsonl")]), 0.8),
    ]
    for i, (task, least) in enumerate(tasks):
        assert mean_score(tmp_path / str(i), task) >= least
