"""kvbench: KV-cache compression methods for large language models, compared on one honest footing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.api import compare, compress, kept, load_model
    from kvbench.kv import Budget
    from kvbench.methods import build_method
    from kvbench.report.experiment import load
    from kvbench.report.figures import draw_kept

__version__ = "0.2.0"
__all__ = [
    "Budget",
    "__version__",
    "build_method",
    "compare",
    "compress",
    "draw_kept",
    "kept",
    "load",
    "load_model",
]

_HOMES = {
    "Budget": "kv",
    "build_method": "methods",
    "draw_kept": "report.figures",
    "load": "report.experiment",
}
"""Where a name is that is not in `kvbench.api`."""


def __getattr__(name: str) -> Any:
    """The Python interface, imported when first asked for: importing kvbench needs no torch."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
