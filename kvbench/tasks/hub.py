"""Whether the Hub can be reached, asked once before its library tries for half a minute."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

ANSWER_S = 5.0
"""Seconds within which the Hub must answer at all."""


def hub_answers() -> bool:
    """Whether the Hub accepts a connection. True too behind a proxy and where the library was told to
    stay offline: there it decides itself, at once."""
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
