"""Streams as a task: texts far longer than the cache, one record per text and method."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from kvbench.engine.fork import Fork
from kvbench.engine.prefill import synchronize
from kvbench.engine.streaming import StreamState, rotation_of, stream, stream_fork
from kvbench.errors import one_line
from kvbench.errors.options import Count, check_options
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.probes._options import Repeats, Tokens
from kvbench.probes.fidelity_probe import group_name, position_groups
from kvbench.run.plan import Methods, Outcome, Unit, status_of
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError
from kvbench.tasks.haystack import (
    file_digests,
    generated_haystack,
    texts_of_dataset,
    texts_of_files,
)


@dataclass(frozen=True)
class Text:
    """Token ids of one text."""

    ids: tuple[int, ...]

    @property
    def n(self) -> int:
        """Tokens."""
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Negative log-likelihood of texts that are read through a bounded cache, token by token.

    Every token but a text's first is predicted from what is held when it comes. The score is its mean,
    in nats; perplexity is its exponential. Methods are bounded by ``budget.size``, of which
    ``budget.sink`` are the first tokens; exact holds everything. Texts are read one at a time, each from
    an empty cache.

    Positions: ``cache`` counts them inside the cache (StreamingLLM, arXiv 2309.17453, section 3.2), so
    that a text may be longer than the model's positions; it is for caches of the first and the last
    tokens (streaming_llm, local, exact). With ``absolute`` every entry keeps its own, texts end at the
    model's positions, and any method takes part that evicts while it reads (h2o too).

    Attributes:
        files: glob or list of globs of text files. dataset_name, dataset_config, dataset_split,
            dataset_column: a Hugging Face data set. Neither: sentences that are generated.
        num_texts: of the files or rows, the first so many. joined: as one text.
        tokens: of each text, at most.
        block: tokens per number of the curve that a record keeps.
    """

    name: ClassVar[str] = "stream"
    version: ClassVar[int] = 1

    files: Sequence[str] = ()
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "test"
    dataset_column: str = "text"
    num_texts: Repeats = 4
    joined: bool = False
    tokens: Tokens = 8192
    positions: Literal["cache", "absolute"] = "cache"
    block: Count = 1000

    def __post_init__(self) -> None:
        check_options(self, "task.", TaskError)
        if self.files and self.dataset_name:
            raise TaskError("task.files and task.dataset_name: one of them at most may be given")

    def meta(self) -> dict[str, Any]:
        """See `kvbench.run.plan.Plan.meta`."""
        return {
            "version": self.version,
            "data": dict(file_digests(self.files)),
            "score_unit": "nats per token",
            "lower_is_better": True,
            "breakdown": [],
            "figures": [],
            "unit": "text",
            "measures": [group_name(g, self.tokens) for g in position_groups(self.tokens)],
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per text.

        Raises:
            KVError, TaskError: a method that cannot read a stream so, a text beyond absolute positions,
                texts that cannot be had.
        """
        for label, (method, budget) in methods.items():
            if method.band(budget) is None and not (method.evicts and self.positions == "absolute"):
                raise KVError(
                    f"method {label!r} with task.positions={self.positions} and budget.size="
                    f"{budget.size} cannot read a stream; allowed: with a size streaming_llm and local, "
                    "exact, and with absolute positions methods that evict (h2o, decode=evict)"
                )
        most = session.encoder.max_positions
        units = []
        for name, ids in self._texts(session):
            if len(ids) < 2:
                continue  # an empty line predicts nothing
            if self.positions == "absolute" and most is not None and len(ids) > most:
                raise KVError(
                    f"task.positions is 'absolute' and text {name!r} has {len(ids)} tokens; allowed: at "
                    f"most {most}, the model's positions (task.tokens), or task.positions=cache"
                )
            units.append(Unit(name, (name,), Text(tuple(ids)), {name: {"text": name}}))
        if not units:
            raise TaskError("task stream has no text of two tokens or more")
        return units

    def _texts(self, session: Session) -> Iterator[tuple[str, list[int]]]:
        """Name and token ids of each text, the model's first tokens (BOS) before it."""
        encoder = session.encoder
        if self.files:
            texts = texts_of_files(self.files)[: self.num_texts]
        elif self.dataset_name:
            texts = texts_of_dataset(
                self.dataset_name,
                self.dataset_config,
                self.dataset_split,
                self.dataset_column,
                self.num_texts,
            )
        else:
            texts = [(f"generated {i}", self._generated(i)) for i in range(self.num_texts)]
        if self.joined:
            texts = [("joined", "\n\n".join(text for _, text in texts))]
        for name, text in texts:
            yield name, [*encoder.prefix_ids, *encoder.encode_text(text)][: self.tokens]

    def _generated(self, number: int) -> str:
        """Sentences of more tokens than are asked for: a word has one at least."""
        words, sentences = 0, []
        for sentence in generated_haystack(f"stream {number}"):
            sentences.append(sentence)
            words += sentence.count(" ") + 1
            if words > self.tokens:
                return " ".join(sentences)
        raise AssertionError("the document has no end")

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every method reads the text for itself."""
        for label, (method, budget) in methods.items():
            fields = {"text": unit.id, "prompt_tokens": unit.payload.n, "positions": self.positions}
            try:
                fields |= self._read(unit, label, method, budget, session)
            except Exception as failure:  # noqa: BLE001 - a record with its status
                fields |= {"status": status_of(failure), "error": one_line(failure)}
            yield Outcome(label, unit.id, fields)

    def _read(
        self, unit: Unit, label: str, method: Method, budget: Budget, session: Session
    ) -> dict[str, Any]:
        """Record fields of one method on one text."""
        ids, model = unit.payload.ids, session.model
        band = method.band(budget)
        synchronize(session.device)
        clock = time.perf_counter()
        if band is None:
            fork = Fork(label, method, budget, session.seed, unit.id, room=1)
            parts = stream_fork(model, ids, fork)
            held, entries = fork.cache_bytes(), budget.capacity(len(ids))
        else:
            start, recent = band[0], len(ids) if band[1] is None else band[1]
            rotation = rotation_of(model) if self.positions == "cache" else None
            state = StreamState(start, recent, rotation)
            parts = list(
                stream(
                    model, ids, start=start, recent=recent, positions=self.positions, state=state
                )
            )
            held, entries = state.held_bytes, min(len(ids), start + recent)
        synchronize(session.device)
        seconds = time.perf_counter() - clock
        nll = torch.cat(parts).double()
        mean = float(nll.mean())
        if not math.isfinite(mean):
            raise ArithmeticError("the negative log-likelihood is not finite")
        exact = round(held / min(len(ids), entries) * len(ids))
        groups = {
            group_name(group, self.tokens): float(nll[group.start : group.stop].mean())
            for group in position_groups(len(nll))
        }
        return {
            "score": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "new_tokens": len(nll),
            "entries": {"mean": entries, "max": entries},
            "capacity": entries,
            "cache_bytes": held,
            "exact_bytes": exact,
            "ratio": held / exact,
            "compressed": entries < len(ids),
            "read_s": seconds,
            "tokens_per_s": len(ids) / seconds,
            "nll_blocks": [round(float(part.mean()), 5) for part in nll.split(self.block)],
            **groups,
        }
