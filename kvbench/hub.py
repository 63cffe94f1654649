"""Access to the Hugging Face Hub: whether it can be reached, and its libraries without their warnings.

One connection checks that the Hub answers before one of its libraries is used: without an answer, the
library itself would retry for half a minute.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

ANSWER_S = 5.0
"""The longest time to wait for a connection to the Hub, in seconds."""


def hub_answers() -> bool:
    """Whether the Hub accepts a connection. In offline mode and behind a proxy the answer is True
    without trying, since the Hub's library then succeeds or fails without delay."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or getproxies():
        return True
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Suppress the warnings of the Hub's libraries within this context: they print a paragraph for every
    file and retry. Errors are raised as usual."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
