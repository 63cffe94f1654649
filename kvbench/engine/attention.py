"""The attention function that kvbench registers with transformers, and exact attention.

Every architecture that uses transformers' attention interface calls `kvbench_attention` with the
queries, keys and values of a layer after position encoding. The function passes them to the `Pass`,
which it receives as the model's keyword argument ``kvbench``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers import Cache, PreTrainedConfig

from kvbench.errors import UserError
from kvbench.kernels.logits import products, softcapped, softmax

IMPLEMENTATION = "kvbench"
"""The name under which the function is registered (``attn_implementation="kvbench"``)."""

QUERY_BLOCK = 512
"""How many queries' attention is computed at a time, so that only QUERY_BLOCK x n logits exist."""


class UnsupportedModel(UserError, ValueError):
    """A model, or a use of it, that kvbench does not support: one line with what is allowed."""


@dataclass(frozen=True)
class LayerCall:
    """One layer's call of attention in a forward pass over t tokens.

    Attributes:
        layer: the layer's index in the model, from 0.
        query: [batch, heads, t, head_dim], after position encoding.
        key, value: [batch, kv_heads, t, head_dim], those of the t tokens; keys after position encoding.
        scaling: the factor on q.k before the softmax.
        softcap: the bound on the logits (`LayerKV.softcap`); None for no bound.
        sliding_window: how many keys a query sees; None for all.
        output: the weight of the layer's output projection, [hidden, heads * head_dim]; None where it
            cannot be read.
        sinks: [heads], the logit of each query head's attention sink (`LayerKV.sinks`); None for none.
        module: the attention block that calls, for forward hooks.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    output: Tensor | None = field(default=None, compare=False, repr=False)
    sinks: Tensor | None = None
    module: nn.Module | None = field(default=None, compare=False, repr=False)

    def exact(self) -> Tensor:
        """Causal attention of the queries over the keys of this call alone, [batch, heads, t, head_dim];
        see `exact_attention`."""
        return exact_attention(
            self.query,
            self.key,
            self.value,
            scaling=self.scaling,
            softcap=self.softcap,
            sliding_window=self.sliding_window,
            sinks=self.sinks,
        )

    def exact_with_normalisers(self) -> tuple[Tensor, Tensor | None]:
        """The output of `exact`, and the softmax's normalisers: the logarithm of each query's sum of
        exponentials, [batch, heads, t] float32, or None where torch's kernel does not return them. The
        sum contains the sink's."""
        fused = None
        if self.softcap is None and self.sliding_window is None:
            fused = _fused_with_normalisers(self.query, self.key, self.value, self.scaling)
        if fused is None:
            return self.exact(), None
        if self.sinks is None:
            return fused
        out, of_keys = fused
        normalisers = torch.logaddexp(of_keys, self.sinks.float()[:, None])
        share_of_keys = (of_keys - normalisers).exp()
        return out * share_of_keys[..., None].to(out.dtype), normalisers

    def of_rows(self, rows: Tensor) -> LayerCall:
        """The call of the batch rows with these indices [rows], a tensor on the call's device, so that
        nothing waits for the device."""
        return replace(
            self,
            query=self.query.index_select(0, rows),
            key=self.key.index_select(0, rows),
            value=self.value.index_select(0, rows),
        )

    def of_row(self, row: int, start: int = 0, end: int | None = None) -> LayerCall:
        """The call of one batch row, for the tokens start .. end - 1; views of the tensors."""
        part = (slice(row, row + 1), slice(None), slice(start, end))
        return replace(self, query=self.query[part], key=self.key[part], value=self.value[part])


class Pass(ABC):
    """One forward pass, which the attention function asks: how attention is computed, and what happens
    to the keys and values of each layer.

    The engine's are `Prefill` (prefill.py), `ReplayPass` (second_pass.py), `Feed` (decode.py),
    `KernelBatch` (captured.py) and `Capture`.
    """

    called: frozenset[int] = frozenset()
    """The layers that have been called since `begin`."""

    @abstractmethod
    def attend(self, call: LayerCall) -> Tensor:
        """The attention output of a layer, [batch, heads, t, head_dim]."""

    def begin(self) -> None:
        """To be called before the model is."""
        self.called = frozenset()

    def past(self, config: PreTrainedConfig) -> Cache | None:
        """For hybrid models, transformers' cache with the recurrent states from which the rows continue.
        Every call returns the same object, or None where the pass has no states."""
        return None


class Capture(Pass):
    """A pass that computes exact attention and keeps the calls of some layers.

    Args:
        layers: the indices of the layers; None for all.

    Attributes:
        calls: by the layer's index its call, and what `LayerCall.exact_with_normalisers` returns beside
            the output.
    """

    def __init__(self, layers: Collection[int] | None = None) -> None:
        self.layers = layers
        self.calls: dict[int, tuple[LayerCall, Tensor | None]] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention."""
        if self.layers is not None and call.layer not in self.layers:
            return call.exact()
        out, normalisers = call.exact_with_normalisers()
        self.calls[call.layer] = call, normalisers
        return out


def kvbench_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    kvbench: Pass | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention interface calls; returns the output [batch, t, heads,
    head_dim] and None in place of attention weights. `s_aux` is transformers' name of the sinks.

    `dropout` is the sixth parameter, as in transformers' own sdpa function, since kvpress, once it is
    imported, wraps every registered function and passes dropout by position.

    Raises:
        UnsupportedModel: attention that is not causal, a layer that is called twice in a pass, position
            biases, a mask, dropout, or a forward pass that was started outside kvbench's engine.
    """
    name = type(module).__name__
    if kvbench is None:
        raise UnsupportedModel(
            f"{name} runs with attention 'kvbench' outside kvbench's engine (call "
            "model.set_attn_implementation('sdpa') first), or its model does not pass keyword "
            "arguments on to its attention (not supported)"
        )
    if other.get("position_bias") is not None:
        raise UnsupportedModel(f"{name} passes position_bias to its attention; not supported")
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(
            f"{name} attends both ways within its prompt; allowed: causal models"
        )
    if attention_mask is not None:
        raise UnsupportedModel(
            f"{name} passes a mask to its attention; kvbench runs unpadded prompts"
        )
    if dropout:
        raise UnsupportedModel(f"{name} runs with dropout {dropout}; call model.eval() first")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer in kvbench.called:
        # Such a model has several sets of keys and values for a layer, or reads them several times.
        raise UnsupportedModel(
            f"{name} computes the attention of layer {layer} twice in a pass; allowed: models that "
            "compute it once"
        )
    kvbench.called |= {layer}
    out = kvbench.attend(
        LayerCall(
            layer,
            query,
            key,
            value,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap,
            sliding_window,
            _output_weight(module, query.shape[1] * value.shape[-1]),
            s_aux,
            module,
        )
    )
    # Contiguous as transformers' own functions return it: AFMoE and JetMoE take a view of it.
    return out.transpose(1, 2).contiguous(), None


def _output_weight(module: nn.Module, columns: int) -> Tensor | None:
    """The weight [hidden, columns] of an attention block's output projection; None where it cannot be
    read, for example where it is packed."""
    for name in ("o_proj", "out_proj", "dense"):
        weight: Any = getattr(getattr(module, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == columns:
            return weight if weight.is_floating_point() and not weight.is_meta else None
    return None


def register() -> None:
    """Register ``attn_implementation="kvbench"`` with transformers. May be called again.

    No function for masks is registered, since passes are causal themselves. transformers
    then makes no mask, and does not search the position ids for packed sequences, for which every step
    would wait for the device.
    """
    from transformers import AttentionInterface  # imports all that models need

    AttentionInterface.register(IMPLEMENTATION, _uncompiled_attention())


@cache
def _uncompiled_attention() -> Callable[..., Any]:
    """The registered function. Where torch compiles a model, this function stays as it is."""
    return torch.compiler.disable(kvbench_attention)  # which imports torch's compiler


def signed_mean(
    mixed: Tensor,
    weights: Tensor,
    denominators: Tensor,
    value_range: tuple[Tensor, Tensor] | None,
    *,
    sinks: bool = False,
) -> Tensor:
    """The output of attention whose entries have a factor in the softmax's denominator
    (`CompressedKV.denominators`): (sum_i e_i v_i) / (sum_i e_i b_i), where e are the softmax weights and
    b the factors. It is 0 where the denominator is at most 1e-20, and clamped to `value_range`.

    Args:
        mixed: [..., q, d], the sums of e_i v_i.
        weights: [..., q, c], e.
        denominators: [..., c], b.
        value_range: the least and the largest output, each of a shape that broadcasts to [..., q, d];
            None for no clamping.
        sinks: whether the weights sum to less than 1, the rest being that of an attention sink.
    """
    weights = weights.to(denominators.dtype)
    denominator = weights @ denominators[..., None]
    if sinks:
        denominator += 1 - weights.sum(-1, keepdim=True)
    quotient = mixed.to(denominator.dtype) / denominator
    mean = torch.where(denominator > 1e-20, quotient, 0.0).to(mixed.dtype)
    return mean if value_range is None else torch.clamp(mean, *value_range)


def _fused_with_normalisers(
    query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Causal attention and its normalisers (`LayerCall.exact_with_normalisers`).

    `scaled_dot_product_attention` drops the normalisers that its kernels return. So the kernel that it
    would choose is called directly. Returns None where that kernel has no normalisers, or rounds them to
    too few digits.
    """
    aten = torch.ops.aten
    options = {"is_causal": True, "scale": scaling}
    on_cpu, float32 = query.device.type == "cpu", query.dtype == torch.float32
    grouped_float32 = float32 and query.shape[1] != key.shape[1]
    # Heads of another size would be padded, and grouped heads in float32 are not fused.
    on_cuda = query.is_cuda and not grouped_float32 and query.shape[-1] % 8 == 0
    # In bfloat16 a CPU's kernel returns normalisers of bfloat16's three or four digits.
    if not (on_cpu and float32) and not on_cuda:
        return None
    chosen = torch._fused_sdp_choice(query, key, value, enable_gqa=True, **options)  # type: ignore[arg-type]
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        flash = f"_scaled_dot_product_flash_attention{'_for_cpu' if on_cpu else ''}"
        return getattr(aten, flash)(query, key, value, **options)[:2]
    if chosen == SDPBackend.EFFICIENT_ATTENTION.value and not on_cpu:
        efficient = aten._scaled_dot_product_efficient_attention
        out, logarithms, *_ = efficient(query, key, value, None, True, **options)
        return out, logarithms[:, :, : query.shape[2]]  # the kernel pads them to whole blocks
    if chosen == SDPBackend.CUDNN_ATTENTION.value:  # torch prefers it on Hopper
        cudnn = aten._scaled_dot_product_cudnn_attention
        out, logarithms, *_ = cudnn(query, key, value, None, True, **options)
        return out, logarithms.view(query.shape[:3])  # some versions return one dimension more
    return None


def grown_range(
    before: tuple[Tensor, Tensor] | None, value: Tensor, group: int
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Extend the range of each channel's values by t new tokens.

    Args:
        before: the least and the largest value so far, each [kv_heads, d]; None where no range is held.
        value: [kv_heads, t, d], the values of the new tokens.
        group: the number of query heads per KV head.

    Returns:
        the least and the largest value up to each token, repeated for the queries of a group, each
        [kv_heads, group * t, d]; and those after the last token, each [kv_heads, d]. None and None where
        `before` is None.
    """
    if before is None:
        return None, None
    least = torch.minimum(before[0][:, None], value.cummin(1).values)
    most = torch.maximum(before[1][:, None], value.cummax(1).values)
    at_tokens = (least.repeat(1, group, 1), most.repeat(1, group, 1))
    return at_tokens, (least[:, -1], most[:, -1])


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    seen: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of m queries over n keys, the last m of which belong to the queries' own tokens:
    [batch, heads, m, head_dim].

    Most calls go to torch's fused kernel. Bounded logits, sliding windows, sinks and `seen`, which that
    kernel does not have, are computed in blocks of queries with O(QUERY_BLOCK * n) memory. So are
    grouped heads in float32 on CUDA: no fused kernel takes them, and torch would form all m x n logits.

    Args:
        query: [batch, heads, m, head_dim].
        key, value: [batch, kv_heads, n, head_dim].
        scaling, softcap, sliding_window, sinks: as in `LayerCall`.
        seen: [heads, m, n] bool, the keys that each query may see, beside causality; needs as many KV
            heads as query heads. None for all keys.
    """
    m, n = query.shape[2], key.shape[2]
    if sliding_window is not None and sliding_window >= n:
        sliding_window = None
    grouped_float32 = query.dtype == torch.float32 and query.shape[1] != key.shape[1]
    fused = seen is None and sinks is None and not (query.is_cuda and grouped_float32)
    if softcap is None and sliding_window is None and fused:
        mask = None
        if m != n:
            from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

            mask = causal_lower_right(m, n)
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=m == n, scale=scaling, enable_gqa=True
        )
    batch, heads, _, head_dim = query.shape
    group = heads // key.shape[1]
    grouped = query.view(batch, key.shape[1], group, m, head_dim)
    if sinks is not None:
        sinks = sinks.view(key.shape[1], group, 1)
    out = torch.empty_like(grouped[..., :1]).expand(*grouped.shape[:-1], value.shape[-1]).clone()
    for begin in range(0, m, QUERY_BLOCK):
        end = min(m, begin + QUERY_BLOCK)
        start = n - m + begin  # the positions of the block's queries among the keys
        stop = n - m + end
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        logits = products(grouped[..., begin:end, :], key[:, :, None, first:stop])
        logits = softcapped(logits.mul_(scaling), softcap)
        row = torch.arange(start, stop, device=query.device)[:, None]
        column = torch.arange(first, stop, device=query.device)[None]
        hidden = column > row
        if sliding_window is not None:
            hidden |= column <= row - sliding_window
        if seen is not None:
            hidden = (hidden | ~seen[:, begin:end, first:stop])[None, :, None]
        weights = softmax(logits.masked_fill_(hidden, float("-inf")), sinks).to(value.dtype)
        out[..., begin:end, :] = weights @ value[:, :, None, first:stop]
    return out.view(batch, heads, m, value.shape[-1])
