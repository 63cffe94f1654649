"""``kvbench list`` and ``kvbench show``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.catalogue import KINDS, catalogue
from kvbench.cli.check import UsageError, check_command, resolved
from kvbench.cli.compose import job_config
from kvbench.cli.papers import experiment_lines
from kvbench.errors import nearest, redact
from kvbench.report.tables.differences import PaperError, comments_on


def list_kind(arguments: Sequence[str]) -> int:
    """``kvbench list <kind>``."""
    kinds = ", ".join(KINDS)
    if len(arguments) != 1:
        raise UsageError(f"list takes one of: {kinds}")
    kind = arguments[0] if arguments[0].endswith("s") else arguments[0] + "s"
    if kind not in KINDS:
        raise UsageError(f"cannot list {arguments[0]!r}{nearest(kind, KINDS)}; allowed: {kinds}")
    lines = experiment_lines() if kind == "experiments" else catalogue(kind)
    width = max(map(len, lines), default=0)
    bold, plain = ("\033[1m", "\033[0m") if _colours() else ("", "")
    for name, text in lines.items():
        print(f"{bold}{name:{width}}{plain}  {text}".rstrip())
    return 0


def _colours() -> bool:
    """On a terminal that has them, unless the user said no."""
    dumb = os.environ.get("TERM") == "dumb" or "NO_COLOR" in os.environ
    return sys.stdout.isatty() and not dumb


def show_config(arguments: Sequence[str]) -> int:
    """``kvbench show key=value ...``: the config these overrides compose to, resolved; above it, as
    comments, how the experiment differs from the paper that it stands beside."""
    for argument in arguments:
        if argument.startswith("-"):
            raise UsageError(f"show has no option {argument!r}; allowed: key=value")
    config = check_command(arguments, sweep=False).first
    try:
        job = resolved(job_config(config))
        shown = OmegaConf.to_yaml(job)
        comments = comments_on(job.get("paper_table"))
    except (
        OmegaConfBaseException,
        PaperError,
    ) as error:  # e.g. an interpolation that leads nowhere
        raise UsageError(" ".join(str(error).split())) from error
    print(redact("".join(f"{line}\n" for line in comments) + shown), end="")
    return 0
