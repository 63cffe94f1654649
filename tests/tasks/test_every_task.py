"""Tasks on invented data with the eight methods of the default list; options that are refused; a task of
one's own as conf/README.md has it."""

from __future__ import annotations

import json
import re
import shlex
import zlib
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.command import composed, main
from support.jobs import make_job, records_of
from support.paths import DATA, ROOT

from kvbench.cli.catalogue import config_dir
from kvbench.engine.loading import ModelSpec, load_config
from kvbench.run.runner import run_job
from kvbench.tasks.base import PromptEncoder, Task, TaskError
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.longbench import LongBench
from kvbench.tasks.longeval_lines import LongEvalLines
from kvbench.tasks.needle import Needle
from kvbench.tasks.retrieval import KeyValue, Passkey
from kvbench.tasks.ruler import Ruler
from kvbench.tasks.text import RunningText

DEFAULT = ["exact", "streaming_llm", "uniform", "snapkv", "pyramidkv", "h2o", "subgen", "balancekv"]
FEW = ["task.max_new_tokens=2"]
TASKS: dict[str, list[str]] = {
    "ruler": ["task.tasks=[vt,fwe,niah_multiquery]", "task.lengths=[1200]", "task.num_examples=1"],
    "key_value": [*FEW, "task.num_pairs=[4]", "task.num_examples=2", "task.queries=2"],
    "gsm8k": FEW,
    "longeval_lines": [*FEW, "task.num_lines=[6]", "task.num_examples=2"],
    "longbench": [
        "task.datasets=[passage_count]", "task.per_dataset=1", "task.max_input=300",
        f"task.data={DATA}",
    ],
    "jsonl": [*FEW, "task.fields={context: text, question: q, answers: gold}", "task.metric=f1"],
}  # fmt: skip

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "How many are 2 and 3? " * 20, "answer": "2 + 3\n#### 5"}],
    "jsonl": [
        {"text": "One two three. " * 30, "q": [f"{i}?", "Why?"], "gold": ["w5", "two"]}
        for i in range(2)
    ],
}


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
    options, file = list(TASKS[name]), folder / "my.jsonl"
    if name in ROWS:
        file.write_text("\n".join(map(json.dumps, ROWS[name])))
        options.append(f"task.files=[{file}]")
    task = instantiate(composed(f"task={name}", *options).task, _convert_="all")
    assert isinstance(task, Task)
    return task


@pytest.mark.parametrize(
    ("name", "compress_after"),
    [
        *((name, "context") for name in ("key_value", "longeval_lines", "longbench", "jsonl")),
        ("gsm8k", "prompt"),
        pytest.param("ruler", "context", marks=pytest.mark.slow),
    ],
)
def test_tasks_run_with_every_default_method(
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


APART = {"hf", "smollm2_135m"}  # no model of its own; in a package (tests/engine/test_packaged.py)
MODELS = sorted({path.stem for path in (config_dir() / "model").glob("[!_]*.yaml")} - APART)


@pytest.mark.slow
def test_every_model_config_makes_a_model_that_can_be_run() -> None:
    for name in MODELS:
        config = composed(f"model={name}", "task_label=t")
        spec: ModelSpec = instantiate(config.model, _convert_="all")
        assert re.fullmatch(r"[0-9a-f]{40}", spec.revision or "0" * 40), name
        architecture = load_config(spec)
        if spec.max_input is not None:
            assert spec.max_input + 512 <= architecture.max_position_embeddings, name
        assert not spec.trust_remote_code


# what is refused

GIVEN: dict[type[Task], dict[str, Any]] = {
    Needle: {"needle": "a {key} {value}", "question": "{key}?", "answer": "{value}"},
    KeyValue: {"template": "{pairs} {key}"},
    Passkey: {
        "template": "{context} {question}", "needle": "{key}", "question": "?",
        "answer_prefix": "", "noise": "Grass.",
    },
    Jsonl: {"files": ["x.jsonl"]},
}  # fmt: skip
REFUSED: dict[type[Task], list[tuple[dict[str, Any], str]]] = {
    Needle: [
        ({"depths": [101]}, "depths is [101]; allowed: a list of numbers in [0, 100]"),
        ({"haystack": "wiki"}, "generated | files | dataset"),
        ({"haystack": "files"}, "task.haystack_files is empty"),
        ({"haystack": "dataset"}, "task.dataset_name is null"),
        ({"template": "{question} {haystack}"}, "{haystack} and, after it, {question}, each once"),
        ({"together": True, "needle": "A {key}."}, "together=true: text with {key} and {value}"),
        ({"together": True, "question": "What?"}, "together=true: text with {key}"),
        ({"together": True, "answer": "5"}, "together=true: text with {value}"),
        ({"together": True, "repeats": 2}, "together=true: 1 (a needle per depth)"),
    ],
    RunningText: [({"files": ["a"], "dataset_name": "b"}, "one of them at most")],
    LongEvalLines: [
        ({"num_lines": [0]}, "num_lines is [0]; allowed: a list of integers from 1 to"),
        ({"number_range": [5, 1]}, "number_range is [5, 1]"),
    ],
    KeyValue: [
        ({"num_pairs": [12], "queries": 13}, "task.queries is 13; allowed: at most 12"),
        ({"template": "{key} {pairs}"}, "{pairs} and, after it, {key}, each once"),
    ],
    Passkey: [
        ({"needle": "none"}, "task.needle is 'none'; allowed: text with {key}"),
        ({"queries": 2}, "task.needle is '{key}' and queries 2; allowed: text with {name}"),
    ],
    Ruler: [
        ({"tasks": ["niah_singel_1"]}, "did you mean 'niah_single_"),
        ({"tasks": ["qa_1"]}, "qa_1 needs task.squad=<file>, dev-v2.0.json"),
    ],
    LongBench: [
        ({"datasets": ["qaspr"]}, "'qaspr', which is not in split 'e' (did you mean 'qasper'?)"),
    ],
    Jsonl: [
        ({"fields": {"contxt": "text"}}, "contxt stands for nothing (did you mean 'context'?)"),
        ({"fields": {"answers": None}}, "fields.answers is null"),
        ({"metric": "rouge"}, "task.metric is 'rouge' (did you mean 'rouge_"),
        ({"metric": "regex", "pattern": "("}, "pattern is '(', which is no regular expression"),
        ({"extract": {"a": ["x"]}}, "task.extract.a is ['x']; allowed: a field and a regular"),
        ({"files": []}, "no data; allowed: task.files"),
        ({"max_input": "modell"}, "task.max_input is 'modell'; allowed: "),
        ({"subsets": {"a": {}}}, "task.files is ['x.jsonl'] and the task has 1 data sets"),
    ],
}


@pytest.mark.parametrize("task", REFUSED, ids=lambda task: task.name)
def test_what_is_refused_is_one_line(task: type[Task]) -> None:
    for options, said in REFUSED[task]:
        with pytest.raises(TaskError) as caught:
            task(**{**GIVEN.get(task, {}), **options})
        assert said in str(caught.value), options
        assert "\n" not in str(caught.value)


# a task of one's own

SECTION = re.search(
    r"^## Add your own task\n(.*?)^## ", (ROOT / "conf/README.md").read_text(), re.M | re.S
)
assert SECTION is not None
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```$", SECTION[1], re.M | re.S))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sh", "yaml"])
def test_a_task_of_one_s_own_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text(BLOCKS["json"])
    _, *command = shlex.split(BLOCKS["sh"])
    if form == "yaml":
        assert len(BLOCKS["yaml"].splitlines()) <= 10
        (tmp_path / "conf/task").mkdir(parents=True)
        (tmp_path / "conf/task/mine.yaml").write_text(BLOCKS["yaml"])
        command = ["task=mine", f"hydra.searchpath=[file://{tmp_path / 'conf'}]", command[-1]]
    quiet = ["logger=none", f"results_dir={tmp_path}", "method=[exact,snapkv,balancekv]"]
    status, out, err = main(capsys, *command, *quiet)
    assert status == 0, err
    assert "balancekv" in out
    files = {path.parent.name.rpartition("-")[0]: path for path in tmp_path.rglob("records.jsonl")}
    assert set(files) == {"exact", "snapkv", "balancekv"}
    for label, path in files.items():
        mine = [json.loads(line) for line in path.read_text().splitlines()]
        assert [record["answers"] for record in mine] == [["millstone"], ["Ann"]]
        assert {record["status"] for record in mine} == {"ok"}
        assert len({record["context_id"] for record in mine}) == 1
        assert all(record["compressed"] for record in mine) == (label != "exact")
