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
"""Of a log; a terminal's line changes ten times a second."""


class Progress:
    """How far a job is, in tokens that were read or generated.

    Args:
        tell: shows it; called often, and with True when it matters.

    Attributes:
        doing: what happens now. total, done: units of the job, and those that have all their records.
        on_unit: called with `means` when a unit is done.
    """

    def __init__(self, tell: Callable[[Progress, bool], None] = lambda progress, now: None) -> None:
        self.doing, self.total, self.done = "loading the data and the model", 0, 0
        self.on_unit: Callable[[dict[str, float]], None] = lambda means: None
        self._sums: dict[str, tuple[float, int]] = {}
        self._tell = tell
        self._costs: list[float] = []
        self._passed, self._began, self._step, self._most = 0.0, time.monotonic(), 0, 0
        tell(self, True)

    def begin(self, work: Sequence[tuple[Any, Any]], total: int) -> None:
        """Say what of so many units is on disk already, before the first of the others runs."""
        self.total, self.done = total, total - len(work)
        lengths = [[e.example.max_new_tokens for e in unit.examples] for unit, _ in work]
        self._most = max((n for each in lengths for n in each), default=0)
        for (unit, methods), each in zip(work, lengths, strict=True):
            self._costs.append(sum(e.n for e in unit.examples[:1]) + len(methods) * sum(each) or 1)
        self._began, self.doing = time.monotonic(), f"{self.done} of {total} on disk"
        self._tell(self, self.done > 0)

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
        self._tell(self, self.done == self.total)

    @property
    def left(self) -> float | None:
        """Seconds, if the rest takes as long per token; None before the first token."""
        every = sum(self._costs)
        passed = min(self._passed, every)
        return (time.monotonic() - self._began) * (every - passed) / passed if passed else None

    def __str__(self) -> str:
        """How far it is, what happens now, time left, and the mean score so far per method."""
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
        """While this lasts, the model's forward passes are what happens now."""
        layers = max((m for m in model.modules() if isinstance(m, ModuleList)), key=len)
        place, layer = {module: number for number, module in enumerate(layers, 1)}, 0
        shape, methods, first = (1, 1), "", True

        def begun(_: Module, args: Any, named: dict[str, Any]) -> None:
            nonlocal shape, methods
            if is_compiling():  # steps that are compiled hold none of this, which would split them
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
            self._tell(self, False)

        def layer_begun(module: Module, _: Any) -> None:
            nonlocal first, layer
            if is_compiling():
                return
            layer, (rows, tokens) = place[module], shape
            self.doing = f"prefill of {tokens:,} tokens: layer {layer} of {len(layers)}"
            if tokens == 1:
                self.doing = f"decoding {methods}, token {self._step} of {self._most}"
            self._tell(self, first)
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
    """A job's progress, shown under its title for as long as this lasts."""
    console, told = Console(stderr=True), -math.inf
    shown = console.status(title) if console.is_terminal else None
    every = SECONDS_BETWEEN_LINES if shown is None else 0.1

    def tell(progress: Progress, now: bool) -> None:
        nonlocal told
        if now or time.monotonic() - told >= every:
            told = time.monotonic()
            line = presentable(f"{title}: {progress}")
            complain(line) if shown is None else shown.update(escape(line))

    with shown or nullcontext():
        yield Progress(tell)
