"""The one attention function kvbench registers with transformers, and exact attention itself.

Every architecture that transformers serves through its attention interface calls `kvbench_attention`
with q, k, v after position encoding. The function does not know what to do with them: it hands them to
the `AttentionState` that travels through the model's forward as the keyword argument ``kvbench``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, Cache, PreTrainedConfig

from kvbench.errors import UserError
from kvbench.kernels.decode_attention import products
from kvbench.kernels.softcap import capped

IMPLEMENTATION = "kvbench"
"""The name under which the function is registered (``attn_implementation="kvbench"``)."""

QUERY_BLOCK = 512
"""Queries per block where attention is computed in blocks: bounds the logits to QUERY_BLOCK x n."""


class UnsupportedModel(UserError, ValueError):
    """The model asks its attention for something that kvbench does not compute."""


@dataclass(frozen=True)
class LayerCall:
    """What a layer asks of attention in one forward pass.

    Attributes:
        layer: 0-based.
        query: [batch, heads, t, head_dim]. key, value: [batch, kv_heads, t, head_dim], the new ones,
            all after position encoding.
        scaling: the factor of the logits. softcap: their limit, None for none.
        sliding_window: how many keys a query sees, None for all.
        output: the weights of the layer's output projection, [hidden, heads * head_dim]; None where
            they cannot be read.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    output: Tensor | None = field(default=None, compare=False, repr=False)

    def exact(self) -> Tensor:
        """Causal attention of the queries over these keys alone, the first at position 0; see
        `exact_attention`."""
        return exact_attention(
            self.query,
            self.key,
            self.value,
            scaling=self.scaling,
            softcap=self.softcap,
            sliding_window=self.sliding_window,
        )

    def exact_with_normalisers(self) -> tuple[Tensor, Tensor | None]:
        """The output of `exact`, and the logarithm of each query's sum of exponentials,
        [batch, heads, t] float32; None in its place where torch's kernel does not return it."""
        fused = None
        if self.softcap is None and self.sliding_window is None:
            fused = _fused_with_normalisers(self.query, self.key, self.value, self.scaling)
        return fused or (self.exact(), None)

    def of_rows(self, rows: Tensor) -> LayerCall:
        """The call of some batch rows, without waiting for a device."""
        query, key, value = (x.index_select(0, rows) for x in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def of_row(self, row: int, start: int = 0, end: int | None = None) -> LayerCall:
        """The call of one batch row, its tokens from `start` up to `end`."""
        query, key, value = (
            x[row : row + 1, :, start:end] for x in (self.query, self.key, self.value)
        )
        return replace(self, query=query, key=key, value=value)


class AttentionState(ABC):
    """What one forward pass does with the queries, keys and values of each layer.

    The states are `PrefillState` and `CaptureState` (engine/prefill.py), `RepeatedPrompt` (rescore.py),
    `ForkBatch` (fork.py) and its `DecodeState` (decoding.py), `WholePass` (scoring.py), `BandState` and
    `EvictingState` (streams.py), and the prefill of a batch under `generate` (live.py).
    """

    @abstractmethod
    def attend(self, call: LayerCall) -> Tensor:
        """Attention output [batch, heads, t, head_dim]."""

    def past(self, config: PreTrainedConfig) -> Cache | None:
        """For hybrid models: transformers' cache with the recurrent states that the rows go on from, the
        same object at every call; None where the pass goes on from none."""
        return None


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
    kvbench: AttentionState | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: returns ([batch, t, heads, head_dim], None).

    Dropout comes sixth, as in transformers' own sdpa function: kvpress, once imported, wraps every
    registered function and passes it by place.

    Raises:
        UnsupportedModel: attention sinks (``s_aux``), position biases, masks, dropout, or a forward
            pass that was started outside kvbench's engine.
    """
    name = type(module).__name__
    if kvbench is None:
        raise UnsupportedModel(
            f"{name} runs with attention 'kvbench' outside kvbench's engine (call "
            "model.set_attn_implementation('sdpa') first), or its model does not pass keyword "
            "arguments on to its attention (not supported)"
        )
    for argument in ("s_aux", "position_bias"):
        if other.get(argument) is not None:
            raise UnsupportedModel(f"{name} passes {argument} to its attention; not supported")
    if attention_mask is not None:
        raise UnsupportedModel(
            f"{name} passes a mask to its attention; kvbench runs unpadded prompts"
        )
    if dropout:
        raise UnsupportedModel(f"{name} runs with dropout {dropout}; call model.eval() first")
    output: Any = getattr(getattr(module, "o_proj", None), "weight", None)
    readable = isinstance(output, Tensor) and output.dim() == 2 and not output.is_meta
    out = kvbench.attend(
        LayerCall(
            int(module.layer_idx),  # type: ignore[arg-type]
            query,
            key,
            value,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap,
            sliding_window,
            output if readable and output.is_floating_point() else None,
        )
    )
    return out.transpose(1, 2), None


def register() -> None:
    """Make ``attn_implementation="kvbench"`` known to transformers (idempotent).

    Causality is the attention state's business. No function for masks is registered beside it:
    transformers then builds none, and does not look through the position ids for packed sequences,
    which would make every step wait for the device.
    """
    AttentionInterface.register(IMPLEMENTATION, _ATTENTION)


_ATTENTION = torch.compiler.disable(kvbench_attention)
"""As it is where torch compiles the model around it."""


def signed_mean(
    mixed: Tensor,
    weights: Tensor,
    denominators: Tensor,
    value_range: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention whose entries count differently in numerator and denominator: with e the softmax's
    weights, (sum_i e_i v_i) / (sum_i e_i b_i), or 0 where the denominator is not above 1e-20, within
    the range.

    Args:
        mixed: [..., q, d], sum_i e_i v_i. weights: [..., q, c], e. denominators: [..., c], b.
        value_range: least and largest allowed, each broadcast against [..., q, d]; None: any.
    """
    denominator = weights.to(denominators.dtype) @ denominators[..., None]
    quotient = mixed.to(denominator.dtype) / denominator
    mean = torch.where(denominator > 1e-20, quotient, 0.0).to(mixed.dtype)
    return mean if value_range is None else torch.clamp(mean, *value_range)


def _fused_with_normalisers(
    query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Causal attention and its normalisers (`LayerCall.exact_with_normalisers`), by the kernel that
    `scaled_dot_product_attention` would run and whose normalisers it drops; None where that kernel
    returns none, or rounds them to too few digits."""
    aten = torch.ops.aten
    options = {"is_causal": True, "scale": scaling}
    on_cpu, float32 = query.device.type == "cpu", query.dtype == torch.float32
    grouped_float32 = float32 and query.shape[1] != key.shape[1]
    on_cuda = query.is_cuda and not grouped_float32 and query.shape[-1] % 8 == 0  # else torch pads
    if not (on_cpu and float32) and not on_cuda:
        return None  # on a CPU four digits of bfloat16
    chosen = torch._fused_sdp_choice(query, key, value, enable_gqa=True, **options)  # type: ignore[arg-type]
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        flash = f"_scaled_dot_product_flash_attention{'_for_cpu' if on_cpu else ''}"
        return getattr(aten, flash)(query, key, value, **options)[:2]
    if chosen == SDPBackend.EFFICIENT_ATTENTION.value and not on_cpu:
        efficient = aten._scaled_dot_product_efficient_attention
        out, logarithms, *_ = efficient(query, key, value, None, True, **options)
        return out, logarithms[:, :, : query.shape[2]]  # padded to whole blocks
    if chosen == SDPBackend.CUDNN_ATTENTION.value:  # what torch prefers on Hopper
        cudnn = aten._scaled_dot_product_cudnn_attention
        out, logarithms, *_ = cudnn(query, key, value, None, True, **options)
        return out, logarithms.view(query.shape[:3])  # some versions have one more dimension
    return None


def grown_range(
    before: tuple[Tensor, Tensor] | None, value: Tensor, group: int
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """The range of each channel's values while t tokens join.

    Args:
        before: the least and the largest value so far, each [kv_heads, d]; None: no range is kept.
        value: [kv_heads, t, d], those of the tokens.
        group: query heads per KV head.

    Returns:
        the range that each token's query is clamped to, repeated for the queries of a group, each
        [kv_heads, group * t, d]; and the range after the last token, each [kv_heads, d].
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
) -> Tensor:
    """Causal attention of m queries over n keys, of which the last m are their own: [batch, heads, m,
    head_dim].

    Args:
        seen: [heads, m, n] bool, the keys that each query may see beside causality; as many KV heads
            as query heads then.

    The plain case runs on torch's fused kernel; logit capping and sliding windows, which that
    kernel does not have, run in query blocks with O(QUERY_BLOCK * n) memory. So do grouped heads in
    float32 on CUDA, which no fused kernel takes there: torch would form all n x n logits.
    """
    m, n = query.shape[2], key.shape[2]
    if sliding_window is not None and sliding_window >= n:
        sliding_window = None
    grouped_float32 = query.dtype == torch.float32 and query.shape[1] != key.shape[1]
    fused = seen is None and not (query.is_cuda and grouped_float32)
    if softcap is None and sliding_window is None and fused:
        mask = None if m == n else causal_lower_right(m, n)
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=m == n, scale=scaling, enable_gqa=True
        )
    batch, heads, _, head_dim = query.shape
    group = heads // key.shape[1]
    grouped = query.view(batch, key.shape[1], group, m, head_dim)
    out = torch.empty_like(grouped[..., :1]).expand(*grouped.shape[:-1], value.shape[-1]).clone()
    for begin in range(0, m, QUERY_BLOCK):
        end = min(m, begin + QUERY_BLOCK)
        start = n - m + begin  # the positions of the block's queries among the keys
        stop = n - m + end
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        logits = products(grouped[..., begin:end, :], key[:, :, None, first:stop])
        logits = capped(logits.mul_(scaling), softcap)
        row = torch.arange(start, stop, device=query.device)[:, None]
        column = torch.arange(first, stop, device=query.device)[None]
        hidden = column > row
        if sliding_window is not None:
            hidden |= column <= row - sliding_window
        if seen is not None:
            hidden = (hidden | ~seen[:, begin:end, first:stop])[None, :, None]
        weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1).to(value.dtype)
        out[..., begin:end, :] = weights @ value[:, :, None, first:stop]
    return out.view(batch, heads, m, value.shape[-1])
