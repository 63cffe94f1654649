"""Prompts that stay the same, options of tasks that are refused, models whose configs can be made."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hydra.utils import instantiate
from support.command import composed
from support.encoders import shipped
from support.paths import ROOT

from kvbench.catalogue import config_dir
from kvbench.engine.model import ModelSpec, load_config
from kvbench.tasks.base import Task, TaskError
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.longbench import LongBench
from kvbench.tasks.longeval_lines import LongEvalLines
from kvbench.tasks.needle import Needle
from kvbench.tasks.retrieval import KeyValue, Passkey
from kvbench.tasks.ruler import Ruler
from kvbench.tasks.text import RunningText

# No model of its own; in packages (tests/engine/test_packaged.py).
APART = {"hf", "smollm2_135m", "gemma3_270m"}
MODELS = sorted({path.stem for path in (config_dir() / "model").glob("[!_]*.yaml")} - APART)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_config_makes_a_model_that_can_be_run(name: str) -> None:
    config = composed(f"model={name}", "task_label=t")
    spec: ModelSpec = instantiate(config.model, _convert_="all")
    assert re.fullmatch(r"[0-9a-f]{40}", spec.revision or "0" * 40)
    architecture = load_config(spec)
    if spec.max_input is not None:
        assert spec.max_input + 512 <= architecture.max_position_embeddings
    assert not spec.trust_remote_code


# what stays the same

PROMPTS: dict[str, list[str]] = {
    "longeval_lines": ["task.num_lines=[5,20]"],
    "longeval_redundant": ["task.num_lines=[7]", "task.seed=3"],
    "needle": ["task.lengths=[300,600]", "task.num_examples=2"],
    "needle_short": ["task.lengths=[400]", "task.share_fillers=true", "task.seed=1"],
    "needle_questions": ["task.lengths=[700]", "task.num_examples=2"],
    "needles": ["task.lengths=[400]"],
    "key_value": ["task.num_pairs=[4,9]", "task.queries=2"],
    "passkey": ["task.lengths=[400,700]", "task.queries=3"],
    "number_string": ["task.lengths=[500]"],
    "ruler": ["task.lengths=[1536,4400]"],
    "text": ["task.tokens=200"],
    "instructions": ["task.kinds=[hero,animal,job,language,sentences]"],
    "instructions_told": ["task.seed=2"],
}
"""Every task that generates its prompts, with options that make them few and short."""


@pytest.mark.parametrize("name", PROMPTS)
def test_generated_prompts_stay_the_same_as_long_as_the_version_does(name: str) -> None:
    """Prompts, ids and answers of today's version; a change of them needs another version, and a line in
    tests/data/prompts.json with the digest that this prints."""
    config = composed(f"task={name}", "task_label=t", *PROMPTS[name]).task
    options = {"num_examples": 3} if name in ("longeval_lines", "ruler", "passkey") else {}
    task = replace(instantiate(config, _convert_="all"), **options)
    made = [
        [one.id, one.context, one.question, one.answers, dict(one.fields), one.context_id]
        for one in task.examples(shipped())
    ]
    digest = sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    known = json.loads((ROOT / "tests/data/prompts.json").read_text())
    assert {f"{name}, version {task.version}": digest}.items() <= known.items()


# what is refused

REQUIRED: dict[type[Task], dict[str, Any]] = {
    Needle: {"needle": "a {key} {value}", "question": "{key}?", "answer": "{value}"},
    KeyValue: {"template": "{pairs} {key}"},
    Passkey: {
        "template": "{context} {question}",
        "needle": "{key}",
        "question": "?",
        "answer_prefix": "",
        "noise": "Grass.",
    },
    Jsonl: {"files": ["x.jsonl"]},
}
"""The options that a task cannot be made without."""
REFUSED: dict[type[Task], list[tuple[dict[str, Any], str]]] = {
    Needle: [
        ({"depths": [101]}, "depths is [101]; allowed: less than or equal to 100"),
        ({"template": "{question} {haystack}"}, "{haystack} and, after it, {question}, each once"),
        ({"together": True, "needle": "A {key}."}, "together=true: text with {key} and {value}"),
        ({"together": True, "question": "What?"}, "together=true: text with {key}"),
        ({"together": True, "answer": "5"}, "together=true: text with {value}"),
    ],
    RunningText: [({"files": ["a"], "dataset": "b"}, "one of them at most")],
    LongEvalLines: [
        ({"num_lines": [0]}, "num_lines is [0]; allowed: greater than or equal to 1"),
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
        ({"datasets": ["qaspr"]}, "'qaspr', which is not in split 'e' (did you mean 'qasper'?)")
    ],
    Jsonl: [
        ({"fields": {"contxt": "text"}}, "contxt stands for nothing (did you mean 'context'?)"),
        ({"fields": {"answers": None}}, "fields.answers is null"),
        ({"metric": "rouge"}, "task.metric is 'rouge' (did you mean 'rouge_"),
        ({"metric": "regex", "pattern": "("}, "pattern is '(', which is no regular expression"),
        ({"files": []}, "no data; allowed: task.files"),
        ({"max_input": "modell"}, "task.max_input is 'modell'; allowed: "),
        ({"subsets": {"a": {}}}, "task.files is ['x.jsonl'] and the task has 1 data sets"),
    ],
}


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        pytest.param(task, options, message, id=f"{task.name} {options}")
        for task, cases in REFUSED.items()
        for options, message in cases
    ],
)
def test_what_is_refused_is_one_line(
    task: type[Task], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        task(**{**REQUIRED.get(task, {}), **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
