"""Sending W&B runs that were written offline: bounded in time, and never at the cost of a result.

Runs are always written to disk first; W&B's own client (``wandb sync``, in a process of its own) then
sends the files. A server that is down, slow or broken therefore loses nothing: what was not sent lies
where it was, and the same command sends it later.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import redact

MODES = ("auto", "online", "offline", "disabled")

PROBE_S = 10.0
"""Seconds within which the server must answer at all."""


QUIET = {"WANDB_ERROR_REPORTING": "false"}
"""W&B's reports about errors of its own are off, unless the environment asks for them."""


class NotSent(RuntimeError):
    """Why the server did not take everything: one line, without the API key."""


def check_logger(mode: str, timeout_s: float) -> None:
    """Whether `log_runs` can work with these.

    Raises:
        ValueError: one line with what is allowed.
    """
    if mode not in MODES:
        raise ValueError(f"logger.mode is {mode!r}; allowed: {', '.join(MODES)}")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"logger.timeout_s is {timeout_s!r}; allowed: a positive number")


def send(folders: Sequence[Path], timeout_s: float) -> str | None:
    """Send offline runs to the W&B server; a run that is there already is replaced.

    Args:
        folders: of the runs (``offline-run-*``).
        timeout_s: seconds for all of them together.

    Returns:
        Where they can be seen, if the client said so.

    Raises:
        NotSent: some were not taken.
    """
    import wandb

    probe(wandb.setup().settings.base_url)
    command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
    environment = dict(os.environ) | {"WANDB_DIR": str(folders[0].parents[1])}  # its own logs
    environment.pop("WANDB_MODE", None)
    process = subprocess.Popen(
        command,
        env={**QUIET, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the client's helper processes end with it
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise NotSent(f"not done after {timeout_s:g} s") from None
    except BaseException:
        _kill(process)
        raise
    if not_taken(folders):
        raise NotSent(_reason(output, process.returncode))
    found = re.search(r"(https?://\S+)/runs/", output)
    return found.group(1) if found else None


def not_taken(folders: Sequence[Path]) -> list[Path]:
    """Those of the runs that the client has not marked as sent (and nobody has replaced since)."""
    return [folder for folder in folders if folder.exists() and not any(folder.glob("*.synced"))]


def probe(url: str) -> None:
    """Whether anything answers there, so that nobody waits for the client's many retries.

    Raises:
        NotSent: nothing does, or nothing but errors.
    """
    request = urllib.request.Request(
        f"{url.rstrip('/')}/graphql",
        data=b'{"query": "query Viewer { viewer { id } }"}',
        headers={"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=PROBE_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500:
            raise NotSent(f"the server {url} answers {error.code}") from error
    except (OSError, ValueError) as error:  # URLError is an OSError; ValueError: not a URL
        cause = getattr(error, "reason", error)
        why = getattr(cause, "strerror", None) or cause
        if isinstance(cause, TimeoutError):
            why = f"no answer in {PROBE_S:g} s"
        raise NotSent(f"the server {url} could not be reached: {why}") from error


def _reason(output: str, status: int) -> str:
    """What the client said last about an error."""
    lines = [line.removeprefix("wandb: ").strip() for line in output.splitlines()]
    found = [re.match(r"error:? (?!find detailed error logs)(.*)", line, re.I) for line in lines]
    errors = [match.group(1).rstrip(".") for match in found if match]
    if errors and errors[-1] == "<no message>":  # what the client makes of an empty 401
        return "the server refused them, as it does when it does not know the API key"
    return redact(errors[-1] if errors else f"`wandb sync` ended with status {status}")


def _kill(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
