"""TurboQuant: every vector rotated, each coordinate by one codebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from kvbench.kernels.quantize import Scheme
from kvbench.kernels.turboquant import TurboQuant
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Method

DEFAULTS: Mapping[str, Any] = {"scheme": "turboquant", **asdict(TurboQuant())}


@dataclass(frozen=True, kw_only=True)
class TurboQuantCache(Method):
    """Keeps every entry, stored by `kvbench.kernels.turboquant.TurboQuant`; no budget applies.

    The scheme's options go into `quantize`, and with ``{scheme: turboquant, ...}`` there any other
    method's entries are stored so. Of the paper's two widths the first gives 32 of 128 channels 3 bits
    and the others 2; how it splits for 3.5 bits is not said: here half of the channels have 4, half 3.
    """

    paper: ClassVar[str] = "arXiv 2504.19874"
    saves_memory: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper_2_5": {
            "quantize": {
                **DEFAULTS,
                "bits": 2,
                "outlier_bits": 3,
                "outlier_share": 0.25,
            }
        },
        "paper_3_5": {"quantize": {**DEFAULTS, "bits": 3, "outlier_bits": 4, "outlier_share": 0.5}},
    }

    quantize: Scheme | Mapping[str, Any] | None = field(
        default_factory=lambda: dict(DEFAULTS), hash=False
    )

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """All entries, without a copy; the cache packs them."""
        return keep_all(layer)
