"""Decode steps as a captured CUDA graph: one launch a token in place of a thousand.

A step is captured after the first few have run as they are (so that every kernel is compiled and every
library ready), and replayed for the tokens that follow. That is sound because a step, once its rows are
fixed, does the same launches on the same buffers: the new token's id and position, the number of
entries of every row and the entries themselves are read and written on the device
(`kvbench.engine.decoding`). Where a step cannot be captured, decoding goes on step by step, and says so
once. Rows that decode alone take their steps apart from those of a graph
(`kvbench.engine.rows.decode_rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.faults import is_out_of_memory
from kvbench.engine.states import is_hybrid
from kvbench.errors import first_line
from kvbench.kv import KVError

log = logging.getLogger(__name__)

DECODES = ("auto", "eager", "graph")
"""How decode steps run: ``graph`` and ``auto`` capture them where that is possible."""

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
        raise KVError(f"decode is 'graph' and the device is {device}; allowed there: auto, eager")
    return str(value)


class StepGraphs:
    """How the decode steps of one model run.

    Args:
        decode: one of `DECODES`.

    Attributes:
        failed: whether a capture has failed; then none is tried again.
    """

    def __init__(self, decode: str = "auto") -> None:
        self.decode = decode
        self.failed = False

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

    def capture(
        self, model: PreTrainedModel, step: Callable[[], Tensor]
    ) -> Callable[[], Tensor] | None:
        """A function that does what `step` does, by replaying it; None if it could not be captured.
        Capturing runs nothing.

        Args:
            step: works on the same tensors at every call and returns one, always the same afterwards.
        """
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                result = step()
        except Exception as failure:
            # Ending a capture that went wrong raises, and then torch does not leave its stream.
            torch.cuda.set_stream(stream)
            if is_out_of_memory(failure):
                raise
            self.failed = True
            log.warning(
                "%s decodes without CUDA graphs: %s", type(model).__name__, first_line(failure)
            )
            return None

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
