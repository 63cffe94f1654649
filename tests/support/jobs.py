"""A tokenizer, a task and jobs on a tiny model, and the records of a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbench.engine.model import ModelSpec
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.prompts import PromptEncoder
from kvbench.run.job import Job, MethodConfig
from kvbench.run.plan import TaskPlan
from kvbench.run.session import Session
from kvbench.tasks.base import Example, Task
from support.stores import TIMES
from support.tiny import tiny_model

SMALL = Budget(rate=0.25, sink=4, window=4)


class Letters:
    """A tokenizer of 94 printable characters."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [3 + (ord(c) - 32) % 94 for c in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(29 + i) for i in token_ids if i >= 3)


@dataclass(frozen=True, kw_only=True)
class Echo(Task):
    """Prompts of letters; the score is the share of new tokens that are letters."""

    name: ClassVar[str] = "echo"
    breakdown: ClassVar[tuple[str, ...]] = ("length",)

    count: int = 4
    question: str = "what next? "

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        return [
            Example(
                id=f"e{i}",
                context="abcdefgh" * (8 + i),
                question=self.question,
                answers=("a",),
                max_new_tokens=6,
                dataset="echo",
                fields={"length": 8 * (8 + i)},
            )
            for i in range(self.count)
        ]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        share = sum(c.isalpha() for c in prediction) / max(1, len(prediction))
        return {"score": share, "letters": share}


def make_job(tmp_path: Path, methods: dict[str, Any] | None = None, **changes: Any) -> Job:
    session = Session(
        ModelSpec(name="tiny", path="none"), torch.device("cpu"), torch.float32,
        compress_after=changes.pop("compress_after", "all_but_last"),
    )  # fmt: skip
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    # what the loader would put there
    loaded = {"model": model, "tokenizer": Letters(), "encoder": PromptEncoder(Letters())}
    session.__dict__.update(loaded, processors={}, weights="a")
    methods = methods or {n: build_method(n) for n in ("exact", "snapkv", "uniform")}
    job = Job(
        experiment="e",
        task="echo",
        results_dir=tmp_path,
        session=session,
        plan=changes.pop("plan", None) or TaskPlan(changes.pop("echo", Echo())),
        methods={label: (method, SMALL) for label, method in methods.items()},
        configs={label: MethodConfig(label, {"name": label}, {"rate": 0.25}) for label in methods},
        task_config={"name": "echo"},
    )
    return replace(job, **changes)


def records_of(result: Any, *, times: bool = False) -> dict[str, list[dict[str, Any]]]:
    return {
        label: [
            {k: v for k, v in json.loads(line).items() if times or k not in TIMES}
            for line in (folder / "records.jsonl").read_text().splitlines()
        ]
        for label, folder in result.folders.items()
    }


@dataclass(frozen=True, kw_only=True)
class Faulty(Method):
    """Keeps everything, after doing something else."""

    saves_memory: ClassVar[bool] = False

    fault: Callable[[LayerKV], Any] = print

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        changed = self.fault(layer)
        return keep_all(changed if isinstance(changed, LayerKV) else layer)


def with_session(job: Job, **changes: Any) -> Job:
    session = replace(job.session, **changes)
    loaded = ("model", "tokenizer", "encoder", "processors", "weights")
    session.__dict__.update({name: job.session.__dict__[name] for name in loaded})
    return replace(job, session=session)
