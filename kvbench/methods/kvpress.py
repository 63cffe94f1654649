"""The adapter to the kvpress package, whose compression methods are called presses."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from kvbench.errors import check_known, first_line
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods._adapters import locate_entries, scaled_queries
from kvbench.methods._select import keep_marked
from kvbench.methods.base import Method

INSTALL = "pip install 'kvbench[kvpress]' (it needs transformers < 5.3)"

_REASONS = {
    "it compresses while decoding, not after the prompt, as method recompress does": (
        "DecodingPress",
        "CompressionRatioDecodingPress",
        "PrefillDecodingPress",
        "CAMPress",
    ),
    "it needs weights, patterns or statistics learned for one model, which it downloads": (
        "DuoAttentionPress",
        "LUKVPress",
        "FastKVzipPress",
        "KVzapPress",
        "QFilterPress",
        "ExpectedAttentionStatsPress",
    ),
    "it runs the model on the prompt again, by hooks of its own on the whole model (methods kvzip, "
    "kvzip_plus and kvgrad do so in the engine)": (
        "KVzipPress",
        "KVgradPress",
        "RestoreKVPress",
        "KVComposePress",
    ),
    "its ratio cannot be set, so no budget can be given to it": (
        "DMSPress",
        "SimLayerKVPress",
        "PerLayerCompressionPress",
        "ComposedPress",
    ),
    "it moves keys to new positions; a row decodes at the prompt's own": (
        "KeyRerotationPress",
        "FinchPress",
    ),
    "it zeroes channels of keys and evicts no entry": ("ThinKPress",),
    "it reads queries or keys as before position encoding, as method expected_attention does": (
        "ExpectedAttentionPress",
        "CapPress",
        "LeverageScorePress",
        "CompactorPress",
    ),
}
REFUSED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}
"""The presses that cannot run on one layer's keys, values and queries, and for each the reason.
Subclasses of these presses are refused too."""

_FROM_BUDGET = {"n_sink": "sink", "num_sinks": "sink", "window_size": "window"}
"""Options of presses, and the field of the budget that sets each where the user does not."""

_WRAPPED = ("press", "base_press")
"""Options of presses that are themselves presses."""


def _package() -> ModuleType:
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise KVError(
            f"method 'kvpress' needs the package kvpress ({first_line(error)}); install it: {INSTALL}"
        ) from error


def available_presses() -> list[str]:
    """The names of all presses of the installed package without its base classes, sorted."""
    package = _package()
    return sorted(
        name
        for name in package.__all__
        if inspect.isclass(getattr(package, name))
        and issubclass(getattr(package, name), package.BasePress)
        and name not in ("BasePress", "ScorerPress")
    )


def make_press(name: object, options: Mapping[str, Any], budget: Budget) -> Any:
    """Make a press by the name of its class.

    Args:
        name: the class.
        options: the arguments of its constructor without the compression ratio. A press among them is a
            name, or a mapping of ``press`` (the name) and the options of that press.
        budget: sets n_sink, num_sinks and window_size where the press has them and `options` does not.
    """
    check_known(f"unknown press {name!r}", str(name), available_presses(), KVError)
    cls: type[Any] = getattr(_package(), str(name))
    for ancestor in cls.__mro__:
        if ancestor.__name__ in REFUSED:
            raise KVError(f"press {name} cannot run as a method: {REFUSED[ancestor.__name__]}")
    allowed = [
        option for option in inspect.signature(cls).parameters if option != "compression_ratio"
    ]
    for option in options:
        if option == "compression_ratio":
            raise KVError(
                f"press {name} takes its compression_ratio from budget.rate; leave it out"
            )
        check_known(f"press {name} has no option {option!r}", str(option), allowed, KVError)
    arguments = dict(options)
    for option in allowed:
        if option in _WRAPPED:
            arguments[option] = _make_wrapped(name, option, arguments.get(option), budget)
        elif option in _FROM_BUDGET and option not in arguments:
            arguments[option] = getattr(budget, _FROM_BUDGET[option])
        if option == "window_size" and arguments[option] < 1:
            raise KVError(f"press {name}: window_size is {arguments[option]}; allowed: 1 or more")
    try:
        return cls(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise KVError(f"press {name} rejects its options: {first_line(error)}") from error


def _make_wrapped(name: object, option: str, value: Any, budget: Budget) -> Any:
    """Make the press that another press wraps.

    Args:
        name: the wrapping press, and `option`, which of its options names the wrapped one.
        value: the name of the wrapped press, or a mapping of ``press`` and its options.
    """
    if value is None:
        raise KVError(
            f"press {name} wraps another; name it, e.g. options={{{option}: SnapKVPress}}"
        )
    inner = dict(value) if isinstance(value, Mapping) else {"press": value}
    return make_press(inner.pop("press", None), inner, budget)


def ratio_for(n: int, kept: int) -> float:
    """The compression ratio with which a press keeps exactly `kept` of n entries.

    A press keeps int(n * (1 - ratio)) in floating point. With the ratio 1 - kept / n this can be one
    entry less (39 of 400 for 0.9); the ratio is then lowered until it is not.
    """
    for margin in (0.0, 1e-9, 1e-6, 1e-3):
        ratio = 1 - (kept + margin) / n
        if int(n * (1 - ratio)) == kept and round(n * (1 - ratio)) == kept:
            return ratio
    raise AssertionError(f"no ratio keeps {kept} of {n}")


class PressResult(NamedTuple):
    """A press's keys and values of one prompt.

    Attributes:
        keys, values: [1, kv_heads, c, head_dim], those that the press returned.
        stays: [kv_heads, n] bool, for a press that masks entries instead of dropping them the entries
            that it did not mask; None for other presses.
    """

    keys: Tensor
    values: Tensor
    stays: Tensor | None


@dataclass(frozen=True, kw_only=True)
class KVPress(Method):
    """A press of the installed kvpress package, run on one layer after the prompt.

    The budget's capacity becomes the press's compression_ratio, chosen so that the press keeps exactly
    `capacity` entries in spite of its rounding. Sink and window become the press's n_sink (or num_sinks)
    and window_size unless `options` sets them. A press that keeps whole chunks may keep less than the
    capacity; a press that would keep more is asked for less. The package's own code chooses the entries;
    its random draws are seeded by the method's generator, and every prompt of a batch is compressed
    alone.

    The entries that a press masks instead of dropping them (AdaKVPress) are evicted, and heads then have
    different lengths. A press that reads the output projection gets its weight. `REFUSED` lists the
    presses that need more than one layer's keys, values and queries, and the reason for each.

    Args:
        press: the name of the class, e.g. SnapKVPress.
        options: the arguments of its constructor without the ratio. A wrapper names the press that it
            wraps: ``{press: SnapKVPress}``, or ``{press: {press: SnapKVPress, kernel_size: 7}}``.
    """

    paper: ClassVar[str] = "package kvpress (arXiv 2510.00636); each press names its own paper"

    press: str = "SnapKVPress"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        make_press(self.press, self.options, Budget())

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        capacity = budget.capacity(n)
        press = make_press(self.press, self.options, budget)
        if capacity >= n or not hasattr(press, "get_layer_budget"):
            return capacity
        press.compression_ratio = ratio_for(n, capacity)
        config = SimpleNamespace(num_hidden_layers=num_layers)
        module = SimpleNamespace(config=config, layer_idx=layer_index)
        return int(press.get_layer_budget(module, n))

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        n, capacity = layer.n, budget.capacity(layer.n)
        if capacity >= n:
            return keep_all(layer)
        if layer.values.shape[-1] != layer.keys.shape[-1]:
            raise KVError(
                f"layer {layer.layer_index} has keys of {layer.keys.shape[-1]} and values of "
                f"{layer.values.shape[-1]} channels; kvpress allows: the same number"
            )
        allowed = self.layer_capacity(budget, n, layer.layer_index, layer.num_layers)
        seed = int(torch.randint(2**62, (), generator=generator))
        requested = capacity
        # A press that keeps whole chunks may keep more than it is asked for, and is then asked for less.
        for _ in range(4):
            rows = range(layer.keys.shape[0])
            results = [self._compress_row(layer, row, budget, requested, seed) for row in rows]
            stays = [result.stays for result in results if result.stays is not None]
            if stays:
                return keep_marked(layer, torch.stack(stays))
            most = max(result.keys.shape[2] for result in results)
            requested -= max(0, most - allowed)
            if most <= allowed or requested < 1:
                break
        if len({result.keys.shape[2] for result in results}) > 1:
            raise KVError(
                f"press {self.press} keeps a different number of entries of each prompt; "
                "allowed: one prompt at a time"
            )
        all_keys = torch.cat([result.keys for result in results])
        all_values = torch.cat([result.values for result in results])
        return locate_entries(all_keys, all_values, layer)

    def _compress_row(
        self, layer: LayerKV, row: int, budget: Budget, requested: int, seed: int
    ) -> PressResult:
        """Run the press on one prompt.

        Args:
            row: the prompt's row in the batch.
            requested: the number of entries that the press is asked to keep.
            seed: the seed of the press's random draws.
        """
        press = make_press(self.press, self.options, budget)
        press.compression_ratio = ratio_for(layer.n, requested)
        attention = AttentionModule(layer, self.press, row)
        weights = None
        if isinstance(_innermost(press), _package().ObservedAttentionPress):
            weights = ColumnSums(layer.attention_mass()[row : row + 1])
        # The other methods share the layer's tensors, so the press gets copies.
        keys = layer.keys[row : row + 1].clone()
        values = layer.values[row : row + 1].clone()
        devices = [keys.device] if keys.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            try:
                kept_keys, kept_values = press.compress(
                    attention,
                    attention.hidden_states,
                    keys,
                    values,
                    weights,
                    attention.forward_arguments(),
                )
            # How presses refuse: by assertions, and cases that they lack.
            except (AssertionError, NotImplementedError) as error:
                refusal = f"press {self.press} refuses layer {layer.layer_index}"
                raise KVError(f"{refusal}: {first_line(error)}") from error
        masked = attention.masked()
        return PressResult(kept_keys, kept_values, None if masked is None else ~masked)


def _innermost(press: Any) -> Any:
    for option in _WRAPPED:
        if hasattr(press, option):
            return _innermost(getattr(press, option))
    return press


# --- stand-ins that a press receives in place of a model's attention module and weights ------------


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
