"""Every task, on generated or invented data, with the eight methods of the default list."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.benchmarks import WRITERS
from support.configs import composed
from support.jobs import make_job, records_of
from support.paths import DATA

from kvbench.cli.catalogue import catalogue
from kvbench.run.runner import run_job
from kvbench.tasks.base import PromptEncoder, Task

DEFAULT = ["exact", "streaming_llm", "uniform", "snapkv", "pyramidkv", "h2o", "subgen", "balancekv"]
FEW = ["task.max_new_tokens=2"]
TASKS: dict[str, list[str]] = {
    "ruler": ["task.tasks=[vt,fwe,niah_multiquery]", "task.lengths=[1200]", "task.num_examples=1"],
    "key_value": [*FEW, "task.num_pairs=[4]", "task.num_examples=2", "task.queries=2"],
    "passkey": [*FEW, "task.lengths=[300]", "task.num_examples=1", "task.queries=3"],
    "number_string": [*FEW, "task.lengths=[300]", "task.num_examples=1"],
    "needle": [*FEW, "task.lengths=[300]", "task.depths=[50]", "task.num_examples=1"],
    "needle_short": [*FEW, "task.lengths=[300]", "task.depths=[50]", "task.num_examples=1"],
    "needle_questions": [*FEW, "task.lengths=[300]", "task.depths=[0,100]", "task.num_examples=1"],
    "gsm8k": FEW,
    "longeval_lines": [*FEW, "task.num_lines=[6]", "task.num_examples=2"],
    "longeval_redundant": [*FEW, "task.num_lines=[4]", "task.num_examples=1"],
    "longbench": [
        "task.datasets=[passage_count]", "task.per_dataset=1", "task.max_input=300",
        f"task.data={DATA}",
    ],
    "longbench_v2": [*FEW, "task.per_dataset=1"],
    "infinitebench": ["task.datasets=[passkey,code_run,math_find,code_debug]", "task.per_dataset=1"],
    "zeroscrolls": FEW,
    "loogle": [f"task.subsets.{n}.max_new_tokens=2" for n in
               ("shortdep_qa", "longdep_qa", "shortdep_cloze", "longdep_summarization")],
    "jsonl": [*FEW, "task.fields={context: text, question: q, answers: gold}", "task.metric=f1"],
}  # fmt: skip


class Hashed:
    """A tokenizer of one token per word for a model with 97 of them; what it decodes is a guess."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        words = re.findall(r"\w+|[^\w ]", text)
        return [3 + zlib.crc32(word.encode()) % 94 for word in words]

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{token}" for token in token_ids)


def made(name: str, folder: Path) -> Task:
    options = list(TASKS[name])
    if name in WRITERS:
        options.append(f"task.data={WRITERS[name](folder)}")
    if name == "gsm8k":
        rows = [{"question": "How many are 2 and 3? " * 20, "answer": "2 + 3\n#### 5"}]
        (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
        options.append(f"task.files=[{folder / 'test.jsonl'}]")
    if name == "jsonl":
        rows = [{"text": "One two three. " * 30, "q": [f"{i}?", "Why?"], "gold": ["w5", "two"]}
                for i in range(2)]  # fmt: skip
        (folder / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
        options.append(f"task.files=[{folder / 'my.jsonl'}]")
    task = instantiate(composed(f"task={name}", *options).task, _convert_="all")
    assert isinstance(task, Task)
    return task


@pytest.mark.parametrize(
    ("name", "compress_after"),
    [
        *((name, "prompt" if name == "gsm8k" else "context") for name in TASKS),
        *((name, "prompt") for name in ("jsonl", "passkey")),
    ],
)
def test_every_task_runs_with_every_default_method(
    tmp_path: Path, name: str, compress_after: str
) -> None:
    config = composed()
    assert list(config.methods) == DEFAULT
    methods = {label: instantiate(node, _convert_="all") for label, node in config.methods.items()}
    job = make_job(tmp_path, methods, echo=made(name, tmp_path), compress_after=compress_after)
    facts = PromptEncoder(Hashed(), max_positions=4096, family="llama")
    job.session.__dict__.update(tokenizer=Hashed(), encoder=facts)
    result = run_job(job)
    records: dict[str, list[dict[str, Any]]] = records_of(result)
    assert list(records) == DEFAULT
    count = len(records["exact"])
    assert count > 0
    for label, found in records.items():
        assert len(found) == count
        for record in found:
            assert record["status"] == "ok", record["error"]
            assert 0.0 <= record["score"] <= 1.0
            if label != "exact" and record["compressed"]:
                assert record["ratio"] < 0.6


def test_the_list_of_tasks_names_them_with_a_line_each() -> None:
    listed = catalogue("tasks")
    for name in TASKS:
        assert 15 < len(listed[name]) < 200
        assert "\n" not in listed[name]
