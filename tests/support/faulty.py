"""What tests of faults and others share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Method
from kvbench.run import runner

SMALL = Budget(rate=0.25, sink=4, window=4)


@dataclass(frozen=True, kw_only=True)
class Faulty(Method):
    """Keeps everything, after doing something else."""

    saves_memory: ClassVar[bool] = False

    fault: Callable[[LayerKV], Any] = print

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        changed = self.fault(layer)
        return keep_all(changed if isinstance(changed, LayerKV) else layer)


def with_session(job: runner.Job, **changes: Any) -> runner.Job:
    """The job with another session on the same model."""
    session = replace(job.session, **changes)
    loaded = ("model", "tokenizer", "encoder")
    session.__dict__.update({name: job.session.__dict__[name] for name in loaded})
    return replace(job, session=session)
