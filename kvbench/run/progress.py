"""Progress on a terminal (a bar) or in a log (a line now and then)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)

SECONDS_BETWEEN_LINES = 15.0
PREPARING = "loading the data and the model"
"""Before the first example."""


@dataclass
class Progress:
    """What a progress display is told: units done of all, running mean score per method."""

    total: int
    done: int = 0
    scores: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, method: str, score: float | None) -> None:
        """Count one record."""
        if score is not None:
            total, count = self.scores.get(method, (0.0, 0))
            self.scores[method] = (total + score, count + 1)

    def __str__(self) -> str:
        """Mean score so far per method, e.g. ``snapkv 0.82  h2o 0.45``."""
        return "  ".join(f"{name} {total / n:.2f}" for name, (total, n) in self.scores.items())


@contextmanager
def progress_display(title: str) -> Iterator[Callable[[Progress], None]]:
    """A function to call with the job's progress: examples done, scores so far, time left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _log_lines(title)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[scores]}", style="dim", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{title}: {PREPARING}", total=None, scores="")

        def show(progress: Progress) -> None:
            bar.update(task, total=progress.total, completed=progress.done, description=title)
            bar.update(task, scores=str(progress))

        yield show


def _log_lines(title: str) -> Callable[[Progress], None]:
    start = last = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.done < progress.total and now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        rest = progress.total - progress.done
        left = (now - start) / progress.done * rest if progress.done else 0
        print(
            f"{title}: {progress.done}/{progress.total}, about {left:.0f} s left; {progress}",
            file=sys.stderr,
            flush=True,
        )

    return show
