"""LongBench: data, prompts, protocols and metrics (arXiv 2308.14508)."""

from kvbench.tasks.longbench.metrics import BUCKETS, bucket, bucket_means, score
from kvbench.tasks.longbench.prompts import prompt_template
from kvbench.tasks.longbench.task import E_DATASETS, LongBench, LongBenchExample

__all__ = [
    "BUCKETS",
    "E_DATASETS",
    "LongBench",
    "LongBenchExample",
    "bucket",
    "bucket_means",
    "prompt_template",
    "score",
]
