"""What a press of the kvpress package is shown in the place of a model's attention module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvbench.kv import KVError, LayerKV
from kvbench.methods._adapters import scaled_queries


class AttentionModule:
    """The attention module a press is shown: one layer's shape, and queries for hidden states.

    The press computes queries as q_proj(hidden states), rotated. Here the hidden states of a token are
    its queries, after position encoding; q_proj gives them back, and the rotation is by zero. Whatever
    else is asked for is refused in one line.

    Args:
        press: what messages call it.
        row: of the batch.
    """

    def __init__(self, layer: LayerKV, press: str, row: int) -> None:
        _, kv_heads, n, dim = layer.keys.shape
        heads = kv_heads if layer.queries is None else layer.queries.shape[1]
        self._layer, self._press = layer, press
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
        """The queries themselves.

        Raises:
            KVError: the layer has none of these, or bounds its logits.
        """
        scaled_queries(self._layer, f"press {self._press}")
        if states.isnan().any():
            queries = self._layer.queries
            have = 0 if queries is None else queries.shape[2]
            raise KVError(
                f"layer {self.layer_idx} holds {have} of {self._layer.n} prompt queries; "
                f"press {self._press} needs more"
            )
        return states.to(self._layer.keys.dtype)

    @property
    def o_proj(self) -> SimpleNamespace:
        """What mixes the heads' outputs: its weight alone.

        Raises:
            KVError: the model's layers call it otherwise, or hold it in few bits.
        """
        if self._layer.output is None:
            raise KVError(
                f"press {self._press} reads the output projection and layer {self.layer_idx} shows "
                "none; allowed: models whose attention has a plain o_proj"
            )
        weight = self._layer.output()
        self.config.hidden_size = weight.shape[0]
        return SimpleNamespace(weight=weight)

    def forward_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the layer's forward pass that a press may read."""
        ones = self._layer.keys.new_ones(1, 1, 1)
        table = (1, self._layer.n, self.head_dim)
        rotation = (ones.expand(table), torch.zeros_like(ones).expand(table))
        return {"hidden_states": self.hidden_states, "position_embeddings": rotation}

    def masked(self) -> Tensor | None:
        """Which entries [kv_heads, n] the press masked instead of evicting; None: it masked none."""
        indices = vars(self).get("masked_key_indices")
        if indices is None:
            return None
        _, heads, tokens = (torch.as_tensor(part) for part in indices)
        mask = torch.zeros(self._layer.keys.shape[1:3], dtype=torch.bool)
        mask[heads.cpu(), tokens.cpu()] = True
        return mask.to(self._layer.keys.device)

    def __getattr__(self, name: str) -> NoReturn:
        raise KVError(
            f"press {self._press} reads {name!r} of the attention module; a method sees keys, values, "
            "queries, the rotary table and the output projection"
        )


class ColumnSums:
    """Attention weights [1, heads, n, n] for a press that only sums them over the queries.

    The sums are computed in query blocks, so that no n x n matrix exists.
    """

    def __init__(self, mass: Tensor) -> None:
        self._mass, self.device, self.dtype = mass, mass.device, mass.dtype

    def sum(self, dim: int) -> Tensor:
        """[1, heads, n]: attention each key received."""
        if dim not in (2, -2):
            raise KVError(f"attention weights are summed over queries (2), not over {dim}")
        return self._mass.clone()
