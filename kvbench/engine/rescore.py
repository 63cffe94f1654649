"""One more pass over a prompt before it is compressed, for the methods that ask for it (`Rescoring`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine.attention import AttentionState, LayerCall
from kvbench.engine.fork import Fork
from kvbench.engine.guard import Guard, SharedStateChanged
from kvbench.engine.states import PassingCache, States, clone_of, joined_cache
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import KVError, LayerKV
from kvbench.methods.base import Repetition, Rescoring
from kvbench.tasks.base import PromptEncoder

Feed = Callable[[Sequence[int], AttentionState], object]
"""Runs the model on tokens that follow the prompt, with this attention state."""


class Spoiled(Exception):
    """A method changed what other forks of a prefill use: they have to begin again.

    Attributes:
        whose: whether it is known, and its fork has failed.
    """

    def __init__(self, *, whose: bool) -> None:
        super().__init__()
        self.whose = whose


def blame(fork: Fork, failure: Exception, others: Sequence[Fork]) -> None:
    """This fork has failed.

    Raises:
        Spoiled: for what it did to tensors that others go on reading.
    """
    fork.fail(failure)
    spoiled = isinstance(failure, SharedStateChanged) and failure.tensors
    if spoiled and any(other.failure is None for other in others):
        raise Spoiled(whose=True)


def forgive(forks: Sequence[Fork]) -> None:
    """What failed may have failed for what another did."""
    for fork in forks:
        if not isinstance(fork.failure, SharedStateChanged):
            fork.failure = None


@dataclass
class Rescorer:
    """The exact cache of a prompt, kept for as long as the model repeats it.

    Attributes:
        forks: those that look, and compress afterwards. others: whom they must not disturb.
        held: keys and values by layer; of a sliding layer those in its window.
        guards: of the layers that are compressed. states: of the others that carry one.
    """

    forks: Sequence[Fork]
    others: Sequence[Fork]
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    guards: dict[int, Guard] = field(default_factory=dict)
    states: States = field(default_factory=dict)

    def keep(self, layer: int, kv: LayerKV) -> None:
        """A layer that will be compressed. Its queries are let go."""
        self.held[layer] = (kv.keys, kv.values)
        self.guards[layer] = Guard(replace(kv, queries=None, shared={}))

    @property
    def running(self) -> list[Fork]:
        """Those that have not failed."""
        return [fork for fork in self.forks if fork.failure is None]

    def run(
        self,
        ids: Sequence[int],
        encoder: PromptEncoder | None,
        feed: Feed,
        compress: Callable[[Fork, int, Guard], None],
    ) -> Elapsed:
        """Have the prompt `ids` repeated, once for all forks that ask for the same, and then compress
        every layer of each. Returns the clock of it all.

        Args:
            encoder: of the words that ask, and what the model's template puts before an answer.

        Raises:
            Spoiled: see `blame`.
        """
        device = next(iter(self.held.values()))[0].device
        whole = Elapsed(device)
        asked: dict[tuple[Rescoring, int], list[Fork]] = {}
        for fork in self.running:
            assert fork.method.rescoring is not None
            asked.setdefault((fork.method.rescoring, fork.budget.sink), []).append(fork)
        for (rescoring, sink), forks in asked.items():
            clock = Elapsed(device)
            try:
                for start, stop, tokens in sequences(rescoring, ids, sink, encoder):
                    feed(tokens, _Repeating(self, forks, start, stop))
            except Spoiled:
                raise
            except Exception as failure:  # noqa: BLE001 - a failure of theirs, not of the others
                for fork in forks:
                    fork.fail(failure)
            clock.stop()
            for fork in forks:
                fork.clocks.append(clock)
        for layer, guard in self.guards.items():
            for fork in self.running:
                compress(fork, layer, guard)
        return whole.stop()


@dataclass
class _Repeating:
    """Attention state of a sequence that follows the prompt and joins no cache."""

    rescorer: Rescorer
    forks: Sequence[Fork]
    start: int
    stop: int

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `kvbench.engine.states.Stateful`: copies of those after the prompt."""
        return joined_cache(config, [clone_of(self.rescorer.states)])

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention to the prompt and the sequence itself; then the forks look."""
        keys, values = self.rescorer.held[call.layer]
        both = replace(
            call, key=torch.cat([keys, call.key], 2), value=torch.cat([values, call.value], 2)
        )
        out = both.exact()
        guard = self.rescorer.guards.get(call.layer)
        for fork in self.forks if guard is not None else ():
            if fork.failure is not None:
                continue
            assert guard is not None
            fork.carry_to(call.key.device)
            own = call if len(self.forks) == 1 else call.copied()
            repeated = Repetition(self.start, self.stop, own.query, own.key, own.value)
            try:
                guard.rescore(fork.label, fork.method, repeated, fork.budget, fork.carried)
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                blame(fork, failure, self.rescorer.others)
        return out


def sequences(
    rescoring: Rescoring, ids: Sequence[int], sink: int, encoder: PromptEncoder | None
) -> Iterator[tuple[int, int, list[int]]]:
    """What is fed after a prompt to have it repeated: start and stop of each chunk, and the words that
    ask, what opens an answer, the chunk. Each piece is tokenised alone.

    Raises:
        KVError: words, and no tokenizer.
    """
    words = rescoring.first or rescoring.following
    if words and encoder is None:
        raise KVError(
            f"{words.strip()[:30]!r} asks the model to repeat the prompt and there is no tokenizer; "
            "allowed: one beside the prompt, or a method that asks without words"
        )
    for start in range(sink, len(ids), rescoring.chunk):
        stop = min(len(ids), start + rescoring.chunk)
        ask: list[int] = []
        text = rescoring.first if start == sink else rescoring.following
        if text and encoder is not None:
            ask = encoder.encode_text(text)
        if start > sink and rescoring.overlap:
            ask += ids[max(sink, start - rescoring.overlap) : start]
        if words and encoder is not None:
            ask += encoder.suffix_ids
        yield start, stop, [*ask, *ids[start:stop]]
