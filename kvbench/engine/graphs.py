"""Decode steps as a captured CUDA graph: one launch a token in place of a thousand.

A step is captured after the first few have run as they are (so that every kernel is compiled and every
library ready), and replayed for the tokens that follow, and for later prompts of like rows. That is
sound because a step, once its rows are fixed, does the same launches on the same buffers: the new
token's id and position, the number of entries of every row, where they lie and the entries themselves
are read and written on the device (`kvbench.engine.decoding`). Where a step cannot be captured, decoding
goes on step by step, and says so once. Rows that decode alone take their steps apart from those of a
graph (`kvbench.engine.rows.decode_rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.faults import is_out_of_memory
from kvbench.engine.states import is_hybrid
from kvbench.errors import first_line
from kvbench.kv import KVError

log = logging.getLogger(__name__)

DECODES = ("auto", "eager", "graph", "compiled")
"""How decode steps run: all but ``eager`` capture them where that is possible; ``compiled`` has torch
compile the model for them before, which fuses a layer's norms and position encoding (12 launches and the
three of our attention, where eager steps have 44), and takes seconds."""

FIRST_STEPS = 3
"""Steps that run as they are before one is captured."""

WORTH_STEPS = 16
"""Steps to come below which capturing costs more than it saves."""


def check_decode(value: object, device: torch.device) -> str:
    """`value`, if it names a way to decode on this device.

    Raises:
        KVError: otherwise.
    """
    if value not in DECODES:
        raise KVError(f"decode is {value!r}; allowed: {', '.join(DECODES)}")
    if value == "graph" and device.type != "cuda":
        others = ", ".join(other for other in DECODES if other != value)
        raise KVError(f"decode is 'graph' and the device is {device}; allowed there: {others}")
    return str(value)


class StepGraphs:
    """How the decode steps of one model run.

    Args:
        decode: one of `DECODES`.
        most: captured steps that are kept, each with the memory of a step; 0 where the model may change
            between two batches (its adapters, its hooks, where it lies).

    Attributes:
        failed: whether a capture has failed; then none is tried again.
        kept: captured steps, and the tensors that they work on, by graph key.
    """

    def __init__(self, decode: str = "auto", most: int = 6) -> None:
        self.decode, self.most = decode, most
        self.failed = False
        self.kept: dict[Hashable, tuple[Callable[[], Tensor], Sequence[Tensor]]] = {}
        self._compiled: Any = None

    def stepping(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model as its steps run it."""
        if self.decode == "compiled" and self._compiled is None:
            as_eager: dict[str, Any] = {"emulate_precision_casts": True}  # rounds where eager does
            self._compiled = torch.compile(model, options=as_eager)
        return model if self._compiled is None else self._compiled

    def wanted(self, model: PreTrainedModel, steps: int) -> bool:
        """Whether a step, with so many to come, is to be captured."""
        worth = self.decode != "eager" and steps >= FIRST_STEPS + WORTH_STEPS
        return worth and self.is_possible(model)

    def is_possible(self, model: PreTrainedModel) -> bool:
        """Whether the model's steps can be captured: it lies on one GPU, no layer carries a state, which
        a capture would move on, and no capture has failed."""
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1 or devices.pop().type != "cuda":
            return False
        return not is_hybrid(model.config.get_text_config()) and not self.failed

    def recall(self, key: Hashable, tensors: Sequence[Tensor]) -> Callable[[], Tensor] | None:
        """The captured step of an earlier batch with this key (see `capture`); None if there is none.

        What `tensors` hold is copied to the memory of the earlier batch's tensors, which the captured
        step works on, and from here on `tensors` lie there.
        """
        replay, captured = self.kept.get(key, (None, ()))
        for earlier, now in zip(captured, tensors, strict=replay is not None):
            earlier.copy_(now)
            now.set_(earlier)  # type: ignore[call-overload]
        return replay

    def capture(
        self,
        model: PreTrainedModel,
        step: Callable[[], Tensor],
        key: Hashable,
        tensors: Sequence[Tensor],
    ) -> Callable[[], Tensor] | None:
        """A function that does what `step` does, by replaying it; None if it could not be captured.
        Capturing runs nothing.

        Args:
            step: works on the same tensors at every call, and returns the same tensor every time.
            key: equal for two batches if and only if their steps differ in nothing but what `tensors`
                hold, so that one's captured step serves the other.
            tensors: all tensors that the step reads and writes, but for the model's and those that they
                hold the addresses of.
        """
        graph = torch.cuda.CUDAGraph()
        device = next(model.parameters()).device
        # Without a stream of the model's own GPU, torch captures on one of the first current GPU:
        # then nothing of the step is recorded, and a replay does nothing.
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                    result = step()
            except Exception as failure:
                # Ending a capture that went wrong raises, and then torch does not leave its stream.
                torch.cuda.set_stream(before)
                if is_out_of_memory(failure):
                    self.kept.clear()
                    raise
                self.failed = True
                log.warning(
                    "%s decodes without CUDA graphs: %s", type(model).__name__, first_line(failure)
                )
                return None

        def replay() -> Tensor:
            graph.replay()
            return result

        self.kept[key] = replay, tensors
        if len(self.kept) > self.most:
            del self.kept[next(iter(self.kept))]
        return replay
