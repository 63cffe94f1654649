"""A second pass over a prompt before it is compressed, in which the model repeats the prompt, for the
methods that ask for it (`Rescoring`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
"""A function that runs the model on token ids that follow the prompt, with an attention state."""


class Chunk(NamedTuple):
    """The tokens that are fed to have one chunk of a prompt repeated.

    Attributes:
        start, stop: the chunk is the prompt tokens start .. stop - 1.
        ids: the token ids of the instruction, of what opens an answer, and of the chunk.
    """

    start: int
    stop: int
    ids: list[int]


@dataclass
class RepeatedPrompt(AttentionState):
    """The attention state of chunks that follow a prompt. Each chunk attends to the exact cache of the
    prompt, which is held here, and to itself; its keys and values are added to no cache.

    Attributes:
        exact_cache: the prompt's keys and values by the layer's index; for a sliding-window layer those
            in its window.
        layers: the layers that will be compressed, by the layer's index, without the prompt's queries.
        states: for hybrid models the recurrent states after the prompt, by the layer's index.
        forks: the forks whose methods are shown the current chunk.
        chunk: the current chunk; None before the first.
    """

    exact_cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    layers: dict[int, LayerKV] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    forks: Sequence[Fork] = ()
    chunk: Chunk | None = None

    def feed(
        self, forks: Sequence[Fork], ids: Sequence[int], encoder: PromptEncoder | None, feed: Feed
    ) -> None:
        """Let the model repeat the prompt, once for all forks with the same `Rescoring` and sink.

        Args:
            ids: the token ids of the prompt.
            encoder: encodes the instruction to repeat, and what the chat template puts before an
                answer; None if there is no tokenizer.
            feed: runs the model.
        """
        sharing: dict[tuple[Rescoring, int], list[Fork]] = {}
        for fork in forks:
            assert fork.method.rescoring is not None
            sharing.setdefault((fork.method.rescoring, fork.budget.sink), []).append(fork)
        for (rescoring, sink), group in sharing.items():
            clock = Elapsed(next(iter(self.exact_cache.values()))[0].device)
            self.forks = group
            try:
                for chunk in chunks_of(rescoring, ids, sink, encoder):
                    self.chunk = chunk
                    feed(chunk.ids, self)
            except guard.LayerDamaged:
                raise
            except Exception as failure:  # noqa: BLE001 - the other groups go on
                for fork in group:
                    fork.fail(failure)
            clock.stop()
            for fork in group:
                fork.ledger.clocks.append(clock)

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `AttentionState.past`: copies of the states after the prompt."""
        return joined_cache(config, [clone_of(self.states)])

    def attend(self, call: LayerCall) -> Tensor:
        """Show the chunk's queries, keys and values to the methods, and compute its exact attention to
        the prompt and to itself."""
        assert self.chunk is not None
        keys, values = self.exact_cache[call.layer]
        with_prompt = replace(
            call, key=torch.cat([keys, call.key], 2), value=torch.cat([values, call.value], 2)
        )
        layer = self.layers.get(call.layer)
        repeated = Repetition(self.chunk.start, self.chunk.stop, call.query, call.key, call.value)
        for fork in self.forks:
            if layer is None or fork.failure is not None:
                continue
            fork.carry_to(call.key.device)
            try:
                guard.rescore(fork.label, fork.method, layer, repeated, fork.budget, fork.carried)
            except guard.LayerDamaged as failure:
                fork.fail(failure)
                raise  # as in `PrefillState._compress`
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                fork.fail(failure)
        return with_prompt.exact()


def chunks_of(
    rescoring: Rescoring, ids: Sequence[int], sink: int, encoder: PromptEncoder | None
) -> Iterator[Chunk]:
    """Cut the tokens behind the sink into chunks that the model is to repeat. The instruction and what
    opens an answer are tokenised separately, so that the chunk's tokens are those of the prompt.

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
        before: list[int] = []
        text = rescoring.first if start == sink else rescoring.following
        if text and encoder is not None:
            before = encoder.encode_text(text)
        before += ids[max(sink, start - rescoring.overlap) : start]
        if words and encoder is not None:
            before += encoder.suffix_ids
        yield Chunk(start, stop, [*before, *ids[start:stop]])
