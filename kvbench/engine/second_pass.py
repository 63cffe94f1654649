"""The second pass over a prompt that some methods ask for (`SecondPass`): the model repeats the prompt
chunk by chunk, and the methods observe every layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvbench.engine import check
from kvbench.engine.attention import LayerCall, Pass, UnsupportedModel
from kvbench.engine.device import free_memory, is_out_of_memory, release_frames
from kvbench.engine.row import Row
from kvbench.engine.states import PassingCache, State, clone_of, joined_cache, states_in
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import KVError, LayerKV
from kvbench.methods.base import Replay, SecondPass
from kvbench.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

SMALLEST_CHUNK = 32
"""Chunks are not made smaller than this where the memory of a gradient does not suffice."""

FeedIds = Callable[[Sequence[int], Pass], object]
"""A function that runs the model on token ids that follow the prompt, in a pass."""


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
class Activations:
    """Notes that forward hooks take while the model runs on one chunk, by the layer's index.

    Attributes:
        hidden_norms: [batch, t] float32, the norms of the hidden states that enter an attention block.
        outputs: [batch, t, hidden], what an attention block returns. The graph of the gradient begins at
            the first of them, so nothing is stored of the layers before it.
        last: [batch, t, hidden], what the last decoder layer returns, before the final norm.
    """

    hidden_norms: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None

    @contextmanager
    def hooked(
        self, model: PreTrainedModel, blocks: Mapping[int, nn.Module], asked: SecondPass
    ) -> Iterator[None]:
        """Hooks on the attention `blocks` of the scored layers, and on the last layer, within this
        context: those that `asked` needs."""
        hooks = []
        try:
            for layer, block in blocks.items():
                if asked.hidden_norms:
                    note = partial(self._note_hidden, layer)
                    hooks.append(block.register_forward_pre_hook(note, with_kwargs=True))
                if asked.gradients:
                    hooks.append(block.register_forward_hook(partial(self._note_output, layer)))
            if asked.gradients:
                last = last_layer(model, next(iter(blocks.values())))
                hooks.append(last.register_forward_hook(self._note_last))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note_hidden(self, layer: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.hidden_norms[layer] = torch.linalg.vector_norm(
            hidden.detach(), dim=-1, dtype=torch.float32
        )

    def _note_output(self, layer: int, block: nn.Module, args: Any, output: Any) -> None:
        self.outputs[layer] = first_of(output)
        if not self.outputs[layer].requires_grad:
            self.outputs[layer].requires_grad_()

    def _note_last(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.last = first_of(output)

    def gradients(self) -> dict[int, Tensor]:
        """The gradients of the squared norm of `last`, summed in float32 over all tokens of the chunk,
        with respect to `outputs`. Frees the graph."""
        assert self.last is not None
        squared_norm = self.last.float().square().sum()
        outputs, self.outputs, self.last = self.outputs, {}, None
        gradients = torch.autograd.grad(squared_norm, [*outputs.values()])
        return dict(zip(outputs, gradients, strict=True))


def first_of(output: Any) -> Tensor:
    """The hidden states among what a block or a layer of transformers returns."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def last_layer(model: nn.Module, block: nn.Module) -> nn.Module:
    """The last decoder layer: the last of the list of layers that contains `block`.

    Raises:
        UnsupportedModel: no list does.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(part is block for part in module.modules()):
            return module[-1]
    raise UnsupportedModel(
        f"{type(model).__name__} holds its layers in no list; a gradient of the last layer's output is "
        "not supported there"
    )


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Within this context no parameter requires a gradient, so that graphs hold activations alone."""
    trainable = [part for part in model.parameters() if part.requires_grad]
    for part in trainable:
        part.requires_grad_(False)
    try:
        yield
    finally:
        for part in trainable:
            part.requires_grad_()


@dataclass
class ReplayPass(Pass):
    """The passes over chunks that follow a prompt. Each chunk attends to the exact cache of the prompt,
    which is held here, and to itself; its keys and values are added to no cache.

    Attributes:
        exact_cache: the prompt's keys and values by the layer's index; for a sliding-window layer those
            in its window.
        layers: the layers that will be compressed, by the layer's index, without the prompt's queries
            unless a method asks for them (`SecondPass.prompt_queries`).
        blocks: the attention modules of these layers.
        states: for hybrid models the recurrent states after the prompt, by the layer's index.
        rows: those whose methods observe the current chunk.
        chunk: the current chunk; None before the first.
        seen: what hooks have noted of the current chunk.
        waiting: where methods ask for gradients, the layers of the current chunk until the gradients are
            there; None where every layer is shown at once.
    """

    exact_cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    layers: dict[int, LayerKV] = field(default_factory=dict)
    blocks: dict[int, nn.Module] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    chunk: Chunk | None = None
    seen: Activations = field(default_factory=Activations)
    waiting: dict[int, Replay] | None = None

    def read(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        ids: Sequence[int],
        encoder: PromptEncoder | None,
        feed: FeedIds,
    ) -> None:
        """Let the model repeat the prompt, once for all rows with the same `SecondPass` and sink.

        Args:
            ids: the token ids of the prompt.
            encoder: encodes the instruction to repeat, and what the chat template puts before an
                answer; None if there is no tokenizer.
            feed: runs the model.
        """
        sharing: dict[tuple[SecondPass, int], list[Row]] = {}
        for row in rows:
            assert row.method.second_pass is not None
            sharing.setdefault((row.method.second_pass, row.budget.sink), []).append(row)
        for (asked, sink), group in sharing.items():
            passes = [row.method.second_pass for row in group]
            asked = replace(asked, hidden_norms=any(one and one.hidden_norms for one in passes))
            clock = Elapsed(next(iter(self.exact_cache.values()))[0].device)
            self.rows = group
            try:
                self._repeat(model, asked, sink, ids, encoder, feed)
            except check.LayerDamaged:
                raise
            except Exception as failure:  # noqa: BLE001 - the other groups go on
                for row in group:
                    row.fail(failure)
            clock.stop()
            for row in group:
                row.clocks.append(clock)

    def _repeat(
        self,
        model: PreTrainedModel,
        asked: SecondPass,
        sink: int,
        ids: Sequence[int],
        encoder: PromptEncoder | None,
        feed: FeedIds,
    ) -> None:
        """Let the model repeat all chunks. Where a graph of gradients does not fit into memory, the
        prompt is repeated anew in chunks of half the size, as far as `SMALLEST_CHUNK`."""
        while True:
            try:
                for chunk in chunks_of(asked, ids, sink, encoder):
                    self.chunk = chunk
                    with self.seen.hooked(model, self.blocks, asked):
                        if asked.gradients:
                            self._feed_with_gradients(model, feed)
                        else:
                            feed(chunk.ids, self)
                return
            except Exception as failure:
                half = asked.chunk // 2
                if not (asked.gradients and is_out_of_memory(failure) and half >= SMALLEST_CHUNK):
                    raise
                release_frames(failure)
            finally:
                self.seen, self.waiting = Activations(), None
            log.warning(
                "%s: the gradients of a chunk of %d tokens do not fit into memory; chunks of %d",
                ", ".join(row.label for row in self.rows),
                asked.chunk,
                half,
            )
            asked = replace(asked, chunk=half)
            free_memory(next(iter(self.exact_cache.values()))[0].device)

    def _feed_with_gradients(self, model: PreTrainedModel, feed: FeedIds) -> None:
        """Run the model on the chunk and back, then show every layer with its gradient."""
        assert self.chunk is not None
        self.waiting = {}
        with torch.enable_grad(), frozen(model):
            feed(self.chunk.ids, self)
            gradients = self.seen.gradients()
        for layer, replay in self.waiting.items():
            self._show(layer, replace(replay, gradients=gradients[layer]))

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """Copies of the states after the prompt. The recurrent states after the chunk are dropped:
        written in place, they would replace what the graph of a gradient holds."""
        cache = joined_cache(config, [clone_of(self.states)])
        for state in states_in(cache).values():
            state.update_recurrent_state = lambda new, *_, **__: new
        return cache

    def attend(self, call: LayerCall) -> Tensor:
        """Show the chunk's queries, keys and values to the methods, and compute its exact attention to
        the prompt and to itself."""
        assert self.chunk is not None
        if call.layer in self.layers:
            replay = Replay(
                self.chunk.start,
                self.chunk.stop,
                call.query.detach(),
                call.key.detach(),
                call.value.detach(),
                hidden_norms=self.seen.hidden_norms.pop(call.layer, None),
            )
            if self.waiting is None:
                self._show(call.layer, replay)
            else:
                self.waiting[call.layer] = replay
        keys, values = self.exact_cache[call.layer]
        with_prompt = replace(
            call, key=torch.cat([keys, call.key], 2), value=torch.cat([values, call.value], 2)
        )
        return with_prompt.exact()

    def _show(self, layer: int, replay: Replay) -> None:
        kv = self.layers[layer]
        for row in self.rows:
            if row.failure is not None:
                continue
            row.carry_to(kv.keys.device)
            try:
                check.observe(row.label, row.method, kv, replay, row.budget, row.carried)
            except check.LayerDamaged as failure:
                row.fail(failure)
                raise  # what the others read is wrong: `prefill` reads the prompt again for them
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                row.fail(failure)


def chunks_of(
    asked: SecondPass, ids: Sequence[int], sink: int, encoder: PromptEncoder | None
) -> Iterator[Chunk]:
    """Cut the tokens behind the sink into chunks that the model is to repeat. The instruction and what
    opens an answer are tokenised separately, so that the chunk's tokens are those of the prompt.

    Raises:
        KVError: there is an instruction and no tokenizer.
    """
    words = asked.first or asked.following
    if words and encoder is None:
        raise KVError(
            f"{words.strip()[:30]!r} asks the model to repeat the prompt and there is no tokenizer; "
            "allowed: one beside the prompt, or a method that asks without words"
        )
    for start in range(sink, len(ids), asked.chunk):
        stop = min(len(ids), start + asked.chunk)
        before: list[int] = []
        text = asked.first if start == sink else asked.following
        if text and encoder is not None:
            before = encoder.encode_text(text)
        before += ids[max(sink, start - asked.overlap) : start]
        if words and encoder is not None:
            before += encoder.suffix_ids
        yield Chunk(start, stop, [*before, *ids[start:stop]])
