"""TurboQuant: every vector rotated, each coordinate by one codebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from kvbench.kernels.quantize import Scheme
from kvbench.kernels.turboquant import TurboQuant
from kvbench.methods.exact import Exact

DEFAULTS: Mapping[str, Any] = {"scheme": "turboquant", **asdict(TurboQuant())}


def _widths(bits: int, outlier_bits: int, outlier_share: float) -> Mapping[str, Any]:
    widths = {"bits": bits, "outlier_bits": outlier_bits, "outlier_share": outlier_share}
    return {"quantize": {**DEFAULTS, **widths}}


@dataclass(frozen=True, kw_only=True)
class TurboQuantCache(Exact):
    """Keeps every entry, stored by `kvbench.kernels.turboquant.TurboQuant`; no budget applies.

    The scheme's options go into `quantize`, and with ``{scheme: turboquant, ...}`` there any other
    method's entries are stored so. Of the paper's two widths the first gives 32 of 128 channels 3 bits
    and the others 2; how it splits for 3.5 bits is not said: here half of the channels have 4, half 3.
    """

    paper: ClassVar[str] = "arXiv 2504.19874"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper_2_5": _widths(2, 3, 0.25),
        "paper_3_5": _widths(3, 4, 0.5),
    }

    quantize: Scheme | Mapping[str, Any] | None = field(
        default_factory=lambda: dict(DEFAULTS), hash=False
    )
