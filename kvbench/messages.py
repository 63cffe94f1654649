"""What is said about an error: one line that a terminal, a record and a log can hold, without secrets,
whatever the error's own message is."""

from __future__ import annotations

import logging
import sys
import traceback
import unicodedata

from kvbench.secrets import redact

LONGEST = 1000
"""Characters of a message that a reader gets to see."""


def presentable(text: str) -> str:
    """One line: no line ends, no control characters, no secrets, and of a very long one both ends."""
    text = redact(text)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 300]} [...] {text[-300:]}"
    return printable(text)


def printable(text: str) -> str:
    """Text whose characters are all to be seen: control characters, escape sequences, line ends, marks
    that turn the direction of writing and halves of characters stand as their codes."""
    if text.isprintable():
        return text
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in _UNSEEN else c for c in text)


_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def text_of(error: BaseException) -> str:
    """The error's message. Some errors fail to tell it: then that."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - code of whoever wrote the error's class
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
        """As `logging.Formatter`."""
        return "\n".join(map(printable, redact(super().format(record)).split("\n")))


def complain(message: str, program: str = "kvbench") -> None:
    """One line on stderr, whatever is in the message; see `presentable`."""
    print(f"{program}: {presentable(message)}", file=sys.stderr, flush=True)


def disk_line(error: OSError) -> str:
    """The file, where one is known, and what is wrong with it."""
    where = f"{error.filename}: " if error.filename else ""
    return where + (error.strerror or " ".join(str(error).split()) or type(error).__name__)
