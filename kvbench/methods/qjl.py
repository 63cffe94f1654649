"""QJL: every key as the signs of a random projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from kvbench.kernels.qjl import QJL
from kvbench.kernels.quantize import Scheme
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Method

DEFAULTS: Mapping[str, Any] = {"scheme": "qjl", **asdict(QJL())}


@dataclass(frozen=True, kw_only=True)
class QJLCache(Method):
    """Keeps every entry, stored by `kvbench.kernels.qjl.QJL`; no budget applies.

    The scheme's options go into `quantize`, and with ``{scheme: qjl, ...}`` there any other method's
    entries are stored so. The preset is what the authors' code runs.
    """

    paper: ClassVar[str] = "arXiv 2406.03482; github.com/amirzandieh/QJL"
    saves_memory: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"released": {"quantize": DEFAULTS}}

    quantize: Scheme | Mapping[str, Any] | None = field(
        default_factory=lambda: dict(DEFAULTS), hash=False
    )

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """All entries, without a copy; the cache packs them."""
        return keep_all(layer)
