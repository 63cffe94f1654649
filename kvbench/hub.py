"""Whether the Hub can be reached, and without its libraries' warnings.

Before a library of the Hub is used, one connection checks that the Hub answers, since the library
retries for half a minute.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

ANSWER_S = 5.0
"""The most seconds to wait for a connection to the Hub."""


def hub_answers() -> bool:
    """Whether the Hub accepts a connection. Behind a proxy or in offline mode this is not checked and
    True, since the Hub's library then decides without delay."""
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
    """Suppress the warnings of the Hub's libraries, which print a paragraph for every file and retry.
    Errors are raised as usual."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
