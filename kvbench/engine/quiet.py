"""No progress bars of the libraries where nobody watches them, and no reports that are ours to make."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """transformers' bars ("Loading weights") only on a terminal; afterwards as before."""
    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


@contextmanager
def without_reports() -> Iterator[None]:
    """No lines of transformers about a checkpoint: what is wrong with one becomes a line of ours."""
    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.ERROR))
    try:
        yield
    finally:
        logging.set_verbosity(before)
