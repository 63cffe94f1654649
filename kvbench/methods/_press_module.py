"""Stand-ins that a press of the kvpress package receives in place of a model's attention module and
attention weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvbench.kv import KVError, LayerKV
from kvbench.methods._adapters import scaled_queries


class AttentionModule:
    """A stand-in for an attention module that has one layer's shape and passes its queries to a press.

    A press computes queries as rotated q_proj(hidden states). Here the hidden states of a token are its
    queries after position encoding, q_proj returns them unchanged, and the rotation is by the angle 0.
    Reading any other attribute raises an error of one line.

    Args:
        press: the name of the press, for messages.
        row: the row of the batch whose queries the press sees.
    """

    def __init__(self, layer: LayerKV, press: str, row: int) -> None:
        _, kv_heads, n, dim = layer.keys.shape
        heads = kv_heads if layer.queries is None else layer.queries.shape[1]
        self._layer = layer
        self._press = press
        self.layer_idx = layer.layer_index
        self.head_dim = dim
        self.num_key_value_groups = heads // kv_heads
        self.config = SimpleNamespace(
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            num_hidden_layers=layer.num_layers,
            head_dim=dim,
            _attn_implementation="kvbench",
        )
        self.hidden_states = torch.full((1, n, heads * dim), torch.nan, device=layer.keys.device)
        if layer.queries is not None and layer.softcap is None and not layer.withheld:
            queries = scaled_queries(layer, f"press {press}")[row]
            self.hidden_states[0, n - queries.shape[1] :] = queries.transpose(0, 1).flatten(1)

    def q_proj(self, states: Tensor) -> Tensor:
        scaled_queries(self._layer, f"press {self._press}")
        if states.isnan().any():
            queries = self._layer.queries
            available = 0 if queries is None else queries.shape[2]
            raise KVError(
                f"layer {self.layer_idx} holds {available} of {self._layer.n} prompt queries; "
                f"press {self._press} needs more"
            )
        return states.to(self._layer.keys.dtype)

    @property
    def o_proj(self) -> SimpleNamespace:
        if self._layer.output is None:
            raise KVError(
                f"press {self._press} reads the output projection and layer {self.layer_idx} shows "
                "none; allowed: models whose attention has a plain o_proj"
            )
        weight = self._layer.output()
        self.config.hidden_size = weight.shape[0]
        return SimpleNamespace(weight=weight)

    def forward_arguments(self) -> dict[str, Any]:
        one = self._layer.keys.new_ones(1, 1, 1)
        shape = (1, self._layer.n, self.head_dim)
        cos = one.expand(shape)
        sin = torch.zeros_like(one).expand(shape)
        return {"hidden_states": self.hidden_states, "position_embeddings": (cos, sin)}

    def masked(self) -> Tensor | None:
        """The entries that the press masked instead of evicting them, [kv_heads, n] bool; None where it
        masked none."""
        indices = vars(self).get("masked_key_indices")
        if indices is None:
            return None
        _, heads, tokens = (torch.as_tensor(index) for index in indices)
        mask = torch.zeros(self._layer.keys.shape[1:3], dtype=torch.bool)
        mask[heads.cpu(), tokens.cpu()] = True
        return mask.to(self._layer.keys.device)

    def __getattr__(self, name: str) -> NoReturn:
        raise KVError(
            f"press {self._press} reads {name!r} of the attention module; a method sees keys, values, "
            "queries, the rotary table and the output projection"
        )


class ColumnSums:
    """A stand-in for attention weights [1, heads, n, n] that a press only sums over the queries.

    It holds these sums alone, so that no n x n matrix exists.

    Args:
        mass: [1, heads, n], the attention that each key received (`LayerKV.attention_mass`).
    """

    def __init__(self, mass: Tensor) -> None:
        self._mass = mass
        self.device = mass.device
        self.dtype = mass.dtype

    def sum(self, dim: int) -> Tensor:
        if dim not in (2, -2):
            raise KVError(f"attention weights are summed over queries (2), not over {dim}")
        return self._mass.clone()
