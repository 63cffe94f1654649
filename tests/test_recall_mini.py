"""The shipped model: loads without kvbench, reads any text, and finds what it is asked for."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
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
from kvbench.tasks.longeval_lines import INTRODUCTION, QUESTION, LongEvalLines
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


@pytest.mark.slow
def test_it_loads_with_transformers_and_nothing_of_kvbench(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(ASSET)!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(ASSET)!r})\n"
        "assert type(model).__name__ == 'LlamaForCausalLM'\n"
        "assert tokenizer.eos_token_id == model.generation_config.eos_token_id\n"
        "assert not any(name.split('.')[0] == 'kvbench' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


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
def test_training_data_are_what_the_tasks_produce(tokenizer: Any, monkeypatch: Any) -> None:
    """Ids put together from parts equal those of the whole text, and the template is the task's."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "recall_mini"))
    import recall_mini_data

    text = recall_mini_data.Generator(tokenizer)
    rng = random.Random(5)
    for sequence in (
        text.record(rng, 30, 2),
        text.record(rng, 6, 2, repeats=3),
        text.shuffled_lines(rng, 4, 100, full=True),
        text.shuffled_lines(rng, 4, 100, full=False),
        text.needles(rng, 300, 3),
        text.prose_needles(rng, 300, 3),
    ):
        decoded = tokenizer.decode(sequence.ids)
        assert tokenizer.encode(decoded) == sequence.ids
        assert len(sequence.ids) == len(sequence.weight) == len(sequence.scored)
        assert "San Francisco" not in decoded
    whole = tokenizer.decode(text.record(rng, 30, 1).ids)
    key = whole.split("> in line ")[1].split("?")[0]
    assert whole.startswith(INTRODUCTION)
    assert QUESTION.format(key=key) in whole
    assert recall_mini_data.train_tokenizer().get_vocab() == tokenizer.get_vocab()


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
