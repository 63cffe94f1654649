"""Rotary position encoding: tables that depend on the length of what is read (LongRoPE, Dynamic NTK),
and the rotation of each layer's queries."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers import __version__ as transformers_version

from kvbench.engine.attention import Capture, UnsupportedModel
from kvbench.kernels.rotation import unrotate
from kvbench.kv import KVError, Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# --- tables that depend on the length -------------------------------------------------------------


class TableChange(NamedTuple):
    """The length up to which a model has one rotary table for all passes.

    Attributes:
        tokens: a pass whose last position is `tokens` or later has another table.
        stays: whether that other table is one for all longer passes (LongRoPE); else it changes with
            every token (Dynamic NTK).
    """

    tokens: int
    stays: bool


def table_change(config: PreTrainedConfig) -> TableChange | None:
    """The `TableChange` of a model with this config; None where no table depends on the length."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    # Some models have parameters for each kind of layer.
    kinds = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    for rope in kinds:
        kind = rope.get("rope_type") or "default"
        if kind == "longrope":
            return TableChange(rope["original_max_position_embeddings"], stays=True)
        if "dynamic" in kind:
            return TableChange(text.max_position_embeddings, stays=False)
    return None


def shares_table(config: PreTrainedConfig, tokens: int) -> bool:
    """Whether the tokens of a sequence of this length have one table, however they are divided into
    passes. With LongRoPE they do, since `crossing` refuses the others."""
    change = table_change(config)
    return change is None or change.stays or tokens <= change.tokens


def has_table_of(config: PreTrainedConfig, part: int, whole: int) -> bool:
    """Whether the first `part` tokens of a prompt have the same table when they are read alone as in a
    pass over all `whole` tokens."""
    change = table_change(config)
    if change is None or whole <= change.tokens or part == whole:
        return True
    return change.stays and part > change.tokens


def table_key(config: PreTrainedConfig, read: int, fed: int, table_of: int = 0) -> Hashable:
    """A key that is equal for rows which may share the passes in which `fed` tokens follow the `read`
    tokens of each: the longest row of a pass decides the table of all. `table_of`: see `Row`."""
    change = table_change(config)
    if change is None or read + fed <= change.tokens:
        return "short"
    return "long" if change.stays and max(read, table_of) > change.tokens else read


def crossing(config: PreTrainedConfig, read: int, fed: int, table_of: int = 0) -> KVError | None:
    """The error for `fed` tokens after `read` ones whose entries would mix LongRoPE's two tables; None
    where they do not. (transformers' `generate` reads everything again at this point, the answer so far
    included.) `table_of`: see `Row`."""
    change = table_change(config)
    if change is None or not change.stays:
        return None
    if not max(read, table_of) <= change.tokens < read + fed:
        return None
    return KVError(
        f"{read} tokens and {fed} more cross {change.tokens}, beyond which LongRoPE of model type "
        f"{config.get_text_config().model_type!r} has other factors for all of them "
        f"(original_max_position_embeddings); allowed: at most {change.tokens} in all, an answer's last "
        f"token not counted, or a prompt of more than {change.tokens}"
    )


def forget_lengths(model: PreTrainedModel) -> None:
    """Let Dynamic NTK's tables forget the passes before, so that the next one has the table of its own
    length; otherwise the longest prompt that this model object has read decides.

    transformers resets such a table itself when it is asked for a short sequence, which is done here.
    The passes of one example only grow, so their tables are those of transformers' `generate`.

    Raises:
        UnsupportedModel: by this transformers they cannot forget.
    """
    change = table_change(model.config)
    if change is None or change.stays:
        return
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer_type.items():
            if "dynamic" in (kind or ""):
                asked = () if layer_type is None else (layer_type,)
                device = next(module.buffers()).device
                module(torch.empty(1, device=device), torch.zeros(1, 1, device=device), *asked)
                if hasattr(module, "None_max_seq_len_cached"):  # a slip of theirs, mended later
                    raise UnsupportedModel(
                        f"transformers {transformers_version} never resets the table of Dynamic NTK, "
                        "so that a long prompt changes those after it; use a later version"
                    )


# --- the rotation of a layer's queries ------------------------------------------------------------

_PROBED = (0, 40, 4000)
"""The positions at which a layer is asked how it rotates its queries."""

_rotates: WeakKeyDictionary[PreTrainedModel, dict[int, bool]] = WeakKeyDictionary()
"""For each model that was asked, by layer: True where the queries are rotated by the model's table,
False where they are not rotated. Other layers (other pairs of channels, other channels than the first,
factors that depend on the position) are not in it."""


def _table(model: PreTrainedModel, layer: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """The cosines and sines [p, width] at positions [p] that the model has for a layer, which may not
    use them; None where it has none."""
    module: Any = getattr(model.base_model, "rotary_emb", None)
    asked = []
    if isinstance(getattr(module, "rope_type", None), dict):
        asked = [model.config.get_text_config().layer_types[layer]]
        if asked[0] not in module.rope_type:
            return None
    if module is None:
        return None
    forget_lengths(model)
    found = module(torch.empty(1, device=positions.device), positions[None], *asked)
    forget_lengths(model)
    # Some models have complex numbers instead.
    return (found[0][0], found[1][0]) if isinstance(found, tuple) else None


@torch.no_grad()
def _how_layers_rotate(model: PreTrainedModel, device: torch.device) -> dict[int, bool]:
    """See `_rotates`. One token is read alone at several positions: it attends to itself, so that what
    differs in a layer's queries is the layer's own rotation."""
    positions = torch.tensor(_PROBED, device=device)
    ids = torch.full(
        (len(_PROBED), 1), 5 % model.config.get_text_config().vocab_size, device=device
    )
    state = Capture()
    # Without the head, whose logits are not needed.
    model.base_model(input_ids=ids, position_ids=positions[:, None], use_cache=False, kvbench=state)
    rotates: dict[int, bool] = {}
    for layer, (call, _) in state.calls.items():
        queries = call.query[:, :, 0].float()  # [positions, heads, head_dim]
        tolerance = (1e-3 if model.dtype == torch.float32 else 3e-2) * float(queries.abs().max())

        def are_equal(plain: Tensor, tolerance: float = tolerance) -> bool:
            return float((plain - plain[:1]).abs().max()) <= tolerance

        table = _table(model, layer, positions.to(queries.device))
        if table is not None and table[0].shape[-1] <= queries.shape[-1]:
            cos, sin = table
            if are_equal(unrotate(queries, cos[:, None], sin[:, None])):
                rotates[layer] = True
        if layer not in rotates and are_equal(queries):
            rotates[layer] = False
    return rotates


def rotary_of(
    model: PreTrainedModel, layers: Sequence[int], n: int, device: torch.device
) -> Mapping[int, Rotary]:
    """The rotation of the queries of each of these layers in a pass over n tokens (`LayerKV.rotary`), by
    what the layer does; layers whose rotation no table describes are left out.

    Args:
        device: where the model expects token ids.
    """
    if getattr(model.base_model, "rotary_emb", None) is None:
        return {}
    if model not in _rotates:
        _rotates[model] = _how_layers_rotate(model, device)
    rotates = _rotates[model]
    change = table_change(model.config)

    def rotation(layer: int) -> Rotary:
        def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
            if not rotates[layer]:
                none = torch.empty(len(positions), 0, device=positions.device)
                return none, none
            if change is not None and change.stays and n <= change.tokens:
                # No answer crosses this position (`crossing`), and beyond it the table is another.
                positions = positions.clamp(max=change.tokens - 1)
            # The last position decides which table it is.
            last = torch.tensor([n - 1], device=positions.device)
            table = _table(model, layer, torch.cat([positions, last]))
            assert table is not None
            return table[0][:-1], table[1][:-1]

        return rotary

    return {layer: rotation(layer) for layer in layers if layer in rotates}
