"""Data from the Hub: asked once whether it answers, before its library tries for half a minute."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from kvbench.errors import first_line
from kvbench.tasks.base import TaskError

log = logging.getLogger(__name__)

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


def fetch(task: str, repository: str, file: str, revision: str | None, instead: str) -> Path:
    """A file of a data repository on the Hub, on this machine.

    Args:
        instead: what the user may give in its place.

    Raises:
        TaskError: it cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    try:
        with retries_announced_once(f"{task}: {repository}"):
            return Path(
                hf_hub_download(
                    repository,
                    file,
                    repo_type="dataset",
                    revision=revision,
                    local_files_only=not hub_answers(),
                )
            )
    except Exception as problem:
        raise TaskError(
            f"{task}: {file} of {repository} (revision {revision or 'main'}) cannot be fetched "
            f"({type(problem).__name__}); allowed: a network, or {instead}"
        ) from problem


def commit_of(task: str, repository: str, revision: str | None) -> str:
    """The commit of a data repository.

    Raises:
        TaskError: it cannot be read.
    """
    from huggingface_hub import HfApi

    try:
        if not hub_answers():
            raise ConnectionError("the Hub cannot be reached")
        with retries_announced_once(f"{task}: {repository}"):
            return str(HfApi().dataset_info(repository, revision=revision).sha)
    except Exception as problem:
        raise TaskError(
            f"{task}: {repository!r} cannot be read ({type(problem).__name__}); allowed: a dataset on "
            "the Hub, and a network"
        ) from problem


def hub_rows(
    task: str, repository: str, name: str | None, split: str, revision: str | None
) -> list[dict[str, Any]]:
    """Rows of a configuration of a data repository that `datasets` reads by itself.

    Raises:
        TaskError: it cannot be read.
    """
    from datasets import load_dataset

    where = " ".join(part for part in (repository, name, split) if part)
    try:
        if not hub_answers():
            raise ConnectionError("the Hub cannot be reached; allowed: a network, or local files")
        with retries_announced_once(f"{task}: {repository}"):
            rows = load_dataset(
                repository, name=name, split=split, streaming=True, revision=revision
            )
            return [dict(row) for row in rows]
    except Exception as problem:
        raise TaskError(f"{task}: cannot read {where}: {first_line(problem)}") from problem


_LIBRARIES = ("huggingface_hub", "datasets")
_AGAIN = re.compile(
    r"(?:HTTP Error (?P<status>\d+)|'(?P<error>.*)') thrown while requesting"
    r"|(?P<lost>Error while downloading|Got disconnected|Failed to connect)"
)
"""How these libraries begin what they say before they wait and ask again."""


@contextmanager
def retries_announced_once(what: str) -> Iterator[None]:
    """One line of ours when the Hub does not answer and is asked again; the libraries' own warnings, a
    paragraph per attempt and file, are left out. Errors are raised as ever."""
    told = _Retries(what)
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [told], False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate


class _Retries(logging.Handler):
    def __init__(self, what: str) -> None:
        super().__init__(logging.WARNING)
        self.what = what
        self.said = False

    def emit(self, record: logging.LogRecord) -> None:
        found = _AGAIN.match(record.getMessage())
        if found is None or self.said:
            return
        self.said = True
        status, error = found["status"], found["error"] or found["lost"]
        answer = f"answers {status}" if status else f"does not answer ({error})"
        log.warning("%s: the Hub %s; asking again, for half a minute or so", self.what, answer)
