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

    The press computes queries as q_proj(hidden states), rotated. Here the hidden states are the layer's
    queries, and q_proj gives them back: after position encoding, with a rotation by zero; or, for a
    press that wants them `plain`, as before it, with the model's own table, and k_proj gives the keys
    as before it. Each KV head's last channel of the hidden states says which token a row is. Whatever
    else is asked for is refused in one line.

    Args:
        row: of the batch.
        press: what messages call it.
        plain: whether the press needs queries or keys before position encoding.

    Raises:
        KVError: `plain`, and the layer has no rotary table that covers all channels.
    """

    def __init__(self, layer: LayerKV, row: int, press: str, *, plain: bool = False) -> None:
        _, kv_heads, n, dim = layer.keys.shape
        heads = kv_heads if layer.queries is None else layer.queries.shape[1]
        self._layer, self._row, self._press = layer, row, press
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
        self._table = self._rotary_table(n) if plain else None
        shape, device = (n, kv_heads, heads // kv_heads * dim + 1), layer.keys.device
        states = torch.full(shape, torch.nan, device=device)
        states[..., -1] = torch.arange(n, device=device)[:, None]
        if layer.queries is not None and layer.softcap is None and not layer.withheld:
            queries = scaled_queries(layer, f"press {press}")[row : row + 1]
            first = n - queries.shape[2]
            if self._table is not None:
                queries = _turned_back(queries, *(part[first:] for part in self._table))
            of_head = queries[0].unflatten(0, (kv_heads, -1)).movedim(2, 0)
            states[first:, :, :-1] = of_head.flatten(2).float()
        self.hidden_states = states.flatten(1)[None]

    def _rotary_table(self, n: int) -> tuple[Tensor, Tensor]:
        layer = self._layer
        if layer.rotary is not None:
            cos, sin = layer.rotary(torch.arange(n, device=layer.keys.device))
            if cos.shape[-1] == self.head_dim:
                return cos.float(), sin.float()
        raise KVError(
            f"press {self._press} reads queries or keys before position encoding and layer "
            f"{self.layer_idx} has no rotary table of all its channels; allowed: models that have"
        )

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
        each = states.unflatten(-1, (self._layer.keys.shape[1], -1))
        return each[..., :-1].flatten(2).to(self._layer.keys.dtype)

    def k_proj(self, states: Tensor) -> Tensor:
        """The keys of these tokens as before position encoding.

        Raises:
            KVError: for a press that was not known to ask.
        """
        if self._table is None:
            self.__getattr__("k_proj")
        assert self._table is not None
        kv_heads = self._layer.keys.shape[1]
        at = states[0].unflatten(-1, (kv_heads, -1))[..., -1].long().mT  # [kv_heads, rows]
        keys = self._layer.keys[self._row].gather(1, at[..., None].expand(-1, -1, self.head_dim))
        plain = _turned_back(keys, *(part[at] for part in self._table))
        return plain.transpose(0, 1).flatten(1)[None]

    def rotary_emb(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's table at positions [1, p], in the dtype of `like`.

        Raises:
            KVError: for a press that was not known to ask.
        """
        if self._table is None or self._layer.rotary is None:
            self.__getattr__("rotary_emb")
        assert self._layer.rotary is not None
        cos, sin = self._layer.rotary(positions[0])
        return cos[None].to(like.dtype), sin[None].to(like.dtype)

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
        if self._table is not None:
            dtype = self._layer.keys.dtype
            rotation = tuple(part[None].to(dtype) for part in self._table)
        else:
            one = self._layer.keys.new_ones(1, 1, 1)
            table = (1, self._layer.n, self.head_dim)
            rotation = (one.expand(table), torch.zeros_like(one).expand(table))
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


def _turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors [..., n, d] as before they were turned by a table [n, d]."""
    low, high = x.float().chunk(2, dim=-1)
    half = torch.cat([-high, low], dim=-1)
    return ((x.float() * cos - half * sin) / (cos.square() + sin.square())).to(x.dtype)


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
