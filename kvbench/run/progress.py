"""Shows on stderr what a job does and how far it is: on a terminal in a line that changes, elsewhere in
a new line every 15 seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch.compiler import is_compiling
from torch.nn import Module, ModuleList

from kvbench.engine.prefill import Prefill
from kvbench.errors import complain, presentable

SECONDS_BETWEEN_LINES = 15.0
"""Seconds between two lines where stderr is no terminal. On a terminal the line changes ten times a
second."""
MOST_MEANS = 5
"""The mean scores that a line shows: those of the job's first methods."""


class Progress:
    """How far a job is.

    Args:
        show: called with the progress, and whether it must be shown. At every layer of a forward pass
            that is False: `show` may then do nothing.

    Attributes:
        done: the number of items, of `total`, that have all their records.
    """

    def __init__(
        self, show: Callable[[Progress, bool], None] = lambda progress, force: None
    ) -> None:
        self.doing = "loading the data and the model"
        self.total = 0
        self.done = 0
        self._scores: dict[str, list[float]] = {}
        self._show = show
        self._began = time.monotonic()
        self._on_disk = 0
        self._step = 0
        self._most_new_tokens = 0
        show(self, True)

    def begin(
        self, work: Sequence[tuple[Any, Any]], total: int, labels: Iterable[str] = ()
    ) -> None:
        """Note the items that lack records, each with its methods, of `total` items in all, and the
        labels of the job's methods, in the order in which a line shows their scores."""
        self.total = total
        self.done = self._on_disk = total - len(work)
        examples = [encoded.example for item, _ in work for encoded in item.examples]
        self._most_new_tokens = max((example.max_new_tokens for example in examples), default=0)
        self._scores = {label: [] for label in labels}
        self._began = time.monotonic()
        self.doing = f"{self.done} of {total} on disk"
        self._show(self, self.done > 0)

    def item_done(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Note an item's records, which are on disk."""
        for record in records:
            if record.get("score") is not None:
                self._scores.setdefault(record["method"], []).append(record["score"])
        self.done += 1
        if self.done == self.total:
            self.doing = "done"
        self._show(self, self.done == self.total)

    @property
    def left(self) -> float | None:
        """The seconds that the remaining items take if each takes the mean of those so far; None before
        the end of the first item."""
        if self.done == self._on_disk:
            return None
        of_one = (time.monotonic() - self._began) / (self.done - self._on_disk)
        return of_one * (self.total - self.done)

    def __str__(self) -> str:
        parts = [self.doing]
        if self.total:
            parts.insert(0, f"{self.done}/{self.total}")
        if self.left is not None:
            parts.append(f"about {self.left:.0f} s left")
        means = [f"{label} {fmean(scores):.2f}" for label, scores in self._scores.items() if scores]
        if len(means) > MOST_MEANS:
            means[MOST_MEANS:] = [f"and {len(means) - MOST_MEANS} more"]
        return ", ".join(parts) + ("; " if means else "") + "  ".join(means)

    @contextmanager
    def watching(self, model: Module) -> Iterator[None]:
        """Show the model's forward passes, layer by layer, while the context lasts."""
        layers = decoder_layers(model)
        numbers = {module: number for number, module in enumerate(layers, 1)}
        layer = 0  # the number of the layer that runs
        shape = (1, 1)  # rows and tokens of the pass
        methods = ""
        nothing_shown = True

        def pass_begins(_: Module, args: Any, keywords: dict[str, Any]) -> None:
            nonlocal shape, methods
            if is_compiling():  # traced, this code would split a compiled step into several graphs
                return
            ids = args[0] if args else keywords["input_ids"]
            shape = tuple(ids.shape)
            self._step = self._step + 1 if shape[1] == 1 else 0
            state = keywords.get("kvbench")
            labels = dict.fromkeys(row.label for row in getattr(state, "rows", ()))
            methods = f"{len(labels)} methods" if len(labels) > 1 else " ".join(labels)
            if isinstance(state, Prefill):
                state.on_compress = compressing

        def compressing(label: str) -> None:
            where = f"{label} compresses layer {layer} of {len(layers)}"
            self.doing = f"prefill of {shape[1]:,} tokens: {where}"
            self._show(self, False)

        def layer_begins(module: Module, _: Any) -> None:
            nonlocal nothing_shown, layer
            # A token of no method asks the layers how they rotate (`kvbench.engine.rotary`).
            if is_compiling() or (shape[1] == 1 and not methods):
                return
            layer = numbers[module]
            _, tokens = shape
            self.doing = f"prefill of {tokens:,} tokens: layer {layer} of {len(layers)}"
            if tokens == 1:
                self.doing = f"decoding {methods}, token {self._step} of {self._most_new_tokens}"
            self._show(self, nothing_shown)
            nothing_shown = False

        hooks = [model.register_forward_pre_hook(pass_begins, with_kwargs=True)]
        hooks += [module.register_forward_pre_hook(layer_begins) for module in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def decoder_layers(model: Module) -> ModuleList:
    """The layers of the model: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, ModuleList)]
    return max(lists, key=len)


@contextmanager
def progress_display(title: str) -> Iterator[Progress]:
    """Show a job's progress on stderr, after its title, while the context lasts."""
    console = Console(stderr=True)
    last_shown = -math.inf
    status = console.status(title) if console.is_terminal else None
    pause = SECONDS_BETWEEN_LINES if status is None else 0.1

    def show(progress: Progress, force: bool) -> None:
        nonlocal last_shown
        if force or time.monotonic() - last_shown >= pause:
            last_shown = time.monotonic()
            line = f"{title}: {progress}"
            if status is None:
                complain(line)
            else:
                status.update(escape(presentable(line)))

    with status or nullcontext():
        yield Progress(show)
