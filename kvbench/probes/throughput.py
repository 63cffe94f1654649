"""Seconds, memory and tokens per second of each method alone (BalanceKV, section 4.4, Table 2)."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from kvbench.engine.generate import Generation, Stopping, run_forks
from kvbench.engine.session import Session
from kvbench.kv import KVError
from kvbench.plan import Methods, Outcome, Unit, measured
from kvbench.tasks.base import TaskError


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A random prompt, a fixed number of new tokens, every method with a prefill of its own.

    Nothing is shared between methods, the device is synchronised before every clock reading, and one
    warm-up run per method and length is left out. End tokens do not end the generation.

    Attributes:
        prompt_tokens: prompt lengths (the paper: 16384).
        new_tokens: tokens generated (the paper: 1024).
        runs: measured runs per method and length (the paper: 10).
    """

    name: ClassVar[str] = "throughput"
    version: ClassVar[int] = 1

    prompt_tokens: Sequence[int] = (16384,)
    new_tokens: int = 1024
    runs: int = 10
    _warm: set[tuple[int, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, values in (
            ("prompt_tokens", self.prompt_tokens),
            ("new_tokens", [self.new_tokens]),
            ("runs", [self.runs]),
        ):
            for value in values:
                if value < 1:
                    raise TaskError(f"task.{name} has {value}; allowed: integers >= 1")

    def meta(self) -> dict[str, Any]:
        """See `kvbench.plan.Plan.meta`."""
        return {
            "version": self.version,
            "score_unit": "tokens/s",
            "lower_is_better": False,
            "breakdown": ["prompt_tokens"] if len(self.prompt_tokens) > 1 else [],
            "figures": [{"kind": "throughput"}],
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per (length, method, run): methods take turns, so that drift favours nobody.

        Raises:
            KVError: sink + window longer than a prompt.
        """
        for label, (method, budget) in methods.items():
            for n in self.prompt_tokens:
                if method.uses_budget and budget.sink + budget.window > n:
                    raise KVError(
                        f"budget.sink + budget.window is {budget.sink + budget.window}; the prompt "
                        f"has {n} tokens, so {label!r} would compress nothing; allowed: at most {n}"
                    )
        return [
            Unit(f"n{n}/run{run}", (f"n{n}/run{run}",), (n, run))
            for n in self.prompt_tokens
            for run in range(self.runs)
        ]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Each method in turn; before the first measured run of a process, a warm-up of each."""
        n, run = unit.payload
        vocabulary = session.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(session.seed)
        ids = torch.randint(vocabulary, (n,), generator=generator).tolist()
        for label in methods:
            one = {label: methods[label]}
            if (n, label) not in self._warm:
                _once(session, ids, one, self.new_tokens)
                self._warm.add((n, label))
            _reset_peak(session.device)
            result = _once(session, ids, one, self.new_tokens)[label]
            fields = {**measured(result), "run": run, "prompt_tokens": n, "dataset": f"n{n}"}
            method, budget = methods[label]
            fields["capacity"] = budget.capacity(n) if method.saves_memory else n
            fields["peak_bytes"] = _peak_bytes(session.device)
            if result.failure is None:
                total = result.prefill_s + result.compress_s + result.decode_s
                fields["tokens_per_s"] = fields["score"] = result.new_tokens / total
                fields["prefill_compress_s"] = result.prefill_s + result.compress_s
            yield Outcome(label, unit.id, fields)


def _once(
    session: Session, ids: list[int], methods: Methods, new_tokens: int
) -> dict[str, Generation]:
    return run_forks(
        session.model,
        ids,
        [],
        dict(methods),
        Stopping(new_tokens),
        seed=session.seed,
        example_id="throughput",
        chunk_tokens=session.chunk_tokens if session.prefill == "chunked" else None,
    )


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    """Peak memory: of the device since the run began, or on a CPU of the process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
