"""The exact prefill of a prompt, which serves every method: the methods compress each layer as soon as
it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine import guard
from kvbench.engine.architecture import compressible_layers, head_shapes
from kvbench.engine.attention import AttentionState, LayerCall, UnsupportedModel
from kvbench.engine.cache import GrowingCache, store_of
from kvbench.engine.costs import ExactBytes, LayerBytes
from kvbench.engine.fork import Fork, layer_generator
from kvbench.engine.rescore import Feed, RepeatedPrompt
from kvbench.engine.rotary import crossing, forget_lengths, rotary_of
from kvbench.engine.states import (
    PassingCache,
    States,
    clone_of,
    is_hybrid,
    state_bytes,
    states_in,
)
from kvbench.engine.threads import threads_of
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import (
    NORMALISERS,
    WHOLE,
    BudgetExceeded,
    CompressedKV,
    LayerKV,
    Rotary,
    keep_all,
)
from kvbench.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock that is read afterwards includes
    it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def input_device(model: PreTrainedModel) -> torch.device:
    """The device on which token ids must be: that of the embedding. Where accelerate offloads the
    embedding's weights between two passes, it is the device on which they are used."""
    embedding = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return next(embedding.parameters()).device if device is None else torch.device(device)


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
        layer.once(NORMALISERS, lambda: normalisers)
    return layer


class PrefillState(AttentionState):
    """The attention state of the prefill: attention is exact, and every method then compresses the
    layer.

    If a method fails or keeps too much, its fork fails, and the other methods go on.

    Args:
        forks: one per method; their `layers` are filled here.
        compressible: the indices of the layers that are compressed (`compressible_layers`).
        rotary: see `rotary_of`.

    Attributes:
        order: for the index of each compressible layer its number among these layers.
        repeated: the pass in which the prompt is repeated; None if no method asks for one.
        exact: the bytes of the exact cache of this prompt.
        clocks: the clocks of all work here that is not part of the exact prefill.
        non_finite: by the layer's index, the counts of keys and values that are not finite, which are
            still to be read from a GPU (`guard.check_finite`).
        on_compress: is called with the label of a method before the method compresses a layer.
    """

    def __init__(
        self,
        forks: Sequence[Fork],
        compressible: Sequence[int],
        rotary: Mapping[int, Rotary] | None = None,
    ) -> None:
        self.rotary = rotary or {}
        self.forks = forks
        self.order = {layer: index for index, layer in enumerate(compressible)}
        self.repeated = RepeatedPrompt() if any(fork.rescores for fork in forks) else None
        self.exact = ExactBytes()
        self.clocks: list[Elapsed] = []
        self.non_finite: dict[int, Tensor] = {}
        self.on_compress: Callable[[str], None] = lambda label: None
        self._past: PassingCache | None = None

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `AttentionState.past`: states as before the first token."""
        if self._past is None:
            self._past = PassingCache(config)
        return self._past

    @property
    def states(self) -> States:
        """For hybrid models, the recurrent states after the prompt, by the layer's index."""
        return {} if self._past is None else states_in(self._past)

    def attend(self, call: LayerCall) -> Tensor:
        """Compute the exact attention of a layer. Then let every method compress its keys and values, or
        keep its sliding window."""
        out, normalisers = call.exact_with_normalisers()
        clock = Elapsed(call.key.device)
        if call.sliding_window is not None and call.layer in self.order:
            raise UnsupportedModel(
                f"layer {call.layer} has a sliding window of {call.sliding_window} that the model's "
                "config does not announce"
            )
        token_bytes = (call.key.nbytes + call.value.nbytes) // call.key.shape[2]
        self.exact.layers.append(LayerBytes(token_bytes, call.sliding_window))
        if call.layer in self.order:
            self._compress_layer(call, normalisers)
        else:
            self._keep_window(call)
        self.clocks.append(clock.stop())
        return out

    def _compress_layer(self, call: LayerCall, normalisers: Tensor | None) -> None:
        """Let every method compress the layer, except those that first see the prompt repeated."""
        rotary = self.rotary.get(call.layer)
        kv = layer_kv(call, self.order[call.layer], len(self.order), rotary, normalisers)
        guard.check_finite(kv, self.non_finite)
        if self.repeated is not None:
            self.repeated.exact_cache[call.layer] = (call.key, call.value)
            self.repeated.layers[call.layer] = replace(kv, queries=None, shared={})
        for fork in self.forks:
            if fork.failure is None and not fork.rescores:
                self._compress(fork, call.layer, kv)

    def settle(self) -> float:
        """Wait for the GPU, and read what it has counted: check that keys and values are finite, audit
        the entries of each fork, and read the clocks.

        Returns:
            the seconds of all work that is not part of the exact prefill.

        Raises:
            KVError: see `guard.refuse_non_finite`.
        """
        guard.refuse_non_finite(self.non_finite)
        for fork in self.forks:
            try:
                fork.audit_prompt()
            except BudgetExceeded as failure:
                fork.fail(failure)
            fork.ledger.read_clocks()
        return sum(clock.seconds for clock in self.clocks)

    def rescore(self, ids: Sequence[int], encoder: PromptEncoder | None, feed: Feed) -> None:
        """Let the model repeat the prompt for the methods that ask for it (`Method.rescoring`); these
        then compress every layer."""
        forks = [fork for fork in self.forks if fork.rescores and fork.failure is None]
        if self.repeated is None or not forks:
            return
        clock = Elapsed(next(iter(self.repeated.exact_cache.values()))[0].device)
        self.repeated.states = self.states
        self.repeated.feed(forks, ids, encoder, feed)
        for layer, kv in self.repeated.layers.items():
            for fork in forks:
                if fork.failure is None:
                    self._compress(fork, layer, kv)
        self.clocks.append(clock.stop())

    def _compress(self, fork: Fork, layer: int, kv: LayerKV) -> None:
        """Let one method compress one layer, and give the result to its fork."""
        kv.charged.clear()
        # A prompt that is within its capacity is not compressed. A method that evicts is called all the
        # same, for the scores by which it evicts once the cache is full.
        limit = None if fork.compressed else fork.limit(kv.n)
        clocks: list[Elapsed] = []
        try:
            if fork.compressed or limit is not None:
                self.on_compress(fork.label)
                fork.carry_to(kv.keys.device)
                generator = layer_generator(fork.seed, fork.example_id, layer)
                budget = fork.budget if limit is None else WHOLE
                kept, capacity, clock = guard.compress(
                    fork.label, fork.method, kv, budget, generator, fork.carried
                )
                clocks.append(clock)
            else:
                kept = keep_all(kv)
                capacity = kv.n
            clock = Elapsed(kv.keys.device)
            fork.hold(layer, kept, capacity, limit=limit, prompt=kv)
            clocks.append(clock.stop())
        except guard.LayerDamaged as failure:
            fork.fail(failure)
            raise  # what the other methods read is wrong: `prefill` reads the prompt again for them
        except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
            fork.fail(failure)
        fork.ledger.clocks += clocks
        fork.ledger.clocks += [clock for clock in kv.charged.values() if clock is not None]

    def _keep_window(self, call: LayerCall) -> None:
        """Let every fork hold the sliding window of a layer that is not compressed, or all of the
        layer."""
        n = call.key.shape[2]
        first = 0 if call.sliding_window is None else max(0, n - call.sliding_window)
        key, value = call.key[:, :, first:], call.value[:, :, first:]
        if self.repeated is not None:
            self.repeated.exact_cache[call.layer] = (key, value)
        positions = torch.arange(first, n, device=key.device).expand(*key.shape[:3])
        for fork in self.forks:
            if fork.failure is None:
                store = store_of(CompressedKV(key, value, None, positions), fork.room)
                fork.layers[call.layer] = GrowingCache(
                    store, capacity=n - first, window=call.sliding_window
                )


@dataclass(frozen=True)
class Prefill:
    """The result of a prefill.

    Attributes:
        logits: [vocab], those that predict the token after the prompt.
        prefill_s: the seconds of the exact prefill, without compression.
        exact_bytes: the bytes of the exact cache after the prompt.
        n: the number of tokens of the prompt.
    """

    logits: Tensor
    prefill_s: float
    exact_bytes: int
    n: int


def forward(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, state: AttentionState
) -> Tensor:
    """Run the model on ids [batch, t] at positions [t] (the same for every row) or [batch, t], and
    return the logits [batch, vocab] that predict the next token."""
    return forward_rows(model, ids, positions, state, keep=1)[:, -1]


def forward_rows(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    state: AttentionState,
    keep: int | Tensor | None = None,
) -> Tensor:
    """Run the model on ids [batch, t] at positions [t] or [batch, t], and return the logits after each
    token, [batch, t, vocab].

    Args:
        keep: for which tokens logits are computed: the last `keep` tokens, or the tokens with these
            indices; None for all.
    """
    state.begin_pass()
    config = model.config.get_text_config()
    past = state.past(config) if is_hybrid(config) else None
    forget_lengths(model)
    with threads_of(config, ids.numel()):
        output = model(
            input_ids=ids,
            position_ids=positions.expand(ids.shape[0], -1),
            past_key_values=past,
            use_cache=past is not None,
            logits_to_keep=ids.shape[1] if keep is None else keep,
            kvbench=state,
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
    forks: Sequence[Fork],
    *,
    encoder: PromptEncoder | None = None,
) -> Prefill:
    """Run the model once over the prompt, with exact attention. Afterwards every fork holds its
    compressed cache.

    Args:
        ids: the token ids of the prompt.
        forks: one per method.
        encoder: encodes the words in which a method asks the model to repeat the prompt (`Rescoring`);
            None if there is no tokenizer.
    """
    device = input_device(model)
    tokens = torch.tensor([list(ids)], device=device)

    def feed(following: Sequence[int], state: AttentionState) -> None:
        failure = crossing(model.config, len(ids), len(following))
        if failure is not None:
            raise failure
        positions = torch.arange(len(ids), len(ids) + len(following), device=device)
        forward(model, torch.tensor([list(following)], device=device), positions, state)

    layers = compressible_layers(model)
    plan_attention(model, len(ids))
    positions = torch.arange(len(ids), device=device)
    while True:
        for fork in forks:
            fork.begin_prompt(len(ids))
        state = PrefillState(forks, layers, rotary_of(model, layers, len(ids), device))
        synchronize(device)
        start = time.perf_counter()
        try:
            logits = forward(model, tokens, positions, state)
            state.rescore(ids, encoder, feed)
        except guard.LayerDamaged:
            continue  # the fork that wrote has failed; the others start anew
        break
    synchronize(device)
    seconds = time.perf_counter() - start - state.settle()
    state.exact.states = state_bytes(state.states)
    for fork in forks:
        fork.states = clone_of(state.states)
        fork.end_prompt(len(ids), state.exact)
    return Prefill(logits[0], seconds, state.exact.at(len(ids)), len(ids))


@dataclass
class CaptureState(AttentionState):
    """An attention state that computes exact attention and keeps queries, keys and values of some
    layers.

    Attributes:
        layers: the layers that are kept, by the layer's index; None until they are computed.
        num_layers: the number of layers of the model.
        rotary: see `rotary_of`.
    """

    layers: dict[int, LayerKV | None]
    num_layers: int
    rotary: Mapping[int, Rotary] = field(default_factory=dict)

    def attend(self, call: LayerCall) -> Tensor:
        """Compute exact attention, and keep queries, keys and values of the chosen layers."""
        if call.layer in self.layers:
            if call.sliding_window is not None:
                raise UnsupportedModel(
                    f"layer {call.layer} has a sliding window of {call.sliding_window}; "
                    "allowed: full-attention layers"
                )
            out, normalisers = call.exact_with_normalisers()
            self.layers[call.layer] = layer_kv(
                call, call.layer, self.num_layers, self.rotary.get(call.layer), normalisers
            )
            return out
        return call.exact()


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
    state = CaptureState(dict.fromkeys(layers), count, rotary_of(model, layers, len(ids), device))
    tokens = torch.tensor([list(ids)], device=device)
    forward(model, tokens, torch.arange(len(ids), device=device), state)
    return {layer: kv for layer, kv in state.layers.items() if kv is not None}
