"""lm-evaluation-harness on compressed caches: `KVBenchLM` is a model for its command line, and
``task=lm_eval`` runs its tasks from kvbench's.

python -m kvbench.lm_eval --model kvbench --model_args pretrained=...,method=snapkv,rate=0.25 --tasks ...
"""

from kvbench.errors import UserError, needs_extra

try:
    from kvbench.lm_eval.model import KVBenchLM
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise UserError(needs_extra("lm-evaluation-harness", "lm-eval")) from error

__all__ = ["KVBenchLM"]
