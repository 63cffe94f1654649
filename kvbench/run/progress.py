"""What a job does and how far it is, on stderr: on a terminal a line that changes, else one now and
then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch.compiler import is_compiling
from torch.nn import Module, ModuleList

from kvbench.engine.prefill import PrefillState
from kvbench.errors import complain, presentable

SECONDS_BETWEEN_LINES = 15.0
"""Seconds between two lines of a log. On a terminal the line changes ten times a second."""


class Progress:
    """How far a job is, in tokens that were read or generated.

    Args:
        show: shows the progress. It is called at every layer of a forward pass with False, when it may
            skip the call, and with True when the line must be shown.

    Attributes:
        doing: what happens now, in words.
        total, done: units of the job, and those of them that have all their records.
        on_unit: called with `means` when a unit is done.
    """

    def __init__(
        self, show: Callable[[Progress, bool], None] = lambda progress, force: None
    ) -> None:
        self.doing, self.total, self.done = "loading the data and the model", 0, 0
        self.on_unit: Callable[[dict[str, float]], None] = lambda means: None
        self._sums: dict[str, tuple[float, int]] = {}
        self._show = show
        self._costs: list[float] = []
        self._passed, self._began, self._step, self._most = 0.0, time.monotonic(), 0, 0
        show(self, True)

    def begin(self, work: Sequence[tuple[Any, Any]], total: int) -> None:
        """Note what there is to do, before the first unit runs.

        Args:
            work: the units that lack records, each with the methods that it is to be run with.
            total: all units of the job.
        """
        self.total, self.done = total, total - len(work)
        for unit, methods in work:
            answers = [encoded.example.max_new_tokens for encoded in unit.examples]
            self._most = max([self._most, *answers])
            prompt = unit.examples[0].n if unit.examples else 0
            self._costs.append(prompt + len(methods) * sum(answers) or 1)
        self._began, self.doing = time.monotonic(), f"{self.done} of {total} on disk"
        self._show(self, self.done > 0)

    def add(self, method: str, values: Mapping[str, float | None]) -> None:
        """Count one record, by its score and other measures."""
        for name, value in values.items():
            if value is not None:
                total, count = self._sums.get(f"{method}/{name}", (0.0, 0))
                self._sums[f"{method}/{name}"] = total + value, count + 1

    @property
    def means(self) -> dict[str, float]:
        """Means of the records so far, by ``<method>/<measure>``."""
        return {name: total / count for name, (total, count) in self._sums.items()}

    def unit_done(self) -> None:
        """Count one unit."""
        self.done += 1
        self.on_unit(self.means)
        self.doing = "done" if self.done == self.total else self.doing
        self._passed = sum(self._costs[: len(self._costs) - (self.total - self.done)])
        self._show(self, self.done == self.total)

    @property
    def left(self) -> float | None:
        """Seconds that are left if the rest takes as long per token; None before the first token."""
        total = sum(self._costs)
        passed = min(self._passed, total)
        if not passed:
            return None
        return (time.monotonic() - self._began) * (total - passed) / passed

    def __str__(self) -> str:
        """One line: units done, what happens now, the time left, and each method's mean score so far."""
        left = [] if self.left is None else [f"about {self.left:.0f} s left"]
        means = "  ".join(
            f"{name.removesuffix('/score')} {mean:.2f}"
            for name, mean in self.means.items()
            if name.endswith("/score")
        )
        done = [f"{self.done}/{self.total}"] if self.total else []
        return "; ".join(filter(None, [", ".join([*done, self.doing, *left]), means]))

    @contextmanager
    def watching(self, model: Module) -> Iterator[None]:
        """Within this context the model's forward passes are shown, layer by layer."""
        layers = max((m for m in model.modules() if isinstance(m, ModuleList)), key=len)
        place, layer = {module: number for number, module in enumerate(layers, 1)}, 0
        shape, methods, first = (1, 1), "", True

        def begun(_: Module, args: Any, named: dict[str, Any]) -> None:
            nonlocal shape, methods
            if is_compiling():  # this code would split a compiled step into several graphs
                return
            shape = tuple((args[0] if args else named["input_ids"]).shape)
            self._step = self._step + 1 if shape[1] == 1 else 0
            state = named.get("kvbench")
            labels = dict.fromkeys(fork.label for fork in getattr(state, "forks", ()))
            methods = f"{len(labels)} methods" if len(labels) > 1 else " ".join(labels)
            if isinstance(state, PrefillState):
                state.on_compress = compressing

        def compressing(label: str) -> None:
            where = f"{label} compresses layer {layer} of {len(layers)}"
            self.doing = f"prefill of {shape[1]:,} tokens: {where}"
            self._show(self, False)

        def layer_begun(module: Module, _: Any) -> None:
            nonlocal first, layer
            if is_compiling():
                return
            layer, (rows, tokens) = place[module], shape
            self.doing = f"prefill of {tokens:,} tokens: layer {layer} of {len(layers)}"
            if tokens == 1:
                self.doing = f"decoding {methods}, token {self._step} of {self._most}"
            self._show(self, first)
            self._passed += rows * tokens / len(layers)
            first = False

        hooks = [model.register_forward_pre_hook(begun, with_kwargs=True)]
        hooks += [module.register_forward_pre_hook(layer_begun) for module in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def progress_display(title: str) -> Iterator[Progress]:
    """Within this context a job's progress is shown on stderr after its title."""
    console, last_shown = Console(stderr=True), -math.inf
    status = console.status(title) if console.is_terminal else None
    pause = SECONDS_BETWEEN_LINES if status is None else 0.1

    def show(progress: Progress, force: bool) -> None:
        nonlocal last_shown
        if force or time.monotonic() - last_shown >= pause:
            last_shown = time.monotonic()
            line = presentable(f"{title}: {progress}")
            if status is None:
                complain(line)
            else:
                status.update(escape(line))

    with status or nullcontext():
        yield Progress(show)
