"""Streams as a task: texts far longer than the cache, one record per text and method."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvbench.engine.prefill import synchronize
from kvbench.engine.streams import Read, check_reads, read_text
from kvbench.kv import KVError
from kvbench.probes.base import Probe, Repeats, failed, places
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError, Tokens
from kvbench.tasks.data import file_digests
from kvbench.tasks.text import TextSource


@dataclass(frozen=True, kw_only=True)
class Stream(TextSource, Probe):
    """Negative log-likelihood of texts that are read through a bounded cache, token by token.

    Every token but a text's first is predicted from the entries that the cache holds before it. The
    score is the mean negative log-likelihood, in nats; perplexity is its exponential. A method holds at
    most ``budget.size`` entries, of which ``budget.sink`` are the first tokens; exact holds everything.
    Texts are read one at a time, each from an empty cache.

    A method can read a stream if it holds the first and the last tokens (streaming_llm, local, exact),
    or evicts while it reads (h2o).

    Attributes:
        num_texts: how many files or rows are read, the first ones.
        tokens: how many tokens of each text are read, at most.
        positions: cache (positions are counted inside the cache, as StreamingLLM, arXiv 2309.17453,
            section 3.2, does; a text may be longer than the model's positions) | absolute (every entry
            keeps its position in the text, which may not be longer than the model's positions).
    """

    name: ClassVar[str] = "stream"
    score_unit: ClassVar[str] = "nats per token"
    repetition: ClassVar[str] = "text"
    lower_is_better: ClassVar[bool] = True

    num_texts: Repeats = 4
    tokens: Tokens = 8192
    positions: Literal["cache", "absolute"] = "cache"

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        groups = list(places(self.tokens, self.tokens))
        return super().meta() | {"data": dict(file_digests(self.files)), "measures": groups}

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per text.

        Raises:
            KVError: a method that cannot read a stream with these positions; a text that is longer than
                the model's, where they are absolute.
            TaskError: no text of two tokens.
        """
        for label, (method, budget) in methods.items():
            check_reads(label, method, budget, self.positions)
        encoder = session.encoder
        limit = encoder.max_positions
        units = []
        for name, text in self.texts("stream", self.num_texts, self.num_texts)[: self.num_texts]:
            ids = [*encoder.prefix_ids, *encoder.encode_text(text)][: self.tokens]  # BOS first
            if len(ids) < 2:
                continue  # an empty line predicts nothing
            if self.positions == "absolute" and limit is not None and len(ids) > limit:
                raise KVError(
                    f"task.positions is 'absolute' and text {name!r} has {len(ids)} tokens; allowed: at "
                    f"most {limit}, the model's positions (task.tokens), or task.positions=cache"
                )
            units.append(Unit(name, (name,), tuple(ids), {name: {"text": name}}))
        if not units:
            raise TaskError("task stream has no text of two tokens or more")
        return units

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Have every method read the text by itself."""
        ids = unit.payload
        for label, pair in methods.items():
            fields = {"text": unit.id, "prompt_tokens": len(ids), "positions": self.positions}
            synchronize(session.device)
            clock = time.perf_counter()
            try:
                read = read_text(session.model, ids, *pair, self.positions, label=label)
                synchronize(session.device)
                fields |= self._measured(ids, read, time.perf_counter() - clock)
            except Exception as failure:  # noqa: BLE001 - a record with its status
                fields |= failed(failure)
            yield Outcome(label, unit.id, fields)

    def _measured(self, ids: Sequence[int], read: Read, seconds: float) -> dict[str, Any]:
        """Record fields of one method on one text."""
        nll = read.nll.double()
        entries = read.entries
        mean = float(nll.mean())
        if not math.isfinite(mean):
            raise ArithmeticError("the negative log-likelihood is not finite")
        by_place = {}
        for name, place in places(len(nll), self.tokens).items():
            by_place[name] = float(nll[place].mean())
        return {
            "score": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "new_tokens": len(nll),
            "entries": {"mean": entries, "max": entries},
            "capacity": entries,
            "cache_bytes": read.held_bytes,
            "exact_bytes": read.exact_bytes,
            "ratio": read.held_bytes / read.exact_bytes,
            "compressed": entries < len(ids),
            "read_s": seconds,
            "tokens_per_s": len(ids) / seconds,
            **by_place,
        }
