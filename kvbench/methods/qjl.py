from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from kvbench.kernels.qjl import QJL
from kvbench.kernels.quantize import Scheme
from kvbench.methods.exact import Exact

DEFAULTS: Mapping[str, Any] = {"scheme": "qjl", **asdict(QJL())}


@dataclass(frozen=True, kw_only=True)
class QJLCache(Exact):
    """Keeps every entry, packed by `kvbench.kernels.qjl.QJL`; no budget applies.

    The options of the packing are given as `quantize`. Any other method's entries are packed in the same
    way by its option ``quantize={scheme: qjl, ...}``. The preset `released` has the options of the
    authors' code.
    """

    paper: ClassVar[str] = "arXiv 2406.03482; github.com/amirzandieh/QJL"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"released": {"quantize": DEFAULTS}}

    quantize: Scheme | Mapping[str, Any] | None = field(
        default_factory=lambda: dict(DEFAULTS), hash=False
    )
