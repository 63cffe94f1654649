"""The exact prefill of a prompt, which serves every method: the methods compress each layer as soon as
it is computed. Some methods first see the model repeat the prompt (`SecondPass`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine import check
from kvbench.engine.architecture import compressible_layers, head_shapes
from kvbench.engine.attention import Capture, LayerCall, Pass, UnsupportedModel
from kvbench.engine.cost import ExactBytes
from kvbench.engine.device import input_device, small_pass, synchronize
from kvbench.engine.rotary import crossing, forget_lengths, has_table_of, rotary_of
from kvbench.engine.row import Row
from kvbench.engine.second_pass import FeedIds, ReplayPass
from kvbench.engine.states import (
    PassingCache,
    State,
    clone_of,
    is_hybrid,
    state_bytes,
    states_in,
)
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import NORMALISERS, CompressedKV, LayerKV, Rotary, Shared
from kvbench.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_kv(
    call: LayerCall,
    index: int,
    count: int,
    rotary: Rotary | None = None,
    normalisers: Tensor | None = None,
) -> LayerKV:
    """Make the layer that methods are shown from a call of attention.

    Args:
        index: the number of the layer among the `count` layers that are compressed.
        rotary: see `LayerKV.rotary`.
        normalisers: see `kvbench.kv.NORMALISERS`.
    """
    output = call.output
    layer = LayerKV(
        call.key,
        call.value,
        call.query,
        index,
        count,
        call.scaling,
        softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks.detach().to(torch.float32, copy=True),
        output=None if output is None else output.detach().clone,
        rotary=rotary,
    )
    if normalisers is not None:
        inputs = layer.keys, layer.values, layer.queries
        layer.shared[NORMALISERS] = Shared(normalisers, Elapsed(call.key.device).stop(), inputs)
    return layer


class Prefill(Pass):
    """The prefill of one prompt: attention is exact, and every method then compresses the layer.

    If a method fails or keeps too much, its row fails, and the other methods go on.

    Args:
        rows: one per method; their caches are made here.
        compressible: the indices of the layers that are compressed (`compressible_layers`).
        rotary: see `rotary_of`.
        shown: how many tokens of the pass, the first ones, are compressed; None for all. No method sees
            keys, values or queries of the others.

    Attributes:
        order: for the index of each compressible layer its number among these layers.
        replay: the second pass, in which the prompt is repeated; None if no method asks for one.
        exact: the bytes of the exact cache of this prompt.
        clocks: the clocks of all work here that is not part of the exact prefill.
        non_finite: by the layer's index, the counts of keys and values that are not finite, which are
            still to be read from a GPU (`check.check_finite`).
        on_compress: is called with the label of a method before the method compresses a layer.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        compressible: Sequence[int],
        rotary: Mapping[int, Rotary] | None = None,
        shown: int | None = None,
    ) -> None:
        self.rotary = rotary or {}
        self.shown = shown
        self.rows = rows
        self.order = {layer: index for index, layer in enumerate(compressible)}
        asked = [row.method.second_pass for row in rows if row.has_second_pass]
        self.replay = ReplayPass() if asked else None
        self.replay_shows_queries = any(one is not None and one.prompt_queries for one in asked)
        self.exact = ExactBytes()
        self.clocks: list[Elapsed] = []
        self.non_finite: dict[int, Tensor] = {}
        self.on_compress: Callable[[str], None] = lambda label: None
        self._past: PassingCache | None = None

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """States as before the first token."""
        if self._past is None:
            self._past = PassingCache(config)
        return self._past

    @property
    def states(self) -> dict[int, State]:
        """For hybrid models, the recurrent states after the prompt, by the layer's index."""
        return {} if self._past is None else states_in(self._past)

    def attend(self, call: LayerCall) -> Tensor:
        """Compute the exact attention of a layer. Then let every method compress its keys and values, or
        keep its sliding window."""
        out, normalisers = call.exact_with_normalisers()
        clock = Elapsed(call.key.device)
        if self.shown is not None:
            call = call.of_row(0, 0, self.shown)
            normalisers = None if normalisers is None else normalisers[:, :, : self.shown]
        if call.sliding_window is not None and call.layer in self.order:
            raise UnsupportedModel(
                f"layer {call.layer} has a sliding window of {call.sliding_window} that the model's "
                "config does not announce"
            )
        token_bytes = (call.key.nbytes + call.value.nbytes) // call.key.shape[2]
        self.exact.layers.append((token_bytes, call.sliding_window))
        if call.layer in self.order:
            self._compress(call, normalisers)
        else:
            self._keep(call)
        self.clocks.append(clock.stop())
        return out

    def _compress(self, call: LayerCall, normalisers: Tensor | None) -> None:
        """Let every method compress the layer, except those that first see the prompt repeated."""
        rotary = self.rotary.get(call.layer)
        kv = layer_kv(call, self.order[call.layer], len(self.order), rotary, normalisers)
        check.check_finite(kv, self.non_finite)
        if self.replay is not None:
            self.replay.exact_cache[call.layer] = (call.key, call.value)
            shown = kv if self.replay_shows_queries else replace(kv, queries=None, shared={})
            self.replay.layers[call.layer] = shown
            if call.module is not None:
                self.replay.blocks[call.layer] = call.module
        for row in self.rows:
            if not row.has_second_pass:
                row.compress(call.layer, kv, self.on_compress)

    def _keep(self, call: LayerCall) -> None:
        """Let every row hold the sliding window of a layer that is not compressed, or all of it."""
        n = call.key.shape[2]
        first = 0 if call.sliding_window is None else max(0, n - call.sliding_window)
        key, value = call.key[:, :, first:], call.value[:, :, first:]
        if self.replay is not None:
            self.replay.exact_cache[call.layer] = (key, value)
        positions = torch.arange(first, n, device=key.device).expand(*key.shape[:3])
        for row in self.rows:
            row.keep(call.layer, CompressedKV(key, value, None, positions), call.sliding_window)

    def repeat(
        self,
        model: PreTrainedModel,
        ids: Sequence[int],
        encoder: PromptEncoder | None,
        feed: FeedIds,
    ) -> None:
        """Let the model repeat the prompt for the methods that ask for it (`Method.second_pass`); these
        then compress every layer."""
        rows = [row for row in self.rows if row.has_second_pass and row.failure is None]
        if self.replay is None or not rows:
            return
        clock = Elapsed(next(iter(self.replay.exact_cache.values()))[0].device)
        self.replay.states = self.states
        self.replay.read(model, rows, ids, encoder, feed)
        for layer, kv in self.replay.layers.items():
            for row in rows:
                row.compress(layer, kv, self.on_compress)
        self.clocks.append(clock.stop())

    def end(self, n: int, states: dict[int, State], elapsed_s: float | None = None) -> float | None:
        """Wait for the GPU, and read what it has counted: check that keys and values are finite, and
        audit the entries of each row, which notes its cost after a prompt of n tokens and has a copy of
        the states.

        Args:
            elapsed_s: the seconds of the pass; None if they were not measured.

        Returns:
            those of the exact prefill alone.

        Raises:
            KVError: see `check.refuse_non_finite`.
        """
        check.refuse_non_finite(self.non_finite)
        for row in self.rows:
            row.finish_audit()
        prefill_s = None
        if elapsed_s is not None:
            prefill_s = elapsed_s - sum(clock.seconds for clock in self.clocks)
        self.exact.states = state_bytes(states)
        for row in self.rows:
            row.end_prompt(n, self.exact, clone_of(states), prefill_s)
        return prefill_s


@dataclass
class Reading:
    """A prompt that has been prefilled, and compressed by every method.

    Attributes:
        rows: one per method.
        logits: [vocab], those that predict the token after the prompt, from the exact cache; None where
            tokens are held back, after which every method predicts it from its own cache.
        prefill_s: the seconds of the exact prefill, without compression.
        exact_bytes: the bytes of the exact cache after the prompt.
        n: the number of tokens that were compressed.
        ids: their ids.
        lead: the tokens of the prompt that were held back; they are fed before anything else.
        spent_s: the wall-clock seconds that the prompt took so far.
    """

    rows: Sequence[Row]
    logits: Tensor | None
    prefill_s: float
    exact_bytes: int
    n: int
    ids: Sequence[int] = ()
    lead: Sequence[int] = ()
    spent_s: float = 0.0


def forward(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    state: Pass,
    keep: int | Tensor | None = None,
) -> Tensor:
    """Run the model on ids [batch, t] at positions [t] or [batch, t], and return the logits after each
    token, [batch, t, vocab].

    Args:
        keep: for which tokens logits are computed: the last `keep` tokens, or the tokens with these
            indices; None for all.
    """
    state.begin()
    config = model.config.get_text_config()
    past = state.past(config) if is_hybrid(config) else None
    forget_lengths(model)
    with small_pass(model, ids.numel()):
        output = model(
            input_ids=ids,
            position_ids=positions.expand(ids.shape[0], -1),
            past_key_values=past,
            use_cache=past is not None,
            logits_to_keep=ids.shape[1] if keep is None else keep,
            kvbench=state,
        )
    if not state.called:  # by its class it should have (`check_supported`)
        raise UnsupportedModel(
            f"{type(model).__name__} computes its attention itself instead of through transformers' "
            "attention interface"
        )
    return output.logits


def plan_attention(model: PreTrainedModel, tokens: int) -> None:
    """Run the attention of a layer of each shape on zeros, on every GPU of the model. Does nothing on a
    CPU.

    At the first call with a new length, a GPU's libraries choose and prepare their kernel, which takes
    time. This call takes it before the clock of a prefill of `tokens` tokens starts.
    """
    gpus = {part.device for part in model.parameters() if part.device.type == "cuda"}
    for device in gpus:
        for heads, kv_heads, key_dim, value_dim in set(head_shapes(model.config.get_text_config())):
            query, key, value = (
                torch.zeros(1, count, tokens, dim, dtype=model.dtype, device=device)
                for count, dim in ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
            )
            LayerCall(0, query, key, value, key_dim**-0.5).exact_with_normalisers()


# Not in inference mode: its tensors could not be written to later, outside that mode, and methods and
# decoding do so. Without gradients all the same.
@torch.inference_mode(False)
@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    ids: Sequence[int],
    rows: Sequence[Row],
    *,
    held_back: int = 0,
    encoder: PromptEncoder | None = None,
) -> Reading:
    """Run the model once over the prompt, with exact attention. Afterwards every row holds its
    compressed cache.

    Where the tokens before those that are held back would have another rotary table alone (LongRoPE at
    its boundary, Dynamic NTK), the pass reads all of the prompt, and shows the methods what comes
    before. The states of a hybrid model would then contain the others, so that it holds none back.

    Args:
        ids: the token ids of the prompt.
        rows: one per method.
        held_back: how many tokens at the prompt's end are not compressed (`Reading.lead`); a prompt of
            no more tokens is compressed whole.
        encoder: encodes the words in which a method asks the model to repeat the prompt (`SecondPass`);
            None if there is no tokenizer.
    """
    device = input_device(model)
    config = model.config
    n = len(ids) - held_back if held_back < len(ids) else len(ids)
    one_table = has_table_of(config, n, len(ids))
    if not one_table and is_hybrid(config.get_text_config()):
        n, one_table = len(ids), True
    lead, read = list(ids[n:]), list(ids[:n] if one_table else ids)
    tokens = torch.tensor([read], device=device)

    def feed(following: Sequence[int], state: Pass) -> None:
        failure = crossing(config, n, len(following), len(read))
        if failure is not None:
            raise failure
        positions = torch.arange(n, n + len(following), device=device)
        forward(model, torch.tensor([list(following)], device=device), positions, state, keep=1)

    layers = compressible_layers(model)
    plan_attention(model, len(read))
    positions = torch.arange(len(read), device=device)
    while True:
        for row in rows:
            row.begin_prompt(n)
            row.table_of = len(read)
        rotary = rotary_of(model, layers, len(read), device)
        state = Prefill(rows, layers, rotary, n if len(read) > n else None)
        synchronize(device)
        start = time.perf_counter()
        try:
            logits = forward(model, tokens, positions, state, keep=1)
            state.repeat(model, ids[:n], encoder, feed)
        except check.LayerDamaged:
            continue  # the row that wrote has failed; the others start anew
        break
    synchronize(device)
    seconds = state.end(n, state.states, time.perf_counter() - start)
    assert seconds is not None
    exact_bytes = state.exact.at(n)
    return Reading(rows, None if lead else logits[0, -1], seconds, exact_bytes, n, ids[:n], lead)


@torch.inference_mode(False)  # as for `prefill`: the tensors may be written to later
@torch.no_grad()
def capture_layers(
    model: PreTrainedModel, ids: Sequence[int], layers: Sequence[int]
) -> dict[int, LayerKV]:
    """Run one prompt, and return some layers (indices from 0) with their queries, keys and values after
    position encoding, by the layer's index.

    Raises:
        UnsupportedModel: a layer that does not exist or has a sliding window.
    """
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    for layer in layers:
        if not 0 <= layer < count:
            raise UnsupportedModel(
                f"layer {layer} does not exist; allowed: 0..{count - 1} (0-based)"
            )
    if is_hybrid(config):
        full = compressible_layers(model)
        if not set(layers) <= set(full):
            raise UnsupportedModel(
                f"layers {list(layers)} hold no keys; allowed here, from 0: {full}"
            )
    device = input_device(model)
    rotary = rotary_of(model, layers, len(ids), device)
    state = Capture(layers)
    tokens = torch.tensor([list(ids)], device=device)
    forward(model, tokens, torch.arange(len(ids), device=device), state, keep=1)
    found = {}
    for layer, (call, normalisers) in state.calls.items():
        if call.sliding_window is not None:
            raise UnsupportedModel(
                f"layer {layer} has a sliding window of {call.sliding_window}; allowed: "
                "full-attention layers"
            )
        found[layer] = layer_kv(call, layer, count, rotary.get(layer), normalisers)
    return found
