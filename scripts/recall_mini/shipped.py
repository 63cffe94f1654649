"""Where the shipped model lies, and the needle that the scripts of this folder ask it for."""

from __future__ import annotations

from pathlib import Path

import yaml

from kvbench.tasks.needle import Needle

ROOT = Path(__file__).resolve().parents[2]
ASSET = ROOT / "kvbench" / "assets" / "recall_mini"


def needle_task(
    lengths: list[int], depths: list[float], num_examples: int, seed: int = 0
) -> Needle:
    """The needle of conf/task/needle.yaml, in prompts of these tokens at these depths (per cent)."""
    conf = yaml.safe_load((ROOT / "conf" / "task" / "needle.yaml").read_text(encoding="utf-8"))
    return Needle(
        needle=conf["needle"],
        question=conf["question"],
        answer=conf["answer"],
        max_new_tokens=conf["max_new_tokens"],
        lengths=lengths,
        depths=depths,
        num_examples=num_examples,
        seed=seed,
    )
