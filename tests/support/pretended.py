"""pytest -p support.pretended: the tests marked `cuda` run where no GPU is, on pretend ones.

The tool beside the checkout (shared/tools/pretend.py) raises where CUDA would refuse what is asked of
it, and counts launches and waits; `PRETEND` says whether it is at work, `counted` reads its counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TOOL = Path(__file__).resolve().parents[3] / "shared" / "tools" / "pretend.py"
if os.environ.get("KVBENCH_PRETEND") and "pretend" not in sys.modules:
    # Wrappers made outside inference mode cannot be viewed inside.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.enable_grad()  # type: ignore
    torch.compile = lambda model, **options: model  # type: ignore  # knows no wrappers
    sys.path.insert(0, str(TOOL.parent))
    import pretend  # type: ignore[import-not-found]

    def flash(query, key, value, dropout=0.0, is_causal=False, debug=False, *, scale=None):  # type: ignore
        """CUDA's operation, of which a CPU build has the schema only."""
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logarithms = run(query, key, value, dropout, is_causal, scale=scale)
        none = query.new_empty(0)
        return out, logarithms, none, none, query.shape[2], key.shape[2], none, none, none

    def cudnn(
        query, key, value, bias, told, dropout=0.0, is_causal=False, debug=False, *, scale=None
    ):  # type: ignore
        """The same; its logarithms have one more dimension."""
        out, logarithms, *rest = flash(query, key, value, dropout, is_causal, scale=scale)
        return out, logarithms[..., None], *rest

    CUDA_ONLY = torch.library.Library("aten", "IMPL")
    CUDA_ONLY.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    CUDA_ONLY.impl("_scaled_dot_product_cudnn_attention", cudnn, "CPU")
    pretend.install()
    pretend.GPU.__enter__()
    pretend.API.__enter__()

PRETEND = "pretend" in sys.modules
"""Whether the GPUs of this process are pretend ones."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_real = pytest.mark.skipif(
    PRETEND or not torch.cuda.is_available(), reason="needs a GPU: too long, or of real memory"
)
needs_pretend = pytest.mark.skipif(not PRETEND, reason="needs a pretend GPU: make test-all")


def counted(run: Callable[[], Any], *kinds: str) -> dict[str, int]:
    """How often each line of kvbench did what is of these kinds ("sync", "launch") in `run`."""
    log = sys.modules["pretend"].LOG
    log.clear()
    run()
    found: dict[str, int] = {}
    for (_, what, where), count in log.events.items():
        if what.startswith(kinds):
            place = f"{what} at {where}"
            found[place] = found.get(place, 0) + count
    return found


def pytest_configure() -> None:
    """Only as a plugin (-p support.pretended) is this called."""
    assert PRETEND
