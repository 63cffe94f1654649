"""What tests of probes and others share."""

from __future__ import annotations

from kvbench.methods import build_method
from kvbench.probes.layers import SyntheticLayers
from support.jobs import make_job

METHODS = {name: build_method(name) for name in ("exact", "streaming_llm", "uniform", "balancekv")}


SYNTHETIC = SyntheticLayers(n=320, heads=4, kv_heads=2, head_dim=16, clusters=8)


def probe_job(tmp_path, probe, methods=METHODS, **changes):
    return make_job(tmp_path, methods, plan=probe, **changes)
