"""Invented documents for the tasks of H2O's tables, in the form of the tasks' own data sets.

With them (kvbench/assets/lm_eval, a file a task) an experiment runs offline, with the tasks' own prompts
and metrics, to see how it goes; they are of one pattern each, and their scores say nothing about a
model.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import lm_eval
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from kvbench.errors import nearest
from kvbench.tasks.base import TaskError

OWN = {
    "copa": "super_glue/copa/default.yaml",
    "mathqa": "mathqa/mathqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "rte": "glue/rte/default.yaml",
    "winogrande": "winogrande/default.yaml",
}
"""By the name of the task: its YAML among lm-evaluation-harness's own."""


def invented(name: str) -> ConfigurableTask:
    """The task of this name on its invented documents: half of them are few-shot examples, half are
    judged.

    Raises:
        TaskError: there are none for it.
    """
    if name not in OWN:
        raise TaskError(
            f"task {name!r} has no invented documents{nearest(name, list(OWN))}; allowed with "
            f"task.source=local: {', '.join(OWN)}"
        )
    text = (files("kvbench") / "assets" / "lm_eval" / f"{name}.jsonl").read_text(encoding="utf-8")
    docs = [json.loads(line) for line in text.splitlines()]
    judged = Dataset.from_list(docs[1::2])
    splits = {"train": Dataset.from_list(docs[::2]), "validation": judged, "test": judged}
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / OWN[name], resolve_func=True)
    config.pop("tag", None)
    return ConfigurableTask(config=config | {"task": name, "custom_dataset": lambda **_: splits})
