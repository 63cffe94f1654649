"""One exact prefill that serves every method: each layer is compressed as it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench.engine import guard
from kvbench.engine.architecture import compressible_layers, kv_heads, rotary_of
from kvbench.engine.attention import AttentionState, LayerCall, UnsupportedModel
from kvbench.engine.cache import GrowingCache, store_of
from kvbench.engine.costs import ExactBytes
from kvbench.engine.fork import Fork, layer_generator
from kvbench.engine.ranks import Ranks
from kvbench.engine.rescore import Feed, RepeatedPrompt
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


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that token ids must be on: the embedding's. Where accelerate offloads the embedding's
    weights between two passes, it is the device on which they are used."""
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
    """What methods are given of a layer.

    Args:
        index: of the layer among the `count` layers that are compressed.
        rotary: see `LayerKV.rotary`.
        normalisers: see `kvbench.kv.NORMALISERS`.
    """
    output = call.output
    if isinstance(output, DTensor):
        # Under tensor parallelism: the weights of this rank's own heads.
        output = output.to_local()
    layer = LayerKV(
        call.key,
        call.value,
        call.query,
        index,
        count,
        call.scaling,
        softcap=call.softcap,
        output=None if output is None else output.detach().clone,
        rotary=rotary,
    )
    if normalisers is not None:
        layer.once(NORMALISERS, lambda: normalisers)
    return layer


class PrefillState(AttentionState):
    """Attention state of the prefill: exact attention, then every method compresses the layer.

    A method that fails or holds too much marks its own fork; the others go on.

    Args:
        forks: one per method; their `layers` are filled here.
        compressible: see `compressible_layers`.
        rotary: see `rotary_of`.

    Attributes:
        order: the number of each compressible layer among these layers.
        repeated: the pass in which the prompt is repeated, if a method asks for one.
        exact: bytes of the exact cache of this prompt.
        clocks: of everything that is not the exact prefill itself.
        non_finite: counts of keys and values that are not finite, still to be read from a GPU.
        on_compress: called with the label of a method before it compresses a layer.
    """

    def __init__(
        self,
        forks: Sequence[Fork],
        compressible: Sequence[int],
        rotary: Rotary | None = None,
    ) -> None:
        self.rotary = rotary
        self.forks = forks
        self.order = {layer: index for index, layer in enumerate(compressible)}
        self.repeated = RepeatedPrompt() if any(fork.rescores for fork in forks) else None
        self.exact = ExactBytes()
        self.clocks: list[Elapsed] = []
        self.non_finite: dict[int, Tensor] = {}
        self.on_compress: Callable[[str], None] = lambda label: None
        self._past: PassingCache | None = None

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `AttentionState`: states that have seen nothing."""
        if self._past is None:
            self._past = PassingCache(config)
        return self._past

    @property
    def states(self) -> States:
        """The recurrent states after the prompt, by layer (hybrid models)."""
        return {} if self._past is None else states_in(self._past)

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention of the layer; then its keys and values are compressed by every method, or
        their sliding window is kept."""
        out, normalisers = call.exact_with_normalisers()
        clock = Elapsed(call.key.device)
        if call.sliding_window is not None and call.layer in self.order:
            raise UnsupportedModel(
                f"layer {call.layer} has a sliding window of {call.sliding_window} that the model's "
                "config does not announce"
            )
        ranks = max((fork.ranks.count for fork in self.forks), default=1)
        token_bytes = (call.key.nbytes + call.value.nbytes) // call.key.shape[2] * ranks
        self.exact.layers.append((token_bytes, call.sliding_window))
        if call.layer in self.order:
            self._compress_layer(call, normalisers)
        else:
            self._keep_window(call)
        self.clocks.append(clock.stop())
        return out

    def _compress_layer(self, call: LayerCall, normalisers: Tensor | None) -> None:
        """Every method compresses the layer, but for those that are to see the prompt repeated first."""
        kv = layer_kv(call, self.order[call.layer], len(self.order), self.rotary, normalisers)
        guard.check_finite(kv, self.non_finite)
        if self.repeated is not None:
            self.repeated.held[call.layer] = (call.key, call.value)
            self.repeated.layers[call.layer] = replace(kv, queries=None, shared={})
        for fork in self.forks:
            if fork.failure is None and not fork.rescores:
                self._compress(fork, call.layer, kv)

    def settle(self) -> float:
        """Wait for a GPU, and read what it has counted: whether keys and values are finite, how many
        entries each fork holds (which is audited), and seconds.

        Returns:
            the seconds of everything that is not the exact prefill itself.

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
        """Have the model repeat the prompt for the methods that ask for it (`Method.rescoring`); then
        these compress every layer."""
        forks = [fork for fork in self.forks if fork.rescores and fork.failure is None]
        if self.repeated is None or not forks:
            return
        clock = Elapsed(next(iter(self.repeated.held.values()))[0].device)
        self.repeated.states = self.states
        self.repeated.feed(forks, ids, encoder, feed)
        for layer, kv in self.repeated.layers.items():
            for fork in forks:
                if fork.failure is None:
                    self._compress(fork, layer, kv)
        self.clocks.append(clock.stop())

    def _compress(self, fork: Fork, layer: int, kv: LayerKV) -> None:
        """One method compresses one layer; its fork holds the result."""
        clocks_of_shared_work = kv.charge_shared_work()
        # A prompt that does not fill its budget is not compressed. A method that evicts is asked all the
        # same, for the scores by which it evicts once the cache is full.
        limit = None if fork.compressed else fork.limit(kv.n)
        clocks: list[Elapsed] = []
        try:
            if fork.compressed or limit is not None:
                self.on_compress(fork.label)
                fork.carry_to(kv.keys.device)
                generator = layer_generator(fork.seed, fork.example_id, layer)
                budget = fork.budget if limit is None else WHOLE
                held, capacity, clock = guard.compress(
                    fork.label, fork.method, kv, budget, generator, fork.carried
                )
                clocks.append(clock)
            else:
                held = keep_all(kv)
                capacity = kv.n
            clock = Elapsed(kv.keys.device)
            fork.hold(layer, held, capacity, limit=limit, prompt=kv)
            clocks.append(clock.stop())
        except guard.LayerDamaged:
            raise  # what the other methods would compute from this layer is wrong
        except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
            fork.fail(failure)
        fork.ledger.clocks += clocks
        fork.ledger.clocks += clocks_of_shared_work()

    def _keep_window(self, call: LayerCall) -> None:
        """Every fork holds the sliding window of a layer that is not compressed, or all of it."""
        n = call.key.shape[2]
        first = 0 if call.sliding_window is None else max(0, n - call.sliding_window)
        key, value = call.key[:, :, first:], call.value[:, :, first:]
        if self.repeated is not None:
            self.repeated.held[call.layer] = (key, value)
        positions = torch.arange(first, n, device=key.device).expand(*key.shape[:3])
        for fork in self.forks:
            if fork.failure is None:
                store = store_of(CompressedKV(key, value, None, positions), fork.room)
                fork.layers[call.layer] = GrowingCache(
                    store, capacity=n - first, window=call.sliding_window
                )


@dataclass(frozen=True)
class Prefill:
    """What a shared prefill returns.

    Attributes:
        logits: [vocab], of the token after the prompt.
        prefill_s: seconds of the exact prefill, without compression.
        exact_bytes: of the exact cache after the prompt.
        n: tokens of the prompt.
    """

    logits: Tensor
    prefill_s: float
    exact_bytes: int
    n: int


def forward(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, state: AttentionState
) -> Tensor:
    """Next-token logits [batch, vocab] after feeding ids [batch, t] at positions [t] (the same for
    every row) or [batch, t]."""
    return forward_rows(model, ids, positions, state, keep=1)[:, -1]


def forward_rows(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    state: AttentionState,
    keep: int | Tensor | None = None,
) -> Tensor:
    """Logits [batch, t, vocab] after feeding ids [batch, t] at positions [t] or [batch, t].

    Args:
        keep: logits of the last `keep` tokens, or of the tokens with these indices; None: of all t.
    """
    config = model.config.get_text_config()
    past = state.past(config) if is_hybrid(config) else None
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
    """Let a GPU's libraries choose and prepare their attention kernel for a prompt of so many tokens,
    which they do at the first call with a length, so that no clock of a prefill holds it. Runs the
    attention of one layer on zeros; on other devices nothing."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for device in {parameter.device for parameter in model.parameters()}:
        if device.type == "cuda":
            query = torch.zeros(1, heads, tokens, dim, dtype=model.dtype, device=device)
            key = torch.zeros(1, kv_heads(config), tokens, dim, dtype=model.dtype, device=device)
            LayerCall(0, query, key, key, dim**-0.5).exact_with_normalisers()


# Methods and later decoding write to their own tensors, which inference mode allows nowhere else.
@torch.inference_mode(False)
@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    ids: Sequence[int],
    forks: Sequence[Fork],
    *,
    encoder: PromptEncoder | None = None,
) -> Prefill:
    """Run the prompt once, exactly; every fork holds its compressed cache afterwards.

    Args:
        encoder: of the words in which a method asks for the prompt again (`Rescoring`).
    """
    device = input_device(model)
    ranks = Ranks.of(model)
    for fork in forks:
        fork.begin_prompt(len(ids), ranks)
    tokens = torch.tensor([list(ids)], device=device)

    def feed(following: Sequence[int], state: AttentionState) -> None:
        positions = torch.arange(len(ids), len(ids) + len(following), device=device)
        forward(model, torch.tensor([list(following)], device=device), positions, state)

    state = PrefillState(forks, compressible_layers(model), rotary_of(model))
    plan_attention(model, len(ids))
    synchronize(device)
    start = time.perf_counter()
    positions = torch.arange(len(ids), device=device)
    logits = forward(model, tokens, positions, state)
    state.rescore(ids, encoder, feed)
    synchronize(device)
    seconds = time.perf_counter() - start - state.settle()
    state.exact.states = state_bytes(state.states)
    for fork in forks:
        fork.states = clone_of(state.states)
        fork.end_prompt(len(ids), state.exact)
    return Prefill(logits[0], seconds, state.exact.at(len(ids)), len(ids))


@dataclass
class CaptureState(AttentionState):
    """Attention state that runs exact attention and keeps queries, keys and values of some layers.

    Attributes:
        layers: the layers to be kept, by layer number; None until they are computed.
        num_layers: of the model.
    """

    layers: dict[int, LayerKV | None]
    num_layers: int
    rotary: Rotary | None = None

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention; queries, keys and values of the chosen layers are kept."""
        if call.layer in self.layers:
            if call.sliding_window is not None:
                raise UnsupportedModel(
                    f"layer {call.layer} has a sliding window of {call.sliding_window}; "
                    "allowed: full-attention layers"
                )
            out, normalisers = call.exact_with_normalisers()
            self.layers[call.layer] = layer_kv(
                call, call.layer, self.num_layers, self.rotary, normalisers
            )
            return out
        return call.exact()


@torch.inference_mode(False)  # as `prefill`
@torch.no_grad()
def capture_layers(
    model: PreTrainedModel, ids: Sequence[int], layers: Sequence[int]
) -> dict[int, LayerKV]:
    """Queries, keys and values after position encoding, of the given layers (0-based), for one prompt.

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
    state = CaptureState(dict.fromkeys(layers), count, rotary_of(model))
    device = input_device(model)
    tokens = torch.tensor([list(ids)], device=device)
    forward(model, tokens, torch.arange(len(ids), device=device), state)
    return {layer: kv for layer, kv in state.layers.items() if kv is not None}
