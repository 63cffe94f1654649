"""One more pass over a prompt before it is compressed, for the methods that ask for it (`Rescoring`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine import guard
from kvbench.engine.attention import AttentionState, LayerCall
from kvbench.engine.fork import Fork
from kvbench.engine.states import PassingCache, States, clone_of, joined_cache
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import KVError, LayerKV
from kvbench.methods.base import Repetition, Rescoring
from kvbench.prompts import PromptEncoder

Feed = Callable[[Sequence[int], AttentionState], object]
"""Runs the model on tokens that follow the prompt, with this attention state."""


@dataclass
class RepeatedPrompt(AttentionState):
    """Attention state of sequences that follow a prompt and join no cache; it holds the exact cache.

    Attributes:
        held: keys and values by layer; for a sliding-window layer, those in its window.
        layers: those that will be compressed, without the prompt's queries.
        states: after the prompt, by layer that is recurrent (hybrid models).
        shown: the forks whose methods see the sequence, and which tokens of the prompt it repeats.
    """

    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    layers: dict[int, LayerKV] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    shown: tuple[Sequence[Fork], int, int] = ((), 0, 0)

    def feed(
        self, forks: Sequence[Fork], ids: Sequence[int], encoder: PromptEncoder | None, feed: Feed
    ) -> None:
        """Repeat the prompt `ids`, once for all forks with the same `Rescoring`.

        Args:
            encoder: encodes the instruction to repeat, and what the chat template puts before an
                answer.
        """
        asked: dict[tuple[Rescoring, int], list[Fork]] = {}
        for fork in forks:
            assert fork.method.rescoring is not None
            asked.setdefault((fork.method.rescoring, fork.budget.sink), []).append(fork)
        for (rescoring, sink), alike in asked.items():
            clock = Elapsed(next(iter(self.held.values()))[0].device)
            try:
                for start, stop, tokens in sequences(rescoring, ids, sink, encoder):
                    self.shown = (alike, start, stop)
                    feed(tokens, self)
            except Exception as failure:  # noqa: BLE001 - a failure of theirs, not of the others
                for fork in alike:
                    fork.fail(failure)
            clock.stop()
            for fork in alike:
                fork.ledger.clocks.append(clock)

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `AttentionState`: copies of the states after the prompt."""
        return joined_cache(config, [clone_of(self.states)])

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention to the prompt and the sequence itself; the methods are shown its queries."""
        keys, values = self.held[call.layer]
        both = replace(
            call, key=torch.cat([keys, call.key], 2), value=torch.cat([values, call.value], 2)
        )
        layer = self.layers.get(call.layer)
        forks, start, stop = self.shown
        repeated = Repetition(start, stop, call.query, call.key, call.value)
        for fork in forks:
            if layer is None or fork.failure is not None:
                continue
            fork.carry_to(call.key.device)
            try:
                guard.rescore(fork.label, fork.method, layer, repeated, fork.budget, fork.carried)
            except guard.LayerDamaged:
                raise  # what the other methods would compute from this layer is wrong
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                fork.fail(failure)
        return both.exact()


def sequences(
    rescoring: Rescoring, ids: Sequence[int], sink: int, encoder: PromptEncoder | None
) -> Iterator[tuple[int, int, list[int]]]:
    """What is fed after a prompt to have it repeated: of each chunk its start, its stop, and the tokens
    of the instruction, of what opens an answer, and of the chunk. Each piece is tokenised alone.

    Raises:
        KVError: there is an instruction and no tokenizer.
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
        ask += ids[max(sink, start - rescoring.overlap) : start]
        if words and encoder is not None:
            ask += encoder.suffix_ids
        yield start, stop, [*ask, *ids[start:stop]]
