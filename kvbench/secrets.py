"""Tokens and keys stay out of everything that is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

T = TypeVar("T")

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
_SHORTEST = 8
"""Characters below which a variable's value is no secret: hiding every "1" would garble the text."""


def names_a_secret(key: str) -> bool:
    """Whether a config key, e.g. ``hydra.job.env_set.HF_TOKEN``, is one whose value must not be kept."""
    return bool(_SECRET_NAME.search(key))


def redact(value: T) -> T:
    """`value` (text, or JSON values that hold text) without tokens and keys.

    Hidden are the values of the environment's variables that are named like a secret, what follows
    such a name and ``=`` or ``:``, and what is shaped like a token of a known service.
    """
    return _redacted(value, _environment())


def _environment() -> list[str]:
    """Secrets of the environment, as they are and as a URL has them, the longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST
    }
    return sorted(found | {quote(value, safe="") for value in found}, key=len, reverse=True)


def _redacted(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
        return _BARE_KEY.sub(rf"\1{HIDDEN}", _SHAPES.sub(HIDDEN, value))
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if isinstance(item, str) and names_a_secret(str(key))
            else _redacted(item, known)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item, known) for item in value]
    return value
