"""kvbench: KV-cache compression methods for large language models, compared on one honest footing."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.api import compare, compress, kept, load_model
    from kvbench.kv import Budget
    from kvbench.methods import build_method
    from kvbench.report.runs import load

__version__ = "0.3.0"
__all__ = [
    "Budget",
    "__version__",
    "build_method",
    "compare",
    "compress",
    "kept",
    "load",
    "load_model",
]

_HOMES = {
    "Budget": "kv",
    "build_method": "methods",
    "load": "report.runs",
}
"""Where a name is that is not in `kvbench.api`."""


def wait_asleep() -> list[str]:
    """Set the variables by which OpenMP's threads sleep while they wait for each other: spinning takes
    the core from whoever else needs it. OpenMP reads them once, when torch is loaded, so this does
    nothing for a program that has imported torch, or a module of kvbench's that does, before; it must
    set them itself. A user's own stay.

    Returns:
        The names of those that were set.
    """
    asleep = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    asleep = {} if asleep.keys() & os.environ.keys() else asleep
    os.environ.update(asleep)
    return list(asleep)


def __getattr__(name: str) -> Any:
    """The Python interface, imported when first asked for: importing kvbench needs no torch."""
    if name in __all__:
        variables = wait_asleep()
        try:
            return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
        finally:  # read by now: the program's other processes are its own affair
            for variable in variables:
                os.environ.pop(variable, None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
