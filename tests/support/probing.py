"""Jobs of probes, and sessions with a tiny or the shipped model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvbench.engine.model import ModelSpec
from kvbench.methods import build_method
from kvbench.probes.layer_error import SyntheticLayers
from kvbench.run.job import Job
from kvbench.run.session import Session
from support.jobs import make_job

METHODS = {name: build_method(name) for name in ("exact", "streaming_llm", "uniform", "balancekv")}


SYNTHETIC = SyntheticLayers(n=320, heads=4, kv_heads=2, head_dim=16, clusters=8)


def probe_job(tmp_path: Path, probe: Any, methods: Any = METHODS, **changes: Any) -> Job:
    return make_job(tmp_path, methods, plan=probe, **changes)


def shipped() -> Session:
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")
    return Session(spec, torch.device("cpu"), torch.float32)
