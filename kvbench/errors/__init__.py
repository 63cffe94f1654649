"""Error messages for users: one line that names the setting or file, its value and what is allowed, with
no secret and no control character in it, whatever the message of the error itself."""

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
"""Exit statuses: something failed while running; the command itself is wrong."""


class UserError(Exception):
    """An error whose message is one line for the user: what is wrong, its value, what is allowed.

    Attributes:
        status: the command's exit status.
    """

    status: ClassVar[int] = USAGE


def needs_extra(package: str, extra: str) -> str:
    """One line for a package that is missing, with the command that installs it."""
    return f"{package} is not installed; try: pip install 'kvbench[{extra}]'"


def nearest(word: str, allowed: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` when something allowed is close to `word`, else an empty string. A class
    of another library, such as kvpress's SnapKVPress, is close to its name here, and its
    compression_ratio to the rate that is left."""

    def bare(name: str) -> str:
        return re.sub(r"[\W_]", "", name).lower().removesuffix("press")

    if word == "compression_ratio" and "total_rate" in allowed:
        return " (did you mean 'total_rate', which is 1 - compression_ratio?)"
    same = [name for name in allowed if bare(name) == bare(word) != ""]
    close = same or difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    if word.endswith("Press") and not same:  # close to all that ends so
        close = []
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_known(what: str, name: str, known: Sequence[str], error: type[UserError]) -> None:
    """Refuse a name that is not among the known ones; `what` begins the message, such as ``unknown
    method 'snapvk'``."""
    if name not in known:
        raise error(f"{what}{nearest(name, known)}; allowed: {', '.join(known) or 'none'}")


def presentable(text: str) -> str:
    """`text` as one line without secrets and control characters. Of more than 1,000 characters the first
    700 and the last 300 stay."""
    text = redact(text)
    if len(text) > 1000:
        text = f"{text[:700]} [...] {text[-300:]}"
    return printable(text)


def printable(text: str) -> str:
    """`text` with the escape code, e.g. ``\\x1b``, of every character that is not visible: control
    characters, line ends, marks of the writing direction, halves of surrogate pairs."""
    if text.isprintable():
        return text
    invisible = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in invisible else c for c in text)


def printable_lines(text: str) -> str:
    """`text` with `printable` applied to each line, so that line ends stay."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def first_line(error: BaseException) -> str:
    """The first line of the error's message, with the second where the first ends in a colon; the name
    of the error's type where the message is empty."""
    lines = [line.strip() for line in redact(str(error)).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return presentable(" ".join(lines[: 2 if lines[0].endswith(":") else 1]))


def one_line(error: BaseException) -> str:
    """The name of the error's type and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def traceback_of(error: BaseException) -> str:
    """The error's traceback as Python prints it, without secrets and control characters."""
    return printable_lines(redact("".join(traceback.format_exception(error))))


class LogLine(logging.Formatter):
    """Formats log messages and their tracebacks without secrets: messages of any library, among them
    Hydra's, which repeat the overrides that the user typed."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(redact(super().format(record)))


def complain(message: str, program: str = "kvbench") -> None:
    """Print the message on stderr as one line, see `presentable`, after the program's name."""
    print(f"{program}: {presentable(message)}", file=sys.stderr, flush=True)


def disk_line(error: OSError) -> str:
    """One line for an error of the file system: the file, where one is known, and the reason."""
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
    r"|(?:sk|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,})\b"  # OpenAI, GitHub, GitLab, Slack
    r"|(?<=://)[^/\s@:]+:[^/\s@]+(?=@)"  # user:password@host
)
_BARE_KEY = re.compile(rf"((?:{_NAMES})['\"]?\s*[=:]\s*['\"]?)([^\s,'\"}}\]]+)", re.IGNORECASE)


def names_a_secret(key: str) -> bool:
    """Whether a config key, e.g. ``hydra.job.env_set.HF_TOKEN``, has the name of a secret, whose value
    results must not hold."""
    return bool(_SECRET_NAME.search(key))


def redact(value: T) -> T:
    """A copy of `value`, text or JSON values that hold text, with `HIDDEN` in place of tokens and keys:
    what `without_keys` replaces, any text that follows the name of a secret and ``=`` or ``:``, and
    text in the shape of a known service's tokens."""
    redacted: Any = value
    if isinstance(value, str):
        redacted = _SHAPES.sub(HIDDEN, without_keys(value))
        redacted = _BARE_KEY.sub(rf"\1{HIDDEN}", redacted)
    elif isinstance(value, Mapping):
        redacted = {
            key: HIDDEN if isinstance(item, str) and names_a_secret(str(key)) else redact(item)
            for key, item in value.items()
        }
    elif isinstance(value, list | tuple):
        redacted = [redact(item) for item in value]
    return redacted


def without_keys(text: str) -> str:
    """`text`, which may be JSON, with `HIDDEN` in place of the values of environment variables that are
    named like a secret, each also as it is written in a URL and in JSON."""
    secrets = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= 8  # to hide every "1" would garble text
    }
    in_urls = {quote(value, safe="") for value in secrets}
    in_json = {json.dumps(value, ensure_ascii=False)[1:-1] for value in secrets}
    # The longest first, so that no part of one is replaced before all of it.
    for secret in sorted(secrets | in_urls | in_json, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
