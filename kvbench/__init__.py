"""kvbench: KV-cache compression methods for large language models, compared on one honest footing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.api import compare, compress

__version__ = "0.1.0"
__all__ = ["__version__", "compare", "compress"]


def __getattr__(name: str) -> Any:
    """`compress` and `compare`, imported when first asked for: importing kvbench needs no torch."""
    if name in ("compare", "compress"):
        from kvbench import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "compare", "compress"])
