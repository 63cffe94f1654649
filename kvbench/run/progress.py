"""Progress on a terminal (a bar) or in a log (a line now and then)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from kvbench.run.runner import Progress

SECONDS_BETWEEN_LINES = 15.0
MANY = 100
"""Things from which on counting them is worth a line."""
T = TypeVar("T")


def with_progress(things: Sequence[T], title: str) -> Iterator[T]:
    """The things, with a bar that counts them; where there is no terminal, a line now and then. Few
    things come without."""
    console = Console(stderr=True)
    if len(things) < MANY:
        yield from things
    elif console.is_terminal:
        yield from track(things, title, console=console, transient=True)
    else:
        last = time.monotonic()
        for done, thing in enumerate(things):
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                print(f"{title}: {done}/{len(things)}", file=sys.stderr, flush=True)
            yield thing


PREPARING = "loading the data and the model"
"""Before the first example."""
_BESIDE_TITLE = 60
"""Characters of the bar, the counts and the time left."""


def _scores(progress: Progress) -> str:
    """Mean score so far per method, e.g. ``snapkv 0.82  h2o 0.45``."""
    return "  ".join(
        f"{name} {total / count:.2f}" for name, (total, count) in progress.scores.items()
    )


class _JobBar(Bar):
    """Bar, count and time left in one line, whatever the terminal's width; the job's name before it
    where there is room, else above; the scores below."""

    def get_renderables(self) -> Iterator[RenderableType]:
        """As `rich.progress.Progress` asks."""
        for task in self.tasks:
            name, scores = Text(str(task.fields["name"])), str(task.fields["scores"])
            if cell_len(name.plain) + _BESIDE_TITLE > self.console.width:
                yield name
                name = Text("")
            line = Table.grid(padding=(0, 1))
            line.add_row(name, *(c(task) for c in self.columns if not isinstance(c, str)))
            yield line
            if scores:  # a name and its score stay together
                yield Text(
                    "  ".join(s.replace(" ", "\N{NO-BREAK SPACE}") for s in scores.split("  ")),
                    "dim",
                )


def bar_columns() -> tuple[ProgressColumn, ...]:
    """What the line of the bar has."""
    return (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )


@contextmanager
def progress_display(title: str) -> Iterator[Callable[[Progress], None]]:
    """A function to call with the job's progress: examples done, scores so far, time left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _log_lines(title)
        return
    bar = _JobBar(*bar_columns(), console=console, transient=True)
    with bar, _logs_above_the_bar():
        task = bar.add_task("", total=None, name=f"{title}: {PREPARING}", scores="")

        def show(progress: Progress) -> None:
            bar.update(
                task,
                total=progress.total,
                completed=progress.done,
                name=title,
                scores=_scores(progress),
            )

        yield show


@contextmanager
def _logs_above_the_bar() -> Iterator[None]:
    """Log handlers that write to the terminal write through the bar, which moves out of their way."""
    terminal = (sys.__stdout__, sys.__stderr__)
    names = [None, *logging.root.manager.loggerDict]
    moved = [
        (handler, handler.stream)
        for name in names
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in terminal
    ]
    for handler, _ in moved:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _log_lines(title: str) -> Callable[[Progress], None]:
    start = last = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        finished = progress.done == progress.total
        if not finished and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = (
            (now - start) / progress.done * (progress.total - progress.done) if progress.done else 0
        )
        print(
            f"{title}: {progress.done}/{progress.total}, about {left:.0f} s left; {_scores(progress)}",
            file=sys.stderr,
            flush=True,
        )

    return show
