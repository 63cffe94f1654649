"""Invented documents for the tasks of H2O's tables, in the form of the tasks' own data sets.

With them an experiment runs offline, with the tasks' own prompts and metrics, to see how it goes; there
are a few documents of one pattern each, and their scores say nothing about a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lm_eval
from datasets import Dataset

PEOPLE = ("Ada", "Bela", "Chen", "Dora", "Emil", "Fay", "Goran", "Hana")
PLACES = ("kitchen", "garden", "office", "station")
PLANTS = ("rose", "fern", "oak", "tulip")

Docs = Iterator[dict[str, Any]]


def _copa() -> Docs:
    for i, (who, where) in enumerate(product(PEOPLE, PLACES)):
        right, wrong = f"It was cold in the {where}.", f"The {where} sang a song."
        yield {
            "premise": f"{who} put on a coat in the {where}.",
            "question": "cause" if i % 2 else "effect",
            "choice1": wrong if i % 3 else right,
            "choice2": right if i % 3 else wrong,
            "label": int(i % 3 > 0),
            "idx": i,
        }


def _openbookqa() -> Docs:
    for i, (who, plant) in enumerate(product(PEOPLE, PLANTS)):
        texts = ["sand", "loud music", "a locked box"]
        texts.insert(i % 4, "water and light")
        yield {
            "id": str(i),
            "question_stem": f"{who} wants the {plant} to grow, so it is given",
            "choices": {"text": texts, "label": ["A", "B", "C", "D"]},
            "answerKey": "ABCD"[i % 4],
        }


def _piqa() -> Docs:
    for i, (who, where) in enumerate(product(PEOPLE, PLACES)):
        both = [
            f"Open the window of the {where}.",
            f"Close every window of the {where} and paint them.",
        ]
        yield {
            "goal": f"How can {who} let fresh air into the {where}?",
            "sol1": both[i % 2],
            "sol2": both[1 - i % 2],
            "label": i % 2,
        }


def _rte() -> Docs:
    for i, (who, where) in enumerate(product(PEOPLE, PLACES)):
        other = PLACES[(PLACES.index(where) + 1) % len(PLACES)]
        yield {
            "sentence1": f"{who} spent the whole afternoon in the {where}, reading the paper.",
            "sentence2": f"{who} was in the {other if i % 2 else where}.",
            "label": i % 2,
            "idx": i,
        }


def _winogrande() -> Docs:
    for i, (who, where) in enumerate(product(PEOPLE, PLACES)):
        yield {
            "sentence": f"{who} looked for the cup in the {where} and not in the attic, since the _ is "
            "where cups are kept.",
            "option1": where if i % 2 else "attic",
            "option2": "attic" if i % 2 else where,
            "answer": "1" if i % 2 else "2",
        }


def _mathqa() -> Docs:
    for i, (who, where) in enumerate(product(PEOPLE, PLACES)):
        each, rows = 3 + i % 5, 2 + i % 4
        options = [each * rows + shift for shift in (1, 2, 5, 7)]
        options.insert(i % 5, each * rows)
        yield {
            "Problem": f"{who} puts {rows} rows of {each} chairs in the {where}. How many are there?",
            "Rationale": f"{rows} times {each}.",
            "options": " , ".join(
                f"{letter} ) {n}" for letter, n in zip("abcde", options, strict=True)
            ),
            "correct": "abcde"[i % 5],
            "annotated_formula": "",
            "linear_formula": "",
            "category": "general",
        }


MAKERS: dict[str, tuple[str, Callable[[], Docs]]] = {
    "copa": ("super_glue/copa/default.yaml", _copa),
    "mathqa": ("mathqa/mathqa.yaml", _mathqa),
    "openbookqa": ("openbookqa/openbookqa.yaml", _openbookqa),
    "piqa": ("piqa/piqa.yaml", _piqa),
    "rte": ("glue/rte/default.yaml", _rte),
    "winogrande": ("winogrande/default.yaml", _winogrande),
}
"""By the name of the task: its YAML among lm-evaluation-harness's own, and its documents."""


def splits(name: str) -> dict[str, Any]:
    """A task's invented data set: half of the documents are few-shot examples, half are judged."""
    docs = list(MAKERS[name][1]())
    judged = Dataset.from_list(docs[1::2])
    return {"train": Dataset.from_list(docs[::2]), "validation": judged, "test": judged}


def write_tasks(folder: Path) -> None:
    """A YAML for every task, which takes all from the task's own but the data set.

    The functions stand in a module beside them, as that harness's ``!function`` wants it.
    """
    tasks = Path(lm_eval.__file__).parent / "tasks"
    lines = ["from kvbench.lm_eval.local import splits"]
    for name, (own, _) in MAKERS.items():
        lines.append(f"def {name}(**_): return splits({name!r})")
        text = f"include: {tasks / own}\ncustom_dataset: !function invented.{name}\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "invented.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
