"""Weights & Biases' own client, in a process of its own: it sends the runs that were written offline.

A server that is down, slow or broken loses nothing: what was not sent stays on disk, and one warning
says how to send it later.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvbench.errors import presentable, redact

log = logging.getLogger(__name__)
Mode = Literal["auto", "online", "offline", "disabled"]

QUIET = {"WANDB_ERROR_REPORTING": "false"}
_FAILED: set[Path] = set()
"""Where this process could not send from: said once, and not tried again."""


def resolved(mode: Mode) -> Mode:
    """The mode that "auto" stands for."""
    mode_set, key = os.environ.get("WANDB_MODE"), os.environ.get("WANDB_API_KEY")
    if mode == "auto" and mode_set != "disabled":
        return "online" if key and mode_set != "offline" else "offline"
    return "disabled" if mode == "auto" else mode


def send(folders: Sequence[Path], timeout_s: float) -> None:
    """Send offline runs (``offline-run-*``) to the W&B server; one that is there already is replaced.
    What was not taken is one warning, without the API key; the same place is not tried again."""
    place = folders[0].parent
    if place in _FAILED:
        return
    process = client("sync", *map(str, folders), place=place, stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=timeout_s)
        errors = [line for line in output.splitlines() if "error" in line.lower()]
        why = (errors or [f"`wandb sync` ended with status {process.returncode}"])[-1]
    except BaseException as error:
        end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        why = f"not done after {timeout_s:g} s"
    left = not_taken(folders)
    if left:
        _FAILED.add(place)
        log.warning(
            "W&B: %s. %d of %d runs were not sent; they, and what this process logs from now on, are on"
            " disk. Send them later with: wandb sync %s",
            *(presentable(redact(why)), len(left), len(folders), shlex.quote(str(place))),
        )


def client(*words: str, place: Path, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """W&B's own command line with these words, for runs in this folder."""
    environment = {**QUIET, **os.environ, "WANDB_DIR": str(place.parent)}  # its own logs
    environment.pop("WANDB_MODE", None)
    return subprocess.Popen(
        [sys.executable, "-m", "wandb", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the client's helper processes end with it
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a client with its helper processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def not_taken(folders: Sequence[Path]) -> list[Path]:
    """Those of the runs that the client has not marked as sent (and nobody has replaced since)."""
    return [folder for folder in folders if folder.exists() and not any(folder.glob("*.synced"))]
