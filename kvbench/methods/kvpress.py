"""Presses of the kvpress package."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.errors import first_line
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods._adapters import locate_entries
from kvbench.methods._press_module import AttentionModule, ColumnSums
from kvbench.methods.adakv import keep
from kvbench.methods.base import Method, check_known

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
    "it runs the model on the prompt again, by hooks of its own on the whole model (method kvzip does "
    "so in the engine)": ("KVzipPress", "KVgradPress", "RestoreKVPress", "KVComposePress"),
    "its ratio cannot be set, so no budget can be given to it": (
        "DMSPress",
        "SimLayerKVPress",
        "PerLayerCompressionPress",
        "ComposedPress",
    ),
    "it moves keys to new positions; a fork decodes at the prompt's own": (
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
"""Presses that cannot run on what a method sees of one layer, and what is missing; subclasses too."""

_FROM_BUDGET = {"n_sink": "sink", "num_sinks": "sink", "window_size": "window"}
"""Options of presses that the budget fills in unless they are given."""

_WRAPPED = ("press", "base_press")
"""Options of presses that are themselves presses."""


def _package() -> ModuleType:
    """The kvpress package.

    Raises:
        KVError: it is absent, or cannot be imported.
    """
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise KVError(
            f"method 'kvpress' needs the package kvpress ({first_line(error)}); install it: {INSTALL}"
        ) from error


def available_presses() -> list[str]:
    """Every press the installed package lists, base classes left out, sorted.

    Raises:
        KVError: the package is absent.
    """
    package = _package()
    return sorted(
        name
        for name in package.__all__
        if inspect.isclass(getattr(package, name))
        and issubclass(getattr(package, name), package.BasePress)
        and name not in ("BasePress", "ScorerPress")
    )


def make_press(name: object, options: Mapping[str, Any], budget: Budget) -> Any:
    """A press with its options; sink and window come from the budget where it has such options.

    Args:
        name: class of the package.
        options: its constructor's arguments but the ratio; a press among them is a name, or a
            mapping with ``press`` (the name) and that press's own options.
        budget: fills n_sink, num_sinks (sink) and window_size (window) unless given.

    Raises:
        KVError: unknown or refused press, unknown or missing option, a value the press rejects.
    """
    check_known(f"unknown press {name!r}", str(name), available_presses())
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
        check_known(f"press {name} has no option {option!r}", str(option), allowed)
    arguments = dict(options)
    for option in allowed:
        if option in _WRAPPED:
            inner = arguments.get(option)
            if inner is None:
                raise KVError(
                    f"press {name} wraps another; name it, e.g. options={{{option}: SnapKVPress}}"
                )
            inner = dict(inner) if isinstance(inner, Mapping) else {"press": inner}
            arguments[option] = make_press(inner.pop("press", None), inner, budget)
        elif option in _FROM_BUDGET and option not in arguments:
            arguments[option] = getattr(budget, _FROM_BUDGET[option])
        if option == "window_size" and arguments[option] < 1:
            raise KVError(f"press {name}: window_size is {arguments[option]}; allowed: 1 or more")
    try:
        return cls(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise KVError(f"press {name} rejects its options: {first_line(error)}") from error


def ratio_for(n: int, kept: int) -> float:
    """The compression ratio of which a press makes exactly `kept` of n entries.

    A press keeps int(n * (1 - ratio)) in floating point, so that 1 - kept / n can give one less (39
    of 400 for 0.9); then the ratio is the nearest below that does not.
    """
    for more in (0.0, 1e-9, 1e-6, 1e-3):
        ratio = 1 - (kept + more) / n
        if int(n * (1 - ratio)) == kept and round(n * (1 - ratio)) == kept:
            return ratio
    raise AssertionError(f"no ratio keeps {kept} of {n}")


@dataclass(frozen=True, kw_only=True)
class KVPress(Method):
    """A press of the installed kvpress package, run on one layer after the prompt.

    The budget's capacity becomes the press's compression_ratio, chosen so that the press keeps
    exactly `capacity` entries in spite of its rounding; sink and window become its n_sink (or
    num_sinks) and window_size unless `options` gives them. Presses that keep whole chunks, or a whole
    number in each chunk, may keep less; one that would keep more is asked for less. The package's
    own code chooses; its random draws are seeded from the method's generator, and every prompt of a
    batch is compressed by itself.

    A press that masks (AdaKVPress) has its masked entries evicted: heads of different lengths. One that
    wants the output projection gets its weight. Refused, with what is missing (`REFUSED`): presses that
    need other forward passes, downloads, or queries before position encoding, that move keys, compress
    while decoding, or whose ratio cannot be set.

    Args:
        press: name of the class, e.g. SnapKVPress.
        options: its constructor's arguments, the ratio left out. A wrapper names the press it wraps:
            ``{press: SnapKVPress}``, or ``{press: {press: SnapKVPress, kernel_size: 7}}``.
    """

    paper: ClassVar[str] = "package kvpress (arXiv 2510.00636); each press names its own paper"
    by_head: ClassVar[bool] = False  # of some presses

    press: str = "SnapKVPress"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        make_press(self.press, self.options, Budget())

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        """Entries per KV head this layer may hold: PyramidKVPress has its own share for each."""
        capacity = budget.capacity(n)
        press = make_press(self.press, self.options, budget)
        if capacity >= n or not hasattr(press, "get_layer_budget"):
            return capacity
        press.compression_ratio = ratio_for(n, capacity)
        shape = SimpleNamespace(num_hidden_layers=num_layers)
        return int(press.get_layer_budget(SimpleNamespace(config=shape, layer_idx=layer_index), n))

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """What the press keeps, ascending.

        Raises:
            KVError: the press needs something a method does not see, or cannot meet the budget.
        """
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
        wanted = capacity
        for _ in range(4):  # presses that keep whole chunks overshoot; then they are asked for less
            rows = [
                self._compress_row(layer, row, budget, wanted, seed)
                for row in range(layer.keys.shape[0])
            ]
            if isinstance(rows[0], Tensor):  # of every head as many as it deserves
                return keep(layer, torch.stack([row for row in rows if isinstance(row, Tensor)]))
            kept = [row for row in rows if isinstance(row, tuple)]
            most = max(keys.shape[2] for keys, _ in kept)
            wanted -= max(0, most - allowed)
            if most <= allowed or wanted < 1:
                break
        if len({keys.shape[2] for keys, _ in kept}) > 1:
            raise KVError(
                f"press {self.press} keeps a different number of entries of each prompt; "
                "allowed: one prompt at a time"
            )
        keys, values = (torch.cat(parts) for parts in zip(*kept, strict=True))
        return locate_entries(keys, values, layer)

    def _compress_row(
        self, layer: LayerKV, row: int, budget: Budget, wanted: int, seed: int
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Keys and values [1, kv_heads, c, head_dim] the press keeps of one prompt; or, of a press that
        masks, which entries stay [kv_heads, n]."""
        press = make_press(self.press, self.options, budget)
        press.compression_ratio = ratio_for(layer.n, wanted)
        scorer = press
        while wrapping := [name for name in _WRAPPED if hasattr(scorer, name)]:
            scorer = getattr(scorer, wrapping[0])
        attention = AttentionModule(layer, self.press, row)
        weights = None
        if isinstance(scorer, _package().ObservedAttentionPress):
            weights = ColumnSums(layer.attention_mass()[row : row + 1])
        # Copies: the other forks of the prefill share these tensors.
        keys, values = (part[row : row + 1].clone() for part in (layer.keys, layer.values))
        devices = [keys.device] if keys.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            try:
                kept: tuple[Tensor, Tensor] = press.compress(
                    attention,
                    attention.hidden_states,
                    keys,
                    values,
                    weights,
                    attention.forward_arguments(),
                )
            except (AssertionError, KeyError, NotImplementedError) as error:
                where = f"press {self.press} refuses layer {layer.layer_index}"
                raise KVError(f"{where}: {first_line(error)}") from error
        masked = attention.masked()
        return kept if masked is None else ~masked
