"""The origin of a run's numbers, for its manifest: code revision, versions, hardware, command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kvbench
from kvbench.errors import redact
from kvbench.run.source import git

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "hydra-core",
    "triton",
    "kvpress",
    "minference",
)


@cache
def versions() -> dict[str, str]:
    """The versions of kvbench, Python and `LIBRARIES`, which can change a score."""
    versions_by_name = {"kvbench": kvbench.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            versions_by_name[name] = "not installed"
    return versions_by_name


@cache
def code_revision() -> str:
    """The git commit of the checkout that the package runs from, followed by ``+dirty`` if its code has
    uncommitted changes or untracked files; ``unknown`` outside a checkout."""
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ".", "../conf")
    if commit is None or changes is None:
        return "unknown"
    return commit.decode().strip() + ("+dirty" if changes.strip() else "")


def hardware(device: torch.device) -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # only the cores that this process may use
        cores = len(os.sched_getaffinity(0))
    facts: dict[str, Any] = {
        "device": str(device),
        "processor": processor,
        "cores": cores,
        "torch_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["cuda"] = torch.version.cuda
    return facts


def command() -> str:
    """The command that started this process, as a user would type it."""
    program = Path(sys.argv[0])
    name = "python -m kvbench" if program.name == "__main__.py" else program.name
    return redact(f"{name} {shlex.join(sys.argv[1:])}")
