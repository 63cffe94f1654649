"""Fidelity as a task: prompts of any task or of text files, one record per prompt and method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from kvbench.engine.scoring import CompressedPrompt, greedy_continuation, read
from kvbench.engine.stopping import Stopping
from kvbench.errors import one_line
from kvbench.errors.options import Several, Share
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.probes.base import Probe, Repeats, Tokens
from kvbench.probes.fidelity import Fidelity, compare, noise_floor, with_reference
from kvbench.records.figures import Distances, Figure
from kvbench.run.encoding import encode_example
from kvbench.run.plan import Methods, Outcome, Unit, status_of
from kvbench.run.session import Session
from kvbench.tasks.base import PromptEncoder, Task, TaskError
from kvbench.tasks.data import file_digests, texts_of_files

SIGNIFICANT = 6
"""Digits of the numbers per token that a record keeps."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and, if there is one, the text that goes on from it."""

    ids: tuple[int, ...]
    context_tokens: int
    given: tuple[int, ...]
    text: str

    @property
    def n(self) -> int:
        """Tokens."""
        return len(self.ids)


def position_groups(tokens: int) -> list[range]:
    """Places 0 .. tokens - 1 in runs that double: 1, 2, 3-4, 5-8 ... as counted from 1."""
    ends = [0, 1]
    while ends[-1] < tokens:
        ends.append(2 * ends[-1])
    return [range(a, min(b, tokens)) for a, b in pairwise(ends)]


def group_name(group: range, most: int) -> str:
    """What a run of places is called; all prompts name it alike, however short their continuation."""
    last = min(most, max(1, 2 * group.start))
    return (
        f"token {last}" if last == group.start + 1 else f"tokens {group.start + 1}\N{EN DASH}{last}"
    )


def rounded(values: Sequence[float]) -> list[float]:
    """To `SIGNIFICANT` digits."""
    return [float(f"{value:.{SIGNIFICANT}g}") for value in values]


@dataclass(frozen=True, kw_only=True)
class FidelityProbe(Probe):
    """KL divergence, agreement and likelihood of a continuation under every method's cache.

    No labels are needed: the continuation is what the exact model answers, or a text that is given.
    Every method reads the same tokens, so that no method's own mistakes feed back and differences are
    paired by token. The score is the mean KL divergence from the exact model over the continuation's
    tokens, in nats; over prompts it is the mean of their means, and prompts are what intervals
    resample.

    All but the last prompt token are compressed (with ``compress_after=context``: the context), and the
    rest is fed, so that the first token of the continuation counts like any other.

    Attributes:
        prompts: a task whose first `num_prompts` prompts are used; None with `files`.
        files: glob or list of globs of plain text files, cut into prompts of `prompt_tokens` tokens.
        continuation: greedy (the exact model's own answer, its end token included) | given (a task's
            first reference answer; of files the text that follows).
        tokens: of the continuation, at most; fewer where the model has no more positions.
        rates: shares to compress to, from one prefill; null: the job's budget alone.
        floor: measure what rounding alone comes to (the exact cache fed twice, in another batch).
    """

    name: ClassVar[str] = "fidelity"
    score_unit: ClassVar[str] = "KL in nats"
    repetition: ClassVar[str] = "prompt"
    figures: ClassVar[tuple[Figure, ...]] = (Distances(),)
    lower_is_better: ClassVar[bool] = True

    prompts: Task | None = None
    files: Sequence[str] = ()
    prompt_tokens: Tokens = 1024
    num_prompts: Repeats = 16
    continuation: Literal["greedy", "given"] = "greedy"
    tokens: Tokens = 64
    rates: Several[Share] | None = None
    floor: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompts is None) == (not self.files):
            raise TaskError(
                "task.prompts and task.files: exactly one of them must be given "
                f"(got {'both' if self.files else 'neither'})"
            )

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        data = file_digests(self.files) if self.prompts is None else self.prompts.digests()
        return {
            **super().meta(),
            "data": dict(data),
            "breakdown": ["rate"] if self.rates else [],
            "measures": [group_name(g, self.tokens) for g in position_groups(self.tokens)],
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prompt; all methods and rates share its prefill.

        Raises:
            KVError, TaskError: a prompt that leaves the model no position, a budget that a prompt is
                too short for, no continuation to be given, no text in the files.
        """
        encoder = session.encoder
        cases = self._of_task(encoder) if self.prompts is not None else self._of_files(encoder)
        positions = encoder.max_positions
        units = []
        for name, case in cases:
            head = case.context_tokens if session.compress_after == "context" else case.n - 1
            if head < 1 or head >= case.n:
                raise KVError(
                    f"prompt {name!r} has {case.n} tokens, of which {head} would be compressed; "
                    "allowed: at least one, and fewer than there are"
                )
            if positions is not None and case.n >= positions:
                raise KVError(
                    f"prompt {name!r} has {case.n} tokens and the model {positions} positions; "
                    "allowed: fewer, since the continuation needs some"
                )
            if self.continuation == "given" and not case.given:
                raise TaskError(
                    f"task.continuation is 'given' and prompt {name!r} has no text to go on with; "
                    "allowed: greedy"
                )
            for _, budget in methods.values():
                for rate in self.rates or (None,):
                    _budget(budget, rate).capacity(head)
            ids = tuple(self._record_id(name, rate) for rate in self.rates or (None,))
            units.append(Unit(name, ids, case))
        return units

    @staticmethod
    def _record_id(prompt: str, rate: float | None) -> str:
        return prompt if rate is None else f"{prompt}/rate{rate:g}"

    def _of_task(self, encoder: PromptEncoder) -> Iterator[tuple[str, Prompt]]:
        assert self.prompts is not None
        for example in list(self.prompts.examples(encoder))[: self.num_prompts]:
            encoded = encode_example(example, encoder)
            given = encoder.encode_text(example.answers[0]) if example.answers else []
            ids = (*encoded.context_ids, *encoded.question_ids)
            text = example.context + example.question
            yield (
                example.id,
                Prompt(ids, len(encoded.context_ids), tuple(given[: self.tokens]), text),
            )

    def _of_files(self, encoder: PromptEncoder) -> Iterator[tuple[str, Prompt]]:
        """The first stretch of each file, then the second of each, and so on; what is shorter than a
        whole stretch is left out."""
        step = self.prompt_tokens + self.tokens
        encoded = [(name, encoder.encode_text(text)) for name, text in texts_of_files(self.files)]
        found = 0
        for turn in range(max(len(ids) for _, ids in encoded) // step + 1):
            for name, ids in encoded:
                part = ids[turn * step : (turn + 1) * step]
                if found == self.num_prompts or len(part) < step:
                    continue
                found += 1
                head = (*encoder.prefix_ids, *part[: self.prompt_tokens])
                yield (
                    f"{name}-{turn}",
                    Prompt(
                        head,
                        len(head) - 1,
                        tuple(part[self.prompt_tokens :]),
                        encoder.decode(part[: self.prompt_tokens]),
                    ),
                )
        if not found:
            raise TaskError(
                f"task.files={list(self.files)} hold no stretch of task.prompt_tokens + task.tokens = "
                f"{step} tokens; the longest text has {max(len(ids) for _, ids in encoded)}"
            )

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """One prefill, one continuation, every method at every rate beside the exact cache."""
        case: Prompt = unit.payload
        positions = session.encoder.max_positions
        most = self.tokens if positions is None else min(self.tokens, positions - case.n)
        rates = self.rates or (None,)
        forks: dict[str, tuple[Method, Budget]] = {}
        for label, (method, budget) in methods.items():
            for rate in rates if method.uses_budget else rates[:1]:
                forks[_key(label, rate)] = method, _budget(budget, rate)
        after = session.compress_after == "context"
        reading = read(
            session.model,
            case.ids,
            with_reference(forks),
            seed=session.seed,
            example_id=unit.id,
            room=most,
            context_tokens=case.context_tokens if after else None,
            encoder=session.encoder,
        )
        reference = reading.forks[0]
        if reference.failure is not None:
            raise reference.failure
        tokens = list(case.given[:most])
        if self.continuation == "greedy":
            stopping = Stopping(most, session.end_ids, timeout_s=session.example_timeout)
            tokens = greedy_continuation(session.model, reading, reference, stopping)
        floor = noise_floor(session.model, reading, tokens) if self.floor else None
        found = compare(session.model, reading, tokens)
        shared = {
            **self._about(unit, case, reading, tokens, session),
            "cut": most < self.tokens and len(tokens) == most,
            "kl_floor": None if floor is None else max(floor),
        }
        for label, (method, budget) in methods.items():
            for rate in rates:
                key = _key(label, rate if method.uses_budget else rates[0])
                n = reading.start.n
                fields = {
                    **shared,
                    **({} if rate is None else {"rate": rate}),
                    "capacity": _budget(budget, rate).capacity(n) if method.saves_memory else n,
                    **self._measured(found[key], tokens, case.text, session.encoder),
                }
                yield Outcome(label, self._record_id(unit.id, rate), fields)

    def _about(
        self,
        unit: Unit,
        case: Prompt,
        reading: CompressedPrompt,
        tokens: Sequence[int],
        session: Session,
    ) -> dict[str, Any]:
        """Record fields that are the same for every method."""
        return {
            "prompt": unit.id,
            "prompt_tokens": case.n,
            "compressed_tokens": reading.start.n,
            "compress_after": session.compress_after,
            "continuation": self.continuation,
            "continuation_ids": list(tokens),
            "new_tokens": len(tokens),
            "answers": [session.encoder.decode(tokens)],
            "prompt_tail": case.text[-200:],
        }

    def _measured(
        self, found: Fidelity, tokens: Sequence[int], text: str, encoder: PromptEncoder
    ) -> dict[str, Any]:
        """Record fields of one method on one prompt."""
        held: dict[str, Any] = {
            "entries": found.entries,
            "cache_bytes": found.cache_bytes,
            "exact_bytes": found.exact_bytes,
            "ratio": None
            if found.cache_bytes is None or not found.exact_bytes
            else found.cache_bytes / found.exact_bytes,
            "compressed": found.compressed,
            **({"imagined": True} if found.imagined else {}),
            "prefill_s": found.prefill_s,
            "compress_s": found.compress_s,
        }
        if found.failure is not None:
            return {**held, "status": status_of(found.failure), "error": one_line(found.failure)}
        difference = _mean(found.difference)
        parts = {
            group_name(group, self.tokens): _mean([found.kl[i] for i in group])
            for group in position_groups(len(tokens))
        }
        return {
            **held,
            "score": _mean(found.kl),
            "kl": _mean(found.kl),
            "max_kl": max(found.kl),
            "agreement": _mean(found.agree),
            "nll": _mean(found.nll),
            "nll_exact": _mean(found.nll_exact),
            "difference": difference,
            "perplexity_ratio": math.exp(min(difference, 700.0)),
            **parts,
            "per_token": {
                "kl": rounded(found.kl),
                "agree": found.agree,
                "difference": rounded(found.difference),
            },
            **_divergence(found, tokens, text, encoder),
        }


def _key(label: str, rate: float | None) -> str:
    return label if rate is None else f"{label} at rate {rate:g}"


def _budget(budget: Budget, rate: float | None) -> Budget:
    return budget if rate is None else budget.with_share(rate)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _divergence(
    found: Fidelity, tokens: Sequence[int], text: str, encoder: PromptEncoder
) -> dict[str, Any]:
    """Where the method's most likely token first is another than the exact model's: the place (from 1),
    the text before it, both tokens. The prediction is the continuation up to there and that token."""
    first = next((i for i, same in enumerate(found.agree) if not same), None)
    if first is None:
        return {"diverges_at": None, "prediction": encoder.decode(tokens)}
    before = encoder.decode(tokens[:first])
    return {
        "diverges_at": first + 1,
        "diverges": {
            "before": (text + before)[-80:],
            "exact": encoder.tokenizer.decode([found.top_exact[first]]),
            "method": encoder.tokenizer.decode([found.top[first]]),
            "kl": found.kl[first],
        },
        "prediction": encoder.decode([*tokens[:first], found.top[first]]),
    }
