"""Data of one's own: JSON lines or a Hub dataset, with fields, template and metric named in a config."""

from kvbench.tasks.jsonl.task import Jsonl

__all__ = ["Jsonl"]
