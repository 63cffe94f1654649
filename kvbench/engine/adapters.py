"""Models that compute their attention themselves: MPT, Bloom and Falcon.

Their attention is a module that transformers' attention interface does not reach, and their models hand
no keyword arguments on to it. While a pass carries kvbench's state, such a module of this one model
object goes by `AdaptedAttention`, which takes queries, keys and values from the module's own
projections and asks `kvbench_attention`, as every other architecture does. No class of transformers is
touched; without a state, and after `attached_attention`, the module computes what it always did.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench.engine.attention import UnsupportedModel, kvbench_attention
from kvbench.kernels.position_bias import PositionBias
from kvbench.kv import Rotary

Projected = tuple[Tensor, Tensor, Tensor]
"""Query [batch, heads, t, head_dim], key and value [batch, kv_heads, t, head_dim]."""


def _slopes(table: Tensor) -> Tensor:
    """[heads] of the biases [heads, 1, 2] at two neighbouring positions."""
    return table[:, 0, 1] - table[:, 0, 0]


class _Family(ABC):
    """What one family's attention module does before and after attention itself."""

    scaling: str = "inv_norm_factor"

    @abstractmethod
    def project(self, module: Any, hidden: Tensor, given: dict[str, Any]) -> Projected:
        """See `Projected`."""

    @abstractmethod
    def bias(self, module: Any, hidden: Tensor) -> PositionBias | None:
        """What a key's position adds to its logits."""

    @abstractmethod
    def finish(self, module: Any, mixed: Tensor, given: dict[str, Any]) -> Tensor:
        """The module's output of attention's, [batch, t, heads * head_dim]."""


class _Mpt(_Family):
    scaling = "softmax_scale"

    def project(self, module: Any, hidden: Tensor, given: dict[str, Any]) -> Projected:
        mixed = module.Wqkv(hidden)
        if module.clip_qkv:
            mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
        parts = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value

    def bias(self, module: Any, hidden: Tensor) -> PositionBias:
        table = _functions_of(module).build_mpt_alibi_tensor(module.n_heads, 2)
        return PositionBias(_slopes(table).to(hidden.device))

    def finish(self, module: Any, mixed: Tensor, given: dict[str, Any]) -> Tensor:
        return module.out_proj(mixed)


class _Bloom(_Family):
    def project(self, module: Any, hidden: Tensor, given: dict[str, Any]) -> Projected:
        query, key, value = module._reshape(module.query_key_value(hidden))
        return query, key, value

    def bias(self, module: Any, hidden: Tensor) -> PositionBias:
        two = torch.ones(1, 2, dtype=torch.int64)
        table = _functions_of(module).build_alibi_tensor(two, module.num_heads, torch.float32)
        return PositionBias(_slopes(table).to(hidden.device), hidden.dtype)

    def finish(self, module: Any, mixed: Tensor, given: dict[str, Any]) -> Tensor:
        return module.dense(mixed) + given["residual"]


class _Falcon(_Family):
    def project(self, module: Any, hidden: Tensor, given: dict[str, Any]) -> Projected:
        mixed = module.query_key_value(hidden)
        if module.new_decoder_architecture:  # one key and value for each group of query heads
            mixed = mixed.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
            query = mixed[:, :, :, :-2].flatten(2, 3)
            key, value = mixed[:, :, :, -2], mixed[:, :, :, -1]
        else:
            query, key, value = module._split_heads(mixed)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if given.get("alibi") is None:
            turned = _functions_of(module).apply_rotary_pos_emb
            query, key = turned(query, key, *given["position_embeddings"])
        return query, key, value

    def bias(self, module: Any, hidden: Tensor) -> PositionBias | None:
        if not has_alibi(module.config):
            return None
        two = torch.ones(1, 2, dtype=torch.int64)
        table = _functions_of(module).build_alibi_tensor(two, module.num_heads, torch.bfloat16)
        return PositionBias(_slopes(table).to(hidden.device), hidden.dtype, module.head_dim**0.5)

    def finish(self, module: Any, mixed: Tensor, given: dict[str, Any]) -> Tensor:
        return module.dense(mixed)


FAMILIES: dict[str, tuple[str, type[_Family]]] = {
    "mpt": ("MptAttention", _Mpt),
    "bloom": ("BloomAttention", _Bloom),
    "falcon": ("FalconAttention", _Falcon),
}
"""Name of the attention module's class and what it does, by model type."""


def _functions_of(module: nn.Module) -> Any:
    """The python module that the class of `module` comes from."""
    return sys.modules[type(module).__module__]


def kv_heads(config: PreTrainedConfig) -> int:
    """KV heads of a model, whatever its config calls them."""
    heads = int(config.num_attention_heads)
    if config.model_type == "falcon":
        several = config.new_decoder_architecture or not config.multi_query
        return int(config.num_kv_heads) if several else 1
    return int(getattr(config, "num_key_value_heads", None) or heads)


def has_alibi(config: PreTrainedConfig) -> bool:
    """Whether a key's position enters by a bias of the logits."""
    return config.model_type in ("mpt", "bloom") or bool(getattr(config, "alibi", False))


def is_adapted(config: PreTrainedConfig) -> bool:
    """Whether attention of such a model is reached by an adapter.

    Raises:
        UnsupportedModel: an option of that family that the adapter does not compute.
    """
    if config.model_type not in FAMILIES:
        return False
    heads, held = config.num_attention_heads, kv_heads(config)
    if has_alibi(config) and held != heads:
        raise UnsupportedModel(
            f"model type {config.model_type!r} has alibi and {heads} query heads that share {held} KV "
            "heads, so that a key's bias differs within its group; allowed: as many, or rotary positions"
        )
    return True


@dataclass
class AdaptedAttention:
    """In the place of one attention module's `forward`.

    Attributes:
        state: attention state of the pass that is under way, None outside of kvbench's passes.
    """

    module: Any
    original: Callable[..., Any]
    family: _Family
    state: object | None = None
    biases: dict[object, PositionBias | None] = field(default_factory=dict)

    def _bias(self, hidden: Tensor) -> PositionBias | None:
        like = (hidden.dtype, hidden.device)
        if like not in self.biases:
            self.biases[like] = self.family.bias(self.module, hidden)
        return self.biases[like]

    def __call__(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        """The module's output, and None for its attention weights."""
        if self.state is None:
            return self.original(hidden_states, *args, **given)
        if self.module.training:
            raise UnsupportedModel(
                f"{type(self.module).__name__} is in training mode; call model.eval() first"
            )
        if args:  # Bloom hands the residual on by place
            given["residual"] = args[0]
        module, family = self.module, self.family
        query, key, value = family.project(module, hidden_states, given)
        out, _ = kvbench_attention(
            module,
            query,
            key,
            value,
            None,
            scaling=getattr(module, family.scaling),
            bias=self._bias(hidden_states),
            kvbench=self.state,  # type: ignore[arg-type]
        )
        return family.finish(module, out.flatten(2), given), None


@dataclass
class _Carrier:
    """Hooks on the model's forward that hand its ``kvbench`` argument to the attention modules. An
    object, not a closure, so that a deep copy of the model has its own."""

    modules: list[AdaptedAttention]

    def before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        state = kwargs.get("kvbench")
        for module in self.modules:
            module.state = state
        return args, {name: value for name, value in kwargs.items() if name != "kvbench"}

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for module in self.modules:
            module.state = None


def attach(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let the attention modules of an adapted model ask kvbench's function; see the module.

    Returns:
        What takes the hooks off again; the modules' own forward is `detach`'s business.
    """
    name, family = FAMILIES[model.config.model_type]
    found = []
    for module in model.modules():
        if type(module).__name__ == name:
            adapted = AdaptedAttention(module, module.forward, family())
            module.__dict__["forward"] = adapted
            found.append(adapted)
    carrier = _Carrier(found)
    return [
        model.register_forward_pre_hook(carrier.before, with_kwargs=True),
        model.register_forward_hook(carrier.after, always_call=True),
    ]


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`, but for its hooks."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), AdaptedAttention):
            del module.__dict__["forward"]


@contextmanager
def attached_attention(model: PreTrainedModel) -> Iterator[None]:
    """`attach` for a while; nothing where it is attached already, as `load_model` leaves it."""
    if any(isinstance(m.__dict__.get("forward"), AdaptedAttention) for m in model.modules()):
        yield
        return
    with ExitStack() as stack:
        stack.callback(detach, model)
        for hook in attach(model):
            stack.callback(hook.remove)
        yield


def rotary_of(model: PreTrainedModel) -> Rotary | None:
    """The model's rotary table (`LayerKV.rotary`); None where it has none, several, or turns other
    pairs of channels than the two halves."""
    if has_alibi(model.config.get_text_config()):  # Falcon has a table that it does not use then
        return None
    table = getattr(model.base_model, "rotary_emb", None)
    turn = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    if table is None or turn is None or hasattr(model.base_model, "rotary_emb_local"):
        return None
    if turn(torch.arange(4.0)).tolist() != [-2.0, -3.0, 0.0, 1.0]:
        return None

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table(torch.empty(1, device=positions.device), positions[None])
        return cos[0], sin[0]

    return rotary
