"""A probe of streaming: each method reads texts that are far longer than its cache."""

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
from kvbench.tasks.encoding import encode_start
from kvbench.tasks.text import TextSource


@dataclass(frozen=True, kw_only=True)
class Stream(TextSource, Probe):
    """Negative log-likelihood of texts that a model reads token by token with a bounded cache.

    Each text begins with an empty cache. Every token but the first is predicted from the entries that
    the cache holds before that token. The score is the mean negative log-likelihood in nats; perplexity
    is its exponential. There is one record for each text and method.

    The cache of a method holds at most ``budget.size`` entries, among them the first ``budget.sink``
    tokens; that of exact holds all tokens. A method can be run if it keeps the first and the last tokens
    (streaming_llm, local, exact) or evicts an entry whenever it reads a token (h2o).

    Attributes:
        num_texts: how many texts (files or rows) are read, the first ones.
        tokens: the most tokens of a text that are read.
        positions: "cache": the position of an entry is its place in the cache, as in StreamingLLM (arXiv
            2309.17453, section 3.2), so that a text may be longer than the model's positions.
            "absolute": the position of an entry is its place in the text, which may then not be longer.
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
            KVError: a method cannot read a stream with these positions; or positions are absolute and a
                text is longer than the model's positions.
            TaskError: no text has two tokens.
        """
        for label, (method, budget) in methods.items():
            check_reads(label, method, budget, self.positions)
        encoder = session.encoder
        limit = encoder.max_positions
        units = []
        for name, text in self.texts("stream", self.num_texts, self.num_texts)[: self.num_texts]:
            ids = encode_start(encoder, text)[: self.tokens]
            if len(ids) < 2:
                continue  # there is no token to predict
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
        """Let the methods read the text one after another, and time each of them."""
        ids = unit.payload
        for label, pair in methods.items():
            fields = {"text": unit.id, "prompt_tokens": len(ids), "positions": self.positions}
            synchronize(session.device)
            clock = time.perf_counter()
            try:
                read = read_text(session.model, ids, *pair, self.positions, label=label)
                synchronize(session.device)
                fields |= self._measured(ids, read, time.perf_counter() - clock)
            except Exception as failure:  # noqa: BLE001 - the record has the failure's status
                fields |= failed(failure)
            yield Outcome(label, unit.id, fields)

    def _measured(self, ids: Sequence[int], read: Read, seconds: float) -> dict[str, Any]:
        """The measured record fields of one method on one text.

        Raises:
            ArithmeticError: the mean negative log-likelihood is not finite.
        """
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
