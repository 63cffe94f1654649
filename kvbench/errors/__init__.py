"""What a user is told when something is wrong: one line that names the thing, its value and what is
allowed, without secrets, whatever the error's own message is."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

T = TypeVar("T")

FAILED, USAGE = 1, 2
"""Exit statuses: something failed; the command cannot be followed."""


class UserError(Exception):
    """An error whose message is one line for the user: the thing, its value, what is allowed.

    Attributes:
        status: the command's exit status.
    """

    status: ClassVar[int] = USAGE


def needs_extra(package: str, extra: str) -> str:
    """One line for a package that is missing, with the command that installs it."""
    return f"{package} is not installed; allowed: pip install 'kvbench[{extra}]'"


def nearest(word: str, allowed: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` when something allowed is close to `word`, else an empty string."""
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def presentable(text: str) -> str:
    """One line: no line ends, no control characters, no secrets, and of a very long one both ends."""
    text = redact(text)
    if len(text) > 1000:
        text = f"{text[:700]} [...] {text[-300:]}"
    return printable(text)


def printable(text: str) -> str:
    """Text whose characters are all to be seen: control characters, escape sequences, line ends, marks
    that turn the direction of writing and halves of characters stand as their codes."""
    if text.isprintable():
        return text
    unseen = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in unseen else c for c in text)


def printable_lines(text: str) -> str:
    """`printable` of every line; line ends stay."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def text_of(error: BaseException) -> str:
    """The error's message. Some errors fail to tell it: then that."""
    try:
        return str(error)
    except BaseException as failure:  # noqa: BLE001 - code of whoever wrote the error's class
        return f"(its message is not to be had: {type(failure).__name__})"


def first_line(error: BaseException) -> str:
    """The first line of the error's message and what it announces; the error's type where it has
    none."""
    lines = redact(text_of(error)).strip().splitlines()
    if not lines:
        return type(error).__name__
    return presentable(" ".join(map(str.strip, lines[: 2 if lines[0].endswith(":") else 1])))


def one_line(error: BaseException) -> str:
    """An error as one line: its type and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def traceback_of(error: BaseException) -> str:
    """The error's traceback as Python prints it, without secrets."""
    return redact("".join(traceback.format_exception(error)))


class LogLine(logging.Formatter):
    """Log messages, tracebacks included, without secrets: any library's, and Hydra's, which repeat what
    was typed."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text, without secrets and control characters."""
        return "\n".join(map(printable, redact(super().format(record)).split("\n")))


def complain(message: str, program: str = "kvbench") -> None:
    """One line on stderr, whatever is in the message; see `presentable`."""
    print(f"{program}: {presentable(message)}", file=sys.stderr, flush=True)


def disk_line(error: OSError) -> str:
    """The file, where one is known, and what is wrong with it."""
    where = f"{error.filename}: " if error.filename else ""
    return where + (error.strerror or " ".join(str(error).split()) or type(error).__name__)


HIDDEN = "***"

_NAMES = r"token|api_?key|access_?key|secret|password|passwd|credentials?"
_SECRET_NAME = re.compile(rf"(?:^|[_.\-])(?:{_NAMES})$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    rf"(?:{_NAMES})(?:_|$)|(?:^|_)(?:key|pass|passphrase|auth)$", re.IGNORECASE
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|(?:wandb_v1_|local-)[A-Za-z0-9_]{20,}"  # W&B, beside the bare 40 hex digits below
    r"|(?:sk|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,})\b"  # others of the trade
    r"|(?<=://)[^/\s@:]+:[^/\s@]+(?=@)"  # user:password@host
)
_BARE_KEY = re.compile(rf"((?:{_NAMES})['\"]?\s*[=:]\s*['\"]?)([^\s,'\"}}\]]+)", re.IGNORECASE)


def names_a_secret(key: str) -> bool:
    """Whether a config key, e.g. ``hydra.job.env_set.HF_TOKEN``, is one whose value must not be kept."""
    return bool(_SECRET_NAME.search(key))


def redact(value: T, known: Sequence[str] | None = None) -> T:
    """`value` (text, or JSON values that hold text) without tokens and keys.

    Hidden are the values of the environment's variables that are named like a secret, what follows
    such a name and ``=`` or ``:``, and what is shaped like a token of a known service.

    Args:
        known: those values, where they are known.
    """
    known = environment_secrets() if known is None else known
    redacted: Any = value
    if isinstance(value, str):
        for secret in known:
            redacted = redacted.replace(secret, HIDDEN)
        redacted = _BARE_KEY.sub(rf"\1{HIDDEN}", _SHAPES.sub(HIDDEN, redacted))
    elif isinstance(value, Mapping):
        redacted = {
            key: HIDDEN
            if isinstance(item, str) and names_a_secret(str(key))
            else redact(item, known)
            for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        redacted = [redact(item, known) for item in value]
    return redacted


def without_keys(text: str) -> str:
    """`text`, or JSON, without the values of the environment's variables named like a secret."""
    for secret in environment_secrets():
        text = text.replace(secret, HIDDEN)
    return text


def environment_secrets() -> list[str]:
    """Secrets of the environment, as they are and as a URL and JSON have them, the longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= 8  # hiding every "1" would garble
    }
    forms = (quote(value, safe="") for value in found)
    written = (json.dumps(value, ensure_ascii=False)[1:-1] for value in found)
    return sorted({*found, *forms, *written}, key=len, reverse=True)
