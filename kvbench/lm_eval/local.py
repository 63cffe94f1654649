"""Invented documents for the tasks of H2O's tables, in the form of the tasks' own data sets.

With them (kvbench/assets/lm_eval, a file a task) an experiment runs offline, with the tasks' own prompts
and metrics, to see how it goes; they are of one pattern each, and their scores say nothing about a
model.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import lm_eval
from datasets import Dataset

OWN = {
    "copa": "super_glue/copa/default.yaml",
    "mathqa": "mathqa/mathqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "rte": "glue/rte/default.yaml",
    "winogrande": "winogrande/default.yaml",
}
"""By the name of the task: its YAML among lm-evaluation-harness's own."""


def splits(name: str) -> dict[str, Any]:
    """A task's invented data set: half of the documents are few-shot examples, half are judged."""
    text = (files("kvbench") / "assets" / "lm_eval" / f"{name}.jsonl").read_text(encoding="utf-8")
    docs = [json.loads(line) for line in text.splitlines()]
    judged = Dataset.from_list(docs[1::2])
    return {"train": Dataset.from_list(docs[::2]), "validation": judged, "test": judged}


def write_tasks(folder: Path) -> None:
    """A YAML for every task, which takes all from the task's own but the data set.

    The functions stand in a module beside them, as that harness's ``!function`` wants it.
    """
    tasks = Path(lm_eval.__file__).parent / "tasks"
    lines = ["from kvbench.lm_eval.local import splits"]
    for name, own in OWN.items():
        lines.append(f"def {name}(**_): return splits({name!r})")
        text = f"include: {tasks / own}\ncustom_dataset: !function invented.{name}\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "invented.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
